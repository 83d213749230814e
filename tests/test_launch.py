"""How several ranks are started: torchrun's and SLURM's environments, two agents as two nodes, the batch script."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpt2_triton.config import ConfigError
from gpt2_triton.crew import Crew
from gpt2_triton.ranks import NAMES, first_host, rank_and_size, read_environment
from tests.ranks import free_port

ROOT = Path(__file__).parents[1]


@pytest.fixture
def environment(monkeypatch):
    for name in [*NAMES, *(name for name in os.environ if name.startswith("SLURM"))]:
        monkeypatch.delenv(name, raising=False)

    def setenv(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    yield setenv
    for name in NAMES:
        os.environ.pop(name, None)


@pytest.mark.parametrize("nodes, first", [
    ("gpu1", "gpu1"), ("gpu[03-05,9],login1", "gpu03"), ("gpu-a[7]", "gpu-a7"), ("a1,b2", "a1"), ("n[1,4]", "n1"),
    ("rack1-gpu[003-004].site", "rack1-gpu003.site"),
])  # fmt: skip
def test_the_first_host_of_slurms_list(nodes, first):
    assert first_host(nodes) == first


def test_a_task_of_srun_is_a_rank(environment):
    environment(SLURM_JOB_ID="70001", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="16", SLURM_STEP_NODELIST="gpu[2-3]")
    environment(SLURM_PROCID="9", SLURM_LOCALID="1")
    read_environment()
    assert rank_and_size() == (9, 16)
    assert [os.environ[name] for name in NAMES] == ["9", "16", "1", "gpu2", "30001"]


@pytest.mark.parametrize("given", [
    {}, dict(SLURM_JOB_ID="7", SLURM_NTASKS="8", SLURM_PROCID="0"),
    dict(SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0"),
])  # fmt: skip
def test_a_process_by_itself_is_the_only_rank(environment, given):
    """Also in a batch script or an interactive job, whatever the number of tasks they have."""
    environment(**given)
    read_environment()
    assert rank_and_size() == (0, 1)


def test_torchruns_environment_goes_before_slurms(environment):
    environment(**dict(zip(NAMES, ("1", "2", "1", "localhost", "29500"), strict=True)))
    environment(SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="4", SLURM_PROCID="3")
    read_environment()
    assert rank_and_size() == (1, 2)


def test_an_environment_that_is_not_whole_is_refused(environment):
    environment(WORLD_SIZE="2", RANK="0")
    with pytest.raises(ConfigError, match="WORLD_SIZE is 2, but LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"):
        rank_and_size()


class Store(dict):
    """torch.distributed's key-value store, as far as a crew needs it."""

    set, delete_key = dict.__setitem__, dict.pop

    def check(self, keys):
        return all(key in self for key in keys)


def test_an_error_of_the_first_rank_is_raised_on_all():
    store, error = Store(), OSError(28, "disk full")
    store["talk/1/1"] = json.dumps({})

    def fail():
        raise error

    for rank in (0, 1):
        with pytest.raises(OSError, match="disk full") as raised:
            Crew("talk", rank, 2, store).first(fail)
        assert raised.value.errno == 28


def test_numbers_pass_between_ranks_as_they_are():
    store, value = Store(), 0.1 + 0.2
    store["talk/1/1"] = json.dumps(value)
    assert Crew("talk", 0, 2, store).all(1 / 3) == [1 / 3, value] == Crew("talk", 1, 2, store).all(value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="two agents would each take GPU 0")
def test_two_torchrun_agents_are_two_nodes(tmp_path):
    """One process each, as on two hosts; the losses are those of the recipe on one rank."""
    options = "--train.steps 2 --optim.warmup 1 --train.seq_len 32 --model.block_size 32 --eval.every 0"
    train = ["train.py", "configs/quickstart.yaml", *options.split(), "--run_dir"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--rdzv_id", "test"]
    env = {k: v for k, v in os.environ.items() if k not in NAMES} | {"OMP_NUM_THREADS": "1"}
    commands = [[*torchrun, *train, str(tmp_path / "two")]] * 2
    agents = [subprocess.Popen(c, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True) for c in commands]
    assert [agent.wait(60) for agent in agents] == [0, 0], [agent.stderr.read() for agent in agents]
    subprocess.run([sys.executable, *train, str(tmp_path / "one")], cwd=ROOT, env=env, check=True)
    one, two = ([json.loads(line)["loss"] for line in open(tmp_path / run / "metrics.jsonl")] for run in ("one", "two"))
    assert len(one) == 2 and two == pytest.approx(one, rel=2e-6)


@pytest.fixture
def batch(tmp_path, monkeypatch):
    """The batch script among programs that only write down how they are called; torchrun saves when it is told to."""
    programs = {
        "scontrol": 'echo "$@" >> calls; echo node1',
        "srun": '[ $1 = --kill-on-bad-exit=1 ] && shift; exec "$@"',
        "torchrun": "trap 'mkdir -p runs/7; [ -e finished ] || touch runs/7/PREEMPTED; exit 1' TERM; touch started\n"
        "for i in $(seq 100); do sleep 0.1; done",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = dict(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node[1-2]", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8", USER="me")
    env = os.environ | slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", ROOT / "configs" / "train.sbatch", "x.yaml"], cwd=tmp_path, env=env)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("finished", [False, True])
def test_the_batch_script_passes_the_signal_on_and_requeues_what_is_not_finished(batch, tmp_path, finished):
    if finished:
        (tmp_path / "finished").touch()
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    batch.send_signal(signal.SIGTERM)
    assert batch.wait(10) == (1 if finished else 0)
    assert ("requeue 7" in (tmp_path / "calls").read_text()) is not finished
