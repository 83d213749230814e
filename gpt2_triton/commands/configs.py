"""`configs`: the recipes with their sizes, or one of them to save and edit,
less the markers of figures.
"""

from gpt2_triton.config import recipes
from gpt2_triton.config.config import Config
from gpt2_triton.console import command_line, format_count
from gpt2_triton.errors import ConfigError

# a SLURM job that trains a recipe on several nodes; it lies beside the recipes
JOB = "train.sbatch"


def configs(name: str | None = None, /) -> None:
    """List the recipes with parameters and tokens, or print one.

    Args:
        name: A recipe to print as YAML, or train.sbatch, a SLURM job for several nodes.
    """
    if name is None:
        print(table())
    elif name in (*recipes.names(), JOB):
        file = recipes.directory() / (name if name == JOB else f"{name}.yaml")
        print(
            "\n".join(
                line.partition("  # r: ")[0]
                for line in file.read_text(encoding="utf-8").splitlines()
            )
        )
    else:
        raise ConfigError(f"{name}: no such recipe{recipes.known_recipes(name)}")


def table() -> str:
    """Return a line for each recipe: name, parameters, tokens, and the first line
    of its file up to a colon.
    """
    loaded = {name: Config.load(name) for name in recipes.names()}
    rows = [f"{'recipe':22}{'parameters':>10}{'tokens':>9}"]
    for name, config in sorted(
        loaded.items(), key=lambda item: (not item[0].startswith(recipes.OWN), item[1].n_params)
    ):
        tokens = config.train.steps * config.train.step_tokens
        if name.startswith(recipes.OWN):
            sizes = ("by text", "by text")
        else:
            sizes = (format_count(config.n_params), format_count(tokens))
        about = recipes.find(name).read_text(encoding="utf-8").partition(":")[0].removeprefix("# ")
        rows.append(f"{name:22}{sizes[0]:>10}{sizes[1]:>9}  {about}")
    return "\n".join([*rows, "", f"`{command_line('configs')} NAME` prints a recipe."])
