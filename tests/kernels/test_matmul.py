"""Matrix products and their epilogues against float64, at ragged shapes
and, on a GPU, at GPT-2's.
"""

import functools
import importlib
import itertools

import pytest
import torch

from gpt2_triton.kernels import hopper, tuning
from gpt2_triton.kernels.dw_split import split_tiles
from gpt2_triton.kernels.epilogue import Epilogue
from gpt2_triton.kernels.hopper import matmul as hopper_matmul
from gpt2_triton.kernels.hopper import matmul_wide as hopper_matmul_wide
from gpt2_triton.kernels.table_file import TABLES, read_table
from gpt2_triton.kernels.tuning import INTERPRET, is_hopper
from gpt2_triton.operands import Linear
from tests.conftest import DEVICE
from tests.support import helpers, reference
from tests.support.elsewhere import compiled_elsewhere
from tests.support.helpers import (
    DTYPES,
    EPS,
    NAMES,
    accumulate,
    dtypes,
    error,
    exact,
    poisoned,
    require_same_bits,
    scratch_of,
)

# the package exports a function of this name
mm = importlib.import_module("gpt2_triton.kernels.matmul")

# R, N, K: one row; ragged; two blocks of rows and two of the sum; two blocks of columns
# (blocks of the interpreter); one for hopper/, a little more than a tile in both directions;
# the same in whole bands of tiles
SHAPES = [
    (1, 64, 48),
    (77, 48, 80),
    (1100, 48, 528),
    (40, 1040, 32),
    (160, 320, 448),
    (1024, 320, 576),
]
# fp32 sums over R, whose error grows with R, which is larger on a GPU
SUMS = 2e-6 if INTERPRET else 2e-5
CASES = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES]
LINEAR = [(3, 1), (1, 1), (4, 1), (1, 4)]  # qkv, attproj, fc, fcproj: [out, in] in units of C

activations = pytest.mark.parametrize("act", reference.ACTIVATIONS)


def on_gpu(*layers):
    """Return cases of GPT-2 124M and, ragged, 1558M in bf16; layers: [out, in] in units of C."""
    sizes = [(R, n * C, k * C) for R, C in ((32768, 768), (8192 + 40, 1600)) for n, k in layers]
    return [pytest.param(*size, torch.bfloat16, marks=pytest.mark.gpu) for size in sizes]


def cases(rows):
    return pytest.mark.parametrize("R,N,K,dtype", rows, ids=str)


# fp32: a thousand terms lose about 1e-6 one by one.  bf16: one rounding
tolerance = functools.partial(helpers.tolerance, fp32=2e-6)


def linear(rng, R, N, K, dtype):
    """Return inp, w, b of a linear layer, scaled so that its outputs are of order one."""
    return rng(R, K, dtype=dtype), rng(N, K).mul(K**-0.5).to(dtype), rng(N, dtype=dtype)


@cases([*CASES, *on_gpu(*LINEAR)])
def test_forward_products_match_float64(rng, R, N, K, dtype):
    inp, w, b = linear(rng, R, N, K, dtype)
    res = rng(R, N, dtype=dtype)
    out, pre = poisoned(R, N, dtype=dtype), poisoned(R, N, dtype=dtype)
    mm.matmul(out, inp, Linear(w, b))
    assert error(out, exact("matmul", [out], inp, Linear(w, b))[0]) < tolerance(dtype)
    mm.matmul_add(out, res, inp, Linear(w, b))
    assert error(out, exact("matmul_add", [out], res, inp, Linear(w, b))[0]) < tolerance(dtype)
    for act, function in reference.ACTIVATIONS.items():
        out.fill_(float("nan"))
        mm.matmul_act(out, pre, inp, Linear(w, b), act)
        assert error(pre, exact("matmul", [pre], inp, Linear(w, b))[0]) < tolerance(dtype)
        # of the stored pre-activation
        assert error(out, function(pre.double())) < tolerance(dtype)


def test_matmul_without_bias_writes_fp32_without_rounding_to_bf16(rng):
    inp, w, _ = linear(rng, 77, 48, 80, torch.bfloat16)
    out = poisoned(77, 48)
    mm.matmul(out, inp, Linear(w))
    expected = exact("matmul", [out], inp, Linear(w))[0]
    # products of bf16 are exact in fp32: no bf16 rounding remains
    assert error(out, expected) < 1e-6


