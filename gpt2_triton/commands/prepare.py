"""`prepare`: make token shards for training."""

import functools
import os
import shlex
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from gpt2_triton.commands.app import AT_LEAST_1, Special, make_app
from gpt2_triton.config.values import check_tokenizer
from gpt2_triton.console import command_line, print_line

app = make_app("prepare", "Make token shards for training.")
Tokenizer = Annotated[
    str,
    Parameter(
        help="gpt2, llama3, bytes, a tokenizer.json or its folder, or meta.pkl, as data.tokenizer "
        "of the run",
        validator=lambda _, value: check_tokenizer(value),
    ),
]
Out = Annotated[Path, Parameter(help="Directory of the shards, train_*.bin and val_*.bin.")]
CPUS = os.cpu_count() or 1
Workers = Annotated[
    int, AT_LEAST_1, Parameter(help="Processes; by default one per CPU.", show_default=False)
]
Field = Annotated[
    str, Parameter(help="Field of a row that holds the text; a.b is the field b of the field a.")
]
Strict = Annotated[bool, Parameter(help="Refuse the text if anything in it would be left out.")]


@app.command(name="text")
def prepare_text(
    *inputs: Annotated[Path, Parameter(required=True)],
    out: Out = Path("data/text"),
    tokenizer: Tokenizer = "gpt2",
    val_fraction: Annotated[float, Parameter(validator=Number(gt=0, lt=1))] = 0.1,
    field: Field = "text",
    special: Special = True,
    strict: Strict = False,
    workers: Workers = CPUS,
) -> None:
    """Tokenise your own text; the same command resumes a stopped preparation.

    Text is in UTF-8. A .txt or .md file is one document; each row of
    .jsonl, .json or .parquet is one.
    All but .parquet may end in .gz, .zst, .xz or .bz2.
    Other text, such as code, goes by its ending, as "code/**/*.py".

    Args:
        inputs: Files, folders (searched for such files, through links) and quoted globs.
        val_fraction: Fraction of the text that becomes validation data, taken from its end.
    """
    from gpt2_triton.data.prepare import documents, text

    measured = text.measure_text(inputs, workers, documents.Reading(field, special), strict)
    text.prepare_text(measured, out, tokenizer, val_fraction, workers)
    _say_next(out, tokenizer)


def _say_next(out: Path, tokenizer: str) -> None:
    """Print how a run takes the shards."""
    keys = {"tokenizer": tokenizer, "train": f"{out}/train_*.bin", "val": f"{out}/val_*.bin"}
    given = " ".join(f"--data.{key} {shlex.quote(value)}" for key, value in keys.items())
    print_line(f"next: {command_line(f'train CONFIG {given}')}")


def prepare_dataset(
    *,
    version: str = "sample-10BT",
    source: str,
    revision: str | None = None,
    field: Field = "text",
    special: Special = False,
    strict: Strict = False,
    out: Path | None = None,
    tokenizer: Tokenizer = "gpt2",
    tokens: Annotated[int | None, Parameter(validator=Number(gte=10))] = None,
    shard_tokens: Annotated[int, AT_LEAST_1] = 100_000_000,
    workers: Workers = CPUS,
) -> None:
    """Tokenise a dataset of the Hugging Face Hub as it is streamed; the same command
    resumes a stopped preparation.

    Args:
        version: Configuration of the dataset, such as sample-100BT.
        source: Name of the dataset on the Hub.
        revision: Branch or commit of the dataset; by default the newest. A
            resumed preparation keeps it.
        out: Directory of the shards, val_000000.bin and train_*.bin; by
            default data/<source>-<version>.
        tokens: Stop after this many tokens; at most a tenth become
            validation data. By default take all.
        shard_tokens: Tokens per shard; the first shard is the validation data.
    """
    from gpt2_triton.data.prepare import dataset

    given = dataset.Dataset(source, version, revision, field)
    out = out or Path("data") / f"{Path(source).name}-{version}"
    dataset.prepare_dataset(given, out, tokenizer, tokens, workers, shard_tokens, special, strict)
    _say_next(out, tokenizer)


# the default of --source
for _name, _title in {"fineweb": "FineWeb", "fineweb-edu": "FineWeb-Edu"}.items():
    _command = functools.partial(prepare_dataset, source=f"HuggingFaceFW/{_name}")
    _help = (
        f"Tokenise {_title} or another dataset of the Hub; "
        "the same command resumes a stopped preparation."
    )
    app.command(_command, name=_name, help=_help)


@app.command(name="pretokenized")
def prepare_pretokenized(
    name: str, /, *, shards: Annotated[int | None, AT_LEAST_1] = None, out: Path | None = None
) -> None:
    """Download shards that others have tokenised; the same command resumes a stopped download.

    Args:
        name: fineweb10B, fineweb100B, fineweb-edu-10B, fineweb-edu-100B, or owner/name
            of llm.c's shards on the Hub.
        shards: Training shards to download, of 100 million tokens (200 MB) each; by default all.
        out: Directory of the shards, val_000000.bin and train_*.bin; by default data/<name>.
    """
    from gpt2_triton.data.prepare import pretokenized

    pretokenized.download(name, out or Path("data") / Path(name).name, shards)


@app.command(name="nanogpt")
def prepare_nanogpt(folder: Path, /, *, out: Out = Path("data/nanogpt")) -> None:
    """Make shards of nanoGPT's train.bin and val.bin; the same command
    resumes a stopped preparation.

    Args:
        folder: Folder of the two files, of GPT-2's tokens, or of characters with their meta.pkl.
    """
    from gpt2_triton.data.prepare import nanogpt

    nanogpt.prepare_nanogpt(folder, out)
    _say_next(out, nanogpt.tokenizer_of(folder))
