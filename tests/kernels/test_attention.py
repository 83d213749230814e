"""Causal attention against float64; on a GPU, `benchmarks verify` compares it with
PyTorch at GPT-2's shapes.
"""

import functools

import pytest
import torch

from gpt2_triton.kernels import hopper
from gpt2_triton.kernels.attention import attention_bwd, attention_bwd_scratch, attention_fwd
from gpt2_triton.kernels.table_file import TABLES, read_table
from gpt2_triton.kernels.tuning import dtype_name, is_hopper, table
from tests.support import helpers
from tests.support.helpers import NAMES, dtypes, error, exact, poisoned, require_same_bits

B, NH = 2, 2
# one token; less than a block; two blocks (the interpreter's), ragged; hopper's
SEQUENCES = [1, 17, 300, 320]
HEADS = [64, 80, 128]  # a block of columns exactly full, and partly
sequences = pytest.mark.parametrize("T", SEQUENCES)
heads = pytest.mark.parametrize("HS", HEADS)


# fp32: sums of a few hundred products.  bf16: p or ds and the result are rounded
tolerance = functools.partial(helpers.tolerance, fp32=2e-6, roundings=2)


def walled(tensor):
    """Return a copy between NaNs, which reach the result if an input is read past its end."""
    buffer = poisoned(tensor.numel() + 8192, dtype=tensor.dtype)
    inside = buffer[4096:-4096].view(tensor.shape)
    inside.copy_(tensor)
    return inside


def scratch(T, HS, dtype):
    return poisoned(attention_bwd_scratch(B, T, NH * HS, HS, NAMES[dtype]))


