"""Trains as `gpt2-triton train` does, with one change that the package does not have, to measure what it gains.

    python -m benchmarks.levers LEVER CONFIG [--key value ...]

    cautious        decays a weight only if the optimizer moves it towards 0 too (Chen et al. 2025,
                    https://arxiv.org/abs/2510.12402)
    decay_schedule  multiplies the decay by lr / optim.lr, so that it falls with the square of the learning rate; for
                    wte and wpe with optim.embed_lr, by at most 1
    zero_residual   begins with attproj and fcproj at 0, so that each layer begins as the identity
    batch_warmup    takes half of a step's micro-batches in the first half of the steps: 3/4 of the tokens that
                    metrics.jsonl counts
    bf16_at_end     trains in fp8, if the options say so, up to 9/10 of the steps, and then in bf16; needs --run_dir

One GPU, and no --resume.  benchmarks/losses/levers_d12.yaml is the series of the first four, fp8_d12.yaml has the last.
"""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton import commands
from gpt2_triton.commands.app import main as run_command
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError, UserError
from gpt2_triton.kernels import device_math, muon, step_io
from gpt2_triton.model import gpt2
from gpt2_triton.model.buffers import param_views
from gpt2_triton.training.step_queue import StepQueue

PEAK = tl.constexpr(1.0)  # optim.lr; set before a kernel is compiled


@triton.jit
def _cautious(w, update, lr, decay):
    return lr * (update + tl.where(update * w > 0.0, decay, 0.0) * w)


@triton.jit
def _scheduled(w, update, lr, decay):
    return lr * (update + decay * tl.minimum(lr / PEAK, 1.0) * w)


def replace_update(function: Any) -> None:
    """Let the kernels of both optimizers call `function` in place of device_math.decayed_update."""
    for module in (device_math, muon):
        assert hasattr(module, "decayed_update")
        module.decayed_update = function


def _cautious_decay(words: Sequence[str]) -> None:
    replace_update(_cautious)


def _decay_schedule(words: Sequence[str]) -> None:
    global PEAK
    PEAK = tl.constexpr(Config.load(words[0], _overrides(words)).optim.lr)
    replace_update(_scheduled)


def _overrides(words: Sequence[str]) -> dict[str, str]:
    """Return the keys of a command line that begins with the configuration, without --run_dir DIR."""
    rest = list(words[1:])
    if "--run_dir" in rest:
        at = rest.index("--run_dir")
        del rest[at : at + 2]
    return parse_overrides(rest)


def _zero_residual(words: Sequence[str]) -> None:
    initialise = gpt2.init_weights

    def without_residual(K: Any, s: Any, dims: dict[str, int], rank: int, seed: int) -> None:
        initialise(K, s, dims, rank, seed)
        for flat in (s.params, s.master_low):
            if flat is not None:
                views = param_views(flat, dims)
                for weight in (*views.attprojw, *views.fcprojw):
                    weight.zero_()

    gpt2.init_weights = without_residual


def _batch_warmup(words: Sequence[str]) -> None:
    launch = StepQueue.launch

    def launch_half(
        self: StepQueue, step: int, inputs: np.ndarray, batches: Iterator[Tensor], with_stats: bool
    ) -> None:
        model, shape = self._model, self._model.shape
        if step < model.config.train.steps // 2:
            assert shape.accumulation % 2 == 0, shape
            model.shape = dataclasses.replace(shape, accumulation=shape.accumulation // 2)
            inputs[step_io.LOSS_SCALE] *= 2
        launch(self, step, inputs, batches, with_stats)
        model.shape = shape

    StepQueue.launch = launch_half  # type: ignore[method-assign]


def _bf16_at_end(words: Sequence[str]) -> None:
    if "--run_dir" not in words:
        raise ConfigError("bf16_at_end: needs --run_dir, the directory in which the run continues in bf16")
    steps = Config.load(words[0], _overrides(words)).train.steps
    launch = StepQueue.launch

    def launch_or_stop(
        self: StepQueue, step: int, inputs: np.ndarray, batches: Iterator[Tensor], with_stats: bool
    ) -> None:
        if step == 9 * steps // 10 - 1:
            os.kill(os.getpid(), signal.SIGTERM)  # saves a checkpoint after this step or the next
        launch(self, step, inputs, batches, with_stats)

    StepQueue.launch = launch_or_stop  # type: ignore[method-assign]


def _continued_in_bf16(words: Sequence[str]) -> list[str]:
    """Return the command that continues a run of these words in bf16."""
    words = list(words)
    if "--train.precision" in words:
        words[words.index("--train.precision") + 1] = "bf16"
    return [sys.executable, "-m", "gpt2_triton", "train", *words, "--resume", "must"]


LEVERS: dict[str, Callable[[Sequence[str]], None]] = {
    "cautious": _cautious_decay,
    "decay_schedule": _decay_schedule,
    "zero_residual": _zero_residual,
    "batch_warmup": _batch_warmup,
    "bf16_at_end": _bf16_at_end,
}


def main(words: Sequence[str]) -> int:
    if {"-h", "--help"} & {*words[:2]}:
        print((__doc__ or "").rstrip())
        return 0
    if len(words) < 2 or words[0] not in LEVERS:
        print(f"usage: python -m benchmarks.levers {'|'.join(LEVERS)} CONFIG [--key value ...]", file=sys.stderr)
        return 2
    try:
        LEVERS[words[0]](words[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    code = run_command(commands.tools, ["train", *words[1:]])
    if words[0] == "bf16_at_end" and code == 128 + signal.SIGTERM:
        return subprocess.run(_continued_in_bf16(words[1:])).returncode
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
