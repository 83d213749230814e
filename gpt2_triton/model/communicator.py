"""What ranks exchange in a step, on a stream beside the one that computes.

gradients   a layer's when they are done, or those of most layers together, in the backward pass of the last ones;
            the embedding's, the largest, with norms' and biases', under layer 0's last product; layer 0's come last,
            and are waited for
parameters  (ZeRO-1 and 2) the embedding's, norms' and biases' are gathered under the update of the layers; all layers'
            when the next step begins

Two ways lead from rank to rank.  Ranks of one host read each other's arenas: copy engines do that beside the
multiprocessors, and each rank adds up its share.  Ranks of several hosts, or that cannot read, use NCCL's collectives.

Why together, on one host: NVLink sleeps when it has been idle for 50 ms, and awake it takes some 29 of an H200's 700 W,
which at its power limit the computation lacks.  A transfer after every layer would keep it awake for the whole step.

Streams wait for each other through events, which a CUDA graph captures with everything else.  On a CPU every call is
finished when it returns.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.model import sharding
from gpt2_triton.model.side_stream import SideStream

# A layer's gradients, 48 C^2 bytes, take as long over NVLink as some 1,400 tokens take through its backward pass, of
# about 48 C^2 operations each (370 GB/s, 500 TFLOP/s).  Sums wait for multiprocessors besides; so those of all L layers
# are there in time if they set out 4096 L / R layers before the end.
TOKENS = 4096


class Link:
    """One rank: nothing to exchange.  The methods are what the schedule and the model call."""

    def begin(self, acc: bool, last: bool) -> None:
        """A micro-step begins: the first of its step unless acc, and perhaps the last."""

    def params(self, layer: int) -> None:
        """The layer's parameters are needed."""

    def grads_begin(self, layer: int) -> None:
        """The layer's gradients are about to be written."""

    def grads_done(self, layer: int) -> None:
        """The layer's gradients are complete; schedule.EMBED, layer -1, is all that is no layer's, before layer 0."""

    def end(self) -> None:
        """The micro-step ends: what was sent has to be there for what follows."""

    def total(self, stats: Tensor) -> None:
        """Sum the ranks' losses and squared norms."""

    def updated(self, bucket: int) -> None:
        """This rank's share of the bucket has its new values."""

    def prepare(self) -> None:
        """Launch what the exchange launches, to have it compiled."""

    def close(self) -> None:
        """Give up what other ranks own."""

    def gather(self) -> None:
        """Bring every parameter up to date, for whatever reads them between steps; all ranks call it together."""


def make_communicator(
    group: ProcessGroup | None, K: Any, state: Any, dims: dict[str, int], arenas: list[Tensor]
) -> Link:
    """The Link of this rank; `arenas` are those of all, if it can read them."""
    if group is None or group.size == 1:
        return Link()
    return PeerCopyCommunicator(group, K, state, dims, arenas) if arenas else NcclCommunicator(group, K, state, dims)


class BucketedCommunicator(Link):
    """The Link of several ranks: when each bucket sets out; PeerCopyCommunicator and NcclCommunicator transport it."""

    def __init__(self, group: ProcessGroup, K: Any, state: Any, dims: dict[str, int]):
        self._group, self._K, self._s, self._zero = group, K, state, dims["zero"]
        self._buckets, self._share = sharding.buckets(dims), sharding.share(dims, group.rank)
        self._grad_starts, self._layers = sharding.grad_offsets(dims), range(dims["L"])
        self._rest = len(self._buckets) - 1
        self._hold = dims["L"]  # gradients wait until this layer's are done
        self._side = SideStream(group.device)
        self._arrived: dict[int, Any] = {}
        self._sent: dict[int, Any] = {}
        self._waiting: list[int] = []
        self._acc = self._last = False

    def begin(self, acc: bool, last: bool) -> None:
        self._acc, self._last = acc, last
        if self._zero and not acc:
            with self._side.after_current():
                self._meet()
                for layer in self._layers:
                    self._gather(1 + layer)
                    self._arrived[layer] = self._side.record()

    def params(self, layer: int) -> None:
        if layer in self._arrived:
            self._side.wait(self._arrived.pop(layer))

    def grads_begin(self, layer: int) -> None:
        if layer + 2 in self._sent:
            self._side.wait(self._sent.pop(layer + 2))

    def grads_done(self, layer: int) -> None:
        buckets = [1 + layer] if layer >= 0 else [0, self._rest]
        if self._zero == 2 and layer >= 0:  # they have no place to wait in, not even for the last micro-step
            self._sent[layer] = self._leave(buckets)
        elif self._last:
            self._waiting += buckets
            if layer <= self._hold:
                due, self._waiting = self._waiting, []
                self._leave(due)

    def end(self) -> None:
        self._sent.clear()
        self._side.join()

    def total(self, stats: Tensor) -> None:
        self._group.all_reduce(stats)

    def updated(self, bucket: int) -> None:
        if self._zero and bucket == self._rest:  # after the embedding's and before the layers'
            with self._side.after_current():
                self._meet()
                self._gather(0)
                self._gather(self._rest)
                self._meet()  # whoever loads weights after a step overwrites nothing that others still read
        if self._zero and bucket == self._rest - 1:
            self._side.join()

    def prepare(self) -> None:
        n, received = self._part(1), self._s.received
        for parts in {1, self._group.size - 1}:
            self._K.add(received[:n], received[: parts * n].view(parts, n))

    def gather(self) -> None:
        if self._zero:
            with self._side.after_current():
                self._meet()
                for bucket in range(len(self._buckets)):
                    self._gather(bucket)
                self._meet()  # now whoever was read may write again
            self._side.join()

    def _leave(self, buckets: Sequence[int]) -> Any:
        """The sums of these buckets, and the mark behind them."""
        with self._side.after_current():
            self._sum(buckets)
            return self._side.record()

    def _adds(self, bucket: int) -> bool:
        """The sums of this micro-step are added to those of the ones before, at ZeRO-2, which sends layers in each."""
        return self._acc and self._zero == 2 and 0 < bucket < self._rest

    def _part(self, bucket: int) -> int:
        return self._buckets[bucket].padded // self._group.size

    def _grads(self, bucket: int) -> Tensor:
        start = self._grad_starts[bucket]
        return self._s.grads[start : start + self._buckets[bucket].padded]

    def _params(self, bucket: int) -> Tensor:
        b = self._buckets[bucket]
        return self._s.params[b.start : b.start + b.padded]

    def _own(self, whole: Tensor) -> Tensor:
        """This rank's part of a bucket."""
        return whole.view(self._group.size, -1)[self._group.rank]

    def _target(self, bucket: int) -> Tensor:
        """Where the sums of this rank's part go."""
        if self._zero < 2:
            return self._own(self._grads(bucket))
        at = self._share[bucket].grad
        return self._s.reduced[at : at + self._part(bucket)]

    def _meet(self) -> None:
        """What ranks wrote before it others read after it, and what they read others write."""
        raise NotImplementedError

    def _sum(self, buckets: Sequence[int]) -> None:
        """Sum the gradients of buckets over ranks: this rank's part of them, at stage 0 all."""
        raise NotImplementedError

    def _gather(self, bucket: int) -> None:
        """Bring the parameters of a bucket up to date."""
        raise NotImplementedError


