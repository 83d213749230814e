"""`plot`: draw the losses of runs into one picture."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpt2_triton.config import ConfigError


def plot(*runs: Path, out: Annotated[Path, Parameter(name=("out", "-o"))] = Path("loss.png")) -> None:
    """Draw the losses of runs into one PNG.

    Parameters
    ----------
    runs: Path
        Run directories.
    out: Path
        The picture.
    """
    if not runs:
        raise ConfigError("plot: expected one or more run directories")
    from gpt2_triton import plot as plotting

    plotting.plot(runs, out)
    print(f"wrote {out}")
