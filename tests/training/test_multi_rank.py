"""The promises of several ranks: the run of one rank, whatever their number and the ZeRO stage; the same weights on
all; a checkpoint for any number; one bad rank ends the job and is named.
"""

import errno
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2_triton import kernels
from gpt2_triton.checkpoint import save
from gpt2_triton.checkpoint.load import find_checkpoint, load_checkpoint
from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.config.config import Config
from gpt2_triton.distributed import consistency, watchdog
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.errors import ConfigError, PeerLostError
from gpt2_triton.model import communicator, sharding
from gpt2_triton.model.communicator import BucketedCommunicator
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.memory_plan import plan_memory
from gpt2_triton.model.schedule import NOT_A_LAYER
from gpt2_triton.training import recovery, wandb_logger
from gpt2_triton.training.trainer import Trainer, train
from tests.support import ranks
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="forks, which a process with CUDA may not")
# 12 sequences a step divide among 1, 2, 3 and 4 ranks; fp32, so that what differs is the order of sums alone
STEPS = 2


def config_of(zero=1, **sections):
    base = dict(train=dict(steps=STEPS, batch_size=12, total_batch_tokens=192), parallel=dict(zero=zero))
    base |= dict(debug=dict(hash_state=1), checkpoint=dict(every=0, keep=0))
    return tiny_config(**{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections})


def job(config, run, resume=False):
    """What train.py does on each rank."""
    return train(config.with_gpus(int(os.environ.get("WORLD_SIZE", "1"))), run, resume)


def run_job(n, config, run, resume=False):
    """Exit codes by rank; all ranks agree on them."""
    run.mkdir(exist_ok=True)
    codes = ranks.run(n, run / "stderr", job, config, run, resume)
    assert len(set(codes)) == 1
    return codes[0]


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run):
    return [r["loss"] for r in records(run) if "loss" in r]


def tensors(run):
    return load_checkpoint(find_checkpoint(run))[1]


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.view(torch.uint8), other[name].view(torch.uint8)), name


def assert_close(one, other):
    """Sums of a gradient over 12 sequences in another order: fp32 keeps 1e-7 of the largest, AdamW's first steps divide
    by the root of their square, so that a weight differs by a fraction of lr = 1e-3 where its gradient is about 0.
    """
    for name, bound in (("params", 5e-5), ("m", 1e-6), ("v", 1e-7)):
        assert (one[name] - other[name]).abs().max().item() < bound, name


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run = tmp_path_factory.mktemp("alone")
    assert job(config_of(eval=dict(every=1, tokens=80)), run) == 0
    return run


# ---- the run of one rank ----


@pytest.mark.parametrize("n, zero, sections", [
    (2, 0, {}), (2, 2, {}), (4, 1, {}), (3, 2, dict(train=dict(batch_size=2))), (2, 1, dict(train=dict(batch_size=3))),
])  # fmt: skip
def test_any_number_of_ranks_at_any_stage_is_the_run_of_one(alone, tmp_path, n, zero, sections):
    """Also where ranks divide no tensor, where micro-steps add up, and where a layer is computed again; hash_state
    compares the ranks' weights after every step, and a difference would end the run.
    """
    assert run_job(n, config_of(zero, eval=dict(every=1, tokens=80), **sections), tmp_path) == 0
    assert losses(tmp_path) == pytest.approx(losses(alone), rel=2e-6)
    values = [[r["val_loss"] for r in records(run) if "val_loss" in r] for run in (tmp_path, alone)]
    assert values[0] == pytest.approx(values[1], rel=2e-6)
    assert_close(tensors(tmp_path), tensors(alone))
    assert len(list(find_checkpoint(tmp_path).glob("rank_*"))) == n


