"""`wandb-export`: send a run's metrics to Weights & Biases afterwards."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpt2_triton.console import printable


def wandb_export(
    run: Path, /, *, project: str | None = None, new_run: Annotated[bool, Parameter(name="new")] = False
) -> None:
    """Send the records of a run's metrics.jsonl that Weights & Biases lacks, after an outage or a run without it.

    Parameters
    ----------
    run: Path
        Run directory; after an interruption the same command continues where it stopped.
    project: str
        Project at Weights & Biases; by default the run's log.wandb_project.
    new_run: bool
        Send everything to a new run, for example when the old one was deleted there.
    """
    from gpt2_triton.training import wandb_logger

    sent, records, address = wandb_logger.send_missing(run, project, new_run)
    print(printable(f"sent {sent:,} of {records:,} records, the others were there: {address}"))
