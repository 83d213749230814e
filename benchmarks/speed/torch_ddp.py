"""Times PyTorch's DistributedDataParallel beside independent runs on the same GPUs, as multi_gpu.py does for ours.

torchrun --standalone --nproc_per_node 4 -m benchmarks.speed.torch_ddp SIZE [--steps 30] [--rounds 2] [--json FILE]

The model is torch_gpt2.GPT2.  Its gradients are bf16, so DDP sends half as many bytes as gpt2_triton.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.speed.multi_gpu import SETTLE, speed_table
from benchmarks.speed.sizes import MODELS, T
from benchmarks.speed.torch_gpt2 import batch_of, build, run_steps
from gpt2_triton import device
from gpt2_triton.distributed.launcher_env import set_env_from_slurm
from gpt2_triton.distributed.process_group import ProcessGroup


def main(size: str, steps: int, rounds: int, out: Path | None) -> None:
    """Measure on the ranks that torchrun started; rank 0 prints."""
    set_env_from_slurm()
    group = ProcessGroup("cuda", 300)
    control, B = group.control("ddp"), MODELS[size].batch
    batch, one = batch_of(B), torch.zeros(1, device="cuda")
    (alone, alone_optimizer), (module, optimizer) = build(size), build(size)
    together = DistributedDataParallel(module, gradient_as_bucket_view=True)
    kinds = [
        ("alone", torch.compile(alone), alone_optimizer, lambda: None),
        ("in step", torch.compile(alone), alone_optimizer, lambda: group.all_reduce(one)),
        ("together", torch.compile(together), optimizer, lambda: None),
    ]
    times: dict[str, list[float]] = {name: [] for name, *_ in kinds}
    for _, model, its, between in kinds:  # compile
        run_steps(model, its, batch, 2, between)
    dist.barrier()
    for _ in range(rounds):
        for name, model, its, between in kinds:
            times[name] += run_steps(model, its, batch, SETTLE + steps, between)[0][SETTLE:]
    everyone = control.all_gather(times)
    if group.rank == 0:
        print(f"PyTorch DDP, {size}, B {B}, {group.size} GPUs")
        print(speed_table(everyone, tokens=B * T))
        if out:
            out.write_text(json.dumps(dict(ranks=everyone)) + "\n")
    group.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=MODELS, nargs="?", default="d12")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per stretch")
    parser.add_argument("--rounds", type=int, default=2, help="stretches of each kind")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the milliseconds of all steps")
    given = parser.parse_args()
    if not device.present():
        parser.exit(2, "error: torch_ddp: needs CUDA GPUs, found none\n")
    main(given.size, given.steps, given.rounds, given.json)
