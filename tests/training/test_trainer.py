"""The promises of the training loop: same bytes twice, same bytes resumed, known losses, nothing lost when numbers
go bad.
"""

import hashlib
import json
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from gpt2_triton.checkpoint import checkpoint
from gpt2_triton.checkpoint.async_save import AsyncCheckpointer
from gpt2_triton.errors import CheckpointError, NonFiniteError
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.training.logger import Logger
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.trainer import Trainer, make_trainer, train
from tests.support.tiny import packed_batch, tiny_config, tiny_model

TIMINGS = {"ms", "tok_s", "mfu"}
STEPS = 5
GOLDEN = [5.587525, 5.578734, 5.014409, 4.873920, 4.126922]


def run_config(**sections):
    every = dict(eval=dict(every=2, tokens=64), checkpoint=dict(every=0, keep=0), sample=dict(every=3, tokens=3))
    return tiny_config(
        **(every | sections | {"train": dict(steps=STEPS, total_batch_tokens=64) | sections.get("train", {})})
    )


def final_bytes(run):
    step_dir = checkpoint.find(run)
    return step_dir.name, hashlib.sha256((step_dir / "rank_00000.safetensors").read_bytes()).hexdigest()


def metrics(run):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMINGS} for record in records]


def stop_after(monkeypatch, step):
    """As if SIGTERM arrived while step number `step` was running."""
    original = Trainer._train_step

    def interrupted(self, index):
        original(self, index)
        if index + 1 == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Trainer, "_train_step", interrupted)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken")
    assert train(run_config(), run, resume=False) == 0
    return run


def test_two_runs_give_the_same_bytes(unbroken, tmp_path):
    assert train(run_config(), tmp_path, resume=False) == 0
    assert final_bytes(tmp_path) == final_bytes(unbroken)
    assert metrics(tmp_path) == metrics(unbroken)


@pytest.mark.parametrize("k", range(1, STEPS))
def test_stopping_at_any_step_and_resuming_gives_the_bytes_of_the_unbroken_run(unbroken, tmp_path, monkeypatch, k):
    with monkeypatch.context() as patch:
        stop_after(patch, k)
        assert train(run_config(), tmp_path, resume=False) == 128 + signal.SIGTERM
    assert final_bytes(tmp_path)[0] == f"step_{k:08d}"
    assert train(run_config(), tmp_path, resume=True) == 0
    assert final_bytes(tmp_path) == final_bytes(unbroken)
    assert metrics(tmp_path) == metrics(unbroken)


@pytest.mark.parametrize("master", ["none", "fp32"])
def test_resume_is_exact_in_bf16(tmp_path, monkeypatch, master):
    """bf16 weights are rounded with noise; its key is (seed, step, element), so a resumed run rounds alike."""
    config = run_config(train=dict(dtype="bf16", steps=3), optim=dict(master=master))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(config, whole, resume=False) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        train(config, broken, resume=False)
    assert train(config, broken, resume=True) == 0
    assert final_bytes(broken) == final_bytes(whole)


