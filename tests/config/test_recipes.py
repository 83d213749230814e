"""Every file in configs/ is a valid configuration that fits an H200, and its first line describes it; the guide's
table of smaller GPUs is the memory plan's.
"""

import math
import re
from pathlib import Path

import pytest

import gpt2_triton.kernels as kernels
from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.data.shards import open_shards
from gpt2_triton.errors import DataError
from gpt2_triton.model.memory_plan import CONTEXT_BYTES, MODULE_BYTES, choose_recompute, plan_memory

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))
SIZES = {
    "gpt2_124m": 124,
    "gpt2_124m_fast": 124,
    "gpt2_350m": 354,
    "gpt2_774m": 774,
    "gpt2_1558m": 1558,
    "gpt3_125m": 125,
}
SECONDS = {"minutes": 60, "hours": 3600, "days": 86400}


def test_recipes_exist():
    assert {path.stem for path in RECIPES} == {*SIZES, "own", "quickstart", "overfit", "finetune_shakespeare"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_fits_an_h200(path):
    config = Config.load(path, {})
    budget = device.memory_bytes("h200") - CONTEXT_BYTES - MODULE_BYTES
    config = choose_recompute(config, kernels, budget)
    plan, _ = plan_memory(config, kernels, StepShape.of(config).micro_batch, config.train.seq_len)
    assert plan.total <= budget


@pytest.mark.parametrize("name", SIZES)
def test_recipe_first_line_matches_its_keys(name):
    """Tokens are within 1% of steps times tokens per step; times and cost are within 3% of those that tokens/s gives,
    since all are rounded.  Eight GPUs count as 8 x 0.97, at $3 per hour each.
    """
    (path,) = (path for path in RECIPES if path.stem == name)
    config, line = Config.load(path, {}), path.read_text().split("\n", 1)[0]
    found = re.fullmatch(
        r"# .* \((?:llm\.c's run_(\w+)M\.sh|of gpt2_124m)\): ([\d.]+)B tokens, ([\d,]+) steps to .*; "
        r"by calculation ([\d.]+) (\w+) and \$(\d+) on 8 H200s, ([\d.]+) (\w+) on one at ([\d.]+)k tokens/s"
        r"( \(measured [\d-]{10}, commit [0-9a-f]{7}\))?\.",
        line,
    )
    assert found, line
    script, tokens, steps, time8, unit8, cost, time, unit, speed, measured = found.groups()
    assert (measured is None) == (name == "gpt3_125m"), "its speed is calculated, those of the others are measured"
    assert (f"{script}m" == name or name == "gpt2_124m_fast") and int(steps.replace(",", "")) == config.train.steps
    assert float(tokens) * 1e9 == pytest.approx(config.train.steps * config.total_batch_tokens, rel=0.01)
    seconds = float(tokens) * 1e9 / (float(speed) * 1e3)
    assert float(time) * SECONDS[unit] == pytest.approx(seconds, rel=0.03)
    assert float(time8) * SECONDS[unit8] == pytest.approx(seconds / (8 * 0.97), rel=0.03)
    assert float(cost) == pytest.approx(3 * seconds / 0.97 / 3600, rel=0.03)
    assert int(config.n_params / 1e6) == pytest.approx(SIZES[name], abs=1)


H200_TOKENS_PER_SECOND = 632_468  # gpt2_124m, measured: docs/engineering/performance.md
HOST_BYTES_PER_SECOND = 10e9  # between GPUs that cannot read each other's memory, assumed
BUDGETS = re.findall(
    r"^\| (\d) x ([\w-]+) \| ([\d.]+) of ([\d.]+) GiB \| (\d+) x (\d+) \| ([\d.]+) \| ([\d.]+) \|$",
    (ROOT / "docs" / "guide" / "recipes.md").read_text(),
    re.M,
)


def test_budgets_are_there():
    assert {(gpus, gpu) for gpus, gpu, *_ in BUDGETS} == {(n, g) for n in "18" for g in ("4090", "a100-40", "a100-80")}


@pytest.mark.parametrize("row", BUDGETS, ids=lambda row: f"{row[0]}x{row[1]}")
def test_recipe_fits_a_smaller_gpu_as_the_guide_states(row):
    """Memory, micro-steps and sequences are the plan's; hours are the data sheet's flop/s at the H200's MFU."""
    gpus, gpu = int(row[0]), row[1]
    bandwidth = math.inf if gpus == 1 or gpu != "4090" else HOST_BYTES_PER_SECOND
    for name, hours in zip(("gpt2_124m", "gpt2_124m_fast"), row[6:], strict=True):
        config = Config.load(name, gpus=gpus)
        shape = StepShape.of(config, gpus)
        plan, _ = plan_memory(config, kernels, shape.micro_batch, config.train.seq_len, shape=shape)
        assert plan.total <= device.memory_bytes(gpu) - CONTEXT_BYTES - MODULE_BYTES
        if name == "gpt2_124m":
            assert f"{plan.total / 2**30:.1f}" == row[2] and f"{device.memory_bytes(gpu) / 2**30:.1f}" == row[3]
        assert (str(shape.accumulation), str(shape.micro_batch)) == row[4:6]
        speed = gpus * H200_TOKENS_PER_SECOND * device.GPUS[gpu].tflops / device.GPUS["h200"].tflops
        if gpus > 1 and bandwidth == math.inf:
            speed *= 0.97
        seconds = config.train.steps * (config.total_batch_tokens / speed + 6 * config.n_params / bandwidth)
        assert float(hours) == pytest.approx(seconds / 3600, rel=0.03)


H100 = re.findall(
    r"^\| `(gpt2_\w+)` \| ([\d.]+) of ([\d.]+) GiB \| ([\d.]+) GiB \|$",
    (ROOT / "docs" / "guide" / "recipes.md").read_text(),
    re.M,
)


@pytest.mark.parametrize("size", ["124m", "350m", "774m", "1558m"])
def test_recipe_fits_an_h100_as_the_guide_states(size):
    [(memory, total, without)] = [row[1:] for row in H100 if row[0] == f"gpt2_{size}"]
    assert float(total) == pytest.approx(device.GPUS["h100"].memory)
    config = Config.load(f"gpt2_{size}")
    for planned, level in ((memory, config.memory.recompute), (without, "none")):
        plan, _ = plan_memory(
            config.replace(memory={"recompute": level}), kernels, config.train.batch_size, config.train.seq_len
        )
        assert plan.total <= device.memory_bytes("h100") - CONTEXT_BYTES - MODULE_BYTES
        assert f"{plan.total / 2**30:.1f}" == planned


def test_hours_and_dollars_to_a_loss_are_those_of_one_h200():
    """Rounded to 0.1 hours and to dollars; Muon's are of the fast recipe's tokens divided by the two ratios."""
    page = (ROOT / "docs" / "guide" / "recipes.md").read_text()
    part = page.partition("## Hours and dollars")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?:`(\w+)`|the same) .*?[| ]([\d.]+)(?: to ([\d.]+))? hours, \$(\d+) \|$", part, re.M)
    assert [name for name, *_ in rows] == ["gpt2_124m", "gpt2_124m_fast", ""]
    for name, hours, hours_at_most, dollars in rows:
        config = Config.load(name or "gpt2_124m_fast", {})
        whole = config.train.steps * config.total_batch_tokens / H200_TOKENS_PER_SECOND / 3600
        least, most = (whole, whole) if name else (whole / 1.52, whole / 1.36)
        assert (hours, hours_at_most or hours) == (f"{least:.1f}", f"{most:.1f}")
        assert dollars == f"{3 * least:.0f}" == f"{3 * most:.0f}"


@pytest.mark.parametrize("name", ["gpt2_124m", "gpt2_350m", "gpt2_1558m", "gpt3_125m", "finetune_shakespeare"])
def test_missing_data_of_a_recipe_names_the_command_that_makes_it(name):
    """The command is one of the table in docs/guide/recipes.md, or of the recipe's first lines."""
    pattern = Config.load(Path(name)).data.train
    with pytest.raises(DataError, match="no such shards") as raised:
        open_shards(pattern, 50257, 1024)
    command = re.search(r"prepare ([^`]*)`", str(raised.value))[1]
    told = (ROOT / "docs" / "guide" / "recipes.md").read_text() + (ROOT / "configs" / f"{name}.yaml").read_text()
    assert command and command in told
