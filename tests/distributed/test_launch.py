"""Launching ranks: the environments of torchrun and SLURM, rendezvous, two agents as
two nodes, the batch script.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from gpt2_triton.distributed.control import ControlGroup, agree_on_session
from gpt2_triton.distributed.launcher_env import (
    NAMES,
    OF_MPI,
    first_host,
    rank_and_size,
    set_env_from_slurm,
)
from gpt2_triton.errors import ConfigError, DataError, UserError
from tests.support import ranks
from tests.support.commands import run_train
from tests.support.loop import losses

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(monkeypatch):
    for name in [
        *NAMES,
        "LOCAL_WORLD_SIZE",
        *(name for name in os.environ if name.startswith("SLURM")),
    ]:
        monkeypatch.delenv(name, raising=False)

    def setenv(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    yield setenv
    for name in [*NAMES, "LOCAL_WORLD_SIZE"]:
        os.environ.pop(name, None)


@pytest.mark.parametrize("nodes, first", [
    ("gpu1", "gpu1"), ("gpu[03-05,9],login1", "gpu03"), ("gpu-a[7]", "gpu-a7"), ("a1,b2", "a1"),
    ("n[1,4]", "n1"), ("rack1-gpu[003-004].site", "rack1-gpu003.site"),
])  # fmt: skip
def test_first_host_of_slurm_node_list(nodes, first):
    assert first_host(nodes) == first


TASK = dict(
    SLURM_JOB_ID="70001",
    SLURM_STEP_ID="0",
    SLURM_STEP_NUM_TASKS="16",
    SLURM_PROCID="9",
    SLURM_LOCALID="1",
)


@pytest.mark.parametrize("step, hosts, port", [("0", "2", "30001"), ("1", "1", None)])
def test_set_env_from_slurm_makes_a_task_a_rank(environment, step, hosts, port):
    """Steps of one job have ports of their own; LOCAL_WORLD_SIZE, for memory that ranks
    share, is set on one host.
    """
    environment(
        **TASK
        | dict(SLURM_STEP_ID=step, SLURM_STEP_NODELIST="gpu[2-3]", SLURM_STEP_NUM_NODES=hosts)
    )
    set_env_from_slurm()
    assert rank_and_size() == (9, 16)
    assert [os.environ[name] for name in NAMES[:4]] == ["9", "16", "1", "gpu2"]
    assert (os.environ["MASTER_PORT"] == "30001") == (port is not None)
    assert os.environ.get("LOCAL_WORLD_SIZE") == (None if hosts == "2" else "16")


@pytest.mark.parametrize("given", [
    {}, dict(SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_PROCID="0"),
    dict(SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"),
])  # fmt: skip
def test_process_without_launcher_is_the_only_rank(environment, given):
    """Also in a batch script or an interactive job, for any number of tasks."""
    environment(**given)
    set_env_from_slurm()
    assert rank_and_size() == (0, 1)


TORCHRUN = dict(zip(NAMES, ("1", "2", "1", "localhost", "29500"), strict=True))


def test_torchruns_environment_takes_precedence_over_slurms(environment):
    environment(**TORCHRUN | TASK)
    set_env_from_slurm()
    assert rank_and_size() == (1, 2)


def test_rank_and_size_refuses_missing_variables(environment):
    environment(WORLD_SIZE="2", RANK="0")
    with pytest.raises(
        ConfigError, match="rank 0 of 2, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"
    ):
        rank_and_size()
    environment(WORLD_SIZE="two")
    with pytest.raises(ConfigError, match="^WORLD_SIZE: expected a number, got 'two'; [^\n]*$"):
        rank_and_size()


@pytest.mark.parametrize("name", OF_MPI)
def test_processes_of_mpirun_are_no_runs_of_their_own(environment, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert rank_and_size() == (0, 1)
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        ConfigError, match=f"mpirun sets {name}, but no RANK: start with torchrun or srun"
    ):
        rank_and_size()
    environment(**TORCHRUN)
    assert rank_and_size() == (1, 2)


def test_rank_left_over_in_the_environment_is_refused(environment, capsys):
    """Rank 1 prints nothing and saves nothing."""
    environment(RANK="1")
    assert run_train("overfit") == 2
    assert "rank 1 of 1, but WORLD_SIZE, LOCAL_RANK, " in capsys.readouterr().err


def test_from_rank0_raises_the_error_on_all_ranks():
    store = HashStore()
    store.set("talk/1/1", json.dumps({}))

    def fail():
        raise OSError(30, "read-only", "run/.lock")

    for rank in (0, 1):
        with pytest.raises(OSError, match="read-only") as raised:
            ControlGroup("talk", rank, 2, store).from_rank0(fail)
        assert (raised.value.errno, raised.value.filename) == (30, "run/.lock")


def test_all_gather_keeps_numbers_exact():
    store, numbers = HashStore(), [1 / 3, 0.1 + 0.2]
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda rank: ControlGroup("talk", rank, 2, store).all_gather(numbers[rank]), range(2)
        )
    assert [*found] == [numbers, numbers]


def test_keys_of_earlier_exchanges_are_deleted():
    store = HashStore()

    def talk(rank):
        group = ControlGroup("talk", rank, 2, store)
        for _ in range(3):
            group.all_gather(rank)
        group.leave()

    with ThreadPoolExecutor(2) as pool:
        [*pool.map(talk, range(2))]
    assert store.check(["talk/3"]) and store.num_keys() == 1


def raise_a_users_error():
    raise DataError("no shards")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda group: group.from_rank0(raise_a_users_error), "no shards"),
        (lambda group: group.require_equal(data=1), "data: not the same"),
    ],
)
def test_rank_0_waits_for_the_others_before_a_users_error(call, why):
    """It may hold the store, from which they read the error."""
    store = HashStore()
    store.set("talk/1/1", json.dumps({}))
    store.set("talk/left/1", "null")
    for rank in (0, 1):
        with pytest.raises(UserError, match=why):
            call(ControlGroup("talk", rank, 2, store))
        assert store.check(["talk/left/1"]) == (rank == 1)  # taken by 0, set by 1


def test_rendezvous_ignores_tokens_of_the_previous_start():
    """torchrun keeps its store: it holds the keys of a start of three ranks, whose rank
    2 died before it accepted.
    """
    store, names = HashStore(), []
    for _ in range(2):
        with ThreadPoolExecutor(3) as pool:
            [name] = {*pool.map(lambda rank: agree_on_session(store, rank, 3, 300), range(3))}
        names.append(name)
        store.delete_key("accept/2")
    assert names[0] != names[1]


def test_rendezvous_names_missing_ranks():
    with pytest.raises(TimeoutError, match="ranks 1, 2 did not join within 0 s"):
        agree_on_session(store := HashStore(), 0, 3, 0.05)
    with pytest.raises(TimeoutError, match="rank 0 did not join"):
        agree_on_session(store, 1, 3, 0.05)


@pytest.mark.slow
def test_failed_rendezvous_prints_one_line(tmp_path):
    """torch would log the stack in C++ as well."""
    env = {
        k: v for k, v in os.environ.items() if k not in ("LOCAL_WORLD_SIZE", "TORCH_CPP_LOG_LEVEL")
    }
    env |= dict(zip(NAMES, ("1", "2", "1", "127.0.0.1", str(ranks.free_port())), strict=True))
    words = f"train.py configs/quickstart.yaml --parallel.timeout 1 --run_dir {tmp_path}"
    command = [sys.executable, *words.split()]
    started = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    [line] = started.stderr.splitlines()
    assert started.returncode == 1 and line.startswith(
        "error: rank 1: rendezvous of 2 ranks failed"
    )


CLEAN = {k: v for k, v in os.environ.items() if k not in NAMES} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
TORCHRUN_MODULE = [sys.executable, "-m", "torch.distributed.run"]
SMALL = (
    "configs/quickstart.yaml --train.seq_len 16 --model.block_size 16 "
    "--model.n_layer 1 --model.n_embd 64"
)
SMALL += " --model.n_head 1 --optim.warmup 1 --eval.every 0 --sample.every 0"
DYING = """
import os, sys, time
from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import app
from tests.support.loop import before_steps
def die(self, step):
    if (step, self.group.rank, os.environ["TORCHELASTIC_RESTART_COUNT"]) == (3, 1, "0"):
        while not os.path.isdir(sys.argv[-1] + "/checkpoints/step_00000002"):
            time.sleep(0.05)
        os.kill(os.getpid(), 9)