def test_a_run_says_where_it_writes_and_how_it_goes_on(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        train(run_config(), tmp_path, resume=False)
    lines = capsys.readouterr().out.splitlines()
    assert f"run directory {tmp_path}" in lines[:2]  # on a GPU after the kernels' line
    assert lines[-1] == f"stopped after step 1; the same command with --run_dir {tmp_path} --resume continues"


def test_a_run_says_how_often_it_sees_its_data(tmp_path, capsys):
    """5 steps of 4 sequences."""
    trainer = make_trainer(run_config(), tmp_path)
    sequences = trainer.data.train.windows.n
    trainer.close()
    said = f"{sequences:,} training sequences of 16 tokens; 5 steps are {20 / sequences:.3g} epochs"
    assert said in capsys.readouterr().out.splitlines()


def test_resuming_a_finished_run_changes_nothing(unbroken, capsys):
    before = final_bytes(unbroken), metrics(unbroken)
    assert train(run_config(), unbroken, resume=True) == 0
    assert capsys.readouterr().out.endswith(f"all {STEPS} steps are done; raise train.steps to continue\n")
    assert (final_bytes(unbroken), metrics(unbroken)) == before


def test_accumulation_gives_the_losses_of_the_large_batch(unbroken, tmp_path):
    """4 sequences at once or 2 and 2: the same samples, and sums that differ in fp32 rounding only (measured 1e-7)."""
    assert train(run_config(train=dict(batch_size=4)), tmp_path, resume=False) == 0
    whole = [r["loss"] for r in metrics(tmp_path) if "loss" in r]
    halves = [r["loss"] for r in metrics(unbroken) if "loss" in r]
    assert whole == pytest.approx(halves, rel=2e-6)


def test_non_finite_steps_are_skipped_counted_and_finally_stop_the_run(tmp_path, monkeypatch):
    config = run_config(train=dict(skip_limit=2))
    original = Trainer._train_step

    def poisoned_from_step_1(self, index):
        if index == 1:
            self.model.K.fill(self.model.train_view.w.lnb[0], float("nan"))
        original(self, index)

    monkeypatch.setattr(Trainer, "_train_step", poisoned_from_step_1)
    with pytest.raises(NonFiniteError, match="step 3: loss or gradient norm was not finite for 2 steps in a row"):
        train(config, tmp_path, resume=False)
    assert [r["skipped"] for r in metrics(tmp_path) if r.get("step", 0) > 1 and "loss" in r] == [True, True]


def test_a_step_is_reported_when_the_next_is_under_way_or_something_else_is_due(tmp_path, monkeypatch):
    """The host waits for a step only after it has launched the next; what reads the weights comes after its report."""
    seen = []

    def watch(owner, method):
        original = getattr(owner, method)

        def watched(self, *args, **keywords):
            seen.append(" ".join([method, *map(str, args[:1])]))
            return original(self, *args, **keywords)

        monkeypatch.setattr(owner, method, watched)

    for owner, method in (
        (GPT2, "end_step"), (Logger, "step"), (Logger, "validation"), (Logger, "sample"), (AsyncCheckpointer, "submit"),
    ):  # fmt: skip
        watch(owner, method)
    train_section = dict(steps=4, total_batch_tokens=32)
    config = run_config(train=train_section, eval=dict(every=4, tokens=64), checkpoint=dict(every=2, keep=0))
    train(config, tmp_path, resume=False)
    assert seen == [
        "validation 0", "end_step", "end_step", "step 1", "step 2", "submit 2", "end_step", "step 3", "sample 3",
        "end_step", "step 4", "validation 4", "sample 4", "submit 4",
    ]  # fmt: skip


def test_an_exception_does_not_lose_the_line_of_the_step_in_flight(tmp_path, monkeypatch):
    """Step 2 runs on the device while the host fails to fetch the batch of step 3."""
    original = Trainer._train_step

    def failing(self, index):
        if index == 2:
            raise OSError("the disk of the shards is gone")
        original(self, index)

    monkeypatch.setattr(Trainer, "_train_step", failing)
    with pytest.raises(OSError, match="gone"):
        train(run_config(eval=dict(every=0)), tmp_path, resume=False)
    assert [r["step"] for r in metrics(tmp_path) if "loss" in r] == [1, 2]


def test_run_json_tells_where_the_numbers_come_from(unbroken):
    start = json.loads((unbroken / "run.json").read_text())["starts"][0]
    assert start["after_step"] == 0 and start["plan"]["arena_bytes"] > 0
    assert start["schedule"]["steps"] == STEPS and start["device"]


def test_golden_losses():
    """Five steps give the losses that tests/support/reference.py computes in float64 from the same initial weights.

    They also pin the initial weights, which come from Philox and are the same on every machine.  The bound of 1e-5
    is 16 times what fp32 was measured to lose here.
    """
    model, config = tiny_model(train=dict(steps=5), optim=dict(lr=1e-2))
    losses = []
    for step in range(5):
        model.begin_step(step_inputs(step, config, 1 / config.total_batch_tokens), step, 1)
        model.micro_step(packed_batch(config, seed=step % 2), first=True)
        losses.append(model.end_step().result().loss)
    assert losses == pytest.approx(GOLDEN, rel=1e-5)


def test_init_from_a_checkpoint_takes_its_weights_and_nothing_else(unbroken, tmp_path):
    config = run_config(init_from=f"checkpoint:{unbroken}")
    trainer = make_trainer(config, tmp_path)
    try:
        _, saved = checkpoint.load(checkpoint.find(unbroken))
        assert torch.equal(trainer.model.state.params.cpu(), saved["params"])
        assert not trainer.model.state.m.cpu().any() and trainer.state.step == 0
    finally:
        trainer.close()


def test_init_from_another_model_is_refused(unbroken, tmp_path):
    config = run_config(model=dict(n_layer=1), init_from=f"checkpoint:{unbroken}")
    with pytest.raises(CheckpointError, match=r"model.n_layer 2, this run 1"):
        make_trainer(config, tmp_path)


def test_a_run_that_could_not_save_does_not_begin(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match="no room for a checkpoint: .* bytes needed, 1,000 free; make"):
        train(run_config(), tmp_path / "run", resume=False)
    assert not (tmp_path / "run").exists()
