"""Reads the configuration file and the overrides on top of it, and reports mistakes in them.

    config = load_config("configs/gpt2_124m.yaml", {"optim.lr": "3e-4"})
Mistakes become one ConfigError with one line each: the place (file and line, or option), the value given, the value
expected, the fix.
"""

import difflib
import os
import reprlib
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from gpt2_triton.config import recipes
from gpt2_triton.config.config import Config, options
from gpt2_triton.config.other_projects import counterpart
from gpt2_triton.config.removed import REMOVED
from gpt2_triton.config.schema import ConflictError
from gpt2_triton.config.values import SIZE_KEYS
from gpt2_triton.errors import ConfigError


class _Repr(reprlib.Repr):
    """Shortens values, and writes null, true and false as YAML does."""

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"

    def repr_bool(self, value: bool, level: int) -> str:
        return str(value).lower()


_short = _Repr()
_short.maxstring = _short.maxother = 60
_short.maxlevel = 2


def _shown(value: Any) -> str:
    """Return a value of a file or an option for a message, shortened if it is long."""
    large = isinstance(value, int) and value.bit_length() > 200  # Python refuses to print more than 4300 digits
    return "a number of more than 60 digits" if large else _short.repr(value)


def load_config(
    path: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None, gpus: int = 1
) -> Config:
    """Return the configuration in a YAML file, or a dictionary like its content, with `overrides` (dotted key -> value,
    usually a string) on top.

    `path` may be the name of a recipe, such as "gpt2_124m".  The step must divide among parallel.gpus GPUs, or among
    `gpus` where that is null.
    """
    if isinstance(path, Mapping):
        tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in path.items()}
        lines, path = dict[str, int](), "config"
    else:
        path = recipes.find(path)
        tree, lines = read_yaml(path)
    given = dict(overrides or {})
    for key, value in given.items():
        if "." not in key and isinstance(value, Mapping):  # it would replace the section
            dotted = f"{key}.{next(iter(value), 'key')}"
            raise ConfigError(f"{key}: expected one value for each dotted key, such as {dotted}, got a dictionary")
    if "model.size" in given and isinstance(tree.get("model"), dict):
        tree["model"] = {key: value for key, value in tree["model"].items() if key not in (*SIZE_KEYS, "size")}
    for key, value in given.items():
        section, dot, name = key.partition(".")
        if not dot:
            tree[key] = value
        elif isinstance(tree.setdefault(section, {}), dict):  # otherwise the mistake in the file is reported below
            tree[section][name] = value
    try:
        return Config.model_validate(tree, context=dict(gpus=gpus))
    except ValidationError as error:
        places = {key: f"{path}:{line}" for key, line in lines.items()} | {key: f"--{key}" for key in given}
        raise ConfigError("\n".join(_describe(error, places, str(path)))) from None


