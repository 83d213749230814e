"""The optimizers, a row each, from which sizes of buffers, spans and checkpoints follow."""

from typing import NamedTuple


class Optimizer(NamedTuple):
    """What an optimizer stores, and what it updates."""

    name: str  # of optim.name
    states: tuple[str, ...]  # buffers of State with a number for each parameter
    matrices: bool  # it updates whole matrices of the layers (muon.py), not spans


ADAMW = Optimizer("adamw", ("m", "v"), matrices=False)
MUON = Optimizer("muon", ("m",), matrices=True)
OPTIMIZERS = (ADAMW, MUON)  # of the layers, by optim.name; all else has ADAMW


def named(name: str) -> Optimizer:
    """Return the optimizer of this optim.name."""
    return next(row for row in OPTIMIZERS if row.name == name)
