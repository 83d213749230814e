"""Measures the cost of communication: GPUs train independently and jointly, by turns.

torchrun --standalone --nproc_per_node 4 -m benchmarks.speed.multi_gpu SIZE [--precision fp8]
    [--recompute none] [--optim muon] [--torch] [--json FILE] [--parallel.zero 2] ...

The GPUs of a machine differ in speed by some percent, and at the power limit their
clocks vary.  A joint step waits for the slowest GPU, even if nothing is exchanged.  So
three kinds of steps are timed:

alone      independent runs on all GPUs at the same time
in step    the same, but a step begins when all GPUs have ended the previous
           step: the cost of waiting alone
together   one model on all GPUs

A round times a stretch of steps of each kind.  Power, and so speed, depends on temperature and on
the numbers that are multiplied.  So our stretches begin with the same weights, and every second
round reverses the kinds.  Steps before the timed ones let ranks synchronise, graphs be captured and
clocks fall; round 0 has no others.

--torch times PyTorch's DistributedDataParallel: the model, tokens and steps of
torch_gpt2.py, `alone` under no_sync.  Its gradients are bf16 and views of DDP's buckets, so
it sends two thirds of the bytes.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.layout import aligned
from benchmarks.runs import Keys
from benchmarks.speed import torch_gpt2
from benchmarks.speed.our_gpt2 import begun, packed_batch, run_steps, shared
from benchmarks.speed.sizes import SIZES, work_of
from gpt2_triton import device
from gpt2_triton import kernels as K  # after our_gpt2, which selects the device
from gpt2_triton.commands.app import AT_LEAST_1, main, make_app
from gpt2_triton.config.config import Config
from gpt2_triton.distributed.launcher_env import rank_and_size, set_env_from_slurm
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.errors import ConfigError
from gpt2_triton.model.arena import GIB
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.model import Model

app = make_app("python -m benchmarks.speed.multi_gpu")
ROUNDS = 2  # stretches of each kind
# a name, and a function that returns the milliseconds of N steps
Kind = tuple[str, Callable[[int], list[float]]]


class Ranks(ProcessGroup):
    """The ranks, which allocate `least` bytes or more."""

    least = 0

    def allocate_shared(self, nbytes: int) -> tuple[Tensor, list[Tensor]]:
        return super().allocate_shared(max(nbytes, self.least))


class Pair:
    """An independent model and one model of all ranks, on the same tokens and in the
    same memory: only one trains.
    """

    def __init__(self, group: Ranks, config: Config):
        def allocate(nbytes: int) -> tuple[Tensor, list[Tensor]]:
            group.least = nbytes
            self.together = Model(shared(config, group.size), K, group.device, group=group)
            return self.together.arena, []

        # the other model is made once this one has seen that its plan fits into the free memory
        alone: Any = SimpleNamespace(
            rank=0, size=1, allocate_shared=allocate, first_on_host=group.first_on_host
        )
        self.alone = Model(config, K, group.device, group=alone)
        self.packed = packed_batch(config)
        for model in (self.alone, self.together):
            compile_run(model)
        one = torch.zeros(1, device=group.device)
        self.kinds: list[Kind] = [
            ("alone", lambda steps: self.times(self.alone, steps)),
            ("in step", lambda steps: self.times(self.alone, steps, lambda: group.all_reduce(one))),
            ("together", lambda steps: self.times(self.together, steps)),
        ]

    def times(
        self, model: Model, steps: int, between: Callable[[], None] = lambda: None
    ) -> list[float]:
        """Return the milliseconds of a model's first steps."""
        begun(model, self.packed)
        return [
            result.seconds * 1e3 for result in run_steps(model, self.packed, range(steps), between)
        ]


def pytorch(size: str) -> list[Kind]:
    """Return the kinds of PyTorch's steps."""
    model, optimizers = torch_gpt2.build(size)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiled = torch.compile(ddp)
    batch = torch_gpt2.batch_of(size, SIZES[size].batch)

    def together(steps: int) -> list[float]:
        return torch_gpt2.run_steps(compiled, optimizers, batch, steps)[0]

    def alone(steps: int) -> list[float]:
        with ddp.no_sync():
            return together(steps)

    return [("alone", alone), ("together", together)]


def by_turns(kinds: list[Kind], steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of steps of each kind, `steps` per stretch."""
    out: dict[str, list[float]] = {name: [] for name, _ in kinds}
    settle = 3 * steps // 5
    for turn in range(1 + rounds):
        for name, run in kinds[:: -1 if turn % 2 else 1]:
            out[name] += run(settle + (steps if turn else 0))[settle:]
    return out


def speed_table(everyone: list[dict[str, list[float]]], tokens: int) -> str:
    """Return one line per rank with median milliseconds, then tokens/s of joint
    steps relative to other kinds.
    """
    ranks = [{kind: statistics.median(times) for kind, times in rank.items()} for rank in everyone]
    lines = [["rank", *(f"{kind} ms" for kind in ranks[0])]]
    lines += [[str(i), *(f"{ms:.2f}" for ms in rank.values())] for i, rank in enumerate(ranks)]
    alone, step = ([rank[kind] for rank in ranks] for kind in ("alone", "together"))
    ms = statistics.median(step)
    mean = statistics.fmean(1 / a for a in alone)
    of = f"{max(alone) / ms:.1%} of the slowest alone, {1 / ms / mean:.1%} of the mean alone"
    return f"{aligned(lines)}\ntogether {tokens / ms * 1e3:,.0f} tokens/s on each GPU: {of}"


def title_of(config: Config) -> str:
    t = config.train
    work = f"{config.model.n_layer} layers, {t.precision}, {config.optim.name}, B {t.batch_size}"
    return f"{work}, recompute {config.memory.recompute}, ZeRO-{config.parallel.zero}"


@app.default
def measure(
    size: str,
    *keys: Keys,
    recompute: str | None = None,
    precision: Literal["bf16", "fp8"] = "bf16",
    optim: Literal["adamw", "muon"] = "adamw",
    torch_: bool = False,
    steps: Annotated[int, AT_LEAST_1] = 20,
    json_: Path | None = None,
) -> None:
    """Measure on the ranks that torchrun started; rank 0 prints.

    Args:
        size: As those of `python -m benchmarks steps`.
        keys: Keys of a configuration, as --parallel.zero 2.
        recompute: memory.recompute.
        precision: train.precision.
        optim: optim.name.
        torch_: PyTorch's DistributedDataParallel in bf16.
        steps: Timed steps per stretch.
        json_: File for the milliseconds of all steps.
    """
    set_env_from_slurm()
    if not device.present() or rank_and_size()[1] == 1:
        raise ConfigError("multi_gpu: needs CUDA GPUs, and two ranks or more of torchrun or srun")
    config = work_of(size, None, recompute, precision, optim, keys).config()
    group = Ranks("cuda", 300)
    control = group.control("multi_gpu")
    pair = None if torch_ else Pair(group, config)
    times = control.all_gather(by_turns(pair.kinds if pair else pytorch(size), steps, ROUNDS))
    used = control.all_gather((torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) / GIB)
    if group.rank == 0:
        title = title_of(config) if pair else f"PyTorch, {size}"
        print(f"{title}, {group.size} GPUs, in use {max(used):.2f} GiB")
        print(speed_table(times, tokens=config.train.step_tokens))
        if json_:
            json_.write_text(json.dumps(dict(ranks=times)) + "\n")
    if pair:
        pair.together.release_graphs()
    group.close()


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