@cases([*CASES, *on_gpu(*LINEAR)])
def test_dx_matches_float64(rng, R, N, K, dtype):
    dout, w, _ = rng(R, N, dtype=dtype), *linear(rng, R, N, K, dtype)[1:]
    dinp = poisoned(R, K, dtype=dtype)
    mm.matmul_dx(dinp, dout, Linear(w))
    assert error(dinp, exact("matmul_dx", [dinp], dout, Linear(w))[0]) < tolerance(dtype)


@accumulate
@activations
@cases([*CASES, *on_gpu((1, 4))])
def test_dx_dact_matches_float64(rng, R, N, K, dtype, act, acc):
    """The activation's output is recomputed where dbias is added to."""
    dout, w, pre = rng(R, N, dtype=dtype), linear(rng, R, N, K, dtype)[1], rng(R, K, dtype=dtype)
    dpre, dbias = poisoned(R, K, dtype=dtype), rng(K) if acc else poisoned(K)
    act_out = poisoned(R, K, dtype=dtype) if acc else None
    expected = exact("matmul_dx_dact", [dpre, dbias, act_out], None, dout, Linear(w), pre, acc, act)
    part = scratch_of(mm.matmul_dx_dact_scratch(R, K, NAMES[dtype]))
    mm.matmul_dx_dact(dpre, dbias, act_out, part, dout, Linear(w), pre, acc, act)
    on_hopper = hopper.takes(f"matmul_d{act}", R, K, NAMES[dtype]) is not None
    rounded = on_hopper or not tuning.has_tma()
    # there act'(pre) is multiplied with a rounded product: two roundings in
    # dpre, one in the terms of dbias.  Half of relu2's numbers are 0: of one row too few are left
    # for a mean
    more = rounded or (R == 1 and act == "relu2")
    assert error(dpre, expected[0]) < tolerance(dtype) * (2**0.5 if more else 1)
    # else of the unrounded values
    assert error(dbias, expected[1]) < (EPS[dtype] if rounded else SUMS)
    assert act_out is None or error(act_out, expected[2]) < tolerance(dtype)


@pytest.mark.slow
def test_no_term_of_dbias_is_fused_with_a_sum():
    """Of a * b + c * d a compiler rounds either product, by what else the kernel computes, and so
    the kernel that also stores the activation would give another dbias.  mul.rn is never fused.
    """
    program = """
from tests.kernels.compile_targets import compile_for
compiler = compile_for("sm_80", ["_matmul_kernel:dact"], ["bf16", "bf16, recompute"])
[plain, storing] = compiler.kernels["_matmul_kernel"]
print(plain.asm["ptx"].count("mul.rn.f32"), storing.asm["ptx"].count("mul.rn.f32"))
"""
    # 128 x 128 numbers of a tile for 128 threads
    assert compiled_elsewhere("-c", program).split() == ["128", "128"]


@activations
@cases(
    [(*shape, dtype) for shape in ((77, 48, 80), (160, 320, 448)) for dtype in DTYPES]
    + on_gpu((4, 1))
)
def test_recomputed_activation_has_the_bits_of_the_forward_pass(rng, R, N, K, dtype, act):
    """In the portable kernels, and in those of kernels/hopper."""
    inp, w, b = linear(rng, R, N, K, dtype)
    kept, recomputed, pre, dpre = (poisoned(R, N, dtype=dtype) for _ in range(4))
    mm.matmul_act(kept, pre, inp, Linear(w, b), act)
    down, dout = rng(K, N, dtype=dtype), rng(R, K, dtype=dtype)
    part = scratch_of(mm.matmul_dx_dact_scratch(R, N, NAMES[dtype]))
    mm.matmul_dx_dact(dpre, poisoned(N), recomputed, part, dout, Linear(down), pre, False, act)
    assert torch.equal(kept, recomputed)
    again = poisoned(R, N, dtype=dtype)
    # in the place of pre
    mm.matmul_dx_dact(again, poisoned(N), pre, part, dout, Linear(down), pre, False, act)
    assert torch.equal(kept, pre) and torch.equal(dpre, again)


SPLIT = [
    (*shape, dtype)
    for shape in ((2100, 48, 32), (9001, 32, 16), (2100, 2064, 16))
    for dtype in DTYPES
]
HEAD = pytest.param(16384, 50304, 768, torch.bfloat16, marks=pytest.mark.gpu)


