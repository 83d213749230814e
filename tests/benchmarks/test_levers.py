"""benchmarks/levers.py: what each lever changes in an update or in the initial weights, and a run with one."""

import copy
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton.language as tl

from benchmarks import levers, series
from gpt2_triton.data.shards import write_shard
from gpt2_triton.kernels import device_math, fp8, muon
from gpt2_triton.model import gpt2
from gpt2_triton.model.buffers import param_views
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.step_queue import StepQueue
from tests.benchmarks.test_series import TINY
from tests.kernels.test_adamw import Adam
from tests.kernels.test_muon import updated
from tests.support.tiny import packed_batch, tiny_model

# a kernel that was compiled before a lever keeps its update: a lever belongs to a process of its own
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter, which compiles nothing")
LR, DECAY = 1e-2, 0.5  # decay of 0.005 w in a step: far above the rounding of fp32


@pytest.fixture
def restored(monkeypatch):
    """Undo what a lever replaces."""
    for module, name in (
        (device_math, "decayed_update"),
        (muon, "decayed_update"),
        (gpt2, "init_weights"),
        (fp8, "to_e4m3"),
        (StepQueue, "launch"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(levers, "PEAK", levers.PEAK)


def adamw_change(rng, **more):
    """Return w, and what a first step of AdamW with DECAY, and one without, subtract from it."""
    w, g = rng(1000), rng(1000)
    with_decay, without = (w - Adam(w, "fp32", decay=decay, **more).step(g, lr=LR).w for decay in (DECAY, 0.0))
    return w, with_decay, without


def assert_decay(found, want):
    torch.testing.assert_close(found, want, rtol=0, atol=2e-6)  # differences of numbers up to 4 in fp32


@no_gpu
def test_cautious_decay_is_only_towards_zero(rng, restored):
    levers.LEVERS["cautious"](["quickstart"])
    w, with_decay, without = adamw_change(rng)
    towards = without * w > 0
    assert 300 < towards.sum() < 700
    assert_decay(with_decay - without, torch.where(towards, LR * DECAY * w, 0.0))


@no_gpu
def test_cautious_decay_of_muon(rng, restored):
    w, x = rng(2, 700, dtype=torch.bfloat16).float(), rng(2, 700)
    plain, _ = updated(w, x, "fp32")
    levers.LEVERS["cautious"](["quickstart"])
    cautious, _ = updated(w, x, "fp32")
    lr, decay = 0.02, 0.1  # those of `updated`
    assert_decay(cautious - plain, torch.where(x * w > 0, 0.0, lr * decay * w))


@no_gpu
@pytest.mark.parametrize(
    "peak, lr_factor, share", [(LR, 1.0, 1.0), (4 * LR, 1.0, 0.25), (4 * LR, 2.0, 0.5), (LR, 2.0, 1.0)]
)
def test_decay_falls_with_the_learning_rate(rng, restored, peak, lr_factor, share):
    levers.LEVERS["decay_schedule"](["quickstart", "--run_dir", "x", "--optim.lr", str(peak)])
    assert levers.PEAK == tl.constexpr(peak)
    w, with_decay, without = adamw_change(rng, lr_factor=lr_factor)
    assert_decay(with_decay - without, share * lr_factor * LR * DECAY * w)


@pytest.mark.parametrize("storage", [dict(dtype="fp32"), dict(dtype="bf16")])
def test_residual_projections_begin_at_zero(storage, restored):
    sections = dict(train=storage, optim=dict(master="fp32" if storage["dtype"] == "bf16" else "none"))
    plain, _ = tiny_model(**sections)
    levers.LEVERS["zero_residual"](["quickstart"])
    model, _ = tiny_model(**sections)
    assert (model.state.master_low is None) == (storage["dtype"] == "fp32")
    for ours, theirs in zip((model.state.params, model.state.master_low), (plain.state.params, plain.state.master_low)):
        if ours is None:
            continue
        ours, theirs = (param_views(flat, model.dims) for flat in (ours, theirs))
        assert not any(w.any() for w in (*ours.attprojw, *ours.fcprojw)) and theirs.fcprojw[1].any()
        for name in ("wte", "wpe", "qkvw", "qkvb", "fcw", "lnw"):
            assert all(torch.equal(a, b) for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True))


def test_half_of_the_batch_in_half_of_the_steps(restored):
    """The mean loss of a step is over the micro-batches that it takes; those of a whole batch are two here."""
    levers.LEVERS["batch_warmup"](["quickstart"])
    model, config = tiny_model(train=dict(steps=4, total_batch_tokens=64))
    assert model.shape.accumulation == 2
    batches = [packed_batch(config, seed) for seed in range(6)]
    given, queue = iter(batches), StepQueue(model, SimpleNamespace(heartbeat=lambda _: None))
    losses, taken = [], []
    for step in range(4):
        queue.launch(step, step_inputs(step, config, 1 / 64), given, with_stats=False)
        losses.append(queue.finish().loss)
        taken.append(6 - len(list(itertools.islice(copy.copy(given), 6))))
    assert taken == [1, 2, 4, 6] and model.shape.accumulation == 2
    assert all(5 < loss < 6.5 for loss in losses)  # near ln 256 = 5.5: twice or half of it is a wrong scale


def test_an_unknown_lever_is_refused(capsys):
    assert levers.main(["bold", "quickstart"]) == 2
    usage = "usage: python -m benchmarks.levers cautious|decay_schedule|zero_residual|batch_warmup|bf16_at_end "
    assert usage in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["cautious", "--help"]])
