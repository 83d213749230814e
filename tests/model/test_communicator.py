"""The send schedule as data, and the order of transfers among the launches of a
step, without a second rank.
"""

import contextlib

import pytest
import torch

import gpt2_triton.kernels
from gpt2_triton.model import communicator, peer_copies, sharding, side_stream
from gpt2_triton.model.communicator import NcclCommunicator, send_schedule
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.model import Model
from gpt2_triton.model.peer_copies import PeerCopyCommunicator
from gpt2_triton.model.sharding import NOT_A_LAYER
from tests.support.tiny import tiny_config

LAYERS = 3


class Log:
    """Records calls of launchers and collectives; also the ProcessGroup, with
    readable arenas if `shared`.
    """

    device = "cpu"
    compiling = staticmethod(lambda **_: contextlib.nullcontext())
    first_on_host = staticmethod(lambda make: make())

    def __init__(self, shared: bool, rank: int = 0, size: int = 2):
        self.calls: list[tuple[str, int | None]] = []
        self.added: set[tuple[int, ...]] = set()  # shapes of the parts that were added up
        self.shared, self.rank, self.size = shared, rank, size

    def __getattr__(self, name):
        if name in ("scratch_elements", "step_io"):
            return getattr(gpt2_triton.kernels, name)
        return lambda *tensors, **_: self.calls.append((name, None))

    def allocate_shared(self, nbytes):
        arenas = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.size)]
        return arenas[self.rank], arenas if self.shared else []

    def barrier(self):
        self.calls.append(("barrier", None))

    def add_partials(self, out, parts):
        self.calls.append(("add_partials", self.bucket(out)))
        self.added.add(tuple(parts.shape))

    def all_reduce(self, tensor):
        self.calls.append(("all_reduce", self.bucket(tensor)))

    def reduce_scatter(self, out, whole):
        self.calls.append(("reduce_scatter", self.bucket(whole)))

    def all_gather(self, whole, part):
        self.calls.append(("all_gather", self.bucket(whole)))

    def bucket(self, tensor):
        """Return the bucket that begins at the tensor; None, or layer 0's or
        1's, for layers at stage 2.
        """
        for flat, starts in (
            (self.model.state.params, [b.start for b in sharding.buckets(self.model.dims)]),
            (self.model.state.grads, sharding.grad_offsets(self.model.dims)),
        ):
            at = (tensor.data_ptr() - flat.data_ptr()) // flat.element_size()
            if flat.data_ptr() <= tensor.data_ptr() < flat.data_ptr() + flat.nbytes:
                return starts.index(at)
        return None


EXCHANGES = {"all_reduce", "reduce_scatter", "all_gather", "barrier", "add_partials"}


def model_of(log: Log, zero: int, micro_steps: int = 1) -> Model:
    """Return the model of the log's rank, with the Log as K."""
    tokens = 32 * log.size * micro_steps
    config = tiny_config(
        model=dict(n_layer=LAYERS),
        parallel=dict(zero=zero),
        train=dict(total_batch_tokens=tokens, batch_size=2),
    )
    log.model = Model(config, log, "cpu", group=log)
    return log.model


def transfers(shared: bool, zero: int, micro_steps: int = 1) -> list[tuple[str, int | None, str]]:
    """Return the transfers of a step: kind, bucket if known, and the launch that follows."""
    model = model_of(Log(shared), zero, micro_steps)
    log = model.K
    for micro in range(micro_steps):
        model.launch_forward_backward(micro > 0, False, micro == micro_steps - 1)
    model.launch_update(False)
    out = []
    for i, (name, bucket) in enumerate(log.calls):
        # the sum of losses and norms
        if name in EXCHANGES and (name, bucket) != ("all_reduce", None):
            rest = (call for call, _ in log.calls[i:] if call not in EXCHANGES)
            out.append((name, bucket, next(rest, "end")))
    return out


REST = LAYERS + 1  # the bucket of norms and biases; 0 is the embedding's, 1 layer 0's
NEXT_LAYER = "matmul_dx_dact"  # the first launch of a layer's backward pass


ZERO_2 = {2: [3], 1: [2], 0: [1]}


@pytest.mark.parametrize(
    "n_layer, zero, last, send_from, sent",
    [
        # collectives: each layer at once
        (3, 1, True, 3, {2: [3], 1: [2], NOT_A_LAYER: [0, 4], 0: [1]}),
        (1, 0, True, 1, {NOT_A_LAYER: [0, 2], 0: [1]}),
        # peer copies: the upper layers together
        (4, 1, True, 1, {1: [4, 3, 2], NOT_A_LAYER: [0, 5], 0: [1]}),
        (4, 1, True, 0, {NOT_A_LAYER: [4, 3, 2, 0, 5], 0: [1]}),
        *((3, zero, False, 3, {}) for zero in (0, 1)),
        # each layer alone in every micro-step
        *((3, 2, False, send_from, ZERO_2) for send_from in (0, 3)),
        *((3, 2, True, send_from, ZERO_2 | {NOT_A_LAYER: [0, 4]}) for send_from in (0, 3)),
    ],
)
def test_send_schedule(n_layer, zero, last, send_from, sent):
    assert send_schedule(n_layer, zero, last, send_from) == sent


