"""Decoding's kernels against float64: one row per sequence, keys and values from the cache."""

import functools
import itertools

import pytest
import torch

from gpt2_triton import kernels
from gpt2_triton.kernels.tuning import INTERPRET
from gpt2_triton.operands import NARROW_ROWS, Linear, Norm
from tests.conftest import DEVICE
from tests.support import helpers, reference
from tests.support.helpers import dtypes, error, exact, poisoned

# fp32: sums of 3072 products in another order.  bf16: three roundings
tolerance = functools.partial(helpers.tolerance, fp32=1e-6, roundings=3)


def sequences(rows):
    """Return seq with one sequence for each of `rows`, each with a different token."""
    fields = [[7 * b % 50, row, 3, 11, 0] for b, row in enumerate(rows)]
    return torch.tensor(fields, dtype=torch.int32, device=DEVICE)


@dtypes
def test_decode_embed_adds_token_and_row(rng, dtype):
    wte, wpe, seq = rng(50, 48, dtype=dtype), rng(9, 48, dtype=dtype), sequences([0, 8, 3])
    x = poisoned(3, 48, dtype=dtype)
    kernels.decode_embed(x, seq, wte, wpe)
    assert error(x, exact("decode_embed", [x], seq, wte, wpe)[0]) < tolerance(dtype)


# B, N, K: one sequence; the most for narrow blocks; the fewest for wide ones, which take no norm;
# two wide blocks; GPT-2's widths
SHAPES = [(1, 48, 64), (16, 48, 80), (17, 48, 64), (70, 16, 48), (2, 768, 1600)]


@dtypes
@pytest.mark.parametrize("B,N,K", SHAPES)
@pytest.mark.parametrize(
    "norm,bias,act,res,cap",
    [
        (1, 1, "", 0, 0.0),
        (0, 1, "", 1, 0.0),
        (1, 0, "", 0, 0.0),
        (0, 0, "", 0, 2.0),
        *((1, 1, act, 0, 0.0) for act in reference.ACTIVATIONS),
    ],
)
def test_decode_matmul_matches_float64(rng, dtype, B, N, K, norm, bias, act, res, cap):
    x, w = (rng(B, K) * 2 + rng(B, 1)).to(dtype), (rng(N, K) / K**0.5).to(dtype)
    b, lnw, lnb, added = (rng(*shape, dtype=dtype) for shape in ((N,), (K,), (K,), (B, N)))
    given = [
        Linear(w, b if bias else None),
        Norm(lnw, lnb) if norm and B <= NARROW_ROWS else None,
        added if res else None,
    ]
    out = poisoned(B, N, dtype=dtype)
    kernels.decode_matmul(out, x, *given, act, cap)
    [want] = exact("decode_matmul", [out], x, *given, act, cap)
    # the activation's input is rounded too: a square has twice the error of its root
    assert error(out, want) < (2 if act == "relu2" else 1) * tolerance(dtype)


def test_decode_matmul_gives_fp32_logits_of_bf16_weights(rng):
    x, w = rng(2, 64, dtype=torch.bfloat16), rng(128, 64, dtype=torch.bfloat16)
    out = poisoned(2, 128)
    kernels.decode_matmul(out, x, Linear(w))
    assert error(out, x.double() @ w.double().T) < 1e-6  # bf16 would be 1e-3


@dtypes
@pytest.mark.parametrize("HS", [64, 80, 128])
def test_decode_attention_matches_float64(rng, dtype, HS):
    """Rows before, at and after a block's end; the new row is stored, and rows
    after it (NaN) are not read.
    """
    NH, T, rows = 2, 150, [0, 1, 63, 64, 65, 149]
    B, C, seq = len(rows), NH * HS, sequences(rows)
    qkv, cache = rng(B, 3 * C, dtype=dtype), rng(B, T, 2, C, dtype=dtype)
    for b, row in enumerate(rows):
        cache[b, row:] = float("nan")
    att = poisoned(B, C, dtype=dtype)
    want, filled = exact("decode_attention", [att, cache], qkv, seq, NH)
    kernels.decode_attention(att, cache, qkv, seq, NH)
    assert error(att, want) < tolerance(dtype)
    assert torch.equal(cache.double().nan_to_num(9), filled.nan_to_num(9))


@dtypes
def test_cache_fill_copies_keys_and_values(rng, dtype):
    qkv, cache = rng(6, 3 * 48, dtype=dtype), poisoned(3, 8, 2, 48, dtype=dtype)
    filled = torch.tensor([0, 1, 1], dtype=torch.int32, device=cache.device)
    kernels.cache_fill(cache, qkv, filled)
    assert cache[0].isnan().all()
    for b in (1, 2):
        assert torch.equal(cache[b, :6].flatten(1), qkv[:, 48:])
        assert cache[b, 6:].isnan().all()


def test_decode_bits_do_not_depend_on_the_batch(rng):
    """Up to 16 sequences, the sums of a row do not depend on the other rows, and so
    neither do sampled tokens.
    """
    x, w, lnw, lnb = rng(16, 64), rng(48, 64), rng(64), rng(64)
    whole = poisoned(16, 48)
    kernels.decode_matmul(whole, x, Linear(w), Norm(lnw, lnb))
    for n, first in itertools.product((1, 5), (0, 11)):
        part = poisoned(n, 48)
        rows = x[first : first + n].contiguous()
        kernels.decode_matmul(part, rows, Linear(w), Norm(lnw, lnb))
        if INTERPRET:  # numpy's products of different shapes may sum in different orders
            assert error(part, whole[first : first + n]) < 1e-6
        else:
            assert torch.equal(part, whole[first : first + n])
