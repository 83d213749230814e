"""benchmarks.losses.loss_compare: run directories that differ in one bit, and a
checkout compared with itself.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks.losses.loss_compare import (
    Case,
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


@pytest.mark.slow
def test_compare_finds_a_checkout_equal_to_itself(tmp_path):
    """And its run directories are deleted."""
    row = compare({"old": ROOT, "new": ROOT}, Case("tiny", TINY), tmp_path)
    assert (
        row == {"case": "tiny", "differences": [], "tensors": row["tensors"]}
        and row["tensors"] >= 3
    )
    assert [path.name for path in tmp_path.iterdir()] == ["data"]  # the builtin text
