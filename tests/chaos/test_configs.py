"""The runs of chaos: their keys exist and agree."""

from pathlib import Path

import pytest

from gpt2_triton.config.config import Config
from tests.chaos import __main__ as chaos

CONFIGS = sorted(Path(chaos.__file__).parent.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_run_of_chaos_is_a_configuration_of_two_ranks(path):
    config = Config.load(path, {}, 2)
    assert config.train.steps and config.checkpoint.every < config.train.steps
