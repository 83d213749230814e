"""StepShape: how a step divides on a number of GPUs, decided by the
configuration and that number alone.
"""

import pytest

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.errors import ConfigError


def config_of(**parallel) -> Config:
    """Return a configuration whose step has 96 sequences: 64 at once do not
    divide it, nor do 12 on 5 GPUs.
    """
    train = dict(batch_size=64, seq_len=128, total_batch_tokens=96 * 128)
    return Config.model_validate(dict(train=train, parallel=parallel))


def test_of_depends_on_the_config_and_the_world_size_only():
    config = config_of()
    eight = StepShape(gpus=8, micro_batch=12, accumulation=1, zero=1)
    assert StepShape.of(config, 8) == eight
    with pytest.raises(ConfigError, match="train.batch_size: .*; set it to 48"):
        StepShape.of(config)
    assert StepShape.of(config, 8) == eight  # nothing is kept in the configuration
    assert config == config_of()


def test_of_takes_parallel_gpus_where_no_world_size_is_given():
    assert StepShape.of(config_of(gpus=4, zero=2)) == StepShape(
        gpus=4, micro_batch=24, accumulation=1, zero=2
    )
    with pytest.raises(ConfigError, match="parallel.gpus: 4, .*gives 8; start 4"):
        StepShape.of(config_of(gpus=4), 8)


def test_zero_is_0_on_one_gpu():
    train = dict(batch_size=48, seq_len=128, total_batch_tokens=96 * 128)
    config = Config.model_validate(dict(train=train, parallel=dict(zero=2)))
    assert StepShape.of(config, 1) == StepShape(gpus=1, micro_batch=48, accumulation=2, zero=0)
