"""`stats`: print a run's tensor statistics as a table."""

from pathlib import Path

from gpt2_triton.console import counted, printable
from gpt2_triton.errors import ConfigError


def stats(run: Path, /, *, step: int | None = None) -> None:
    """Print the statistics of a run's activations, gradients and updates at one step.

    Args:
        run: Run directory, of a run with log.stats_every above 0.
        step: Step to print; by default the last one with statistics.
    """
    from gpt2_triton.model.tensor_stats import format_table
    from gpt2_triton.training.metrics import STATS, read_metrics

    path = run / STATS
    if not path.is_file():
        raise ConfigError(f"{run}: no {STATS} there; name a run trained with --log.stats_every 100")
    records = {record["step"]: record for record in read_metrics(path)}
    if not records:
        raise ConfigError(f"{path}: holds no statistics yet; train to step log.stats_every")
    chosen = max(records) if step is None else step
    if chosen not in records:
        raise ConfigError(
            f"--step: no statistics of step {step}; "
            f"take one of {counted(len(records), 'step')}, from {min(records)} to {max(records)}"
        )
    print(printable(f"step {chosen}\n{format_table(records[chosen])}"))
