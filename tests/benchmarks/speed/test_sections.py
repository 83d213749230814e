"""Programs that fill sections of the record: text.py, sampling.py, epilogues.py and
qk_norm.py."""

import itertools
import json
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.record import Target
from benchmarks.speed import epilogues, qk_norm, sampling, text
from benchmarks.speed.sizes import work_of
from gpt2_triton.data.shards import write_shard
from gpt2_triton.model.init_weights import INIT_STD
from gpt2_triton.model.model import Model
from gpt2_triton.model.tables import param_views
from tests.conftest import DEVICE
from tests.support import reference


def test_losses_of_tokens_become_nats_per_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "EARLY", 0.5)
    shards = tmp_path / "data" / "my_gpt2_0123abcd"
    shards.mkdir(parents=True)
    write_shard(shards / "val_000000.bin", np.array([464, 3290, 464, 3290], np.uint16))  # The dog
    steps = [{"step": n, "loss": 5.0, "ms": 900.0 if n < 11 else 100.0} for n in range(1, 21)]
    losses = [{"step": step, "val_loss": loss} for step, loss in ((0, 9.1), (4, 8.4), (10, 7.0))]
    found = text.outcome([*steps, *losses, losses[0] | {"step": 20}], tmp_path, "gpt2")
    assert found["bytes_per_token"] == len("The dogThe dog") / 4
    assert found["nats"] == pytest.approx(7.0 / 3.5) and found["seconds"] == pytest.approx(1.0)
    assert found["early_nats"] == pytest.approx(8.4 / 3.5) and found["ms"] == 100.0
    means = dict[str, object]()
    for value in (1.0, 3.0):
        text.add(means, "ms", value)
    assert means == dict(ms_each=[1.0, 3.0], ms=2.0)


def test_encoding_is_in_megabytes_of_utf_8_per_second(monkeypatch):
    monkeypatch.setattr(text.timeit, "repeat", lambda *_, **__: [0.5, 0.25])
    assert text.mb_per_s(list, ["é" * 500_000]) == 4.0


def test_a_batch_is_in_milliseconds(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "SHARD_TOKENS", 2000)
    monkeypatch.setattr(text.timeit, "repeat", lambda *_, **__: [0.05, 0.04])  # of 20 batches
    out = tmp_path / "record.json"
    text.batches(target=Target(out, "abc1234"))
    section = json.loads(out.read_text())["batches"]
    assert (section["one.ms"], section["eight.ms"]) == (2.0, 2.0)


def test_a_program_that_fails_leaves_its_figures_out(tmp_path, monkeypatch):
    def run(command, **_):
        failed = command[-1] == "static"
        return SimpleNamespace(returncode=int(failed), stdout="" if failed else '{"1": 400.0}\n')

    monkeypatch.setattr(sampling.subprocess, "run", run)
    out = tmp_path / "record.json"
    assert sampling.sample(["llama:1b"], Target(out, "abc1234")) == 1
    section = json.loads(out.read_text())["sampling"]
    assert section.keys() == {"meta", "llama_1b.ours_1", "llama_1b.dynamic_1"}


def test_generated_tokens_are_of_all_texts_in_the_last_call(monkeypatch):
    clock = SimpleNamespace(perf_counter=iter([0.0, 9.0, 10.0, 12.0]).__next__)
    monkeypatch.setattr(sampling, "time", clock)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr(sampling, "ours", lambda *_: list)
    assert sampling.measure("d12", "ours", 32) == 32 * 256 / 2.0


def test_epilogues_are_shares_of_the_plain_products_of_their_shape(tmp_path, monkeypatch):
    shape = epilogues.Shape(32, 16, 16, (40, 48))
    pairs = epilogues.pairs(shape, DEVICE)
    calls = [call for pair in pairs.values() for call in pair]
    times = {call: 3.0 if i % 2 == 0 else 2.0 for i, call in enumerate(calls)}
    monkeypatch.setattr(epilogues, "SHAPES", {"d12": shape})
    monkeypatch.setattr(epilogues, "pairs", lambda shape: pairs)
    monkeypatch.setattr(epilogues, "median_ms", lambda call, milliseconds: times[call])
    out = tmp_path / "record.json"
    epilogues.measure(target=Target(out, "abc1234"))
    section = json.loads(out.read_text())["epilogues"]
    assert section.pop("meta")["commit"] == "abc1234"
    assert section == {f"{name}.d12": 0.5 for name in pairs}


def test_steps_of_programs_in_turns_are_compared_with_the_program_before_and_the_first():
    """Steps of 1.0 s, of 1.05 s, and of 1.1 s or 1.3 s in turn."""
    seconds = dict(plain=[1.0], larger_q_and_k=[1.05], normed=[1.1, 1.3])
    programs = {}
    for name, each in seconds.items():
        turn = itertools.cycle((1e3 * s, 700 * s) for s in each)
        programs[name] = SimpleNamespace(turn=turn.__next__)
    rows = qk_norm.in_turns(programs)
    assert rows["plain"] == dict(ms=1000.0, joules=700.0)
    assert [rows["normed"][key] for key in ("ms", "joules")] == pytest.approx([1200, 840])
    assert rows["larger_q_and_k"]["longer"] == pytest.approx(0.05)
    for key, first in (("longer", 1.05), ("than_first", 1.0)):
        ratios = [1.1 / first, 1.3 / first] * 3
        half = 2.571 * statistics.stdev(ratios) / 6**0.5
        found = rows["normed"][key], rows["normed"][f"{key}_half_width"]
        assert found == pytest.approx((1.2 / first - 1, half), rel=1e-3)


def test_enlarged_queries_and_keys_have_rms_1():
    keys = ("--model.n_layer", "1", "--train.seq_len", "64", "--train.total_batch_tokens", "64")
    model = Model(work_of("llama:c768", 1, keys=keys).config(), reference, "cpu")
    model.initialise(0)
    qk_norm.enlarge_queries_and_keys(model)
    (weight,) = param_views(model.A.Params, model.state.params, model.dims).qkvw
    inputs = torch.randn(64, 768, generator=torch.Generator().manual_seed(0))
    out = inputs @ weight.float().T
    q, k, v = out.split([model.dims["Cq"], model.dims["Ckv"], model.dims["Ckv"]], 1)
    rms = [part.square().mean().sqrt().item() for part in (q, k, v)]
    assert rms == pytest.approx([1, 1, INIT_STD * 768**0.5], rel=0.02)
