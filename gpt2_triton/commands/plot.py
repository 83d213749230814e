"""`plot`: draw the curves of runs into one picture."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpt2_triton.errors import ConfigError


def plot(
    *runs: Path, out: Annotated[Path, Parameter(name=("out", "-o"))] = Path("loss.png"), openai: bool = False
) -> None:
    """Draw loss, learning rate, gradient norm, speed and HellaSwag of runs over tokens, into one PNG.

    Parameters
    ----------
    runs: Path
        Run directories.
    out: Path
        The picture.
    openai: bool
        Draw OpenAI's GPT-2 as lines, also where the validation data is not FineWeb.
    """
    if not runs:
        raise ConfigError("plot: expected one or more run directories")
    from gpt2_triton import plot as plotting

    plotting.plot(runs, out, openai)
    print(f"wrote {out}")