def exact_forward(qkv, T):
    return exact("attention_fwd", [poisoned(len(qkv), qkv.shape[1] // 3), poisoned(B, NH, T)], qkv)


def check_forward(rng, T, HS, dtype):
    qkv = walled(rng(B * T, 3 * NH * HS, dtype=dtype))
    out, lse = poisoned(B * T, NH * HS, dtype=dtype), poisoned(B, NH, T)
    attention_fwd(out, lse, qkv)
    want_out, want_lse = exact_forward(qkv, T)
    assert error(out, want_out) < tolerance(dtype)
    # absolute: it is an exponent, so this is the relative error of p
    assert (lse - want_lse).abs().max() < 1e-5


def check_backward(rng, T, HS, dtype, acc):
    C = NH * HS
    qkv, dout = walled(rng(B * T, 3 * C, dtype=dtype)), walled(rng(B * T, C, dtype=dtype))
    out, lse = exact_forward(qkv, T)
    out, lse = walled(out.to(dtype)), walled(lse.float())
    dqkv, dbias, delta = (
        poisoned(B * T, 3 * C, dtype=dtype),
        rng(3 * C) if acc else poisoned(3 * C),
        poisoned(B, NH, T),
    )
    want = exact("attention_bwd", [dqkv, dbias, delta], None, dout, qkv, out, lse, acc)
    attention_bwd(dqkv, dbias, delta, scratch(T, HS, dtype), dout, qkv, out, lse, acc)
    assert error(dqkv, want[0]) < tolerance(dtype)
    assert error(delta, want[2]) < 2e-6
    # in bf16 of p and ds, which are rounded: the sums are not
    assert error(dbias, want[1]) < tolerance(dtype)
    if T > 1:  # the weight of a single token is always 1: dq and dk are zero up to rounding
        for name, got, expected in zip("qkv", dqkv.split(C, 1), want[0].split(C, 1), strict=True):
            assert error(got, expected) < tolerance(dtype), f"d{name}"


@dtypes
@heads
@sequences
def test_attention_fwd_matches_float64(rng, T, HS, dtype):
    check_forward(rng, T, HS, dtype)


@dtypes
@heads
@sequences
def test_attention_bwd_matches_float64(rng, T, HS, dtype):
    check_backward(rng, T, HS, dtype, acc=HS == 80)


@dtypes
@pytest.mark.parametrize("T,HS", [(128, 64), (150, 64), (150, 80)])
def test_attention_matches_float64_with_gpu_blocks(rng, monkeypatch, T, HS, dtype):
    """Many blocks per sequence, full and ragged, with unequal blocks of
    queries and keys, as on a GPU.
    """
    for key, row in read_table(TABLES / "h200.json").rows.items():
        if key[0].startswith("attention") and key[1] == NAMES[dtype]:
            monkeypatch.setitem(
                table().rows, key, {k: v for k, v in row.items() if k.startswith("BLOCK")}
            )
    check_forward(rng, T, HS, dtype)
    check_backward(rng, T, HS, dtype, acc=False)


def test_key_blocks_divide_query_blocks():
    """The forward pass starts its diagonal at a block of queries, where a
    block of keys must start too.
    """
    rows = [
        row
        for file in TABLES.iterdir()
        for (op, _), row in read_table(file).rows.items()
        if "attention_fwd" in op
    ]
    assert rows and all(row["BLOCK_M"] % row["BLOCK_N"] == 0 for row in rows)


def run_all(qkv, dout, T, outputs):
    """Run forward and backward once; `outputs(*shape, dtype)` allocates outputs and scratch."""
    R, C = dout.shape
    out, lse = outputs(R, C, dtype=qkv.dtype), outputs(B, NH, T)
    attention_fwd(out, lse, qkv)
    dqkv, dbias, delta = outputs(R, 3 * C, dtype=qkv.dtype), outputs(3 * C), outputs(B, NH, T)
    slots = outputs(attention_bwd_scratch(B, T, C, C // NH, dtype_name(qkv)))
    attention_bwd(dqkv, dbias, delta, slots, dout, qkv, out, lse, False)
    return out, lse, dqkv, dbias, delta


@dtypes
@pytest.mark.parametrize("T,HS", [(17, 80), (300, 64), (320, 64)])
def test_attention_gives_the_same_bits_and_writes_only_its_outputs(rng, T, HS, dtype):
    qkv, dout = rng(B * T, 3 * NH * HS, dtype=dtype), rng(B * T, NH * HS, dtype=dtype)
    require_same_bits(functools.partial(run_all, qkv, dout, T), allocations=6)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("T,HS", [(17, 80), (300, 64)])
def test_attention_keeps_nan_within_its_sequence(rng, T, HS, broken):
    """The NaN rows are adjacent to the other sequence, where a partly filled block ends."""
    qkv, dout = rng(B * T, 3 * NH * HS), rng(B * T, NH * HS)
    sane = run_all(qkv, dout, T, poisoned)
    for tensor in (qkv, dout):
        tensor.view(B, -1)[broken] = float("nan")
    for before, after in zip(sane, run_all(qkv, dout, T, poisoned), strict=True):
        if before.dim() > 1:  # dbias sums over sequences
            assert torch.equal(before.view(B, -1)[1 - broken], after.view(B, -1)[1 - broken])


@pytest.mark.filterwarnings("ignore:overflow")  # of masked scores, whose exponentials are dropped
@dtypes
@pytest.mark.parametrize("T", [100, 128])
def test_attention_of_large_scores_does_not_overflow(rng, T, dtype):
    """Scores of +-2000, whose exponentials no float holds: the softmax is
    one-hot, the first token's is 1.
    """
    HS = 64
    qkv = rng(B * T, 3 * NH * HS, dtype=dtype)
    qkv[:, : 2 * NH * HS] *= 20
    dout = rng(B * T, NH * HS, dtype=dtype)
    out, lse, *gradients = run_all(qkv, dout, T, poisoned)
    want_out, want_lse = exact_forward(qkv, T)
    assert want_lse.abs().max() > 1500 and error(lse, want_lse) < 1e-6
    # an ulp of a score is 2e-4
    assert error(out, want_out) < (1e-3 if dtype == torch.float32 else tolerance(dtype))
    assert all(torch.isfinite(t).all() for t in gradients)


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
def test_hopper_kernels_give_the_portable_ones_bits_but_for_dk_on_gpu(rng, monkeypatch):
    """ds of dk is rounded from another sum, 4e-5 of dk; rows of dv may
    be added in another order.
    """
    T, C, dtype = 1024, NH * 64, torch.bfloat16
    qkv, dout = rng(B * T, 3 * C, dtype=dtype), rng(B * T, C, dtype=dtype)
    out, lse, dqkv, dbias, delta = run_all(qkv, dout, T, poisoned)
    monkeypatch.setattr(hopper, "takes", lambda *_: None)
    portable_out, portable_lse, portable, portable_dbias, portable_delta = run_all(
        qkv, dout, T, poisoned
    )
    assert torch.equal(out, portable_out) and torch.equal(lse, portable_lse)
    for ours, others, bound in zip(
        dqkv.split(C, 1), portable.split(C, 1), (0, 2e-4, 0), strict=True
    ):
        assert error(ours, others.double()) <= bound
    # softmax's gradients add up to 0 in each row, and so dk over all keys: what is left
    # of the sums is rounding, and their difference is held against the length of dk, of
    # whose rows the difference is 4e-5
    most = 4e-5 * portable.split(C, 1)[1].double().norm()
    ours, others = (sums.split(C) for sums in (dbias, portable_dbias))
    assert torch.equal(ours[0], others[0])
    assert (ours[1].double() - others[1].double()).norm() <= most
    assert error(ours[2], others[2].double()) <= 1e-6
    assert torch.equal(delta, portable_delta)


@pytest.mark.gpu
@heads
def test_attention_of_gpt2_in_fp32_on_gpu(rng, HS):
    check_forward(rng, 1000, HS, torch.float32)
    check_backward(rng, 1000, HS, torch.float32, acc=True)
