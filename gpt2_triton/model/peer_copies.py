"""The transport of ranks on one host: copy engines read the other ranks' arenas, and
each rank adds up its shard.

Collectives would take some multiprocessors from the computation.  Of the throughput without
exchange, this transport keeps 99.4% and NcclCommunicator 98.4%.  Of four times the slowest GPU's
throughput, this transport keeps 98.9% and NcclCommunicator 97.4% (124M, four H200s).  This file and
distributed/shared_memory.py are kept for that gain.  Where memory cannot be shared, the run falls
back to NCCL with a warning.

Most layers' gradients are sent together, in the backward pass of the last layers.  NVLink sleeps
after 50 ms without work.  Awake, NVLink takes about 29 W from the computation, if the GPU runs at
its power limit of 700 W.  A transfer after each layer would keep NVLink awake for the whole step.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.model.communicator import BucketedCommunicator
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.muon import MatrixClass, pieces
from gpt2_triton.model.tables import State

# A layer's gradients are 48 C^2 bytes, and its backward pass takes about 48 C^2 operations per
# token.  At 370 GB/s and 500 TFLOP/s, NVLink takes as long for them as the computation for 1,400
# tokens.  Sums also wait for multiprocessors, so 4096 tokens are allowed.  All L layers arrive in
# time if they are sent 4096 L / R layers before the end.
TOKENS_TO_HIDE_A_LAYER = 4096


class PeerCopyCommunicator(BucketedCommunicator):
    """Reads the arenas of the other ranks.

    Invariant: a rank never overwrites memory that another rank may still be reading.  Gradients and
    parameters are overwritten after the next all-reduce of losses and norms, which a rank joins
    once its copies are done.  At stages 0 and 2 gradients are overwritten earlier, after a second
    barrier.  Updates and `gather_params` end with a barrier, so that no rank reads between steps.
    """

    def __init__(
        self,
        group: ProcessGroup,
        K: Kernels,
        state: State,
        dims: dict[str, int],
        arenas: list[Tensor],
    ):
        super().__init__(group, K, state, dims)
        self._arenas = arenas
        # each rank begins with the next rank, so that no two read the same rank at a time
        self._peers = [(group.rank + i) % group.size for i in range(1, group.size)]

    def close(self) -> None:
        self._arenas.clear()

    def _send_from(self, dims: dict[str, int]) -> int:
        return -(-dims["L"] * TOKENS_TO_HIDE_A_LAYER // dims["R"])

    def _of_peer(self, rank: int, tensor: Tensor) -> Tensor:
        """Return the tensor at the same offset of another rank's arena."""
        offset = tensor.data_ptr() - self._arenas[self._group.rank].data_ptr()
        return self._arenas[rank][offset : offset + tensor.nbytes].view(tensor.dtype)

    def _barrier(self) -> None:
        self._group.barrier()

    def _reduce(self, buckets: Sequence[int]) -> None:
        self._barrier()
        received: dict[int, Tensor] = {}
        offset = 0
        for bucket in buckets:
            size = self._shard_length(bucket) * len(self._peers)
            if offset + size > len(self._s.received):
                self._add(received)
                received = {}
                offset = 0
            received[bucket] = self._receive(bucket, offset)
            offset += size
        self._add(received)
        if self._zero != 1:
            self._barrier()
        if self._zero == 0:
            for bucket in buckets:
                self._copy_from_owners(self._grads(bucket))

    def _receive(self, bucket: int, offset: int) -> Tensor:
        """Copy peers' gradients of this rank's shard to `received`[offset:], [ranks - 1, shard]."""
        own = self._own_shard(self._grads(bucket))
        parts = self._s.received[offset : offset + len(own) * len(self._peers)].view(-1, len(own))
        for part, rank in zip(parts, self._peers, strict=True):
            part.copy_(self._of_peer(rank, own))
        return parts

    def _add(self, received: Mapping[int, Tensor]) -> None:
        """Sum what was received, by bucket: after all copies, since a sum may have to wait for a
        multiprocessor.
        """
        for bucket, parts in received.items():
            target = self._reduced_shard(bucket)
            own = self._own_shard(self._grads(bucket))
            self._K.add_partials(own, parts)
            if self._accumulates(bucket):
                self._K.add_partials(target, own.view(1, -1))
            elif self._zero == 2:
                target.copy_(own)

    def collect_matrices(self, classes: Sequence[MatrixClass]) -> None:
        if self._zero:  # else each rank has computed all parts
            self._exchange(classes, lambda peer: (self._group.rank, peer))

    def deliver_matrices(self, classes: Sequence[MatrixClass]) -> None:
        self._exchange(classes, lambda peer: (peer, self._group.rank))
        with self._side.after_current():
            self._barrier()  # after it a rank may overwrite what others have read
        self._side.join()

    def _exchange(
        self, classes: Sequence[MatrixClass], owner_and_holder: Callable[[int], tuple[int, int]]
    ) -> None:
        with self._side.after_current():
            self._barrier()
            for peer in self._peers:
                for c in classes:
                    for piece in pieces(c, *owner_and_holder(peer)):
                        piece.copy_(self._of_peer(peer, piece))
        self._side.join()

    def _gather(self, bucket: int) -> None:
        self._copy_from_owners(self._params(bucket))

    def _copy_from_owners(self, whole: Tensor) -> None:
        """Copy each peer's shard of `whole` from that peer."""
        shards = whole.view(self._group.size, -1)
        for rank in self._peers:
            shards[rank].copy_(self._of_peer(rank, shards[rank]))