def apart(config, run):
    """As a host for each rank: through collectives."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return job(config, run)


def all_at_the_end(config, run):
    """No layer's gradients set out before the embedding's."""
    communicator.TOKENS_TO_HIDE_A_LAYER = 0
    return job(config, run)


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_two_ranks_get_the_same_bytes_whichever_way_their_gradients_take(tmp_path, zero):
    """One host or two, one by one or together: a sum of two numbers is one sum.  Of three micro-steps the last one
    sends, at stage 2 each.  As in GPT-2 the embedding is the largest bucket, so that what the others send of two layers
    has room at once.
    """
    model = dict(n_layer=4, vocab_size=1600)
    config, runs = config_of(zero, model=model, train=dict(batch_size=2)), {}
    for way in (job, apart, all_at_the_end):
        runs[way] = tmp_path / way.__name__
        runs[way].mkdir()
        assert ranks.run(2, runs[way] / "stderr", way, config, runs[way]) == [0, 0]
    for run in runs.values():
        assert_equal(tensors(run), tensors(runs[job]))
    dims = plan_memory(config.with_gpus(2), kernels, 2, config.train.seq_len)[1]
    parts = [b.padded // 2 for b in sharding.buckets(dims)]
    assert 2 * parts[1] <= dims["Nx"] == parts[0] < sum(parts[2:])  # and all that wait take more than one round


def numbers(run):
    """(step, kind, tensor, column, index) -> number, of a run's statistics."""
    found = {}
    for record in map(json.loads, (run / "stats.jsonl").read_text().splitlines()):
        for kind in ("activations", "parameters"):
            for name, columns in record[kind].items():
                for column, values in columns.items():
                    found |= {(record["step"], kind, name, column, i): v for i, v in enumerate(values)}
    return found


def test_statistics_are_those_of_one_rank(tmp_path):
    """Five digits are kept.  The update of an element divides its gradient by the root of its square, so that elements
    whose gradient is about 0 depend on the order of sums: one in some hundred, of a tensor's ratio 1e-3 at most.
    """
    (tmp_path / "1").mkdir()
    assert job(config_of(log=dict(stats_every=1)), tmp_path / "1") == 0
    want = numbers(tmp_path / "1")
    assert {kind for _, kind, *_ in want} == {"activations", "parameters"} and {s for s, *_ in want} == {1, 2}
    for n, zero, batch_size in ((2, 0, 12), (2, 1, 3), (3, 2, 2)):
        run = tmp_path / f"{n} {zero}"
        config = config_of(zero, log=dict(stats_every=1), train=dict(batch_size=batch_size))
        assert run_job(n, config, run) == 0
        got = numbers(run)
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-3 if "update_ratio" in key else 1e-4), (n, zero, key)


@pytest.mark.parametrize("master, zeros", [("none", (1, 0)), ("fp32", (1, 1))])
def test_as_many_ranks_give_the_same_bytes(tmp_path, master, zeros):
    """bf16 with noise, keyed by the flat index, and with master weights.  gloo adds two numbers alike at every stage,
    so here even two stages agree.
    """
    config = dict(train=dict(dtype="bf16", steps=1), optim=dict(master=master))
    runs = [tmp_path / name for name in ("one", "other")]
    for run, zero in zip(runs, zeros, strict=True):
        assert run_job(2, config_of(zero, **config), run) == 0
    assert_equal(*map(tensors, runs))


# ---- signals, numbers that are not finite, checkpoints for any number ----


def signal_rank_1(config, run, resume=False):
    """SIGTERM reaches one rank only, in the first step."""
    original = Trainer._train_step

    def signalled(self, step):
        if step == 0 and self.group.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        original(self, step)

    Trainer._train_step = signalled
    return job(config, run, resume)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    run = tmp_path_factory.mktemp("stopped")
    config = config_of(train=dict(steps=4), debug=dict(hash_state=0))
    assert ranks.run(2, run / "stderr", signal_rank_1, config, run) == [128 + signal.SIGTERM] * 2
    return run


def test_a_signal_to_one_rank_saves_one_checkpoint_and_ends_all(stopped):
    """The step that carries the word is the first; ranks read of it when the second is under way, and save that."""
    assert [path.name for path in (stopped / "checkpoints").iterdir()] == ["step_00000002"]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    run = tmp_path_factory.mktemp("unbroken")
    assert job(config_of(train=dict(steps=4)), run) == 0
    return run


@pytest.mark.parametrize("n, zero", [(1, 0), (3, 2)])
def test_a_checkpoint_goes_on_with_any_number_of_ranks(stopped, unbroken, tmp_path, n, zero):
    """The same samples follow: the losses are those of an unbroken run on one rank."""
    shutil.copytree(stopped / "checkpoints", tmp_path / "checkpoints")
    config = config_of(zero, train=dict(steps=4))
    assert (job(config, tmp_path, True) if n == 1 else run_job(n, config, tmp_path, True)) == 0
    assert losses(tmp_path) == pytest.approx(losses(unbroken)[2:], rel=1e-5)


