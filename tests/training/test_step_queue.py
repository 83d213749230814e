"""StepQueue: results come in order, and a step is read only when the next is launched or on request."""

from types import SimpleNamespace

import pytest

from gpt2_triton.training.step_queue import StepQueue


class FakeModel:
    """Records calls; the result of step i is the number i."""

    def __init__(self):
        self.calls = []
        self.config = SimpleNamespace(train=SimpleNamespace(seed=7))
        self.shape = SimpleNamespace(accumulation=2)

    def begin_step(self, inputs, step, seed, with_stats):
        self.step = step
        self.calls.append(("begin", inputs, step, seed, with_stats))

    def micro_step(self, packed, first, last):
        self.calls.append((packed, first, last))

    def end_step(self):
        number = self.step
        return SimpleNamespace(stats=[f"statistics {number}"], result=lambda: f"result {number}")


@pytest.fixture
def queue():
    return StepQueue(FakeModel(), SimpleNamespace(heartbeat=lambda step: None))


def test_launch_marks_the_first_and_the_last_micro_batch(queue):
    queue.launch(3, "inputs", iter("ab"), with_stats=True)
    assert queue._model.calls == [("begin", "inputs", 3, 7, True), ("a", True, False), ("b", False, True)]


def test_finish_returns_the_oldest_step_and_leaves_running_ones(queue):
    assert queue.finish() is None
    queue.launch(0, "inputs", iter("ab"), with_stats=False)
    assert queue.finish(running=1) is None
    queue.launch(1, "inputs", iter("cd"), with_stats=False)
    assert queue.finish(running=1) == "result 0" and queue.statistics == ["statistics 0"]
    assert queue.finish(running=1) is None
    assert queue.finish() == "result 1" and queue.finish() is None


@pytest.mark.parametrize("method", ["discard", "abandon"])
def test_discard_and_abandon_leave_nothing_in_flight(queue, method):
    for step in range(2):
        queue.launch(step, "inputs", iter("ab"), with_stats=False)
    getattr(queue, method)()
    assert queue.finish() is None


def test_launch_that_fails_keeps_the_step_in_flight(queue):
    queue.launch(0, "inputs", iter("ab"), with_stats=False)
    with pytest.raises(StopIteration):
        queue.launch(1, "inputs", iter("c"), with_stats=False)
    assert queue.finish() == "result 0" and queue.finish() is None
