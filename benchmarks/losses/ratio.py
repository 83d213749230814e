"""How many tokens does AdamW need for Muon's loss?  Fits L = E + A D^-a to the runs
of scale.yaml, size by size.

E is one for both optimizers.  The fit leaves out L1's runs and is compared with them.  A
run's noise is that of equal runs of other seeds and the same size.  A size without such runs
has the largest noise of its optimizer.  With E given, log A and a follow from log(L - E) by
weighted least squares, and a ratio is a linear condition on them (Fieller's method).  The 95%
interval holds the ratios for which some E and this condition together add at most Student's t
squared to the squares of the best fit.  The ratio at 1B is L1's own, where the line through
Muon's two runs has AdamW's loss.
A loss beyond the line's ends has no ratio there, but a bound.
"""

import re
import statistics
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from benchmarks.layout import markdown
from benchmarks.losses.pairs import Result, student_t

OPTIMIZERS = ("adamw", "muon")
LEAST, MOST = 0.1, 30.0  # ratios that are reported
LOG_RATIOS = np.linspace(np.log(LEAST / 1.01), np.log(MOST * 1.01), 2001)
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
        named = re.fullmatch(r"(L1|d\d+) (adamw|muon)( \d+[MB]|, \d+%)", row["arm"])
        if named is None:
            continue
        size = "d12" if named[1] == "L1" else named[1]
        fitted = named[1] != "L1"
        found.append(Run(size, named[2], row["tokens"] / 1e6, row["val_loss"], fitted))
    return found


def noise_of(runs: list[Run], optimizer: str, size: str) -> Noise:
    """Return the noise of this size's runs, or of the noisiest size if
    these have no other seeds.
    """
    groups: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        if run.optimizer == optimizer:
            groups.setdefault(run.size, {}).setdefault(run.tokens, []).append(run.loss)
    found = {}
    for name, losses in groups.items():
        freedom = sum(len(group) - 1 for group in losses.values())
        if freedom:
            squares = (len(group) * statistics.pvariance(group) for group in losses.values())
            variance = sum(squares) / freedom
            found[name] = Noise(variance**0.5, freedom, name)
    return found.get(size) or max(found.values())


class Curve:
    """For each E: log A and a of one optimizer, their covariance, and the squares that
    stay, in units of the noise.
    """

    def __init__(self, E: np.ndarray, runs: list[Run], sd: float):
        over = np.array([run.loss for run in runs]) - E[:, None]
        y = np.log(over)
        design = np.array([(1, -np.log(run.tokens)) for run in runs])
        weights = (over / sd) ** 2
        self.covariance = np.linalg.inv(np.einsum("ep,pi,pj->eij", weights, design, design))
        self.found = np.einsum("eij,pj,ep->ei", self.covariance, design, weights * y)
        self.squares = (weights * (y - self.found @ design.T) ** 2).sum(1)


def t_of(noise: dict[str, Noise]) -> float:
    """Return Student's t of 95%, for the fewer degrees of freedom."""
    return student_t(min(one.freedom for one in noise.values()))


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
        self.t = t_of(noise)

    def loss(self, optimizer: str, tokens: float) -> float:
        log_A, a = self.curves[OPTIMIZERS.index(optimizer)].found[self.best]
        return float(self.E[self.best] + np.exp(log_A - a * np.log(tokens)))

    def ratio(self, tokens: float) -> tuple[float, float, float]:
        """Return AdamW's tokens divided by Muon's, for Muon's loss after `tokens`, and
        the ends of its interval.
        """
        adamw, muon = self.curves
        x = np.log(tokens)
        here = np.array([1, -x])
        to = np.stack([np.ones_like(LOG_RATIOS), -x - LOG_RATIOS], 1)
        # equal losses: log A - a (x + ratio) of AdamW is log A - a x of Muon
        apart = adamw.found @ to.T - (muon.found @ here)[:, None]
        variance = np.einsum("ri,eij,rj->er", to, adamw.covariance, to, optimize=True)
        variance += np.einsum("i,eij,j->e", here, muon.covariance, here)[:, None]
        added = (self.squares - self.squares[self.best])[:, None] + apart**2 / variance
        nearest = added.min(0)
        step = LOG_RATIOS[1] - LOG_RATIOS[0]
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


def measured(runs: list[Run], noise: dict[str, Noise]) -> tuple[float, float, float]:
    """Return AdamW's tokens in L1 divided by what Muon needs for its loss, and
    the ends of the 95% interval.

    A ratio beyond `bounds` extends the line through Muon's two runs: only the bound is known.
    """
    adamw, muon = (
        sorted(run for run in runs if run.optimizer == name and not run.fitted)
        for name in OPTIMIZERS
    )
    (short, first), (long, last) = ((np.log(run.tokens), run.loss) for run in muon)
    share = (adamw[0].loss - first) / (last - first)  # 0 at Muon's shorter run, 1 at its longer run
    middle = np.log(adamw[0].tokens) - short - share * (long - short)
    sd = np.hypot(noise["adamw"].sd, noise["muon"].sd * np.hypot(1 - share, share))  # of a loss
    half = t_of(noise) * sd * (long - short) / abs(last - first)
    found, low, high = np.exp([middle, middle - half, middle + half])
    return float(found), float(low), float(high)


class Size:
    """The runs of one size, their noise and their fit."""

    def __init__(self, name: str, runs: list[Run]):
        self.name = name
        self.runs = [run for run in runs if run.size == name]
        self.noise = {optimizer: noise_of(runs, optimizer, name) for optimizer in OPTIMIZERS}
        self.fit = Fit(self.runs, self.noise)
        self.later = {run.tokens for run in self.runs if not run.fitted}


def sizes_of(rows: Iterable[Result]) -> list[Size]:
    runs = runs_of(rows)
    names = sorted({run.size for run in runs}, key=lambda name: int(name[1:]))
    return [Size(name, runs) for name in names]


def table(sizes: list[Size]) -> str:
    """Return losses and ratios by size and budget."""
    head = ["size", "million tokens", "AdamW", "Muon", "Muon - AdamW", "ratio", "95%"]
    rows: list[list[str]] = []
    for size in sizes:
        budgets = sorted({run.tokens for run in size.runs})
        rows += [_cells(size, tokens) for tokens in [*budgets, FARTHEST]]
    return markdown(head, rows)


def _cells(size: Size, tokens: float) -> list[str]:
    means = {}
    for name in OPTIMIZERS:
        losses = [run.loss for run in size.runs if (run.optimizer, run.tokens) == (name, tokens)]
        if losses:
            means[name] = statistics.fmean(losses)
    adamw, muon = (f"{means[name]:.4f}" if name in means else "" for name in OPTIMIZERS)
    apart = f"{means['muon'] - means['adamw']:+.4f}" if len(means) == 2 else ""
    return [size.name, f"{tokens:,.0f}", adamw, muon, apart, *_ratio(size, tokens)]


def _ratio(size: Size, tokens: float) -> list[str]:
    """Return a ratio and its interval, of L1's own runs at the longest of them."""
    if tokens not in size.later:
        limits = LEAST, MOST
        found = size.fit.ratio(tokens)
    elif tokens == max(size.later):
        limits = bounds(size.runs)
        found = measured(size.runs, size.noise)
    else:
        return ["", ""]
    ratio, low, high = (_shown(one, *limits) for one in found)
    return [ratio, f"{low} to {high}"]


def _shown(ratio: float, least: float, most: float) -> str:
    if ratio > most:
        return f"> {most:.3g}"
    return f"< {least:.3g}" if ratio < least else f"{ratio:.2f}"
