"""Trains with this package and with PyTorch, from the same weights on the same
tokens, and compares every step.

    python -m benchmarks.losses.vs_torch [--train.dtype fp32 |
    --optim.master none] [--key value ...]

By default it trains GPT-2 124M for 50 steps with fp32 masters on the builtin text; any key of a
configuration may follow.  torch_train.py trains with PyTorch under bf16 autocast.  If train.dtype
is fp32 or optim.master is none, PyTorch computes in fp32, because autocast rounds weights to bf16
and so hides updates below half an ulp.  The exit code is 1 if a step exceeds a bound.  In fp32,
losses may differ by a relative 1e-4.  In bf16, losses may differ by 0.02 and gradient norms by 2%.

The learning rate rises to 2e-5 only: the loss then falls smoothly, and a difference
shows an error.  At larger rates even two runs of PyTorch drift apart if one bit
differs (docs/engineering/numerics.md).  For such rates, compare the mean of the last
20 losses, for example after

    --train.steps 500 --train.batch_size 4 --train.total_batch_tokens 4096
    --optim.lr 3e-4 --optim.warmup 100
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.training.metrics import METRICS, read_metrics

CONFIG = Path(__file__).parents[2] / "configs" / "gpt2_124m.yaml"
KEYS = {
    "data.train": "builtin", "data.val": "builtin", "data.tokenizer": "bytes",
    "train.steps": "50", "train.batch_size": "16", "train.total_batch_tokens": "16384",
    "optim.lr": "2e-5", "optim.warmup": "50", "optim.schedule": "constant", "optim.master": "fp32",
    "eval.every": "0", "eval.tokens": "16384", "eval.hellaswag_every": "0", "sample.every": "0",
    "checkpoint.every": "0", "checkpoint.major": "0",
}  # fmt: skip
BOUNDS = {True: dict(relative=1e-4), False: dict(absolute=0.02, norm=0.02)}  # in fp32, in bf16
LAST = 20  # steps that the printed mean covers


def metrics_of(program: list[str], keys: dict[str, str]) -> list[dict]:
    """Train with a program, and return the records of its steps; exit if it fails."""
    with tempfile.TemporaryDirectory() as run_dir:
        words = [sys.executable, "-m", *program, "--run_dir", run_dir]
        words += [word for key, value in keys.items() for word in (f"--{key}", value)]
        code = subprocess.run(words, stdout=subprocess.DEVNULL).returncode
        if code:
            sys.exit(code)
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


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _, given = parser.parse_known_args(words)
    keys = KEYS | parse_overrides(given)
    is_fp32 = keys.get("train.dtype") == "fp32"
    if is_fp32:
        keys["optim.master"] = "none"
    ours = metrics_of(["gpt2_triton", "train", str(CONFIG)], keys)
    in_fp32 = is_fp32 or keys["optim.master"] == "none"
    theirs = metrics_of(["benchmarks.losses.torch_train", str(CONFIG)] + ["--fp32"] * in_fp32, keys)
    print(f"{'step':>5} {'loss, ours':>12} {'PyTorch':>12} {'norm, ours':>12} {'PyTorch':>12}")
    for a, b in list(zip(ours, theirs))[:: max(1, len(ours) // 10)]:
        print(
            f"{a['step']:>5} {a['loss']:>12.6f} {b['loss']:>12.6f} "
            f"{a['norm']:>12.6f} {b['norm']:>12.6f}"
        )
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
    sys.exit(main())
