"""Command `tokenizer`: train a tokenizer on text."""

import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from gpt2_triton.commands.prepare import CPUS, Field, Strict, Workers
from gpt2_triton.console import command_line, print_line
from gpt2_triton.files import require_new

SMALLEST = 257  # tokens: the bytes and the end of text


def tokenizer(
    *inputs: Annotated[Path, Parameter(required=True)],
    vocab: Annotated[int, Parameter(validator=Number(gte=SMALLEST, lte=1 << 18))] = 16384,
    out: Path = Path("tokenizer"),
    field: Field = "text",
    strict: Strict = False,
    workers: Workers = CPUS,
) -> None:
    """Train a tokenizer on your own text: a byte-level BPE, which splits a text as GPT-2's does.

    It prints the bytes per token on the last tenth of the text, which is held out, beside GPT-2's.

    Args:
        inputs: Files, folders and quoted globs, as `prepare text` takes them.
        vocab: Number of tokens.
        out: New directory for tokenizer.json, which data.tokenizer and --tokenizer take.
    """
    from gpt2_triton.data.prepare import documents, text
    from gpt2_triton.data.prepare.train_tokenizer import train_tokenizer

    require_new(out)  # before the text is read
    measured = text.measure_text(inputs, workers, documents.Reading(field), strict)
    documents.report_left_out(measured.notes)
    for line in train_tokenizer(measured, vocab, out):
        print_line(line)
    files = " ".join(shlex.quote(str(given)) for given in inputs)
    if field != "text":
        files += f" --field {shlex.quote(field)}"
    use = f"train own --data {files} --data.tokenizer {shlex.quote(str(out))}"
    print_line(f"wrote {out}; next: {command_line(use)}")
