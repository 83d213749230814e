"""The help of `train`: each key with its value in the recipe on the command line, as in `train gpt2_124m_fast --help`;
`train own --help` lists only the keys that own sets.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from gpt2_triton.config import own_text
from gpt2_triton.config.config import options
from gpt2_triton.config.load import load_config, read_yaml
from gpt2_triton.config.recipes import OWN, find
from gpt2_triton.errors import ConfigError

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

PICKED = "by the text"
OWN_KEYS = "Keys that own sets, `by the text` and the machine; others: train --help"


class KeysFormatter:
    """Prints the panel of the keys with a recipe's values as defaults."""

    recipe: Path | None = None

    def __call__(self, console: "Console", options: "ConsoleOptions", panel: "HelpPanel") -> None:
        from cyclopts.help.formatters import DefaultFormatter

        is_own = self.recipe is not None and self.recipe.stem == OWN
        values = own_defaults() if is_own else recipe_defaults(self.recipe)
        entries = [entry for entry in panel.entries if not is_own or entry.names[0] in values]
        entries = [entry.copy(default=values.get(entry.names[0], entry.default)) for entry in entries]
        entries = [_with_its_words(entry) if entry.type is bool else entry for entry in entries]
        title = OWN_KEYS if is_own else panel.title
        DefaultFormatter()(console, options, panel.copy(entries=entries, title=title))


def _with_its_words(entry: "HelpEntry") -> "HelpEntry":
    """Return the entry of a boolean key with the values it takes: cyclopts would show it as a flag without a value."""
    return entry.copy(choices=("true", "false"), default=entry.default and entry.default.lower())


KEYS = KeysFormatter()


class TrainApp(App):
    """An app that tells KEYS the recipe on the command line before it prints its help."""

    def help_print(self, tokens: Any = None, *, console: Any = None) -> None:
        words = [word for word in tokens or () if not word.startswith("-")]
        KEYS.recipe = Path(words[0]) if words else None
        if tokens and not tokens[0].startswith("-"):
            find(tokens[0])  # ConfigError for a recipe that does not exist
        super().help_print(tokens, console=console)


def own_defaults() -> dict[str, str]:
    """Return the default of each option that `train own` sets."""
    picked = ["data.train", "data.val", *own_text.choose(1_000_000, None, "bytes", {})]
    tree, _ = read_yaml(find(OWN))
    fixed = {f"--{section}.{key}": str(value) for section, keys in tree.items() for key, value in keys.items()}
    return {f"--{key}": PICKED for key in picked} | fixed


def recipe_defaults(recipe: Path | None) -> dict[str, str]:
    """Return the value of each option in a recipe or a YAML file; nothing if it cannot be read."""
    try:
        tree = load_config(recipe).to_dict() if recipe else {}
    except ConfigError:
        return {}
    values = {key: tree.get(section) if not name else tree.get(section, {}).get(name) for key, section, name in _keys()}
    return {f"--{key}": str(value) for key, value in values.items() if value is not None}


def _keys() -> list[tuple[str, str, str]]:
    return [(key, *key.partition(".")[::2]) for key, _ in options()]
