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
from gpt2_triton.config.own_text import Machine
from gpt2_triton.config.recipes import OWN, find
from gpt2_triton.config.rules import HUB_SIZES, INIT_SOURCES
from gpt2_triton.config.values import check_tokenizer
from gpt2_triton.console import command_line, print_line
from gpt2_triton.data.text_names import is_text
from gpt2_triton.distributed.launcher_env import rank_and_size
from gpt2_triton.errors import ConfigError, DataError, same_on_all_ranks
from gpt2_triton.files import expand_glob
from gpt2_triton.training.start import Resume, require_rows

if TYPE_CHECKING:
    from gpt2_triton.checkpoint.weights import Weights
    from gpt2_triton.data.prepare.text import MeasuredText


ONE_START = {"data.allow_changed": "false"}  # what a run's configuration has for one start


class Text(NamedTuple):
    """A user's own text, and how to read it."""

    data: Sequence[Path]
    field: str
    special: bool
    strict: bool


def require_data(
    config: Path, data: Sequence[Path] | None, run_dir: Path | None, resume: Resume
) -> None:
    """Refuse the recipe own without text and without a run to resume, text in place of a
    recipe, and text for another recipe.
    """
    command = f"{command_line(f'train {OWN}')} --data"
    if is_text(config) and config.suffix != ".json":  # JSON is YAML
        raise ConfigError(
            f"{config}: text, no configuration; `{command} {shlex.quote(str(config))}` trains on it"
        )
    has_shards = data is None and resume and run_dir and (run_dir / "config.yaml").is_file()
    if str(config) == OWN and not data and not has_shards:
        raise ConfigError(
            "own: needs --data and one or more text files, folders or globs, as in --data my.txt"
        )
    if str(config) != OWN and data is not None:
        find(config)  # refuses a mistyped recipe first
        raise ConfigError(
            f"--data: goes with the recipe own, as `{command} my.txt`; "
            f"for {config} give --data.train"
        )


@same_on_all_ranks()
def without_text(run_dir: Path, given: Mapping[str, str], gpus: int) -> Config:
    """Return the configuration of a run that goes on with its shards; DataError without them."""
    from gpt2_triton.data.mixture import sources

    config = Config.load(run_dir / "config.yaml", ONE_START | dict(given), gpus)
    train = config.data.train
    if not all(expand_glob(source.pattern) for source in sources(train)):
        raise DataError(
            f"{train}: no such shards, which {run_dir} was trained on; go to the directory "
            "where it was started, or give its text again, as --data my.txt"
        )
    return config


def machine_of(gpus: int, gpu: str | None = None) -> Machine:
    """Return what a run gets on this machine, or on the GPU that a plan names."""
    from gpt2_triton import device

    has_gpus = gpu or device.present()
    return Machine(gpus, device.memory_bytes(gpu) / 2**30 if has_gpus else None)


class Chosen(NamedTuple):
    """A run on a text: its configuration, the text, and the directory of its shards."""

    config: Config
    measured: "MeasuredText"
    tokens: int
    shards: Path
    machine: Machine

    def describe(self) -> None:
        """Print the model, the steps, and without a GPU the expected time."""
        from gpt2_triton.training import cpu_time

        characters = self.measured.characters
        print_line(own_text.summary(self.config, characters, self.tokens, self.machine))
        if self.machine.gpu_gib is None:
            time = cpu_time.expected(self.config)
            print_line(f"  expected time of all steps without a GPU: {time}, on an idle machine")

    def report_left_out(self) -> None:
        """Print which special tokens the text has, and what of it was left out."""
        from gpt2_triton.data.prepare import documents

        documents.report(self.measured.notes, self.config.data.tokenizer)

    def prepare(self) -> None:
        """Make the shards, unless they exist."""
        from gpt2_triton.data.prepare import text

        tokenizer = self.config.data.tokenizer
        fraction = own_text.VAL_FRACTION
        text.prepare_text(self.measured, self.shards, tokenizer, fraction, _workers())


