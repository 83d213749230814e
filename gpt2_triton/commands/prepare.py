"""`prepare`: make token shards for training."""

import functools
import os
from pathlib import Path
from typing import Literal

from gpt2_triton.commands.app import make_app, require_at_least, usage_line
from gpt2_triton.errors import ConfigError

app = make_app("prepare", "Make token shards for training.")
Tokenizer = Literal["gpt2", "bytes"]


@app.command(name="text", usage=usage_line("prepare text", "[OPTIONS] INPUTS..."))
def prepare_text(
    *inputs: Path,
    out: Path = Path("data/text"),
    tokenizer: Tokenizer = "gpt2",
    val_fraction: float = 0.1,
    workers: int | None = None,
) -> None:
    """Tokenise your own text, files of .txt and .jsonl; the same command resumes a stopped preparation.

    The text is UTF-8: a .txt is one document, a .jsonl has one per line in its field "text"; each may also be .gz.

    Parameters
    ----------
    inputs: Path
        Files, folders (searched for such files) and quoted globs.
    out: Path
        Directory of the shards, train_*.bin and val_*.bin.
    tokenizer: str
        Tokenizer; data.tokenizer of the configuration must be the same.
    val_fraction: float
        Fraction of the text that becomes validation data, taken from its end.
    workers: int
        Number of processes that tokenise; by default one per CPU.
    """
    if not inputs:
        raise ConfigError("prepare text: expected one or more text files")
    require_at_least(workers=(_workers(workers), 1))
    if not 0 < val_fraction < 1:
        raise ConfigError(f"--val_fraction: must be above 0 and below 1, got {val_fraction}")
    from gpt2_triton.data.prepare import text

    text.prepare_text(inputs, out, tokenizer, val_fraction, _workers(workers))


def _workers(given: int | None) -> int:
    return (os.cpu_count() or 1) if given is None else given


@app.command(name="builtin")
def prepare_builtin(*, out: Path = Path("data/builtin"), tokenizer: Tokenizer = "bytes") -> None:
    """Tokenise 0.5 MB of text that every Python has, the help topics of its manual, to try things out.

    Parameters
    ----------
    out: Path
        Directory of the shards, train_*.bin and val_*.bin.
    tokenizer: str
        Tokenizer; data.tokenizer of the configuration must be the same.
    """
    from gpt2_triton.data.prepare import builtin

    builtin.prepare_builtin(out, tokenizer)


def prepare_dataset(
    *,
    version: str | None = None,
    source: str,
    revision: str | None = None,
    field: str = "text",
    out: Path | None = None,
    tokenizer: Tokenizer = "gpt2",
    tokens: int | None = None,
    shard_tokens: int = 100_000_000,
    workers: int | None = None,
) -> None:
    """Tokenise a dataset of the Hugging Face Hub as it is streamed; the same command resumes a stopped preparation.

    Parameters
    ----------
    version: str
        Configuration of the dataset, such as sample-100BT; by default sample-10BT, for a folder none.
    source: str
        Name of the dataset on the Hub, or a folder of its files (parquet or jsonl).
    revision: str
        Branch or commit of the dataset; by default the newest, which a resumed preparation keeps.
    field: str
        Field that holds the text.
    out: Path
        Directory of the shards, val_000000.bin and train_*.bin; by default data/<source>-<version>.
    tokenizer: str
        Tokenizer; data.tokenizer of the configuration must be the same.
    tokens: int
        Stop after this many tokens; at most a tenth of them become validation data.  By default take all.
    shard_tokens: int
        Tokens per shard; the first shard is the validation data.
    workers: int
        Number of processes that tokenise; by default one per CPU.
    """
    require_at_least(
        workers=(_workers(workers), 1),
        shard_tokens=(shard_tokens, 1),
        tokens=(10 if tokens is None else tokens, 10),
    )
    from gpt2_triton.data.prepare import dataset

    if version is None and not Path(source).is_dir():
        version = "sample-10BT"
    name = "-".join([Path(source).name, *([version] if version else [])])
    given = dataset.Dataset(source, version, revision, field)
    dataset.prepare_dataset(given, out or Path("data") / name, tokenizer, tokens, _workers(workers), shard_tokens)


for _name, _title in {"fineweb": "FineWeb", "fineweb-edu": "FineWeb-Edu"}.items():  # the default of --source
    _command = functools.partial(prepare_dataset, source=f"HuggingFaceFW/{_name}")
    _help = (
        f"Tokenise {_title} or another dataset of the Hugging Face Hub; the same command resumes a stopped preparation."
    )
    app.command(_command, name=_name, help=_help)


@app.command(name="pretokenized")
def prepare_pretokenized(name: str, /, *, shards: int | None = None, out: Path | None = None) -> None:
    """Download shards that others have tokenised; the same command resumes a stopped download.

    Parameters
    ----------
    name: str
        fineweb10B, fineweb100B, fineweb-edu-10B, fineweb-edu-100B, or owner/repository of llm.c's shards on the Hub.
    shards: int
        Training shards to download, of 100 million tokens (200 MB) each; by default all.
    out: Path
        Directory of the shards, val_000000.bin and train_*.bin; by default data/<name>.
    """
    require_at_least(shards=(1 if shards is None else shards, 1))
    from gpt2_triton.data.prepare import pretokenized

    pretokenized.download(name, out or Path("data") / Path(name).name, shards)
