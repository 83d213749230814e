"""When ranks exchange what: the order of collectives among the launches of a step, without a second rank."""

import contextlib

import pytest
import torch

import gpt2_triton.kernels
from gpt2_triton.model import communicator, sharding
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.side_stream import SideStream
from tests.support.tiny import tiny_config

LAYERS = 3


class Log:
    """Launchers and exchanges that only write down that they were called; also the ProcessGroup of rank 0, or
    another, of 2 or more, whose arenas it can read or not.
    """

    device = "cpu"
    compiling = contextlib.nullcontext

    def __init__(self, near: bool, rank: int = 0, size: int = 2):
        self.calls: list[tuple[str, int | None]] = []
        self.added: set[tuple[int, ...]] = set()  # shapes of what was added up, in parts
        self.near, self.rank, self.size = near, rank, size

    def __getattr__(self, name):
        if name == "scratch_elements":
            return gpt2_triton.kernels.scratch_elements
        return lambda *tensors, **_: self.calls.append((name, None))

    def allocate(self, nbytes):
        arenas = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(self.size)]
        return arenas[self.rank], arenas if self.near else []

    def barrier(self):
        self.calls.append(("barrier", None))

    def add(self, out, parts):
        self.calls.append(("add", self.bucket(out)))
        self.added.add(tuple(parts.shape))

    def all_reduce(self, tensor):
        self.calls.append(("all_reduce", self.bucket(tensor)))

    def reduce_scatter(self, out, whole):
        self.calls.append(("reduce_scatter", self.bucket(whole)))

    def all_gather(self, whole, part):
        self.calls.append(("all_gather", self.bucket(whole)))

    def bucket(self, tensor):
        """The bucket that begins there; at stage 2 layers share two places, so only the embedding's is known."""
        for flat, starts in (
            (self.model.state.params, [b.start for b in sharding.buckets(self.model.dims)]),
            (self.model.state.grads, sharding.grad_offsets(self.model.dims)),
        ):
            at = (tensor.data_ptr() - flat.data_ptr()) // flat.element_size()
            if flat.data_ptr() <= tensor.data_ptr() < flat.data_ptr() + flat.nbytes:
                return starts.index(at)
        return None


EXCHANGES = {"all_reduce", "reduce_scatter", "all_gather", "barrier", "add"}


def model_of_two(near: bool, zero: int, micro_steps: int) -> GPT2:
    """Rank 0's model, whose K is a Log."""
    return model_of(Log(near), zero, micro_steps)


def model_of(log: Log, zero: int, micro_steps: int = 1) -> GPT2:
    tokens = 32 * log.size * micro_steps
    config = tiny_config(
        model=dict(n_layer=LAYERS), parallel=dict(zero=zero), train=dict(total_batch_tokens=tokens, batch_size=2)
    )
    log.model = GPT2(config.with_gpus(log.size), log, "cpu", group=log)
    return log.model


def travel(near: bool, zero: int, micro_steps: int = 1) -> list[tuple[str, int | None, str]]:
    """Of a step: what is exchanged, the bucket where that is known, and the launch that comes next."""
    model = model_of_two(near, zero, micro_steps)
    log = model.K
    for micro in range(micro_steps):
        model._forward_backward(micro > 0, False, micro == micro_steps - 1)
    model._update(False)
    out = []
    for i, (name, bucket) in enumerate(log.calls):
        if name in EXCHANGES and (name, bucket) != ("all_reduce", None):  # that is the sum of losses and norms
            rest = (call for call, _ in log.calls[i:] if call not in EXCHANGES)
            out.append((name, bucket, next(rest, "end")))
    return out


LAST = LAYERS + 1  # the bucket of norms and biases; 0 is the embedding's, 1 that of layer 0
BELOW = "matmul_dx_dgelu"  # the first launch of a layer's backward pass


