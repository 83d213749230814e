"""Programs that fill sections of the record: text.py, sampling.py, epilogues.py and
qk_norm.py."""

import itertools
import json
import statistics
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from benchmarks.record import Target
from benchmarks.speed import epilogues, qk_norm, sampling, text
from gpt2_triton.data.shards import write_shard
from tests.conftest import DEVICE


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


def test_qk_norm_compares_steps_and_operations_in_turns(tmp_path, monkeypatch):
    """Without QK-norm a step takes 1.0 s, with it 1.1 s or 1.3 s in turn."""
    turns = {False: itertools.repeat(1.0), True: itertools.cycle([1.1, 1.3])}

    def run(model, packed, numbers):
        counted = [SimpleNamespace(seconds=next(turns[model.normed]))] * (qk_norm.STEPS - 2)
        return [SimpleNamespace(seconds=9e9)] * 2 + counted

    def operations(work, steps):
        ms = 3.0 if work.config().model.qk_norm else 2.0
        names = ("matmul_rope", "matmul_rope", "attention_bwd", "adamw")
        return [SimpleNamespace(name=name, spans=[()] * 12, ms=[ms] * 24) for name in names], None

    def model(config, *_):
        return MagicMock(normed=config.model.qk_norm)

    monkeypatch.setattr(qk_norm, "Model", model)
    for name in ("compile_run", "begun", "packed_batch"):
        monkeypatch.setattr(qk_norm, name, MagicMock())
    monkeypatch.setattr(qk_norm, "run_steps", run)
    monkeypatch.setattr(qk_norm.ops, "measure", operations)
    out = tmp_path / "record.json"
    qk_norm.measure(target=Target(out, "abc1234"))
    section = json.loads(out.read_text())["qk_norm"]
    half = 2.365 * statistics.stdev([0.1, 0.3] * 4) / 8**0.5
    step = [section[f"fp8.{key}"] for key in ("ms", "normed_ms", "longer", "half_width")]
    assert step == pytest.approx([1000, 1200, 0.2, half], rel=1e-3)
    product = [section[f"bf16_product_of_qkv.{key}"] for key in ("ms", "normed_ms", "longer")]
    assert product == [48.0, 72.0, 0.5]
    assert section["bf16_attention_backward.normed_ms"] == 36.0
