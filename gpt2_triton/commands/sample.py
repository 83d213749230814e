"""Command `sample`: print texts that a model writes."""

import sys
import time
from pathlib import Path
from typing import Annotated

from gpt2_triton.commands.app import AT_LEAST_1, select_device
from gpt2_triton.console import printable
from gpt2_triton.inference.sampling import Sampling


def sample(
    checkpoint: Path,
    /,
    *,
    prompt: str = "",
    tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 42,
    num: Annotated[int, AT_LEAST_1] = 1,
    batch: Annotated[int, AT_LEAST_1] = 64,
) -> None:
    """Print texts that a model writes.

    Parameters
    ----------
    checkpoint: Path
        A run, one of its step directories, RUN/best, or hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE.
    prompt: str
        Text to continue; empty starts at the end-of-text token.
    tokens: int
        Number of tokens to sample for each text.
    temperature: float
        Softmax temperature; 0 takes the most likely token.
    top_k: int
        Sample among the k most likely tokens; 0 among all.
    top_p: float
        Of the tokens that top_k keeps, sample among the fewest that together have probability p; 1 among all.
    seed: int
        Seed of the first text; each next text adds 1.
    num: int
        Number of texts. A single text is printed while it is decoded; between several stands ---.
    batch: int
        Largest number of texts decoded at once; it changes the speed, not the random numbers of a text.
    """
    how = Sampling(temperature, top_k, top_p)
    how.check("--", tokens, seed)
    select_device(silent=True)  # stdout is the text
    from gpt2_triton.checkpoint.sources import load_weights
    from gpt2_triton.data.tokenizer import get_tokenizer
    from gpt2_triton.inference.load import load_for_decoding
    from gpt2_triton.inference.sample import continuations, stream
    from gpt2_triton.model.compiling import compile_decoding

    config, tensors = load_weights(str(checkpoint))
    model, tokenizer = load_for_decoding(config, tensors, min(num, batch)), get_tokenizer(config.data.tokenizer)
    if model.arena.device.type == "cuda":
        compile_decoding(model, *how)
    shown = printable if sys.stdout.isatty() else str  # a file or a pipe gets the text as it is
    start = time.perf_counter()
    if num == 1:
        print(shown(prompt), end="", flush=True)
        for piece in stream(model, tokenizer, prompt, tokens, how, seed):
            print(shown(piece), end="", flush=True)
        print(flush=True)
    else:
        for n, text in enumerate(continuations(model, tokenizer, prompt, tokens, how, seed, num)):
            if n:
                print("---")
            print(shown(text), flush=True)
    seconds = time.perf_counter() - start
    rate = f"{num * tokens} tokens in {seconds:.2f} s, {num * tokens / seconds:,.0f} per second"
    slow = " (no CUDA GPU found: in Triton's interpreter)" if model.arena.device.type == "cpu" else ""
    print(rate + slow, file=sys.stderr)
