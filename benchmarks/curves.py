"""Loss curves of 500 steps: bf16 with stochastic rounding, bf16 with fp32 masters, and PyTorch under autocast.

    python -m benchmarks.curves --tokens train_000000.bin --out curves

GPT-2 124M from the same weights on the same tokens at an ordinary learning rate.  Runs that differ in the last bit
drift apart there, so what is compared is the mean training loss of the last 20 steps: ours must lie within 1% of
PyTorch's.  Writes curves.json and curves.png; exits with 1 if the bound is passed.
"""

import argparse
import gc
import json
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.agreement import History, train_ours, train_torch
from gpt2_triton.config import Config

LAST, BOUND = 20, 0.01


def config_of(tokens: Path, steps: int, batch: int, master: str) -> Config:
    return Config.model_validate(
        dict(
            data=dict(train=str(tokens), val=str(tokens), tokenizer="gpt2"),
            train=dict(steps=steps, batch_size=batch, dtype="bf16"),
            optim=dict(lr=3e-4, warmup=100, schedule="constant", master=master),
            eval=dict(every=0),
        )
    )


def plot(runs: dict[str, History], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), layout="constrained")
    styles = [dict(color="#1f77b4"), dict(color="#ff7f0e", ls="--"), dict(color="#2ca02c", ls=":")]
    for (name, run), style in zip(runs.items(), styles):
        axes.plot(range(1, len(run.losses) + 1), run.losses, label=name, lw=1.2, **style)
    axes.set(xlabel="step", ylabel="training loss", title="GPT-2 124M, tinyshakespeare")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True, help="a shard of GPT-2 tokens, made by `prepare text`")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=4, help="sequences a step; with many the text is learnt by heart")
    parser.add_argument("--out", type=Path, required=True, help="directory for curves.json and curves.png")
    a = parser.parse_args()
    runs = {}
    for master in ("none", "fp32"):
        config = config_of(a.tokens, a.steps, a.batch, master)
        runs[f"bf16, master: {master}"], initial, dims = train_ours(config)
        gc.collect()  # one arena at a time
        torch.cuda.empty_cache()
    runs["PyTorch, autocast"] = train_torch(config, initial, dims, autocast=True)
    final = {name: float(np.mean(run.losses[-LAST:])) for name, run in runs.items()}
    theirs = final["PyTorch, autocast"]
    off = {name: loss / theirs - 1 for name, loss in final.items()}
    for name, run in runs.items():
        print(
            f"{name:<20} mean loss of the last {LAST} steps {final[name]:.4f} ({off[name]:+.2%}), {run.seconds:.0f} s"
        )
    a.out.mkdir(parents=True, exist_ok=True)
    record = dict(config=config.to_dict(), device=torch.cuda.get_device_name(), final=final)
    record["losses"] = {name: run.losses for name, run in runs.items()}
    (a.out / "curves.json").write_text(json.dumps(record))
    plot(runs, a.out / "curves.png")
    return 0 if all(abs(value) <= BOUND for value in off.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
