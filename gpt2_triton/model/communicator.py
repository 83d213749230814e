"""Exchange of gradients and parameters between ranks, on a second stream that
runs next to the computation.

gradients   A layer's gradients are reduced after its backward pass, alone or together with other
            layers' gradients: see `send_schedule`.  The embedding, the largest bucket
            (sharding.py), is reduced with norms and biases while layer 0's last product runs.
            Layer 0 comes last, and the update waits for it.
matrices    Muon orthogonalises each whole matrix on one rank.  Before that, the other
            ranks send their parts of it (ZeRO-1 and 2).  After it, the result is sent
            to the ranks that update it.
parameters  (ZeRO-1 and 2) Embedding, norms and biases are gathered while the layers are updated.
            Layers are gathered when the next step begins, each in time for its forward pass.

There are two transports.  NcclCommunicator uses collectives.  PeerCopyCommunicator (peer_copies.py)
serves ranks of one host that can read each other's arenas.

Streams wait for each other through events, which CUDA graphs capture.  On a CPU every call
is complete when it returns.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.model import sharding
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.muon import MatrixClass
from gpt2_triton.model.sharding import NOT_A_LAYER
from gpt2_triton.model.side_stream import SideStream
from gpt2_triton.model.tables import State


class Communicator:
    """The communicator of a single rank: it does nothing.  Schedule and model call its methods."""

    def begin_micro_step(self, first: bool, last: bool) -> None:
        """Begin a micro-step; `first` and `last` say whether the step begins or ends with it."""

    def wait_params(self, layer: int) -> None:
        """Make the current stream wait for the layer's parameters."""

    def wait_grad_buffer(self, layer: int) -> None:
        """Make the current stream wait until the layer's gradients may be written."""

    def reduce_grads(self, layer: int) -> None:
        """Reduce the buckets that are due after the gradients of `layer`,
        which may be NOT_A_LAYER.
        """

    def end_micro_step(self) -> None:
        """Make the current stream wait for all that was sent."""

    def all_reduce_scalars(self, scalars: Tensor) -> None:
        """Sum the ranks' losses and squared norms."""

    def all_reduce_max(self, cells: Tensor) -> None:
        """Set each element to its largest value on any rank."""

    def collect_matrices(self, classes: Sequence[MatrixClass]) -> None:
        """Fetch the other ranks' parts of the matrices that this rank will orthogonalise."""

    def deliver_matrices(self, classes: Sequence[MatrixClass]) -> None:
        """Fetch, from the matrices that other ranks have orthogonalised, the
        parts that this rank updates.
        """

    def gather_after_update(self, bucket: int) -> None:
        """Gather the buckets that are due after this rank's update of its shard of `bucket`."""

    def precompile(self) -> None:
        """Launch every kernel of the exchange once, to have it compiled."""

    def gather_params(self) -> None:
        """Gather all parameters before something reads them between steps;
        all ranks call it together.
        """

    def close(self) -> None:
        """Close this rank's access to the other ranks' memory."""


def send_schedule(n_layer: int, zero: int, last: bool, send_from: int) -> dict[int, list[int]]:
    """Return, for each layer, the buckets that are reduced together after its backward pass.

    last        True in the last micro-step of a step, which sends everything that is not sent
                yet.  At ZeRO-2 each micro-step sends each layer alone, because no buffer
                keeps the layer's gradients.
    send_from   Layers above this layer wait and are sent with it; layers below it are sent at once.

    Three layers, the last micro-step, send_from 1; bucket 0 is the embedding, 4 norms and biases:

    >>> send_schedule(3, 1, True, 1)
    {1: [3, 2], -1: [0, 4], 0: [1]}
    """
    schedule: dict[int, list[int]] = {}
    queued: list[int] = []
    for layer in [*range(n_layer - 1, 0, -1), NOT_A_LAYER, 0]:
        is_layer = layer != NOT_A_LAYER
        if last or (zero == 2 and is_layer):
            queued += [1 + layer] if is_layer else [0, n_layer + 1]
        if queued and (zero == 2 or layer <= send_from):
            schedule[layer] = queued
            queued = []
    return schedule