def settings(
    own: Text,
    given: Mapping[str, str],
    machine: Machine,
    run_dir: Path | None,
    download: bool,
) -> Chosen:
    """Return a run on the text `own`: the one to resume in run_dir, else a new one.

    download   the weights of OpenAI's names: a plan knows their sizes
    """
    from gpt2_triton.checkpoint.weights import check_sizes
    from gpt2_triton.data.tokenizer import get_tokenizer

    with same_on_all_ranks():
        measured = _measure(own)
        if run_dir and (run_dir / "config.yaml").is_file():
            return _continued(own, measured, given, machine, run_dir)
        weights = _weights(given, download)
        choice = own_text.choice_for(measured.characters, machine, given)
        tokenizer = _tokenizer(choice, given, weights)
        tokens = measured.count_tokens(tokenizer)
        vocab_size = get_tokenizer(tokenizer).vocab_size
        model = weights.model if weights else None
        picked = own_text.choose(choice, tokens, machine, tokenizer, vocab_size, given, model)
        shards = _shards(own, measured, tokenizer)
        keys = picked | _patterns(shards) | dict(given)
        config = Config.load(choice.recipe, keys, machine.gpus)
        if weights:
            check_sizes(weights, config)
        require_rows(config, tokenizer)  # before the shards are made
        return Chosen(config, measured, tokens, shards, machine)


def _continued(
    own: Text,
    measured: "MeasuredText",
    given: Mapping[str, str],
    machine: Machine,
    run_dir: Path,
) -> Chosen:
    """Return the run to resume: its configuration stands in the place of recipe and choices."""
    from gpt2_triton.data.tokenizer import located

    file = run_dir / "config.yaml"
    tokenizer = located(Config.load(file, given, machine.gpus).data.tokenizer, run_dir)
    shards = _shards(own, measured, tokenizer)
    keys = ONE_START | _patterns(shards) | dict(given)
    keys["data.tokenizer"] = tokenizer
    config = Config.load(file, keys, machine.gpus)
    return Chosen(config, measured, measured.count_tokens(tokenizer), shards, machine)


def _measure(own: Text) -> "MeasuredText":
    """Return the text, read once; DataError for what it would lose if `strict`."""
    from gpt2_triton.data.prepare import documents, text

    how = documents.Reading(own.field, own.special)
    return text.measure_text(own.data, _workers(), how, own.strict)


def _workers() -> int:
    """Return the number of processes of this rank that read a text."""
    return max(1, (os.cpu_count() or 1) // rank_and_size()[1])


def _tokenizer(choice: own_text.Choice, given: Mapping[str, str], weights: "Weights | None") -> str:
    """Return the tokenizer that is given, else of the weights, else of the recipe."""
    if "data.tokenizer" in given:
        return _checked(given["data.tokenizer"])
    if weights and weights.tokenizer:
        return weights.tokenizer
    return choice.config.data.tokenizer


def _checked(tokenizer: str) -> str:
    try:
        return check_tokenizer(tokenizer)
    except ValueError as error:
        raise ConfigError(f"data.tokenizer: {error}, got {tokenizer!r}") from None


def _shards(own: Text, measured: "MeasuredText", tokenizer: str) -> Path:
    from gpt2_triton.data.tokenizer import label

    return Path("data") / f"{_name(own.data)}_{label(tokenizer)}_{measured.digest[:8]}"


def _patterns(shards: Path) -> dict[str, str]:
    return {"data.train": f"{shards}/train_*.bin", "data.val": f"{shards}/val_*.bin"}


def _weights(given: Mapping[str, str], download: bool) -> "Weights | None":
    """Return the weights of init_from; None for scratch, or for OpenAI's without `download`."""
    from gpt2_triton.checkpoint.sources import open_weights
    from gpt2_triton.checkpoint.weights import require_runnable

    init_from = given.get("init_from", "")
    kind, _, where = init_from.partition(":")
    named = kind == "hf" and where.rpartition("/")[2] in HUB_SIZES and not Path(where).is_dir()
    if kind not in INIT_SOURCES or (named and not download):
        return None
    weights = open_weights(init_from)
    require_runnable(weights, weights.tokenizer or given.get("data.tokenizer"))
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
    out = run_dir / f"exported_{found.name}"
    if not out.exists():
        exporting.export(str(found), out, "hf", config.train.dtype)
        print_line(f"wrote {out}, for transformers")


def _name(data: Sequence[Path]) -> str:
    """Return a directory's name: the first file's or folder's, without endings and odd letters."""
    first = data[0].absolute().name.partition(".")[0]
    return re.sub(r"[^\w-]+", "-", first).strip("-") or "text"
