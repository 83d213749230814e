"""Generate tokens: run the prompt into the cache, then decode one token per step.

A step needs nothing from the host: the sampled token stays on the device as the next step's input.
So the host launches step s before it reads the token of step s - 3, and the device never waits.

The model sees at most T tokens (train.seq_len).  When a sequence's window is full, the newest
T // 2 tokens move to its beginning and refill the cache by a forward pass; T - T // 2 decode steps
follow.  So every token has at least T // 2 tokens before it, and costs one step and 1/T of a
forward pass.  nanoGPT moves the window by one token instead: every position changes, and
each token costs a forward pass.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gpt2_triton.inference.sampling import Sampling
from gpt2_triton.model.cuda import DeviceEvent
from gpt2_triton.model.model import Model

STEPS_IN_FLIGHT = 4


class _TokenCopy:
    """Copies the tokens of one step to the host, into pinned memory."""

    def __init__(self, model: Model):
        device = model.arena.device.type
        seq = model.decoding.seq
        self._seq = torch.empty(seq.shape, dtype=torch.int32, pin_memory=device != "cpu")
        self._done = DeviceEvent(device)

    def start(self, seq: torch.Tensor) -> None:
        self._seq.copy_(seq, non_blocking=True)
        self._done.record()

    def tokens(self) -> list[int]:
        """Wait for the copy and return the token of each sequence."""
        self._done.wait()
        return self._seq[:, 0].tolist()


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    count: int,
    seeds: Sequence[int],
    sampling: Sampling,
) -> Iterator[list[int]]:
    """Yield the next token of every sequence, `count` times; sequence i continues
    prompts[i], and samples with seeds[i].
    """
    T = model.T
    windows = [list(prompt) for prompt in prompts]
    moved = [True] * len(windows)
    copies = [_TokenCopy(model) for _ in range(STEPS_IN_FLIGHT)]
    sampled = 0
    while sampled < count:
        for b, window in enumerate(windows):
            if len(window) > T:
                windows[b] = window[-max(1, T // 2) :]
                moved[b] = True
        fill_cache(model, windows, moved)
        place(model, windows, sampled, seeds)
        moved = [False] * len(windows)
        longest = max(len(window) for window in windows)
        for tokens in _steps(model, min(count - sampled, T - longest + 1), copies, sampling):
            for window, token in zip(windows, tokens, strict=True):
                window.append(token)
            sampled += 1
            yield tokens


def fill_cache(model: Model, windows: Sequence[list[int]], moved: Sequence[bool]) -> None:
    """Run all but the last token of the windows that have moved into the cache;
    neighbours that are equal at once.
    """
    first = 0
    for (window, has_moved), equal in itertools.groupby(zip(windows, moved, strict=True)):
        end = first + len([*equal])
        if has_moved and len(window) > 1:
            model.prefill(window, slice(first, end))
        first = end


def place(model: Model, windows: Sequence[list[int]], sampled: int, seeds: Sequence[int]) -> None:
    """Let the next step take the last token of each window."""
    seq = [
        [window[-1], len(window) - 1, sampled, seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF]
        for window, seed in zip(windows, seeds, strict=True)
    ]
    model.decoding.seq.copy_(torch.from_numpy(np.array(seq, np.int32)))


def _steps(
    model: Model, count: int, copies: list[_TokenCopy], sampling: Sampling
) -> Iterator[list[int]]:
    """Launch `count` decode steps; yield a step's tokens STEPS_IN_FLIGHT - 1 launches later."""
    in_flight: deque[_TokenCopy] = deque()
    for step in range(count):
        model.decode(*sampling)
        copy = copies[step % STEPS_IN_FLIGHT]
        copy.start(model.decoding.seq)
        in_flight.append(copy)
        if len(in_flight) == STEPS_IN_FLIGHT:
            yield in_flight.popleft().tokens()
    while in_flight:
        yield in_flight.popleft().tokens()
