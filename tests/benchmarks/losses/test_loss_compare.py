"""benchmarks/losses/loss_compare.py: run directories that differ in one bit."""

import json

import numpy as np
from safetensors.numpy import save_file

from benchmarks.losses import loss_compare
from benchmarks.losses.loss_compare import WARM_STEPS, Result, differences, read_result
from gpt2_triton.commands.app import main


def test_differences_name_the_first_record_and_each_tensor(tmp_path):
    def result(name, loss=4.5, weight=1.0, ms=10.0):
        step_dir = tmp_path / name / "checkpoints" / "step_00000003"
        step_dir.mkdir(parents=True)
        (step_dir.parent / "step_00000002").mkdir()
        records = [dict(step=2, loss=loss, ms=ms), dict(step=3, val_loss=4.0)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / name / "metrics.jsonl").write_text(lines)
        tensors = {"params": np.full(64, weight, np.float32), "m": np.zeros((2, 8), np.float16)}
        save_file(tensors, step_dir / "rank_00000.safetensors")
        return read_result(tmp_path / name)

    old, new = result("old"), result("new", ms=20.0)
    assert differences(old, new) == [] and new.ms == [20.0]
    loss = result("loss", loss=float(np.nextafter(4.5, 5)))
    assert differences(old, loss) == ["step 2: loss 4.5 != 4.500000000000001"]
    weights = result("weight", weight=np.nextafter(1, 2, dtype=np.float32))
    [weight] = differences(old, weights)
    assert weight.startswith("rank_00000.safetensors: params: sha256 ")
    shorter = new._replace(metrics=new.metrics[:1], tensors={})
    assert len(differences(old, shorter)) == 3
    assert differences(old._replace(ms=[]), old) == ["no step was logged"]


def test_runs_of_both_versions_are_compared_and_timed_without_their_first_steps(
    tmp_path, monkeypatch, capsys
):
    def result(ms, loss=4.0):
        return Result([dict(step=1, loss=loss)], {"w": "a"}, [99.0] * WARM_STEPS + [ms])

    runs = dict(then=[result(10), result(12)], now=[result(8), result(9, loss=5.0)])
    for name in runs:
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").touch()
    monkeypatch.setattr(loss_compare, "train", lambda tree, *_: runs[tree.name].pop(0))
    monkeypatch.setattr(loss_compare.device, "count", lambda: 1)
    words = [str(tmp_path / name) for name in runs]
    assert main(loss_compare.app, [*words, "--time", "20"]) == 1
    *_, row, found = capsys.readouterr().out.splitlines()
    assert row.split()[-5:] == ["DIFFERENT", "1", "11.00", "8.50", "0.7727"]
    assert found.strip() == "step 1: loss 4.0 != 5.0"
