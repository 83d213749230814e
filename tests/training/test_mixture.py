"""A run on several sources: equal samples on any number of ranks, a loss of each source, and
shares that a resume keeps.
"""

import json

import numpy as np
import pytest

from gpt2_triton.data.loader import MicroBatches
from gpt2_triton.data.shards import write_shard
from gpt2_triton.errors import CheckpointError
from gpt2_triton.training import setup
from tests.support import ranks
from tests.support.commands import run_tool, run_train
from tests.support.loop import final_bytes, records, train
from tests.support.tiny import merged, tiny_config


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Sources a, of small bytes, and b, of large ones."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(1)
    for name, low in (("a", 0), ("b", 128)):
        (tmp_path / name).mkdir()
        for split in ("train", "val"):
            tokens = (low + draw.integers(0, 128, 4000)).astype(np.uint16)
            write_shard(tmp_path / name / f"{split}_0.bin", tokens)


def mixed(train="a/train_*.bin=3,b/train_*.bin=1", val="a/val_*.bin=3,b/val_*.bin=1", **sections):
    base = dict(
        model=dict(n_layer=1),
        train=dict(steps=4, total_batch_tokens=64, batch_size=2),
        checkpoint=dict(every=2, keep=0),
        eval=dict(every=2, tokens=256),
        data=dict(train=train, val=val),
    )
    return tiny_config(**merged(base, sections))


def samples(config, size, first, steps):
    """Return the tokens of each step, of all ranks, in the order of the samples."""
    reader = setup.Mixture(setup.open_sources(config, "train"), 16, config.data.seed)
    micro, accumulation = 2, 2 // size
    found = []
    for step in range(steps):
        rows = {}
        for rank in range(size):
            batches = MicroBatches(reader, micro, accumulation, 256, rank=rank, ranks=size)
            at = first + 4 * step
            numbers = batches.first_samples_of_step(at)
            for number, packed in zip(numbers, batches.step(at), strict=True):
                rows[number] = packed[: micro * 16].numpy().copy()
        found.append(np.concatenate([rows[number] for number in sorted(rows)]))
    return np.stack(found)


def test_a_resume_on_other_ranks_reads_the_same_samples(data):
    config = mixed()
    whole = samples(config, 1, 0, 10)
    assert np.array_equal(samples(config, 2, 0, 10), whole)
    assert np.array_equal(samples(config, 2, 4 * 6, 4), whole[6:])
    share = (whole.reshape(-1, 16)[:, 0] < 128).mean()
    assert share == 0.75


def test_a_run_logs_a_loss_of_each_source(data, tmp_path, capsys):
    train(mixed(), tmp_path / "run")
    log = capsys.readouterr().out
    assert "data.train a: 75% of the sequences, 0.0482 epochs of 4,000 tokens" in log
    assert "data.train b: 25% of the sequences, 0.0161 epochs of 4,000 tokens" in log
    assert "data.val a: 75% of the loss, from 192 tokens" in log
    found = [record for record in records(tmp_path / "run") if "val_loss" in record]
    assert len(found) == 3
    for record in found:
        mean = 0.75 * record["val_loss_a"] + 0.25 * record["val_loss_b"]
        assert record["val_loss"] == pytest.approx(mean, rel=1e-12)


def test_a_mixture_resumes_with_its_bytes_and_its_weights(data, tmp_path):
    again = mixed().replace(train={"steps": 6})
    train(again, tmp_path / "whole")
    train(mixed(), tmp_path / "run")
    train(again, tmp_path / "run", resume=True)
    assert final_bytes(tmp_path / "run") == final_bytes(tmp_path / "whole")
    other = again.replace(train={"steps": 8}, data={"train": "a/train_*.bin=1,b/train_*.bin=1"})
    with pytest.raises(CheckpointError, match="is other data than before.*data.allow_changed") as e:
        train(other, tmp_path / "run", resume=True)
    assert "share 3/4" in str(e.value) and "share 1/2" in str(e.value)
    allowed = other.replace(data={"train": other.data.train, "allow_changed": True})
    train(allowed, tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_run_resumes_on_other_ranks(data, tmp_path):
    """Its losses are those of an unbroken run on one rank."""
    longer = mixed().replace(train={"steps": 6})
    train(longer, tmp_path / "whole")
    train(mixed(), tmp_path / "run")
    (tmp_path / "run").mkdir(exist_ok=True)
    codes = ranks.run(2, tmp_path / "run" / "stderr", train, longer, tmp_path / "run", True)
    assert [*codes] == [0, 0]
    for key in ("loss", "val_loss_a", "val_loss_b"):
        one, other = (
            [record[key] for record in records(tmp_path / name) if key in record]
            for name in ("whole", "run")
        )
        assert other == pytest.approx(one, rel=1e-5) and len(one) > 3


@pytest.mark.slow
def test_perplexity_of_a_run_has_a_line_for_each_source(data, tmp_path, capsys):
    train(mixed(), tmp_path / "run")
    capsys.readouterr()
    [*_, logged] = [record for record in records(tmp_path / "run") if "val_loss" in record]
    weighted = ["a/val_*.bin=6", "b/val_*.bin=2"]
    for shards in ([], [",".join(weighted)], weighted):
        assert run_tool(f"perplexity run {' '.join(shards)} --tokens 256 --json found.json") == 0
        lines = capsys.readouterr().out.splitlines()[-3:]
        assert [line.split(" in ")[0] for line in lines[:2]] == ["a: 192 tokens", "b: 64 tokens"]
        found = json.loads((tmp_path / "found.json").read_text())
        of_a, of_b = (found["sources"][name]["loss"] for name in "ab")
        assert found["loss"] == pytest.approx(0.75 * of_a + 0.25 * of_b)
        assert found["loss"] == pytest.approx(logged["val_loss"], rel=1e-6)
        assert lines[2] == f"all sources, weighted by share | loss {found['loss']:.4f}"


def test_print_config_has_the_epochs_of_each_source(data, tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(mixed().to_yaml())
    assert run_train("mine.yaml --print_config") == 0
    out = capsys.readouterr().out
    assert "train: a/train_*.bin=3,b/train_*.bin=1" in out
    assert "# data.train b: 25% of the sequences, 0.0161 epochs of 4,000 tokens" in out
