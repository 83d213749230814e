"""The runs of chaos: their keys exist and agree; the codes that signals may end them with."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_triton.config.config import Config
from tests.chaos import __main__ as chaos
from tests.chaos.faults import TABLE

CONFIGS = sorted(Path(chaos.__file__).parent.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_run_of_chaos_is_a_configuration_of_two_ranks(path):
    config = Config.load(path, {}, 2)
    assert config.train.steps and config.checkpoint.every < config.train.steps


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_may_end_a_job_that_exits_already(name):
    """At its exit Python takes its handlers back."""
    exiting = f"signal.signal(signal.{name}, signal.SIG_DFL); signal.raise_signal(signal.{name})"
    ended = subprocess.run([sys.executable, "-c", f"import signal; {exiting}"])
    assert ended.returncode < 0 and ended.returncode in TABLE[name].codes