before_steps(die)
sys.exit(main(app, sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="on the CPU, where the bytes of a small run take seconds"
)
def test_torchrun_restarts_a_broken_job_to_the_unbroken_bytes(tmp_path):
    options = f"{SMALL} --train.steps 4 --checkpoint.every 2 --resume --run_dir {tmp_path}"
    (tmp_path / "dying.py").write_text(DYING)
    assert ranks.run(2, tmp_path / "stderr", run_train, f"{options}/whole") == [0, 0]
    restarting = "--standalone --nproc_per_node 2 --max-restarts 1"
    words = f"{restarting} {tmp_path}/dying.py {options}/broken"
    subprocess.run([*TORCHRUN_MODULE, *words.split()], cwd=ROOT, env=CLEAN, check=True)
    assert len(json.loads((tmp_path / "broken" / "run.json").read_text())["starts"]) == 2
    shares = [
        sorted((tmp_path / run / "checkpoints").glob("step_00000004/rank_*"))
        for run in ("whole", "broken")
    ]
    assert [p.read_bytes() for p in shares[0]] == [p.read_bytes() for p in shares[1]] and len(
        shares[0]
    ) == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="two agents would each take GPU 0")
def test_two_torchrun_agents_are_two_nodes(tmp_path):
    """One process each, as on two hosts; the losses are those of one rank."""
    train = f"{SMALL} --train.steps 2 --run_dir {tmp_path}"
    words = "--nnodes 2 --nproc_per_node 1 --rdzv_backend c10d --rdzv_id test "
    words += f"--rdzv_endpoint 127.0.0.1:{ranks.free_port()} train.py {train}/two"
    command = [*TORCHRUN_MODULE, *words.split()]
    with contextlib.ExitStack() as stack:
        agents = []
        for number in range(2):
            errors = stack.enter_context(open(tmp_path / f"stderr {number}", "w"))
            agents.append(
                stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=CLEAN, stderr=errors))
            )
            stack.callback(agents[-1].kill)
        assert [agent.wait() for agent in agents] == [0, 0], [
            p.read_text() for p in tmp_path.glob("stderr*")
        ]
    assert ranks.run(1, tmp_path / "stderr", run_train, f"{train}/one") == [0]
    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert len(one) == 2 and two == pytest.approx(one, rel=2e-6)


