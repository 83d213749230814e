"""`python -m benchmarks steps`: the steps that are timed, the runs as processes, the table.  The times need a GPU."""

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from benchmarks import energy, step_time, torch_gpt2
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


OURS = dict(ms=100.0, joules=71.24, gib=17.25, planned=17.0, first_step=3.21)
TORCH = dict(ms=110.0, joules=None, gib=23.0, first_step=20.0)


def row(program="ours bf16", report=OURS, recompute="gelu"):
    return dict(size="d12", batch=64, program=program, recompute=recompute, report=report)


def test_table_computes_rates_and_ratios():
    # 65,536 tokens in 0.1 s; 6N + 6LCT with N = 124,475,904 (the vocabulary padded, wpe in it) and LCT = 9,437,184
    mfu = 655_360 * 6 * (124_475_904 + 9_437_184) / 989e12
    rows = [row(), row("PyTorch", TORCH, None), row("torchao rowwise", TORCH | dict(ms=55.0), None)]
    _, ours, torch_line, other = (line.split() for line in step_time.table(rows, 989e12).splitlines())
    assert ours == f"d12 64 ours bf16 gelu 100.0 655,360 {mfu:.1%} 71.2 17.25 17.00 3.2 1.100x 0.75x".split()
    assert torch_line == f"d12 64 PyTorch - 110.0 595,782 {mfu / 1.1:.1%} - 23.00 - 20.0 1.000x 1.00x".split()
    assert other[-2:] == ["2.000x", "1.00x"]


def test_table_has_dashes_for_missing_runs():
    head, *lines = step_time.table([row(), row("PyTorch", None, None)], None).splitlines()
    assert lines[0].split()[-2:] == ["-"] * 2 and lines[0].split()[7] == "-"  # no PyTorch, and no peak: no MFU
    assert lines[1].split() == ["d12", "64", "PyTorch", *["-"] * 10]
    assert len({len(line) for line in (head, *lines)}) == 1


def test_energy_is_taken_between_changes_of_the_counter():
    """A counter that changes every 100 ms, read at other times: its first and last values are incomplete."""
    samples = [(t / 1000, 700 * (t // 100) / 10) for t in range(30, 1_050, 7)]
    assert energy.mean_watts(samples) == pytest.approx(700, rel=0.02)  # a sample may come 7 ms late
    assert energy.mean_watts(samples[:20]) is None and energy.mean_watts([]) is None


def test_without_a_counter_there_are_no_joules(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with energy.Power() as power:
        pass
    assert power.joules(1.0) is None


def test_torchao_takes_the_linears_of_the_layers_and_not_the_head(monkeypatch):
    seen = {}

    def convert(model, config, module_filter_fn):
        seen[config] = [
            name for name, m in model.named_modules() if isinstance(m, nn.Linear) and module_filter_fn(m, name)
        ]
        return model

    recipes = SimpleNamespace(from_recipe_name=lambda name: name)
    float8 = SimpleNamespace(Float8LinearConfig=recipes, convert_to_float8_training=convert)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(float8=float8))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)
    with torch.device("meta"):
        torch_gpt2.in_float8(torch_gpt2.GPT2(ModelConfig(size="d12")), "rowwise")
    assert len(seen["rowwise"]) == 4 * 12 and all(name.startswith("layers.") for name in seen["rowwise"])


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

    def stand_in(program, *more):
        return run(dataclasses.replace(program, module="standin"), *more)

    monkeypatch.setattr(step_time, "_run", stand_in)
    monkeypatch.setattr(step_time, "peak_flops", lambda: 989e12)
    both = ["bf16", "fp8"]
    assert step_time.compare_sizes(["d12"], 8, 7, "none", both, "head,0", "torchao", out) == 0
    saw = {r["program"]: r["report"]["saw"] for r in json.loads(out.read_text())["rows"]}
    assert saw == {
        "ours bf16": ["d12", "8", "7", "none", "bf16"], "ours fp8": ["d12", "8", "7", "none", "fp8", "head,0"],
        "PyTorch": ["d12", "8", "7"],
        "torchao tensorwise": ["d12", "8", "7", "tensorwise"], "torchao rowwise": ["d12", "8", "7", "rowwise"],
    }  # fmt: skip
    assert step_time.compare_sizes(["d12", "d24", "d36"], None, 6, None, ["bf16"], None, "torch", out) == 1
    text, err = capsys.readouterr()
    assert "PyTorch d24 B 64: failed with code 1" in text and "ours bf16 d36 B 32: 100.0 ms per step" in text
    assert "no memory left" in err
    ours, torchs = (
        [r["report"] and r["report"]["saw"] for r in json.loads(out.read_text())["rows"] if r["program"] == program]
        for program in ("ours bf16", "PyTorch")
    )
    assert ours == [
        ["d12", "64", "6", "gelu", "bf16"],
        ["d24", "64", "6", "gelu+ln", "bf16"],
        ["d36", "32", "6", "gelu+ln", "bf16"],
    ]  # fmt: skip
    assert torchs == [["d12", "64", "6"], None, ["d36", "32", "6"]]


@pytest.mark.parametrize("module", ["our_gpt2", "torch_gpt2"])
@pytest.mark.parametrize(
    "words",
    [[], ["d12", "64", "many", "0", "gelu"], ["d12", "64", "9", "0", *"abcd"]],
    ids=["none", "no number", "many"],
)
def test_programs_print_their_usage(module, words):
    run = subprocess.run([sys.executable, "-m", f"benchmarks.{module}", *words], capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith(f"usage: python -m benchmarks.{module} SIZE BATCH STEPS START ")
    assert run.stderr.count("\n") == 1
