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
COUNTS = {"k": 1e3, "M": 1e6, "B": 1e9}  # with three digits
UNITS = {"ms": " ms", "s": " s", "h": " h", "J": " J", "GiB": " GiB", "W": " W", "x": "x", "%": "%"}
DECIMALS = {"x": 2, "%": 0, "W": 0}  # else 1; a digit before the unit replaces it: 3x, 1%

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
        rate = found.get(f"{MACHINE}.steps.d{config.model.n_layer}.{config.train.precision}.tok_s")
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
    value, split = value_of(expression, figures), re.fullmatch(r"(\d?)([a-zA-Z%]+)", form)
    if form in COUNTS:
        return f"{value / COUNTS[form]:.3g}{form}"
    if split and split[2] in UNITS:
        digits, unit = split.groups()
        decimals = int(digits or (0 if unit == "h" and value >= 10 else DECIMALS.get(unit, 1)))
        return f"{100 * value if unit == '%' else value:.{decimals}f}{UNITS[unit]}"
    if form and not re.fullmatch(r"\+?,?\.\df", form):
        raise KeyError(f"format {form}")
    return f"{value:{form}}" if form else str(value)


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


def markdown(head: str, rows: list[list[str]]) -> str:
    lines = [f"| {head} |", "|---" * (head.count("|") + 1) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


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


def by_machine(kind: str, table: Callable[[dict[str, Any], Group], str]) -> Callable[[Record], str]:
    """Return a function of the record: a table with its caption for each machine that has any."""

    def tables(record: Record) -> str:
        found = [(section, group(section, kind)) for section in record.values()]
        return "\n\n".join(f"{caption(s['meta'])}\n\n{table(s, figures)}" for s, figures in found if figures)

    return tables


def cells(figures: dict[str, Any], *names: str, form: str = ".1f") -> list[str]:
    return [f"{figures[name]:{form}}" if name in figures else "" for name in names]


def speeds(section: dict[str, Any], found: Group) -> str:
    """Return a row for each program; the last column is relative to PyTorch in bf16."""
    rows = []
    for (size, arm), f in found.items():
        torch = section.get(f"steps.{size}.torch.ms")
        row = [NAMES[size], NAMES[arm], f.get("recompute", ""), *cells(f, "ms"), *cells(f, "tok_s", form=",.0f")]
        rows.append([*row, *cells(f, "joules", "gib"), f"{torch / f['ms']:.2f}x" if torch else ""])
    return markdown("model | program | recompute | ms | tokens/s | J | GiB | speed", rows)


def operations(section: dict[str, Any], found: Group) -> str:
    """Return milliseconds of a step's operations in each arm, with their floors in brackets; the step last."""
    names = sorted({name.rpartition(".")[0] for f in found.values() for name in f if "." in name})
    names.sort(key=lambda name: -max(f.get(f"{name}.ms", 0.0) for f in found.values()))
    rows = []
    for name in names:
        cell = [
            f"{f[f'{name}.ms']:.1f} ({f[f'{name}.floor_ms']:.1f})" if f"{name}.ms" in f else "" for f in found.values()
        ]
        rows.append([name, *cell])
    rows.append(["step", *(f"{f['ms']:.1f} ({f['floor_ms']:.1f})" for f in found.values())])
    return markdown(" | ".join(["ms (floor)", *(f"{NAMES[size]}, {NAMES[arm]}" for size, arm in found)]), rows)


def first_steps(section: dict[str, Any], found: Group) -> str:
    programs = [(NAMES["ours"], found), (NAMES["torch"], group(section, "first_step_torch"))]
    rows = [[NAMES[size], name, *cells(f, "cold_s", "warm_s")] for name, of in programs for (size, _), f in of.items()]
    return markdown("model | program | s, empty cache | s, filled cache", rows)


def together(section: dict[str, Any], found: Group) -> str:
    rows = []
    for (size, arm), f in found.items():
        row = [NAMES[size], NAMES[arm], str(f["batch"]), *cells(f, "alone_ms", "in_step_ms", "together_ms")]
        rows.append([*row, *cells(f, "tok_s", form=",.0f"), f"{f['alone_ms'] / f['together_ms']:.0%}"])
    return markdown("model | program | B | ms alone | ms in step | ms together | tokens/s of all | of alone", rows)


def series(record: Record, name: str) -> str:
    """Return the arms of a series, with differences from the arm of their pairs."""
    figures, rows = record["losses"], []
    for (_, arm), runs in filter(lambda item: item[0][0] == name, group(figures, "arms").items()):
        row = [arm.replace("_", " "), str(runs["runs"])]
        for loss in ("train", "val"):
            pair = f"pairs.{name}.{arm}.{loss}"
            row += [f"{runs[loss]:.3f}"]
            row += [text_of(f"{pair} | pm", figures) if f"{pair}.mean" in figures else ""]
        rows.append(row)
    if not rows:
        raise KeyError(f"series {name}")
    return markdown("arm | runs | training loss | difference | validation loss | difference", rows)


TABLES: dict[str, Callable[..., str]] = {
    "steps": by_machine("steps", speeds),
    "peers": by_machine("peer", speeds),
    "ops": by_machine("ops", operations),
    "first_step": by_machine("first_step", first_steps),
    "multi": by_machine("multi", together),
    "series": series,
}
