"""Times steps of this package for steps.py, with the trainer's order of
launches.  Prints one JSON line.

python -m benchmarks.speed.our_gpt2 SIZE BATCH STEPS START [--recompute none]
[--precision fp8] [--optim muon] ...

Further options are keys of a configuration, such as --fp8.keep_bf16 none.  Under
torchrun each GPU has this work.
"""

# ruff: noqa: E402, torch is imported as by a run
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Annotated

from gpt2_triton.commands.app import AT_LEAST_1, main, make_app, select_device

select_device(silent=True)  # opens the GPU meanwhile

import torch

import gpt2_triton.kernels as K
from benchmarks.runs import Keys
from benchmarks.speed.energy import Power
from benchmarks.speed.sizes import Work, tokens_of, work_of
from gpt2_triton.config.config import Config
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.model.arena import GIB
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.fp8 import calibrate
from gpt2_triton.model.model import Model
from gpt2_triton.model.step import StepResult
from gpt2_triton.training.lr_schedule import step_inputs

app = make_app("python -m benchmarks.speed.our_gpt2")


def run_steps(
    model: Model, packed: torch.Tensor, numbers: range, between: Callable[[], None] = lambda: None
) -> Iterator[StepResult]:
    """Yield the results of steps on the micro-batch `packed`; `between` is called
    after each launch of a step.

    The result of a step is read after the next launch, so the device never waits for the host.
    """
    config = model.config
    accumulation = model.shape.accumulation
    in_flight = None
    for number in numbers:
        model.begin_step(step_inputs(number, config), number, config.train.seed)
        for i in range(accumulation):
            model.micro_step(packed, first=i == 0, last=i == accumulation - 1)
        launched = model.end_step()
        between()
        if in_flight is not None:
            yield in_flight.result()
        in_flight = launched
    if in_flight is not None:
        yield in_flight.result()


def begun(model: Model, packed: torch.Tensor) -> Model:
    """Give a model its initial weights, and in fp8 its first scales; return the model."""
    model.initialise(model.config.train.seed)
    if model.has_fp8:
        calibrate(model, [packed], step_inputs(0, model.config))
    return model


def packed_batch(config: Config) -> torch.Tensor:
    """Return a micro-batch of random tokens, equal in every call."""
    return pack_batch(None, *tokens_of(config), config.model.vocab_size).pin_memory()


def shared(config: Config, ranks: int) -> Config:
    """Return the configuration in which each of several GPUs has the work of one GPU alone."""
    tokens = ranks * config.train.step_tokens
    return config.replace(train={"total_batch_tokens": tokens})


def measure(work: Work, steps: int, start: float) -> None:
    group = ProcessGroup("cuda", 300)
    config = shared(work.config(), group.size)
    free, _ = torch.cuda.mem_get_info()
    model = Model(config, K, "cuda", group=group)
    compile_run(model)
    packed = packed_batch(config)
    list(run_steps(begun(model, packed), packed, range(1)))
    first_step = time.time() - start
    list(run_steps(model, packed, range(1, 5)))
    with Power() as power:
        results = list(run_steps(model, packed, range(5, steps)))
    grown = free - torch.cuda.mem_get_info()[0]
    seconds = statistics.median(result.seconds for result in results)
    report = dict(ms=seconds * 1e3, joules=power.joules(seconds), gib=grown / GIB)
    report |= dict(planned=model.plan.total / GIB, first_step=first_step)
    print(json.dumps(report), flush=True)
    model.release_graphs()
    group.close()


@app.default
def time_steps(
    size: str,
    batch: Annotated[int, AT_LEAST_1],
    steps: int,
    start: float,
    *keys: Keys,
    recompute: str | None = None,
    precision: str = "bf16",
    optim: str = "adamw",
) -> None:
    """Time steps of this package, and print one line of JSON.

    Args:
        size: As those of `python -m benchmarks steps`.
        batch: Sequences per step.
        steps: Steps; the first five are not counted.
        start: time.time() when the process was started.
        keys: Keys of a configuration, as --fp8.keep_bf16 none.
        recompute: memory.recompute.
        precision: train.precision.
        optim: optim.name.
    """
    measure(work_of(size, batch, recompute, precision, optim, keys), steps, start)


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
