"""Attention for Hopper without a GPU, in gluon_simulator: against float64."""

import dataclasses
import importlib
from types import SimpleNamespace

import pytest
import torch

from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.hopper import attention_dkdv, attention_dq, attention_fwd
from gpt2_triton.operands import HeadNorm, Rope
from tests.support.fp8 import amax_of, bits, dequantised, in_pairs, operand, rounded
from tests.support.gluon_simulator import NAMES, Race, simulated
from tests.support.helpers import EPS, error, exact, poisoned

attention = importlib.import_module("gpt2_triton.kernels.attention")
BF16, HS = torch.bfloat16, 64

# B, NH, T: one block; a ring that fills; T no power of two; steps that use each stage again
SHAPES = [(2, 2, 64), (2, 1, 128), (1, 2, 192), (1, 1, 320)]
shapes = pytest.mark.parametrize("B,NH,T", SHAPES, ids=str)
seeds = pytest.mark.parametrize("seed", [1, 2, 3])
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU"
)


def forward(out, lse, qkv, seed, **replaced):
    """Run the launcher as on Hopper, with the kernel simulated."""
    with pytest.MonkeyPatch.context() as patch, simulated(attention_fwd, seed, **replaced):
        patch.setattr(tuning, "is_hopper", lambda: True)
        attention.attention_fwd(out, lse, qkv)


def draw_forward(rng, B, NH, T, spread=1.0):
    """Return qkv, and out and lse in float64.  `spread` multiplies q and k."""
    C = NH * HS
    qkv = rng(B * T, 3 * C, dtype=BF16)
    qkv[:, : 2 * C] *= spread
    return qkv, *exact("attention_fwd", [poisoned(B * T, C), poisoned(B, NH, T)], qkv)


def draw(rng, B, NH, T):
    """Return dout, qkv, out and lse of one layer, and dqkv and delta in float64."""
    C = NH * HS
    qkv, out, lse = draw_forward(rng, B, NH, T)
    dout, out, lse = rng(B * T, C, dtype=BF16), out.to(BF16), lse.float()
    written = [poisoned(B * T, 3 * C), poisoned(3 * C), poisoned(B, NH, T)]
    return (dout, qkv, out, lse), exact("attention_bwd", written, None, dout, qkv, out, lse, False)


def backward(seed, dqkv, dout, qkv, out, lse, acc=False, rope=None, **replaced):
    """Run the launcher as on Hopper, with both kernels simulated; return dbias and delta."""
    (B, NH, T), C = lse.shape, dout.shape[1]
    dbias, delta = poisoned(3 * C) if rope is None else None, poisoned(B, NH, T)
    with pytest.MonkeyPatch.context() as patch, simulated(attention_dq, seed, **replaced):
        patch.setattr(tuning, "is_hopper", lambda: True)
        normed = rope is not None and rope.norm is not None
        # of the interpreter's table, whose blocks are larger than Hopper's
        needed = attention.attention_bwd_scratch(B, T, C, HS, "bf16", normed)
        scratch = poisoned(needed + 4 * C * B * T // 64)
        with simulated(attention_dkdv, seed, **replaced):
            attention.attention_bwd(
                dqkv, dbias, delta, scratch[:needed], dout, qkv, out, lse, acc, rope
            )
    assert scratch[needed:].isnan().all()
    return dbias, delta


@seeds
@shapes
def test_attention_fwd_matches_float64(rng, B, NH, T, seed):
    """p and the result are rounded, as in the backward pass."""
    qkv, want_out, want_lse = draw_forward(rng, B, NH, T)
    out, lse = poisoned(B * T, NH * HS, dtype=BF16), poisoned(B, NH, T)
    forward(out, lse, qkv, seed)
    assert error(out, want_out) < 2 * EPS[BF16]
    assert (lse - want_lse).abs().max() < 1e-5  # absolute, as in test_attention.py


def test_attention_fwd_of_large_scores_does_not_overflow(rng):
    """Scores of +-2000: the maximum of a row rises from block to block by more
    than any float's exponent.
    """
    qkv, want_out, want_lse = draw_forward(rng, 1, 2, 192, spread=20)
    out, lse = poisoned(192, 2 * HS, dtype=BF16), poisoned(1, 2, 192)
    forward(out, lse, qkv, 1)
    assert want_lse.abs().max() > 1500 and error(lse, want_lse) < 1e-6
    assert error(out, want_out) < 2 * EPS[BF16]


@pytest.mark.parametrize("recorded", [True, False])
def test_attention_fwd_writes_fp8(rng, recorded):
    """Bytes and amax are those of a cast of out, which is rounded to bf16."""
    B, NH, T, scale = 2, 3, 128, 32.0
    qkv, *_ = draw_forward(rng, B, NH, T)
    plain, value = (poisoned(B * T, NH * HS, dtype=BF16) for _ in range(2))
    lse, lse8 = poisoned(B, NH, T), poisoned(B, NH, T)
    forward(plain, lse, qkv, 1)
    out8 = dataclasses.replace(operand(*plain.shape, scale, False), value=value)
    forward(out8 if recorded else dataclasses.replace(out8, amax=None), lse8, qkv, 2)
    assert torch.equal(value, plain) and torch.equal(lse8, lse)
    assert torch.equal(bits(out8.rows), bits(rounded(plain.float() * scale)))
    assert amax_of(out8) == (plain.abs().max() if recorded else 0)


@seeds
@shapes
def test_attention_bwd_matches_float64(rng, B, NH, T, seed):
    """p or ds and the result are rounded."""
    arguments, want = draw(rng, B, NH, T)
    dqkv = poisoned(B * T, 3 * NH * HS, dtype=BF16)
    dbias, delta = backward(seed, dqkv, *arguments)
    for got, expected in zip(*(t.split(NH * HS, 1) for t in (dqkv, want[0])), strict=True):
        assert error(got, expected) < 2 * EPS[BF16]
    assert error(dbias, want[1]) < 2 * EPS[BF16]  # of p and ds, which are rounded: the sums are not
    assert error(delta, want[2]) < 2e-6


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    "B,NH,NKV,T", [(2, 4, 2, 128), (1, 3, 1, 192), (2, 2, 1, 64), (1, 2, 2, 320)]
)
def test_attention_in_groups_with_rotations_matches_float64(rng, B, NH, NKV, T, normed):
    C, D = NH * HS, (NH + 2 * NKV) * HS
    norm = HeadNorm(
        (1 + 0.2 * rng(2, HS)).to(BF16), rng(B * T, NH + NKV).abs(), rng(2, HS), NH, 1e-5
    )
    rope = Rope(rng(T, HS), T, 0, norm if normed else None)
    qkv, dout = rng(B * T, D, dtype=BF16), rng(B * T, C, dtype=BF16)
    out, lse, dqkv = (
        poisoned(B * T, C, dtype=BF16),
        poisoned(B, NH, T),
        poisoned(B * T, D, dtype=BF16),
    )
    forward(out, lse, qkv, 1)
    want_out, want_lse = exact("attention_fwd", [out, lse], qkv)
    assert error(out, want_out) < 2 * EPS[BF16] and (lse - want_lse).abs().max() < 1e-5
    given = [dqkv, None, poisoned(B, NH, T), None, dout, qkv, out, lse, True, rope]
    want, _, want_delta, *_, wide = exact("attention_bwd", given)
    _, delta = backward(1, dqkv, dout, qkv, out, lse, acc=True, rope=rope)
    if normed:
        assert error(norm.dw, wide.norm.dw) < 2 * EPS[BF16]
    for got, expected in zip(
        *(t.split([C, NKV * HS, NKV * HS], 1) for t in (dqkv, want)), strict=True
    ):
        assert error(got, expected) < 2 * EPS[BF16]
    assert error(delta, want_delta) < 2e-6


