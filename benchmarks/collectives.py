"""Times collectives and copies between GPUs, for the buckets of GPT-2 124M and 1558M.

torchrun --standalone --nproc_per_node 4 -m benchmarks.collectives

GB/s counts the bytes that each GPU sends: (n - 1) / n of the bucket, twice that for all_reduce.  Copies begin with a
barrier, whose time is in the first line.  The data are random numbers.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.sizes import bucket_elements
from gpt2_triton import device
from gpt2_triton.distributed.launcher_env import set_env_from_slurm
from gpt2_triton.distributed.process_group import ProcessGroup

BUCKETS = {
    f"{name} {part}": elements
    for name, size in (("124M", "d12"), ("1558M", "d48"))
    for part, elements in zip(("layer", "wte, wpe"), bucket_elements(size), strict=True)
}
WARM, TIMED = 5, 20


def main() -> None:
    set_env_from_slurm()
    group = ProcessGroup("cuda", 100)
    if group.rank == 0:
        print(f"{'bucket':<16}{'collective':<16}{'MB':>8}{'us':>9}{'GB/s':>8}", flush=True)
    own, arenas = group.allocate_shared(4 * max(BUCKETS.values()))
    with torch.cuda.stream(torch.cuda.Stream()):
        own.random_()
        barrier = measure(group.barrier) if arenas else 0.0
        if arenas and group.rank == 0:
            print(f"{'':<16}{'barrier':<16}{0.0:>8.1f}{barrier * 1e6:>9.1f}", flush=True)
        for name, n in BUCKETS.items():
            for line in lines(group, arenas, name, n - n % (group.size * 64)):
                if group.rank == 0:
                    print(line, flush=True)
    arenas.clear()
    group.close()


def lines(group: ProcessGroup, arenas: list[torch.Tensor], name: str, n: int) -> Iterator[str]:
    """Time a bucket of n elements in collectives, and in copies if ranks can read each other's arenas."""
    grads, params = (torch.empty(n, dtype=dtype, device="cuda") for dtype in (torch.float32, torch.bfloat16))
    own = slice(group.rank * n // group.size, (group.rank + 1) * n // group.size)
    for what, times, whole, function, arguments in (
        ("all_reduce", 2, grads, group.all_reduce, (grads,)),
        ("reduce_scatter", 1, grads, group.reduce_scatter, (grads[own], grads)),
        ("all_gather", 1, params, group.all_gather, (params, params[own])),
        ("copies, fp32", 1, grads, copy_parts, (group, arenas, grads)),
        ("copies, bf16", 1, params, copy_parts, (group, arenas, params)),
    )[: None if arenas else 3]:
        whole.normal_()
        seconds = measure(function, *arguments)
        rate = times * whole.nbytes * (group.size - 1) / group.size / seconds / 1e9
        yield f"{name:<16}{what:<16}{whole.nbytes / 1e6:>8.1f}{seconds * 1e6:>9.1f}{rate:>8.1f}"


def copy_parts(group: ProcessGroup, arenas: list[torch.Tensor], into: torch.Tensor) -> None:
    """Copy the other ranks' parts of a bucket."""
    group.barrier()
    parts = into.view(group.size, -1)
    for i in range(1, group.size):
        rank = (group.rank + i) % group.size
        parts[rank].copy_(arenas[rank][: parts[rank].nbytes].view(into.dtype))


def measure(function: Callable[..., None], *arguments: Any) -> float:
    """Return the median seconds of a call on the device."""
    times = []
    for i in range(WARM + TIMED):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function(*arguments)
        end.record()
        end.synchronize()
        if i >= WARM:
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    if not device.present():
        parser.exit(2, "error: collectives: needs CUDA GPUs, found none\n")
    main()