class NcclCommunicator(BucketedCommunicator):
    """NCCL's, or gloo's.  They meet by themselves."""

    def _meet(self) -> None:
        pass

    def _sum(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            whole, target = self._grads(bucket), self._target(bucket)
            if self._zero == 0:
                self._group.all_reduce(whole)
            elif self._adds(bucket):
                received = self._s.received[: len(target)]
                self._group.reduce_scatter(received, whole)
                self._K.add(target, received.view(1, -1))
            else:
                self._group.reduce_scatter(target, whole)

    def _gather(self, bucket: int) -> None:
        whole = self._params(bucket)
        self._group.all_gather(whole, self._own(whole))


class PeerCopyCommunicator(BucketedCommunicator):
    """Ranks that read each other's arenas.

    Nobody writes what others still read.  In a step gradients and parameters are written again after the next sum of
    losses and norms, which a rank joins when it has all that it reads; at stages 0 and 2 gradients are overwritten
    earlier, after another meeting.  Between steps nobody reads: updates and `gather` end with a meeting.
    """

    def __init__(self, group: ProcessGroup, K: Any, state: Any, dims: dict[str, int], arenas: list[Tensor]):
        super().__init__(group, K, state, dims)
        self._arenas = arenas
        self._hold = -(-dims["L"] * TOKENS // dims["R"])
        # each begins with the next one, so that no rank is read by two at a time
        self._others = [(group.rank + i) % group.size for i in range(1, group.size)]

    def close(self) -> None:
        self._arenas.clear()

    def _of(self, rank: int, tensor: Tensor) -> Tensor:
        """What another rank has in the place of this one's tensor."""
        at = tensor.data_ptr() - self._arenas[self._group.rank].data_ptr()
        return self._arenas[rank][at : at + tensor.nbytes].view(tensor.dtype)

    def _meet(self) -> None:
        self._group.barrier()

    def _sum(self, buckets: Sequence[int]) -> None:
        self._meet()
        todo = deque(buckets)
        while todo:
            at, arrived = 0, list[tuple[int, Tensor]]()
            while todo and at + self._part(todo[0]) * len(self._others) <= len(self._s.received):
                arrived.append((todo[0], self._receive(todo.popleft(), at)))
                at += arrived[-1][1].numel()
            assert arrived, "a bucket has more than `received` has room for"
            for bucket, parts in arrived:  # after all copies: a sum may have to wait for a multiprocessor
                self._add(bucket, parts)
        if self._zero != 1:
            self._meet()
        if self._zero == 0:
            for bucket in buckets:
                self._share_out(self._grads(bucket))

    def _receive(self, bucket: int, at: int) -> Tensor:
        """The others' gradients of this rank's part, [ranks - 1, part], at `at` in `received`."""
        own = self._own(self._grads(bucket))
        parts = self._s.received[at : at + len(own) * len(self._others)].view(-1, len(own))
        for part, rank in zip(parts, self._others, strict=True):
            part.copy_(self._of(rank, own))
        return parts

    def _add(self, bucket: int, parts: Tensor) -> None:
        target, own = self._target(bucket), self._own(self._grads(bucket))
        self._K.add(own, parts)
        if self._adds(bucket):
            self._K.add(target, own.view(1, -1))
        elif self._zero == 2:
            target.copy_(own)

    def _gather(self, bucket: int) -> None:
        self._share_out(self._params(bucket))

    def _share_out(self, whole: Tensor) -> None:
        """Every rank's part of `whole` from that rank."""
        parts = whole.view(self._group.size, -1)
        for rank in self._others:
            parts[rank].copy_(self._of(rank, parts[rank]))
