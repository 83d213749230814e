"""The schedule three ways: reference launchers against autograd (is the mathematics right), kernels against reference
launchers launch by launch (which kernel is wrong), and the lifetimes of tables.py against what the launches touch.
"""

import contextlib
import functools
import inspect

import numpy as np
import pytest
import torch
from torch import Tensor

import gpt2_triton.kernels
import gpt2_triton.model.memory_plan
from benchmarks import torch_reference
from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import RECOMPUTE_LEVELS
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.kernels import contract
from gpt2_triton.model import arena
from gpt2_triton.model.buffers import Params
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.training.lr_schedule import step_inputs
from tests.conftest import DEVICE
from tests.support import reference
from tests.support.helpers import error, max_error
from tests.support.tiny import tiny_config, tiny_model

F64 = dict(act=torch.float64, f32=torch.float64, i32=torch.int32, i16=torch.int16)
# 3 layers of 2 heads; T < block_size; V < Vp; head chunks of 6, 6 and 4 rows; two micro-steps of 16 tokens
EXACT = dict(
    model=dict(n_layer=3, n_head=2, n_embd=128, vocab_size=300, block_size=12),
    train=dict(batch_size=2, seq_len=8, total_batch_tokens=32),
)

# all, and each in some of the layers
SOME_LAYERS = (*RECOMPUTE_LEVELS, "gelu:1", "gelu+ln:1", "gelu+ln+qkv:1", "block:1")


def exact_model(level: str = "none", **changes: dict) -> GPT2:
    """The schedule over the reference launchers in float64; its arena begins as NaN, but for random weights."""
    config = tiny_config(**(EXACT | changes), memory=dict(recompute=level, head_rows=6))
    model = GPT2(config, reference, "cpu", dtypes=F64)
    model.arena.fill_(0xFF)
    model.state.m.zero_()
    model.state.v.zero_()
    model.state.window.zero_()
    randomise(model)
    return model


def randomise(model: GPT2) -> None:
    """Weights that leave no term of a gradient small: norms about 1, all else 0.2 * N(0, 1), padded vocabulary 0."""
    generator, params, w = torch.Generator().manual_seed(0), model.state.params, model.train_view.w
    params.copy_(0.2 * torch.randn(params.shape, generator=generator))
    w.lnw.add_(1.0)
    w.wte[model.dims["V"] :] = 0


