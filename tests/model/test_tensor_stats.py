"""Tensor statistics equal numpy's of the same tensors, and taking them
changes no byte of the training.
"""

import json
import math
import shutil

import numpy as np
import pytest
import torch

import gpt2_triton.kernels as K
import gpt2_triton.model.memory_plan
from gpt2_triton.distributed.control import SINGLE_PROCESS
from gpt2_triton.kernels.tensor_stats import muon_stats, parameter_stats, stats_parts, tensor_stats
from gpt2_triton.model.model import Model
from gpt2_triton.model.tables import param_entries
from gpt2_triton.model.tensor_stats import first_non_finite, format_summary
from gpt2_triton.operands import Betas, Matrices, Span, Step
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.trainer import Trainer
from tests.conftest import DEVICE
from tests.support.commands import run_tool
from tests.support.helpers import poisoned
from tests.support.launchers import WrappedKernels
from tests.support.loop import train
from tests.support.models import require_equal_states, side_by_side
from tests.support.tiny import packed_batch, tiny_config

SUMS = 2e-6  # fp32 sums of up to a thousand squares a lane
DIGITS = 5.2e-5  # records have five significant digits, the rest is SUMS


def finish(parts):
    return parts[0].sum().item(), parts[1].max().item(), parts[2].sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (301, 1000)])
def test_tensor_stats_equal_float64(rng, shape, dtype):
    x = rng(*shape).to(dtype)
    out = poisoned(3, stats_parts())
    tensor_stats(out, x, False)
    tensor_stats(out, 2 * x, True)
    want = x.double()
    assert finish(out) == (
        pytest.approx(5 * want.square().sum().item(), rel=SUMS), 2 * want.abs().max().item(), 0,
    )  # fmt: skip


def test_tensor_stats_count_and_leave_out_non_finite_elements(rng):
    x, out = rng(5, 1000), poisoned(3, stats_parts())
    x[0, 3], x[2, 0], x[4, 999] = math.nan, math.inf, -math.inf
    tensor_stats(out, x, False)
    rest = x[torch.isfinite(x)].double()
    assert finish(out) == (
        pytest.approx(rest.square().sum().item(), rel=SUMS),
        rest.abs().max().item(),
        3,
    )


@pytest.mark.parametrize("applied", [1.0, 0.0])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_update_stats_are_of_the_update(rng, optimizer, applied):
    """A step of Muon that is skipped has no x: what is there is of another buffer."""
    n, w, g, out = 5000, rng(1, 5000), rng(1, 5000), poisoned(5, stats_parts())
    step_in = torch.tensor([1e-2, 2.0, 3.0, *[0] * 5], device=DEVICE)
    step_out = torch.tensor([0.0, 0.0, 0.5, applied], device=DEVICE)
    step = Step(step_out, step_in, torch.zeros(4, dtype=torch.int32, device=DEVICE))
    before = w.double()
    if optimizer == "adamw":
        m = 0.01 * rng(n)
        span = Span(w[0], m, m.square() + 1e-3, None, g[0], first=0, lr_factor=2.0, decay=0.1)
        given = span, step, Betas(0.9, 0.95, 1e-8)
        parameter_stats(out, *given)
        K.adamw(*given)
    else:
        x = rng(1, n) / 50
        x[:, ::3] = x[:, ::3] if applied else float("nan")
        matrices = Matrices(w, g=g, x=x, decay=0.1, scale=3.0)
        muon_stats(out, matrices.part(0, slice(None)), step)
        K.muon_update(matrices, step)
    assert finish(out)[0] == pytest.approx(g.double().square().sum().item(), rel=SUMS)
    assert out[3].sum().item() == pytest.approx(before.square().sum().item(), rel=SUMS)
    # w's own rounding, 6e-8 of w, is 6e-6 of AdamW's update of a hundredth of it, and
    # 6e-5 of Muon's of a thousandth
    rounding = 1e-4 if optimizer == "adamw" else 1e-3
    assert out[4].sum().item() == pytest.approx(
        (w.double() - before).square().sum().item(), rel=rounding
    )


# ---- a whole step ----


def stats_config(**sections):
    return tiny_config(**(dict(log=dict(stats_every=1), train=dict(steps=6)) | sections))


def small_config(**sections):
    return tiny_config(**(dict(model=dict(n_layer=1), train=dict(steps=2)) | sections))


class KeepsGradients(WrappedKernels):
    """K that keeps a copy of dx after each launch that completes it at a
    point of the residual stream.
    """

    def __init__(self):
        self.dx = []

    def _launch(self, name, *args, **keywords):
        getattr(K, name)(*args, **keywords)
        if name == "layernorm_bwd":
            self.dx.insert(0, args[0].clone())