def test_a_number_of_ranks_that_does_not_divide_the_step_is_refused():
    todo = "start 3 or 6 GPUs, or, in a new run, set it to 160 or 240"  # one that goes on keeps the tokens of a step
    with pytest.raises(ConfigError, match=f"192 is no multiple of train.seq_len 16 times 5 GPUs; {todo}") as refused:
        config_of(train=dict(batch_size=2)).with_gpus(5)
    table = [line.split() for line in str(refused.value).splitlines()[1:]]
    assert table[0] == ["GPUs", "sequences", "each", "at", "once", "micro-steps"]  # up to three below and above
    assert table[1:] == [list(row.split()) for row in ("1 12 2 6", "2 6 2 3", "3 4 2 2", "6 2 2 1", "12 1 1 1")]
    with pytest.raises(ConfigError, match="192 is no multiple of train.seq_len 16 times 16 GPUs; start 12 GPUs, or"):
        config_of().with_gpus(16)
    with pytest.raises(ConfigError, match="parallel.gpus: 2, but 3 started"):
        config_of(parallel=dict(gpus=2)).with_gpus(3)


def test_a_batch_that_divides_on_its_ranks_alone_is_no_hindrance_afterwards(tmp_path, monkeypatch):
    """Three ranks take 4 sequences each; on one, the 12 of a step do not divide into batches of 5."""
    tree = config_of(train=dict(steps=1)).to_dict()
    tree["train"]["batch_size"] = 5
    assert run_job(3, Config.model_validate(tree, context=dict(gpus=3)), tmp_path) == 0
    assert load_weights(str(tmp_path))[0].train.batch_size == 5
    sent: list = []
    there = SimpleNamespace(starting_step=0, url="", finish=lambda: None, log=lambda record, step: sent.append(record))
    monkeypatch.setattr(wandb_logger, "connect", lambda *arguments: there)
    assert wandb_logger.send_missing(tmp_path)[0] == len(sent) == 1


def full_disk_on_rank_1(config, run):
    """The first share that rank 1 writes does not fit."""
    original, left = save.save_file, [OSError(28, "No space left on device")]

    def save_file(tensors, path):
        if left and os.environ["RANK"] == "1":
            raise left.pop()
        original(tensors, path)

    save.save_file = save_file
    return job(config, run)


def test_a_share_that_cannot_be_written_costs_one_warning_and_no_older_checkpoint(tmp_path):
    config = config_of(checkpoint=dict(every=1))
    assert ranks.run(2, tmp_path / "stderr", full_disk_on_rank_1, config, tmp_path) == [0, 0]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000002"]
    [warning] = [line for line in (tmp_path / "stderr").read_text().splitlines() if "warning: " in line]
    assert "could not be written (rank 1: [Errno 28] No space left on device); free some space" in warning


def nan_on_rank_1(config, run, micro_steps=(0,)):
    """A gradient that is not finite on one rank, in the first step."""
    original = BucketedCommunicator.reduce_grads
    seen = itertools.count()

    def reduce_grads(self, layer):
        if layer == NOT_A_LAYER and self._group.rank == 1 and next(seen) in micro_steps:
            self._K.fill(self._s.grads[:1], math.nan)
        original(self, layer)

    BucketedCommunicator.reduce_grads = reduce_grads
    return job(config, run)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_update_on_all(tmp_path):
    config = config_of(train=dict(steps=1))
    assert ranks.run(2, tmp_path / "stderr", nan_on_rank_1, config, tmp_path) == [0, 0]
    assert records(tmp_path)[0]["skipped"]
    assert not tensors(tmp_path)["m"].any()


def infinite_weight_on_rank_1(config, run):
    original = Trainer._train_step

    def train_step(self, step):
        if self.group.rank == 1:
            self.model.K.fill(self.model.train_view.w.fcw[1][:1], math.inf)
        original(self, step)

    Trainer._train_step = train_step
    return job(config, run)


