"""Steps in flight: their buffers, and the time that counts as theirs."""

import numpy as np
import pytest

from gpt2_triton.kernels import step_io
from gpt2_triton.model import cuda
from gpt2_triton.model.step import STEPS, InFlightStep
from gpt2_triton.training.lr_schedule import step_inputs
from tests.support.tiny import packed_batch, tiny_model


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets: clock[0]."""
    now = [0.0]
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: now[0])
    return now


def ring():
    return [InFlightStep("cpu", step_io) for _ in range(STEPS)]


def begin(step, previous):
    step.begin(previous, np.zeros(8, np.float32), [0, 0, 0, 0])


def end(step, step_out=(2.0, 3.0, 1.0, 1.0, 9.0, 0.0)):
    step.step_out.numpy()[:] = step_out
    step.z.numpy()[:] = 0.5, 0.25
    step.ended.record()


def test_time_of_a_step_counts_from_the_end_of_the_step_in_flight(clock):
    a, b, c = ring()
    begin(a, c)
    clock[0] = 5.0
    end(a)
    begin(b, a)
    clock[0] = 7.0
    end(b)
    assert a.result() == (2.0, 3.0, True, 5.0, (0.5, 0.25), False, [])
    begin(c, b)
    clock[0] = 10.0
    end(c, (2.0, float("nan"), 1.0, 0.0, 9.0, 0.0))
    assert b.result().seconds == 2.0
    assert c.result().seconds == 3.0 and not c.step_out[3]


def test_time_between_steps_does_not_count_when_none_is_in_flight(clock):
    a, b, c = ring()
    begin(a, c)
    clock[0] = 5.0
    end(a)
    a.result()
    clock[0] = 105.0  # an evaluation
    begin(b, a)
    clock[0] = 107.0
    end(b)
    assert b.result().seconds == 2.0


def test_buffers_of_a_step_in_flight_are_not_reused():
    """The ring returns a step again only when its result has been read;
    until then its inputs stay.
    """
    model, config = tiny_model()
    rows = np.arange(8 * (STEPS + 1), dtype=np.float32).reshape(-1, 8)
    in_flight = []
    for i in range(STEPS):
        model.begin_step(rows[i], step=i, seed=9 << 31 | 5)
        in_flight.append(model._step)
    for i, step in enumerate(in_flight):
        assert step.step_in.tolist() == rows[i].tolist() and step.step_key.tolist() == [i, 5, 9, 0]
    with pytest.raises(AssertionError, match="has to be read"):
        model.begin_step(rows[STEPS], step=STEPS, seed=9 << 31 | 5)


@pytest.mark.slow
def test_two_steps_in_flight_give_the_results_of_steps_read_at_once():
    histories = []
    for late in (0, 1):
        model, config = tiny_model(model=dict(n_layer=1))
        waiting, history = [], []
        for step in range(3):
            model.begin_step(step_inputs(step, config), step, seed=1)
            model.micro_step(packed_batch(config, seed=step), first=True)
            waiting.append(model.end_step())
            if len(waiting) > late:
                history.append(waiting.pop(0).result()[:3])
        histories.append(history + [step.result()[:3] for step in waiting])
    assert histories[0] == histories[1] and len(set(histories[0])) == 3
