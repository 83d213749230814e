"""Sample text after a prompt: up to a number of tokens, or up to a token that
ends a text, which is left out.

The device draws each token with a random number, keyed by the text's seed and its number of tokens
so far.  So a text depends on the weights, the prompt and the seed alone.
"""

import itertools
import operator
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from pathlib import Path

from gpt2_triton.checkpoint import source_files
from gpt2_triton.config.config import Config
from gpt2_triton.console import print_line
from gpt2_triton.data.tokenizer import Tokenizer, encode_prompt, get_tokenizer
from gpt2_triton.inference.generate import generate
from gpt2_triton.inference.sampling import Sampling
from gpt2_triton.model.model import Model

CONTEXT = 8  # tokens; a character has at most four


def ends_of_text(tokenizer: Tokenizer, beside: Path | None) -> set[int | None]:
    """Return the tokens that end a text: the tokenizer's, and those that
    the model's source names.
    """
    return {tokenizer.eot} | source_files.ends(beside)


def limit(model: Model, tokenizer: Tokenizer) -> None:
    """Let the model draw no token without a text: it may have more rows than the tokenizer."""
    model.drawn = min(model.drawn, tokenizer.vocab_size)


def draw(
    model: Model,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    ends: Collection[int | None],
) -> Iterator[Iterator[int]]:
    """Yield an iterator of tokens for each text; text i continues prompts[i] and has seeds[i]."""
    long = [len(prompt) for prompt in prompts if len(prompt) > model.T]
    if long:
        print_line(
            f"note: prompts over {model.T:,} tokens are cut to their last "
            f"{max(1, model.T // 2):,}: {len(long):,} of {len(prompts):,} texts, "
            f"up to {max(long):,} tokens",
            error=True,
        )
    batch = len(model.decoding.seq)
    last = len(prompts) - 1
    for first in range(0, len(prompts), batch):
        # the last batch is full too: the shapes of a step never change
        at = [min(i, last) for i in range(first, first + batch)]
        steps = generate(model, [prompts[i] for i in at], tokens, [seeds[i] for i in at], sampling)
        wanted = min(batch, len(prompts) - first)
        # each text takes as many steps as it needs, and finds those that others took
        for b, rows in enumerate(itertools.tee(steps, wanted)):
            text = map(operator.itemgetter(b), rows)
            yield itertools.takewhile(lambda token: token not in ends, text)


def sample_in_training(model: Model, config: Config, beside: Path) -> str:
    """Return one text of a model in training, by the configuration's section
    `sample`; `beside` may not exist.
    """
    s = config.sample
    tokenizer = get_tokenizer(config.data.tokenizer)
    sampling = Sampling(s.temperature, s.top_k)
    text = stream(model, tokenizer, s.prompt, s.tokens, sampling, config.train.seed, beside)
    return s.prompt + "".join(text)


def stream(
    model: Model,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    sampling: Sampling,
    seed: int,
    beside: Path | None,
) -> Generator[str, None, None]:
    """Yield the text after `prompt` in pieces, as soon as a piece's characters are complete."""
    ids = encode_prompt(tokenizer, prompt).tolist()
    [drawn] = draw(model, [ids], tokens, sampling, [seed], ends_of_text(tokenizer, beside))
    return stream_text(tokenizer, drawn, ids)


def stream_text(
    tokenizer: Tokenizer, tokens: Iterable[int], before: Sequence[int] = ()
) -> Generator[str, None, None]:
    """Yield the text of `tokens` as soon as it is complete: an incomplete character waits for
    its other bytes.  The tokens follow `before`: sentencepiece's first token has no space.
    """
    known = _context(tokenizer, before)
    waiting: list[int] = []
    for token in tokens:
        waiting.append(token)
        text = _text_after(tokenizer, known, waiting)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            known = waiting or known
            waiting = []
            yield text
    yield _text_after(tokenizer, known, waiting)


def _context(tokenizer: Tokenizer, before: Sequence[int]) -> list[int]:
    """Return the newest tokens that have a text of whole characters, none if there are none."""
    special = {*tokenizer.special.values(), tokenizer.delimiter}
    for count in range(1, min(len(before), CONTEXT) + 1):
        last = [*before[-count:]]
        text = "" if special & {*last} else tokenizer.decode(last)
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            return last
    return []


def _text_after(tokenizer: Tokenizer, known: list[int], tokens: list[int]) -> str:
    """Return what `tokens` add to the text of `known`."""
    return tokenizer.decode(known + tokens)[len(tokenizer.decode(known)) :]
