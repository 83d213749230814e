"""Trains with this package and with PyTorch, from the same weights on the same
tokens, and compares every step.

    python -m benchmarks.losses.vs_torch
        [--train.dtype fp32 | --optim.master none] [--key value ...]

By default it trains GPT-2 124M for 50 steps with fp32 masters on the builtin
text; any key of a configuration may follow.  torch_train.py trains with
PyTorch under bf16 autocast.  If train.dtype is fp32 or optim.master is none,
PyTorch computes in fp32, because autocast rounds weights to bf16 and so hides
updates below half an ulp.  The exit code is 1 if a step exceeds a bound.  In
fp32, losses may differ by a relative 1e-4.  In bf16, losses may differ by 0.02
and gradient norms by 2%.

The learning rate rises to 2e-5 only: the loss then falls smoothly, and a
difference shows an error.  At larger rates even two runs of PyTorch drift
apart if one bit differs (docs/engineering/numerics.md).  For such rates,
compare the mean of the last 20 losses, for example after

    --train.steps 500 --train.batch_size 4 --train.total_batch_tokens 4096
    --optim.lr 3e-4 --optim.warmup 100
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.layout import aligned
from benchmarks.record import ROOT
from benchmarks.runs import BUILTIN, QUIET, Keys, finish, words_of
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.training.metrics import METRICS, read_metrics

app = make_app("python -m benchmarks.losses.vs_torch")
app.help_epilogue = __doc__
CONFIG = ROOT / "configs" / "gpt2_124m.yaml"
KEYS = {
    **BUILTIN, **QUIET, "eval.tokens": "16384",
    "train.steps": "50", "train.batch_size": "16", "train.total_batch_tokens": "16384",
    "optim.lr": "2e-5", "optim.warmup": "50", "optim.schedule": "constant", "optim.master": "fp32",
}  # fmt: skip
BOUNDS = {True: dict(relative=1e-4), False: dict(absolute=0.02, norm=0.02)}  # in fp32, in bf16
LAST = 20  # steps that the printed mean covers


def train(program: Sequence[str], run_dir: Path, keys: Mapping[str, object], *more: str) -> None:
    """Train GPT-2 124M, with other keys, by a module and its options."""
    finish("-m", *program, CONFIG, *more, *words_of({"run_dir": run_dir, **keys}))


def metrics_of(program: list[str], keys: Mapping[str, object], *more: str) -> list[dict]:
    """Train with a program, and return the records of its steps."""
    with tempfile.TemporaryDirectory() as run_dir:
        train(program, Path(run_dir), keys, *more)
        return [record for record in read_metrics(Path(run_dir) / METRICS) if "loss" in record]


def differences(ours: list[dict], theirs: list[dict]) -> dict[str, float]:
    """Return three largest differences over all steps: relative and absolute of
    losses, relative of norms.
    """
    both = list(zip(ours, theirs, strict=True))
    return dict(
        relative=max(abs(a["loss"] / b["loss"] - 1) for a, b in both),
        absolute=max(abs(a["loss"] - b["loss"]) for a, b in both),
        norm=max(abs(a["norm"] / b["norm"] - 1) for a, b in both),
    )


@app.default
def compare(*given: Keys) -> int:
    """Compare every step of this package with PyTorch's; return 1 if they disagree.

    Args:
        given: Keys of a configuration, as --train.dtype fp32.
    """
    keys = KEYS | parse_overrides(given)
    is_fp32 = keys.get("train.dtype") == "fp32"
    if is_fp32:
        keys["optim.master"] = "none"
    ours = metrics_of(["gpt2_triton", "train"], keys)
    in_fp32 = is_fp32 or keys["optim.master"] == "none"
    theirs = metrics_of(["benchmarks.losses.torch_train"], keys, *["--fp32"] * in_fp32)
    lines = [["step", "loss, ours", "PyTorch", "norm, ours", "PyTorch"]]
    for a, b in list(zip(ours, theirs))[:: max(1, len(ours) // 10)]:
        pair = (record[key] for key in ("loss", "norm") for record in (a, b))
        lines.append([str(a["step"]), *(f"{value:.6f}" for value in pair)])
    print(aligned(lines))
    found = differences(ours, theirs)
    print(
        "largest difference: " + ", ".join(f"{name} {value:.2e}" for name, value in found.items())
    )
    mean, other = (
        statistics.fmean(record["loss"] for record in run[-LAST:]) for run in (ours, theirs)
    )
    print(
        f"mean of the last {LAST} losses: {mean:.4f}, PyTorch {other:.4f} ({mean / other - 1:+.2%})"
    )
    agreed = all(found[name] <= bound for name, bound in BOUNDS[is_fp32].items())
    print(f"{'agreed' if agreed else 'DISAGREED'}: the bounds are {BOUNDS[is_fp32]}")
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
