"""The training loop: the same bytes twice and when resumed, known losses, and non-finite steps."""

import errno
import itertools
import json
import math
import os
import re
import shutil
import signal
from types import SimpleNamespace

import pytest
import torch

from gpt2_triton.checkpoint.async_save import AsyncCheckpointer
from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.checkpoint.save import FILES_BYTES, Retention, save_checkpoint
from gpt2_triton.distributed.watchdog import SAVING
from gpt2_triton.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from gpt2_triton.model.fp8 import HEAD_SCALES, SCALES
from gpt2_triton.model.model import Model
from gpt2_triton.training import recovery, tasks
from gpt2_triton.training.logger import Logger
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.metrics import METRICS
from gpt2_triton.training.preemption import PREEMPTED
from tests.support.checkpoints import load_checkpoint, record_syncs
from tests.support.loop import (
    before_steps,
    final_bytes,
    losses,
    make_trainer,
    outcome,
    poison,
    records,
    train,
    train_until,
)
from tests.support.models import calibrate
from tests.support.tiny import merged, packed_batch, tiny_config, tiny_model

STEPS = 5
GOLDEN = [5.587525, 5.578734, 5.014409, 4.873920, 4.126922]


def run_config(**sections):
    """One layer, two micro-steps, validation every 2 and a sample every 3 of 5
    steps; `sections` override.
    """
    base = dict(
        model=dict(n_layer=1),
        train=dict(steps=STEPS, total_batch_tokens=64),
        eval=dict(every=2, tokens=64),
        checkpoint=dict(every=0, keep=0),
        sample=dict(every=3, tokens=3),
    )
    return tiny_config(**merged(base, sections))


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken")
    assert train(run_config(), run) == 0
    return run


@pytest.mark.parametrize("k", range(1, STEPS))
def test_resume_after_any_step_gives_the_bytes_of_the_unbroken_run(unbroken, tmp_path, k):
    assert train_until(k, run_config(), tmp_path) == 128 + signal.SIGTERM
    assert final_bytes(tmp_path)[0] == f"step_{k:08d}"
    assert train(run_config(), tmp_path, resume=True) == 0
    assert outcome(tmp_path) == outcome(unbroken)


def unreadable(*_):
    raise DataError("cut off")


def test_resumed_run_does_once_what_the_stop_left_out(unbroken, tmp_path, monkeypatch, capfd):
    """The signal comes in step 2, before a validation and a save; the first
    resume fails before it saves.
    """
    train_until(2, run_config(checkpoint=dict(every=2)), tmp_path)
    assert [record["step"] for record in records(tmp_path) if "val_loss" in record] == [0]
    assert load_checkpoint(find_checkpoint(tmp_path))[0]["left_out"] == ["eval.every"]
    line = "stopping after this step; a second signal after 1 s ends at once without a checkpoint"
    assert line in capfd.readouterr().out.splitlines()
    with monkeypatch.context() as patch, pytest.raises(DataError):
        before_steps(unreadable, patch)
        train(run_config(), tmp_path, resume=True)
    assert train(run_config(), tmp_path, resume=True) == 0
    assert outcome(tmp_path) == outcome(unbroken)


@pytest.mark.parametrize("validated", [0, 2, 4, STEPS])
def test_signal_within_a_validation_breaks_it_off_and_the_resumed_run_repeats_it(
    unbroken, tmp_path, monkeypatch, validated
):
    """Step 0 is not saved; after the last step only the validation is left."""
    with monkeypatch.context() as patch:
        signal_within_validation(patch, validated)
        assert train(run_config(), tmp_path) == 128 + signal.SIGTERM
    assert (tmp_path / PREEMPTED).exists()
    assert (validated, "val_loss") not in [
        (record["step"], key) for record in records(tmp_path) for key in record
    ]
    if validated:
        state, _ = load_checkpoint(find_checkpoint(tmp_path))
        assert (state["step"], state["left_out"][0]) == (validated, "eval.every")
    assert train(run_config(), tmp_path, resume=True) == 0
    assert outcome(tmp_path) == outcome(unbroken)


