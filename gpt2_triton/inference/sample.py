"""Text from a model: the prompt is continued token by token (decoding.py) and printed as it is decoded.

Tokens are drawn on the device, from numbers that depend on the seed of a text and the number of tokens drawn: a text
depends on the weights, the prompt and the seed alone.
"""

import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.config.config import Config
from gpt2_triton.data.tokenizer import Tokenizer, get_tokenizer
from gpt2_triton.device import device_name
from gpt2_triton.inference.generate import generate
from gpt2_triton.model.gpt2 import GPT2


def sample_text(
    path: Path, prompt: str, tokens: int, temperature: float, top_k: int, top_p: float, seed: int, num: int, batch: int
) -> None:
    """Print `num` continuations of `prompt` by the checkpoint at `path` (a run, or a step directory), up to `batch` of
    them decoded at once; one alone is printed piece by piece.  The rate goes to stderr.
    """
    model, config = load_model(path, min(num, batch))
    tokenizer = get_tokenizer(config.data.tokenizer)
    if model.arena.device.type == "cuda":
        model.compile_decoding(temperature, top_k, top_p)
    began = time.perf_counter()
    if num == 1:
        print(prompt, end="", flush=True)
        steps = generate(model, start(tokenizer, prompt), tokens, [seed], temperature, top_k, top_p)
        for piece in pieces(tokenizer, (token for [token] in steps)):
            print(piece, end="", flush=True)
        print(flush=True)
    else:
        for text in continuations(model, tokenizer, prompt, tokens, temperature, top_k, top_p, seed, num):
            print(text, flush=True)
    seconds = time.perf_counter() - began
    print(f"{num * tokens} tokens in {seconds:.2f} s, {num * tokens / seconds:,.0f} a second", file=sys.stderr)


def sample_in_training(model: GPT2, config: Config) -> str:
    """One text of a model in training, as its configuration asks for it."""
    s, tokenizer, seed = config.sample, get_tokenizer(config.data.tokenizer), config.train.seed
    return next(continuations(model, tokenizer, s.prompt, s.tokens, s.temperature, s.top_k, 1.0, seed, num=1))


def load_model(path: Path, texts: int) -> tuple[GPT2, Config]:
    """The newest checkpoint of a run, or the one at a step directory, as a model that decodes `texts` at once."""
    import gpt2_triton.kernels as K

    config, tensors = load_weights(str(path))
    batch = -(-texts // config.train.seq_len)  # of the prompt's pass, 1; a step's rows must fit its buffers
    model = GPT2(config, K, device_name(), batch=batch, training=False, sequences=texts)
    model.state.params.copy_(tensors["params"])
    return model, config


def start(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Tokens of the prompt; an empty one starts at the end-of-text token."""
    return tokenizer.encode(prompt).tolist() or [tokenizer.eot]


def pieces(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """The text of `tokens`, piece by piece; a token that ends inside a character waits for those that complete it."""
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
    """Yield `num` texts, each `prompt` and its continuation; text i draws with seed + i, whatever batch it is in."""
    batch = len(model.decoding.seq)
    for first in range(seed, seed + num, batch):
        seeds = range(first, first + batch)  # the last batch is full as well: the step's shapes never change
        steps = generate(model, start(tokenizer, prompt), tokens, seeds, temperature, top_k, top_p)
        for text in list(zip(*steps))[: seed + num - first]:
            yield prompt + tokenizer.decode(text)
