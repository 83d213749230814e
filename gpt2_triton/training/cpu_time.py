"""The time that a run takes without a GPU, before anything is made: a recipe
for a GPU would take years.
"""

import time
from pathlib import Path

from gpt2_triton.checkpoint.format import list_steps
from gpt2_triton.config.config import Config
from gpt2_triton.console import duration
from gpt2_triton.errors import ConfigError

LONGEST_HOURS = 12  # without a word from the user
TIMED_ROWS = 768  # of the products that are timed
# seconds of all but products, for a channel of a token in a layer: Triton's interpreter is Python
# on one core.  600 steps of own's model take 5 minutes, a fifth of them in products
OTHER_SECONDS = 7.5e-7
# Muon's operations in a step, for a channel of a parameter of the layers: five polynomials multiply
# each matrix 25 times by one of n_embd rows, in blocks at half the rate of whole matrices
MUON_OPERATIONS = 50


def product_flops() -> float:
    """Return the flop/s of the products that Triton's interpreter computes, measured
    in a fraction of a second.
    """
    import numpy as np

    matrix = np.ones((TIMED_ROWS, TIMED_ROWS), np.float32)
    fastest = float("inf")
    for _ in range(4):
        start = time.thread_time()  # as on an idle machine
        np.matmul(matrix, matrix)
        fastest = min(fastest, time.thread_time() - start)
    return 2 * TIMED_ROWS**3 / fastest


def require_time(config: Config, run_dir: Path | None) -> None:
    """Raise ConfigError if products alone take LONGEST_HOURS here, unless the run has
    checkpoints or a time limit.
    """
    has_checkpoints = run_dir is not None and bool(list_steps(run_dir / "checkpoints"))
    if config.train.max_minutes or has_checkpoints:
        return
    steps = config.train.steps
    step = _product_seconds(config)
    if step * steps > 3600 * LONGEST_HOURS:
        raise ConfigError(
            f"no GPU: on this CPU {steps:,} steps take at least {step * steps / 86_400:,.1f} days, "
            f"{step:,.1f} s each; to train all the same, set train.max_minutes; "
            "or choose a smaller model, or fewer steps"
        )


def expected(config: Config) -> str:
    """Return the time that all steps are likely to take, in whole minutes."""
    channels = config.train.step_tokens * config.model.n_layer * config.model.n_embd
    seconds = config.train.steps * (_product_seconds(config) + OTHER_SECONDS * channels)
    return duration(max(60, round(seconds / 60) * 60))


def _product_seconds(config: Config) -> float:
    m = config.model
    operations = config.flops_per_token * config.train.step_tokens
    if config.optim.name == "muon":
        of_layers = config.n_params - m.n_embd * (m.head_row + m.padded_vocab)
        operations += MUON_OPERATIONS * m.n_embd * of_layers
    return operations / product_flops()