@pytest.mark.parametrize("layers, rows, send_from", [(12, 65536, 1), (48, 16384, 12), (2, 512, 16)])
def test_peer_copies_send_when_the_remaining_layers_hide_the_transfer(layers, rows, send_from):
    """124M and 1558M by the formula of docs/engineering/scaling.md; in the
    quickstart nothing waits.
    """
    dims = model_of(Log(True), 1).dims | dict(L=layers, R=rows)
    assert PeerCopyCommunicator(Log(True), None, None, dims, [])._send_from(dims) == send_from
    assert NcclCommunicator(Log(False), None, None, dims)._send_from(dims) == layers


@pytest.mark.parametrize("zero, sums", [(0, "all_reduce"), (1, "reduce_scatter")])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_collectives_reduce_each_layer_after_its_backward_pass(zero, sums, micro_steps):
    sent = [call for call in transfers(False, zero, micro_steps) if call[0] == sums]
    layers = [(sums, 3, NEXT_LAYER), (sums, 2, NEXT_LAYER)]
    assert sent == [
        *layers,
        (sums, 0, "matmul_dw_pair"),
        (sums, REST, "matmul_dw_pair"),
        (sums, 1, "loss_sum"),
    ]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_peer_copies_reduce_layers_together_between_barriers(monkeypatch, zero, micro_steps):
    """With send_from 1: layers 2 and 1 after one barrier; then embedding, norms and
    biases, under layer 0's last product; then layer 0.  At stage 0 the sums are copied to
    all ranks after a second barrier.
    """
    monkeypatch.setattr(peer_copies, "TOKENS_TO_HIDE_A_LAYER", 32 / LAYERS)
    sent = [
        call
        for call in transfers(True, zero, micro_steps)
        if call[0] in ("barrier", "add_partials")
    ]
    before = [("barrier", None)]
    after = before * (zero == 0)
    want = [
        (call, NEXT_LAYER) for call in [*before, ("add_partials", 3), ("add_partials", 2), *after]
    ]
    want += [
        (call, "matmul_dw_pair")
        for call in [*before, ("add_partials", 0), ("add_partials", REST), *after]
    ]
    want += [(call, "loss_sum") for call in [*before, ("add_partials", 1), *after]]
    gathers = (
        [(before[0], launch) for launch in ("embedding_fwd", "adamw", "adamw")] if zero else []
    )
    assert [((name, bucket), launch) for name, bucket, launch in sent] == gathers[
        :1
    ] + want + gathers[1:]


@pytest.mark.parametrize("zero", [1, 2])
def test_gather_of_layers_begins_a_step_and_that_of_other_parameters_ends_it(zero):
    gathered = [call[1:] for call in transfers(False, zero) if call[0] == "all_gather"]
    layers = [(1 + layer, "embedding_fwd") for layer in range(LAYERS)]
    assert gathered == [*layers, (0, "adamw"), (REST, "adamw")]
    barriers = [launch for name, _, launch in transfers(True, zero) if name == "barrier"]
    assert (barriers[0], barriers[-2:]) == ("embedding_fwd", ["adamw", "adamw"])


def test_zero_2_reduces_layers_in_every_micro_step():
    sent = [
        launch for name, _, launch in transfers(False, 2, micro_steps=2) if name == "reduce_scatter"
    ]
    first, last = (
        [NEXT_LAYER, NEXT_LAYER, "embedding_fwd"],
        [NEXT_LAYER, NEXT_LAYER, "matmul_dw_pair", "loss_sum"],
    )
    # embedding, norms and biases are two buckets, before layer 0's
    assert sent == [*first, *last[:3], *last[2:]]
    barriers = [
        launch for name, _, launch in transfers(True, 2, micro_steps=2) if name == "barrier"
    ]
    # the second one lets the buffer be overwritten
    twice = [launch for launch in first + last for _ in range(2)]
    assert barriers == ["embedding_fwd", *twice, "adamw", "adamw"]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("shared", [True, False])
def test_precompile_covers_the_launches_of_the_exchange(shared, size):
    """Also the sums of as many parts as there are peers."""
    for zero, micro_steps in ((2, 2), (2, 1), (1, 2), (0, 1)):
        log = Log(shared, size=size)
        model = model_of(log, zero, micro_steps)
        compile_run(model)
        compiled, added = {name for name, _ in log.calls}, {parts for parts, _ in log.added}
        assert not compiled & (EXCHANGES - {"add_partials"}) and added == {1, size - 1}
        log.calls.clear()
        log.added.clear()
        for micro in range(micro_steps):
            model.launch_forward_backward(micro > 0, False, micro == micro_steps - 1)
        launched = {name for name, _ in log.calls} - (EXCHANGES - {"add_partials"})
        assert launched <= compiled and ("add_partials" in launched) == (
            shared or (zero, micro_steps) == (2, 2)
        )
        parts = {parts for parts, _ in log.added}
        assert parts <= added and (size - 1 in parts) == (
            shared or size == 2 and "add_partials" in launched
        )


