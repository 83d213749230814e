"""What the timed programs report of their steps: the median, a step's energy, memory.  Their
steps need a GPU.
"""

import contextlib
import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.speed import our_gpt2, torch_gpt2
from gpt2_triton.commands.app import main
from gpt2_triton.model.arena import GIB

COUNTED = {5: 4.0, 6: 6.0, 7: 20.0}  # milliseconds of a step; the first five are not counted
UNCOUNTED = 1e6


@contextlib.contextmanager
def power_of_100_watts():
    yield SimpleNamespace(joules=lambda seconds: 100 * seconds)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    free = iter([5 * GIB, 2 * GIB])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (next(free), 0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    for program in (our_gpt2, torch_gpt2):
        monkeypatch.setattr(program, "Power", power_of_100_watts)


def check(capsys):
    report = json.loads(capsys.readouterr().out)
    assert [report[key] for key in ("ms", "joules", "gib")] == pytest.approx([6, 0.6, 3])


def test_our_report_is_of_the_counted_steps(monkeypatch, capsys):
    def run(model, packed, numbers):
        for number in numbers:
            yield SimpleNamespace(seconds=COUNTED.get(number, UNCOUNTED) / 1e3)

    monkeypatch.setattr(our_gpt2, "run_steps", run)
    model = MagicMock(return_value=MagicMock(plan=SimpleNamespace(total=GIB)))
    monkeypatch.setattr(our_gpt2, "Model", model)
    monkeypatch.setattr(our_gpt2, "ProcessGroup", lambda *_: MagicMock(size=1))
    for name in ("shared", "compile_run", "begun", "packed_batch"):
        monkeypatch.setattr(our_gpt2, name, MagicMock())
    our_gpt2.measure(MagicMock(), steps=8, start=0.0)
    check(capsys)


def test_pytorch_s_report_is_of_the_counted_steps(monkeypatch, capsys):
    done = 0

    def run(model, optimizers, tokens, count, micro_steps):
        nonlocal done
        numbers = range(done, done + count)
        done += count
        return [COUNTED.get(number, UNCOUNTED) for number in numbers], torch.tensor(3.0)

    monkeypatch.setattr(torch_gpt2, "run_steps", run)
    for name in ("build", "batch_of"):
        monkeypatch.setattr(torch_gpt2, name, MagicMock(return_value=(MagicMock(), [])))
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert main(torch_gpt2.app, "d12 1 8 0".split()) == 0
    check(capsys)
