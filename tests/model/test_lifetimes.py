"""The lifetimes in the tables: every launch touches live buffers only, and NaN in
dead ones changes no bit.
"""

import functools

import pytest
import torch
from torch import Tensor

import gpt2_triton.model.memory_plan
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.kernels.contract import LAUNCHERS
from gpt2_triton.model import arena, schedule
from gpt2_triton.model.gpt2 import schedule as gpt2_layers
from gpt2_triton.model.llama import schedule as llama_layers
from gpt2_triton.model.model import Model
from tests.support.launchers import WrappedKernels
from tests.support.models import EXACT, exact_model, kernel_model, side_by_side, train_steps

# the functions of the schedules that a training step calls
STEP = ("embed", "block", "head", "block_bwd", "update")


class NoLaunch(WrappedKernels):
    """K that launches nothing: it records every call as (phase, launcher, outputs, inputs)."""

    def __init__(self):
        self.phase, self.launches = "", []

    def _launch(self, name, *args, **keywords):
        contract = LAUNCHERS[name].contract
        sides = contract.outputs(args), contract.inputs(args)
        tensors = [[t for t in side.values() if isinstance(t, Tensor)] for side in sides]
        self.launches.append((self.phase, name, *tensors))


def wrap_phases(monkeypatch, before=lambda phase: None, after=lambda phase: None) -> None:
    """Call `before` and `after` around each function of the schedule that a training step calls."""

    def wrapped(phase, function):
        def run(*args):
            before(phase)
            function(*args)
            after(phase)

        return run

    for phase in STEP:
        for module in [schedule] if hasattr(schedule, phase) else [gpt2_layers, llama_layers]:
            monkeypatch.setattr(module, phase, wrapped(phase, getattr(module, phase)))


def recorded_step(level: str, monkeypatch, **sections: dict) -> tuple[Model, list]:
    """Return a model in whose arena no two buffers share a byte, and the launches of its step."""
    monkeypatch.setattr(gpt2_triton.model.memory_plan, "place_buffers", side_by_side)
    model = kernel_model(level, **sections)
    model.K = NoLaunch()
    wrap_phases(monkeypatch, before=lambda phase: setattr(model.K, "phase", phase))
    train_steps(model, 1)
    return model, model.K.launches


def violations(model: Model, launches: list) -> list[str]:
    """Return the launches that touch a buffer outside its lifetime, or read
    one not yet written in it.
    """
    buffers, base, found, before = model.plan.buffers, model.arena.data_ptr(), [], None
    inputs_of_step = ("step_in", "step_key", "batch", "rope")
    written = {(name, 0) for name in ("params", "m", "v", "master_low", "window", *inputs_of_step)}

    def home(tensor: Tensor) -> tuple[str, int]:
        at = tensor.data_ptr() - base
        b = next(
            b
            for b in buffers.values()
            if b.offset <= at and at + tensor.nbytes <= b.offset + b.nbytes
        )
        return b.name, (at - b.offset) // b.copy_bytes

    for phase, launcher, outputs, inputs in launches:
        if phase != before:
            written = {w for w in written if w[0] in buffers and phase in buffers[w[0]].phases}
            before = phase
        reads, writes = ({home(t) for t in side if t.numel()} for side in (inputs, outputs))
        dead = {name for name, _ in reads | writes if phase not in buffers[name].phases}
        found += [f"{launcher} in {phase} touches {name}, dead there" for name in dead]
        found += [
            f"{launcher} in {phase} reads {name}, not yet written" for name, _ in reads - written
        ]
        written |= writes
    return found


SOME_LAYERS = ("gelu:1", "gelu+ln:1", "gelu+ln+qkv:1", "block:1")
CASES = [(level, {}) for level in (*RECOMPUTE_LEVELS, *SOME_LAYERS)]
CASES += [(level, dict(model=dict(dropout=0.3))) for level in RECOMPUTE_LEVELS]
CASES += [("gelu", dict(optim=dict(name="muon")))]