def test_peer_copies_take_rounds_when_buckets_exceed_received(monkeypatch):
    """With send_from 0 and three ranks, the buckets sent after the embedding's
    exceed the largest bucket.
    """
    monkeypatch.setattr(peer_copies, "TOKENS_TO_HIDE_A_LAYER", 0)
    model = model_of(Log(True, size=3), 1)
    dims, all_buckets = model.dims, sharding.buckets(model.dims)
    assert sum(b.padded for b in all_buckets if b is not all_buckets[1]) // 3 * 2 > dims["Nx"]
    model.launch_forward_backward(False, False, True)
    assert [bucket for name, bucket in model.K.calls if name == "add_partials"] == [
        3,
        2,
        0,
        REST,
        1,
    ]


def test_peer_copies_begin_with_the_next_rank():
    assert [model_of(Log(True, rank, 4), 1).comm._peers for rank in range(4)] == [
        [1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2],
    ]  # fmt: skip


@pytest.mark.parametrize("call", [("gather_params",), ("deliver_matrices", [])], ids=str)
def test_copies_of_what_peers_hold_are_between_two_barriers(call):
    """What they hold may be overwritten after the second."""
    model = model_of(Log(True), 1)
    model.K.calls.clear()
    name, *arguments = call
    getattr(model.comm, name)(*arguments)
    assert model.K.calls == [("barrier", None)] * 2


def stream_waits(shared: bool, zero: int, monkeypatch) -> list[str]:
    """Return a step's events of the side stream, waits, joins, and first launches of
    embedding, layer and loss sum.
    """
    calls: list[str] = []

    class NumberedEvents:
        """Stands for the side stream; an event is a number."""

        def __init__(self, _device):
            self.marks = 0

        after_current = contextlib.nullcontext

        def record(self):
            self.marks += 1
            calls.append(f"mark {self.marks}")
            return self.marks

        def wait(self, mark):
            calls.append(f"wait {mark}")

        def join(self):
            calls.append("join")

    class SomeLaunches(list):
        def append(self, call):
            if call[0] in (
                "embedding_fwd",
                "layernorm_fwd",
                NEXT_LAYER,
                "embedding_bwd",
                "loss_sum",
                "adamw",
            ):
                calls.append(call[0])

    monkeypatch.setattr(communicator, "SideStream", NumberedEvents)
    model = model_of(Log(shared), zero, 2)
    model.K.calls = SomeLaunches()
    calls.clear()
    for micro in range(2):
        model.launch_forward_backward(micro > 0, False, micro == 1)
    model.launch_update(False)
    return calls


@pytest.mark.parametrize("shared", [True, False])
def test_wait_params_waits_for_one_layer_and_end_micro_step_for_all(monkeypatch, shared):
    """A layer has two norms and the head one."""
    calls = stream_waits(shared, 1, monkeypatch)
    norms = ["layernorm_fwd"] * 2
    layers = [call for layer in range(LAYERS) for call in [f"wait {1 + layer}", *norms]]
    assert calls[: 4 + len(layers)] == ["mark 1", "mark 2", "mark 3", "embedding_fwd", *layers]
    assert [call for call in calls if call.startswith("wait")] == ["wait 1", "wait 2", "wait 3"]
    ends = [call for call in calls if call in ("embedding_bwd", "join", "loss_sum", "adamw")]
    updates = ["adamw"] * (LAYERS + 2)
    assert ends == ["embedding_bwd", "join", "embedding_bwd", "join", "loss_sum", *updates, "join"]


@pytest.mark.parametrize("shared", [True, False])
def test_wait_grad_buffer_of_zero_2_waits_for_the_layer_two_above(monkeypatch, shared):
    """Three layers share two gradient buffers; layers 0 and 2 have the same."""
    calls = stream_waits(shared, 2, monkeypatch)
    backward = [
        call for call in calls if call == NEXT_LAYER or call.split()[0] in ("mark", "wait", "join")
    ]
    params = ["mark 1", "mark 2", "mark 3", "wait 1", "wait 2", "wait 3"]
    micro_steps = [
        [
            NEXT_LAYER,
            f"mark {m}",
            NEXT_LAYER,
            f"mark {m + 1}",
            f"wait {m}",
            NEXT_LAYER,
            f"mark {m + 2}",
        ]
        for m in (4, 7)
    ]
    assert backward == [
        *params,
        *micro_steps[0],
        "join",
        *micro_steps[1],
        "mark 10",
        "join",
        "join",
    ]


def test_side_stream_without_work_is_not_waited_for(monkeypatch):
    """A wait for work outside a capture would invalidate it."""
    waited = []

    class Stream:
        def wait_stream(self, other):
            waited.append(other)

    side, current = side_stream.SideStream("cpu"), Stream()
    side._stream = other = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    side.join()
    assert waited == []
    with side.after_current():
        pass
    side.join()
    side.join()
    assert waited == [current, other]
