"""How many tokens does AdamW need for Muon's loss?  Fits L = E + A D^-a to the runs
of scale.yaml, size by size.

    python -m benchmarks.losses.ratio RESULTS.jsonl

E is one for both optimizers.  The fit leaves out L1's runs and is compared with them.  A
run's noise is that of equal runs of other seeds and the same size.  A size without such runs
has the largest noise of its optimizer.  With E given, log A and a follow from log(L - E) by
weighted least squares, and a ratio is a linear condition on them (Fieller's method).  The 95%
interval holds the ratios for which some E and this condition together add at most Student's t
squared to the squares of the best fit.  The ratio at 1B is L1's own, where the line through
Muon's two runs has AdamW's loss.
A loss beyond the line's ends has no ratio there, but a bound.
"""

import argparse
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.losses.pairs import T_QUANTILES, Result, read_results

OPTIMIZERS = ("adamw", "muon")
LEAST, MOST = 0.1, 30.0  # ratios that are reported
LOG_RATIOS = np.linspace(np.log(LEAST / 1.01), np.log(MOST * 1.01), 2001)
BUDGETS = 3  # of an optimizer; fewer leave E open
FARTHEST = 10_000.0  # million tokens


class Run(NamedTuple):
    size: str
    optimizer: str
    tokens: float  # millions
    loss: float
    fitted: bool


class Noise(NamedTuple):
    sd: float
    freedom: int  # degrees of freedom of sd
    size: str  # the runs it comes from


def runs_of(rows: Iterable[Result]) -> list[Run]:
    """Return the runs with AdamW and Muon at equal budgets."""
    found = []
    for row in rows:
        if named := re.fullmatch(r"(L1|d\d+) (adamw|muon)( \d+[MB]|, \d+%)", row["arm"]):
            first = named[1] == "L1"
            found.append(
                Run(
                    "d12" if first else named[1],
                    named[2],
                    row["tokens"] / 1e6,
                    row["val_loss"],
                    not first,
                )
            )
    return found


def noise_of(runs: list[Run], optimizer: str, size: str) -> Noise | None:
    """Return the noise of this size's runs, or of the noisiest size if
    these have no other seeds.
    """
    groups: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        if run.optimizer == optimizer:
            groups.setdefault(run.size, {}).setdefault(run.tokens, []).append(run.loss)
    found = {}
    for name, losses in groups.items():
        if freedom := sum(len(group) - 1 for group in losses.values()):
            found[name] = Noise(
                (sum(map(_squares, losses.values())) / freedom) ** 0.5, freedom, name
            )
    return found.get(size) or max(found.values(), default=None)


def _squares(losses: list[float]) -> float:
    return sum((loss - statistics.fmean(losses)) ** 2 for loss in losses)


class Curve:
    """For each E: log A and a of one optimizer, their covariance, and the squares that
    stay, in units of the noise.
    """

    def __init__(self, E: np.ndarray, runs: list[Run], sd: float):
        over = np.array([run.loss for run in runs]) - E[:, None]
        y, design = np.log(over), np.array([(1, -np.log(run.tokens)) for run in runs])
        weights = (over / sd) ** 2
        self.covariance = np.linalg.inv(np.einsum("ep,pi,pj->eij", weights, design, design))
        self.found = np.einsum("eij,pj,ep->ei", self.covariance, design, weights * y)
        self.squares = (weights * (y - self.found @ design.T) ** 2).sum(1)


class Fit:
    def __init__(self, runs: list[Run], noise: dict[str, Noise]):
        mine = [
            [run for run in runs if run.optimizer == name and run.fitted] for name in OPTIMIZERS
        ]
        least = min(run.loss for some in mine for run in some)
        self.E = least - np.geomspace(0.02, least, 400)
        self.curves = [
            Curve(self.E, some, noise[name].sd) for name, some in zip(OPTIMIZERS, mine, strict=True)
        ]
        self.squares = self.curves[0].squares + self.curves[1].squares
        self.best = int(self.squares.argmin())
        self.t = T_QUANTILES[min(len(T_QUANTILES), *(one.freedom for one in noise.values())) - 1]

    def loss(self, optimizer: str, tokens: float) -> float:
        log_A, a = self.curves[OPTIMIZERS.index(optimizer)].found[self.best]
        return float(self.E[self.best] + np.exp(log_A - a * np.log(tokens)))

    def ratio(self, tokens: float) -> tuple[float, float, float]:
        """Return AdamW's tokens divided by Muon's, for Muon's loss after `tokens`, and
        the ends of its interval.
        """
        adamw, muon = self.curves
        x, to = (
            np.log(tokens),
            np.stack([np.ones_like(LOG_RATIOS), -np.log(tokens) - LOG_RATIOS], 1),
        )
        here = np.array([1, -x])
        # equal losses: log A - a (x + ratio) of AdamW is log A - a x of Muon
        apart = adamw.found @ to.T - (muon.found @ here)[:, None]
        variance = np.einsum("ri,eij,rj->er", to, adamw.covariance, to, optimize=True)
        variance += np.einsum("i,eij,j->e", here, muon.covariance, here)[:, None]
        added = (self.squares - self.squares[self.best])[:, None] + apart**2 / variance
        nearest, step = added.min(0), LOG_RATIOS[1] - LOG_RATIOS[0]
        # a ratio beyond the limits leaves the nearest
        inside = LOG_RATIOS[nearest <= max(self.t**2, nearest.min())]
        best = LOG_RATIOS[np.abs(apart[self.best]).argmin()]
        low, middle, high = np.exp([inside.min() - step, best, inside.max() + step])
        return float(middle), float(low), float(high)


