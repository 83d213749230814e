"""Text goes on: the prompt into the cache, then token after token from the device, read a few steps late.

A step needs nothing from the host: the token just drawn is the next step's input, and stays on the device.  So the
host launches step s and then reads the token of step s - 3, and the device never waits.

The model sees at most T tokens (train.seq_len).  A window that is full is begun again from the newest T // 2 tokens,
which are run through the forward pass at their new positions; then come T - T // 2 steps from the cache.  Every token
thus has at least T // 2 tokens before it, and a token costs one step and 1/T of a forward pass; to move the window by
one each time, as nanoGPT does, would cost a forward pass for every token, since every position changes.
"""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gpt2_triton.model.cuda import DeviceEvent
from gpt2_triton.model.gpt2 import GPT2

LATE = 4  # steps in flight


class _Read:
    """The tokens of one step on their way to the host, in pinned memory of their own."""

    def __init__(self, model: GPT2):
        device, seq = model.arena.device.type, model.decoding.seq
        self._seq = torch.empty(seq.shape, dtype=torch.int32, pin_memory=device != "cpu")
        self._done = DeviceEvent(device)

    def begin(self, seq: torch.Tensor) -> None:
        self._seq.copy_(seq, non_blocking=True)
        self._done.record()

    def tokens(self) -> list[int]:
        self._done.wait()
        return self._seq[:, 0].tolist()


def generate(
    model: GPT2, prompt: Sequence[int], count: int, seeds: Sequence[int], temperature: float, top_k: int, top_p: float
) -> Iterator[list[int]]:
    """Yield `count` times the next token of every text; text i begins with `prompt` (at least one token) and draws
    with seeds[i], one for each text the model was planned for.
    """
    T = model.T
    texts, drawn = [list(prompt) for _ in seeds], 0
    reads = [_Read(model) for _ in range(LATE)]
    while drawn < count:
        n = len(texts[0])
        n = n if n <= T else max(1, T // 2)
        begin(model, [text[-n:] for text in texts], drawn, seeds)
        for tokens in _steps(model, min(count - drawn, T - n + 1), reads, temperature, top_k, top_p):
            for text, token in zip(texts, tokens, strict=True):
                text.append(token)
            drawn += 1
            yield tokens


def begin(model: GPT2, windows: list[list[int]], drawn: int, seeds: Sequence[int]) -> None:
    """All but the last token of each window, one for each text, into the cache; the last into seq: the next step takes
    it in.  The windows are of one length, and the same if nothing has been `drawn`, the number that keys the next draw.
    """
    n = len(windows[0])
    if n > 1 and drawn == 0:
        model.prefill(windows[0], slice(0, len(windows)))  # they all begin with the prompt
    elif n > 1:
        for b, window in enumerate(windows):
            model.prefill(window, slice(b, b + 1))
    seq = [
        [window[-1], n - 1, drawn, seed & 0x7FFFFFFF, seed >> 31 & 0x7FFFFFFF] for window, seed in zip(windows, seeds)
    ]
    model.decoding.seq.copy_(torch.from_numpy(np.array(seq, np.int32)))


def _steps(
    model: GPT2, count: int, reads: list[_Read], temperature: float, top_k: int, top_p: float
) -> Iterator[list[int]]:
    in_flight: deque[_Read] = deque()
    for step in range(count):
        model.decode(temperature, top_k, top_p)
        read = reads[step % LATE]
        read.begin(model.decoding.seq)
        in_flight.append(read)
        if len(in_flight) == LATE:
            yield in_flight.popleft().tokens()
    while in_flight:
        yield in_flight.popleft().tokens()
