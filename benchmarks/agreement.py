"""Trains GPT-2 124M from the same weights on the same tokens with this package and PyTorch, and compares every step.

    python -m benchmarks.agreement --tokens train_000000.bin --dtype bf16 --master fp32 --out agreement

PyTorch's reference runs in float32 without TF32; with --dtype bf16 it runs again under bf16 autocast.  Prints a row for
every 10th step and the largest differences, writes agreement.json and agreement.png, and exits with 1 if a bound is
exceeded: fp32 losses within 1e-4 relative at each step; bf16 losses within 0.02 and gradient norms within 2%.  The
bounds apply to PyTorch's run in the same arithmetic: fp32 for fp32, autocast (bf16 products, fp32 weights) for
--master fp32.  PyTorch has no stochastic rounding, so --master none is compared with its fp32 run.  (Autocast does not
compare: weights that start as bf16 numbers do not change under autocast before half an ulp of updates adds up.)
"""

import argparse
import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import gpt2_triton.kernels as K
from benchmarks import torch_reference
from benchmarks.accuracy.kernels import master
from benchmarks.options import NO_GPU
from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.console import Progress
from gpt2_triton.data.loader import TrainLoader
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.data.shards import open_shards
from gpt2_triton.device import device_name
from gpt2_triton.kernels.tuning import INTERPRET
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.step import StepResult
from gpt2_triton.training.lr_schedule import learning_rate, step_inputs

COUNTERPART = {("fp32", "none"): "PyTorch fp32", ("bf16", "none"): "PyTorch fp32", ("bf16", "fp32"): "PyTorch autocast"}
BOUNDS = {  # largest relative difference of losses, absolute difference of losses, relative difference of norms
    "fp32": dict(loss_relative=1e-4),
    "bf16": dict(loss_absolute=0.02, norm_relative=0.02),
}


class History(NamedTuple):
    losses: list[float]
    norms: list[float]
    seconds: float


class Pace:
    """The time of a run that ends after `steps` or `minutes`, whichever is first, and its progress on a terminal."""

    def __init__(self, what: str, steps: int, minutes: float = math.inf):
        self.most, self.begin = 60 * minutes, time.perf_counter()
        self._progress = Progress(what, steps, "steps")

    def seconds(self) -> float:
        return time.perf_counter() - self.begin

    def on_time(self, _: object = None) -> bool:
        return self.seconds() < self.most

    def advance(self, loss: float) -> None:
        """Count one more step, which had this loss."""
        self._progress.advance(1, f"loss {loss:.4f}")

    def end(self) -> float:
        """Remove the display; return the seconds of the run."""
        with self._progress:
            return self.seconds()


def make_config(a: argparse.Namespace) -> Config:
    """Return the configuration: GPT-2 124M, one micro-batch per step, a learning rate that rises to 2e-5.

    At a small rate the loss falls smoothly and a difference is an error.  At larger rates runs that differ in the last
    bit drift apart, two runs of PyTorch as well, and a difference means little (docs/engineering/numerics.md).
    """
    return Config.model_validate(
        dict(
            data=dict(train=str(a.tokens), val=str(a.tokens), tokenizer="gpt2"),
            train=dict(steps=a.steps, batch_size=a.batch, seq_len=a.seq_len, dtype=a.dtype),
            optim=dict(lr=2e-5, warmup=a.steps, schedule="constant", master=a.master),
            eval=dict(every=0),
        )
    )


def windows(config: Config) -> Iterator[np.ndarray]:
    """Return the tokens [B, T+1] of each step, as training draws them."""
    t = config.train
    shards = open_shards(config.data.train, config.model.vocab_size, t.seq_len)
    loader = TrainLoader(shards, t.seq_len, config.data.seed)
    return (loader.batch(step * t.batch_size, t.batch_size) for step in range(t.steps))


def initialised(config: Config) -> tuple[GPT2, Tensor]:
    """Return a model with new weights, and a copy of the weights on the host in fp32."""
    model = GPT2(config, K, device_name())
    model.initialise(config.train.seed)
    state = model.state
    weights = state.params if state.master_low is None else master(state.params, state.master_low)
    return model, weights.to("cpu", torch.float32, copy=True)


def _steps(model: GPT2, pace: Pace) -> Iterator[StepResult]:
    """Yield results, each when the next step has been launched: the device does not wait for the host's batches."""
    config, in_flight = model.config, None
    for step, tokens in enumerate(itertools.takewhile(pace.on_time, windows(config))):
        packed = pack_batch(None, tokens[:, :-1], tokens[:, 1:], config.model.vocab_size)
        model.begin_step(step_inputs(step, config, 1.0 / config.total_batch_tokens), step, config.train.seed)
        model.micro_step(packed, first=True)
        launched = model.end_step()
        if in_flight is not None:
            yield in_flight.result()
        in_flight = launched
    if in_flight is not None:
        yield in_flight.result()