@pytest.mark.parametrize("level, sections", CASES, ids=str)
def test_every_launch_stays_inside_live_buffers(level, sections, monkeypatch):
    model, launches = recorded_step(level, monkeypatch, **sections)
    assert len(launches) > 60 and {phase for phase, *_ in launches} == set(STEP)
    assert violations(model, launches) == []


def test_a_wrong_lifetime_is_caught_by_the_record(monkeypatch):
    model, launches = recorded_step("gelu", monkeypatch)
    # too short
    wrong = dict(fch="block", lnf="head", mean="block", ks="head", x="block..block_bwd")
    # not what the level keeps
    wrong |= dict(qkv="block block_bwd", fcg="head", losses="embed..head update")
    for name, live in wrong.items():
        buffer = model.plan.buffers[name]
        right, buffer.live = buffer.live, live
        assert any(name in line for line in violations(model, launches)), name
        buffer.live = right


def poison(model: Model, monkeypatch) -> Model:
    """From now on fill with NaN, after each phase, what no later one may read: a wrong
    lifetime becomes a NaN loss.
    """

    def poison_dead_buffers(phase: str) -> None:
        after = arena.PHASES[arena.PHASES.index(phase) + 1]
        is_last = model._micro == model.shape.accumulation - 1
        survivors = {after if phase != "block_bwd" or is_last else "embed"}
        for b in model.plan.buffers.values():
            if (
                b.dtype.is_floating_point
                and not b.within
                and phase in b.phases
                and not b.phases & survivors
            ):
                model.arena[b.offset : b.offset + b.nbytes].view(b.dtype).fill_(float("nan"))

    wrap_phases(monkeypatch, after=poison_dead_buffers)
    return model


def bits(kind: str, level: str, dropout: float, monkeypatch=None) -> tuple[list, Tensor]:
    """Return the losses and norms of two steps, and the weights; with
    `monkeypatch` of a poisoned model.
    """
    if kind == "reference":
        model = exact_model(level, model=EXACT["model"] | dict(dropout=dropout))
    else:
        model = kernel_model(level, kind, model=dict(dropout=dropout))
    return train_steps(poison(model, monkeypatch) if monkeypatch else model, 2), model.state.params


bits_of_none = functools.cache(lambda kind, dropout: bits(kind, "none", dropout))
BITS = [
    ("reference", level, p) for level in (*RECOMPUTE_LEVELS[1:], *SOME_LAYERS) for p in (0.0, 0.3)
]
IN_KERNELS = [(kind, level, 0.0) for kind in ("fp32", "bf16") for level in RECOMPUTE_LEVELS[1:]]
IN_KERNELS += [("bf16", level, 0.3) for level in ("gelu+ln", "block")]


@pytest.mark.parametrize(
    "kind, level, dropout",
    [*BITS, *(pytest.param(*case, marks=pytest.mark.slow) for case in IN_KERNELS)],
)
def test_poisoned_memory_changes_no_bit(kind, level, dropout, monkeypatch):
    """Recomputation with NaN in every buffer that dies with a phase gives
    the bits of level `none`.
    """
    want, want_params = bits_of_none(kind, dropout)
    history, params = bits(kind, level, dropout, monkeypatch)
    assert history == want and torch.equal(params, want_params)


@pytest.mark.parametrize(
    "name, live", [("lnf", "head"), ("mean", "block"), ("qkv", "block block_bwd")]
)
def test_a_wrong_lifetime_is_caught_by_poison(name, live, monkeypatch):
    def wrong_plan(buffers):
        next(b for b in buffers if b.name == name).live = live
        return arena.place_buffers(buffers)

    right = train_steps(exact_model(), 1)
    monkeypatch.setattr(gpt2_triton.model.memory_plan, "place_buffers", wrong_plan)
    assert train_steps(poison(exact_model(), monkeypatch), 1) != right