def test_help_describes_every_lever(words, capsys):
    assert levers.main(words) == 0
    out, err = capsys.readouterr()
    assert err == "" and all(f"\n    {name} " in out for name in levers.LEVERS)


@pytest.mark.parametrize(
    "words, message",
    [
        (["decay_schedule", "nosuch"], "error: nosuch: neither a file nor a recipe; "),
        (["bf16_at_end", "quickstart"], "error: bf16_at_end: needs --run_dir, "),
    ],
)
def test_wrong_words_of_a_lever_are_one_line(words, message, restored, capsys):
    assert levers.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


@pytest.mark.slow
def test_a_series_with_levers_and_pytorch(tmp_path):
    """All begin at the same loss on the same batches; PyTorch's differs by the rounding of bf16 autocast."""
    arms = """
  plain: {}
  cautious: {program: benchmarks.levers cautious}
  zero: {program: benchmarks.levers zero_residual}
  PyTorch: {program: benchmarks.torch_train}
  nothing rounded: {program: benchmarks.torch_train --rounding none}
  all rounded: {program: "benchmarks.torch_train --rounding weights,activations,gradients"}
"""
    (tmp_path / "tiny.yaml").write_text(TINY.split("seeds: 2")[0] + f"seeds: 1\narms:{arms}")
    for name in ("train_000000", "val_000000"):
        write_shard(tmp_path / f"{name}.bin", np.random.default_rng(0).integers(0, 250, 4000).astype(np.uint16))
    words = [str(tmp_path / "tiny.yaml"), "--data", str(tmp_path), "--out", str(tmp_path / "r.jsonl")]
    assert series.main(words) == 0
    rows = {row["arm"]: row for row in map(json.loads, (tmp_path / "r.jsonl").read_text().splitlines())}
    curves = {arm: row["curve"] for arm, row in rows.items()}
    assert curves["plain"][0] == curves["cautious"][0] != curves["zero"][0]
    assert rows["plain"]["val_loss"] != rows["cautious"]["val_loss"]
    for arm in ("PyTorch", "nothing rounded", "all rounded"):
        np.testing.assert_allclose(curves[arm], curves["plain"], rtol=5e-3)  # an ulp of bf16 is 4e-3
    assert curves["nothing rounded"] != curves["all rounded"]
    assert abs(rows["PyTorch"]["val_loss"] - rows["plain"]["val_loss"]) < 5e-3 * rows["plain"]["val_loss"]


@pytest.mark.slow
def test_a_run_in_fp8_ends_in_bf16(tmp_path):
    """It continues after 9 of 10 steps, or the next, with the schedule of all."""
    write_shard(tmp_path / "train.bin", np.random.default_rng(0).integers(0, 250, 4000).astype(np.uint16))
    words = "--train.batch_size 2 --train.seq_len 16 --train.total_batch_tokens 32 --train.steps 20 --optim.warmup 2"
    words += (
        " --model.n_layer 1 --model.n_head 1 --model.n_embd 64 --model.block_size 16 --eval.every 0 --sample.every 0"
    )
    words += " --checkpoint.every 0 --train.dtype bf16 --train.precision fp8"
    words += f" --data.train {tmp_path}/train.bin --data.val {tmp_path}/train.bin --run_dir {tmp_path}/run"
    command = [sys.executable, "-m", "benchmarks.levers", "bf16_at_end", "configs/quickstart.yaml", *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["starts"]
    assert [start["precision"]["products"] for start in starts] == ["fp8", "bf16"]
    assert 18 <= starts[1]["after_step"] < 20
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 21))