def test_the_first_tensor_that_is_not_finite_is_named_whichever_rank_has_it(tmp_path, capfd):
    """ZeRO-0, where a rank's weights are its own; its 6 sequences of 16 tokens have the column in 96 rows."""
    config = config_of(zero=0, train=dict(steps=1), log=dict(stats_every=9), debug=dict(hash_state=0))
    assert ranks.run(2, tmp_path / "stderr", infinite_weight_on_rank_1, config, tmp_path) == [0, 0]
    assert records(tmp_path)[0]["skipped"]
    assert "skipped: not finite, first: fch of layer 1 (96 elements)" in capfd.readouterr().out


def nan_on_rank_1_and_idle_queues(config, run):
    """The same, and after the search for what is not finite nothing is left for the next step to exchange."""
    search = GPT2.first_non_finite

    def first_non_finite(self, batches, control):
        found, comm = search(self, batches, control), self.comm
        assert not (comm._waiting or comm._arrived or comm._sent)
        (run / f"searched_{self.rank}").write_text(found)
        return found

    GPT2.first_non_finite = first_non_finite
    return nan_on_rank_1(config, run)


@pytest.mark.parametrize("zero, batch_size", [(1, 6), (2, 2)])
def test_a_search_for_what_is_not_finite_changes_no_byte_of_the_run(tmp_path, zero, batch_size):
    """The NaN comes once, in the first of four steps, of one micro-step at ZeRO-1, three at ZeRO-2."""
    runs = []
    for every in (0, 3):
        runs.append(tmp_path / str(every))
        runs[-1].mkdir()
        config = config_of(
            zero, train=dict(steps=4, batch_size=batch_size), log=dict(stats_every=every), debug=dict(hash_state=0)
        )
        assert ranks.run(2, runs[-1] / "stderr", nan_on_rank_1_and_idle_queues, config, runs[-1]) == [0, 0]
    plain, searched = runs
    assert not list(plain.glob("searched_*"))
    assert [path.read_text() for path in searched.glob("searched_*")] == ["", ""]
    assert [records(run)[0]["skipped"] for run in runs] == [True, True]
    assert losses(plain) == losses(searched)
    assert_equal(tensors(plain), tensors(searched))


def rewinding(config, run):
    """At ZeRO-0 the file is read, at the other stages each rank recalls its share."""
    original = recovery._restore_from_host

    def restore_from_host(target, model, saver, control):
        done = original(target, model, saver, control)
        windows = control.all_gather(str(model.state.window.tolist()))  # as text: places still free are NaN
        assert done == (config.parallel.zero > 0) and (not done or windows[0] == windows[1])
        return done

    recovery._restore_from_host = restore_from_host
    return nan_on_rank_1(config, run, (2,))


def test_ranks_rewind_together(tmp_path):
    """The third step fails: all go back to the second's checkpoint, and take the fourth's samples.  gloo adds two
    numbers alike at every stage, so the stages agree.
    """
    for zero in (0, 1, 2):
        run = tmp_path / str(zero)
        run.mkdir()
        config = config_of(zero, train=dict(steps=3, rewind_after=1), checkpoint=dict(every=2))
        assert ranks.run(2, tmp_path / "stderr", rewinding, config, run) == [0, 0]
        assert records(run)[2] == {"step": 2, "rewound_from": 3, "sample": 36}
        assert len(losses(run)) == 3 and load_checkpoint(find_checkpoint(run))[0]["sample"] == 48
        assert_equal(tensors(run), tensors(tmp_path / "0"))


def test_steps_that_stay_not_finite_end_all_ranks(tmp_path):
    config = config_of(train=dict(steps=4, skip_limit=2), debug=dict(hash_state=0))
    processes, _ = ranks.start(2, tmp_path / "stderr", nan_on_rank_1, config, tmp_path, range(4))
    assert [process.join(60) or process.exitcode for process in processes] == [1, 1]
    message = "NonFiniteError: step 2: loss or gradient norm was not finite for 2 steps in a row"
    assert (tmp_path / "stderr").read_text().count(message) == 2


def other_lr_on_rank_1(config, run):
    rate = 2e-3 if os.environ["RANK"] == "1" else 1e-3
    return job(config.model_copy(update={"optim": config.optim.model_copy(update={"lr": rate})}), run)


