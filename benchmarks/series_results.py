"""The results of a series, a JSON object per run and line, and what in them differs from the series."""

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from benchmarks.series_file import PROGRAM, Run, Series, seed_options, with_trial
from gpt2_triton.console import print_line
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import open_regular

NUMBER = int | float
KEYS = {  # of a result, that the report or a later run needs
    "arm": str,
    "seed": int,
    "options": dict,
    "steps": int,
    "train_loss": NUMBER,
    "val_loss": NUMBER | None,
    "ms": NUMBER,
    "tokens": int,
    "seconds": NUMBER,
    "stride": int,
    "curve": list,
}
MOST_LINES = 5  # of results that differ from the series

Result = dict[str, Any]


def read_results(path: Path) -> list[Result]:
    """Return the results in a file, without a last line that was cut short; none if there is no file.

    ConfigError for any other line that is no result.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"--out: cannot read {path}: {error.strerror}; choose another") from None
    *lines, last = content.split(b"\n")
    rows = [] if (row := _parse(last)) is None else [row]
    found = [(number, line, _parse(line)) for number, line in enumerate(lines, start=1) if line.strip()]
    for number, line, row in found:
        if row is None:
            got = line[:40].decode(errors="replace")
            todo = "correct the line, or remove it and its run is made again"
            raise ConfigError(f"{path}:{number}: got {got!r}, expected a result, a JSON object; {todo}")
    return [row for _, _, row in found if row is not None] + rows


def _parse(line: bytes) -> Result | None:
    """Return the result in a line; None if there is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fits = isinstance(row, dict) and all(key in row and isinstance(row[key], kind) for key, kind in KEYS.items())
    return row if fits else None


def append_result(path: Path, row: Result) -> None:
    """Add a line that is on the disk when this returns; OSError if it cannot be written."""
    with open(path, "a+b", opener=open_regular) as file:
        _end_last_line(path, file)
        file.write(json.dumps(row, default=str).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def prepare(path: Path) -> None:
    """Make the file, and remove a last line that was cut short; ConfigError if it cannot be written."""
    try:
        with open(path, "a+b", opener=open_regular) as file:
            _end_last_line(path, file)
    except OSError as error:
        raise ConfigError(f"--out: cannot write {path}: {error.strerror}; choose another") from None


def _end_last_line(path: Path, file: BinaryIO) -> None:
    file.seek(0)
    content = file.read()
    end = content.rfind(b"\n") + 1
    if _parse(content[end:]):
        file.write(b"\n")
    elif content[end:]:
        file.truncate(end)
        print_line(f"warning: {path}: removed the last line, which was cut short", error=True)


@functools.cache
def data_digest(folder: Path) -> str:
    """Return 16 hexadecimal digits of a sha256 of train_*.bin and val_*.bin, their names and contents.

    ConfigError if a file cannot be read.
    """
    total = hashlib.sha256()
    for path in sorted([*folder.glob("train_*.bin"), *folder.glob("val_*.bin")]):
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(
                f"--data: cannot read {path}: {error.strerror}; correct the file, or choose another"
            ) from None
        total.update(f"{path.name} {digest}\n".encode())
    return total.hexdigest()[:16]


def same_data(a: Result, b: Result) -> bool:
    """Return whether two results are of the same data; also for those of earlier versions, which do not say."""
    return "data" not in a or "data" not in b or a["data"] == b["data"]


# ---- comparison with the series ----


def rows_on_other_data(rows: Sequence[Result], data: Path, out: Path) -> list[str]:
    """Return a line for each result of other data than the folder's."""
    now, todo = {"data": data_digest(data)}, "choose another --out, or remove the line and the run is made again"
    return _first_lines(
        [
            f"{out}: {row['arm']} seed {row['seed']}: trained on data {row['data']}, {data} is {now['data']}; {todo}"
            for row in rows
            if not same_data(row, now)
        ],
        f"results are of other data than {data}",
        out,
    )


def _first_lines(lines: list[str], what: str, out: Path) -> list[str]:
    """Return the first MOST_LINES lines, and a line with the number of the others."""
    more = [f"{out}: {len(lines) - MOST_LINES} more {what}"]
    return lines[:MOST_LINES] + (more if len(lines) > MOST_LINES else [])


def best_trial(series: Series, rows: Sequence[Result], run: Run) -> Run | None:
    """Return the trial with the least validation loss; None as long as one has no result, or if none has a loss.  A
    trial whose loss is not finite is not the best.
    """
    found = {row["arm"]: row["val_loss"] for row in rows if row["seed"] == 0}
    trials = series.trials(run)
    finite = [trial for trial in trials if found.get(trial.arm) is not None]
    if not finite or any(trial.arm not in found for trial in trials):
        return None
    return min(finite, key=lambda trial: found[trial.arm])


def differing_rows(series: Series, rows: Sequence[Result], out: Path, arm: str | None = None) -> list[str]:
    """Return a line for each result, of one arm or of all, that the series would not give now: its program, its options
    or the best trial differ.
    """
    runs = {run.arm: run for run in series.runs if arm in (None, run.arm)}
    found = []
    for row in rows:
        if row["arm"] in runs:
            run = runs[row["arm"]]
            of_seed = run._replace(seed=row["seed"], options=run.options | seed_options(row["seed"]))
            if wrong := _difference(series, rows, row, of_seed):
                found.append(f"{out}: {run.arm} seed {row['seed']}: {wrong}")
    return _first_lines(found, f"results differ from {series.file}", out)


def _difference(series: Series, rows: Sequence[Result], row: Result, run: Run) -> str:
    """Return what differs between a result and its run, and what to do; empty if nothing does."""
    best = best_trial(series, rows, run) if run.best_of else None
    possible = [run]
    if run.best_of:
        possible = [with_trial(run, trial) for trial in ([best] if best else series.trials(run))]
    keys, program = min(
        ((list(_differing_keys(series, row, whole)), whole.program) for whole in possible), key=lambda it: len(it[0])
    )
    if not keys:
        return ""
    now = f"the best of {run.best_of} is {best.arm}; " if best else ""
    todo = "choose another --out, or remove the line and the run is made again"
    if "program" not in row and any(key.startswith("program ") for key in keys):
        todo += f'; add "program": {json.dumps(program)} to the line if that is what made it'
    return f"{now}{', '.join(keys)}; {todo}"


def _differing_keys(series: Series, row: Result, run: Run) -> Iterator[str]:
    """Yield each key with the result's value and the series' value."""
    old = {"config": row.get("config", series.config), "program": row.get("program", PROGRAM)} | row["options"]
    new = {"config": series.config, "program": run.program} | run.options
    for key in old | new:
        if key not in old or key not in new or not _same(old[key], new[key]):
            values = (str(where[key]) if key in where else "not given" for where in (old, new))
            yield "{} is {} there, {} in {}".format(key, *values, series.file)


def same_run(row: Result, run: Run) -> bool:
    """Return whether a result is that of a run with these options, whatever its arm."""
    options = row["options"]
    return (
        row.get("program", PROGRAM) == run.program
        and options.keys() == run.options.keys()
        and all(_same(options[key], value) for key, value in run.options.items())
    )


def _same(a: Any, b: Any) -> bool:
    """Return whether two values of an option are equal: 2e-3, which YAML reads as text, is 0.002."""
    try:
        return str(a) == str(b) or float(str(a)) == float(str(b))
    except ValueError:
        return False
