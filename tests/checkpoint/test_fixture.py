"""A checkpoint written by an earlier version of the code is resumed and
must give the recorded bytes.

The files of tests/fixtures/run are those of a run that was killed after step 6; its checkpoint is
that of step 4.  tests/fixtures/README.md describes how they are made.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.losses.loss_compare import read_result

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the recorded bits are those of a CPU"
)
FRESH = (
    "--train.dtype fp32 --optim.master none --train.steps 2 "
    "--checkpoint.every 0 --log.stats_every 0"
)


def pinned_environment() -> dict[str, str]:
    """Return an environment in which numpy gives the same bits on every x86-64 CPU
    with AVX2; no GPU is visible.

    On a CPU the kernels compute with numpy.  By default OpenBLAS and numpy choose their
    code by the CPU, and the number of threads orders the sums of a product: three
    causes of different last bits.
    """
    try:
        numpy_core = import_module("numpy._core._multiarray_umath")
    except ImportError:
        numpy_core = import_module("numpy.core._multiarray_umath")  # before numpy 2
    # numpy below 2.4 has a name for each group of AVX512, later X86_V4 for the first of them
    disabled = [
        name
        for name in numpy_core.__cpu_dispatch__
        if name.startswith("AVX512") or name == "X86_V4"
    ]
    pins = {
        "OPENBLAS_CORETYPE": "Haswell",
        "OPENBLAS_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "NPY_DISABLE_CPU_FEATURES": " ".join(disabled),
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    launcher = (
        "NPY_ENABLE_CPU_FEATURES",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "SLURM_STEP_ID",
    )
    return {name: value for name, value in os.environ.items() if name not in launcher} | pins


def train(directory: Path, options: str) -> None:
    """Run train.py in `directory`, which holds tiny.yaml and its data, named by relative paths."""
    command = [sys.executable, str(ROOT / "train.py"), "tiny.yaml", *options.split()]
    done = subprocess.run(
        command,
        cwd=directory,
        env=pinned_environment(),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def read_run(run_dir: Path) -> dict[str, Any]:
    """Return a run's records without times: metrics, statistics, tensors and
    state of the last checkpoint.
    """
    result = read_result(run_dir)
    state = json.loads((max((run_dir / "checkpoints").glob("step_*")) / "state.json").read_text())
    stats = run_dir / "stats.jsonl"
    lines = stats.read_text().splitlines() if stats.exists() else []
    return {
        "metrics": result.metrics,
        "tensors": result.tensors,
        "state": state,
        "stats": list(map(json.loads, lines)),
    }


def resume(directory: Path) -> dict[str, Any]:
    """Resume a copy of the recorded run from step 4 and train to step 8."""
    shutil.copytree(FIXTURES, directory, dirs_exist_ok=True)
    train(directory, "--run_dir run --resume")
    return read_run(directory / "run")


def fresh(directory: Path) -> dict[str, Any]:
    """Train 2 steps from new weights in fp32."""
    shutil.copytree(FIXTURES, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    train(directory, f"{FRESH} --run_dir fresh")
    return read_run(directory / "fresh")


def versions() -> dict[str, str]:
    """Return what the bits depend on apart from the code: releases of numpy differ in
    the last bits of products.
    """
    return {"numpy": np.__version__, "machine": platform.machine()}


def recorded(name: str) -> Any:
    return json.loads((FIXTURES / "expected.json").read_text())[name]


needs_recorded_versions = pytest.mark.skipif(
    versions() != recorded("versions"),
    reason=f"bits recorded with {recorded('versions')}, here is {versions()}",
)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> dict[str, Any]:
    return resume(tmp_path_factory.mktemp("resumed"))


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dictionaries by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return flat


def require_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Compare every record, every tensor and every key of the recorded state; later
    versions may add keys to it.
    """
    assert got["metrics"] == want["metrics"]
    assert got["stats"] == want["stats"]
    assert got["tensors"] == want["tensors"]
    state, wanted = leaves(got["state"]), leaves(want["state"])
    # free keys with other defaults now
    for key in ("config.log.wandb_project", "config.memory.recompute"):
        del wanted[key]
    assert {key: state.get(key) for key in wanted} == wanted


@pytest.mark.slow
@needs_recorded_versions
def test_resumed_run_gives_the_recorded_bytes(resumed):
    require_equal(resumed, recorded("resumed"))


def test_resumed_run_gives_the_recorded_losses_with_any_numpy(resumed):
    got, want = resumed["metrics"], recorded("resumed")["metrics"]
    assert [record["step"] for record in got] == [record["step"] for record in want]
    for record, expected in zip(got, want, strict=True):
        # bf16: numpy 1.26 and 2.4 differ by 2e-5
        assert record == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@needs_recorded_versions
def test_fresh_fp32_run_gives_the_recorded_bytes(tmp_path):
    require_equal(fresh(tmp_path), recorded("fresh"))


def write_run(directory: Path) -> None:
    """Train a new run and reduce it to a run that was killed after step 6 with
    the checkpoint of step 4.
    """
    shutil.copytree(FIXTURES, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run"))
    train(directory, "--run_dir run")
    run = directory / "run"
    for step in (2, 6, 8):
        shutil.rmtree(run / "checkpoints" / f"step_{step:08d}")
    for name in ("metrics.jsonl", "stats.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        (run / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= 6))
    about = json.loads((run / "run.json").read_text())
    about["starts"][0]["command"][0] = "train.py"  # not where this checkout is
    (run / "run.json").write_text(json.dumps(about, indent=1) + "\n")
    shutil.rmtree(FIXTURES / "run", ignore_errors=True)
    shutil.copytree(run, FIXTURES / "run")


def write_expected(directory: Path) -> None:
    found = {
        "versions": versions(),
        "resumed": resume(directory / "1"),
        "fresh": fresh(directory / "2"),
    }
    (FIXTURES / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    writers = {"run": [write_run, write_expected], "expected": [write_expected]}
    if len(sys.argv) != 3 or sys.argv[1] != "--write" or sys.argv[2] not in writers:
        sys.exit("usage: python -m tests.checkpoint.test_fixture --write run|expected")
    for write in writers[sys.argv[2]]:
        with tempfile.TemporaryDirectory() as name:
            write(Path(name))
