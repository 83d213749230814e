"""When ranks exchange what: the order of collectives among the launches of a step, without a second rank."""

import contextlib

import pytest
import torch

import gpt2_triton.kernels
from gpt2_triton import layout, link
from gpt2_triton.model import GPT2
from gpt2_triton.stream import Side
from tests.tiny import tiny_config

LAYERS = 3


class Log:
    """Launchers and exchanges that only write down that they were called; also the World of rank 0 of 2, whose arena
    it can read or not.
    """

    rank, size, device = 0, 2, "cpu"
    compiling = contextlib.nullcontext

    def __init__(self, near: bool):
        self.calls: list[tuple[str, int | None]] = []
        self.near = near

    def __getattr__(self, name):
        if name == "scratch_elements":
            return gpt2_triton.kernels.scratch_elements
        return lambda *tensors, **_: self.calls.append((name, None))

    def allocate(self, nbytes):
        own, other = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
        return own, [own, other] if self.near else []

    def barrier(self):
        self.calls.append(("barrier", None))

    def add(self, out, parts):
        self.calls.append(("add", self.bucket(out)))

    def all_reduce(self, tensor):
        self.calls.append(("all_reduce", self.bucket(tensor)))

    def reduce_scatter(self, out, whole):
        self.calls.append(("reduce_scatter", self.bucket(whole)))

    def all_gather(self, whole, part):
        self.calls.append(("all_gather", self.bucket(whole)))

    def bucket(self, tensor):
        """The bucket that begins there; at stage 2 layers share two places, so only the embedding's is known."""
        for flat, starts in (
            (self.model.state.params, [b.start for b in layout.buckets(self.model.dims)]),
            (self.model.state.grads, layout.gradient_starts(self.model.dims)),
        ):
            at = (tensor.data_ptr() - flat.data_ptr()) // flat.element_size()
            if flat.data_ptr() <= tensor.data_ptr() < flat.data_ptr() + flat.nbytes:
                return starts.index(at)
        return None


EXCHANGES = {"all_reduce", "reduce_scatter", "all_gather", "barrier", "add"}


def model_of_two(near: bool, zero: int, micro_steps: int) -> GPT2:
    """Rank 0's model, whose K is a Log."""
    log = Log(near)
    config = tiny_config(
        model=dict(n_layer=LAYERS), parallel=dict(zero=zero), train=dict(total_batch_tokens=64 * micro_steps)
    )
    log.model = GPT2(config.with_gpus(2), log, "cpu", world=log)
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
    layers = [(sums, 3, BELOW), (sums, 2, BELOW), (sums, 1, "encoder_bwd"), (sums, LAST, "encoder_bwd")]
    assert sent == [*layers, (sums, 0, "loss_sum")]


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_on_one_host_gradients_travel_together(monkeypatch, zero, micro_steps):
    """When layer 1 is done, as if so many tokens took as long as the transfers of two layers: after one meeting, those
    of layers 2 and 1; then layer 0's with norms and biases, then the embedding's.  At stage 0 the sums are shared out
    after another meeting.
    """
    monkeypatch.setattr(link, "TOKENS", 32 / LAYERS)
    sent = [call for call in travel(True, zero, micro_steps) if call[0] in ("barrier", "add")]
    meet = [("barrier", None)]
    again = meet * (zero == 0)
    want = [(call, BELOW) for call in [*meet, ("add", 3), ("add", 2), *again]]
    want += [(call, "encoder_bwd") for call in [*meet, ("add", 1), ("add", LAST), *again]]
    want += [(call, "loss_sum") for call in [*meet, ("add", 0), *again]]
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
    layers = [BELOW, BELOW, "encoder_bwd"]
    assert sent == [*layers, *layers, "encoder_bwd", "loss_sum"]
    meetings = [after for name, _, after in travel(True, 2, micro_steps=2) if name == "barrier"]
    twice = [after for after in layers for _ in range(2)]  # before and after: then their place may be written again
    assert meetings == ["encoder_fwd", *twice, *twice, "loss_sum", "loss_sum", "adamw", "adamw"]


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

    side, current = Side("cpu"), Stream()
    side._stream = other = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    side.join()
    assert waited == []
    with side.behind():
        pass
    side.join()
    side.join()
    assert waited == [current, other]