def bounds(runs: list[Run]) -> tuple[float, float]:
    """Return AdamW's tokens in L1 divided by those of Muon's longest and shortest run."""
    adamw, muon = (
        [run.tokens for run in runs if run.optimizer == name and not run.fitted]
        for name in OPTIMIZERS
    )
    return adamw[0] / max(muon), adamw[0] / min(muon)


def measured(runs: list[Run], noise: dict[str, Noise]) -> tuple[float, float, float] | None:
    """Return AdamW's tokens in L1 divided by what Muon needs for its loss, and
    the ends of the 95% interval.

    A ratio beyond `bounds` extends the line through Muon's two runs: only the bound is known.
    """
    adamw, muon = (
        sorted(run for run in runs if run.optimizer == name and not run.fitted)
        for name in OPTIMIZERS
    )
    if not adamw or len(muon) < 2 or len(noise) < 2:
        return None
    (short, first), (long, last) = ((np.log(run.tokens), run.loss) for run in muon)
    share = (adamw[0].loss - first) / (last - first)  # 0 at Muon's shorter run, 1 at its longer run
    middle = np.log(adamw[0].tokens) - short - share * (long - short)
    sd = (
        np.hypot(noise["adamw"].sd, noise["muon"].sd * np.hypot(1 - share, share))
        * (long - short)
        / abs(last - first)
    )
    half = sd * T_QUANTILES[min(len(T_QUANTILES), *(one.freedom for one in noise.values())) - 1]
    found, low, high = np.exp([middle, middle - half, middle + half])
    return float(found), float(low), float(high)


def report(runs: list[Run]) -> tuple[str, str]:
    """Return a table of losses and ratios by size and budget, and notes: noise, fits,
    and L1's runs beside them.
    """
    lines = [
        "| size | million tokens | AdamW | Muon | Muon - AdamW | ratio | 95% |",
        "|---" * 7 + "|",
    ]
    notes = []
    for size in sorted({run.size for run in runs}, key=lambda size: int(size[1:])):
        mine = [run for run in runs if run.size == size]
        noise = {name: one for name in OPTIMIZERS if (one := noise_of(runs, name, size))}
        lacks = _lacks(mine, noise)
        fit = None if lacks else Fit(mine, noise)
        later = {run.tokens for run in mine if not run.fitted}
        for tokens in [*sorted({run.tokens for run in mine}), *([FARTHEST] if fit else [])]:
            both = [
                [run.loss for run in mine if (run.optimizer, run.tokens) == (name, tokens)]
                for name in OPTIMIZERS
            ]
            means = [statistics.fmean(losses) for losses in both if losses]
            cells = [f"{statistics.fmean(losses):.4f}" if losses else "" for losses in both]
            cells.append(f"{means[1] - means[0]:+.4f}" if len(means) == 2 else "")
            found = fit.ratio(tokens) if fit and tokens not in later else None
            limits = LEAST, MOST
            if tokens == max(later, default=0) and (found := measured(mine, noise)):
                limits = bounds(mine)
            ratio, *ends = (_shown(one, *limits) for one in found) if found else [""]
            lines.append(
                f"| {size} | {tokens:,.0f} | {' | '.join([*cells, ratio, ' to '.join(ends)])} |"
            )
        if not fit:
            notes.append(f"{size} has no fit: {', '.join(lacks)}")
            continue
        a = [curve.found[fit.best, 1] for curve in fit.curves]
        squares = (
            f"{fit.squares[fit.best]:.1f} squares of the noise in "
            f"{sum(run.fitted for run in mine)} runs"
        )
        notes.append(
            f"{size}: E {fit.E[fit.best]:.3f}, a {a[0]:.3f} with AdamW, "
            f"{a[1]:.3f} with Muon, {squares}"
        )
        for name, (sd, freedom, source) in noise.items():
            notes.append(
                f"{size} {name}: a run's sd {sd:.4f}, from {source} with "
                f"{freedom} degrees of freedom"
            )
        for _, name, tokens, loss, _ in (run for run in mine if not run.fitted):
            notes.append(
                f"{size} {name} {tokens:,.0f}: {loss:.4f}; the fit has {fit.loss(name, tokens):.4f}"
            )
    return "\n".join(lines), "\n".join(notes)


def _lacks(mine: list[Run], noise: dict[str, Noise]) -> list[str]:
    """Name what the runs of one size lack for a fit."""
    lacks = []
    for name in OPTIMIZERS:
        budgets = {run.tokens for run in mine if run.optimizer == name and run.fitted}
        lacks += (
            [f"{name} has {len(budgets)} of {BUDGETS} budgets"] if len(budgets) < BUDGETS else []
        )
        lacks += [] if name in noise else [f"{name} has no equal runs of two seeds"]
    return lacks


def _shown(ratio: float, least: float, most: float) -> str:
    return (
        f"> {most:.3g}" if ratio > most else f"< {least:.3g}" if ratio < least else f"{ratio:.2f}"
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    print(*report(runs_of(read_results(parser.parse_args(words).results))), sep="\n\n")


if __name__ == "__main__":
    main()
