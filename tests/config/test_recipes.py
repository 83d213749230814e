"""Every file in configs/ is a valid configuration that fits its GPUs, and its first
line says what it trains.
"""

import re
from pathlib import Path

import pytest

import gpt2_triton.kernels as kernels
from gpt2_triton import device
from gpt2_triton.config import recipes
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.data.prepare import dataset, text
from gpt2_triton.data.shards import open_shards
from gpt2_triton.errors import DataError
from gpt2_triton.model.memory_plan import CONTEXT_BYTES, MODULE_BYTES, choose_recompute, plan_memory
from tests.support.commands import run_tool

ROOT = Path(__file__).parents[2]
SIZES = dict(gpt2_124m=124, gpt2_350m=354, gpt2_774m=774, gpt2_1558m=1558, gpt3_125m=125)
SIZES |= dict(gpt2_124m_fast=124, gpt2_1558m_fast=1558, modern_124m=114)


def require_fit(config, budget, shape):
    """Fail unless the plan of a run takes so many bytes at most."""
    config = choose_recompute(config, kernels, budget, shape)
    plan, _ = plan_memory(config, kernels, shape)
    assert plan.total <= budget


def require_fit_on(gpu, config, gpus=1):
    """Fail unless the plan of a run on `gpus` GPUs of this name fits each."""
    budget = device.memory_bytes(gpu) - CONTEXT_BYTES - MODULE_BYTES
    require_fit(config, budget, StepShape.of(config, gpus))


@pytest.mark.parametrize("name", ["gpt2_1558m", "gpt2_1558m_fast"])
def test_the_largest_recipes_fit_an_h100(name):
    """The others fit 24 GB, below."""
    require_fit_on("h100", Config.load(name))


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt2_124m_fast"])
def test_gpt2_124m_fits_eight_gpus_of_24_gb(name):
    require_fit_on("4090", Config.load(name, gpus=8), 8)


@pytest.mark.parametrize("name", recipes.names())
def test_24_gb_take_every_recipe_but_1558m(name):
    """As docs/guide/recipes.md says: one of 1558M fits in smaller micro-batches, the other not."""
    config = Config.load(name)
    fits = {"gpt2_1558m": 4, "gpt2_1558m_fast": 0}.get(name, config.train.batch_size)
    if fits:
        require_fit_on("4090", config.replace(train={"batch_size": fits}))
    if fits < config.train.batch_size:
        with pytest.raises(AssertionError):
            require_fit_on("4090", config.replace(train={"batch_size": 2 * fits or 1}))


@pytest.mark.parametrize("name", SIZES)
def test_recipe_first_line_has_its_tokens_and_steps(name):
    """Tokens are within 1% of steps times tokens per step, since they are rounded."""
    config, line = Config.load(name), recipes.find(name).read_text().partition("\n")[0]
    tokens, steps = re.search(r"\): ([\d.]+)B tokens, ([\d,]+) steps to ", line).groups()
    assert int(steps.replace(",", "")) == config.train.steps
    assert float(tokens) * 1e9 == pytest.approx(
        config.train.steps * config.train.step_tokens, rel=0.01
    )
    assert int(config.n_params / 1e6) == pytest.approx(SIZES[name], abs=1)


@pytest.mark.parametrize(
    "name", ["gpt2_124m", "gpt2_350m", "gpt2_1558m", "gpt3_125m", "finetune_shakespeare"]
)
def test_missing_data_of_a_recipe_names_the_command_that_makes_it(name, monkeypatch):
    """It is in docs/guide/recipes.md, or in the recipe's first lines; another
    command makes Llama 3's tokens.
    """
    pattern = Config.load(name).data.train
    with pytest.raises(DataError, match="no such shards") as raised:
        open_shards(pattern, 50257, 1024)
    command = re.search(r"prepare ([^`]*)`", str(raised.value))[1]
    told = (ROOT / "docs" / "guide" / "recipes.md").read_text() + recipes.find(name).read_text()
    assert command and command in told
    with pytest.raises(DataError) as raised:
        open_shards(pattern, 128_256, 1024)
    command = re.search(r"python -m gpt2_triton (prepare [^`]*)`", str(raised.value))[1]
    train = []
    monkeypatch.setattr(
        dataset, "prepare_dataset", lambda given, out, tokenizer, *_: train.append((out, tokenizer))
    )
    monkeypatch.setattr(text, "measure_text", lambda *_: None)
    monkeypatch.setattr(
        text,
        "prepare_text",
        lambda measured, out, tokenizer, *_, **__: train.append((out, tokenizer)),
    )
    assert run_tool(command) == 0 and train == [(Path(pattern).parent, "llama3")]
