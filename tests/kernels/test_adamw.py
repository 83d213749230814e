"""AdamW against torch.optim in float64, its stochastic rounding bit by
bit, the fp32 master weights.
"""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from gpt2_triton.kernels.adamw import adamw
from gpt2_triton.kernels.master import join_master, split_master
from gpt2_triton.operands import Betas, Span, Step
from tests.conftest import DEVICE
from tests.kernels.test_philox import philox
from tests.support.helpers import error, poisoned, require_same_bits

BETA1, BETA2, EPSILON, DECAY = 0.9, 0.95, 1e-8, 0.1
SEED = (5 << 31) | 12345
N = 1 << 18
ROUND = 1  # the purpose of Philox's words here
storages = pytest.mark.parametrize("storage", ["fp32", "bf16", "master"])
lengths = pytest.mark.parametrize("n", [1, 7, 1000, N + 5])


class Adam:
    """Weights in one of the three storages, with the other arguments of
    adamw; m and v start as zeros.
    """

    def __init__(
        self, w, storage, seed=SEED, first=0, decay=DECAY, lr_factor=1.0, moments=torch.float32
    ):
        self.w = w.to(torch.float32 if storage == "fp32" else torch.bfloat16, copy=True)
        self.low = (
            torch.zeros(len(w), dtype=torch.int16, device=DEVICE) if storage == "master" else None
        )
        self.m, self.v = (torch.zeros(len(w), dtype=moments, device=DEVICE) for _ in range(2))
        self.seed, self.first, self.decay, self.lr_factor, self.t = seed, first, decay, lr_factor, 0

    def step(self, g, lr=1e-3, factor=1.0, applied=1.0):
        nan, t = float("nan"), self.t + 1
        step_in = [lr, 1 / (1 - BETA1**t), 1 / (1 - BETA2**t), nan, nan, nan, nan, nan]
        step_out, step_in = (
            torch.tensor(row, device=DEVICE) for row in ([nan, nan, factor, applied], step_in)
        )
        key = [self.t, self.seed & 0x7FFFFFFF, self.seed >> 31, 0]
        key = torch.tensor(key, dtype=torch.int32, device=DEVICE)
        state = self.w, self.m, self.v, self.low
        span = Span(*state, g, self.first, self.lr_factor, self.decay)
        adamw(span, Step(step_out, step_in, key), Betas(BETA1, BETA2, EPSILON))
        self.t = t
        return self

    def bits(self):
        """Return the bits of the weights; with masters, of the fp32 numbers."""
        if self.low is None:
            return self.w.view(torch.int32 if self.w.dtype == torch.float32 else torch.int16)
        hi, low = (part.long() & 0xFFFF for part in (self.w.view(torch.int16), self.low))
        return ((hi << 16 | low) - (low >= 0x8000).long() * 0x10000).to(torch.int32)


def kernel_seed(seed):
    """Return the 64-bit key that the device computes from the two 31-bit halves of the seed."""
    return seed & 0x7FFFFFFF | (seed >> 31) << 32


def rounded(exact, seed, first, step, shift=0):
    """Round fp32 numbers stochastically, as weights.py defines it, in
    numpy; moments with shift 16.
    """
    noise = philox(kernel_seed(seed), first, len(exact), step, ROUND) >> shift & 0xFFFF
    bits = exact.cpu().numpy().view(np.uint32) + noise
    return torch.from_numpy((bits >> 16).astype(np.uint16).view(np.int16)).to(DEVICE)


# ---- the update ----


@pytest.mark.parametrize("decay", [0.0, DECAY])
@lengths
def test_adamw_matches_torch_over_ten_steps(rng, n, decay):
    w = rng(n)
    ours, leaf = Adam(w, "fp32", decay=decay, lr_factor=2.0), w.double().requires_grad_()
    torchs = torch.optim.AdamW([leaf], betas=(BETA1, BETA2), eps=EPSILON, weight_decay=decay)
    for step in range(10):
        g, lr, factor = rng(n) * 10.0 ** -(step % 3), 1e-2 * (step + 1), 1 / (1 + step % 2)
        ours.step(g, lr, factor)
        torchs.param_groups[0]["lr"] = 2 * lr
        leaf.grad = g.double() * factor
        torchs.step()
    state = torchs.state[leaf]
    assert error(ours.w, leaf.detach()) < 2e-6  # ten roundings to fp32, and those of m and v
    # 1 - beta2 of an fp32 beta2 has a relative error of up to 6e-7
    assert error(ours.m, state["exp_avg"]) < 2e-6 and error(ours.v, state["exp_avg_sq"]) < 4e-6


