"""Trains a list of runs to their end, one on each GPU at a time, and compares their losses in pairs.

    python -m benchmarks.series FILE --data SHARDS --out RESULTS.jsonl [--minutes M] [--gpus 0,1] [--seeds 0,1,2]
    python -m benchmarks.series FILE --out RESULTS.jsonl --report [--plot FILE.png]

FILE is YAML: `config`, a configuration file; `options` of every run; `arms`, the options of each by its name;
`baseline`, one of them, by default the first; `seeds`, how many runs of each arm.  Runs of one seed, whatever the arm,
have the same initial weights and the same data in the same order.  An arm may set:

    seeds, minutes   its own number of runs, and how long one may take
    program          what trains in place of `gpt2_triton train`: a module of this repository and its first arguments
    best_of          the beginning of other arms' names: it has the options of the one of them whose first run ended at
                     the least validation loss, and its own

Each finished run is one line of RESULTS.jsonl.  A run that is there is not made again, so the same command
resumes a series; with --minutes no run begins that would end later, by the time that the last run of its arm took.

The training loss is the mean of the last fifth of the steps; spikes show in the largest loss_z of a step.
The report gives the mean and standard deviation of each arm, and the mean difference of the pairs with its 95% interval
by Student's t.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from benchmarks.series_file import read_series
from benchmarks.series_report import plot, report
from benchmarks.series_results import read_results
from benchmarks.series_runs import train


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="the series, YAML")
    parser.add_argument("--out", type=Path, required=True, help="results, a JSON object per run and line")
    parser.add_argument("--data", type=Path, help="directory of train_*.bin and val_*.bin")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end later")
    parser.add_argument("--gpus", default="0", help="comma-separated numbers of the GPUs to use")
    parser.add_argument("--seeds", help="comma-separated numbers of the seeds to train; by default all")
    parser.add_argument("--report", action="store_true", help="train nothing, print the table")
    parser.add_argument("--plot", type=Path, help="PNG of training loss over minutes")
    a = parser.parse_args(words)
    try:
        series = read_series(a.file)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    failed = 0
    if a.seeds:
        series = series._replace(runs=[run for run in series.runs if str(run.seed) in a.seeds.split(",")])
    if not a.report:
        if a.data is None:
            parser.error("--data: expected the directory of the shards, as python -m benchmarks.corpus makes")
        failed = train(series, a.data, a.out, a.minutes, a.gpus.split(","))
    rows = read_results(a.out)
    print(report(series, rows))
    if a.plot and rows:
        plot(series, rows, a.plot)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
