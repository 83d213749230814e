"""Runs of several ranks: the losses of one rank for any number of ranks and any ZeRO
stage, equal weights on all ranks, checkpoints for any number of ranks, and one bad rank
that ends the job and is named.
"""

import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import time

import pytest
import torch

from gpt2_triton import kernels
from gpt2_triton.checkpoint import save
from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.distributed.run_lock import lock_run_dir
from gpt2_triton.errors import ConfigError
from gpt2_triton.model import peer_copies, sharding
from gpt2_triton.model.communicator import BucketedCommunicator
from gpt2_triton.model.memory_plan import plan_memory
from gpt2_triton.model.sharding import NOT_A_LAYER
from tests.support import ranks
from tests.support.checkpoints import load_checkpoint
from tests.support.loop import before_steps, losses, records, train
from tests.support.tiny import merged, tiny_config

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="forks, which a process with CUDA may not"
)
# 12 sequences per step divide among 1, 2, 3 and 4 ranks; fp32, so that
# only the order of sums differs
STEPS = 2


# heads that do not divide the channels, normed
LLAMA = dict(arch="llama", n_head=3, n_kv_head=1, head_dim=64, n_embd=112, n_inner=176)
LLAMA |= dict(tied=False, qk_norm=True)


def config_of(zero=1, **sections):
    """One layer, unless `sections` says otherwise."""
    base = dict(
        model=dict(n_layer=1),
        train=dict(steps=STEPS, batch_size=12, total_batch_tokens=192),
        parallel=dict(zero=zero),
    )
    base |= dict(debug=dict(hash_state=1), checkpoint=dict(every=0, keep=0))
    return tiny_config(**merged(base, sections))


def job(config, run, resume=False):
    """Train as train.py does on each rank."""
    return train(config, run, resume)


def run_job(n, config, run, resume=False):
    """Train on n ranks; return their exit code, which must be the same on all."""
    run.mkdir(exist_ok=True)
    codes = ranks.run(n, run / "stderr", job, config, run, resume)
    assert len(set(codes)) == 1
    return codes[0]


def errors_of_both(function, config, run, *arguments):
    """Return the stderr of two ranks that end with an error."""
    codes = ranks.exit_codes(2, run / "stderr", function, config, run, *arguments)
    assert codes == [1, 1]
    return (run / "stderr").read_text()


def tensors(run):
    return load_checkpoint(find_checkpoint(run))[1]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def assert_close(one, other):
    """Assert equality up to the order of the sums over 12 sequences.

    fp32 keeps 1e-7 of the largest gradient.  AdamW's first steps divide by the root of its square,
    so that a weight whose gradient is about 0 differs by a fraction of lr = 1e-3.
    """
    for name, bound in (("params", 5e-5), ("m", 1e-6), ("v", 1e-7)):
        assert (one[name] - other[name]).abs().max().item() < bound, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone")
    assert job(config_of(model=dict(n_layer=2), eval=dict(every=1, tokens=80)), run) == 0
    return run


# ---- the run of one rank ----


@pytest.mark.slow
@pytest.mark.parametrize("n, zero, sections", [
    (2, 0, {}), (2, 2, {}), (4, 1, {}), (3, 2, dict(train=dict(batch_size=2))),
    (2, 1, dict(train=dict(batch_size=3))),
])  # fmt: skip
def test_ranks_train_as_one_rank_does(alone, tmp_path, n, zero, sections):
    """Also where ranks divide no tensor and micro-steps add up; hash_state would end
    a run of unequal weights.
    """
    config = config_of(zero, model=dict(n_layer=2), eval=dict(every=1, tokens=80), **sections)
    assert run_job(n, config, tmp_path) == 0
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=2e-6)
    values = [[r["val_loss"] for r in records(run) if "val_loss" in r] for run in (tmp_path, alone)]
    assert values[0] == pytest.approx(values[1], rel=2e-6)
    assert_close(tensors(tmp_path), tensors(alone))
    assert len(list(find_checkpoint(tmp_path).glob("rank_*"))) == n