class BucketedCommunicator(Communicator):
    """Sends each bucket when it is due; the subclasses move the bytes."""

    def __init__(self, group: ProcessGroup, K: Kernels, state: State, dims: dict[str, int]):
        self._group = group
        self._K = K
        self._s = state
        self._zero = dims["zero"]
        self._buckets = sharding.buckets(dims)
        self._shards = sharding.owned_shards(dims, group.rank)
        self._grad_starts = sharding.grad_offsets(dims)
        self._layers = range(dims["L"])
        self._rest = len(self._buckets) - 1
        self._schedules = {
            last: send_schedule(dims["L"], self._zero, last, self._send_from(dims))
            for last in (False, True)
        }
        self._send_after = self._schedules[True]
        self._first = False
        self._side = SideStream(group.device)
        self._params_ready: dict[int, Any] = {}
        self._grads_sent: dict[int, Any] = {}

    def begin_micro_step(self, first: bool, last: bool) -> None:
        self._first = first
        self._send_after = self._schedules[last]
        if self._zero and first:
            with self._side.after_current():
                self._barrier()
                for layer in self._layers:
                    self._gather(1 + layer)
                    self._params_ready[layer] = self._side.record()

    def wait_params(self, layer: int) -> None:
        if layer in self._params_ready:
            self._side.wait(self._params_ready.pop(layer))

    def wait_grad_buffer(self, layer: int) -> None:
        if layer + 2 in self._grads_sent:  # the layer two above has the same buffer
            self._side.wait(self._grads_sent.pop(layer + 2))

    def reduce_grads(self, layer: int) -> None:
        if layer not in self._send_after:
            return
        with self._side.after_current():
            self._reduce(self._send_after[layer])
            sent = self._side.record()
        if self._zero == 2 and layer != NOT_A_LAYER:
            self._grads_sent[layer] = sent

    def end_micro_step(self) -> None:
        self._grads_sent.clear()
        self._side.join()

    def all_reduce_scalars(self, scalars: Tensor) -> None:
        self._group.all_reduce(scalars)

    def all_reduce_max(self, cells: Tensor) -> None:
        self._group.all_reduce(cells, largest=True)

    def gather_after_update(self, bucket: int) -> None:
        if self._zero and bucket == self._rest:  # updated after the embedding and before the layers
            with self._side.after_current():
                self._barrier()
                self._gather(0)
                self._gather(self._rest)
                # a load of weights after the step must not overwrite what others still read
                self._barrier()
        if self._zero and bucket == self._rest - 1:
            self._side.join()

    def precompile(self) -> None:
        n = self._shard_length(1)
        received = self._s.received
        for parts in {1, self._group.size - 1}:
            self._K.add_partials(received[:n], received[: parts * n].view(parts, n))
        if self._s.orth is not None:
            self._K.fill(self._s.orth, 0.0)

    def gather_params(self) -> None:
        if self._zero:
            with self._side.after_current():
                self._barrier()
                for bucket in range(len(self._buckets)):
                    self._gather(bucket)
                self._barrier()  # after it a rank may overwrite what others have read
            self._side.join()

    def _accumulates(self, bucket: int) -> bool:
        """Return whether sums are added to earlier micro-steps' sums: for layers, at ZeRO-2."""
        return not self._first and self._zero == 2 and 0 < bucket < self._rest

    def _shard_length(self, bucket: int) -> int:
        return self._buckets[bucket].padded // self._group.size

    def _grads(self, bucket: int) -> Tensor:
        start = self._grad_starts[bucket]
        return self._s.grads[start : start + self._buckets[bucket].padded]

    def _params(self, bucket: int) -> Tensor:
        b = self._buckets[bucket]
        return self._s.params[b.start : b.start + b.padded]

    def _own_shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a whole bucket, as a view."""
        return whole.view(self._group.size, -1)[self._group.rank]

    def _reduced_shard(self, bucket: int) -> Tensor:
        """Return the tensor that the sums of this rank's shard are written to."""
        if self._zero < 2:
            return self._own_shard(self._grads(bucket))
        start = self._shards[bucket].grad
        return self._s.reduced[start : start + self._shard_length(bucket)]

    def _send_from(self, dims: dict[str, int]) -> int:
        """Return `send_schedule`'s send_from."""
        raise NotImplementedError

    def _barrier(self) -> None:
        """Barrier in stream order: all see earlier writes after it, and earlier reads are done."""
        raise NotImplementedError

    def _reduce(self, buckets: Sequence[int]) -> None:
        """Sum these buckets' gradients over ranks: this rank's shards, at stage 0 whole buckets."""
        raise NotImplementedError

    def _gather(self, bucket: int) -> None:
        """Copy each rank's shard of the bucket's parameters to all ranks."""
        raise NotImplementedError


class NcclCommunicator(BucketedCommunicator):
    """Collectives of NCCL, or of gloo on CPUs, each sent as soon as it can
    be.  They need no barrier.
    """

    def _send_from(self, dims: dict[str, int]) -> int:
        return dims["L"]

    def _barrier(self) -> None:
        pass

    def _reduce(self, buckets: Sequence[int]) -> None:
        for bucket in buckets:
            whole = self._grads(bucket)
            target = self._reduced_shard(bucket)
            if self._zero == 0:
                self._group.all_reduce(whole)
            elif self._accumulates(bucket):
                received = self._s.received[: len(target)]
                self._group.reduce_scatter(received, whole)
                self._K.add_partials(target, received.view(1, -1))
            else:
                self._group.reduce_scatter(target, whole)

    def _gather(self, bucket: int) -> None:
        whole = self._params(bucket)
        self._group.all_gather(whole, self._own_shard(whole))

    def collect_matrices(self, classes: Sequence[MatrixClass]) -> None:
        """Sum the ranks' parts; each rank has zeros in the others' parts.  At stage
        0 each rank has all parts.
        """
        if not self._zero:
            return
        for c in classes:
            part = c.parts[self._group.rank]
            for layer in c.whole.view(len(c.part.w), -1):
                for others in (layer[: part.start], layer[part.stop :]):
                    if len(others):
                        self._K.fill(others, 0.0)
            groups, rest = self._groups(c)
            for together in groups:
                self._group.reduce_scatter(self._own_shard(together), together)
            if rest.numel():
                self._group.all_reduce(rest)

    def deliver_matrices(self, classes: Sequence[MatrixClass]) -> None:
        for c in classes:
            groups, rest = self._groups(c)
            for together in groups:
                self._group.all_gather(together, self._own_shard(together))
            if rest.numel():
                for rank, matrix in enumerate(rest.split(c.whole[0].numel())):
                    if rank != self._group.rank:
                        self._K.fill(matrix, 0.0)
                self._group.all_reduce(rest)

    def _groups(self, c: MatrixClass) -> tuple[Sequence[Tensor], Tensor]:
        """Return groups of one matrix per rank, and the matrices left over, as flat views."""
        ranks = self._group.size
        size = c.whole[0].numel() * ranks
        grouped = len(c.whole) // ranks * size
        flat = c.whole.view(-1)
        return flat[:grouped].split(size), flat[grouped:]
