"""`python -m gpt2_triton bench`: what it counts, what it prints, what it refuses.  The times themselves need a GPU."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import ceilings, ops, step_time, torch_gpt2
from benchmarks.our_gpt2 import run_steps
from benchmarks.sizes import SIZES, config_of
from gpt2_triton import device
from gpt2_triton.commands import tools as tools_app
from gpt2_triton.commands.app import main
from gpt2_triton.kernels.contract import LAUNCHERS
from tests.support.tiny import packed_batch, tiny_model


class Mark:
    def record(self):
        pass


@pytest.fixture
def record(monkeypatch):
    """record(level): a tiny model in Timed kernels after one step, two layers, padded vocabulary, chunks of 20 and 12
    rows; its dimensions and its operations.
    """
    monkeypatch.setattr(ops, "events", lambda: (Mark(), Mark()))

    def run(level="gelu"):
        timed = ops.Timed(on=lambda: False)
        model, config = tiny_model(timed, model=dict(vocab_size=300), memory=dict(recompute=level, head_rows=20))
        timed.on = lambda: True
        [result] = run_steps(model, packed_batch(config), range(1))
        assert result.applied
        return SimpleNamespace(**model.dims), list(timed.operations.values())

    return run


def calls(operations, name):
    return sorted((op.nbytes, len(op.spans)) for op in operations if op.name == name)


def test_two_micro_steps_of_the_same_batch_are_one_step_of_it():
    """The loss is a mean: of two equal micro-batches that of one, whose gradients are scaled by half and added up."""
    losses = []
    for micro_steps in (1, 2):
        model, config = tiny_model(train=dict(total_batch_tokens=micro_steps * 32))
        results = list(run_steps(model, packed_batch(config), range(2)))
        assert config.accumulation == micro_steps and len(results) == 2
        losses += [[(result.loss, result.norm) for result in results]]
    assert losses[1] == [pytest.approx(step, rel=1e-5) for step in losses[0]]  # other roundings of the same sums


# ---- what is counted ----


def test_every_launcher_of_a_step_is_accounted_for(record):
    _, operations = record()
    no_step = {"fill", "normal_init", "column_sums"}
    no_step |= {"parameter_stats", "tensor_stats"}  # of a watched step only
    no_step |= {"cache_fill", "decode_attention", "decode_embed", "decode_matmul", "sample_token"}
    no_step |= {"add_partials"}  # of ZeRO-2 only
    assert {op.name for op in operations} == LAUNCHERS.keys() - no_step
    with_products = {"matmul", "matmul_add", "matmul_gelu", "matmul_dx", "matmul_dx_dgelu", "matmul_dw"}
    with_products |= {"classifier_fwd", "classifier_dx", "attention_fwd", "attention_bwd"}
    assert {op.name for op in operations if op.flops} == with_products


@pytest.mark.parametrize("level", ["gelu", "block"])
def test_the_flops_of_a_step_are_6N_and_attentions(record, level):
    """N: the weights that are multiplied with, of 12 C^2 a layer and the head.  Attention: 2 + 5 products of half of
    T x T scores.  `block` runs each layer up to its last product again.
    """
    d, operations = record(level)
    C2, attention = d.C * d.C, d.B * d.T * d.T * d.C
    again = d.L * (2 * d.R * 8 * C2 + 2 * attention) if level == "block" else 0
    total = sum(op.flops * len(op.spans) for op in operations)
    assert total == 6 * d.R * (12 * d.L * C2 + d.Vp * d.C) + 7 * d.L * attention + again


def test_bytes_of_layernorm(record):
    """fp32 rows of C.  Forward: x and out, mean and rstd, w and b.  Backward: dout, x and dx; dx is read as well, but
    not by the head's call, and layer 0 has no bias in front of it.
    """
    d, operations = record()
    rows, row, stats = 4 * d.R * d.C, 4 * d.C, 2 * 4 * d.R
    assert calls(operations, "layernorm_fwd") == [(2 * rows + stats + 2 * row, 2 * d.L + 1)]
    head, first, others = 3 * rows + stats + 5 * row, 4 * rows + stats + 4 * row, 4 * rows + stats + 5 * row
    assert calls(operations, "layernorm_bwd") == [(head, 1), (first, 1), (others, 2 * d.L - 1)]


def test_bytes_of_products(record):
    """Operands and results once; the head's second chunk adds to dwte, so it reads that as well.  Scratch is free."""
    d, operations = record()
    x, square, wide = 4 * d.R * d.C, 4 * d.C * d.C, 4 * 4 * d.C
    assert calls(operations, "matmul_gelu") == [(x + 4 * square + wide + 2 * 4 * x, d.L)]
    # dout, w, pre in; dpre, dbias and, at `gelu`, gelu_out
    assert calls(operations, "matmul_dx_dgelu") == [(x + 4 * square + 3 * 4 * x + wide, d.L)]
    dwte = 4 * d.Vp * d.C
    first, second = (4 * rows * (d.Vp + d.C) + times * dwte for rows, times in ((20, 1), (12, 2)))
    heads = [c for c in calls(operations, "matmul_dw") if c[1] == 1]
    assert heads == sorted([(first, 1), (second, 1)])


