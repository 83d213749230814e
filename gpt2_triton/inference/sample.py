"""Sample text after a prompt.

The device draws each token with a random number, keyed by the text's seed and its number of tokens so far.  So a text
depends on the weights, the prompt and the seed alone.
"""

from collections.abc import Generator, Iterable, Iterator

from gpt2_triton.config.config import Config
from gpt2_triton.data.tokenizer import Tokenizer, get_tokenizer
from gpt2_triton.inference.generate import generate
from gpt2_triton.inference.sampling import Sampling
from gpt2_triton.model.gpt2 import GPT2


def stream(
    model: GPT2, tokenizer: Tokenizer, prompt: str, tokens: int, how: Sampling, seed: int
) -> Generator[str, None, None]:
    """Yield the `tokens` tokens after `prompt` as text, in pieces, as soon as a piece's characters are complete."""
    steps = generate(model, encode_prompt(tokenizer, prompt), tokens, [seed], *how)
    return stream_text(tokenizer, (token for [token] in steps))


def sample_in_training(model: GPT2, config: Config) -> str:
    """Return one text of a model in training, by the configuration's section `sample`."""
    s, tokenizer, seed = config.sample, get_tokenizer(config.data.tokenizer), config.train.seed
    return next(continuations(model, tokenizer, s.prompt, s.tokens, Sampling(s.temperature, s.top_k), seed, num=1))


def encode_prompt(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of a prompt; the end-of-text token if it is empty."""
    return tokenizer.encode(prompt).tolist() or [tokenizer.eot]


def stream_text(tokenizer: Tokenizer, tokens: Iterable[int]) -> Generator[str, None, None]:
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
    model: GPT2, tokenizer: Tokenizer, prompt: str, tokens: int, how: Sampling, seed: int, num: int
) -> Iterator[str]:
    """Yield `num` texts, each `prompt` and its continuation.  Text i has seed + i, whatever the batch."""
    batch, ids = len(model.decoding.seq), encode_prompt(tokenizer, prompt)
    for first in range(seed, seed + num, batch):
        seeds = range(first, first + batch)  # the last batch is full too: the shapes of a step never change
        steps = generate(model, ids, tokens, seeds, *how)
        for text in list(zip(*steps))[: seed + num - first]:
            yield prompt + tokenizer.decode(text)