@pytest.mark.parametrize("zero, sums", [(0, "all_reduce"), (1, "reduce_scatter")])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_between_hosts_gradients_travel_when_their_layer_is_done(zero, sums, micro_steps):
    sent = [call for call in travel(False, zero, micro_steps) if call[0] == sums]
    layers = [(sums, 3, BELOW), (sums, 2, BELOW)]
    assert sent == [*layers, (sums, 0, "matmul_dw"), (sums, LAST, "matmul_dw"), (sums, 1, "loss_sum")]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_on_one_host_gradients_travel_together(monkeypatch, zero, micro_steps):
    """When layer 1 is done, as if so many tokens took as long as the transfers of two layers: after one meeting, those
    of layers 2 and 1; then the embedding's, norms' and biases', under layer 0's last product; then layer 0's.  At stage
    0 the sums are shared out after another meeting.
    """
    monkeypatch.setattr(communicator, "TOKENS", 32 / LAYERS)
    sent = [call for call in travel(True, zero, micro_steps) if call[0] in ("barrier", "add")]
    meet = [("barrier", None)]
    again = meet * (zero == 0)
    want = [(call, BELOW) for call in [*meet, ("add", 3), ("add", 2), *again]]
    want += [(call, "matmul_dw") for call in [*meet, ("add", 0), ("add", LAST), *again]]
    want += [(call, "loss_sum") for call in [*meet, ("add", 1), *again]]
    gathers = [(meet[0], after) for after in ("encoder_fwd", "adamw", "adamw")] if zero else []
    assert [((name, bucket), after) for name, bucket, after in sent] == gathers[:1] + want + gathers[1:]


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_of_all_layers_travel_when_a_step_begins_and_the_others_under_the_update(zero):
    gathered = [call[1:] for call in travel(False, zero) if call[0] == "all_gather"]
    layers = [(1 + layer, "encoder_fwd") for layer in range(LAYERS)]
    assert gathered == [*layers, (0, "adamw"), (LAST, "adamw")]
    meetings = [after for name, _, after in travel(True, zero) if name == "barrier"]
    assert (meetings[0], meetings[-2:]) == ("encoder_fwd", ["adamw", "adamw"])


def test_at_stage_2_every_micro_step_sends_its_layers():
    sent = [after for name, _, after in travel(False, 2, micro_steps=2) if name == "reduce_scatter"]
    first, last = [BELOW, BELOW, "encoder_fwd"], [BELOW, BELOW, "matmul_dw", "loss_sum"]
    assert sent == [*first, *last[:3], *last[2:]]  # the embedding's, with norms' and biases', before layer 0's
    meetings = [after for name, _, after in travel(True, 2, micro_steps=2) if name == "barrier"]
    twice = [after for after in first + last for _ in range(2)]  # before and after: then their place may be written
    assert meetings == ["encoder_fwd", *twice, "adamw", "adamw"]


@pytest.mark.parametrize("near", [True, False])
def test_what_the_exchange_launches_is_compiled_ahead(near):
    for zero, micro_steps in ((2, 2), (2, 1), (1, 2)):
        model = model_of_two(near, zero, micro_steps)
        model.compile()
        ahead = {name for name, _ in model.K.calls}
        assert not ahead & (EXCHANGES - {"add"})
        model.K.calls.clear()
        for micro in range(micro_steps):
            model._forward_backward(micro > 0, False, micro == micro_steps - 1)
        launched = {name for name, _ in model.K.calls} - (EXCHANGES - {"add"})
        assert launched <= ahead and ("add" in launched) == (near or (zero, micro_steps) == (2, 2))


def test_sums_of_as_many_parts_as_there_are_other_ranks_are_compiled_ahead():
    for near, zero, micro_steps in ((True, 2, 2), (True, 0, 1), (False, 2, 2)):
        log = Log(near, size=3)
        model = model_of(log, zero, micro_steps)
        model.compile()
        ahead = {parts for parts, _ in log.added}
        log.added.clear()
        for micro in range(micro_steps):
            model._forward_backward(micro > 0, False, micro == micro_steps - 1)
        launched = {parts for parts, _ in log.added}
        assert launched <= ahead == {1, 2} and (2 in launched) == near and (1 in launched) == (zero == 2)


def test_more_than_there_is_room_for_is_added_up_in_turns(monkeypatch):
    """What waits until the embedding's gradients are done, of three ranks: more than the largest bucket."""
    monkeypatch.setattr(communicator, "TOKENS", 0)
    model = model_of(Log(True, size=3), 1)
    dims, made = model.dims, sharding.buckets(model.dims)
    assert sum(b.padded for b in made if b is not made[1]) // 3 * 2 > dims["Nx"]
    model._forward_backward(False, False, True)
    assert [bucket for name, bucket in model.K.calls if name == "add"] == [3, 2, 0, LAST, 1]


