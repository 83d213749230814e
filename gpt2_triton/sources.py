"""Weights by where they are: the one place that knows every kind of source."""

from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from gpt2_triton import checkpoint
from gpt2_triton.config import Config


def load_weights(source: str) -> tuple[Config, dict[str, Tensor]]:
    """Configuration and host tensors, `params` among them, of a run or of one of its step directories."""
    step_dir = checkpoint.find(Path(source))
    state, tensors = checkpoint.load(step_dir)
    try:
        return Config.model_validate(state["config"]), tensors
    except ValidationError as error:
        wrong = f"{step_dir}: its configuration is of another version of gpt2_triton"
        raise checkpoint.CheckpointError(wrong) from error
