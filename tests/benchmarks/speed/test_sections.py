"""Programs that fill sections of the record: text.py, sampling.py and
epilogues.py of benchmarks/speed.
"""

import json
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.speed import epilogues, sampling, text
from gpt2_triton.data.shards import write_shard

COMMIT = "abc1234"


def test_losses_of_tokens_become_nats_per_byte(tmp_path):
    shards = tmp_path / "data" / "my_gpt2_0123abcd"
    shards.mkdir(parents=True)
    write_shard(shards / "val_000000.bin", np.array([464, 3290, 464, 3290], np.uint16))  # The dog
    steps = [{"step": step, "loss": 5.0, "ms": 100.0} for step in range(1, 21)]
    losses = [{"step": step, "val_loss": loss} for step, loss in ((0, 9.1), (4, 8.4), (10, 7.0))]
    found = text.outcome([*steps, *losses, losses[0] | {"step": 20}], tmp_path, "gpt2", 0.5)
    assert found["bytes_per_token"] == len("The dogThe dog") / 4
    assert found["nats"] == pytest.approx(7.0 / 3.5) and found["seconds"] == pytest.approx(1.0)
    assert found["early_nats"] == pytest.approx(8.4 / 3.5) and found["ms"] == 100.0


@pytest.mark.slow
def test_tokenizers_are_timed_in_processes_beside_their_library(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 2000)
    monkeypatch.setattr(text, "PROCESSES", 2)
    out = tmp_path / "record.json"
    out.write_text(json.dumps({"h100": {"meta": {}}}))
    text.encode("gpt2", out=out, commit=COMMIT)
    record = json.loads(out.read_text())
    assert {"h100", "encode"} == record.keys() and record["encode"]["meta"]["commit"] == COMMIT
    figures = {f"gpt2.{who}_{count}" for who in ("ours", "library") for count in (1, 2)}
    assert record["encode"].keys() == figures | {"meta"}
    assert all(record["encode"][key] > 0 for key in figures)


def test_a_program_that_fails_leaves_its_figures_out(tmp_path, monkeypatch, capsys):
    def run(command, **_):
        *_, size, program = command
        failed = program == "static"
        rates = "" if failed else '{"1": 400.0}\n{"32": 9000.0}\n'
        return SimpleNamespace(returncode=int(failed), stdout=rates)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "record.json"
    assert sampling.sample(["llama:1b"], out, COMMIT) == 1
    section = json.loads(out.read_text())["sampling"]
    rates = {"ours_1": 400.0, "ours_32": 9000.0, "dynamic_1": 400.0, "dynamic_32": 9000.0}
    assert section == {"meta": section["meta"]} | {f"llama_1b.{k}": v for k, v in rates.items()}
    assert "llama:1b static exit code 1" in capsys.readouterr().out


def test_epilogues_are_shares_of_the_plain_products_of_their_shape(tmp_path, monkeypatch):
    shape = epilogues.Shape(32, 16, 16, (40, 48))
    pairs = epilogues.pairs(shape, "cpu")
    calls = [call for pair in pairs.values() for call in pair]
    for call in calls:
        call()
    times = {call: 3.0 if i % 2 == 0 else 2.0 for i, call in enumerate(calls)}
    monkeypatch.setattr(epilogues, "SHAPES", {"d12": shape})
    monkeypatch.setattr(epilogues, "pairs", lambda shape: pairs)
    monkeypatch.setattr(epilogues, "median_ms", lambda call, milliseconds: times[call])
    out = tmp_path / "record.json"
    epilogues.measure(out, commit=COMMIT)
    section = json.loads(out.read_text())["epilogues"]
    assert section.pop("meta")["commit"] == COMMIT
    assert section == {f"{name}.d12": 0.5 for name in pairs}
