"""Measures generated tokens per second beside transformers: `python -m benchmarks sample`.

Weights are random and in bf16.  Each sequence has a prompt, and the next tokens are drawn at
temperature 1 among all.  `static` is transformers' generate with a static cache, whose steps
torch.compile compiles; `dynamic` is its default.  A program and a size are a process of their own;
the last of several calls counts.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.record import Target, slug
from benchmarks.speed.sizes import work_of
from gpt2_triton.commands.app import select_device

PROMPT, TOKENS = 32, 256
SEQUENCES = (1, 32)
PROGRAMS = {"ours": 2, "dynamic": 2, "static": 3}  # and their calls

Call = Callable[[], object]


def sample(sizes: list[str], target: Target) -> int:
    """Measure all programs, and write the record's section `sampling`; return 1 if one failed."""
    figures: dict[str, Any] = {}
    failed = 0
    for size in sizes:
        for program in PROGRAMS:
            command = [sys.executable, "-m", "benchmarks.speed.sampling", size, program]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            print(size, program, done.stdout.strip() or f"exit code {done.returncode}", flush=True)
            failed |= bool(done.returncode)
            for line in re.findall(r"(?m)^\{.*", done.stdout):  # a library may print too
                for sequences, rate in json.loads(line).items():
                    figures[f"{slug(size)}.{program}_{sequences}"] = rate
            target.write("sampling", figures, "torch", "triton", "transformers")
    return failed


def ours(size: str, sequences: int) -> Call:
    """Return a call that generates by this package."""
    import gpt2_triton.kernels as K
    from gpt2_triton.inference.generate import generate
    from gpt2_triton.inference.sampling import Sampling
    from gpt2_triton.model.compiling import compile_decoding
    from gpt2_triton.model.model import Model

    model = Model(work_of(size).config(), K, "cuda", batch=1, sequences=sequences)
    model.state.params.normal_(0, 0.02)
    how = Sampling()
    compile_decoding(model, *how)
    prompts = [[*range(PROMPT)]] * sequences
    return lambda: [*generate(model, prompts, TOKENS, range(sequences), how)]


def theirs(size: str, sequences: int, cache: str | None) -> Call:
    """Return a call that generates by transformers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from gpt2_triton.checkpoint.huggingface import config_of

    torch._dynamo.reset()
    config = AutoConfig.for_model(**config_of(work_of(size).config().model, "bf16"))
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None  # each text has all tokens
    ids = torch.arange(PROMPT, device="cuda").repeat(sequences, 1)
    options = dict(attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=TOKENS)
    options |= dict(do_sample=True, top_k=0, cache_implementation=cache)
    return lambda: model.generate(ids, **options)


def measure(size: str, program: str, sequences: int) -> float:
    """Return the tokens per second of the last call of a program."""
    import torch

    cache = "static" if program == "static" else None
    call = ours(size, sequences) if program == "ours" else theirs(size, sequences, cache)
    seconds = 0.0
    for _ in range(PROGRAMS[program]):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    return sequences * TOKENS / seconds


if __name__ == "__main__":
    select_device(silent=True)
    size, program = sys.argv[1:]
    for sequences in SEQUENCES:
        print(json.dumps({sequences: measure(size, program, sequences)}), flush=True)
