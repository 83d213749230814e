"""`python -m benchmarks steps`: the steps that are timed, the runs as processes, the table.  The times need a GPU."""

import json

import pytest
import torch

from benchmarks import step_time, torch_gpt2
from benchmarks.our_gpt2 import run_steps
from benchmarks.sizes import SIZES, bucket_elements, config_of
from gpt2_triton.config.schema import ModelConfig
from tests.support.tiny import packed_batch, tiny_model


def test_two_micro_steps_equal_one_step_of_the_same_batch():
    """The loss is a mean: two equal micro-batches have the loss of one, and add up halves of its gradient."""
    losses = []
    for micro_steps in (1, 2):
        model, config = tiny_model(train=dict(total_batch_tokens=micro_steps * 32))
        results = list(run_steps(model, packed_batch(config), range(2)))
        assert model.shape.accumulation == micro_steps and len(results) == 2
        losses += [[(result.loss, result.norm) for result in results]]
    assert losses[1] == [pytest.approx(step, rel=1e-5) for step in losses[0]]  # other roundings of the same sums


def test_run_steps_trains():
    model, config = tiny_model()
    results = list(run_steps(model, packed_batch(config), range(3)))
    assert [r.applied for r in results] == [True] * 3
    assert results[2].loss < results[1].loss < results[0].loss


@pytest.mark.parametrize("size", SIZES)
def test_torch_model_has_as_many_parameters(size):
    with torch.device("meta"):
        model = torch_gpt2.GPT2(ModelConfig(size=size))
    assert sum(p.numel() for p in model.parameters()) == config_of(size, 1, "none").n_params


def test_bucket_elements_are_those_of_a_layer_and_of_the_embeddings():
    assert bucket_elements("d12") == (7_077_888, 39_419_904) and bucket_elements("d48") == (30_720_000, 82_124_800)


OURS = dict(ms=100.0, gib=17.25, planned=17.0, first_step=3.21)
TORCH = dict(ms=110.0, gib=23.0, first_step=20.0)


def row(ours=OURS, other=TORCH):
    return dict(size="d12", batch=64, recompute="gelu", ours=ours, torch=other)


def test_table_computes_rates_and_ratios():
    # 65,536 tokens in 0.1 s; 6N + 6LCT with N = 124,475,904 (the vocabulary padded, wpe in it) and LCT = 9,437,184
    mfu = 655_360 * 6 * (124_475_904 + 9_437_184) / 989e12
    line = step_time.table([row()], 989e12).splitlines()[1]
    assert line.split() == (
        f"d12 64 gelu 100.0 655,360 {mfu:.1%} 17.25 17.00 3.2 110.0 595,782 23.00 20.0 1.100x 0.75x".split()
    )


def test_table_has_dashes_for_missing_runs():
    head, *lines = step_time.table([row(other=None), row(ours=None), row()], None).splitlines()
    assert lines[0].split()[9:] == ["-"] * 6 and lines[0].split()[5] == "-"  # no peak: no MFU
    assert lines[1].split()[3:9] == ["-"] * 6 and lines[1].split()[9] == "110.0" and lines[1].split()[13:] == ["-"] * 2
    assert len({len(line) for line in (head, *lines)}) == 1


RUN = """
import json, sys
size, batch, steps, start, *level = sys.argv[1:]
print("something else")
if size == "d24" and not level:
    sys.exit("no memory left")
print(json.dumps(dict(ms=100.0, gib=2.0, planned=1.5, first_step=1.0, saw=[size, batch, steps, *level])))
"""


def test_compare_sizes_runs_processes_and_reports_a_failed_one(tmp_path, monkeypatch, capsys):
    (tmp_path / "standin.py").write_text(RUN)
    monkeypatch.chdir(tmp_path)  # python -m looks here
    run, out = step_time._run, tmp_path / "figures.json"
    monkeypatch.setattr(step_time, "_run", lambda who, module, *more: run(who, "standin", *more))
    monkeypatch.setattr(step_time, "peak_flops", lambda: 989e12)
    assert step_time.compare_sizes(["d12"], 8, 7, "none", True, out) == 0
    assert step_time.compare_sizes(["d12", "d24", "d36"], None, 6, None, True, out) == 1
    text, err = capsys.readouterr()
    assert "PyTorch d24 B 64: failed with code 1" in text and "ours d36 B 32: 100.0 ms per step" in text
    assert "no memory left" in err
    written = json.loads(out.read_text())
    assert [r["ours"]["saw"] for r in written["rows"]] == [
        ["d12", "64", "6", "gelu"], ["d24", "64", "6", "gelu+ln"], ["d36", "32", "6", "gelu+ln"],
    ]  # fmt: skip
    assert [r["torch"] and r["torch"]["saw"] for r in written["rows"]] == [["d12", "64", "6"], None, ["d36", "32", "6"]]
