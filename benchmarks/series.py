"""Trains a list of runs to their end, one on each GPU at a time, and compares their losses in pairs.

    python -m benchmarks.series FILE --data SHARDS --out RESULTS.jsonl [--minutes M] [--gpus 0,1] [--seeds 0,1,2]
                                [--arm NAME ...]
    python -m benchmarks.series FILE --out RESULTS.jsonl --report [--plot FILE.png]

FILE is YAML: `config`, a configuration file; `options` of every run; `arms`, the options of each by its name;
`baseline`, one of them, by default the first; `seeds`, how many runs of each arm.  Runs of one seed, whatever the arm,
have the same initial weights and the same data in the same order.  An arm may set:

    seeds, minutes   its own number of runs, and how long one may take
    program          what trains in place of `gpt2_triton train`: a module of this repository and its first arguments
    best_of          the beginning of other arms' names: it has the options of the one of them whose first run ended at
                     the least validation loss, and its own
    against          the arm of its pairs in the report, in place of the baseline

Each finished run is one line of RESULTS.jsonl, with its program and options.  A run that is there is not made again, so
the same command resumes a series, also after Ctrl-C or SIGTERM, which end the runs under way without a result.  If a
line's options are no longer those of the series, its data had other contents, or another trial has become the best,
no run begins.  With --minutes no run begins that would end later, by the time that the last run of its arm took.

The training loss is the mean of the last fifth of the steps; spikes show in the largest loss_z of a step.
The report gives the mean and standard deviation of each arm, and the mean difference of the pairs with its 95% interval
by Student's t, and says how many pairs are of two commits or from two kinds of GPU.  Runs on other data are no pair.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.series_file import Series, check_options, choose, gpu_numbers, read_series, require_gpus
from benchmarks.series_report import plot as draw
from benchmarks.series_report import report as table
from benchmarks.series_results import differing_rows, prepare, read_results, rows_on_other_data
from benchmarks.series_runs import train
from gpt2_triton import device
from gpt2_triton.commands import app as commands
from gpt2_triton.commands.plot import FORMATS
from gpt2_triton.console import print_line
from gpt2_triton.errors import ConfigError

app = commands.make_app("python -m benchmarks.series")


@app.default
def compare(
    file: Path,
    *,
    out: Path,
    data: Path | None = None,
    minutes: float = math.inf,
    gpus: str = "0",
    seeds: str | None = None,
    arm: list[str] | None = None,
    report: bool = False,
    plot: Path | None = None,
) -> int:
    """Train the runs of a series that have no result yet, and print the table of all.

    Parameters
    ----------
    file: Path
        The series, YAML; the docstring of benchmarks/series.py describes it.
    out: Path
        Results, a JSON object per run and line.
    data: Path
        Directory of train_*.bin and val_*.bin.
    minutes: float
        Begin no run that would end later.
    gpus: str
        Comma-separated numbers of the GPUs to use, of those that CUDA_VISIBLE_DEVICES leaves.
    seeds: str
        Comma-separated numbers of the seeds to train; by default all.
    arm: list[str]
        Name of an arm to train and to draw; may be given several times; by default all.
    report: bool
        Train nothing, print the table.
    plot: Path
        Picture of training loss over minutes: .png, .svg or .pdf.
    """
    commands.require_at_least(minutes=(minutes, 0))
    numbered = gpu_numbers(gpus)
    series = read_series(file)
    chosen = choose(series, seeds, arm)
    if plot and plot.suffix not in FORMATS:
        raise ConfigError(f"--plot: {plot} does not end in {', '.join(FORMATS)}; choose one of them")
    commands.require_directory("plot", plot)
    if report and not out.exists():
        raise ConfigError(f"--out: there is no file {out}; expected results to report")
    failed = 0
    if not report:
        shards = _require_trainable(series, data, out, numbered)
        failed = train(series, shards, out, minutes, numbered, chosen)
    rows = read_results(out)
    wrong = differing_rows(series, rows, out)
    for line in wrong:
        print_line(f"warning: {line}", error=True)
    print(table(series, rows))
    drawn = [row for row in rows if not arm or row["arm"] in arm]
    if plot and drawn:
        draw(series, drawn, plot)
    return 1 if failed or (wrong and not report) else 0


def _require_trainable(series: Series, data: Path | None, out: Path, gpus: Sequence[str]) -> Path:
    """Return the directory of shards when all is there that training needs; ConfigError if not.  Make the file of
    results.
    """
    shards = _require_shards(data)
    require_gpus(gpus)
    check_options(series)
    commands.require_directory("out", out)
    rows = read_results(out)
    if wrong := differing_rows(series, rows, out) or rows_on_other_data(rows, shards, out):
        raise ConfigError("\n".join(wrong))
    prepare(out)
    if not device.present():
        print_line("no CUDA GPU found: the runs train on the CPU")
    return shards


def _require_shards(data: Path | None) -> Path:
    """Return the directory; ConfigError if it has no shards to train on or none to validate."""
    expected = "expected the directory of train_*.bin and val_*.bin that python -m benchmarks.corpus makes"
    if data is None:
        raise ConfigError(f"--data: not given; {expected}")
    if not data.is_dir():
        raise ConfigError(f"--data: {data} is not a directory; {expected}")
    missing = [pattern for pattern in ("train_*.bin", "val_*.bin") if not any(data.glob(pattern))]
    if missing:
        raise ConfigError(f"--data: {data} has no {' and no '.join(missing)}; {expected}")
    return data


def main(words: Sequence[str] | None = None) -> int:
    return commands.main(app, list(sys.argv[1:] if words is None else words))


if __name__ == "__main__":
    sys.exit(main())
