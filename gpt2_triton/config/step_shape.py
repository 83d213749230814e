"""The shape of a step: how the sequences of a step divide among GPUs and micro-batches.

It is no part of the configuration, so that a run can be resumed on another number of GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gpt2_triton.config.schema import Sections, TrainConfig
from gpt2_triton.errors import ConfigError


@dataclass(frozen=True)
class StepShape:
    """A configuration's step on a number of GPUs."""

    gpus: int  # processes, one per GPU
    # sequences of one forward and backward pass: batch_size, or all that a
    # GPU has in a step if fewer
    micro_batch: int
    accumulation: int  # micro-steps per step
    zero: int  # the ZeRO stage in use; 0 on one GPU

    @staticmethod
    def of(config: Sections, world_size: int | None = None) -> "StepShape":
        """Return the shape on `world_size` GPUs, else parallel.gpus, else 1;
        ConfigError if they contradict.
        """
        t = config.train
        gpus = world_size or config.parallel.gpus or 1
        if config.parallel.gpus not in (None, gpus):
            raise ConfigError(
                f"parallel.gpus: {config.parallel.gpus}, but torchrun, srun or --gpus gives "
                f"{gpus}; start {config.parallel.gpus} processes, or correct it"
            )
        problems = list(step_conflicts(t, gpus))
        if problems:
            raise ConfigError("\n".join(f"{key}: {message}" for key, message in problems))
        rows = t.step_sequences // gpus  # of each GPU
        micro_batch = min(t.batch_size, rows)
        return StepShape(
            gpus, micro_batch, rows // micro_batch, config.parallel.zero if gpus > 1 else 0
        )


def step_conflicts(t: TrainConfig, gpus: int) -> Iterator[tuple[str, str]]:
    """Yield (key, problem) if the GPUs do not divide the step, or batch_size does not
    divide a GPU's sequences.
    """
    total = t.step_tokens
    unit = t.seq_len * gpus
    rows, rest = divmod(total, unit)  # of each GPU
    if rest:
        todo = f"set it to {' or '.join(str(n * unit) for n in (rows, rows + 1) if n)}"
        # a resume may change the GPUs, not the tokens of a step
        if gpus > 1 and total % t.seq_len == 0:
            divides = f"start a number of GPUs that divides {total // t.seq_len} sequences"
            todo = f"{divides}, or, in a new run, {todo}"
        yield (
            "train.total_batch_tokens",
            f"{total} is no multiple of {unit}, train.seq_len times GPUs ({gpus}); {todo}",
        )
    elif rows % min(t.batch_size, rows):
        best = max(b for b in range(1, t.batch_size) if rows % b == 0)
        below = rows // t.batch_size * t.batch_size * unit
        yield (
            "train.batch_size",
            f"{t.batch_size} does not divide the {rows} sequences of a step on each GPU "
            f"(total_batch_tokens {total}); set it to {best}, or, in a new run, "
            f"total_batch_tokens to {below}",
        )
