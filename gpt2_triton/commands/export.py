"""Command `export`: write weights for other programs."""

from pathlib import Path
from typing import Literal

from gpt2_triton.commands.app import Checkpoint
from gpt2_triton.console import format_bytes, print_line

# what reads an export
NEXT = {
    "hf": 'AutoModelForCausalLM.from_pretrained("{}")',
    "llmc": "train_gpt2cu -e {}/model.bin",
}


def export(
    source: Checkpoint,
    /,
    *,
    out: Path,
    format: Literal["hf", "llmc"] = "hf",
    dtype: Literal["fp32", "bf16"] = "fp32",
) -> None:
    """Write the weights of a model in the format of transformers or llm.c.

    Args:
        out: New directory for the model and its tokenizer.
        format: hf for transformers and programs that build on it, llmc for llm.c.
        dtype: Storage of the weights; fp32 loses nothing, bf16 takes half the space.
    """
    from gpt2_triton.checkpoint import export as exporting

    exporting.export(source, out, format, dtype)
    size = format_bytes(sum(file.stat().st_size for file in out.iterdir()))
    print_line(f"wrote {out}, {size}; next: {NEXT[format].format(out)}")
