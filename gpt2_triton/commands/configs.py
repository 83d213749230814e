"""`configs`: the recipes with their sizes and times, or one of them to save and edit."""

import re

from gpt2_triton.config import recipes
from gpt2_triton.config.load import load_config
from gpt2_triton.console import command_line
from gpt2_triton.errors import ConfigError

JOB = "train.sbatch"  # beside the recipes: a SLURM job that trains one of them on several nodes


def configs(name: str | None = None, /) -> None:
    """List the recipes with parameters, tokens and time on one H200, or print one.

    Parameters
    ----------
    name: str
        A recipe to print as YAML, or train.sbatch, a SLURM job for several nodes.
    """
    if name is None:
        print(table())
    elif name in (*recipes.names(), JOB):
        file = recipes.directory() / (name if name == JOB else f"{name}.yaml")
        print(file.read_text(encoding="utf-8"), end="")
    else:
        raise ConfigError(f"{name}: no such recipe; {recipes.known_recipes(name)}")


def table() -> str:
    """Return a line for each recipe: parameters and tokens from its keys, time and title from its first line."""
    rows = [("recipe", "parameters", "tokens", "one H200", "")]
    configs = {name: load_config(name) for name in recipes.names()}
    for name in sorted(configs, key=lambda name: (name != recipes.OWN, configs[name].n_params)):
        config = configs[name]
        title, time = describe(recipes.find(name).read_text(encoding="utf-8").partition("\n")[0])
        tokens = config.train.steps * config.total_batch_tokens
        sizes = ("by text", "by text") if name == recipes.OWN else (_short(config.n_params), _short(tokens))
        rows.append((name, *sizes, time, title))
    widths = [max(map(len, column)) for column in list(zip(*rows))[:-1]]
    lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
    note = f"Times are those of the recipes' first lines.  `{command_line('configs')} NAME` prints a recipe."
    return "\n".join([*lines, "", note])


def describe(line: str) -> tuple[str, str]:
    """Return title and time on one H200 from a recipe's first line, `# TITLE (...): ..., TIME on one ...`; an empty
    time if the line has none.
    """
    time = re.search(r"[,;] ([^,;]+) on one (?!CPU)", line)
    return re.split(r" \(|[:;,] |\.$", line.removeprefix("# "))[0], time[1] if time else ""


def _short(count: float) -> str:
    """Return a count with three digits and a unit: 124M, 33.6B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
