"""Trains the arms (variants) of a series with several seeds, and compares losses
between runs with equal seeds.

    python -m benchmarks.losses.pairs FILE --data SHARDS --out RESULTS.jsonl
        [--arm NAME ...] [--seeds 0,1]
    python -m benchmarks.losses.pairs FILE --out RESULTS.jsonl --report

FILE is YAML.  It has a `config` file, `options` of all runs, `arms` with
further options, `seeds` (the runs of an arm) and `baseline` (the arm to
compare with; by default the first).  An arm may also set:

    seeds      another number of runs
    program    a module in place of `gpt2_triton train`, such as
               benchmarks.losses.torch_train
    against    the arm to compare with, in place of the baseline
    end.from   a number of steps, after which options such as end.optim.lr
               replace those without `end.`

Runs with equal seeds have the same initial weights and the same data in the
same order.  A finished run is a line of RESULTS.jsonl.  The command makes only
runs without a line, so it continues a series.  With --work DIR a run that
SIGTERM or Ctrl-C interrupts saves a checkpoint, and the same command continues
it.  To use several GPUs, start it once per GPU, each time with another
CUDA_VISIBLE_DEVICES and other --seeds.  For a run that shared its GPU, set ms
to null in its line: the report then leaves its time out.

The training loss is the mean of the last fifth of the steps.  The report has
the mean and standard deviation of each arm, and its mean difference over pairs
of equal seed, with the 95% interval by Student's t.
"""

import contextlib
import hashlib
import json
import math
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.layout import markdown
from benchmarks.record import ROOT
from benchmarks.runs import finish, words_of
from gpt2_triton.checkpoint.format import step_path
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.config.config import Config
from gpt2_triton.console import print_line
from gpt2_triton.errors import ConfigError, DataError
from gpt2_triton.training.metrics import METRICS, read_metrics
from gpt2_triton.training.run_info import read_run

