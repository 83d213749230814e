"""Text from a model: feed the last `seq_len` tokens, draw the next one, repeat.

The forward pass runs on the device; the draw from one row of logits is numpy on the host, from a generator seeded
per sample, so a sample depends on the weights, the prompt and the seed alone.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.gpus import device_name
from gpt2_triton.model import GPT2
from gpt2_triton.sources import load_weights


def draw(logits: np.ndarray, temperature: float, top_k: int, generator: np.random.Generator) -> int:
    """The next token from fp32 logits [V]: softmax(logits / temperature) over the top_k largest (0: all);
    temperature 0 takes the largest.
    """
    if temperature == 0:
        return int(logits.argmax())
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    if 0 < top_k < len(scaled):
        scaled[scaled < np.partition(scaled, -top_k)[-top_k]] = -np.inf
    p = np.exp(scaled)
    return int(generator.choice(len(p), p=p / p.sum()))


def generate(model: GPT2, prompt: list[int], count: int, temperature: float, top_k: int, seed: int) -> list[int]:
    """`count` tokens that follow `prompt` (at least one token); the model sees at most its last seq_len tokens."""
    generator, tokens = np.random.default_rng(seed), list(prompt)
    for _ in range(count):
        window = tokens[-model.T :]
        ids = np.zeros((1, model.T), np.int32)  # positions after the window do not reach back: attention is causal
        ids[0, : len(window)] = window
        tokens.append(draw(model.logits(ids, len(window) - 1), temperature, top_k, generator))
    return tokens[len(prompt) :]


def sample_text(path: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, num: int) -> None:
    """Print `num` continuations of `prompt` by the checkpoint at `path` (a run, or a step directory)."""
    import gpt2_triton.kernels as K

    config, tensors = load_weights(str(path))
    model = GPT2(config, K, device_name(), batch=1, training=False)
    model.state.params.copy_(tensors["params"])
    for text in continuations(model, config.data.tokenizer, prompt, tokens, temperature, top_k, seed, num):
        print(text, flush=True)


def continuations(
    model: GPT2, tokenizer_name: str, prompt: str, tokens: int, temperature: float, top_k: int, seed: int, num: int
) -> Iterator[str]:
    """Yield `num` texts, each `prompt` and its continuation; sample i uses seed + i.  An empty prompt starts at the
    end-of-text token.
    """
    tokenizer = get_tokenizer(tokenizer_name)
    start = list(tokenizer.encode(prompt)) or [tokenizer.eot]
    for i in range(num):
        yield prompt + tokenizer.decode(generate(model, start, tokens, temperature, top_k, seed + i))
