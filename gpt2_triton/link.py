"""What ranks exchange in a step, each bucket as soon as it can go, on a stream beside the one that computes.

gradients   a layer's leave under the attention of the layer below, layer 0's under the embedding's backward pass;
            wte's come last, and are waited for
parameters  (ZeRO-1 and 2) a layer's are gathered under the attention of the layer before, in the next step, layer
            0's under the embedding; the embedding's, norms' and biases' under the update of the layers

NCCL's kernels need multiprocessors of their own.  A product has one program on each for as long as it takes, so those
that find theirs taken would begin when the transfer ends, and the product end that much later.  Attention's programs
are short and many: the same transfer costs it only its share of the multiprocessors.

Streams wait for each other through events, which a CUDA graph captures with the collectives.  On a CPU every call is
finished when it returns.
"""

from collections import deque
from typing import Any

from torch import Tensor

from gpt2_triton import layout
from gpt2_triton.parallel import World
from gpt2_triton.stream import Side


class Link:
    """One rank: nothing to exchange.  The methods are what the schedule and the model call."""

    def begin(self, acc: bool, last: bool) -> None:
        """A micro-step begins: the first of its step unless acc, and perhaps the last."""

    def params(self, layer: int) -> None:
        """The layer's parameters are needed."""

    def transfer(self) -> None:
        """Attention is next, or the embedding, forward or backward: what waits to travel sets out."""

    def grads_begin(self, layer: int) -> None:
        """The layer's gradients are about to be written."""

    def grads_done(self, layer: int) -> None:
        """The layer's gradients are complete; schedule.EMBED stands for those of no layer, which leave at once."""

    def end(self) -> None:
        """The micro-step ends: what was sent has to be there for what follows."""

    def total(self, stats: Tensor) -> None:
        """Sum the ranks' losses and squared norms."""

    def updated(self, bucket: int) -> None:
        """This rank's share of the bucket has its new values."""

    def gather(self) -> None:
        """Bring every parameter up to date, for whatever reads them between steps; all ranks call it together."""


class Exchange(Link):
    """The Link of several ranks."""

    def __init__(self, world: World, K: Any, state: Any, dims: dict[str, int]):
        self._world, self._K, self._s, self._zero = world, K, state, dims["zero"]
        self._buckets, self._share = layout.buckets(dims), layout.share(dims, world.rank)
        self._grad_starts, self._layers = layout.gradient_starts(dims), range(dims["L"])
        self._side = Side(world.device)
        self._arrived: dict[int, Any] = {}
        self._sent: dict[int, Any] = {}
        self._to_gather: deque[int] = deque()  # layers
        self._to_send: deque[int] = deque()
        self._acc = self._last = False

    def begin(self, acc: bool, last: bool) -> None:
        self._acc, self._last = acc, last
        if self._zero and not acc:
            self._to_gather.extend(self._layers)
            self.transfer()

    def params(self, layer: int) -> None:
        if layer in self._arrived:
            self._side.wait(self._arrived.pop(layer))

    def transfer(self) -> None:
        if self._to_gather:
            layer = self._to_gather.popleft()
            with self._side.behind():
                self._gather(1 + layer)
                self._arrived[layer] = self._side.mark()
        elif self._to_send:
            layer = self._to_send.popleft()
            with self._side.behind():
                self._send(1 + layer, self._acc and self._zero == 2)
                if self._zero == 2:  # layer - 2's gradients are to have the same place
                    self._sent[layer] = self._side.mark()

    def grads_begin(self, layer: int) -> None:
        if layer + 2 in self._sent:
            self._side.wait(self._sent.pop(layer + 2))

    def grads_done(self, layer: int) -> None:
        if layer >= 0 and (self._last or self._zero == 2):  # at stage 2 they have no place to wait in
            self._to_send.append(layer)
        elif self._last:
            with self._side.behind():
                self._send(len(self._buckets) - 1)
                self._send(0)

    def end(self) -> None:
        self._sent.clear()
        self._side.join()

    def total(self, stats: Tensor) -> None:
        self._world.all_reduce(stats)

    def updated(self, bucket: int) -> None:
        last = len(self._buckets) - 1
        if self._zero and bucket in (0, last):  # embedding; norms and biases
            with self._side.behind():
                self._gather(bucket)
        if self._zero and bucket == last - 1:
            self._side.join()

    def gather(self) -> None:
        if self._zero:
            for bucket in range(len(self._buckets)):
                self._gather(bucket)

    def _send(self, bucket: int, acc: bool = False) -> None:
        """Sum the gradients of a bucket over ranks: all of them, or this rank's share."""
        b, piece, start, s = self._buckets[bucket], self._share[bucket], self._grad_starts[bucket], self._s
        part = b.padded // self._world.size
        whole = s.grads[start : start + b.padded]
        if self._zero == 0:
            return self._world.all_reduce(whole[: b.length])
        target = s.reduced if self._zero == 2 else s.grads
        own = target[piece.grad : piece.grad + part]
        self._world.reduce_scatter(s.received if acc else own, whole)
        if acc:
            self._K.add(own, s.received)

    def _gather(self, bucket: int) -> None:
        b, at = self._buckets[bucket], self._share[bucket].param
        part = b.padded // self._world.size
        self._world.all_gather(self._s.params[b.start : b.start + b.padded], self._s.params[at : at + part])
