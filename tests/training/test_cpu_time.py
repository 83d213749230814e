"""A run that would take days without a GPU is refused before anything is
made, unless it is asked for.
"""

import pytest

from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError
from gpt2_triton.training import cpu_time
from gpt2_triton.training.cpu_time import expected, product_flops, require_time


@pytest.fixture
def rate(monkeypatch):
    """A CPU of 100 GFLOP/s."""
    monkeypatch.setattr(cpu_time, "product_flops", lambda: 1e11)


@pytest.mark.usefixtures("rate")
def test_a_recipe_for_a_gpu_is_refused_with_its_time(tmp_path):
    refusal = (
        r"^no GPU: on this CPU 19,560 steps take at least 953\.7 days, "
        r"4,212\.5 s each; .* set train.max_minutes"
    )
    with pytest.raises(ConfigError, match=refusal):
        require_time(Config.load("gpt2_124m"), tmp_path)


@pytest.mark.usefixtures("rate")
def test_small_runs_limited_runs_and_runs_that_exist_start(tmp_path):
    require_time(Config.load("quickstart"), None)
    require_time(Config.load("gpt2_124m", {"train.max_minutes": "60"}), None)
    (tmp_path / "checkpoints" / "step_00000100").mkdir(parents=True)
    require_time(Config.load("gpt2_124m"), tmp_path)


def test_the_rate_is_measured():
    assert 1e8 < product_flops() < 1e13


@pytest.mark.usefixtures("rate")
def test_muons_products_count(monkeypatch):
    """A step of 4 layers of 512 channels took 2.5 s by AdamW, 6.3 s by Muon."""
    keys = {"model.n_layer": 4, "model.n_head": 8, "model.n_embd": 512}
    muon = Config.load("own_cpu", keys)
    adamw = muon.replace(optim={"name": "adamw"})
    assert expected(Config.load("own_cpu")) == "5m 00s"
    monkeypatch.setattr(cpu_time, "duration", lambda seconds: seconds / 60)
    found = [expected(config) for config in (muon, adamw)]
    assert found == pytest.approx([63, 25], rel=0.15)
