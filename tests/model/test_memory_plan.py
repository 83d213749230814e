"""The plan of a configuration: the recompute level that fits, and the refusal of a plan that is too large."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.errors import OutOfMemoryError
from gpt2_triton.model.arena import GIB, place_buffers
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.memory_plan import (
    CONTEXT_BYTES,
    MODULE_BYTES,
    choose_recompute,
    dimensions,
    format_plan,
    largest_batch,
    out_of_memory,
    plan_memory,
    plan_report,
    require_fits,
)
from tests.model.test_arena import buffer
from tests.support import reference
from tests.support.tiny import tiny_config


def plan_of(config: Config, B: int | None = None, **options):
    return plan_memory(config, reference, B or StepShape.of(config).micro_batch, config.train.seq_len, **options)[0]


def total_at(config: Config, level: str) -> int:
    return plan_of(config.replace(memory={"recompute": level})).total


def test_format_plan_prints_every_buffer_and_the_total():
    table = [buffer("weights", 1 << 20, "embed..between"), buffer("p", 1 << 18, "head"), buffer("q", 1 << 18, "block")]
    plan = place_buffers(table)
    text = format_plan(plan)
    assert all(name in text for name in plan.buffers)
    assert "arena 5.0 MiB" in text and "1.0 MiB saved by sharing" in text


@given(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 100_000))
def test_largest_batch_is_the_largest_that_fits(per_row, fixed, budget):
    def total(B: int) -> int:
        return fixed + per_row * B

    best = largest_batch(total, budget)
    assert total(best + 1) > budget
    assert best == 0 or total(best) <= budget


@pytest.mark.parametrize("size", ["d12", "d24", "d48"])
def test_dims_have_the_number_of_parameters_of_the_config(size):
    """The configuration's formula against the sum over the tensors."""
    config = Config.model_validate({"model": {"size": size}})
    assert dimensions(config, reference, 1, config.train.seq_len)["N"] == config.n_params


def test_require_fits_names_the_largest_batch_that_would_fit(monkeypatch):
    config = tiny_config()
    total = plan_of(config, 1).total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (total + MODULE_BYTES, 2 * GIB))
    with pytest.raises(OutOfMemoryError, match=r"set train.batch_size to 1 and .* \(now batch 2, gelu\)"):
        GPT2(config, reference, "cuda")
    monkeypatch.setattr(device, "_host_memory", lambda: (total + MODULE_BYTES, 2 * GIB))
    with pytest.raises(
        OutOfMemoryError, match=r"needs .* MiB and .*, the machine has .* free: set train.batch_size to 1 and "
    ):
        GPT2(config, reference, "cpu")


@pytest.mark.parametrize("recompute", ["gelu", "auto"])
def test_require_fits_of_a_forward_only_model_names_what_would_fit(monkeypatch, recompute):
    """The checkpoints of a run with `auto` have `auto`, which is no level for a plan of a training step."""
    config = tiny_config(memory=dict(recompute=recompute))
    monkeypatch.setattr(device, "_host_memory", lambda: (1 << 20, 1 << 21))
    with pytest.raises(
        OutOfMemoryError,
        match="256.0 MiB for the interpreter, the machine has 1.0 MiB of 2.0 MiB free: free",
    ):
        GPT2(config, reference, "cpu", batch=10_000, training=False)
    free = plan_of(config, 57, training=False, sequences=40).total
    monkeypatch.setattr(device, "_host_memory", lambda: (free + MODULE_BYTES, 2 * free))
    with pytest.raises(
        OutOfMemoryError, match=r"to decode 900 texts at once takes .*: set --batch to (\d+)$"
    ) as refused:
        GPT2(config, reference, "cpu", batch=57, training=False, sequences=900)
    most = int(str(refused.value).split()[-1])
    assert most >= 40 and plan_of(config, 57, training=False, sequences=most).total <= free
    assert plan_of(config, 57, training=False, sequences=most + 1).total > free


def test_out_of_memory_names_a_deeper_level_where_no_batch_fits_and_then_a_smaller_model(monkeypatch):
    def advice(config, free):
        monkeypatch.setattr(device, "_host_memory", lambda: (free + MODULE_BYTES, 2 * free))
        return str(out_of_memory(plan_of(config), config, reference, StepShape.of(config), "cpu", True, 0))

    config = tiny_config(model=dict(n_layer=3))
    deepest = plan_of(config.replace(memory={"recompute": "block"}), 1).total
    assert deepest < plan_of(config, 1).total
    step = "train.batch_size to 1 and train.total_batch_tokens to 32"
    assert f"free: set memory.recompute to block, {step} (now batch 2, gelu)" in advice(config, deepest)
    large = tiny_config(model=dict(n_layer=24, n_embd=1024, n_head=16))
    d6 = large.replace(model=dict(n_layer=6, n_embd=384, n_head=6), memory={"recompute": "block"})
    free = plan_of(d6, 1).total
    smaller = "model.size d6 with memory.recompute block and train.batch_size 1 fits (now"
    assert smaller in advice(large, free)
    assert "take a smaller model (model.n_layer, " in advice(large, free - 1)