@accumulate
@cases([*CASES, *SPLIT, *on_gpu(*LINEAR), HEAD])
def test_dw_matches_float64(rng, R, N, K, dtype, acc):
    name = NAMES[dtype]
    if INTERPRET:  # whole tiles, split tiles, and both in one launch
        split = split_tiles([(N, K)], R, mm._dw_row(N, K, R, name), tuning.num_sms())
        assert (split.whole_tiles > 0, split.split_tiles > 0) == (R <= 1024 or N > 2048, R > 1024)
    dout, inp = rng(R, N, dtype=dtype), rng(R, K, dtype=dtype)
    dw = rng(N, K) if acc else poisoned(N, K)
    expected = exact("matmul_dw", [dw], None, dout, inp, acc)
    mm.matmul_dw(dw, scratch_of(mm.matmul_dw_scratch(R, name, (N, K))), dout, inp, acc)
    assert error(dw, expected[0]) < SUMS


@dtypes
def test_dw_of_a_pair_matches_float64(rng, dtype):
    """And has the bits of two launches where it is two."""
    R, sizes, dw = 2144, [(48, 80), (320, 48)], [poisoned(48, 80), poisoned(320, 48)]
    dout, inp = ([rng(R, size[i], dtype=dtype) for size in sizes] for i in (0, 1))
    part = scratch_of(mm.matmul_dw_scratch(R, NAMES[dtype], *sizes))
    part = max(
        part,
        *(scratch_of(mm.matmul_dw_scratch(R, NAMES[dtype], size)) for size in sizes),
        key=len,
    )
    for acc in (False, True):
        mm.matmul_dw_pair(*dw, part, dout[0], inp[0], dout[1], inp[1], acc)
        for i, got in enumerate(dw):
            assert error(got, (1 + acc) * dout[i].double().T @ inp[i].double()) < SUMS
    if not is_hopper():
        alone = poisoned(320, 48)
        mm.matmul_dw(alone, part, dout[1], inp[1], False)
        mm.matmul_dw_pair(*dw, part, dout[0], inp[0], dout[1], inp[1], False)
        assert torch.equal(dw[1], alone)


def run_all(R, N, K, dtype, outputs):
    """Run every launcher once, on the same inputs each time; `outputs(*shape, dtype)`
    makes outputs and scratch.
    """
    generator = torch.Generator().manual_seed(1)
    sizes = (R, K), (R, N), (N, K), (N,), (R, K)
    inp, dout, w, b, pre = (
        torch.randn(*size, generator=generator).mul(0.25).to(DEVICE, dtype) for size in sizes
    )
    name = NAMES[dtype]
    y, g, z, a = (outputs(R, N, dtype=dtype) for _ in range(4))
    mm.matmul(y, inp, Linear(w, b))
    mm.matmul_act(g, z, inp, Linear(w, b), "gelu")
    mm.matmul_add(a, dout, inp, Linear(w, b))
    dx, dpre, again = (outputs(R, K, dtype=dtype) for _ in range(3))
    mm.matmul_dx(dx, dout, Linear(w))
    dbias, dw = outputs(K), outputs(N, K)
    mm.matmul_dx_dact(
        dpre,
        dbias,
        again,
        outputs(mm.matmul_dx_dact_scratch(R, K, name)),
        dout,
        Linear(w),
        pre,
        False,
        "gelu",
    )
    mm.matmul_dw(dw, outputs(max(1, mm.matmul_dw_scratch(R, name, (N, K)))), dout, inp, False)
    return y, g, z, a, dx, dpre, again, dbias, dw


either_kernel = pytest.mark.parametrize(
    "R,N,K", [(2100, 48, 80), (2144, 320, 448)], ids=["portable", "hopper"]
)


@pytest.mark.slow
@dtypes
@either_kernel
def test_results_do_not_depend_on_the_number_of_programs_and_nothing_else_is_written(
    monkeypatch, R, N, K, dtype
):
    # depends on the number of programs
    monkeypatch.setattr(hopper, "wide_is_faster", lambda M, N: False)
    # so does dW
    monkeypatch.setattr(
        mm, "split_tiles", lambda *sizes: split_tiles(*sizes[:3], tuning.PLANNED_SMS)
    )
    monkeypatch.setattr(tuning, "num_sms", lambda: 1)
    alone = run_all(R, N, K, dtype, poisoned)
    monkeypatch.setattr(tuning, "num_sms", lambda: 3)
    assert all(
        torch.equal(one, three)
        for one, three in zip(alone, run_all(R, N, K, dtype, poisoned), strict=True)
    )
    require_same_bits(functools.partial(run_all, R, N, K, dtype), allocations=11)


