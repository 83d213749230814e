"""Measures the cost of tensor statistics and of the outlier detector on a GPU.

python -m benchmarks.tensor_stats [SIZE BATCH RECOMPUTE]     default d12 64 gelu

Steps with and without statistics alternate, so that both run at the same clocks.  Times are from the end of one step
to the end of the next, copies to the host included.  The outlier detector is part of every step and timed separately.
"""

import argparse
import statistics

import torch
import triton

import gpt2_triton.kernels as K
from benchmarks.sizes import SIZES, config_of, tokens_of
from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.distributed.control import SINGLE_PROCESS
from gpt2_triton.model.buffers import WINDOW
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.tensor_stats import FORWARD, format_summary
from gpt2_triton.training.lr_schedule import step_inputs

STEPS, WARM, EVERY = 60, 10, 10


def step_times(model: GPT2, packed: torch.Tensor) -> tuple[float, float, str]:
    """Return the median milliseconds of a step without and with statistics, and the summary of the last ones."""
    config, times, in_flight = model.config, ([], []), None
    for number in range(STEPS):
        with_stats = number % 2 == 1
        inputs = step_inputs(number, config, 1.0 / config.total_batch_tokens)
        model.begin_step(inputs, number, config.train.seed, with_stats)
        model.micro_step(packed, first=True)
        launched = with_stats, model.end_step()
        if in_flight is not None:
            seconds = in_flight[1].result().seconds
            if number > WARM:
                times[in_flight[0]].append(seconds * 1e3)
        in_flight = launched
    in_flight[1].result()
    record = model.stats_recorder.read(in_flight[1].stats, 1, SINGLE_PROCESS)
    return *map(statistics.median, times), format_summary(record)


def main(size: str, batch: int, recompute: str) -> None:
    config = config_of(size, batch, recompute)
    config = Config.model_validate(config.to_dict() | {"log": {"stats_every": EVERY}})
    model = GPT2(config, K, "cuda")
    model.compile()
    model.initialise(config.train.seed)
    packed = pack_batch(None, *tokens_of(batch), config.model.vocab_size).pin_memory()
    plain, with_stats, extremes = step_times(model, packed)
    a = model.train_view.a
    elements = sum(t.numel() for name in FORWARD for t in getattr(a, name)) + len(a.x) * a.dx[0].numel()
    read = elements * a.dx[0].element_size() + model.dims["N"] * (12 + a.dx[0].element_size())
    print(f"{size}, batch {batch}, recompute {recompute}: step {plain:.2f} ms, with statistics {with_stats:.2f} ms")
    print(
        f"statistics {with_stats - plain:.2f} ms for {read / 1e9:.1f} GB read "
        f"({read / 1e6 / (with_stats - plain):.0f} GB/s)"
    )
    print(f"with log.stats_every {EVERY}: {(with_stats - plain) / EVERY / plain:.2%} of the time (bound: 1%)")
    stats, z, window = (torch.ones(shape, device="cuda") for shape in (4, 2, (2, WINDOW + 1)))
    us = triton.testing.do_bench_cudagraph(lambda: K.skip_outliers(stats, window, z, model.state.step_in)) * 1e3
    print(f"outlier detector {us:.1f} us per step, {us / 1e3 / plain:.3%}")
    print(extremes)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.tensor_stats", description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SIZES, nargs="?", default="d12")
    parser.add_argument("batch", type=int, nargs="?", default=64)
    parser.add_argument("recompute", choices=RECOMPUTE_LEVELS, nargs="?", default="gelu")
    given = parser.parse_args()
    if not device.present():
        parser.exit(2, "error: tensor_stats: needs a CUDA GPU, found none\n")
    main(given.size, given.batch, given.recompute)
