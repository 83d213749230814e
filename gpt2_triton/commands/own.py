"""`train own --data my.txt`: shards and configuration of a run on a user's own text.

Shards lie in data/NAME_TOKENIZER_HASH: the same text finds them again, and
changed text gets a new directory.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gpt2_triton.config import own_text
from gpt2_triton.config.config import Config
from gpt2_triton.config.recipes import OWN, find
from gpt2_triton.config.rules import HUB_SIZES, INIT_SOURCES, TOKENIZER_SIZES
from gpt2_triton.console import command_line, print_line
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.errors import ConfigError, DataError, same_on_all_ranks
from gpt2_triton.files import is_text

if TYPE_CHECKING:
    from gpt2_triton.checkpoint.weights import Weights


class Text(NamedTuple):
    """A user's own text, and how to read it."""

    data: Sequence[Path]
    field: str
    special: bool
    strict: bool


def require_data(config: Path, data: Sequence[Path] | None, run_dir: Path | None) -> None:
    """Refuse the recipe own without text, text in place of a recipe,
    and text for another recipe.
    """
    command = f"{command_line(f'train {OWN}')} --data"
    if is_text(config) and config.suffix != ".json":  # JSON is YAML
        raise ConfigError(
            f"{config}: text, no configuration; `{command} {shlex.quote(str(config))}` trains on it"
        )
    if str(config) == OWN and not data:
        raise ConfigError(
            "own: needs --data and one or more text files, folders or globs, as in --data my.txt"
        )
    if str(config) != OWN and data is not None:
        find(config)  # refuses a mistyped recipe first
        raise ConfigError(
            f"--data: goes with the recipe own, as `{command} my.txt`; "
            f"for {config} give --data.train"
        )
    if run_dir and run_dir.resolve() in (given.resolve() for given in data or ()):
        raise ConfigError(
            f"--run_dir: {run_dir} is the folder of --data; name another, as in {run_dir / 'run'}"
        )


def settings(
    recipe: Path,
    own: Text,
    given: Mapping[str, str],
    gpus: int,
    gpu: str | None = None,
    run_dir: Path | None = None,
    prepare: bool = False,
    summary: bool = False,
) -> Config:
    """Return the configuration of a run on the text `own`, on this machine
    or on GPUs of the name `gpu`.

    run_dir     a run to resume: its configuration replaces recipe and choices;
                data.allow_changed is for one start
    prepare     print what was chosen, and make the shards unless they exist
    summary     print what was chosen
    """
    from gpt2_triton import device
    from gpt2_triton.checkpoint.weights import check_sizes
    from gpt2_triton.data.prepare import documents, text
    from gpt2_triton.data.tokenizer import look_in
    from gpt2_triton.training import cpu_time

    workers = max(1, (os.cpu_count() or 1) // rank_and_size()[1])
    gpu_gib = device.memory_bytes(gpu) / 2**30 if gpu or device.present() else None
    with same_on_all_ranks():
        measured = text.measure_text(own.data, workers, documents.Reading(own.field, own.special))
        documents.require_all(measured.notes, own.strict)
        if run_dir and (run_dir / "config.yaml").is_file():
            recipe, picked, source = run_dir / "config.yaml", {"data.allow_changed": "false"}, None
            continued = Config.load(recipe, given, gpus)
            tokenizer: str = continued.data.tokenizer
            look_in(tokenizer, run_dir)
            tokens = measured.count_tokens(tokenizer)
        else:
            source = _weights(given.get("init_from", ""), download=prepare)
            usual = (
                source
                and source.tokenizer
                or own_text.preset_for(measured.characters, gpu_gib, given).tokenizer
            )
            tokenizer = given.get("data.tokenizer") or (
                usual if "init_from" in given else _available(usual)
            )
            known = tokenizer in TOKENIZER_SIZES  # Config.load refuses another
            tokens = measured.count_tokens(tokenizer) if known else measured.characters
            model = source.model if source else None
            picked = own_text.choose(
                measured.characters, tokens, gpu_gib, tokenizer, given, gpus, model
            )
        shards = Path("data") / f"{_name(own.data)}_{tokenizer}_{measured.digest[:8]}"
        picked |= {"data.train": f"{shards}/train_*.bin", "data.val": f"{shards}/val_*.bin"}
        config = Config.load(recipe, picked | dict(given), gpus)
        if source:
            check_sizes(source, config)
    if prepare or summary:
        print_line(
            own_text.summary(config, measured.characters, tokens, "a GPU" if gpu_gib else "the CPU")
        )
        if gpu_gib is None:
            print_line(
                f"  expected time without a GPU: {cpu_time.expected(config)}, on an idle machine"
            )
    if summary:
        documents.report(measured.notes, tokenizer)
    if prepare:
        text.prepare_text(measured, shards, tokenizer, own_text.VAL_FRACTION, workers)
    return config


def _weights(init_from: str, download: bool) -> "Weights | None":
    """Return the weights of init_from; None for scratch, and without
    `download` for OpenAI's names.
    """
    from gpt2_triton.checkpoint.sources import open_weights
    from gpt2_triton.checkpoint.weights import no_tokenizer

    kind, _, where = init_from.partition(":")
    named = kind == "hf" and where.rpartition("/")[2] in HUB_SIZES and not Path(where).is_dir()
    if kind not in INIT_SOURCES or named and not download:
        return None
    weights = open_weights(init_from)
    if weights.tokenizer is None:
        raise no_tokenizer(weights)
    return weights


def export(run_dir: Path, config: Config) -> None:
    """Write the best checkpoint of a run, else the newest, in the format of Hugging
    Face, beside its checkpoints.
    """
    from gpt2_triton.checkpoint import export as exporting
    from gpt2_triton.checkpoint.format import list_steps
    from gpt2_triton.checkpoint.load import best_checkpoint

    _, newest = list_steps(run_dir / "checkpoints")[-1]
    # the export verifies it; a hash of 1B parameters' state takes 10 s
    found = best_checkpoint(newest) or newest
    if not (out := run_dir / f"exported_{found.name}").exists():
        exporting.export(str(found), out, "hf", config.train.dtype)
        print_line(f"wrote {out}, for transformers")


def _available(tokenizer: str) -> str:
    """Return the tokenizer, or bytes if GPT-2's merges are neither
    installed nor to be downloaded.
    """
    from gpt2_triton.data.tokenizer import get_tokenizer

    try:
        return get_tokenizer(tokenizer).name
    except DataError:
        return "bytes"


def _name(data: Sequence[Path]) -> str:
    """Return a name for a directory: the first file's or folder's, without
    endings and unusual characters.
    """
    first = data[0].absolute().name.partition(".")[0]
    return re.sub(r"[^\w-]+", "-", first).strip("-") or "text"