def train_ours(config: Config, minutes: float = math.inf) -> tuple[History, Tensor, dict[str, int]]:
    """Train until the last step, or for `minutes` after the kernels are compiled.

    Return the history, the initial fp32 weights on the host, and the model's dimensions.
    """
    model, initial = initialised(config)
    if not model.eager:
        model.compile()
    losses, norms, pace = [], [], Pace("gpt2_triton", config.train.steps, minutes)
    for result in _steps(model, pace):
        losses.append(result.loss)
        norms.append(result.norm)
        assert result.applied, f"step {len(losses)}: loss {result.loss}, gradient norm {result.norm}"
        pace.advance(result.loss)
    return History(losses, norms, pace.end()), initial, model.dims


def train_torch(
    config: Config, initial: Tensor, dims: dict[str, int], autocast: bool, compiled: bool = False
) -> History:
    """Train PyTorch's model from the same weights."""
    o, steps, device = config.optim, config.train.steps, device_name()
    params = torch_reference.leaves(initial.to(device), dims)
    tokens = (torch.from_numpy(window).to(device) for window in windows(config))
    pairs = ((t[:, :-1], t[:, 1:]) for t in tokens)
    lrs = [learning_rate(step, o, steps) for step in range(steps)]
    pace = Pace("PyTorch", steps)
    losses, norms = torch_reference.train(
        params, dims, pairs, lrs,
        betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, clip=o.clip, embed_lr=o.embed_lr,
        autocast=autocast, compiled=compiled, report=pace.advance,
    )  # fmt: skip
    return History(losses, norms, pace.end())


def differences(ours: History, torchs: History) -> dict[str, float]:
    """Return the largest differences over all steps."""
    a, b = np.array(ours.losses), np.array(torchs.losses)
    p, q = np.array(ours.norms), np.array(torchs.norms)
    return dict(
        loss_relative=float(np.max(np.abs(a - b) / b)),
        loss_absolute=float(np.max(np.abs(a - b))),
        norm_relative=float(np.max(np.abs(p - q) / q)),
    )


def print_table(runs: dict[str, History]) -> None:
    print("step" + "".join(f"{f'{what} {name}':>24}" for what in ("loss", "norm") for name in runs))
    steps = len(runs["ours"].losses)
    for step in sorted({0, *range(9, steps, 10), steps - 1}):
        values = [run.losses[step] for run in runs.values()] + [run.norms[step] for run in runs.values()]
        print(f"{step + 1:>4}" + "".join(f"{value:>24.6f}" for value in values))
    print("s   " + "".join(f"{run.seconds:>24.1f}" for run in runs.values()))


def plot(runs: dict[str, History], out: Path) -> None:
    """Draw the differences of our losses and gradient norms from PyTorch's; the curves themselves coincide."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ours = runs["ours"]
    for (name, run), style in zip([item for item in runs.items() if item[0] != "ours"], ("-o", "--s")):
        steps, losses, norms = range(1, len(run.losses) + 1), np.array(run.losses), np.array(run.norms)
        left.plot(steps, ours.losses - losses, style, ms=3, lw=1.2, label=name)
        right.plot(steps, 100 * (ours.norms / norms - 1), style, ms=3, lw=1.2, label=name)
    left.set(xlabel="step", title="our loss minus PyTorch's")
    right.set(xlabel="step", title="our gradient norm, % above PyTorch's")
    for axes in (left, right):
        axes.axhline(0, color="0.6", lw=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(out, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True, help="a shard of GPT-2 tokens, made by `prepare text`")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument("--seq_len", type=int, default=1024)
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--master", choices=["none", "fp32"], default="none")
    parser.add_argument("--out", type=Path, required=True, help="directory for agreement.json and agreement.png")
    a = parser.parse_args()
    if (a.dtype, a.master) not in COUNTERPART:
        parser.error("--master fp32 goes with --dtype bf16: fp32 weights need no master copy")
    if not (device.present() or INTERPRET):
        parser.exit(2, f"error: agreement: {NO_GPU}\n")
    torch.set_float32_matmul_precision("highest")
    config, runs = make_config(a), {}
    runs["ours"], initial, dims = train_ours(config)
    gc.collect()  # frees our arena before PyTorch allocates its activations
    torch.cuda.empty_cache()
    runs["PyTorch fp32"] = train_torch(config, initial, dims, autocast=False)
    if a.dtype == "bf16":
        runs["PyTorch autocast"] = train_torch(config, initial, dims, autocast=True)
    print_table(runs)
    found = {name: differences(runs["ours"], run) for name, run in runs.items() if name != "ours"}
    for name, values in found.items():
        print(f"largest difference from {name}: " + ", ".join(f"{key} {value:.2e}" for key, value in values.items()))
    counterpart = COUNTERPART[a.dtype, a.master]
    passed = all(found[counterpart][key] <= bound for key, bound in BOUNDS[a.dtype].items())
    print(f"{'agreed' if passed else 'DISAGREED'}: bounds against {counterpart} are {BOUNDS[a.dtype]}")
    a.out.mkdir(parents=True, exist_ok=True)
    record = dict(config=config.to_dict(), device=torch.cuda.get_device_name(), passed=passed, largest=found)
    record["runs"] = {name: run._asdict() for name, run in runs.items()}
    (a.out / "agreement.json").write_text(json.dumps(record, indent=1))
    plot(runs, a.out / "agreement.png")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
