"""The files beside a model's weights in Hugging Face's format: tokenizer, chat
template, tokens that end a text.

A run that starts from such a model keeps them in RUN/source, and every export has them again.
"""

import shutil
from pathlib import Path
from typing import Any

from gpt2_triton.data import tokenizer
from gpt2_triton.files import new_directory, object_in, remove

DIRECTORY = "source"  # in a run's directory
CONFIG = "config.json"
GENERATION = "generation_config.json"
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")
OF_VOCABULARY = (
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
OF_TEXT = (GENERATION, "chat_template.jinja")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # keys of config.json


def of_step(step_dir: Path) -> Path | None:
    """Return the files that the run of a step has from its source, None if it has none."""
    directory = step_dir.resolve().parent.parent / DIRECTORY
    return directory if directory.is_dir() else None


def has_tokenizer(directory: Path | None) -> bool:
    """Return whether a model's directory has files of a tokenizer."""
    return directory is not None and any((directory / name).is_file() for name in VOCABULARIES)


def ids(directory: Path | None) -> dict[str, Any]:
    """Return the ids of special tokens in a model's config.json."""
    config = object_in(directory / CONFIG) if directory else {}
    return {key: config[key] for key in IDS if config.get(key) is not None}


def ends(directory: Path | None) -> set[int]:
    """Return the tokens that end a text, by generation_config.json, else by config.json."""
    if directory is None:
        return set()
    for name in (GENERATION, CONFIG):
        found = object_in(directory / name).get("eos_token_id")
        if found is not None:
            return {*found} if isinstance(found, list) else {found}
    return set()


def copy(source: Path, directory: Path) -> None:
    """Copy the files but config.json, which an export writes itself; those of a tokenizer only
    with its vocabulary.
    """
    names: tuple[str, ...] = OF_TEXT
    if has_tokenizer(source):
        names = (*VOCABULARIES, *OF_VOCABULARY, *OF_TEXT)
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def keep(source: Path | None, run_dir: Path, name: str) -> None:
    """Copy the files of a new run's source, and the tokenizer of this name if it is a file, into
    the run, in the place of an earlier start's.
    """
    kept = run_dir / DIRECTORY
    is_file = name not in tokenizer.NAMES and Path(name) != kept
    if source is None and Path(name) == kept:
        return
    remove(kept)
    if source or is_file:
        with new_directory(kept) as directory:
            if source:
                copy(source, directory)
                if (source / CONFIG).is_file():  # a run from scratch has a tokenizer alone
                    shutil.copyfile(source / CONFIG, directory / CONFIG)
            if is_file:
                tokenizer.keep(name, directory)