BF16_DW = read_table(TABLES / "h200.json").rows["matmul_dw", "bf16"]
WIDTHS = (768, 1024, 1280, 1600)


def launches(C):
    """Return the sizes of each launch of a layer's dW: two of a pair on Hopper, else four."""
    singles = [[(n * C, k * C)] for n, k in LINEAR]
    return [*singles, [(C, 4 * C), (4 * C, C)], [(C, C), (3 * C, C)]]


def test_split_tiles_of_gpt2_on_h200():
    """Fixed, as a split decides the order of dW's sums and so the bits of a run, and its time.
    Tiles of 256 rows are turned ones; the head of C 768 has enough tiles unsplit.
    """
    splits = {
        (65536, (2304, 768)): ([128], 0, 54, 7, 1024, 147),
        (65536, (3072, 768)): ([128], 0, 72, 7, 1024, 147),
        (65536, (768, 3072), (3072, 768)): ([128, 128], 132, 12, 11, 1024, 94),
        (65536, (768, 768), (2304, 768)): ([128, 128], 0, 72, 7, 1024, 147),
        (11264, (50304, 768)): ([128], 1179, 0, 1, 176, 176),
        (16384, (1600, 1600)): ([128], 0, 91, 4, 256, 64),
        (16384, (6400, 1600)): ([256], 264, 61, 2, 256, 128),
        (16384, (1600, 6400), (6400, 1600)): ([128, 256], 650, 0, 1, 256, 256),
        (16384, (1600, 1600), (4800, 1600)): ([128, 256], 264, 74, 3, 256, 86),
        (10112, (50304, 1600)): ([256], 2508, 53, 2, 158, 79),
    }
    for (R, *sizes), (rows, *split) in splits.items():
        grids, *planned = split_tiles(sizes, R, BF16_DW, 132)
        assert ([grid.rows for grid in grids], planned) == (rows, split), (R, sizes)