def test_ranks_with_another_configuration_or_other_data_are_refused(tmp_path):
    """A node with another config.yaml; data is told apart by its fingerprint in the same way."""
    processes, _ = ranks.start(3, tmp_path / "stderr", other_lr_on_rank_1, config_of(), tmp_path)
    assert [process.join(60) or process.exitcode for process in processes] == [1, 1, 1]
    message = "ConfigError: configuration: not the same on ranks [1] as on rank 0; copy the same files to every node"
    assert message in (tmp_path / "stderr").read_text()
    with pytest.raises(ConfigError, match=r"data: not the same on ranks \[1, 2\]"):
        consistency.require_equal(SimpleNamespace(all_gather=lambda value: [value, "other", "other"]), data=[])


def test_a_run_directory_that_not_all_ranks_see_is_refused_at_the_start(tmp_path):
    """Rank 1 looks into a directory of the same name on a disk of its own."""
    control = SimpleNamespace(
        rank=1, size=2, all_gather=lambda mine: [["name", ""] if isinstance(mine, list) else "", mine]
    )
    with pytest.raises(ConfigError, match=r"--run_dir: ranks \[1\] do not see .*; give one that all nodes see and may"):
        consistency.require_shared_run_dir(tmp_path, control, seconds=0.2)
    (tmp_path / "name").touch()
    consistency.require_shared_run_dir(tmp_path, control, seconds=0.2)
    assert [path.name for path in tmp_path.iterdir()] == ["name"]


@pytest.mark.parametrize("refused", [[1], [0], [0, 2]], ids=str)
def test_a_run_directory_that_not_all_ranks_can_write_to_is_refused_at_the_start(tmp_path, refused):
    (run := tmp_path / "run").mkdir()
    processes, _ = ranks.start(3, tmp_path / "stderr", read_only_on, refused, config_of(), run)
    assert [process.join(60) or process.exitcode for process in processes] == [1, 1, 1]
    message = f"ConfigError: --run_dir: ranks {refused} cannot write to {run} (Read-only file system); give one that"
    assert message in (tmp_path / "stderr").read_text() and not list(run.iterdir())


