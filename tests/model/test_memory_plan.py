"""The plan of a configuration: the recompute level that fits, and the refusal of
a plan that is too large.
"""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt2_triton import device
from gpt2_triton.commands.plan import Gpu, plan_report
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.errors import OutOfMemoryError
from gpt2_triton.model.arena import GIB
from gpt2_triton.model.memory_plan import (
    CONTEXT_BYTES,
    MODULE_BYTES,
    advice,
    bytes_by_kind,
    choose_recompute,
    dimensions,
    forecast,
    largest_batch,
    memory_in_use_report,
    plan_memory,
    require_memory,
)
from gpt2_triton.model.model import Model
from gpt2_triton.model.rates import rates_line
from tests.support import reference
from tests.support.tiny import tiny_config

NO_BATCH = "take a smaller model: no batch fits"


def plan_of(config: Config, B: int | None = None, shape: StepShape | None = None, **options):
    shape = shape or StepShape.of(config)
    return plan_memory(
        config, reference, replace(shape, micro_batch=B or shape.micro_batch), **options
    )[0]


def total_at(config: Config, level: str) -> int:
    return plan_of(config.replace(memory={"recompute": level})).total


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 100_000))
def test_largest_batch_is_the_largest_that_fits(per_row, fixed, budget):
    def total(B: int) -> int:
        return fixed + per_row * B

    best = largest_batch(total, budget)
    assert total(best + 1) > budget
    assert best == 0 or total(best) <= budget


@pytest.mark.parametrize(
    "model", [*({"size": f"d{n}"} for n in (12, 24, 48)), {"size": "llama:c768", "tied": False}]
)
def test_dims_have_the_number_of_parameters_of_the_config(model):
    """The configuration's formula against the sum over the tensors."""
    config = Config.model_validate({"model": model})
    assert dimensions(config, reference, StepShape.of(config))["N"] == config.n_params


def test_llama_3s_8b_trains_on_eight_gpus_of_80_gb():
    """A GPU has all parameters, in bf16, and an eighth of AdamW's moments and of the
    summed gradients, in fp32.
    """
    model, train = (
        dict(size="llama:8b"),
        dict(batch_size=1, seq_len=8192, total_batch_tokens=8 * 8192),
    )
    sections = dict(model=model, train=train, data=dict(tokenizer="llama3"), parallel=dict(zero=2))
    config = Config.model_validate(sections | dict(memory=dict(recompute="gelu+ln+qkv")))
    plan, N = plan_of(config, shape=StepShape.of(config, 8)), config.n_params
    kinds = {kind: size / N for kind, size in bytes_by_kind(plan).items()}
    assert (
        2 <= kinds["parameters"] < 2.01
        and 1 <= kinds["optimizer"] < 1.01
        and 0.5 < kinds["gradients"] < 2
    )
    assert 50 * GIB < plan.total < 60 * GIB


def test_memory_in_use_says_both_readings_whatever_other_processes_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 * GIB, 5 * GIB))
    report = memory_in_use_report(plan_of(tiny_config(), 1), before=4 * GIB)
    assert report.endswith("; GPU in use 2.00 GiB, before the run 4.00 GiB, by all processes")


def refusal(monkeypatch, config: Config, free: int, shape: StepShape | None = None) -> str:
    """Return the message about a training run on a machine with so many free bytes for the plan."""
    shape = shape or StepShape.of(config)
    monkeypatch.setattr(device, "_host_memory", lambda: (free + MODULE_BYTES, 2 * GIB))
    plan = plan_of(config, shape.micro_batch, shape=shape)
    with pytest.raises(OutOfMemoryError) as error:
        require_memory(plan, config, reference, shape, "cpu", training=True)
    return str(error.value)