def launch(model, step, with_stats, batches=None):
    config = model.config
    batches = batches or [
        packed_batch(config, seed=2 * step + k) for k in range(model.shape.accumulation)
    ]
    model.begin_step(step_inputs(step, config), step, 1, with_stats)
    for micro, batch in enumerate(batches):
        model.micro_step(batch, first=micro == 0)
    return model.end_step()


@pytest.fixture
def model(monkeypatch):
    """A model whose buffers share no byte, so that all activations can be read after the step."""
    monkeypatch.setattr(gpt2_triton.model.memory_plan, "place_buffers", side_by_side)
    model = Model(stats_config(memory=dict(recompute="none")), KeepsGradients(), DEVICE)
    model.eager = True
    model.initialise(seed=1)
    return model


def test_record_of_a_step_equals_numpy_on_its_tensors(model):
    before = model.state.params.double().cpu()
    step = launch(model, 0, with_stats=True)
    step.result()
    record = model.stats_recorder.read(step.stats, 1, SINGLE_PROCESS)
    tensors = {name: getattr(model.train_view.a, name) for name in ("x", "qkv", "att", "fch")} | {
        "dx": model.K.dx
    }
    for name, values in tensors.items():
        got = record["activations"][name]
        exact = [t.double().cpu().numpy() for t in values]
        assert len(got["rms"]) == len(exact) and got["nonfinite"] == [0] * len(exact)
        np.testing.assert_allclose(got["rms"], [np.sqrt((t**2).mean()) for t in exact], rtol=DIGITS)
        np.testing.assert_allclose(got["absmax"], [np.abs(t).max() for t in exact], rtol=DIGITS)
    change, grads = model.state.params.double().cpu() - before, model.state.grads.double().cpu()
    index = {}
    for e in param_entries(model.A.Params, model.dims):
        i = index[e.name] = index.get(e.name, -1) + 1
        got = {column: values[i] for column, values in record["parameters"][e.name].items()}
        span = slice(
            e.offset,
            e.offset
            + (model.dims["V"] if e.name == "wte" else e.shape[0]) * math.prod(e.shape[1:]),
        )
        w, g, u = (t[span].numpy() for t in (before, grads, change))
        rms = {"grad_rms": g, "weight_rms": w}
        assert got["nonfinite"] == 0 and got["grad_absmax"] == pytest.approx(
            np.abs(g).max(), rel=DIGITS
        )
        for column, values in rms.items():
            assert got[column] == pytest.approx(np.sqrt((values**2).mean()), rel=DIGITS), (
                e.name,
                column,
            )
        if w.any():  # biases begin at 0: no ratio.  fp32 weights round the update, to 1e-5 of it
            assert got["update_ratio"] == pytest.approx(
                np.linalg.norm(u) / np.linalg.norm(w), rel=1e-4
            ), e.name
        else:
            assert got["update_ratio"] == 0


@pytest.mark.slow
def test_record_combines_micro_steps():
    """Two micro-steps of the same batch have the rms and the largest element of one."""
    config = small_config(log=dict(stats_every=1))
    model = Model(config, K, DEVICE)
    batch, records = packed_batch(config), []
    for batches in ([batch], [batch, batch]):
        model.initialise(seed=1)
        step = launch(model, 0, True, batches)
        step.result()
        records.append(
            model.stats_recorder.read(step.stats, len(batches), SINGLE_PROCESS)["activations"]
        )
    assert records[0] == records[1]


def test_a_step_with_stats_changes_no_byte_at_any_recompute_level():
    """Layers that share a buffer have the statistics of a model that keeps every layer's."""
    steps, models, records = [], [], []
    for every, level in ((0, "none"), (1, "none"), (1, "block")):
        models.append(
            Model(
                stats_config(log=dict(stats_every=every), memory=dict(recompute=level)), K, DEVICE
            )
        )
        models[-1].initialise(seed=1)
        step = launch(models[-1], 0, with_stats=every > 0)
        steps.append(step.result()[:3])
        require_equal_states(models[0], models[-1])
        if every:
            records.append(models[-1].stats_recorder.read(step.stats, 1, SINGLE_PROCESS))
    assert models[0].stats_recorder is None and steps[0] == steps[1] == steps[2]
    assert records[0] == records[1]


