"""Norms of the heads of q and k inside the kernels that rotate them, against float64."""

import pytest
import torch
import torch.nn.functional as F

from gpt2_triton import kernels
from gpt2_triton.kernels.attention import attention_bwd_scratch
from gpt2_triton.kernels.tuning import dtype_name
from gpt2_triton.operands import HeadNorm, Linear, Rope
from tests.conftest import DEVICE
from tests.kernels.test_rope import groups, table, tolerance
from tests.support import reference
from tests.support.helpers import EPS, accumulate, dtypes, error, exact, poisoned

BF16 = torch.bfloat16


def normed_rope(rng, R, T, NH, NKV, HS, dtype, dw=None):
    """Return a Rope whose norm has weights about 1, and statistics to be written."""
    w = (1 + 0.2 * rng(2, HS)).to(dtype)
    dw = poisoned(2, HS) if dw is None else dw
    norm = HeadNorm(w, poisoned(R, NH + NKV), dw, NH, 1e-5)
    return Rope(table(T, HS), T, (NH + NKV) * HS, norm)


@dtypes
@groups
def test_matmul_rope_norms_q_and_k_and_leaves_v(rng, dtype, NH, NKV, HS):
    T, K, D = 7, 48, (NH + 2 * NKV) * HS
    inp, w = rng(2 * T, K, dtype=dtype), rng(D, K, dtype=dtype)
    out, again = poisoned(2 * T, D, dtype=dtype), poisoned(2 * T, D, dtype=dtype)
    rope = normed_rope(rng, 2 * T, T, NH, NKV, HS, dtype)
    kernels.matmul_rope(out, inp, Linear(w), rope)
    want, _, _, wide = exact("matmul_rope", [out, inp, Linear(w), rope])
    assert error(out, want) < tolerance(dtype)
    assert error(rope.norm.rstd, wide.norm.rstd) < 2e-6
    kernels.matmul_rope(again, inp, Linear(w), rope)
    assert torch.equal(out, again)


def backward(rng, rope, qkv, dout, B, T, acc):
    """Return dqkv, and what the float64 reference writes from the same numbers."""
    C, HS, NH, dtype = dout.shape[1], rope.table.shape[1], rope.norm.NH, qkv.dtype
    out, lse = poisoned(B * T, C, dtype=dtype), poisoned(B, NH, T)
    kernels.attention_fwd(out, lse, qkv)
    scratch = poisoned(attention_bwd_scratch(B, T, C, HS, dtype_name(out), True))
    dqkv, delta = poisoned(*qkv.shape, dtype=dtype), poisoned(B, NH, T)
    given = [dqkv, None, delta, None, dout, qkv, out, lse, acc, rope]
    want, *_, wide = exact("attention_bwd", given)
    kernels.attention_bwd(dqkv, None, delta, scratch, dout, qkv, out, lse, acc, rope)
    return dqkv, want, wide.norm.dw


@accumulate
@dtypes
@pytest.mark.parametrize("NH,NKV,HS,T", [(4, 4, 64, 17), (4, 2, 128, 17), (9, 3, 64, 300)])
def test_attention_bwd_goes_through_the_norms(rng, dtype, NH, NKV, HS, T, acc):
    B, C = 2, NH * HS
    rope = normed_rope(rng, B * T, T, NH, NKV, HS, dtype, rng(2, HS) if acc else None)
    rope.norm.rstd.copy_(rng(B * T, NH + NKV).abs() + 0.1)
    qkv, dout = rng(B * T, C + 2 * NKV * HS, dtype=dtype), rng(B * T, C, dtype=dtype)
    dqkv, want, dw = backward(rng, rope, qkv, dout, B, T, acc)
    for got, expected in zip(
        *(t.split([C, NKV * HS, NKV * HS], 1) for t in (dqkv, want)), strict=True
    ):
        assert error(got, expected) < tolerance(dtype)
    assert error(rope.norm.dw, dw) < tolerance(dtype)


def test_a_weight_far_below_its_partners_does_not_raise_the_error(rng):
    """The gradient of q and k as the product gives them, by autograd in float64.  Rounding has left
    nothing of what weights of 0 and 1e-5 multiply: their columns lose xhat's term, and no more.
    """
    B, T, NH, HS = 1, 64, 2, 64
    x, dout = rng(T, 3 * NH * HS).double().requires_grad_(), rng(T, NH * HS, dtype=BF16)
    rope = normed_rope(rng, T, T, NH, NH, HS, BF16)
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
    dqkv, _, _ = backward(rng, rope, y.detach().to(BF16), dout, B, T, False)
    kept = [i for i in range(HS) if i not in (3, 40)]
    got, want = (t.view(T, 3 * NH, HS) for t in (dqkv, x.grad))
    assert error(got[..., kept], want[..., kept]) < 4 * EPS[BF16]
    # xhat's term is about 1 / sqrt(HS) of an element, and 2 of HS columns lose it
    assert error(got, want) < (2 / HS) ** 0.5 * HS**-0.5 * 1.5
    assert error(rope.norm.dw[:, kept], w.grad[:, kept]) < 4 * EPS[BF16]


@dtypes
@groups
def test_decode_attention_norms_as_training_does(rng, dtype, NH, NKV, HS):
    T, C, Ckv = 9, NH * HS, NKV * HS
    qkv, cache = rng(2, C + 2 * Ckv, dtype=dtype), rng(2, T, 2, Ckv, dtype=dtype)
    rope = normed_rope(rng, 2, T, NH, NKV, HS, dtype)
    seq = torch.tensor([[1, 8, 0, 0, 0], [2, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    att = poisoned(2, C, dtype=dtype)
    want, exact_cache = exact("decode_attention", [att, cache], qkv, seq, NH, rope)
    kernels.decode_attention(att, cache, qkv, seq, NH, rope)
    assert error(att, want) < tolerance(dtype)
    assert error(cache, exact_cache) < tolerance(dtype)
