"""Our side of the comparison in bench.py, step by step as the trainer launches it.  Prints one JSON line.

python -m benchmarks.our_gpt2 SIZE BATCH STEPS START RECOMPUTE     START: time.time() when the process was started
"""

import json
import statistics
import sys
import time

import torch

import gpt2_triton.kernels as K
from benchmarks.sizes import config_of, tokens_of
from gpt2_triton.arena import GIB
from gpt2_triton.data.loader import pack_batch
from gpt2_triton.model import GPT2
from gpt2_triton.optim import hyper_row


def main(size: str, batch: int, steps: int, start: float, recompute: str) -> None:
    config = config_of(size, batch, recompute)
    free, total = torch.cuda.mem_get_info()
    model = GPT2(config, K, "cuda")
    compiled = model.compile()
    model.initialise(config.train.seed)
    packed = pack_batch(None, *tokens_of(batch), config.model.vocab_size).pin_memory()
    hyper = hyper_row(0, config, 1.0 / config.total_batch_tokens)
    seconds, first_step, in_flight = [], 0.0, None
    for step in range(steps):
        model.begin_step(hyper, step, config.train.seed)
        model.micro_step(packed, first=True)
        launched = model.end_step()
        if in_flight is not None:
            seconds.append(in_flight.result().seconds)
        in_flight = launched
        if step == 0:
            torch.cuda.synchronize()
            first_step = time.time() - start
    result = in_flight.result()
    seconds.append(result.seconds)
    grown = free - torch.cuda.mem_get_info()[0]
    report = dict(ms=statistics.median(seconds[5:]) * 1e3, gib=grown / GIB, planned=model.plan.total / GIB)
    report |= dict(first_step=first_step, compile=compiled.seconds, kernels=compiled.kernels, loss=result.loss)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), sys.argv[5])
