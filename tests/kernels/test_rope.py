"""Rotary position embedding, norms of heads and groups of query heads, against float64; SwiGLU."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_triton import kernels
from gpt2_triton.kernels.attention import attention_bwd_scratch
from gpt2_triton.kernels.tuning import dtype_name
from gpt2_triton.operands import Branch, HeadNorm, Linear, Norm, Rope
from tests.conftest import DEVICE
from tests.kernels.test_attention import tolerance
from tests.support import reference
from tests.support.helpers import EPS, dtypes, error, exact, poisoned

BF16 = torch.bfloat16
groups = pytest.mark.parametrize("NH,NKV,HS", [(4, 4, 64), (4, 2, 128), (9, 3, 64)])
either_way = pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])


def table(T, HS):
    """Return cosines and sines of T positions; the last are as large as in long sequences."""
    angles = (
        torch.arange(T, dtype=torch.float64)[:, None]
        * 500_000.0 ** -torch.linspace(0, 1, HS // 2)[None, :]
        * 3
    )
    return torch.cat([angles.cos(), angles.sin()], 1).float().to(DEVICE)


def rope_of(rng, R, T, NH, NKV, HS, dtype, normed, dw=None):
    """Return a Rope; its norm has weights about 1, and statistics to be written."""
    norm = None
    if normed:
        w = (1 + 0.2 * rng(2, HS)).to(dtype)
        norm = HeadNorm(w, poisoned(R, NH + NKV), poisoned(2, HS) if dw is None else dw, NH, 1e-5)
    return Rope(table(T, HS), T, (NH + NKV) * HS, norm)


@either_way
@dtypes
@groups
def test_matmul_rope_rotates_q_and_k_and_leaves_v(rng, dtype, NH, NKV, HS, normed):
    T, K, D = 7, 48, (NH + 2 * NKV) * HS
    inp, w = rng(2 * T, K, dtype=dtype), rng(D, K, dtype=dtype)
    out, again = poisoned(2 * T, D, dtype=dtype), poisoned(2 * T, D, dtype=dtype)
    rope = rope_of(rng, 2 * T, T, NH, NKV, HS, dtype, normed)
    kernels.matmul_rope(out, inp, Linear(w), rope)
    want, _, _, wide = exact("matmul_rope", [out, inp, Linear(w), rope])
    assert error(out, want) < tolerance(dtype)
    assert not normed or error(rope.norm.rstd, wide.norm.rstd) < 2e-6
    kernels.matmul_rope(again, inp, Linear(w), rope)
    assert torch.equal(out, again)


def backward(rng, rope, qkv, dout, B, T, NH, acc=False):
    """Return dqkv and, from the same numbers, that of the float64 reference and its Rope, after
    the forward pass has been compared with it.
    """
    C, HS, dtype = dout.shape[1], rope.table.shape[1], qkv.dtype
    out, lse = poisoned(B * T, C, dtype=dtype), poisoned(B, NH, T)
    kernels.attention_fwd(out, lse, qkv)
    exact_out, exact_lse = exact("attention_fwd", [out, lse], qkv)
    assert error(out, exact_out) < tolerance(dtype)
    assert (lse - exact_lse).abs().max() < 1e-5
    normed = rope.norm is not None
    scratch = poisoned(attention_bwd_scratch(B, T, C, HS, dtype_name(out), normed))
    dqkv, delta = poisoned(*qkv.shape, dtype=dtype), poisoned(B, NH, T)
    given = [dqkv, None, delta, None, dout, qkv, out, lse, acc, rope]
    want, *_, wide = exact("attention_bwd", given)
    kernels.attention_bwd(dqkv, None, delta, scratch, dout, qkv, out, lse, acc, rope)
    return dqkv, want, wide


@pytest.mark.parametrize("norm", ["", "overwrite", "accumulate"])
@dtypes
@pytest.mark.parametrize("NH,NKV,HS,T", [(4, 4, 64, 17), (4, 2, 128, 17), (9, 3, 64, 300)])
def test_attention_in_groups_matches_float64(rng, dtype, NH, NKV, HS, T, norm):
    B, C, acc = 2, NH * HS, norm == "accumulate"
    rope = rope_of(rng, B * T, T, NH, NKV, HS, dtype, norm, rng(2, HS) if acc else None)
    if norm:
        rope.norm.rstd.copy_(rng(B * T, NH + NKV).abs() + 0.1)
    qkv, dout = rng(B * T, C + 2 * NKV * HS, dtype=dtype), rng(B * T, C, dtype=dtype)
    dqkv, want, wide = backward(rng, rope, qkv, dout, B, T, NH, acc)
    for got, expected in zip(
        *(t.split([C, NKV * HS, NKV * HS], 1) for t in (dqkv, want)), strict=True
    ):
        assert error(got, expected) < tolerance(dtype)
    assert not norm or error(rope.norm.dw, wide.norm.dw) < tolerance(dtype)


def test_a_weight_far_below_its_partners_does_not_raise_the_error(rng):
    """The gradient of q and k as the product gives them, by autograd in float64.  Rounding has left
    nothing of what weights of 0 and 1e-5 multiply: their columns lose xhat's term, and no more.
    """
    B, T, NH, HS = 1, 64, 2, 64
    x, dout = rng(T, 3 * NH * HS).double().requires_grad_(), rng(T, NH * HS, dtype=BF16)
    rope = rope_of(rng, T, T, NH, NH, HS, BF16, True)
    rope.norm.w[:, 3] = 0
    rope.norm.w[:, 40] = 1e-5
    w = rope.norm.w.double().requires_grad_()
    q, k, v = x.view(T, 3, NH, HS).unbind(1)
    q, k = (F.rms_norm(t, (HS,), eps=1e-5) * w[i] for i, t in enumerate((q, k)))
    turned = reference.rotated(torch.cat([q, k], 1).flatten(1), rope.table, torch.arange(T))
    y = torch.cat([turned, v.flatten(1)], 1)
    heads = y.view(T, 3, NH, HS).permute(1, 2, 0, 3)
    att = F.scaled_dot_product_attention(*heads, is_causal=True)
    att.transpose(0, 1).reshape(T, -1).backward(dout.double())
    by_head = x.detach().view(T, 3 * NH, HS)[:, : 2 * NH]
    rope.norm.rstd.copy_((by_head.square().mean(-1) + 1e-5).rsqrt())
    dqkv, _, _ = backward(rng, rope, y.detach().to(BF16), dout, B, T, NH)
    kept = [i for i in range(HS) if i not in (3, 40)]
    got, want = (t.view(T, 3 * NH, HS) for t in (dqkv, x.grad))
    assert error(got[..., kept], want[..., kept]) < 4 * EPS[BF16]
    # xhat's term is about 1 / sqrt(HS) of an element, and 2 of HS columns lose it
    assert error(got, want) < (2 / HS) ** 0.5 * HS**-0.5 * 1.5
    assert error(rope.norm.dw[:, kept], w.grad[:, kept]) < 4 * EPS[BF16]


@either_way
@dtypes
@groups
def test_decode_attention_is_that_of_training(rng, dtype, NH, NKV, HS, normed):
    T, C, Ckv = 9, NH * HS, NKV * HS
    qkv, cache = rng(2, C + 2 * Ckv, dtype=dtype), rng(2, T, 2, Ckv, dtype=dtype)
    rope = rope_of(rng, 2, T, NH, NKV, HS, dtype, normed)
    seq = torch.tensor([[1, 8, 0, 0, 0], [2, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    att = poisoned(2, C, dtype=dtype)
    want, exact_cache = exact("decode_attention", [att, cache], qkv, seq, NH, rope)
    kernels.decode_attention(att, cache, qkv, seq, NH, rope)
    assert error(att, want) < tolerance(dtype)
    assert error(cache, exact_cache) < tolerance(dtype)


@dtypes
@pytest.mark.parametrize("R,F", [(5, 48), (33, 1040)])
def test_swiglu_matches_float64_and_its_gradient_may_replace_its_input(rng, dtype, R, F):
    pre, dout = 3 * rng(R, 2 * F), rng(R, F, dtype=dtype)
    pre = pre.to(dtype)
    out = poisoned(R, F, dtype=dtype)
    kernels.swiglu(out, pre)
    assert error(out, exact("swiglu", [out], pre)[0]) < tolerance(dtype)
    wide = pre.double().requires_grad_()
    gate, value = wide.chunk(2, -1)
    (torch.nn.functional.silu(gate) * value).backward(dout.double())
    kernels.swiglu_bwd(pre, dout, pre)
    assert error(pre, wide.grad) < tolerance(dtype)


@dtypes
def test_matmul_swiglu_keeps_its_input_and_has_the_bits_of_a_pass(rng, dtype):
    inp, w, out, again = (
        rng(33, 64, dtype=dtype),
        rng(256, 64, dtype=dtype),
        poisoned(33, 128),
        poisoned(33, 128),
    )
    pre, out, again = poisoned(33, 256, dtype=dtype), out.to(dtype), again.to(dtype)
    kernels.matmul_swiglu(out, pre, inp, Linear(w))
    kernels.swiglu(again, pre)
    assert torch.equal(out, again) and error(pre, inp.double() @ w.double().T) < tolerance(dtype)


@dtypes
@pytest.mark.parametrize("acc", [False, True])
@pytest.mark.parametrize("R,C", [(33, 48), (7, 1600)])
def test_rmsnorm_matches_float64(rng, dtype, R, C, acc):
    x, dout, w = ((rng(*shape) * 2 + 0.5).to(dtype) for shape in ((R, C), (R, C), (C,)))
    out, rstd, dx, dw = poisoned(R, C, dtype=dtype), poisoned(R), rng(R, C, dtype=dtype), rng(C)
    norm = Norm(w, rstd=rstd, dw=dw)
    kernels.layernorm_fwd(out, norm, x)
    want_out, wide = exact("layernorm_fwd", [out, norm], x)
    want_dx, written, *_ = exact(
        "layernorm_bwd", [dx, wide, Branch(), None], None, dout, x, dx, acc
    )
    wants = want_out, wide.rstd, want_dx, written.dw
    ln, scratch = (
        poisoned(R, C, dtype=dtype),
        poisoned(kernels.layernorm_bwd_scratch(R, C, dtype_name(x))),
    )
    kernels.layernorm_bwd(dx, norm, Branch(), ln, scratch, dout, x, dx, acc)
    for got, want in zip((out, rstd, dx, dw), wants, strict=True):
        assert error(got, want) < tolerance(dtype)
    assert torch.equal(ln, out)