def _describe(error: ValidationError, places: Mapping[str, str], path: str) -> Iterator[str]:
    fields = dict(options())
    for entry in error.errors():
        key = ".".join(str(part) for part in entry["loc"])
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, ConflictError):
            yield from (_at(places, path, name, message) for name, message in cause.problems)
        elif entry["type"] == "extra_forbidden":
            sections = [] if "." in key else [name.partition(".")[0] for name in fields]
            near = suggestion(key, [*sections, *fields]) or "; train --help lists them"
            yield _at(places, path, key, f"unknown key{near}")
        elif entry["type"] in ("model_type", "model_attributes_type"):
            yield _at(places, path, key, f"must be a section of keys, got {_shown(entry['input'])}")
        else:
            message = entry["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
            message = message.partition(", unable to parse")[0]
            message += f", got {_shown(entry['input'])}"
            if key in fields:
                unset = f"; leave the key out for {_shown(fields[key].default)}" if entry["input"] is None else ""
                message += f"{unset} ({fields[key].description})"
            yield _at(places, path, key, message)


def _at(places: Mapping[str, str], path: str, key: str, message: str) -> str:
    place = places.get(key, path)
    return f"{place}: {message}" if place == f"--{key}" else f"{place}: {key}: {message}"


def suggestion(key: str, known: Iterable[str], prefix: str = "") -> str:
    """Return the end of an error about an unknown key: the known keys it may stand for, or nothing.

    They are, in this order: the same key, to be written below its section; the counterpart of another project's option;
    keys of the same name in other sections; similar names; the keys of the section.
    """
    if key in REMOVED:
        return f"; it was removed: {REMOVED[key].instead}"
    known = list(dict.fromkeys(known))
    if key in known:  # `optim.lr: 1` in YAML
        section, _, name = key.partition(".")
        return f"; keys are nested: write {name} under {section}"
    section, _, name = key.rpartition(".")
    same, told = [near for near in known if near.rpartition(".")[2] == name], counterpart(name)
    if told and not any(told.startswith(f"; for nanoGPT's {name} use {near}") for near in same):
        return told
    if best := same or _similar(key, section, name, known):
        return f"; did you mean {' or '.join(prefix + near for near in best)}?"
    inside = ", ".join(near.rpartition(".")[2] for near in known if section and near.startswith(f"{section}."))
    return f"; {section} has {inside}" if inside else ""


def _similar(key: str, section: str, name: str, known: list[str]) -> list[str]:
    """Return the known keys that differ by a slip of the hand, or of which the name is a longer form."""
    if "." in key:
        own = {near.rpartition(".")[2]: near for near in known if near.startswith(f"{section}.")}
        if best := difflib.get_close_matches(name, own, n=1, cutoff=0.7):
            return [own[best[0]]]
    elif best := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
        return best
    words = [word for word in (name.partition("_")[0], name.rpartition("_")[2]) if len(word) > 4]
    if longer := [near for near in known if near.rpartition(".")[2] in words]:
        return longer
    if best := difflib.get_close_matches(name, [near.rpartition(".")[2] for near in known], n=1, cutoff=0.75):
        return [next(near for near in known if near.rpartition(".")[2] == best[0])]
    return [near for near in known if "." not in key + near and len(near) > 2 and key.startswith(near)]


def read_yaml(
    path: Path, expected: str = "sections such as `model:` and `train:`"
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the tree in a YAML file, and the line of each dotted key of its first two levels; ConfigError if it is no
    configuration.  `expected` names what the file should have.
    """
    try:
        with open(path, "rb") as file:
            text = file.read().decode("utf-8")
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        lines = _key_lines(path, root)
        tree = {} if root is None else loader.construct_document(root)
    except OSError as error:
        hint = ""
        if isinstance(error, IsADirectoryError) and os.path.isfile(path / "config.yaml"):
            config, run_dir = (shlex.quote(str(p)) for p in (path / "config.yaml", path))
            hint = f"; it is a run: continue it with {config} --run_dir {run_dir} --resume"
        raise ConfigError(f"{path}: cannot read the configuration: {error.strerror}{hint}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file: byte {error.start} is not UTF-8; expected YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        # of a number, a date or a tag
        raise ConfigError(f"{path}: not valid YAML: {str(error).partition(';')[0]}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected {expected}, got {'null' if tree is None else type(tree).__name__}")
    fields = dict(options())
    empty = [key for key, value in tree.items() if value is None and key not in fields]  # `optim:` with nothing below
    return tree | {key: {} for key in empty}, lines


def _key_lines(path: Path, root: yaml.Node | None) -> dict[str, int]:
    """Return the line of each key of both levels.

    ConfigError if a key is given twice, for which PyYAML would silently take the last value.
    """
    lines: dict[str, int] = {}

    def collect(node: yaml.Node | None, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name, line = f"{prefix}{key.value}", key.start_mark.line + 1
            if name in lines:
                raise ConfigError(f"{path}:{line}: {name}: given twice, first in line {lines[name]}; remove one")
            lines[name] = line
            if not prefix:
                collect(value, f"{name}.")

    collect(root, "")
    return lines