@pytest.mark.gpu
def test_graphs_with_stats_give_records_of_eager_launches_and_bytes_of_plain_steps():
    """Every other step of six takes statistics: its graphs are captured at the first
    and replayed at the others.
    """
    models, records = [], []
    for every, eager in ((0, False), (1, False), (1, True)):
        model = Model(stats_config(log=dict(stats_every=every)), K, DEVICE)
        model.eager = eager
        model.initialise(seed=1)
        for number in range(6):
            step = launch(model, number, with_stats=every > 0 and number % 2 == 1)
            step.result()
            if every and number % 2:
                records.append(model.stats_recorder.read(step.stats, 1, SINGLE_PROCESS))
        models.append(model)
    assert records[:3] == records[3:] and records[0] != records[1]
    require_equal_states(*models)


# ---- the run ----


def test_a_run_writes_resumes_and_shows_statistics(tmp_path, capsys):
    config = small_config(
        train=dict(steps=3), log=dict(stats_every=2), checkpoint=dict(every=2, keep=0)
    )
    assert train(config, tmp_path) == 0
    whole = (tmp_path / "stats.jsonl").read_text()
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [2, 3]
    assert "step 2/3 | stats: largest activation" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "checkpoints" / "step_00000003")
    assert train(config, tmp_path, resume=True) == 0
    assert (tmp_path / "stats.jsonl").read_text() == whole
    capsys.readouterr()
    assert run_tool(f"stats {tmp_path} --step 2") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "step 2" and shown[-1] == "first non-finite: none"
    names = [line.split()[0] for line in shown if line]
    assert {"x[0]", "x[2]", "fch", "dx[2]", "wte", "qkvw"} <= set(names)
    assert run_tool(f"stats {tmp_path} --step 7") == 2
    assert "no statistics of step 7; take one of 2 steps, from 2 to 3" in capsys.readouterr().err


def causes(config, run, capsys):
    assert train(config, run) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    return [line.partition("skipped: not finite, first: ")[2] for line in lines]


def test_a_non_finite_step_names_the_first_tensor(tmp_path, capsys, monkeypatch):
    """Infinite weights in fc from the second step on: the first non-finite elements are
    one column of fch, 32 rows.
    """
    original = Trainer._train_step

    def poisoned_step(self, index):
        if index == 1:
            self.model.K.fill(self.model.train_view.w.fcw[0][:1], math.inf)
        original(self, index)

    monkeypatch.setattr(Trainer, "_train_step", poisoned_step)
    assert causes(small_config(log=dict(stats_every=9)), tmp_path, capsys) == [
        "fch of layer 0 (32 elements)"
    ]


def example_record():
    """Return a record of one layer of equal values but for x behind it, two
    updates, and attprojw's gradient.
    """
    acts = {
        name: dict(rms=[0.0] * n, absmax=[0.0] * n, nonfinite=[0] * n)
        for name, n in dict(x=3, dx=3).items()
    }
    acts |= {name: dict(rms=[0.0], absmax=[0.0], nonfinite=[0]) for name in ("qkv", "att", "fch")}
    acts["x"]["absmax"][2] = 34.25
    parameter = dict(
        grad_rms=0.0, grad_absmax=0.0, nonfinite=0, weight_rms=0.02, update_ratio=0.001
    )
    parameters = {
        name: {column: [v] for column, v in parameter.items()}
        for name in ("wte", "qkvw", "attprojw", "lnw", "fcb")
    }
    parameters["attprojw"]["grad_rms"] = [None]
    parameters["wte"]["update_ratio"], parameters["fcb"]["update_ratio"] = [0.0031], [0.5]
    return {"activations": acts, "parameters": parameters}


def test_format_summary_names_the_extremes():
    assert format_summary(example_record()) == (
        "largest activation 34.2 in x after layer 0 | largest gradient rms inf in attprojw "
        "| largest update/weight 0.0031 in wte"
    )


@pytest.mark.parametrize(
    "bad, first",
    [
        ([], ""),
        ([("wte",)], "gradient of wte (7 elements)"),
        ([("wte",), ("dx", 0)], "gradient at x after the embedding (7 elements)"),
        ([("dx", 0), ("dx", 1)], "gradient at x after layer 0's attention (7 elements)"),
        ([("dx", 0), ("dx", 2)], "gradient at x after layer 0 (7 elements)"),
        ([("dx", 2), ("x", 2), ("fch", 0)], "fch of layer 0 (7 elements)"),
        ([("fch", 0), ("x", 1), ("att", 0)], "att of layer 0 (7 elements)"),
    ],
)
def test_first_non_finite_follows_the_order_of_a_step(bad, first):
    record = example_record()
    for name, *index in bad:
        kind = "activations" if index else "parameters"
        record[kind][name]["nonfinite"][index[0] if index else 0] = 7
    assert first_non_finite(record) == first
    assert (first in format_summary(record)) and ("not finite" in format_summary(record)) == bool(
        first
    )