@pytest.mark.slow
@pytest.mark.parametrize("n, zero, model", [(2, 1, {}), (3, 2, dict(dropout=0.3)), (3, 2, LLAMA)])
def test_ranks_train_by_muon_as_one_rank_does_where_micro_steps_add_up(tmp_path, n, zero, model):
    """Momentum moves once a step: moved with each micro-step, the third loss is off by 4e-5.  Other
    orders of sums make the momentum differ by 1.5e-7 of its norm.  Dropout masks a sample in the
    same way, whichever rank takes it.
    """
    for ranks_of_run, batch_size in ((1, 12), (n, 2)):
        train = dict(batch_size=batch_size, steps=3)
        config = config_of(
            zero, model=dict(n_layer=2) | model, train=train, optim=dict(name="muon")
        )
        run = tmp_path / str(ranks_of_run)
        run.mkdir()
        assert (job(config, run) if ranks_of_run == 1 else run_job(n, config, run)) == 0
    one, other = tmp_path / "1", tmp_path / str(n)
    assert losses(other) == pytest.approx(losses(one), rel=2e-6)
    m = [tensors(run)["m"] for run in (one, other)]
    assert (m[0] - m[1]).norm() < 1e-6 * m[0].norm()


@pytest.mark.slow
@pytest.mark.parametrize("n, zero, batch_size", [(2, 1, 12), (2, 0, 3)])
def test_fp8_scales_do_not_depend_on_ranks(tmp_path, n, zero, batch_size):
    """After one step the maxima of all tensors are those of one rank and one
    micro-step, to the last bit.
    """
    train, fp8 = dict(steps=1, dtype="bf16", precision="fp8"), dict(keep_bf16="")
    assert (
        run_job(
            n,
            config_of(zero, train=train | dict(batch_size=batch_size), fp8=fp8),
            tmp_path / "ranks",
        )
        == 0
    )
    assert run_job(1, config_of(train=train, fp8=fp8), tmp_path / "one") == 0
    one, ranks_ = (tensors(tmp_path / run) for run in ("one", "ranks"))
    assert (one["history"][:, :2] > 0).all()
    for name in ("scale", "history"):
        assert torch.equal(one[name], ranks_[name]), name


def collectives(config, run):
    """Train as if each rank were on another host."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return job(config, run)


def together(config, run):
    """Send no layer's gradients before the embedding's."""
    peer_copies.TOKENS_TO_HIDE_A_LAYER = 0
    return job(config, run)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_both_transports_and_any_grouping_give_the_same_bytes(tmp_path, zero):
    """On one host or two, one by one or together: a sum of two numbers is one sum.  The last of two
    micro-steps sends gradients, at stage 2 each of three.  As in GPT-2 the embedding is the largest
    bucket; `received` holds two layers' shards.
    """
    train = dict(batch_size=1, total_batch_tokens=96 if zero == 2 else 64)
    config, runs = config_of(zero, model=dict(n_layer=3, vocab_size=1600), train=train), {}
    for way in (job, collectives, together):
        runs[way] = tmp_path / way.__name__
        runs[way].mkdir()
        assert ranks.run(2, runs[way] / "stderr", way, config, runs[way]) == [0, 0]
    for run in runs.values():
        assert_equal(tensors(run), tensors(runs[job]))
    dims = plan_memory(config, kernels, StepShape.of(config, 2))[1]
    parts = [b.padded // 2 for b in sharding.buckets(dims)]
    # so that what is sent together takes several rounds
    assert 2 * parts[1] <= dims["Nx"] == parts[0]


def numbers(run):
    """Return a run's statistics as (step, kind, tensor, column, index) -> number."""
    found = {}
    for record in map(json.loads, (run / "stats.jsonl").read_text().splitlines()):
        for kind in ("activations", "parameters"):
            for name, columns in record[kind].items():
                for column, values in columns.items():
                    found |= {
                        (record["step"], kind, name, column, i): v for i, v in enumerate(values)
                    }
    return found


