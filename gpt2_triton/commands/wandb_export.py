"""`wandb-export`: send a run's metrics to Weights & Biases after the fact."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def wandb_export(
    run: Path, /, *, project: str | None = None, afresh: Annotated[bool, Parameter(name="new")] = False
) -> None:
    """Send what Weights & Biases lacks of a run's metrics.jsonl: after an outage, or of a run made without it.

    Parameters
    ----------
    run: Path
        Run directory.  Interrupted, the command goes on where it stopped.
    project: str
        Project; default the run's log.wandb_project.
    afresh: bool
        Send everything to a new run, for example when the old one was deleted there.
    """
    from gpt2_triton.training import wandb_logger

    sent, records, address = wandb_logger.export(run, project, afresh)
    print(f"sent {sent:,} of {records:,} records, the others were there: {address}")