@storages
def test_adamw_rounds_moments_to_bf16_by_the_upper_half_of_the_words(rng, storage):
    """The weights' update has the moments before they are rounded; in later steps, after."""
    n, first = 5001, 2**31 - 1024
    w, grads = rng(n), [rng(n) for _ in range(2)]
    exact, run = (
        Adam(w, storage, first=first),
        Adam(w, storage, first=first, moments=torch.bfloat16),
    )
    for step, g in enumerate(grads):
        exact.m, exact.v = run.m.float(), run.v.float()
        exact.step(g)
        run.step(g)
        for moment, unrounded in ((run.m, exact.m), (run.v, exact.v)):
            assert torch.equal(
                moment.view(torch.int16), rounded(unrounded, SEED, first, step, shift=16)
            )
        assert torch.equal(run.bits(), exact.bits())


@storages
def test_adamw_skipped_step_changes_no_byte(rng, storage):
    run = Adam(rng(1001), storage)
    run.step(rng(1001))
    before = [t.clone() for t in (run.w, run.m, run.v, run.low) if t is not None]
    run.step(poisoned(1001), factor=float("nan"), applied=0.0)
    after = [t for t in (run.w, run.m, run.v, run.low) if t is not None]
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(before, after, strict=True)
    )
    run.step(rng(1001))
    assert not torch.equal(before[0], run.w)  # a finite step does change them


@storages
@pytest.mark.parametrize("n", [1, 1001, N + 5])
def test_adamw_gives_the_same_bits_and_writes_only_its_outputs(rng, storage, n):
    w, g = rng(n), rng(n)

    def run(outputs):
        ours = Adam(w, storage)
        for name in ("w", "m", "v", "low"):
            if (tensor := getattr(ours, name)) is not None:
                setattr(ours, name, outputs(n, dtype=tensor.dtype).copy_(tensor))
        ours.step(g).step(g)
        return ours.w, ours.bits(), ours.m, ours.v

    require_same_bits(run, allocations=4 if storage == "master" else 3)


# ---- bf16: stochastic rounding ----


@pytest.mark.parametrize("first", [0, 1000, 2**31 - 512, 2**31, 2**34 + 4])
@pytest.mark.parametrize("seed", [0, SEED, 2**62 - 1])
def test_stochastic_rounding_adds_philox_bits(rng, first, seed):
    """The weight is that of an fp32 run plus 16 bits of noise, in three steps from
    the weights stored before.
    """
    w = rng(1001, dtype=torch.bfloat16)
    exact, run = Adam(w, "fp32", seed, first), Adam(w, "bf16", seed, first)
    for step in range(3):
        g = rng(1001)
        exact.step(g)
        run.step(g)
        assert torch.equal(run.bits(), rounded(exact.w, seed, first, step))
        assert torch.equal(run.m, exact.m) and torch.equal(run.v, exact.v)
        exact.w.copy_(run.w)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, on NaN
def test_stochastic_rounding_keeps_nan():
    """All bits of a GPU's NaN but the sign are ones; adding noise to them would give a number."""
    g = torch.full((1024,), 0x7FFFFFFF, dtype=torch.int32, device=DEVICE).view(torch.float32)
    assert Adam(torch.ones(1024, device=DEVICE), "bf16").step(g).w.isnan().all()


# ---- bf16 and 16 more bits: the fp32 master weights ----


@triton.jit
def _round_trip_kernel(hi_ptr, low_ptr, back_ptr, w_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(w_ptr + i, mask=i < n, other=0)
    hi, low = split_master(bits.to(tl.float32, bitcast=True))
    tl.store(hi_ptr + i, hi, mask=i < n)
    tl.store(low_ptr + i, low, mask=i < n)
    tl.store(back_ptr + i, join_master(hi, low).to(tl.int32, bitcast=True), mask=i < n)


def round_trip(bits):
    n = len(bits)
    hi, low, back = (
        torch.full((n,), 7, dtype=d, device=DEVICE)
        for d in (torch.bfloat16, torch.int16, torch.int32)
    )
    block = 1 << 17
    _round_trip_kernel[(triton.cdiv(n, block),)](hi, low, back, bits, n, BLOCK=block)
    return hi, low, back


def test_join_master_inverts_split_master(rng):
    """For every bf16 number with edge and random lower bits: signs, zeros,
    subnormals, infinities and NaNs.
    """
    edges = torch.tensor([0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    every = (torch.arange(1 << 16)[:, None] << 16 | edges).flatten()
    drawn = torch.randint(1 << 32, (1 << 18,), generator=rng.generator)
    bits = torch.cat([every, drawn]).to(torch.int32).to(DEVICE)
    hi, low, back = round_trip(bits)
    assert torch.equal(back, bits)
    assert torch.equal(low, (bits & 0xFFFF).to(torch.int16))


@lengths
def test_adamw_with_masters_has_the_bits_of_fp32(rng, n):
    w = rng(n, dtype=torch.bfloat16)
    exact, run = Adam(w, "fp32"), Adam(w, "master")
    for _ in range(5):
        g = rng(n)
        exact.step(g)
        run.step(g)
        assert torch.equal(run.bits(), exact.bits())
        assert torch.equal(run.m, exact.m) and torch.equal(run.v, exact.v)
    assert error(run.w, exact.w) < 2.0**-8