@pytest.mark.slow
def test_statistics_of_ranks_equal_those_of_one_rank(tmp_path):
    """Five digits are kept.  The update of an element divides its gradient by the root of its
    square, so that elements whose gradient is about 0, one in some hundred, depend on the order of
    sums: 1e-3 of a tensor's ratio at most.
    """
    (tmp_path / "1").mkdir()
    assert job(config_of(log=dict(stats_every=1)), tmp_path / "1") == 0
    want = numbers(tmp_path / "1")
    assert {kind for _, kind, *_ in want} == {"activations", "parameters"} and {
        s for s, *_ in want
    } == {1, 2}
    for n, zero, batch_size in ((2, 0, 12), (2, 1, 3), (3, 2, 2)):
        run = tmp_path / f"{n} {zero}"
        config = config_of(zero, log=dict(stats_every=1), train=dict(batch_size=batch_size))
        assert run_job(n, config, run) == 0
        got = numbers(run)
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-3 if "update_ratio" in key else 1e-4), (
                n,
                zero,
                key,
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "optim, zeros", [(dict(v="bf16"), (1, 0)), (dict(master="fp32"), (1, 1))], ids=str
)
def test_two_runs_of_two_ranks_give_the_same_bytes(tmp_path, optim, zeros):
    """bf16 with noise, in moments too, and masters.  gloo adds two numbers alike at
    every stage, so stages agree.
    """
    config = dict(train=dict(dtype="bf16", steps=1), optim=optim)
    runs = [tmp_path / name for name in ("one", "other")]
    for run, zero in zip(runs, zeros, strict=True):
        assert run_job(2, config_of(zero, **config), run) == 0
    assert_equal(*map(tensors, runs))


# ---- signals, checkpoints for any number of ranks, non-finite numbers ----


def signal_rank_1(config, run, resume=False):
    """Train, with SIGTERM to rank 1 alone in the first step."""
    before_steps(
        lambda self, step: (step, self.group.rank) == (0, 1) and signal.raise_signal(signal.SIGTERM)
    )
    return job(config, run, resume)


@pytest.fixture(scope="module", params=["adamw", "muon"])
def optim(request):
    return dict(name=request.param)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, optim):
    run = tmp_path_factory.mktemp("stopped")
    config = config_of(train=dict(steps=4), optim=optim, debug=dict(hash_state=0))
    assert ranks.run(2, run / "stderr", signal_rank_1, config, run) == [128 + signal.SIGTERM] * 2
    return run


def test_signal_to_one_rank_stops_all_with_one_checkpoint(stopped):
    """The first step carries the signal to all ranks, which read it during the
    second and save that one.
    """
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step_00000002"]


def test_locked_directory_is_refused_on_all_ranks(tmp_path):
    with lock_run_dir(tmp_path):
        errors = errors_of_both(job, config_of(), tmp_path)
    assert errors.count("ConfigError: --run_dir: pid") == 2


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, optim):
    run = tmp_path_factory.mktemp("unbroken")
    assert job(config_of(train=dict(steps=4), optim=optim), run) == 0
    return run


@pytest.mark.slow
@pytest.mark.parametrize("n, zero", [(1, 0), (3, 2)])
def test_checkpoint_resumes_on_any_number_of_ranks(stopped, unbroken, optim, tmp_path, n, zero):
    """The losses are those of an unbroken run on one rank."""
    shutil.copytree(stopped / "checkpoints", tmp_path / "checkpoints")
    config = config_of(zero, train=dict(steps=4), optim=optim)
    assert (job(config, tmp_path, True) if n == 1 else run_job(n, config, tmp_path, True)) == 0
    assert losses(tmp_path) == pytest.approx(losses(unbroken)[2:], rel=1e-5)


def test_number_of_ranks_must_divide_the_step():
    todo = (
        "start a number of GPUs that divides 12 sequences, or, in a new run, set it to 160 or 240"
    )
    with pytest.raises(
        ConfigError, match=f"192 is no multiple of 80, train.seq_len times GPUs .5.; {todo}"
    ):
        StepShape.of(config_of(train=dict(batch_size=2)), 5)


def full_disk_on_rank_1(config, run):
    """Train; the first file of a step that rank 1 writes does not fit on the disk."""
    original, left = save.save_file, [OSError(28, "No space left on device")]

    def save_file(tensors, path):
        if left and os.environ["RANK"] == "1" and save.TRIAL not in str(path):
            raise left.pop()
        return original(tensors, path)

    save.save_file = save_file
    return job(config, run)