@pytest.fixture
def batch(tmp_path, monkeypatch):
    """Start the batch script with stand-ins for scontrol, srun and torchrun that write down their
    arguments; torchrun "saves" on SIGTERM or when `time_is_up` exists, and otherwise never ends.
    """
    programs = {
        "scontrol": 'echo "$@" >> calls; echo node1',
        "srun": '[ $1 = --kill-on-bad-exit=1 ] && shift; exec "$@"',
        "torchrun": "trap 'mkdir -p runs/7; [ ! -e running ] || touch runs/7/PREEMPTED\n"
        "[ ! -e finished ] || mkdir runs/7/checkpoints; exit 1' TERM\n"
        'echo "$@" > started\n'
        "while :; do sleep 0.1; [ ! -e time_is_up ] || { mkdir -p runs/7; "
        "touch runs/7/PREEMPTED; exit 0; }; done",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_NNODES="2",
        SLURM_GPUS_ON_NODE="8",
        USER="me",
    )
    env = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ["bash", ROOT / "configs" / "train.sbatch", "x.yaml"]
    with subprocess.Popen(script, cwd=tmp_path, env=env, start_new_session=True) as process:
        yield process
        with contextlib.suppress(ProcessLookupError):
            # of a script that has not ended, with all that it started
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("state", ["starting", "running", "finished"])
def test_batch_script_forwards_the_signal_and_requeues_an_unfinished_job(batch, tmp_path, state):
    """A job that was only starting has left neither PREEMPTED nor a checkpoint."""
    (tmp_path / state).touch()
    finished = state == "finished"
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait() == (1 if finished else 0)
    assert ("requeue 7" in (tmp_path / "calls").read_text()) is not finished
    words = (tmp_path / "started").read_text()
    assert "--rdzv_endpoint node1:20007 --rdzv_id 7 " in words  # a port of this job's
    assert words.endswith(" -m gpt2_triton train x.yaml --run_dir runs/7 --resume\n")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_batch_script_requeues_after_the_time_limit(batch, tmp_path):
    (tmp_path / "time_is_up").touch()
    assert batch.wait() == 0
    assert "requeue 7" in (tmp_path / "calls").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "zero, precision, optimizer",
    [
        (0, "bf16", "adamw"),
        (1, "bf16", "adamw"),
        (2, "bf16", "adamw"),
        (1, "fp8", "adamw"),
        (2, "fp8", "muon"),
    ],
)
def test_two_gpus_are_one(tmp_path, zero, precision, optimizer):
    """Peer copies and CUDA graphs, two micro-steps per step, gradients of six
    layers together, two at a time.

    The weights of both GPUs are equal after every step.  Two runs give the same bytes, and so does
    one of two nodes, which uses NCCL.  Losses are those of one GPU but for bf16 weights, which
    round differently where a sum differs in its last bit: 2^-9 of an update, 1e-3 of the loss at
    most after 8 steps.  In fp8 and with Muon the same bound holds: scales are maxima over ranks,
    and matrices are whole before they are orthogonalised.
    """
    options = (
        "--model.n_layer 8 --model.vocab_size 4096 --train.steps 8 --optim.warmup 4 "
        "--train.dtype bf16 --train.batch_size 64"
    )
    options += " --train.total_batch_tokens 65536 --eval.every 4"
    options += " --train.seq_len 256 --model.block_size 256 --optim.lr 1e-3"
    options += f" --train.precision {precision} --optim.name {optimizer}"
    options += f" --sample.every 8 --debug.hash_state 1 --parallel.zero {zero} --run_dir"
    train, env = (
        ["train.py", "configs/quickstart.yaml", *options.split()],
        os.environ | {"OMP_NUM_THREADS": "1"},
    )
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    for run, launcher in (("one", []), ("two", torchrun), ("again", torchrun)):
        subprocess.run(
            [sys.executable, *launcher, *train, str(tmp_path / run)], cwd=ROOT, env=env, check=True
        )
    nodes = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--master_port",
        str(ranks.free_port()),
        "--node_rank",
    ]
    apart = [
        subprocess.Popen(
            [sys.executable, *nodes, str(node), *train, str(tmp_path / "apart")],
            cwd=ROOT, env=env | {"CUDA_VISIBLE_DEVICES": str(node)},
        )
        for node in range(2)
    ]  # fmt: skip
    assert [agent.wait() for agent in apart] == [0, 0]
    one, two, again, nodes_of_one = (
        losses(tmp_path / run) for run in ("one", "two", "again", "apart")
    )
    assert len(two) == 8 and two == again == nodes_of_one and two == pytest.approx(one, rel=1e-3)
    shares = [
        sorted((tmp_path / run / "checkpoints").glob("*/rank_*"))
        for run in ("two", "again", "apart")
    ]
    bytes_of = [[p.read_bytes() for p in paths] for paths in shares]
    assert bytes_of[0] == bytes_of[1] == bytes_of[2] and len(shares[0]) == 2
