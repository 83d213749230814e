"""benchmarks.losses.loss_compare: run directories that differ in one bit, and a
checkout compared with itself.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.losses import loss_compare
from benchmarks.losses.loss_compare import (
    Case,
    RunFailed,
    checkout,
    commands,
    compare,
    differences,
    read_result,
)

ROOT = Path(__file__).parents[3]
TINY = (
    "configs/quickstart.yaml --model.n_layer 1 --model.n_head 1 "
    "--model.n_embd 64 --model.block_size 16"
    " --train.steps 2 --train.batch_size 2 --train.seq_len 16 "
    "--optim.warmup 1 --eval.every 0 --sample.every 0"
)


@pytest.fixture
def run_dir(tmp_path):
    """A function that writes a run directory of 3 steps: weights of one
    rank, and the loss of step 2.
    """

    def write(name: str, loss: float = 4.5, weight: float = 1.0, ms: float = 10.0) -> Path:
        step_dir = tmp_path / name / "checkpoints" / "step_00000003"
        step_dir.mkdir(parents=True)
        (step_dir.parent / "step_00000002").mkdir()
        records = [
            {"step": 1, "loss": 5.0, "ms": ms},
            {"step": 2, "loss": loss, "ms": ms},
            {"step": 3, "val_loss": 4.0},
        ]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in records)
        )
        tensors = {"params": np.full(64, weight, np.float32), "m": np.zeros((2, 8), np.float16)}
        save_file(tensors, step_dir / "rank_00000.safetensors")
        return tmp_path / name

    return write


def test_differences_name_the_first_record_and_each_tensor(run_dir):
    old, new = read_result(run_dir("old")), read_result(run_dir("new", ms=20.0))
    assert differences(old, new) == [] and new.ms == [20.0, 20.0]
    assert sorted(old.tensors) == ["rank_00000.safetensors: m", "rank_00000.safetensors: params"]
    loss = read_result(run_dir("loss", loss=float(np.nextafter(4.5, 5))))
    assert differences(old, loss) == ["step 2: loss 4.5 != 4.500000000000001"]
    [weight] = differences(
        old, read_result(run_dir("weight", weight=float(np.nextafter(1, 2, dtype=np.float32))))
    )
    assert weight.startswith("rank_00000.safetensors: params: sha256 ")
    shorter = new._replace(
        metrics=new.metrics[:2], tensors={k: v for k, v in new.tensors.items() if "params" in k}
    )
    records, missing = differences(old, shorter)
    assert records == "records in metrics.jsonl: 3 != 2"
    assert missing.startswith("rank_00000.safetensors: m: sha256 ") and missing.endswith(
        "!= missing"
    )
    assert differences(old._replace(ms=[]), old) == ["no step was logged"]


def test_hashes_include_shape_and_dtype(run_dir):
    run, hashes = run_dir("run"), set()
    for shape, dtype in (
        ((4, 2), np.float32),
        ((8,), np.float32),
        ((8,), np.int32),
        ((), np.float32),
    ):
        save_file(
            {"x": np.zeros(shape, dtype)},
            run / "checkpoints" / "step_00000003" / "rank_00000.safetensors",
        )
        hashes |= {*read_result(run).tensors.values()}
    assert len(hashes) == 4


def test_commands_give_each_torchrun_agent_one_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "wheels")
    one, two = commands(tmp_path, Case("x", "a.yaml", gpus=2, nodes=2), tmp_path / "run")
    assert [c[1]["CUDA_VISIBLE_DEVICES"] for c in (one, two)] == ["0", "1"]
    assert (
        one[0][one[0].index("--nnodes") + 1] == "2"
        and one[0][one[0].index("--nproc_per_node") + 1] == "1"
    )
    [(copies, environment)] = commands(
        tmp_path, Case("x", "a.yaml --k v", gpus=2), tmp_path / "run"
    )
    assert "--standalone" in copies and environment["PYTHONPATH"] == f"{tmp_path}:wheels"
    assert copies[-6:] == [
        f"{tmp_path}/train.py",
        f"{tmp_path}/a.yaml",
        "--k",
        "v",
        "--run_dir",
        f"{tmp_path}/run",
    ]


@pytest.mark.parametrize("words, message", [
    (["--cpu", "--cpus"], "unknown option --cpus"),
    ([], "nothing to compare: expected --cpu, --gpu"),
    (["--time", "5"], "more than the 10 steps that are not timed, got 5"),
])  # fmt: skip
def test_parse_refuses_wrong_options(words, message, capsys):
    with pytest.raises(SystemExit):
        loss_compare.parse(["old", "new", *words])
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_sigterm_ends_the_run_under_way_too(tmp_path):
    """The checkout's train.py writes its process id and waits."""
    tree, work = tmp_path / "tree", tmp_path / "work"
    tree.mkdir()
    work.mkdir()
    (tree / "train.py").write_text(
        "import os, signal\nprint(os.getpid(), file=open('pid', 'w'))\nsignal.pause()\n"
    )
    command = [sys.executable, "-m", "benchmarks.losses.loss_compare", tree, tree, "--cpu"]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | {"TMPDIR": str(work)}) as process:
        while not (found := [path.read_text() for path in work.glob("*/pid")]) or not found[0]:
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait() == 143
    assert not Path(f"/proc/{found[0].strip()}").exists() and not [*work.iterdir()]


def test_checkout_refuses_an_unknown_source(tmp_path):
    with pytest.raises(
        RunFailed, match="no-such-commit: neither a directory with train.py nor a commit"
    ):
        checkout("no-such-commit", tmp_path, "old")


@pytest.mark.slow
def test_compare_finds_a_checkout_equal_to_itself(tmp_path):
    """And its run directories are deleted."""
    row = compare({"old": ROOT, "new": ROOT}, Case("tiny", TINY), tmp_path)
    assert (
        row == {"case": "tiny", "differences": [], "tensors": row["tensors"]}
        and row["tensors"] >= 3
    )
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # the builtin text


def test_a_run_that_fails_is_an_error_with_the_end_of_its_output(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[2:4])\nsys.exit(2)\n")
    with pytest.raises(RunFailed, match=r"exit codes \[2\]\n\['--optim\.lrr', '1'\]"):
        loss_compare.train(tmp_path, Case("tiny", "a.yaml --optim.lrr 1"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