@pytest.mark.slow
def test_failed_save_on_one_rank_costs_one_warning_and_no_older_checkpoint(tmp_path):
    config = config_of(checkpoint=dict(every=1))
    assert ranks.run(2, tmp_path / "stderr", full_disk_on_rank_1, config, tmp_path) == [0, 0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    [warning] = [
        line for line in (tmp_path / "stderr").read_text().splitlines() if "warning: " in line
    ]
    assert "(rank 1: [Errno 28] No space left on device); make room" in warning


def nan_on_rank_1(config, run, micro_steps=(0,)):
    """Train; rank 1 has a NaN gradient in these micro-steps, which do not count the two
    passes that calibrate fp8.
    """
    original = BucketedCommunicator.reduce_grads
    seen = itertools.count(-2 if config.train.precision == "fp8" else 0)

    def reduce_grads(self, layer):
        if layer == NOT_A_LAYER and self._group.rank == 1 and next(seen) in micro_steps:
            self._K.fill(self._s.grads[:1], math.nan)
        original(self, layer)

    BucketedCommunicator.reduce_grads = reduce_grads
    return job(config, run)


def test_non_finite_gradient_on_one_rank_skips_the_update_on_all(tmp_path):
    config = config_of(train=dict(steps=1))
    assert ranks.run(2, tmp_path / "stderr", nan_on_rank_1, config, tmp_path) == [0, 0]
    assert records(tmp_path)[0]["skipped"]
    assert not tensors(tmp_path)["m"].any()


@pytest.mark.slow
@pytest.mark.parametrize("zero, batch_size", [(1, 6), (2, 2)])
def test_search_for_non_finite_tensor_changes_no_byte_of_the_run(tmp_path, capfd, zero, batch_size):
    """The NaN comes once, in the first of three steps, of one micro-step
    at ZeRO-1, three at ZeRO-2.
    """
    plain, searched = tmp_path / "plain", tmp_path / "searched"
    for run, every in ((plain, 0), (searched, 3)):
        run.mkdir()
        sections = dict(train=dict(steps=3, batch_size=batch_size), log=dict(stats_every=every))
        config = config_of(zero, **sections, debug=dict(hash_state=0))
        assert ranks.run(2, run / "stderr", nan_on_rank_1, config, run) == [0, 0]
        assert records(run)[0]["skipped"]
    assert capfd.readouterr().out.count("first: nothing when computed again") == 1
    assert losses(plain) == losses(searched)
    assert_equal(tensors(plain), tensors(searched))


IN_FP8 = dict(dtype="bf16", precision="fp8")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, precision, stages",
    [("adamw", {}, (0, 1, 2)), ("muon", {}, (0, 1, 2)), ("adamw", IN_FP8, (0, 2))],
)
def test_ranks_rewind_together(tmp_path, name, precision, stages):
    """The third step fails; all return to the second's checkpoint and take the fourth's samples.
    gloo adds two numbers alike at every stage; at stage 2 the squares of gradients are summed in
    another order, which may change the norm's last bit.
    """
    for zero in stages:
        run = tmp_path / str(zero)
        run.mkdir()
        train = dict(steps=3, rewind_after=1, **precision)
        config = config_of(zero, train=train, optim=dict(name=name), checkpoint=dict(every=2))
        assert ranks.run(2, tmp_path / "stderr", nan_on_rank_1, config, run, (2,)) == [0, 0]
        assert records(run)[2] == {"step": 2, "rewound_from": 3, "sample": 36}
        assert len(losses(run)) == 3 and load_checkpoint(find_checkpoint(run))[0]["sample"] == 48
        same = assert_equal if zero < 2 else assert_close
        same(tensors(run), tensors(tmp_path / "0"))


@pytest.mark.slow
def test_skip_limit_ends_all_ranks(tmp_path):
    config = config_of(train=dict(steps=4, skip_limit=2), debug=dict(hash_state=0))
    message = "NonFiniteError: step 2: loss or gradient norm was not finite for 2 steps in a row"
    assert errors_of_both(nan_on_rank_1, config, tmp_path, range(4)).count(message) == 2


def other_lr_on_rank_1(config, run):
    return job(config.replace(optim={"lr": 2e-3}) if os.environ["RANK"] == "1" else config, run)


