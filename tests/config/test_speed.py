"""config/speed.py: the time of a recipe, from measured steps."""

import pytest

from gpt2_triton.config.config import Config
from gpt2_triton.config.speed import training_hours


def test_the_time_of_a_step_has_one_update():
    """Of four micro-batches, each measured with an update: 4 * (100 - 10) + 10 ms."""
    config = Config.load("gpt2_124m", {"train.precision": "bf16"})
    tok_s = config.train.step_tokens / 4 / 0.1
    figures = {"steps.d12.bf16.ms": 100.0, "steps.d12.bf16.tok_s": tok_s}
    hours = training_hours(config, figures | {"ops.d12.fp8.adamw.ms": 10.0})
    assert hours == pytest.approx(config.train.steps * 0.370 / 3600)