def read_only_on(refused, config, run):
    """These ranks have the run directory mounted so; chmod would not keep root from writing."""

    def touch(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    if int(os.environ["RANK"]) in refused:
        Path.touch = touch
    return job(config, run)


def test_weights_that_differ_end_the_run(tmp_path):
    """As if a bit of rank 1's memory had flipped."""
    processes, _ = ranks.start(2, tmp_path / "stderr", flip_on_rank_1, config_of(0), tmp_path)
    assert [process.join(60) or process.exitcode for process in processes] == [1, 1]
    assert (
        "ReplicaMismatchError: step 1: the weights of ranks [1] are not those of rank 0"
        in (tmp_path / "stderr").read_text()
    )


def flip_on_rank_1(config, run):
    original = Trainer._finish_step

    def settle(self):
        original(self)
        if self.group.rank == 1:
            self.model.K.fill(self.model.train_view.w.lnb[0][:1], 1.0)

    Trainer._finish_step = settle
    return job(config, run)


# ---- one bad rank ----


def bad_rank_1(config, run, how):
    """Rank 1 does `how`, a signal to itself or sleep, when its second step is due."""
    original = Trainer._train_step

    def bad(self, step):
        if step == 1 and self.group.rank == 1:
            time.sleep(600) if how == "sleep" else os.kill(os.getpid(), how)
        original(self, step)

    Trainer._train_step = bad
    return job(config, run)


def test_a_killed_rank_ends_the_others_and_a_restart_gives_the_unbroken_bytes(tmp_path):
    """A launcher starts all ranks again with --resume; they find no checkpoint here, or that of a step, alike."""
    config, run = config_of(train=dict(steps=3), checkpoint=dict(every=1)), tmp_path / "run"
    run.mkdir()
    processes, _ = ranks.start(2, run / "stderr", bad_rank_1, config, run, signal.SIGKILL)
    began = time.monotonic()
    assert [process.join(60) or process.exitcode for process in processes] == [1, -signal.SIGKILL]
    assert time.monotonic() - began < 60 and "PeerLostError" in (run / "stderr").read_text()
    assert run_job(2, config, run, resume=True) == 0
    whole = tmp_path / "whole"
    assert run_job(2, config, whole) == 0
    assert_equal(tensors(run), tensors(whole))
    assert losses(run) == losses(whole)


@pytest.mark.parametrize(
    "how, what", [(signal.SIGSTOP, "no longer answering"), ("sleep", "behind the others, starting")]
)
def test_a_rank_that_hangs_is_named(tmp_path, how, what):
    """Once, by the rank that finds out first: of one that sleeps perhaps by itself.  At stage 0 no exchange at the
    beginning of a step keeps ranks together.
    """
    config = config_of(0, parallel=dict(timeout=2), debug=dict(hash_state=0))
    processes, _ = ranks.start(2, tmp_path / "stderr", bad_rank_1, config, tmp_path, how)
    processes[0].join(60)
    processes[1].kill()
    assert processes[0].exitcode == 1
    [message] = [line for line in (tmp_path / "stderr").read_text().splitlines() if "nothing moved for" in line]
    assert message.startswith("error: rank ") and f"rank 1 is {what}" in message


def waiting_for_the_dead(config, run, rank):
    """A rank dies; the other waits as for a device: in C, where Python hears no signal, for minutes."""
    original = Trainer._train_step

    def train_step(self, step):
        if step == 1 and self.group.rank == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 1:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
        original(self, step)

    Trainer._train_step = train_step
    return job(config, run)


def test_a_rank_that_waits_for_a_dead_one_stops_when_told_to(tmp_path):
    """Before the timeout of 10 s, which would end it with code 1."""
    config = config_of(parallel=dict(timeout=10), debug=dict(hash_state=0))
    processes, _ = ranks.start(2, tmp_path / "stderr", waiting_for_the_dead, config, tmp_path, 1)
    processes[1].join(60)
    time.sleep(0.5)
    processes[0].terminate()
    processes[0].join(60)
    assert processes[0].exitcode == 128 + signal.SIGTERM


def test_when_the_first_rank_dies_the_others_end_without_a_launcher(tmp_path):
    """As under srun, where rank 0 holds the store; before the timeout of 8 s, which would name it otherwise."""
    config = config_of(parallel=dict(timeout=8), debug=dict(hash_state=0))
    processes, _ = ranks.start(2, tmp_path / "stderr", waiting_for_the_dead, config, tmp_path, 0)
    processes[1].join(60)
    assert processes[1].exitcode == 1
    assert "error: rank 1: the first rank, or the launcher, has ended" in (tmp_path / "stderr").read_text()


def test_who_is_behind_is_named(capsys, monkeypatch):
    """All answer, and one has done less than the others."""
    speaker = object.__new__(watchdog.Watchdog)
    calls = itertools.count(1)
    speaker.group = SimpleNamespace(rank=0, store=SimpleNamespace(add=lambda key, amount: next(calls)))
    speaker._moved, speaker._step, speaker._interval = 0.0, 7, 0.0
    monkeypatch.setattr(os, "_exit", lambda code: None)
    speaker._end([], [[9, 40, 7, "training"], [9, 40, 7, "training"], [9, 39, 6, "training"]])
    assert "rank 2 is behind the others, training at step 6" in capsys.readouterr().err
    speaker._end([], [[9, 40, 7, "training"]] * 2)
    assert not capsys.readouterr().err  # another rank has said it
    calls = itertools.count(1)
    speaker._end([], [[9, 40, 7, "training"]] * 2)
    assert "all ranks at the same point" in capsys.readouterr().err


def gone(*_arguments, **_names):
    raise RuntimeError(
        "[/torch/gloo/pair.cc:553] Connection closed by peer [10.0.0.1]:9. This is typical. Good luck\nframe"
    )


def test_who_loses_the_others_says_so_in_one_line():
    """Of torch's message the first sentence, without the line of C++."""
    with pytest.raises(PeerLostError) as lost:
        ProcessGroup("cpu", 30)._collective(gone)
    closed = "lost the other ranks in gone (Connection closed by peer [10.0.0.1]:9)"
    assert str(lost.value) == f"{closed}; one has ended: its message, or the launcher's, says why"
    with pytest.raises(PeerLostError, match="^rank 0, or the launcher, has ended: its message says why$"):
        ControlGroup("words", 1, 2, SimpleNamespace(set=gone)).all_gather(1)