def batches(config: Config, n: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """n batches of random ids and targets [B, T], a fifth of the targets ignored."""
    t, rng = config.train, np.random.default_rng(seed)
    ids, targets = rng.integers(0, config.model.vocab_size, (2, n, config.micro_batch, t.seq_len), dtype=np.int32)
    targets[rng.random(targets.shape) < 0.2] = -1
    return [(torch.from_numpy(i), torch.from_numpy(j)) for i, j in zip(ids, targets, strict=True)]


def train_steps(model: GPT2, n: int) -> list[tuple[float, float, bool]]:
    """(loss, gradient norm, finite) of n steps on fixed random tokens."""
    config, history = model.config, []
    for step in range(n):
        model.begin_step(step_inputs(step, config, 1.0 / config.total_batch_tokens), step, 1)
        for micro, (ids, targets) in enumerate(batches(config, config.accumulation, seed=step)):
            model.micro_step(pack_batch(None, ids.numpy(), targets.numpy(), config.model.vocab_size), first=micro == 0)
        history.append(model.end_step().result()[:3])
    return history


# ---- is the mathematics right: reference launchers against autograd, in float64 ----


@functools.cache
def autograd_step() -> tuple[float, Params, dict[str, int]]:
    """Loss and leaves with gradients of exact_model's first step."""
    model = exact_model()
    d, params = model.dims, torch_reference.leaves(model.state.params, model.dims)
    loss = sum(torch_reference.gpt2_loss(params, i, t, d["V"], d["NH"]) for i, t in batches(model.config, 2)) / 2
    loss.backward()
    return loss.item(), params, d


@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_loss_and_gradients_equal_autograd(level):
    model = exact_model(level)
    assert [r.stop - r.start for r in model.train_view.head_chunks()] == [6, 6, 4] and model.config.accumulation == 2
    train_steps(model, 1)
    want, params, dims = autograd_step()
    # float64 costs 1e-16 an operation; sums here have up to 512 terms and 40 operations follow one another
    loss, norm = model.state.step_out[:2].tolist()
    assert abs(loss - want) < 1e-12 * want
    got = {name: t for name, t, _ in torch_reference.tensors(model.train_view.g, dims)}
    for name, leaf, _ in torch_reference.tensors(params, dims):
        assert max_error(got[name], leaf.grad) < 1e-11, name
    want = torch.cat([leaf.grad.flatten() for _, leaf, _ in torch_reference.tensors(params, dims)]).norm().item()
    assert abs(norm - want) < 1e-11 * want


def test_three_updates_equal_torch_adamw():
    """Decay on matrices only, bias correction, clipping: losses and norms of three steps, and the last weights."""
    model = exact_model(train=EXACT["train"] | dict(total_batch_tokens=16), optim=dict(lr=0.01, clip=0.5))
    d, o, params = model.dims, model.config.optim, torch_reference.leaves(model.state.params, model.dims)
    got = train_steps(model, 3)
    steps = [batches(model.config, 1, seed=step)[0] for step in range(3)]
    settings = dict(betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, clip=o.clip)
    losses, norms = torch_reference.train(params, d, steps, [o.lr] * 3, **settings)
    # lr and bias corrections travel as float32, 6e-8 relative, and enter the next gradient through the weights
    np.testing.assert_allclose([loss for loss, _, _ in got], losses, rtol=1e-6)
    np.testing.assert_allclose([norm for _, norm, _ in got], norms, rtol=1e-6)
    assert min(norms) > o.clip  # clipping did happen
    ours = {name: t for name, t, _ in torch_reference.tensors(model.train_view.w, d)}
    for name, leaf, _ in torch_reference.tensors(params, d):
        assert max_error(ours[name], leaf.detach()) < 1e-6, name


def test_evaluation_equals_the_training_forward():
    """A smaller view of the same arena: losses of 1 x 5 tokens."""
    model = exact_model()
    ids, targets = (t[:1, :5].contiguous() for t in batches(model.config, 1)[0])
    targets[0, 2], targets[0, 4] = -1, 7
    losses = model.evaluate(ids.numpy(), targets.numpy())
    want = torch_reference.gpt2_loss(
        torch_reference.leaves(model.state.params, model.dims), ids, targets, 300, 2, "none"
    )
    assert max_error(losses, want.detach()) < 1e-12 and losses[2] == 0


@pytest.mark.parametrize("level", RECOMPUTE_LEVELS)
def test_decoding_equals_the_training_forward(level):
    """In the arena of a training run: 3 tokens into the cache and 2 decoded behind them; the cross entropy of each
    step's logits is the loss of the forward pass.
    """
    model = exact_model(level, sample=dict(every=1))
    ids, targets = (t[:1, :5].contiguous() for t in batches(model.config, 1)[0])
    targets[0, 3], targets[0, 4] = 7, 9
    losses, seq = model.evaluate(ids.numpy(), targets.numpy()), model.decoding.seq
    model.prefill(ids[0, :3].tolist(), slice(0, 1))
    for row in (3, 4):
        seq.copy_(torch.tensor([[ids[0, row], row, 0, 0, 0]]))
        model.decode(0.0, 0, 1.0)
        logits = model.decoding.logits[0, :300]
        assert seq[0].tolist() == [logits.argmax(), row + 1, 1, 0, 0]
        assert abs(logits.logsumexp(0) - logits[targets[0, row]] - losses[row]) < 1e-12


# ---- which kernel is wrong: each launch beside its reference in float64 ----


class SideBySide:
    """K that runs every kernel, then its reference on float64 copies of the same inputs, and compares each output."""

    step_io = gpt2_triton.kernels.step_io

    def __init__(self, tolerance: float):
        self.tolerance, self.workspace, self.launched = tolerance, torch.empty(1), []

    def __getattr__(self, name: str):
        return functools.partial(self._launch, name)

    def _launch(self, name: str, *args, **keywords):
        names = inspect.signature(getattr(reference, name)).parameters
        exact = [
            self.workspace if n in contract.WORKSPACE else self._copy(a) for n, a in zip(names, args, strict=False)
        ]
        with recorded() as trace:
            getattr(gpt2_triton.kernels, name)(*args, **keywords)
        getattr(reference, name)(*exact, **keywords)
        self.launched.append(name)
        for output, got, want in zip(names, trace[0][1], exact, strict=False):
            if got is not None and got.is_floating_point() and output not in contract.WORKSPACE:
                off = error(got, want)
                assert off < self.tolerance, f"launch {len(self.launched)}, {name}: {output} is off by {off:.1e}"

    @staticmethod
    def _copy(argument):
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument.to(torch.float64 if argument.is_floating_point() else argument.dtype, copy=True)


@contextlib.contextmanager
def recorded():
    """Every launch meanwhile, as (launcher, outputs, inputs)."""
    contract.TRACE = []
    try:
        yield contract.TRACE
    finally:
        contract.TRACE = None


def kernel_model(level: str = "none", dtype: str = "fp32") -> GPT2:
    """The tiny model in the real kernels: two micro-steps, padded vocabulary, head chunks of 20 and 12 rows."""
    train, memory = dict(dtype=dtype, total_batch_tokens=64), dict(recompute=level, head_rows=20)
    model, _ = tiny_model(model=dict(vocab_size=300), train=train, memory=memory, sample=dict(every=1))
    model.eager = True  # tests look at single launches, or put another K in
    randomise(model)
    return model


# fp32: sums of up to 384 products, 6e-8 each, and cancellation in the backward of attention and layernorm
# bf16: one or two roundings (of pre before GELU, of P before P @ V), 1.7e-3 each; the interpreter truncates, 3.4e-3
@pytest.mark.parametrize("dtype, tolerance", [("fp32", 1e-5), ("bf16", 4e-3 if DEVICE == "cuda" else 8e-3)])
@pytest.mark.parametrize("level", ["none", "gelu+ln+qkv"])
def test_every_launch_of_a_step_equals_its_reference(level, dtype, tolerance):
    model = kernel_model(level, dtype)
    model.K = SideBySide(tolerance)
    train_steps(model, 1)
    model.K.tolerance *= 1.5  # one more rounding: decoding's products normalise their input
    model.prefill([1, 2, 3, 4], slice(0, 1))
    model.decoding.seq.copy_(torch.tensor([[5, 4, 0, 0, 0]]))
    model.decode(0.0, 0, 1.0)
    no_step = {"fill", "normal_init", "add_partials", "column_sums"}  # the last two: ZeRO-2's, the launchers'
    no_step |= {"parameter_stats", "tensor_stats"}  # tests/model/test_tensor_stats.py
    assert set(model.K.launched) >= contract.LAUNCHERS.keys() - no_step


def test_a_wrong_kernel_is_named(monkeypatch):
    right = gpt2_triton.kernels.matmul_dx

    def wrong(dinp, dout, w):
        right(dinp, dout, w)
        dinp[3, 5] += 1

    monkeypatch.setattr(gpt2_triton.kernels, "matmul_dx", wrong)
    model = kernel_model()
    model.K = SideBySide(1e-5)
    with pytest.raises(AssertionError, match="matmul_dx: dinp is off by"):
        train_steps(model, 1)


@pytest.mark.parametrize("kind", ["reference", "fp32", "bf16"])
def test_every_recompute_level_gives_the_same_bits(kind):
    models = {level: exact_model(level) if kind == "reference" else kernel_model(level, kind) for level in SOME_LAYERS}
    histories = {level: train_steps(model, 1) for level, model in models.items()}
    for level, model in models.items():
        assert histories[level] == histories["none"], level
        assert torch.equal(model.state.grads, models["none"].state.grads), level
        assert torch.equal(model.state.params, models["none"].state.params), level


# ---- are the lifetimes right: what launches touch, and what they would miss ----


class Recorded(GPT2):
    """Keeps every launch with its phase."""

    def _phase(self, name, *acc):
        with recorded() as trace:
            super()._phase(name, *acc)
        self.__dict__.setdefault("launches", []).extend((name, *launch) for launch in trace)


def side_by_side(rows: list[arena.Row]) -> arena.Plan:
    """A plan in which no two rows share a byte, so that an address names its row."""
    offset = 0
    for row in rows:
        row.offset, offset = offset, offset + row.nbytes
    return arena.Plan({row.name: row for row in rows}, offset)


def violations(model: Recorded) -> list[str]:
    """Launches that touch a row outside its lifetime, or read what nothing has written since the row came to life."""
    rows, base, found, before = model.plan.rows, model.arena.data_ptr(), [], None
    written = {(name, 0) for name in ("params", "m", "v", "low", "window", "step_in", "step_key", "packed")}

    def home(tensor: Tensor) -> tuple[str, int]:
        at = tensor.data_ptr() - base
        row = next(r for r in rows.values() if r.offset <= at and at + tensor.nbytes <= r.offset + r.nbytes)
        return row.name, (at - row.offset) // row.copy_bytes

    for phase, launcher, outputs, inputs in model.launches:
        if phase != before:
            written, before = {w for w in written if w[0] in rows and phase in rows[w[0]].phases}, phase
        reads, writes = ({home(t) for t in side if t is not None and t.numel()} for side in (inputs, outputs))
        dead = {name for name, _ in reads | writes if phase not in rows[name].phases}
        found += [f"{launcher} in {phase} touches {name}, dead there" for name in dead]
        found += [f"{launcher} in {phase} reads {name}, not yet written" for name, _ in reads - written]
        written |= writes
    return found


def recorded_step(level: str, monkeypatch) -> Recorded:
    monkeypatch.setattr(gpt2_triton.model.memory_plan, "plan", side_by_side)
    monkeypatch.setattr("tests.support.tiny.GPT2", Recorded)
    train_steps(model := kernel_model(level), 1)
    return model


@pytest.mark.parametrize("level", SOME_LAYERS)
def test_every_launch_stays_inside_live_rows(level, monkeypatch):
    assert violations(recorded_step(level, monkeypatch)) == []


def test_a_wrong_lifetime_is_caught_by_the_record(monkeypatch):
    model = recorded_step("gelu", monkeypatch)
    wrong = dict(fch="block", lnf="head", mean="block", ks="head", x="block..block_bwd")  # too short
    wrong |= dict(qkv="block block_bwd", fcg="head", losses="embed..head update")  # not what the level keeps
    for name, live in wrong.items():
        row = model.plan.rows[name]
        right, row.live = row.live, live
        assert any(name in line for line in violations(model)), name
        row.live = right


def poison(model: GPT2) -> GPT2:
    """From now on fill with NaN, after each phase, what no later one may read: a wrong lifetime becomes a NaN loss."""
    run = model._phase

    def phase_and_poison(phase: str, *acc: bool) -> None:
        run(phase, *acc)
        after = arena.PHASES[arena.PHASES.index(phase) + 1]
        survivors = {"embed", "update"} if phase == "block_bwd" else {after}  # the next micro-step, or the update
        for row in model.plan.rows.values():
            if row.dtype.is_floating_point and not row.within and phase in row.phases and not row.phases & survivors:
                model.arena[row.offset : row.offset + row.nbytes].view(row.dtype).fill_(float("nan"))

    model._phase = phase_and_poison
    return model


def test_poisoned_memory_changes_no_bit():
    """NaN in every row that dies with a phase: two steps of the same losses, norms and weights."""
    clean, poisoned = kernel_model("gelu"), poison(kernel_model("gelu"))
    assert train_steps(clean, 2) == train_steps(poisoned, 2)
    assert torch.equal(clean.state.params, poisoned.state.params)


@pytest.mark.parametrize("name, live", [("lnf", "head"), ("mean", "block"), ("qkv", "block block_bwd")])
def test_a_wrong_lifetime_is_caught_by_poison(name, live, monkeypatch):
    def wrong_plan(rows):
        next(row for row in rows if row.name == name).live = live
        return arena.plan(rows)

    right = exact_model()
    monkeypatch.setattr(gpt2_triton.model.memory_plan, "plan", wrong_plan)
    assert train_steps(poison(exact_model()), 1) != train_steps(right, 1)
