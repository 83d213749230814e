"""Rotary position embedding and groups of query heads, against float64; SwiGLU."""

import pytest
import torch

from gpt2_triton import kernels
from gpt2_triton.kernels.attention import attention_bwd_scratch
from gpt2_triton.kernels.tuning import INTERPRET, dtype_name
from gpt2_triton.operands import Branch, Linear, Norm, Rope
from tests.conftest import DEVICE
from tests.support.helpers import EPS, dtypes, error, exact, poisoned

groups = pytest.mark.parametrize("NH,NKV,HS", [(4, 4, 64), (4, 2, 128), (9, 3, 64)])


def tolerance(dtype):
    """As in test_attention.py."""
    return 2e-6 if dtype == torch.float32 else 2 * EPS[dtype] * (2 if INTERPRET else 1)


def table(T, HS):
    """Return cosines and sines of T positions; the last are as large as in long sequences."""
    angles = (
        torch.arange(T, dtype=torch.float64)[:, None]
        * 500_000.0 ** -torch.linspace(0, 1, HS // 2)[None, :]
        * 3
    )
    return torch.cat([angles.cos(), angles.sin()], 1).float().to(DEVICE)


@dtypes
@groups
def test_matmul_rope_rotates_q_and_k_and_leaves_v(rng, dtype, NH, NKV, HS):
    T, K, D = 7, 48, (NH + 2 * NKV) * HS
    inp, w, rope = rng(2 * T, K, dtype=dtype), rng(D, K, dtype=dtype), table(T, HS)
    out, again = poisoned(2 * T, D, dtype=dtype), poisoned(2 * T, D, dtype=dtype)
    given = Rope(rope, T, (NH + NKV) * HS)
    kernels.matmul_rope(out, inp, Linear(w), given)
    assert error(out, exact("matmul_rope", [out], inp, Linear(w), given)[0]) < tolerance(dtype)
    kernels.matmul_rope(again, inp, Linear(w), given)
    assert torch.equal(out, again)


@dtypes
@pytest.mark.parametrize("NH,NKV,HS,T", [(4, 4, 64, 17), (4, 2, 128, 17), (9, 3, 64, 300)])
def test_attention_in_groups_matches_float64(rng, dtype, NH, NKV, HS, T):
    B, C, D = 2, NH * HS, (NH + 2 * NKV) * HS
    qkv, dout, rope = rng(B * T, D, dtype=dtype), rng(B * T, C, dtype=dtype), table(T, HS)
    out, lse = poisoned(B * T, C, dtype=dtype), poisoned(B, NH, T)
    kernels.attention_fwd(out, lse, qkv)
    exact_out, exact_lse = exact("attention_fwd", [out, lse], qkv)
    assert error(out, exact_out) < tolerance(dtype)
    assert (lse - exact_lse).abs().max() < 1e-5
    scratch = poisoned(attention_bwd_scratch(B, T, C, HS, dtype_name(out)))
    dqkv, delta = poisoned(B * T, D, dtype=dtype), poisoned(B, NH, T)
    kernels.attention_bwd(dqkv, None, delta, scratch, dout, qkv, out, lse, False, Rope(rope, T, 0))
    want, *_ = exact(
        "attention_bwd", [dqkv, None, delta], None, dout, qkv, out, lse, False, Rope(rope, T, 0)
    )
    for got, expected in zip(
        *(t.split([C, NKV * HS, NKV * HS], 1) for t in (dqkv, want)), strict=True
    ):
        assert error(got, expected) < tolerance(dtype)


@dtypes
@groups
def test_decode_attention_rotates_and_shares_keys_as_training_does(rng, dtype, NH, NKV, HS):
    T, C, Ckv = 9, NH * HS, NKV * HS
    qkv, cache, rope = (
        rng(2, C + 2 * Ckv, dtype=dtype),
        rng(2, T, 2, Ckv, dtype=dtype),
        table(T, HS),
    )
    seq = torch.tensor([[1, 8, 0, 0, 0], [2, 0, 0, 0, 0]], dtype=torch.int32, device=DEVICE)
    att = poisoned(2, C, dtype=dtype)
    want, exact_cache = exact("decode_attention", [att, cache], qkv, seq, NH, Rope(rope, T, 0))
    kernels.decode_attention(att, cache, qkv, seq, NH, Rope(rope, T, 0))
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