def test_memory_that_the_system_refuses_is_reported_like_memory_that_is_missing(monkeypatch):
    """A limit of the process (ulimit -v) shows when memory is asked for, 4 PB of it here."""
    monkeypatch.setattr(device, "_host_memory", lambda: (1 << 60, 1 << 60))
    with pytest.raises(OutOfMemoryError, match="the model needs .* GiB and .*, the machine has"):
        GPT2(tiny_config(model=dict(n_embd=1024, n_head=16)), reference, "cpu", batch=1 << 33, training=False)


def test_require_fits_names_a_batch_that_divides_the_step(monkeypatch):
    """With 12 sequences per step on 4 GPUs a batch of 2 would fit, but does not divide the 3 of each GPU."""
    config = tiny_config(train=dict(batch_size=3, total_batch_tokens=192))
    shape = StepShape.of(config, 4)
    fits, too_large = plan_of(config, 2, shape=shape), plan_of(config, 3, shape=shape)
    assert too_large.total > fits.total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (fits.total + MODULE_BYTES, 2 * GIB))
    with pytest.raises(OutOfMemoryError, match="set train.batch_size to 1 and train.total_batch_tokens to 192"):
        require_fits(too_large, config, reference, shape, "cuda")


def test_plan_report_names_the_largest_batch_that_divides_a_step():
    """Five of twelve sequences fit, so that batches of four can be used."""
    config = tiny_config(train=dict(total_batch_tokens=12 * 16, batch_size=1))
    shape = StepShape.of(config)
    five = StepShape.of(config.replace(train={"total_batch_tokens": 5 * 16, "batch_size": 5}))
    budget = plan_memory(config, reference, 5, 16, shape=five)[0].total
    report = plan_report(config, reference, budget + CONTEXT_BYTES + MODULE_BYTES, shape)
    assert "largest train.batch_size that fits 5; 4 of those that divide a step\n" in report


def test_plan_report_lists_levels_and_stages_and_marks_the_chosen():
    config = tiny_config(memory=dict(recompute="gelu:1"))
    shape = StepShape.of(config, 2)
    lines = plan_report(config, reference, 8 * GIB, shape).splitlines()
    table = lines[lines.index(next(line for line in lines if line.startswith("recompute "))) + 1 :]
    levels = [line.split()[0] for line in table[: len(RECOMPUTE_LEVELS) + 1]]
    assert levels == ["none", "gelu:1", *RECOMPUTE_LEVELS[1:]]
    assert [line.split()[0] for line in lines if line.endswith("<-")] == ["gelu:1", str(shape.zero)]
    assert f"parameters {config.n_params:,}" in lines
    assert lines[0].startswith("memory ") and lines[0].endswith(
        " for the CUDA context, kernels and graphs: fits a GPU of 8.00 GiB"
    )
    assert lines[1] == "tokens of a step 32: 2 GPUs, on each 1 x 1 sequences of 16"
    assert lines[2] == f"largest train.batch_size that fits {int(table[1].split()[-2].replace(',', '')):,}"
    assert lines[-1].startswith("arena ")
    assert not any("0.00" in line or " 0.01" in line for line in lines)  # a small model's sizes are in MiB
    assert all(" MiB " in line for line in table[: len(levels)])


def test_recompute_auto_is_the_first_level_in_as_few_layers_as_fit():
    config = tiny_config(model=dict(n_layer=3), memory=dict(recompute="auto"))
    every = [f"{level}:{n}".removesuffix(":3") for level in RECOMPUTE_LEVELS[1:] for n in (1, 2, 3)]
    totals = {level: total_at(config, level) for level in ("none", *every)}
    assert list(totals.values()) == sorted(totals.values(), reverse=True)
    first = {bytes_: level for level, bytes_ in reversed(totals.items())}
    assert len(first) > 2 * len(RECOMPUTE_LEVELS)
    for budget, level in first.items():
        assert choose_recompute(config, reference, budget).memory.recompute == level
    assert choose_recompute(config, reference, totals["block"] - 1).memory.recompute == "block"
    named = config.replace(memory={"recompute": "gelu"})
    assert choose_recompute(named, reference, 0) is named


def test_recompute_auto_fits_where_a_deeper_level_takes_more():
    """With one layer `block` keeps as much as the level before, and needs GELU's output in the backward pass too."""
    model, train = dict(n_layer=1, vocab_size=512), dict(batch_size=16, total_batch_tokens=256)
    config = tiny_config(model=model, train=train, memory=dict(recompute="auto"))
    budget = total_at(config, "gelu+ln+qkv")
    assert budget < min(total_at(config, "gelu+ln"), total_at(config, "block"))
    assert total_at(config, choose_recompute(config, reference, budget).memory.recompute) <= budget


def test_second_moments_in_bf16_take_half_the_bytes():
    plans = [plan_of(tiny_config(optim=dict(v=v))) for v in ("fp32", "bf16")]
    fp32, bf16 = (plan.buffers["v"] for plan in plans)
    assert fp32.dtype == torch.float32 and bf16.dtype == torch.bfloat16 and fp32.shape == bf16.shape
    assert plans[0].total - plans[1].total == pytest.approx(fp32.nbytes / 2, abs=1024)  # buffers begin at 256 bytes


def test_forward_only_plan_needs_no_recompute_level():
    """The checkpoints of a run with `auto` have `auto`, and models for samples and scores are planned with it."""
    auto = tiny_config(memory=dict(recompute="auto"))
    none = auto.replace(memory={"recompute": "none"})
    assert plan_of(auto, 2, training=False).total == plan_of(none, 2, training=False).total
