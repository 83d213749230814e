"""When ranks exchange what: the order of collectives among the launches of a step, without a second rank."""

import contextlib

import pytest
import torch

import gpt2_triton.kernels
from gpt2_triton import layout
from gpt2_triton.model import GPT2
from gpt2_triton.stream import Side
from tests.tiny import tiny_config

LAYERS = 3


class Log:
    """Launchers and collectives that only write down that they were called; also the World of rank 0 of 2."""

    rank, size, device = 0, 2, "cpu"
    compiling = contextlib.nullcontext

    def __init__(self):
        self.calls: list[tuple[str, int | None]] = []

    def __getattr__(self, name):
        if name == "scratch_elements":
            return gpt2_triton.kernels.scratch_elements
        return lambda *tensors, **_: self.calls.append((name, None))

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


def model_of_two(zero: int, micro_steps: int) -> GPT2:
    """Rank 0's model, whose K is a Log."""
    log = Log()
    config = tiny_config(
        model=dict(n_layer=LAYERS), parallel=dict(zero=zero), train=dict(total_batch_tokens=64 * micro_steps)
    )
    log.model = GPT2(config.with_gpus(2), log, "cpu", world=log)
    return log.model


def travel(zero: int, micro_steps: int = 1) -> list[tuple[str, int | None, str]]:
    """Of a step: each collective over a bucket, and the launch that comes next."""
    model = model_of_two(zero, micro_steps)
    log = model.K
    for micro in range(micro_steps):
        model._forward_backward(micro > 0, False, micro == micro_steps - 1)
    model._update(False)
    collectives = {"all_reduce", "reduce_scatter", "all_gather"}
    out = []
    for i, (name, bucket) in enumerate(log.calls):
        if name in collectives and bucket is not None:
            rest = (call for call, _ in log.calls[i:] if call not in collectives | {"add"})  # add: of what arrived
            out.append((name, bucket, next(rest, "end")))
    return out


LAST = LAYERS + 1  # the bucket of norms and biases; 0 is the embedding's, 1 that of layer 0


@pytest.mark.parametrize("zero, sums", [(0, "all_reduce"), (1, "reduce_scatter")])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_gradients_travel_under_the_attention_of_the_layer_below_or_the_embedding(zero, sums, micro_steps):
    sent = [call for call in travel(zero, micro_steps) if call[0] == sums]
    assert sent == [
        (sums, 3, "attention_bwd"),
        (sums, 2, "attention_bwd"),
        (sums, 1, "encoder_bwd"),
        (sums, LAST, "loss_sum"),
        (sums, 0, "loss_sum"),
    ]


@pytest.mark.parametrize("zero", [1, 2])
def test_parameters_travel_under_the_attention_of_the_layer_before_or_the_embedding(zero):
    gathered = [call[1:] for call in travel(zero) if call[0] == "all_gather"]
    layers = [(1, "encoder_fwd"), (2, "attention_fwd"), (3, "attention_fwd")]
    assert gathered == [*layers, (0, "adamw"), (LAST, "adamw")]


def test_at_stage_2_every_micro_step_sends_its_layers():
    sent = [after for name, _, after in travel(2, micro_steps=2) if name == "reduce_scatter"]
    layers = ["attention_bwd", "attention_bwd", "encoder_bwd"]
    assert sent == layers + layers + ["loss_sum", "loss_sum"]


def test_what_the_exchange_launches_is_compiled_ahead():
    for zero, micro_steps in ((2, 2), (2, 1), (1, 2)):
        model = model_of_two(zero, micro_steps)
        model.compile()
        ahead = {name for name, _ in model.K.calls}
        assert not ahead & {"all_reduce", "reduce_scatter", "all_gather"}
        model.K.calls.clear()
        for micro in range(micro_steps):
            model._forward_backward(micro > 0, False, micro == micro_steps - 1)
        launched = {name for name, _ in model.K.calls} - {"all_reduce", "reduce_scatter", "all_gather"}
        assert launched <= ahead and ("add" in launched) == ((zero, micro_steps) == (2, 2))


def test_a_rank_alone_exchanges_nothing():
    log = Log()
    model = GPT2(tiny_config(), log, "cpu")
    model._forward_backward(False, False, True)
    model._update(False)
    assert not {name for name, _ in log.calls} & {"all_reduce", "reduce_scatter", "all_gather"}


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