@pytest.mark.slow
def test_require_equal_names_ranks_with_another_configuration(tmp_path):
    """A node with another config.yaml; data is compared by its fingerprint in the same way."""
    message = "ConfigError: configuration: not the same on ranks [1] as on rank 0"
    assert message in errors_of_both(other_lr_on_rank_1, config_of(), tmp_path)


def flip_on_rank_1(config, run):
    before_steps(
        lambda self, _: (
            self.group.rank and self.model.K.fill(self.model.train_view.w.lnb[0][:1], 1.0)
        )
    )
    return job(config, run)


@pytest.mark.slow
def test_replica_mismatch_ends_the_run(tmp_path):
    """As if a bit of rank 1's memory had flipped."""
    message = "ReplicaMismatchError: step 1: the weights of ranks [1] differ from rank 0's"
    assert message in errors_of_both(flip_on_rank_1, config_of(0), tmp_path)


# ---- one bad rank ----


def killed_rank_1(config, run):
    """Train; rank 1 dies before its second step."""
    before_steps(
        lambda self, step: (
            (step, self.group.rank) == (1, 1) and os.kill(os.getpid(), signal.SIGKILL)
        )
    )
    return job(config, run)


@pytest.mark.slow
def test_killed_rank_ends_the_others_and_a_restart_gives_the_unbroken_bytes(tmp_path):
    """Restarted ranks find no checkpoint, or the first step's, alike; the
    collective's error ends rank 0.
    """
    config, run = config_of(checkpoint=dict(every=1)), tmp_path / "run"
    run.mkdir()
    assert ranks.exit_codes(2, run / "stderr", killed_rank_1, config, run) == [1, -signal.SIGKILL]
    assert "PeerLostError" in (run / "stderr").read_text()
    assert run_job(2, config, run, resume=True) == 0
    whole = tmp_path / "whole"
    assert run_job(2, config, whole) == 0
    assert_equal(tensors(run), tensors(whole))
    assert losses(run) == losses(whole)


def hanging_rank_1(config, run, how):
    """Train; rank 1 hangs before its second step, and only then rank 0's
    watchdog waits for seconds alone.
    """

    def hang(self, step):
        if step != 1:
            return
        self.watchdog._interval = 0.4  # a rank is silent after five
        if self.group.rank == 1:
            (run / "hanging").touch()
            time.sleep(600) if how == "sleep" else os.kill(os.getpid(), how)
        while not (run / "hanging").exists():
            time.sleep(0.02)
        self.watchdog.heartbeat(2)
        self.watchdog._timeout = 2.5

    before_steps(hang)
    return job(config, run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, what",
    [(signal.SIGSTOP, "not responding"), ("sleep", "behind the others, starting at step 1")],
)
def test_watchdog_names_the_rank_that_hangs(tmp_path, how, what):
    """At stage 0 no exchange at the beginning of a step keeps ranks together."""
    config = config_of(0, debug=dict(hash_state=0))
    with ranks.started(2, tmp_path / "stderr", hanging_rank_1, config, tmp_path, how) as [
        (rank_0, _),
        _,
    ]:
        rank_0.join()
        assert rank_0.exitcode == 1
    [message] = [
        line for line in (tmp_path / "stderr").read_text().splitlines() if "no progress for" in line
    ]
    assert message.startswith("error: rank 0: ") and f"rank 1 is {what}; " in message


def waiting_for_the_dead(config, run):
    """Train; rank 0 dies before its second step, and rank 1 waits for
    minutes in C, as for a device.
    """

    def die_or_wait(self, step):
        if step == 1 and self.group.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1:
            self.watchdog._interval = 0.2
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)

    before_steps(die_or_wait)
    return job(config, run)


@pytest.mark.slow
def test_watchdog_ends_a_rank_whose_store_is_gone(tmp_path):
    """As under srun, where rank 0 holds the store and no launcher ends the others."""
    config = config_of(0, debug=dict(hash_state=0))
    with ranks.started(2, tmp_path / "stderr", waiting_for_the_dead, config, tmp_path) as [
        _,
        (rank_1, _),
    ]:
        rank_1.join()
        assert rank_1.exitcode == 1
    assert "error: rank 1: rank 0 or the launcher has exited" in (tmp_path / "stderr").read_text()