@pytest.mark.parametrize("layers, rows, hold", [(12, 65536, 1), (48, 16384, 12), (2, 512, 16)])
def test_gradients_wait_until_the_backward_pass_of_as_many_layers_covers_them(layers, rows, hold):
    """124M and 1558M as docs/scaling.md has them, and the quickstart, where nothing waits: its layers are 1 and 0."""
    dims = model_of_two(True, 1, 1).dims | dict(L=layers, R=rows)
    assert communicator.PeerCopyCommunicator(Log(True), None, None, dims, [])._hold == hold


def test_every_rank_begins_with_the_next_one():
    assert [model_of(Log(True, rank, 4), 1).link._others for rank in range(4)] == [
        [1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2],
    ]  # fmt: skip


def test_parameters_that_were_gathered_between_steps_may_be_written_again():
    model = model_of_two(True, 1, 1)
    model.K.calls.clear()
    model.link.gather()
    assert model.K.calls == [("barrier", None)] * 2


def waits(near: bool, zero: int, monkeypatch) -> list[str]:
    """Of a step of two micro-steps: marks in the second stream, waits for them and for all of it, and the launches
    that come first in an embedding, a layer and a sum of losses.
    """
    calls: list[str] = []

    class Stream:
        """SideStream, written down; a mark is a number."""

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

    class Named(list):
        def append(self, call):
            if call[0] in ("encoder_fwd", "layernorm_fwd", BELOW, "encoder_bwd", "loss_sum", "adamw"):
                calls.append(call[0])

    monkeypatch.setattr(communicator, "SideStream", Stream)
    model = model_of_two(near, zero, 2)
    model.K.calls = Named()
    calls.clear()
    for micro in range(2):
        model._forward_backward(micro > 0, False, micro == 1)
    model._update(False)
    return calls


@pytest.mark.parametrize("near", [True, False])
def test_a_layer_waits_for_its_parameters_and_a_step_for_all(monkeypatch, near):
    """A layer has two norms and the head one."""
    calls = waits(near, 1, monkeypatch)
    norms = ["layernorm_fwd"] * 2
    layers = [call for layer in range(LAYERS) for call in [f"wait {1 + layer}", *norms]]
    assert calls[: 4 + len(layers)] == ["mark 1", "mark 2", "mark 3", "encoder_fwd", *layers]
    assert [call for call in calls if call.startswith("wait")] == ["wait 1", "wait 2", "wait 3"]
    ends = [call for call in calls if call in ("encoder_bwd", "join", "loss_sum", "adamw")]
    updates = ["adamw"] * (LAYERS + 2)
    assert ends == ["encoder_bwd", "join", "encoder_bwd", "join", "loss_sum", *updates, "join"]


@pytest.mark.parametrize("near", [True, False])
def test_at_stage_2_gradients_wait_until_their_place_is_free(monkeypatch, near):
    """Of three layers, which share two places, layer 0 has layer 2's."""
    calls = waits(near, 2, monkeypatch)
    backward = [call for call in calls if call == BELOW or call.split()[0] in ("mark", "wait", "join")]
    first = ["mark 1", "mark 2", "mark 3", "wait 1", "wait 2", "wait 3"]  # the parameters
    micro_steps = [[BELOW, f"mark {m}", BELOW, f"mark {m + 1}", f"wait {m}", BELOW, f"mark {m + 2}"] for m in (4, 7)]
    assert backward == [*first, *micro_steps[0], "join", *micro_steps[1], "mark 10", "join", "join"]


def test_a_rank_alone_exchanges_nothing():
    log = Log(False)
    model = GPT2(tiny_config(), log, "cpu")
    model._forward_backward(False, False, True)
    model._update(False)
    assert not {name for name, _ in log.calls} & EXCHANGES


def test_a_stream_that_has_no_work_is_not_waited_for(monkeypatch):
    """A wait for work outside a capture would invalidate it."""
    waited = []

    class Stream:
        def wait_stream(self, other):
            waited.append(other)

    side, current = SideStream("cpu"), Stream()
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
