"""The learning rate and the weight decay of each part of a model."""

from typing import NamedTuple

from gpt2_triton.config.config import Config


class BucketRate(NamedTuple):
    """Buckets of the flat order (sharding.py) that are updated alike."""

    name: str
    optimizer: str
    # the schedule's learning rate times this is the bucket's; 1 for the layers
    lr_factor: float
    decay: float


def bucket_rates(config: Config) -> list[BucketRate]:
    """Return those of the embedding, of the layers, and of norms and biases, in the flat order."""
    o = config.optim
    adamw = (o.adamw_lr or o.lr) / o.lr  # adamw_lr goes with another optimizer of the layers
    return [
        BucketRate("embed", "adamw", adamw * o.embed_lr, config.embed_decay),
        BucketRate("layers", o.name, 1.0, config.weight_decay),
        BucketRate("rest", "adamw", adamw, 0.0),
    ]


def rates_line(config: Config) -> str:
    """Return the parameters, and each bucket's optimizer, rate and decay, in a line."""
    parts = []
    for rate in bucket_rates(config):
        lr = config.optim.lr * rate.lr_factor
        parts.append(f"{rate.name} {rate.optimizer} lr {lr:.3g} decay {rate.decay:.3g}")
    return f"parameters {config.n_params:,}: {', '.join(parts)}"