@pytest.mark.parametrize("R", [1, 200, 1024, 16384, 65536])
def test_split_tiles_covers_every_row_of_every_tile_once(R):
    for C in WIDTHS:
        for sizes in launches(C):
            split, tiles = split_tiles(sizes, R, BF16_DW, 132), 0
            for (N, K), (rows, columns, *numbers) in zip(sizes, split.grids, strict=True):
                assert numbers == [tiles, -(-N // rows) * -(-K // columns)]
                tiles += numbers[1]
            assert split.whole_tiles + split.split_tiles == tiles
            assert (split.steps - 1) * BF16_DW["BLOCK_K"] < R <= split.steps * BF16_DW["BLOCK_K"]
            room = split.scratch - 1  # of a plan for fewer multiprocessors
            if room >= 0:
                assert split_tiles(sizes, R, BF16_DW, 132, room).scratch <= room
            if split.split_tiles:  # none empty, none missing
                assert (
                    (split.k_parts - 1) * split.part_steps
                    < split.steps
                    <= split.k_parts * split.part_steps
                )


# op, M, N (of attention T, HS), the module that computes it on a Hopper GPU of 132 multiprocessors
TAKES = [
    ("matmul", 65536, 768, "matmul"),
    ("matmul_add", 65536, 768, "matmul"),
    ("matmul_gelu", 65536, 3072, "matmul"),
    ("matmul_dgelu", 65536, 3072, "matmul"),
    ("matmul", 16384, 1600, "matmul_wide"),
    ("matmul_add", 16384, 1600, "matmul_wide"),
    ("matmul_gelu", 16384, 1600, "matmul"),  # GELU is never wide
    ("matmul_dgelu", 16384, 1600, "matmul"),
    ("matmul", 16384, 4800, "matmul"),
    ("matmul", 32, 64, "matmul"),
    ("matmul", 16, 64, None),  # rows no multiple of a slice's 32
    ("matmul", 32, 48, None),  # columns no multiple of a slice's 64
    ("matmul_add", 8232, 1600, None),
    ("matmul_dw", 768, 768, "matmul_dw"),
    ("matmul_dw", 48, 80, "matmul_dw"),
    ("classifier_fwd", 1001, 384, "classifier"),
    ("classifier_dx", 10112, 1600, "matmul_wide"),
    ("classifier_dx", 6185, 1600, "matmul_wide"),
    ("classifier_dx", 9216, 768, None),
    ("attention_fwd", 64, 64, "attention_fwd"),
    ("attention_bwd_dq", 1088, 64, "attention_dq"),
    ("attention_bwd_dkdv", 2112, 64, "attention_dkdv"),
    ("attention_fwd", 1000, 64, None),  # a block of 64 tokens that is not whole
    ("attention_bwd_dq", 32, 64, None),
    ("attention_bwd_dkdv", 1024, 128, None),  # wide heads
    ("matmul_relu2", 65536, 3072, None),  # an epilogue that Hopper's kernels do not have
    ("attention_bwd", 1024, 64, None),
]
TAKES_FP8 = [
    ("matmul", 65536, 768, "fp8_matmul"),
    ("matmul_rope", 65536, 768, "fp8_matmul"),
    ("matmul_gelu", 65536, 3072, "fp8_gelu"),
    ("matmul_dgelu", 65536, 3072, "fp8_gelu"),
    ("matmul_gelu", 65536, 48, None),  # no whole tiles
    ("matmul_dw", 768, 768, "fp8_matmul_dw"),
    ("classifier_lns", 1024, 768, "classifier_lns"),
    ("cast_weight", 768, 768, "cast"),
    ("cast_weight", 768, 24, None),
    ("matmul_relu2", 65536, 3072, None),
]


@pytest.mark.parametrize("op,M,N,module", TAKES, ids=str)
def test_takes_on_hopper_and_never_elsewhere_or_in_fp32(monkeypatch, op, M, N, module):
    monkeypatch.setattr(tuning, "num_sms", lambda: 132)
    for gpu, dtype in itertools.product((True, False), ("bf16", "fp32")):
        monkeypatch.setattr(tuning, "is_hopper", lambda gpu=gpu: gpu)
        assert hopper.takes(op, M, N, dtype) == (module if gpu and dtype == "bf16" else None)


@pytest.mark.parametrize("op,M,N,module", TAKES_FP8, ids=str)
def test_takes_in_fp8_what_it_lists(monkeypatch, op, M, N, module):
    monkeypatch.setattr(tuning, "is_hopper", lambda: True)
    assert hopper.takes(op, M, N, "fp8") == module


def test_takes_wide_tiles_where_they_waste_less(monkeypatch):
    """At GPT-2's sizes: 1558M's products of 1,600 columns, and the chunks of its head."""
    monkeypatch.setattr(tuning, "num_sms", lambda: 132)
    rows = {
        768: (65536, 11264, 9216),
        1024: (65536, 16384),
        1280: (32768, 10112, 2432),
        1600: (16384, 10112, 6272),
    }
    shapes = [(R, C) for C, products_and_head in rows.items() for R in products_and_head]
    shapes += [(products, 3 * C) for C, (products, *_) in rows.items()]
    assert {shape for shape in shapes if hopper.wide_is_faster(*shape)} == {
        (R, 1600) for R in rows[1600]
    }


@pytest.mark.gpu
@pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
@pytest.mark.parametrize("w_is_nk", [True, False])
def test_tiles_of_320_columns_give_the_same_bits_on_gpu(rng, w_is_nk):
    M, N, K, BF16 = 16384, 1600, 4800, torch.bfloat16
    a, b, res = rng(M, K, dtype=BF16), rng(N, dtype=BF16), rng(M, N, dtype=BF16)
    w = (rng(N, K) if w_is_nk else rng(K, N)).mul(K**-0.5).to(BF16)
    wide, narrow = (poisoned(M, N, dtype=BF16) for _ in range(2))
    for bias, add in ((None, None), (b, None), (b, res)):
        hopper_matmul_wide.matmul(wide, a, w, bias, w_is_nk=w_is_nk, res=add)
        epilogue = Epilogue("add" if add is res else "", bias, add)
        hopper_matmul.matmul(narrow, a, w, epilogue, w_is_nk)
        assert torch.equal(wide, narrow)
