"""The recipes: the files of configs/, in a checkout beside the package, in an installed package inside it.

`find("gpt2_124m")` is a recipe's file; wherever a configuration file is named, a recipe's name will do.
"""

import difflib
import os
from pathlib import Path

from gpt2_triton.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
OWN = "own"  # of a user's own text: own_text.py picks its sizes


def directory() -> Path:
    """Return the directory of the recipes; a wheel has them as gpt2_triton/configs."""
    inside = PACKAGE / "configs"
    return inside if inside.is_dir() else PACKAGE.parent / "configs"


def names() -> list[str]:
    return sorted(path.stem for path in directory().glob("*.yaml"))


def find(given: str | Path) -> Path:
    """Return the file of the recipe that `given` names, or `given` itself if it is a path.

    A word without a directory and without .yaml is a name, unless there is a file of that name.  ConfigError for an
    unknown name, and for a missing file that is called like a recipe.
    """
    path, known = Path(given), names()
    if os.path.isfile(path):  # not Path.is_file, which raises for a name that is too long
        return path
    if path.name == str(path) and path.suffix not in (".yaml", ".yml"):
        if path.name in known:
            return directory() / f"{path}.yaml"
        if os.path.isfile(path / "config.yaml"):
            return path  # its reader says how to continue a run
        raise ConfigError(f"{path}: neither a file nor a recipe; {known_recipes(path.name)}")
    if path.stem in known and not os.path.exists(path):
        raise ConfigError(f"{path}: no such file; the recipe is called {path.stem}, without directory and ending")
    return path


def known_recipes(name: str) -> str:
    """Return the end of an error about an unknown name: the recipe that it is near to, if there is one, and the list.

    Near means that one recipe's name contains `name`, has its letters, or differs from it in a letter or two.  If
    variants of a recipe, whose names begin with its name, contain `name` too, the recipe itself is near.
    """
    name, known = name.lower().replace("-", "_"), names()
    alike = [one for one in known if name in one or sorted(name) == sorted(one)]
    near = [one for one in alike if not any(one.startswith(f"{other}_") for other in alike)]
    near = near or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    suggestion = f"did you mean {near[0]}? " if len(near) == 1 else ""
    return f"{suggestion}recipes: {', '.join(known)}"
