"""Reads a configuration from YAML and the command line.

Mistakes become one ConfigError with a line each: the place (file and line, and
key), what is wrong, the fix.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from gpt2_triton.config import recipes
from gpt2_triton.config.other_projects import counterpart
from gpt2_triton.config.schema import ConflictError, Sections, options
from gpt2_triton.config.values import OF_A_SIZE, SIZES, closest, keys_of_size
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import expand

Kind = TypeVar("Kind", bound=Sections)
Source = str | Path | Mapping[str, Any] | Sections  # a recipe or a file, a tree, a configuration


def load(kind: type[Kind], source: Source, overrides: Mapping[str, Any], gpus: int | None) -> Kind:
    """Return the configuration in a source, with `overrides` (dotted key -> value) on top."""
    tree, lines, place = _tree(source)
    if isinstance(tree.get("model"), dict):
        tree["model"] = _without_size(tree["model"], overrides)
    for key, value in overrides.items():
        _put(tree, key, value)
    _take_tokenizer(tree)
    try:
        return kind.model_validate(tree, context=dict(gpus=gpus) if gpus else None)
    except ValidationError as error:
        places = {key: f"{place}:{line}: {key}" for key, line in lines.items()}
        places |= {key: key for key in overrides}
        problems = [
            f"{places.get(key, f'{place}: {key}')}: {message}" for key, message in _problems(error)
        ]
        raise ConfigError("\n".join(problems)) from None


def _tree(source: Source) -> tuple[dict[str, Any], dict[str, int], str]:
    """Return a copy of a source's sections, the lines of its keys, and what an error calls it."""
    if isinstance(source, Sections):
        source = source.model_dump()
    if isinstance(source, Mapping):
        sections = source.items()
        copy = {k: dict(v) if isinstance(v, Mapping) else v for k, v in sections}
        return copy, {}, "config"
    path = recipes.find(source)
    tree, lines = read_yaml(path)
    if path != Path(source):  # a recipe, so the mistake is in an override or the number of GPUs
        return tree, {}, str(source)
    return tree, lines, str(path)


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Put the value of a dotted key in its place."""
    if isinstance(value, Mapping):  # a dictionary would replace the section
        raise ConfigError(
            f"{key}: got a dictionary, expected a value for each dotted key, such as optim.lr"
        )
    section, dot, name = key.partition(".")
    if not dot:
        tree[key] = value
        return
    keys = tree.setdefault(section, {})
    if isinstance(keys, dict):  # otherwise the mistake in the file is reported later
        keys[name] = value


def _without_size(model: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `model` of a source, ready for overrides of its size or of the keys that
    its size stands for.
    """
    if "model.size" in overrides:
        return {key: value for key, value in model.items() if key not in OF_A_SIZE}
    size = str(model.get("size"))
    known = keys_of_size(size) if size in SIZES else {}
    if not any(f"model.{key}" in overrides for key in known):
        return model
    return known | {key: value for key, value in model.items() if key != "size"}


def _take_tokenizer(tree: dict[str, Any]) -> None:
    """Let init_from hf:DIR bring the tokenizer.json in DIR, unless data.tokenizer is given."""
    kind, _, directory = str(tree.get("init_from")).partition(":")
    data = tree.setdefault("data", {})
    file = os.path.join(expand(directory), "tokenizer.json")
    if kind == "hf" and isinstance(data, dict) and os.path.isfile(file):
        data.setdefault("tokenizer", directory)


def _problems(error: ValidationError) -> Iterator[tuple[str, str]]:
    """Yield each key with what is wrong with it."""
    fields = dict(options())
    for entry in error.errors():
        key = ".".join(str(part) for part in entry["loc"])
        cause = entry.get("ctx", {}).get("error")
        if isinstance(cause, ConflictError):
            yield from cause.problems
        elif entry["type"] == "extra_forbidden":
            yield key, f"unknown key{suggestion(key)}"
        elif entry["type"] in ("model_type", "model_attributes_type"):
            yield key, f"must be a section of keys, got {_shown(entry['input'])}"
        else:
            message = entry["msg"].removeprefix("Value error, ")
            message = message.replace("Input should be", "must be", 1)
            wrong = message.partition(", unable to parse")[0]
            meaning = f" ({fields[key].description})" if key in fields else ""
            yield key, f"{wrong}, got {_shown(entry['input'])}{meaning}"


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)[:80]


def suggestion(key: str, flags: Sequence[str] = (), prefix: str = "") -> str:
    """Return what to write for an unknown key, as the end of a message; `flags` are
    known too, with `prefix`.
    """
    keys = [key for key, _ in options()]
    section, _, name = key.rpartition(".")
    if key in keys:  # `optim.lr: 1` in YAML
        return f"; keys are nested: write {name} under {section}"
    found = counterpart(name) or closest(key, [*flags, *keys, *Sections.model_fields], prefix)
    if found:
        return found
    inside = [
        known.removeprefix(f"{section}.") for known in keys if known.startswith(f"{section}.")
    ]
    return f"; {section} has {', '.join(inside)}" if inside else "; train --help lists them"


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the tree in a YAML file, and the line of each dotted key of its first two levels."""
    if path.suffix == ".py":
        raise ConfigError(
            f"{path}: expected YAML; docs/guide/interop.md has the keys for nanoGPT's options"
        )
    try:
        loader = yaml.SafeLoader(path.read_bytes().decode("utf-8"))
        root = loader.get_single_node()
        lines = _key_lines(path, root)
        tree = None if root is None else loader.construct_document(root)
    except OSError as error:
        hint = ""
        if os.path.isfile(path / "config.yaml"):
            config = shlex.quote(str(path / "config.yaml"))
            run_dir = shlex.quote(str(path))
            hint = f"; it is a run: continue it with {config} --run_dir {run_dir} --resume"
        raise ConfigError(
            f"{path}: cannot read the configuration: {error.strerror}{hint}"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem}") from None
    except ConfigError:
        raise
    except Exception as error:  # PyYAML's constructors of numbers, dates and tags raise many kinds
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(tree, dict):
        got = "nothing" if tree is None else type(tree).__name__
        raise ConfigError(f"{path}: expected sections such as `model:` and `train:`, got {got}")
    alone = [key for key, value in tree.items() if value is None and key != "init_from"]  # `optim:`
    return tree | {key: {} for key in alone}, lines


def _key_lines(path: Path, root: yaml.Node | None) -> dict[str, int]:
    """Return the line of each key; ConfigError for a key given twice."""
    lines: dict[str, int] = {}

    def collect(node: yaml.Node | None, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{prefix}{key.value}"
            line = key.start_mark.line + 1
            if name in lines:
                raise ConfigError(
                    f"{path}:{line}: {name}: given twice, first in line {lines[name]}; remove one"
                )
            lines[name] = line
            if not prefix:
                collect(value, f"{name}.")

    collect(root, "")
    return lines
