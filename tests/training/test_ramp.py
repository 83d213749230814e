"""train.ramp: a run whose first steps are half as large equals two runs of one size, whatever stops or ranks it has."""

import json
import re
import signal

import numpy as np
import pytest
import torch

from gpt2_triton.checkpoint import resume
from gpt2_triton.checkpoint.load import find_checkpoint, load_checkpoint
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.errors import ConfigError, NonFiniteError
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.metrics import STATS
from gpt2_triton.training.trainer import step_io
from tests.support import ranks
from tests.support.loop import before_steps, losses, make_trainer, poison, records, stop_after, train
from tests.training.test_recovery import final, run_config

RAMP, STEPS = 3, 5
WHOLE = dict(steps=STEPS, ramp=RAMP, batch_size=1, total_batch_tokens=32)
NUMBERS = [dict(dtype="fp32"), dict(dtype="bf16"), dict(dtype="bf16", precision="fp8")]


def ramp_config(train, *, every=0, **optim):
    """A warmup of two steps; the last step decays."""
    muon = dict(name="muon", lr=1e-2, weight_decay=1.0, warmup=2, schedule="trapezoid", wsd_decay_frac=0.5)
    more = dict(log=dict(stats_every=1), checkpoint=dict(every=every, keep=0))
    return run_config(train=WHOLE | train, optim=muon | optim, **more)


def everything(run):
    """Return what a run leaves: state without its configuration, tensors, metrics and statistics."""
    state, tensors = final(run)
    return {**state, "config": None}, tensors, records(run), (run / STATS).read_text()


@pytest.fixture(scope="module", params=NUMBERS, ids=lambda numbers: "-".join(numbers.values()))
def numbers(request):
    return request.param


@pytest.fixture(scope="module")
def whole(numbers, tmp_path_factory):
    run = tmp_path_factory.mktemp("whole")
    assert train(ramp_config(numbers), run) == 0
    return run


