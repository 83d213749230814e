"""`train own --data my.txt`: shards and configuration of a run on a user's own text.

The shards lie in data/NAME_TOKENIZER_HASH, where the hash is that of the text: the same text finds them again, and
changed text gets a new directory.
"""

import contextlib
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpt2_triton.config import own_text
from gpt2_triton.config.config import Config
from gpt2_triton.config.load import load_config
from gpt2_triton.config.recipes import OWN, find
from gpt2_triton.console import command_line, print_line
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.errors import ConfigError, DataError
from gpt2_triton.files import is_text


def require_data(config: Path, data: Sequence[Path] | None) -> None:
    """Refuse the recipe without text, text in the place of a recipe, and text for another recipe."""
    if is_text(config) and config.is_file():
        raise ConfigError(f"{config}: text, no configuration; `{_command([config])}` trains on it")
    is_own = config.stem == OWN
    if data is not None and not is_own:
        find(config)  # a name that is no recipe's may be mistyped
        others = "for others run `prepare text` and --data.train"
        raise ConfigError(f"--data: goes with the recipe own, as `{_command(data)}`, not with {config}; {others}")
    if is_own and not data:
        raise ConfigError("own: needs --data and one or more text files, folders or globs, as in --data my.txt")


def without_recipe(data: Sequence[Path] | None) -> str:
    """Return the message for a command line without a recipe."""
    texts = [path for path in data or () if str(path) != OWN]  # --data takes all words up to the next option
    return f"no recipe: `{_command(texts)}` trains on your text" if texts else "CONFIG requires an argument; see --help"


def _command(data: Sequence[Path]) -> str:
    return f"{command_line(f'train {OWN}')} --data {shlex.join(map(str, data)) or 'my.txt'}"


def settings(
    recipe: Path,
    data: Sequence[Path],
    given: Mapping[str, str],
    gpus: int,
    gpu: str | None = None,
    run_dir: Path | None = None,
    prepare: bool = False,
    summary: bool = False,
) -> Config:
    """Return the configuration of a run on the text in `data`, on this machine or on GPUs of the name `gpu`.

    run_dir     a run to resume: its configuration instead of the recipe's, so that nothing is picked again
    prepare     print what was picked, and make the shards unless they are there
    summary     print what was picked
    """
    from gpt2_triton import device
    from gpt2_triton.data.prepare import text

    rank, ranks = rank_and_size()
    workers = max(1, (os.cpu_count() or 1) // ranks)
    gpu_gib = device.memory_bytes(gpu) / 2**30 if gpu or device.present() else None
    with _on_every_rank():
        measured = text.measure_text(data, workers)
        resumed = run_dir / "config.yaml" if run_dir else None
        if resumed and resumed.is_file():
            recipe, picked = resumed, {}
            tokenizer: str = load_config(resumed, given, gpus).data.tokenizer
        else:
            row = own_text.row_for(measured.characters, gpu_gib)
            tokenizer = given.get("data.tokenizer") or _tokenizer(row.tokenizer)
            known = tokenizer if tokenizer in own_text.CHARACTERS else "bytes"  # load_config refuses the given one
            picked = own_text.choose(measured.characters, gpu_gib, known, given, gpus)
    shards = Path("data") / f"{_name(data)}_{tokenizer}_{measured.digest[:8]}"
    picked |= {"data.train": f"{shards}/train_*.bin", "data.val": f"{shards}/val_*.bin"}
    config = load_config(recipe, picked | dict(given), gpus)
    log = print_line if rank == 0 else lambda line: None
    if prepare or summary:
        where = "a GPU" if gpu_gib else "the CPU"
        for line in own_text.summary(config, measured.characters, where):
            log(line)
    if prepare:
        text.prepare_measured(measured, shards, tokenizer, own_text.VAL_FRACTION, workers, log=log)
    return config


@contextlib.contextmanager
def _on_every_rank() -> Iterator[None]:
    """Mark a DataError as one of every rank: all read the same text."""
    try:
        yield
    except DataError as error:
        error.on_every_rank = True
        raise


def _tokenizer(wanted: str) -> str:
    """Return the tokenizer, or bytes if GPT-2's is neither installed nor to be had from the network."""
    from gpt2_triton.data.tokenizer import get_tokenizer

    try:
        return get_tokenizer(wanted).name
    except DataError:
        return "bytes"


def _name(data: Sequence[Path]) -> str:
    """Return a name for a directory: that of the first file or folder, without endings and unusual characters."""
    first = data[0].absolute().name.partition(".")[0]
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in first).strip("-") or "text"
