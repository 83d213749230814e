"""`export`: weights for other programs."""

from pathlib import Path
from typing import Literal


def export(
    source: str,
    /,
    *,
    out: Path,
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> None:
    """Write the weights of a model as Hugging Face's transformers reads them.

    Parameters
    ----------
    source: str
        A run, one of its step directories, or hf:DIR_OR_NAME.
    out: Path
        New directory for the model and its tokenizer.
    dtype: str
        Storage of the weights; fp32 loses nothing, bf16 takes half the space.
    """
    from gpt2_triton import interop

    interop.export(source, out, "hf", dtype)
    print(f"wrote {out}")
