"""The recipes: the files of configs/, in a checkout beside the package, in an
installed package inside it.

A recipe's name stands for its file wherever a configuration file is expected.
"""

import os
from pathlib import Path

from gpt2_triton.config.values import closest
from gpt2_triton.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
OWN = "own"  # names the recipes for a user's own text, of which own_text.py picks one


def directory() -> Path:
    """Return the directory of the recipes; a wheel has them as gpt2_triton/configs."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def names() -> list[str]:
    """Return the names of the recipes, sorted."""
    return sorted(path.stem for path in directory().glob("*.yaml"))


def find(given: str | Path) -> Path:
    """Return the file of the recipe that `given` names, or a path itself; ConfigError
    for a name that is neither.
    """
    path = Path(given)
    known = names()
    if os.path.isfile(path):  # not Path.is_file, which raises for a name that is too long
        return path
    if path.name == str(path) and path.suffix not in (".yaml", ".yml"):
        if path.name in known:
            return directory() / f"{path}.yaml"
        if os.path.isfile(path / "config.yaml"):
            return path  # read_yaml says how to continue a run
        if path.is_dir():
            todo = f"; give a folder of text to own, as --data {path}"
        else:
            todo = known_recipes(path.name)
        raise ConfigError(f"{path}: neither a file nor a recipe{todo}")
    if path.stem in known and not os.path.exists(path):
        raise ConfigError(
            f"{path}: no such file; the recipe is called {path.stem}, without directory and ending"
        )
    return path


def known_recipes(name: str) -> str:
    """Return the end of an error about an unknown name: a similar name, else the list."""
    return closest(name, names()) or f"; recipes: {', '.join(names())}"