@pytest.mark.parametrize("NH,NKV,T", [(1, 1, 192), (2, 1, 320)])
def test_dk_and_dv_of_spans_have_the_bits_of_the_whole_sequence(rng, monkeypatch, NH, NKV, T):
    """Sequences of more than 2,048 tokens pass through shared memory in
    spans; here spans have 128.
    """
    qkv, dout, rope = (
        rng(T, (NH + 2 * NKV) * HS, dtype=BF16),
        rng(T, NH * HS, dtype=BF16),
        rng(T, HS),
    )
    out, lse = poisoned(T, NH * HS, dtype=BF16), poisoned(1, NH, T)
    forward(out, lse, qkv, 1)
    whole, spans = poisoned(*qkv.shape, dtype=BF16), poisoned(*qkv.shape, dtype=BF16)
    backward(1, whole, dout, qkv, out, lse, rope=Rope(rope, T, 0))
    monkeypatch.setattr(attention_dkdv, "LONGEST", 128)
    backward(2, spans, dout, qkv, out, lse, rope=Rope(rope, T, 0))
    assert torch.equal(spans, whole)


@seeds
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("recorded", [True, False])
def test_attention_bwd_writes_fp8(rng, transposed, recorded, seed):
    """Of gradients before their rounding to bf16, which puts one in 32
    between two numbers of e4m3.
    """
    B, NH, T, scale = 2, 1, 128, 64.0
    arguments, _ = draw(rng, B, NH, T)
    plain = poisoned(B * T, 3 * NH * HS, dtype=BF16)
    dbias, _ = backward(1, plain, *arguments)
    dqkv = operand(*plain.shape, scale, transposed)
    given = dqkv if recorded else dataclasses.replace(dqkv, amax=None)
    dout, qkv, out, lse = arguments
    out8 = dataclasses.replace(operand(*out.shape, scale, transposed), amax=None, value=out)
    out8.rows.copy_(rounded(out.float() * scale))
    dbias8, _ = backward(seed, given, dout, qkv, out8, lse)
    assert torch.equal(dbias8, dbias)
    assert error(dequantised(dqkv), plain.double()) < 0.03  # e4m3's own 0.027
    want = bits(rounded(plain.float() * scale))
    changed = (bits(dqkv.rows).int() - want.int()).abs()
    assert changed.max() <= 1 and changed.float().mean() < 1.2 / 32
    if transposed:
        for written in (dqkv, out8):
            assert torch.equal(bits(written.columns), in_pairs(written.rows))
    if recorded:
        assert abs(amax_of(dqkv) / plain.abs().max().float() - 1) < 2 * EPS[BF16]


def test_simulator_finds_barriers_that_are_invalidated_too_early_or_never(rng):
    """A kernel without partitions invalidates its barriers; test_hopper_simulated.py
    removes waits and fences.
    """
    names = NAMES["mbarrier"]

    def init(barrier, count):
        names.init(barrier, count)
        names.invalidate(barrier)

    def expect(barrier, nbytes, pred=True):
        names.expect(barrier, nbytes, pred)
        names.invalidate(barrier)

    qkv, _, _ = draw_forward(rng, 1, 1, 64)
    wrong = {
        "uses a barrier that is invalidated": dict(init=init),
        "phase is not complete": dict(expect=expect),
    }
    wrong |= {"a barrier is not invalidated": dict(invalidate=lambda barrier: None)}
    for message, replaced in wrong.items():
        barriers = SimpleNamespace(**vars(names) | replaced)
        with pytest.raises(Race, match=message):
            forward(poisoned(64, HS, dtype=BF16), poisoned(1, 1, 64), qkv, 1, mbarrier=barriers)
