"""Fills figures of the record into pages and recipes, between markers.

    <!-- r: h100.steps.d12.torch.ms / h100.steps.d12.fp8.ms | x -->1.52x<!-- /r -->    arithmetic on keys, a format
    <!-- r: losses.pairs.fp8_d12.muon_fp8.val | pm -->+0.003 ± 0.004<!-- /r -->        a mean and its half width
    <!-- r: table steps --> ... <!-- /r -->                                            a function in TABLES
    # hours: 4.5  # r: recipe.gpt2_124m.hours                                          in YAML: the word before

A key is SECTION.FIGURE.  recipe.NAME.tokens and recipe.NAME.hours are computed, for one GPU of pictures.MACHINE.
"""

import difflib
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.pictures import MACHINE, NAMES
from benchmarks.speed.sizes import T
from gpt2_triton.config.config import Config
from gpt2_triton.errors import DataError

ROOT = Path(__file__).parents[1]
INLINE = re.compile(r"(<!-- r: (.*?) -->)(.*?)(<!-- /r -->)", re.DOTALL)
YAML = re.compile(r"(\S+)( +# r: (.*))$", re.MULTILINE)
KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")
UNITS = {  # factor, format unless a digit gives the decimals, as in 3x, and what follows the number
    "k": (1e-3, ".3g", "k"), "M": (1e-6, ".3g", "M"), "B": (1e-9, ".3g", "B"), "%": (100, ".0f", "%"),
    "x": (1, ".2f", "x"), "W": (1, ".0f", " W"), **{unit: (1, ".1f", f" {unit}") for unit in "ms s h J GiB".split()},
}  # fmt: skip

Record = dict[str, dict[str, Any]]
Group = dict[tuple[str, str], dict[str, Any]]  # by size and arm, the figures by name


def files() -> list[Path]:
    """Return the pages and recipes that may have markers."""
    documents = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "LOG.md"]
    return [ROOT / "README.md", *documents, *sorted((ROOT / "configs").glob("*.yaml"))]


@functools.cache
def recipes() -> dict[str, Config]:
    return {path.stem: Config.load(str(path)) for path in (ROOT / "configs").glob("*.yaml")}


def flat(record: Record) -> dict[str, Any]:
    """Return all figures by SECTION.KEY, their meta, and the recipes' tokens and hours."""
    found = dict[str, Any]()
    for name, section in record.items():
        found |= {f"{name}.meta.{key}": value for key, value in section["meta"].items()}
        found |= {f"{name}.{key}": value for key, value in section.items()}
    for name, config in recipes().items():
        tokens = found[f"recipe.{name}.tokens"] = config.train.steps * config.total_batch_tokens
        arm = {"bf16": "bf16", "fp8": "fp8_head"}[config.train.precision]
        rate = found.get(f"{MACHINE}.steps.d{config.model.n_layer}.{arm}.tok_s")
        if rate and config.train.seq_len == T and config.model.vocab_size > 50_000:
            found[f"recipe.{name}.hours"] = tokens / rate / 3600
    return found


def value_of(expression: str, figures: dict[str, Any]) -> Any:
    """Return the value of a key, or of arithmetic on keys; KeyError for an unknown one."""
    if expression in figures:
        return figures[expression]
    numbers = KEY.sub(lambda key: repr(figures[key[0]]), expression)
    if not re.fullmatch(r"[\de.+\-*/() ]+", numbers):
        raise KeyError(expression)
    return eval(numbers, {"__builtins__": {}})


def text_of(marker: str, figures: dict[str, Any]) -> str:
    """Return the text of a figure: its expression and format, as in `a.b / c.d | x`."""
    expression, _, form = (part.strip() for part in marker.partition("|"))
    if form == "pm":
        mean, half = (figures[f"{expression}.{part}"] for part in ("mean", "half_width"))
        return f"{mean:+.3f} ± {half:.3f}"
    value, unit = value_of(expression, figures), form.lstrip("0123456789")
    digit = form.removesuffix(unit)
    if unit in UNITS:
        factor, usual, after = UNITS[unit]
        return f"{factor * value:{f'.{digit}f' if digit else usual}}{after}"
    if form and not re.fullmatch(r"\+?,?\.\df", form):
        raise KeyError(f"format {form}")
    return f"{value:{form}}"


def render(text: str, record: Record, page: Path) -> str:
    """Return the text of a page or a recipe with the record's figures; DataError names an unknown key."""
    figures = flat(record)

    def filled(match: re.Match[str]) -> str:
        begin, marker, _, end = match.groups()
        kind, *words = marker.split()
        if kind == "table":
            return f"{begin}\n{TABLES[words[0]](record, *words[1:])}\n{end}"
        return begin + text_of(marker, figures) + end

    def word(match: re.Match[str]) -> str:
        form = " | h" if match[3].endswith(".hours") else ""
        return text_of(match[3] + form, figures).partition(" ")[0] + match[2]

    try:
        return YAML.sub(word, text) if page.suffix == ".yaml" else INLINE.sub(filled, text)
    except (KeyError, SyntaxError) as error:
        raise DataError(
            f"{page}: {error.args[0]}: no such figure, format or table in docs/results/current.json"
        ) from None


