"""Print or return text that a model samples after a prompt.

Tokens are sampled on the device with random numbers keyed by the seed of a text and the number of its tokens so far: a
text depends on the weights, the prompt and the seed alone.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.config.config import Config
from gpt2_triton.console import is_terminal, print_line, printable, valid_unicode
from gpt2_triton.data.tokenizer import Tokenizer, get_tokenizer
from gpt2_triton.inference.generate import generate
from gpt2_triton.inference.load import load_for_decoding
from gpt2_triton.model.gpt2 import GPT2


def sample_text(
    path: Path, prompt: str, tokens: int, temperature: float, top_k: int, top_p: float, seed: int, num: int, batch: int
) -> None:
    """Print `num` continuations of `prompt` by the weights at `path` (a source of sources.py).

    Up to `batch` texts are decoded at once.  A single text is printed while it is decoded.  The rate goes to stderr.
    Control characters are escaped on a terminal only: a file or a pipe gets the text as it is.
    """
    shown = printable if is_terminal(sys.stdout) else str
    config, tensors = load_weights(str(path))
    model = load_for_decoding(config, tensors, min(num, batch))
    tokenizer = get_tokenizer(config.data.tokenizer)
    if model.arena.device.type == "cuda":
        model.compile_decoding(temperature, top_k, top_p)
    start = time.perf_counter()
    if num == 1:
        print(shown(prompt), end="", flush=True)
        steps = generate(model, encode_prompt(tokenizer, prompt), tokens, [seed], temperature, top_k, top_p)
        for piece in stream_text(tokenizer, (token for [token] in steps)):
            print(shown(piece), end="", flush=True)
        print(flush=True)
    else:
        for text in continuations(model, tokenizer, prompt, tokens, temperature, top_k, top_p, seed, num):
            print(shown(text), flush=True)
    seconds = time.perf_counter() - start
    print_line(f"{num * tokens} tokens in {seconds:.2f} s, {num * tokens / seconds:,.0f} per second", error=True)


def sample_in_training(model: GPT2, config: Config) -> str:
    """Return one text of a model in training, as the configuration's `sample` section requests."""
    s, tokenizer, seed = config.sample, get_tokenizer(config.data.tokenizer), config.train.seed
    return next(continuations(model, tokenizer, s.prompt, s.tokens, s.temperature, s.top_k, 1.0, seed, num=1))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt; the end-of-text token if it is empty."""
    return tokenizer.encode(valid_unicode(prompt)).tolist() or [tokenizer.eot]


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of `tokens` as soon as it is complete: an incomplete character waits for its other bytes."""
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = tokenizer.decode(waiting)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            waiting.clear()
            yield text
    yield tokenizer.decode(waiting)


def continuations(
    model: GPT2, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, top_k: int, top_p: float,
    seed: int, num: int,
) -> Iterator[str]:  # fmt: skip
    """Yield `num` texts, each `prompt` and its continuation; text i samples with seed + i in any batch."""
    batch, ids = len(model.decoding.seq), encode_prompt(tokenizer, prompt)
    for first in range(seed, seed + num, batch):
        seeds = range(first, first + batch)  # the last batch is full too: the shapes of a step never change
        steps = generate(model, ids, tokens, seeds, temperature, top_k, top_p)
        for text in list(zip(*steps))[: seed + num - first]:
            yield prompt + tokenizer.decode(text)