@pytest.mark.slow
def test_a_ramp_equals_a_run_of_small_steps_that_resumes_with_larger_ones(whole, numbers, tmp_path, monkeypatch):
    """No run may change the tokens of a step; this one does, to have its first steps without a ramp."""
    small = dict(steps=RAMP, ramp=0, total_batch_tokens=16)
    assert train(ramp_config(numbers | small, schedule="constant"), tmp_path) == 0
    monkeypatch.setattr(resume, "may_change_on_resume", lambda key: True)
    assert train(ramp_config(numbers), tmp_path, resume=True) == 0
    assert everything(tmp_path) == everything(whole)
    state, found = final(whole)[0], [record for record in records(whole) if "loss" in record]
    assert (state["step"], state["sample"]) == (STEPS, 3 * 1 + 2 * 2)
    assert [record["tokens"] for record in found] == [16, 32, 48, 80, 112]
    assert [record["lr"] for record in found] == pytest.approx([5e-3, 1e-2, 1e-2, 8e-3, 4e-3])


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, RAMP, RAMP + 1])
def test_a_ramp_resumes_to_its_own_bytes(whole, numbers, tmp_path, after):
    """A stop in the ramp, at its end and after it; the step in flight when the signal comes is finished too."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, after)
        assert train(ramp_config(numbers), tmp_path) == 128 + signal.SIGTERM
    assert final(tmp_path)[0]["step"] == after
    assert train(ramp_config(numbers), tmp_path, resume=True) == 0
    assert everything(tmp_path) == everything(whole)


def job(config, run):
    return train(config, run)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which a process with CUDA may not")
@pytest.mark.parametrize("n, zero, batch_size", [(2, 0, 3), (2, 2, 3), (3, 1, 1)])
def test_ranks_train_a_ramp_as_one_rank_does(tmp_path, n, zero, batch_size):
    """Steps of 6 and 12 sequences, on ranks in several micro-batches: only the order of fp32 sums differs."""
    sizes = dict(steps=4, ramp=2, total_batch_tokens=192)
    for ranks_of_run, batch in ((1, 12), (n, batch_size)):
        parts = dict(parallel=dict(zero=zero), debug=dict(hash_state=1))
        config = run_config(train=sizes | dict(batch_size=batch), **parts, log=dict(stats_every=2))
        (run := tmp_path / str(ranks_of_run)).mkdir()
        assert ranks.run(ranks_of_run, run / "stderr", job, config, run) == [0] * ranks_of_run
    one, other = tmp_path / "1", tmp_path / str(n)
    assert losses(other) == pytest.approx(losses(one), rel=2e-6)
    params = [load_checkpoint(find_checkpoint(run))[1]["params"] for run in (one, other)]
    assert (params[0] - params[1]).abs().max().item() < 5e-5
    rms = [
        [json.loads(line)["activations"]["x"]["rms"] for line in (run / STATS).read_text().splitlines()]
        for run in (one, other)
    ]
    assert np.allclose(*rms, rtol=1e-4)


def test_a_rewind_into_the_ramp_takes_half_steps_of_later_samples(tmp_path, monkeypatch):
    """Steps 4 and 5 are skipped, and undone: step 3 comes again, with the sample after theirs."""
    spans = []

    def record(made, index):
        spans.append((index, made.state.sample))
        if len(spans) in (4, 5):
            poison(made)

    before_steps(record, monkeypatch)
    numbers = dict(dtype="fp32", rewind_after=2, skip_limit=0)
    assert train(ramp_config(numbers, every=2, name="adamw"), tmp_path) == 0
    state, _ = final(tmp_path)
    assert [index for index, _ in spans] == [0, 1, 2, 3, 4, 2, 3, 4]
    assert state["sample"] == 3 + 2 * 2 + 1 + 2 * 2
    assert [record["tokens"] for record in records(tmp_path) if "loss" in record] == [16, 32, 48, 80, 112]


def test_a_half_step_that_is_not_finite_names_its_own_sequences(tmp_path, monkeypatch):
    before_steps(lambda made, index: poison(made), monkeypatch)
    with pytest.raises(NonFiniteError) as raised:
        train(ramp_config(dict(dtype="fp32", skip_limit=1)), tmp_path)
    assert re.search(r"samples up to 1\); .* losses of 1 of its 1 sequences .* first on rank 0", str(raised.value))


def test_the_loss_scale_and_the_shape_follow_the_ramp():
    config = ramp_config(dict(dtype="fp32", batch_size=64))
    assert [1 / step_inputs(step, config)[step_io.LOSS_SCALE] for step in range(STEPS)] == [16, 16, 16, 32, 32]
    assert StepShape.of(config) == StepShape(gpus=1, micro_batch=1, accumulation=2, zero=0)
    assert [config.train.tokens(steps) for steps in (0, 2, 3, 5)] == [0, 32, 48, 112]
    assert config.weight_decay == 1.0 and Config().train.tokens(7) == 7 * Config().train.step_tokens


@pytest.mark.parametrize(("sizes", "gpus", "message"), [
    (dict(total_batch_tokens=48), 1, "no multiple of train.seq_len 16 times 2, for train.ramp; set it to 32 or 64"),
    (dict(total_batch_tokens=96), 2, "times 2 GPUs times 2, for train.ramp; start a number of GPUs that divides 3 seq"),
    (dict(total_batch_tokens=192, batch_size=4), 1, r"a step of 6 sequences \(half of total_batch_tokens 192\) .*"
     "set it to 3, or, in a new run, total_batch_tokens to 128"),
])  # fmt: skip
def test_half_a_step_must_divide_like_a_step(sizes, gpus, message):
    with pytest.raises(ConfigError, match=message):
        StepShape.of(ramp_config(dict(dtype="fp32") | sizes), gpus)


def test_the_log_of_a_run_says_how_many_epochs_a_ramp_has(tmp_path, capsys):
    with make_trainer(ramp_config(dict(dtype="fp32")), tmp_path) as made:
        epochs = 112 / 16 / made.data.train.windows.n
    assert f"{STEPS} steps are {epochs:.3g} epochs" in capsys.readouterr().out