def differences(old: str, new: str) -> list[str]:
    """Return the lines that differ, - or + before each."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm="")
    return [line for line in lines if line[0] in "+-" and not line.startswith(("+++", "---"))]


# ---- tables ----

COLUMNS = {  # a figure's name: the head of its column, and its format
    "recompute": ("recompute", ""), "batch": ("B", ""), "ms": ("ms", ".1f"), "tok_s": ("tokens/s", ",.0f"),
    "joules": ("J", ".1f"), "gib": ("GiB", ".1f"), "speed": ("speed", ".2f"),
    "cold_s": ("s, empty cache", ".1f"), "warm_s": ("s, filled cache", ".1f"),
    "alone_ms": ("ms alone", ".1f"), "in_step_ms": ("ms in step", ".1f"), "together_ms": ("ms together", ".1f"),
    "of_alone": ("of alone", ".0%"),
}  # fmt: skip


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def caption(meta: dict[str, Any]) -> str:
    gpus = "" if meta["gpus"] == 1 else f"{meta['gpus']} x "
    watts = f" at {meta['power_limit_w']:.0f} W" if meta["power_limit_w"] else ""
    return f"{gpus}{meta['gpu']}{watts}, torch {meta['torch']}, triton {meta['triton']}, commit {meta['commit']}."


def group(section: dict[str, Any], kind: str) -> Group:
    """Return the figures of a kind: steps.d12.fp8.ms is "ms" of (d12, fp8); first_step.d12.cold_s, of (d12, "")."""
    found: Group = {}
    for key, value in section.items():
        if key.startswith(f"{kind}."):
            _, size, *rest = key.split(".", 3)
            arm, name = rest if len(rest) == 2 else ("", rest[0])
            found.setdefault((size, arm), {})[name] = value
    return found


def by_machine(kind: str, table: Callable[[dict[str, Any]], str]) -> Callable[[Record], str]:
    """Return a function of the record: a table of each machine that has figures of a kind."""

    def tables(record: Record) -> str:
        found = [section for section in record.values() if group(section, kind)]
        return "\n\n".join(f"{caption(section['meta'])}\n\n{table(section)}" for section in found)

    return tables


def programs(*kinds: str, columns: str) -> Callable[[Record], str]:
    """Return a table with a row for each size and program.  `speed` is relative to PyTorch in bf16."""

    def table(section: dict[str, Any]) -> str:
        rows = []
        for kind in kinds:
            for (size, arm), figures in group(section, kind).items():
                torch, f = section.get(f"steps.{size}.torch.ms"), dict(figures)
                if torch and "ms" in f:
                    f["speed"] = torch / f["ms"]
                if "alone_ms" in f:
                    f["of_alone"] = f["alone_ms"] / f["together_ms"]
                values = [f"{f[name]:{COLUMNS[name][1]}}" if name in f else "" for name in columns.split()]
                rows.append([NAMES[size], NAMES[arm or kind], *values])
        return markdown(["model", "program", *(COLUMNS[name][0] for name in columns.split())], rows)

    return by_machine(kinds[0], table)


def operations(section: dict[str, Any]) -> str:
    """Return milliseconds of a step's operations, with their floors in brackets; the step last."""
    found = group(section, "ops")
    longest = {name: max(f.get(name, 0.0) for f in found.values()) for f in found.values() for name in f}
    names = sorted((name for name in longest if name.endswith(".ms")), key=longest.__getitem__, reverse=True)
    rows = []
    for name in [*names, "ms"]:
        both = [(f.get(name), f.get(name.removesuffix("ms") + "floor_ms")) for f in found.values()]
        rows.append(
            [name.removesuffix(".ms"), *("" if ms is None else f"{ms:.1f} ({least:.1f})" for ms, least in both)]
        )
    rows[-1][0] = "step"
    return markdown(["ms (floor)", *(f"{NAMES[size]}, {NAMES[arm]}" for size, arm in found)], rows)


def series(record: Record, name: str) -> str:
    """Return the arms of a series, with differences from the arm of their pairs."""
    figures = record["losses"]
    arms = {arm: runs for (of, arm), runs in group(figures, "arms").items() if of == name}
    if not arms:
        raise KeyError(f"series {name}")
    rows = []
    for arm, runs in arms.items():
        row = [arm.replace("_", " "), str(runs["runs"])]
        for loss in ("train", "val"):
            pair = f"pairs.{name}.{arm}.{loss}"
            row += [f"{runs[loss]:.3f}", text_of(f"{pair} | pm", figures) if f"{pair}.mean" in figures else ""]
        rows.append(row)
    return markdown(["arm", "runs", "training loss", "difference", "validation loss", "difference"], rows)


TABLES: dict[str, Callable[..., str]] = {
    "steps": programs("steps", columns="recompute ms tok_s joules gib speed"),
    "peers": programs("peer", columns="recompute ms tok_s joules gib speed"),
    "first_step": programs("first_step", "first_step_torch", columns="cold_s warm_s"),
    "multi": programs("multi", columns="batch alone_ms in_step_ms together_ms tok_s of_alone"),
    "ops": by_machine("ops", operations),
    "series": series,
}