def signal_within_validation(patch, step):
    """Raise SIGTERM in the first of the two batches of the validation after `step`."""
    evaluate, calls = Model.evaluate, itertools.count()

    def interrupted(self, ids, *given):
        # text, not the zeros for which kernels are compiled
        call = next(calls) if ids.any() else None
        if call == 2 * -(-step // 2):  # a validation after steps 0, 2, 4 and 5
            signal.raise_signal(signal.SIGTERM)
        return evaluate(self, ids, *given)

    patch.setattr(Model, "evaluate", interrupted)


def test_a_left_out_task_that_is_gone_or_turned_off_is_passed_over(tmp_path):
    trainer = make_trainer(run_config(), tmp_path)
    tasks.call(trainer, ["eval.tasks_every", "eval.hellaswag_every"], 0)
    trainer.close()


def test_time_limit_saves_and_the_resumed_run_has_the_bytes_of_the_unbroken_one(
    unbroken, tmp_path, monkeypatch
):
    """The limit passes within the second step."""
    limits = []

    def pass_limit(trainer, index):
        limits.append(trainer.ends_at - trainer.signals.made_at)
        trainer.ends_at = 0.0 if index else math.inf

    with monkeypatch.context() as patch:
        before_steps(pass_limit, patch)
        assert train(run_config(train=dict(max_minutes=1)), tmp_path) == 0
    assert limits[0] == pytest.approx(60)
    assert final_bytes(tmp_path)[0] == "step_00000002" and (tmp_path / PREEMPTED).exists()
    assert train(run_config(), tmp_path, resume=True) == 0
    assert not (tmp_path / PREEMPTED).exists()
    assert outcome(tmp_path) == outcome(unbroken)


def test_shifted_windows_and_decay_by_tau_change_a_run_and_resume_exactly(unbroken, tmp_path):
    fixed, config = (
        losses(unbroken),
        run_config(data=dict(windows="shifted"), optim=dict(weight_decay=None, tau=2.0)),
    )
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(config, whole) == 0 and losses(whole)[0] != fixed[0]
    train_until(2, config, broken)
    assert train(config, broken, resume=True) == 0
    assert outcome(broken) == outcome(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim, model",
    [
        (dict(master="none"), dict(dropout=0.1)),
        (dict(master="fp32", v="bf16"), {}),
        (dict(name="muon"), dict(arch="llama", head_dim=128, n_inner=96, qk_norm=True)),
    ],
    ids=str,
)
def test_resume_is_exact_in_bf16(tmp_path, optim, model):
    """Noise and masks are keyed by (seed, step, element), so a resumed run draws the same."""
    sections = dict(model=dict(n_layer=1) | model, optim=optim)
    config = run_config(train=dict(dtype="bf16", steps=2, total_batch_tokens=32), **sections)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert train(config, whole) == 0
    train_until(1, config, broken)
    assert train(config, broken, resume=True) == 0
    assert final_bytes(broken) == final_bytes(whole)


def test_closing_waits_for_a_save_in_the_phase_of_saving(tmp_path, monkeypatch):
    """Else the watchdog of several ranks, which does not count the save's bytes
    then, would end it as a hang.
    """
    made, phases = make_trainer(run_config(), tmp_path), []
    monkeypatch.setattr(made.checkpointer, "wait", lambda *_: phases.append(made.watchdog._phase))
    made.close()
    assert phases == [SAVING]


def test_init_from_of_a_resume_is_not_used_and_not_recorded(tmp_path, capsys):
    for steps, source in ((1, "scratch"), (2, "checkpoint:nowhere")):
        config = run_config(train=dict(steps=steps), eval=dict(every=0)).model_copy(
            update={"init_from": source}
        )
        assert train(config, tmp_path, resume=steps > 1) == 0
    assert "init_from checkpoint:nowhere is not used: the run continues" in capsys.readouterr().out
    assert "init_from: scratch\n" in (tmp_path / "config.yaml").read_text()


@pytest.mark.slow
def test_fp8_run_resumes_exactly_and_changes_its_precision_on_resume(tmp_path):
    """With the bytes of the unbroken run; in bf16 without scales, which a return to fp8
    finds again, as in run.json.
    """

    def config(precision="fp8", steps=3):
        sections = dict(
            train=dict(dtype="bf16", precision=precision, steps=steps), fp8=dict(keep_bf16="")
        )
        return run_config(**sections, checkpoint=dict(every=1, keep=0), log=dict(stats_every=2))

    def resumed(name, *configs):
        shutil.copytree(tmp_path / "unbroken", tmp_path / name)
        for step in (2, 3):
            shutil.rmtree(tmp_path / name / "checkpoints" / f"step_{step:08d}")
        for each in configs:
            train(each, tmp_path / name, resume=True)
        return tmp_path / name

    train(config(), tmp_path / "unbroken", False)
    again = resumed("resumed", config("auto"))  # auto keeps what the run has
    assert outcome(again) == outcome(tmp_path / "unbroken")
    validations = [r for r in records(again) if "val_loss" in r]
    assert len(validations) == 3 and all(
        0 < abs(r["val_loss"] - r["val_loss_fp8"]) < 0.05 for r in validations
    )
    stats = [json.loads(line) for line in (again / "stats.jsonl").read_text().splitlines()]
    assert all(
        0 <= share < 0.01
        for r in stats
        for name in r["fp8"].values()
        for share in name["saturated"]
    )
    assert stats and all(r["fp8"].keys() == {*SCALES, *HEAD_SCALES} for r in stats)

    changed = resumed("changed", config("bf16", 2), config())
    starts = [
        start["precision"] for start in json.loads((changed / "run.json").read_text())["starts"]
    ]
    assert [(s["products"], s["calibrated"]) for s in starts] == [
        ("fp8", True),
        ("bf16", False),
        ("fp8", True),
    ]
    tensors = [
        load_checkpoint(changed / "checkpoints" / f"step_{step:08d}")[1] for step in (1, 2, 3)
    ]
    assert ["scale" in found for found in tensors] == [True, False, True]
    # of the calibration and of one step
    assert (tensors[2]["history"] > 0).sum(1).tolist() == [2] * 14


def test_train_prints_its_directory_its_checkpoint_and_how_to_continue(
    tmp_path, monkeypatch, capsys
):
    with monkeypatch.context() as patch:
        events = record_syncs(patch)
        train_until(2, run_config(checkpoint=dict(every=1)), tmp_path)
    assert events.count(str(tmp_path / METRICS)) == 2  # no checkpoint is ahead of the log
    lines = capsys.readouterr().out.splitlines()
    assert f"run directory {tmp_path}" in lines[:2]  # on a GPU after the kernels' line
    saved = [f"checkpoint {tmp_path / 'checkpoints'}/step_0000000{step}" for step in (1, 2)]
    assert (
        saved == [line for line in lines if line.startswith("checkpoint ")]
        and lines[-2] == saved[-1]
    )
    assert f"--run_dir {tmp_path} --resume continues" in lines[-1]


def test_resume_of_a_finished_run_changes_nothing(unbroken, capsys):
    before = outcome(unbroken)
    assert train(run_config(parallel=dict(gpus=1)), unbroken, resume=True) == 0
    printed = capsys.readouterr().out
    assert "changed: parallel.gpus null -> 1\n" in printed and "learning rate" not in printed
    assert f"all {STEPS} steps are done; raise train.steps to continue\n" in printed
    assert "\nnext: " in printed and printed.endswith(f"plot {unbroken} -o loss.png\n")
    assert outcome(unbroken) == before


def test_resume_with_fewer_steps_than_are_done_is_refused_and_changes_nothing(unbroken):
    before = {path: path.read_bytes() for path in unbroken.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as error:
        train(run_config(train=dict(steps=3)), unbroken, resume=True)
    assert str(error.value).startswith("train.steps: ")
    assert f"; set it above {STEPS} to continue the run" in str(error.value)
    assert {path: path.read_bytes() for path in unbroken.rglob("*") if path.is_file()} == before


def test_accumulation_gives_the_losses_of_the_whole_batch(unbroken, tmp_path):
    """4 sequences at once, or 2 and 2: the same samples, with sums that differ in fp32
    rounding (measured 1e-7).
    """
    assert train(run_config(train=dict(batch_size=4)), tmp_path) == 0
    whole = losses(tmp_path)
    halves = losses(unbroken)
    assert whole == pytest.approx(halves, rel=2e-6)


def test_non_finite_steps_are_skipped_and_end_the_run_at_skip_limit(tmp_path, monkeypatch):
    config = run_config(train=dict(skip_limit=2))
    before_steps(lambda self, index: index == 1 and poison(self), monkeypatch)
    with pytest.raises(
        NonFiniteError, match="step 3: .* not finite for 2 steps in a row"
    ) as raised:
        train(config, tmp_path)
    assert re.search(
        r"losses of 4 of its 4 sequences .* first on rank 0 at \S+train_\d+\.bin:\d+; ",
        str(raised.value),
    )
    assert [r["skipped"] for r in records(tmp_path) if r.get("step", 0) > 1 and "loss" in r] == [
        True,
        True,
    ]


def test_non_finite_losses_name_the_first_sequence(tmp_path, monkeypatch):
    """The last sequence of the step of four that begins with sample 8 has a loss of NaN."""
    with make_trainer(run_config(), tmp_path) as made:
        model, loader = made.model, made.data.train
        made.state.sample = 8 + made.config.train.step_sequences
        if model.has_fp8:
            calibrate(model)
        tokens = loader.batch(8, 4)
        evaluate = model.evaluate

        def with_nan_in_the_last_row(ids, targets, fp8):
            losses = evaluate(ids, targets, fp8)
            if (ids[1] == tokens[3, :-1]).all():
                losses[-1] = math.nan
            return losses

        monkeypatch.setattr(model, "evaluate", with_nan_in_the_last_row)
        found = recovery.non_finite_losses(made)
    assert found == (
        "the losses of 1 of its 4 sequences are not finite, "
        f"the first on rank 0 at {loader.place(11)}"
    )


def test_steps_are_read_after_the_next_is_launched_or_before_other_work(tmp_path, monkeypatch):
    """The host waits for a step after it has launched the next; work that reads the
    weights comes after its line.
    """
    seen = []

    def record(owner, method):
        original = getattr(owner, method)

        def recorded(self, *args, **keywords):
            seen.append(" ".join([method, *map(str, args[:1])]))
            return original(self, *args, **keywords)

        monkeypatch.setattr(owner, method, recorded)

    for owner, method in (
        (Model, "end_step"), (Logger, "step"), (Logger, "validation"), (Logger, "sample"),
        (AsyncCheckpointer, "save"),
    ):  # fmt: skip
        record(owner, method)
    train_section = dict(steps=4, total_batch_tokens=32)
    config = run_config(
        train=train_section, eval=dict(every=4, tokens=64), checkpoint=dict(every=2, keep=0)
    )
    train(config, tmp_path)
    assert seen == [
        "validation 0", "end_step", "end_step", "step 1", "step 2", "save 2", "end_step", "step 3",
        "sample 3", "end_step", "step 4", "validation 4", "sample 4", "save 4",
    ]  # fmt: skip


@pytest.mark.slow
def test_losses_of_five_steps_are_the_recorded_ones():
    """tests/support/reference.py computes the same losses in float64 from the same initial weights.

    They also pin the initial weights, which come from Philox and are the same on every machine.
    The bound of 1e-5 is 16 times the measured error of fp32.
    """
    model, config = tiny_model(train=dict(steps=5), optim=dict(lr=1e-2))
    losses = []
    for step in range(5):
        model.begin_step(step_inputs(step, config), step, 1)
        model.micro_step(packed_batch(config, seed=step % 2), first=True)
        losses.append(model.end_step().result().loss)
    assert losses == pytest.approx(GOLDEN, rel=1e-5)


def test_init_from_checkpoint_takes_the_weights_alone(unbroken, tmp_path):
    source = f"checkpoint:{unbroken}"
    with make_trainer(run_config(init_from=source), tmp_path) as trainer:
        _, saved = load_checkpoint(find_checkpoint(unbroken))
        assert torch.equal(trainer.model.state.params.cpu(), saved["params"])
        assert not trainer.model.state.m.cpu().any() and trainer.state.step == 0


def test_resume_refuses_a_checkpoint_that_lacks_a_tensor(unbroken, tmp_path):
    saved, tensors = load_checkpoint(find_checkpoint(unbroken))
    del tensors["m"]
    found = save_checkpoint(tmp_path, STEPS, tensors, saved, Retention(0))
    with pytest.raises(CheckpointError, match="does not fit this model\n.*\nm +absent +float32"):
        make_trainer(run_config(), tmp_path, found)


def test_train_refuses_to_start_without_space_for_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(
        CheckpointError, match="no room for a checkpoint: .* bytes needed, 1,000 free; make"
    ):
        train(run_config(), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


def test_train_refuses_to_start_where_no_checkpoint_can_be_kept(tmp_path, monkeypatch):
    """A file system without renames, such as a mounted bucket;
    RUN/checkpoints that another user made.
    """

    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match="no checkpoint can be saved there"):
        train(run_config(), tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("every", [1, 0])
def test_train_warns_where_a_second_checkpoint_has_no_room(
    unbroken, tmp_path, monkeypatch, capsys, every
):
    size = sum(tensor.nbytes for tensor in load_checkpoint(find_checkpoint(unbroken))[1].values())
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=FILES_BYTES + 2 * size - 1)
    )
    with make_trainer(run_config(checkpoint=dict(every=every)), tmp_path):
        warned = "room for one checkpoint alone: later saves will fail" in capsys.readouterr().err
    assert warned == (every > 0)


def test_resume_counts_the_checkpoints_that_a_save_would_delete(unbroken, tmp_path, monkeypatch):
    shutil.copytree(unbroken, tmp_path / "run")
    found = find_checkpoint(tmp_path / "run")
    shutil.copytree(found, found.with_name("step_00000003"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=FILES_BYTES))
    config = run_config(train=dict(steps=STEPS + 1))
    with make_trainer(config.replace(checkpoint=dict(keep=1)), tmp_path / "run", found):
        pass
    with pytest.raises(CheckpointError, match="no room for a checkpoint: .* bytes needed"):
        make_trainer(config.replace(checkpoint=dict(keep=0)), tmp_path / "run", found)