def test_bytes_of_gathers_and_updates(record):
    d, operations = record()
    row, numbers = 4 * d.C, 4 * (4 + 8 + 4)  # stats, hyper, rng
    # x, ids, the tokens' rows of wte, all of wpe
    assert calls(operations, "embedding_fwd") == [(d.R * row + 4 * d.R + d.R * row + d.Tmax * row, 1)]
    # w, m, v read and written, g read; decayed parameters and the others
    assert sum(n for n, _ in calls(operations, "adamw")) == 4 * 7 * d.N + 2 * numbers


def test_run_steps_are_the_trainers(capsys):
    model, config = tiny_model()
    results = list(run_steps(model, packed_batch(config), range(3)))
    assert [r.applied for r in results] == [True] * 3
    assert results[2].loss < results[1].loss < results[0].loss


@pytest.mark.parametrize("size", SIZES)
def test_pytorchs_model_has_our_parameters(size):
    with torch.device("meta"):
        model = torch_gpt2.GPT2(SIZES[size])
    assert sum(p.numel() for p in model.parameters()) == config_of(size, 1, "none").n_params


# ---- floors and tables ----


def operation(name="matmul", product=("forward", 128, 64, 32), attention=None):
    return ops.Operation(name, "128x64 128x32", 2 * 10**9, 4 * 10**6, product, attention)