PROGRAM = "gpt2_triton train"
T_QUANTILES = (  # Student's t, 97.5%, for 1 to 30 degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

Result = dict[str, Any]
app = make_app("python -m benchmarks.losses.pairs")
app.help_epilogue = __doc__


def student_t(freedom: int) -> float:
    """Return Student's t of 95%; from 30 degrees of freedom on that of 30."""
    return T_QUANTILES[min(freedom, len(T_QUANTILES)) - 1]


class Arm(NamedTuple):
    options: dict[str, Any]
    seeds: int
    program: str
    against: str  # the arm to compare with


class Series(NamedTuple):
    config: str
    baseline: str
    arms: dict[str, Arm]

    def options(self, arm: str, seed: int) -> dict[str, Any]:
        return self.arms[arm].options | {"train.seed": 42 + seed, "data.seed": 42 + seed}

    def check(self, arm: str) -> None:
        """Raise ConfigError for a key that is unknown, or a value that is not valid."""
        whole, end = parts(self.arms[arm].options)
        end.pop("from", None)
        Config.load(ROOT / self.config, {key: str(value) for key, value in (whole | end).items()})

    def against(self, arm: str) -> str:
        """Return the arm to compare `arm` with; the baseline if the series no longer has `arm`."""
        return self.arms[arm].against if arm in self.arms else self.baseline


class Difference(NamedTuple):
    """A mean difference over pairs, and half the width of its 95% interval, which a
    single pair does not have.
    """

    mean: float
    half_width: float | None
    pairs: int

    def __str__(self) -> str:
        half = "" if self.half_width is None else f" ± {self.half_width:.4f}"
        return f"{self.mean:+.4f}{half} ({self.pairs})"


def read_series(path: Path) -> Series:
    """Read the file of a series; ConfigError if it does not describe one."""
    try:
        tree = yaml.safe_load(path.read_text())
        baseline = tree.get("baseline", next(iter(tree["arms"])))
        arms = {}
        for name, keys in tree["arms"].items():
            keys = {"seeds": tree["seeds"], "program": PROGRAM, "against": baseline} | (keys or {})
            own = [keys.pop(key) for key in ("seeds", "program", "against")]
            arms[name] = Arm(tree.get("options", {}) | keys, *own)
        return Series(tree["config"], baseline, arms)
    except (OSError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: not a series ({error!r}); benchmarks/losses has examples"
        ) from None


def read_results(path: Path) -> list[Result]:
    """Return the results in a file; none if there is no file."""
    try:
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    except ValueError as error:
        raise DataError(
            f"{path}: a line is not a result ({error}); remove the line to repeat its run"
        ) from None


def data_digest(folder: Path) -> str:
    """Return 16 hexadecimal digits of a sha256 of the shards' names and contents."""
    total = hashlib.sha256()
    for path in sorted([*folder.glob("train_*.bin"), *folder.glob("val_*.bin")]):
        with open(path, "rb") as file:
            total.update(
                f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode()
            )
    return total.hexdigest()[:16]


def _equal(a: Any, b: Any) -> bool:
    """Return whether two values of an option are equal: 2e-3, which
    YAML reads as text, is 0.002.
    """
    try:
        return float(a) == float(b)
    except (TypeError, ValueError):
        return str(a) == str(b)


def require_same(series: Series, rows: list[Result], data: str) -> None:
    """Raise ConfigError if a result has other options than the series, or other data."""
    for row in rows:
        if row["arm"] in series.arms:
            options = series.options(row["arm"], row["seed"])
        else:
            options = row["options"]
        keys = {
            key: (row["options"].get(key), options.get(key))
            for key in row["options"].keys() | options.keys()
        }
        keys["data"] = row.get("data", data), data
        wrong = [
            f"{key} {old}, now {new}" for key, (old, new) in keys.items() if not _equal(old, new)
        ]
        if wrong:
            todo = "choose another --out, or remove the line of this run"
            raise ConfigError(
                f"{row['arm']} seed {row['seed']}: the result has {', '.join(wrong)}; {todo}"
            )


# ---- a run ----


@contextlib.contextmanager
def folder_of(run: str, work: Path | None) -> Iterator[Path]:
    """Yield a folder for a run, and remove it; a folder of `work` stays
    if the run is interrupted.
    """
    if work is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        kept = work / hashlib.sha256(run.encode()).hexdigest()[:16]
        yield kept
        shutil.rmtree(kept, ignore_errors=True)


def train(
    series: Series, arm: str, seed: int, data: Path, digest: str, work: Path | None
) -> Result | None:
    """Make a run in processes of its own.  If one fails, print the end of
    its output and return None.
    """
    program = series.arms[arm].program
    options = series.options(arm, seed)
    with folder_of(f"{arm} {options} {digest}", work) as run_dir:
        try:
            for words in commands(series, arm, seed, run_dir, data):
                finish(*words)
        except ConfigError as error:
            print_line(f"{arm} seed {seed}: {error}", error=True)
            return None
        found = dict(arm=arm, seed=seed, config=series.config, program=program, options=options)
        return found | dict(data=digest) | figures(run_dir)


def commands(
    series: Series, arm: str, seed: int, run_dir: Path, data: Path
) -> Iterator[list[object]]:
    """Yield the command of a run; if the arm has `end.from`, then the command that
    makes the last steps again.
    """
    whole, end = parts(series.options(arm, seed))
    save = {"checkpoint.every": end.pop("from")} if end else {}
    words: list[object] = ["-m", *series.arms[arm].program.split(), ROOT / series.config]
    shards = {f"data.{split}": f"{data}/{split}_*.bin" for split in ("train", "val")}
    words += words_of({"run_dir": run_dir, **shards})
    again = [] if end or series.arms[arm].program != PROGRAM else ["--resume"]
    if not again:
        shutil.rmtree(run_dir, ignore_errors=True)  # what an interrupted run left
    yield [*words, *again, *words_of(whole | save)]
    if end:
        shutil.rmtree(step_path(run_dir / "checkpoints", int(whole["train.steps"])))
        yield [*words, "--resume", *words_of(whole | end)]


def parts(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of all steps, and those of the last steps without `end.`."""
    whole = dict(options)
    end = {key.removeprefix("end."): whole.pop(key) for key in options if key.startswith("end.")}
    return whole, end


def figures(run_dir: Path) -> Result:
    """Return the losses and speed of a run.  A loss that is not finite counts as the last
    finite loss.
    """
    records = read_metrics(run_dir / METRICS)
    start = read_run(run_dir)["starts"][-1]
    steps = [record for record in records if "loss" in record]
    val = [record for record in records if "val_loss" in record][-1:] or [{}]
    losses: list[float] = []
    for record in steps:
        losses.append(losses[-1] if record["loss"] is None else record["loss"])
    return {
        "steps": len(losses),
        "train_loss": statistics.fmean(losses[-(len(losses) // 5 or 1) :]),
        "val_loss": val[0].get("val_loss"),
        "val_loss_fp8": val[0].get("val_loss_fp8"),
        "ms": statistics.median(record["ms"] for record in steps if record.get("ms")),
        "tokens": steps[-1]["tokens"],
        "commit": (start["git"] or {}).get("commit"),
        "device": start["device"],
    }


# ---- report ----


def difference(rows: list[Result], arm: str, other: str, key: str) -> Difference | None:
    """Return `arm` minus `other` over the seeds of both; None if no seed is in both,
    or both are the same arm.
    """
    if arm == other:
        return None
    mine, others = (
        {r["seed"]: r for r in rows if r["arm"] == name and r[key] is not None}
        for name in (arm, other)
    )
    both = [(mine[seed], others[seed]) for seed in sorted(mine.keys() & others.keys())]
    # results of earlier versions do not name their data
    found = [
        a[key] - b[key] for a, b in both if len({r["data"] for r in (a, b) if "data" in r}) < 2
    ]
    n = len(found)
    if n < 2:
        return Difference(found[0], None, 1) if found else None
    half = student_t(n - 1) * statistics.stdev(found) / math.sqrt(n)
    return Difference(statistics.fmean(found), half, n)


def table(series: Series, rows: list[Result]) -> str:
    """Return the table, a line for each arm with results: first the arms of the
    series, then earlier arms.
    """
    head = "arm,runs,training loss,sd,validation,sd,ms,tok/s,difference in training,in validation"
    lines = []
    for arm in dict.fromkeys([*series.arms, *(row["arm"] for row in rows)]):
        mine = [row for row in rows if row["arm"] == arm]
        if not mine:
            continue
        cells = [arm, str(len(mine))]
        other = series.against(arm)
        for key in ("train_loss", "val_loss"):
            values = [row[key] for row in mine if row[key] is not None]
            cells.append(f"{statistics.fmean(values):.4f}" if values else "")
            cells.append(f"{statistics.stdev(values):.4f}" if len(values) > 1 else "")
        timed = [row["ms"] for row in mine if row["ms"]]
        if timed:
            ms = statistics.median(timed)
            cells += [f"{ms:.2f}", f"{1e3 * mine[0]['tokens'] / mine[0]['steps'] / ms:,.0f}"]
        else:
            cells += ["", ""]
        against = "" if other == series.baseline else f" against {other}"
        for key in ("train_loss", "val_loss"):
            found = difference(rows, arm, other, key)
            cells.append(f"{found}{against}" if found else "")
        lines.append(cells)
    return markdown(head.split(","), lines)


def train_missing(
    series: Series, data: Path | None, out: Path, work: Path | None, names: list[str],
    seeds: Iterable[int],
) -> int:  # fmt: skip
    """Make the runs that have no result; return the number of runs that failed."""
    if not (data and any(data.glob("train_*.bin")) and any(data.glob("val_*.bin"))):
        raise ConfigError(f"--data {data}: expected a directory of train_*.bin and val_*.bin")
    rows = read_results(out)
    digest = data_digest(data)
    failed = 0
    require_same(series, rows, digest)
    done = {(row["arm"], row["seed"]) for row in rows}
    every = [(name, seed) for seed in seeds for name in names if seed < series.arms[name].seeds]
    runs = [run for run in every if run not in done]
    for name in {name for name, _ in runs}:
        series.check(name)
    for number, (name, seed) in enumerate(runs, start=1):
        row = train(series, name, seed, data, digest, work)
        if row:
            with open(out, "a") as file:
                file.write(json.dumps(row) + "\n")
            losses = (
                f"train {row['train_loss']:.4f}, val {row['val_loss']}, {row['ms']:.2f} ms a step"
            )
            print(f"{number} of {len(runs)}: {name} seed {seed}: {losses}", flush=True)
        failed += row is None
    return failed


@app.default
def compare(
    file: Path,
    *,
    out: Path,
    data: Path | None = None,
    work: Path | None = None,
    arm: list[str] | None = None,
    seeds: str = "",
    report: bool = False,
) -> int:
    """Train the runs of a series that have no result, and print the table.

    Args:
        file: The series, YAML.
        out: Results, one line of JSON per run.
        data: Directory of train_*.bin and val_*.bin.
        work: Directory of unfinished runs; by default they are lost.
        arm: An arm to train; may be repeated; by default all.
        seeds: Seeds to train, as 0,1.
        report: Train nothing, print the table.
    """
    # sys.exit raises, so that `train` ends its run
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    series = read_series(file)
    names = arm or [*series.arms]
    if unknown := [name for name in names if name not in series.arms]:
        raise ConfigError(f"--arm {unknown[0]}: the series has {', '.join(series.arms)}")
    most = max(series.arms[name].seeds for name in names)
    chosen = map(int, seeds.split(",")) if seeds else range(most)
    failed = 0 if report else train_missing(series, data, out, work, names, chosen)
    print(table(series, read_results(out)))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