def test_a_run_that_does_not_fit_is_refused_with_the_largest_batch_that_would(monkeypatch):
    config = tiny_config(memory=dict(recompute="block"))
    free = plan_of(config, 1).total + MODULE_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2 * GIB))
    monkeypatch.setattr(device, "_host_memory", lambda: (free, 2 * GIB))
    for where, owner in (("cuda", "GPU"), ("cpu", "machine")):
        wanted = (
            rf"the {owner} has .* of 2.00 GiB free; set train.batch_size to "
            r"1 and .* \(now batch 2, block\)"
        )
        with pytest.raises(OutOfMemoryError, match=wanted):
            Model(config, reference, where)


def test_out_of_memory_names_a_deeper_level_where_no_batch_fits(monkeypatch):
    config = tiny_config(model=dict(n_layer=3))
    deepest = plan_of(config.replace(memory={"recompute": "block"}), 1).total
    assert deepest < plan_of(config, 1).total
    todo = "set memory.recompute to auto, train.batch_size to 1 and train.total_batch_tokens to 32"
    assert f"free; {todo} (now batch 2, gelu)" in refusal(monkeypatch, config, deepest)
    assert f"free; {NO_BATCH} (now batch 2, gelu)" in refusal(monkeypatch, config, deepest // 3)


def test_out_of_memory_names_a_batch_that_divides_the_step(monkeypatch):
    """With 12 sequences per step on 4 GPUs a batch of 2 would fit, but does not
    divide the 3 of each GPU.
    """
    config = tiny_config(train=dict(batch_size=3, total_batch_tokens=192))
    shape = StepShape.of(config, 4)
    free = plan_of(config, 2, shape=shape).total
    assert "free; set train.batch_size to 1 (now batch 3, gelu)" in refusal(
        monkeypatch, config, free, shape
    )


@pytest.mark.parametrize("recompute", ["gelu", "auto"])
def test_forward_only_model_that_does_not_fit_is_refused(monkeypatch, recompute):
    """The checkpoints of a run with `auto` have `auto`, which is no level for
    a plan of a training step.
    """
    config = tiny_config(memory=dict(recompute=recompute))
    monkeypatch.setattr(device, "_host_memory", lambda: (1 << 20, 1 << 21))
    has = (
        "256.0 MiB for the interpreter, the machine has 1.0 MiB of 2.0 "
        "MiB free: free some memory, choose"
    )
    with pytest.raises(OutOfMemoryError, match=has):
        Model(config, reference, "cpu", batch=10_000)
    none = config.replace(memory={"recompute": "none"})
    assert plan_of(config, 2, training=False).total == plan_of(none, 2, training=False).total


def test_forecast_has_levels_and_stages_and_the_plan_of_the_chosen():
    config = tiny_config(model=dict(n_layer=8), memory=dict(recompute="gelu:1"))
    shape = StepShape.of(config, 2)
    found = forecast(config, reference, 8 * GIB - CONTEXT_BYTES - MODULE_BYTES, shape)
    assert found.stages[0] > found.stages[1] > found.stages[2] and shape.zero == 1
    assert list(found.levels) == ["none", "gelu:1", *RECOMPUTE_LEVELS[1:]] and list(
        found.stages
    ) == [0, 1, 2]
    assert found.levels["gelu:1"][0] == found.stages[shape.zero] == found.plan.total
    assert list(forecast(tiny_config(), reference, GIB, StepShape.of(tiny_config())).levels) == [
        *RECOMPUTE_LEVELS
    ]
    report = plan_report(config, reference, Gpu("a GPU", 8 * GIB, "9.0"), shape)
    lines = report.text(buffers=False).splitlines()
    [level, stage] = [line.split() for line in lines if "  <-" in line]
    assert (level[0], stage[0]) == ("gelu:1", str(shape.zero))
    assert " ".join(level).endswith("<- the backward pass recomputes this, to fit the memory")
    kept = config.replace(memory={"recompute": "none"})
    whole = plan_report(kept, reference, Gpu("a GPU", 80 * GIB, "9.0"), shape)
    [row] = [line for line in whole.choices if line.startswith("none ")]
    assert row.endswith(" over 1,024  <- nothing is recomputed")
    assert lines[0] == "fits a GPU of 8.00 GiB" and report.fits
    assert lines[1].endswith(" for the CUDA context, kernels and graphs")
    assert lines[2:5] == [
        "tokens 128: 4 steps of 32, 2 GPUs, on each 1 x 1 sequences of 16",
        "time unknown: not measured for this model on this GPU; a run prints it as eta",
        rates_line(config),  # and no batch of tens of thousands of sequences
    ]
    assert len(lines) <= 20
    listed = {line.split(" ")[0] for line in report.text(buffers=True).splitlines()}
    assert {*found.plan.buffers} <= listed and {*found.plan.buffers} - {
        line.split(" ")[0] for line in lines
    }


def test_plan_report_names_the_largest_batch_that_divides_a_step():
    config = tiny_config(train=dict(total_batch_tokens=12 * 16, batch_size=1))
    five = StepShape.of(config.replace(train={"total_batch_tokens": 5 * 16, "batch_size": 5}))
    budget = plan_memory(config, reference, five)[0].total + CONTEXT_BYTES + MODULE_BYTES
    report = plan_report(config, reference, Gpu("a GPU", budget, "9.0"), StepShape.of(config))
    assert (
        "largest train.batch_size that fits 5; 4 is the largest that divides a step"
        in report.verdict
    )


def times(gpu="h100", gpus=1, recipe="gpt2_124m", **overrides):
    config = Config.load(
        recipe, {key.replace("__", "."): value for key, value in overrides.items()}, gpus
    )
    shape = StepShape.of(config, gpus)
    report = plan_report(config, reference, Gpu("a GPU", 80 * GIB, "9.0", gpu), shape)
    return [line for line in report.verdict if line.startswith("time ")]


def test_a_plan_has_the_minutes_of_a_model_that_was_measured_on_its_gpu():
    [bf16], [fp8], [eight] = times(), times(recipe="gpt2_124m_fast"), times(gpus=8)
    assert (
        re.fullmatch(r"time about \dh \d\dm by measured speed, without validations", bf16)
        and fp8 < bf16
    )
    assert re.fullmatch(
        r"time about \d\dm \d\ds by measured speed, an h100's divided by 8, without validations",
        eight,
    )
    assert times(recipe="modern_124m")
    unknown = "time unknown: not measured for this model on this GPU; a run prints it as eta"
    for line in times("4090"), times(None), times(model__n_layer=11), times(train__dtype="fp32"):
        assert line == [unknown]


@pytest.mark.parametrize(("gpus", "stage", "batch", "level", "end"), [
    (2, 0, 4, "gelu", ""), (1, 0, 4, "block", "; set memory.recompute to auto"),
    (2, 0, 2, "gelu", "; set train.batch_size to 2"),
    (2, 1, 4, "gelu", "; set parallel.zero to 1"),
])  # fmt: skip
def test_plan_report_says_what_would_fit(gpus, stage, batch, level, end):
    """A run with parallel.zero 0 and batches of 4, on GPUs that fit the plan of
    another level, batch or stage.
    """
    config = tiny_config(train=dict(total_batch_tokens=256, batch_size=4), parallel=dict(zero=0))
    fitting = config.replace(
        train=dict(batch_size=batch), parallel=dict(zero=stage), memory=dict(recompute=level)
    )
    fits, rest = (
        plan_of(fitting, batch, shape=StepShape.of(fitting, gpus)).total,
        CONTEXT_BYTES + MODULE_BYTES,
    )
    for gpu_bytes, said in ((rest + fits, end), (rest, f"; {NO_BATCH}")):
        report = plan_report(
            config, reference, Gpu("a GPU", gpu_bytes, "9.0"), StepShape.of(config, gpus)
        )
        assert report.verdict[0].endswith(f" MiB{said}") and report.fits == (not said)


@pytest.mark.parametrize(("cure", "gpus", "optim"), [
    ("set optim.master to none", 1, dict(master="none")),
    ("set optim.m to bf16, optim.v to bf16", 1, dict(m="bf16", v="bf16")),
    ("set optim.master to none, optim.m to bf16, optim.v to bf16", 1,
     dict(master="none", m="bf16", v="bf16")),
    ("take 2 GPUs with parallel.zero 2", 2, {}),
    ("take 8 GPUs with parallel.zero 2", 8, {}),
])  # fmt: skip
def test_a_plan_that_no_batch_fits_names_a_cure_that_makes_it_fit(cure, gpus, optim):
    """The cure's own plan fits to the byte; with a byte less it is not named."""
    config = tiny_config(
        model=dict(vocab_size=8192), memory=dict(recompute="block"), parallel=dict(zero=2),
        train=dict(batch_size=1, total_batch_tokens=256, dtype="bf16"), optim=dict(master="fp32"),
    )  # fmt: skip
    cured = config.replace(optim=optim)
    budget = plan_of(cured, shape=StepShape.of(cured, gpus)).total
    for less in (0, 1):
        found = forecast(config, reference, budget - less, StepShape.of(config))
        assert (cure in advice(found, reference).split(", or ")) == (less == 0)


def test_a_cure_names_what_else_it_needs():
    """Two GPUs fit a batch of 1, not of 4."""
    sizes = dict(batch_size=4, total_batch_tokens=256)
    config = tiny_config(train=sizes, memory=dict(recompute="block"), parallel=dict(zero=2))
    budget = plan_of(config, 1, shape=StepShape.of(config, 2)).total
    found = forecast(config, reference, budget, StepShape.of(config))
    assert advice(found, reference).endswith(
        "take 2 GPUs with parallel.zero 2 and set train.batch_size to 1"
    )


def test_recompute_auto_is_the_first_level_in_as_few_layers_as_fit():
    config = tiny_config(model=dict(n_layer=3), memory=dict(recompute="auto"))
    shape = StepShape.of(config)
    every = [f"{level}:{n}".removesuffix(":3") for level in RECOMPUTE_LEVELS[1:] for n in (1, 2, 3)]
    totals = {level: total_at(config, level) for level in ("none", *every)}
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    first = {bytes_: level for level, bytes_ in reversed(totals.items())}
    assert len(first) > 2 * len(RECOMPUTE_LEVELS)
    for budget, level in first.items():
        assert choose_recompute(config, reference, budget, shape).memory.recompute == level
    assert (
        choose_recompute(config, reference, totals["block"] - 1, shape).memory.recompute == "block"
    )
    named = config.replace(memory={"recompute": "gelu"})
    assert choose_recompute(named, reference, 0, shape) is named


def test_recompute_auto_fits_where_a_deeper_level_takes_more():
    """With one layer `block` keeps as much as the level before, and needs GELU's output
    in the backward pass too.
    """
    model, train = dict(n_layer=1, vocab_size=512), dict(batch_size=16, total_batch_tokens=256)
    config = tiny_config(model=model, train=train, memory=dict(recompute="auto"))
    budget, shape = total_at(config, "gelu+ln+qkv"), StepShape.of(config)
    assert budget < min(total_at(config, "gelu+ln"), total_at(config, "block"))
    assert (
        total_at(config, choose_recompute(config, reference, budget, shape).memory.recompute)
        <= budget
    )


@pytest.mark.parametrize("moment", ["m", "v"])
def test_moments_in_bf16_take_half_the_bytes(moment):
    plans = [plan_of(tiny_config(optim={moment: storage})) for storage in ("fp32", "bf16")]
    fp32, bf16 = (plan.buffers[moment] for plan in plans)
    assert fp32.dtype == torch.float32 and bf16.dtype == torch.bfloat16 and fp32.shape == bf16.shape
    # buffers begin at 256 bytes
    assert plans[0].total - plans[1].total == pytest.approx(fp32.nbytes / 2, abs=1024)