@pytest.fixture
def limits(monkeypatch):
    """4 TB/s: 4 MB take 0.001 ms.  A product takes 0.5 ms, attention 0.25 ms."""
    monkeypatch.setattr(ceilings, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(ceilings, "product_ms", lambda *_: 0.5)
    monkeypatch.setattr(ceilings, "attention_ms", lambda *_: 0.25)


def test_the_floor_is_the_highest_and_says_whose(limits, monkeypatch):
    assert ops.floor(operation()) == (0.5, "cuBLAS")
    assert ops.floor(operation(product=None)) == (0.001, "copy")
    assert ops.floor(operation("attention_fwd", None, (2, 1, 16, 64))) == (0.25, "cuDNN")
    monkeypatch.setattr(ceilings, "copy_bandwidth", lambda: 4e9)
    assert ops.floor(operation()) == (1.0, "copy")


ROWS = [
    ops.Row(operation(), 10, 0.8, 0.5, "cuBLAS"),
    ops.Row(operation("layernorm_fwd", None), 5, 0.002, 0.001, "copy"),
]


def test_the_table_of_operations_adds_up():
    head, first, second, total, floors = ops.table(ROWS, 10.0).splitlines()
    # 2 GFLOP in 0.8 ms, 4 MB in 0.8 ms; 8 ms of a step of 10
    assert first.split() == "matmul 128x64x32 10 0.800 8.00 2.0 4.0 2 5 0.500 cuBLAS 62% 80.0%".split()
    assert second.split()[-5:] == ["2000", "0.001", "copy", "50%", "0.1%"]
    assert len({len(line) for line in (head, first, second)}) == 1
    assert total == "operations 8.0 ms + between kernels 2.0 ms = step 10.0 ms"
    assert floors == "floors 5.0 ms; operations 1.600x, step 1.998x"  # 8.01 / 5.005, 10 / 5.005


def test_the_plot_has_two_bars_an_operation(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (saved.append(self), savefig(self, *a, **k)))
    ops.draw([*ROWS, ROWS[0]], 20.0, "d12, B 64", tmp_path / "ops.png")
    assert (tmp_path / "ops.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = saved[0].axes
    # layernorm's 0.01 ms are too little to see; equal names are one bar
    assert [bar.get_width() for bar in axes.patches] == pytest.approx([16.0, 10.0])
    assert [text.get_text().strip() for text in axes.texts] == ["16.0 ms, 80.0% of step, 62% of limit"]


OURS = dict(ms=100.0, gib=17.25, planned=17.0, first_step=3.21)
TORCH = dict(ms=110.0, gib=23.0, first_step=20.0)


def row(ours=OURS, other=TORCH):
    return dict(size="d12", batch=64, recompute="gelu", ours=ours, torch=other)


def test_the_table_of_sizes():
    # 65,536 tokens in 0.1 s; 6N + 6LCT with N = 124,475,904 (the vocabulary padded, wpe in it) and LCT = 9,437,184
    mfu = 655_360 * 6 * (124_475_904 + 9_437_184) / 989e12
    line = step_time.table([row()], 989e12).splitlines()[1]
    assert line.split() == (
        f"d12 64 gelu 100.0 655,360 {mfu:.1%} 17.25 17.00 3.2 110.0 595,782 23.00 20.0 1.100x 0.75x".split()
    )


def test_the_table_leaves_out_what_was_not_run():
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


def test_runs_are_processes_and_a_failed_one_costs_only_its_cells(tmp_path, monkeypatch, capsys):
    (tmp_path / "standin.py").write_text(RUN)
    monkeypatch.chdir(tmp_path)  # python -m looks here
    run, out = step_time._run, tmp_path / "figures.json"
    monkeypatch.setattr(step_time, "_run", lambda who, module, *more: run(who, "standin", *more))
    monkeypatch.setattr(step_time, "peak_flops", lambda: 989e12)
    assert step_time.bench(["d12"], 8, 7, "none", True, out) == 0
    assert step_time.bench(["d12", "d24", "d36"], None, 6, None, True, out) == 1
    text, err = capsys.readouterr()
    assert "PyTorch d24 B 64: failed with code 1" in text and "ours d36 B 32: 100.0 ms a step" in text
    assert "no memory left" in err
    written = json.loads(out.read_text())
    assert [r["ours"]["saw"] for r in written["rows"]] == [
        ["d12", "64", "6", "gelu"], ["d24", "64", "6", "gelu+ln"], ["d36", "32", "6", "gelu+ln"],
    ]  # fmt: skip
    assert [r["torch"] and r["torch"]["saw"] for r in written["rows"]] == [["d12", "64", "6"], None, ["d36", "32", "6"]]


# ---- the command line ----


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sizes", "d12,d13"], "--sizes: unknown d13; known are d12, d24, d36, d48"),
        (["--steps", "5"], "--steps: must be at least 6, got 5"),
        (["--batch", "0"], "--batch: must be at least 1, got 0"),
        (["--plot", "a.png"], "--plot: goes with --ops and one size"),
        (["--ops", "--plot", "a.png"], "--plot: goes with --ops and one size"),
        (["--ops", "--json", "a.json"], "--json: does not go with --ops"),
        (["--json", "nowhere/a.json"], "--json: nowhere is not a directory"),
        (["--baseline", "jax"], "--baseline"),
        (["--recompute", "some"], "--recompute: must be auto, none"),
        (["--recompute", "auto"], "--recompute: auto does not go with a benchmark"),
        (["--recompute", "gelu:13", "--sizes", "d24,d12"], "gelu:13 does not go with a benchmark: d12 has fewer"),
    ],
)
def test_a_mistake_is_exit_2_and_a_line_on_stderr(capsys, argv, message):
    assert main(tools_app, ["bench", *argv]) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(device, "present", lambda: False)
    assert main(tools_app, ["bench"]) == 2
    assert capsys.readouterr() == ("", "error: bench: needs a CUDA GPU, found none\n")


def test_help_lists_the_options(capsys):
    assert main(tools_app, ["bench", "--help"]) == 0
    text = capsys.readouterr().out
    for option in ("--sizes", "--batch", "--steps", "--recompute", "--baseline", "--ops", "--json", "--plot"):
        assert option in text


def test_options_are_passed_on(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(device, "present", lambda: True)
    stand_in = SimpleNamespace(
        bench=lambda *a: seen.append(a) or 1,
        report=lambda *a: seen.append(a),
    )
    for name in ("step_time", "ops"):
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", stand_in)
        monkeypatch.setattr(f"benchmarks.{name}", stand_in)
    out = tmp_path / "a.json"
    assert main(tools_app, ["bench", "--sizes", "d12,d48", "--baseline", "none", "--json", str(out)]) == 1
    assert seen.pop() == (["d12", "d48"], None, 30, None, False, out)
    argv = [
        "bench",
        "--ops",
        "--sizes",
        "d24",
        "--batch",
        "4",
        "--recompute",
        "block",
        "--plot",
        str(tmp_path / "a.png"),
    ]
    assert main(tools_app, argv) == 0
    assert seen.pop() == ("d24", 4, "block", tmp_path / "a.png")
