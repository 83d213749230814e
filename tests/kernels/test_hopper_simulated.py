"""The kernels of kernels/hopper/ against float64 without a GPU: in gluon_simulator,
with events in random order.
"""

import importlib
from types import SimpleNamespace

import pytest
import torch

import gpt2_triton.kernels as K
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.dw_split import split_tiles
from gpt2_triton.kernels.epilogue import Epilogue, RopeArguments
from gpt2_triton.kernels.hopper import (
    cast,
    classifier_dx,
    classifier_lns,
    fp8_gelu,
    fp8_matmul,
    fp8_matmul_dw,
    pipeline,
    transpose,
)
from gpt2_triton.kernels.hopper import classifier as hopper_classifier
from gpt2_triton.kernels.hopper import matmul as hopper_matmul
from gpt2_triton.kernels.hopper import matmul_dw as hopper_matmul_dw
from gpt2_triton.kernels.hopper import matmul_wide as hopper_matmul_wide
from gpt2_triton.kernels.hopper import swiglu as hopper_swiglu
from gpt2_triton.kernels.hopper.pipeline import Forms
from gpt2_triton.operands import Fp8, HeadNorm, Linear, Rope, Targets
from tests.support import reference
from tests.support.fp8 import (
    E4M3,
    E5M2,
    amax_cells,
    amax_of,
    bits,
    dequantised,
    in_pairs,
    operand,
    rounded,
    unwritten,
)
from tests.support.gluon_simulator import MISSING, NAMES, Race, simulated
from tests.support.helpers import EPS, error, exact, poisoned, scratch_of

# the package exports a function of this name
mm = importlib.import_module("gpt2_triton.kernels.matmul")
BF16 = torch.bfloat16
# of the output, and of the product that is multiplied with GELU's derivative
ROUNDINGS = 2**0.5 * EPS[BF16]

# M, N, K: several tiles per program, ragged; one tile and one step; one
# row of slices, less than a step
SHAPES = [(416, 320, 200), (128, 256, 64), (32, 64, 40)]
SIZES = [[(304, 320), (528, 144)], [(528, 144), (144, 400)], [(304, 320)]]
shapes = pytest.mark.parametrize("M,N,K", SHAPES, ids=str)
seeds = pytest.mark.parametrize("seed", [1, 2, 3])
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the kernels themselves are tested on a GPU"
)


def product(rng, M, N, K, w_is_nk):
    a, w = rng(M, K, dtype=BF16), (rng(N, K) if w_is_nk else rng(K, N)).mul(K**-0.5).to(BF16)
    return a, w, a.double() @ (w.double().T if w_is_nk else w.double())


def launch(
    out,
    a,
    w,
    b=None,
    *,
    w_is_nk=True,
    epilogue="",
    res=None,
    pre=None,
    gelu_out=None,
    part=None,
    rope=None,
):
    given = Epilogue(epilogue, b, res, pre, gelu_out, part, rope)
    hopper_matmul.matmul(out, a, w, given, w_is_nk)


@seeds
@shapes
def test_matmul_matches_float64(rng, M, N, K, seed):
    """The forward products, and dX."""
    a, w, want = product(rng, M, N, K, w_is_nk=True)
    b, res, w_is_kn = rng(N, dtype=BF16), rng(M, N, dtype=BF16), w.T.contiguous()
    plain, added, out, pre, dx = (poisoned(M, N, dtype=BF16) for _ in range(5))
    with simulated(hopper_matmul, seed):
        launch(dx, a, w_is_kn, w_is_nk=False)
        launch(plain, a, w)
        launch(added, a, w, b, epilogue="add", res=res)
        launch(out, a, w, b, epilogue="gelu", pre=pre)
    assert error(plain, want) < EPS[BF16] and error(dx, want) < EPS[BF16]
    assert error(added, want + b.double() + res.double()) < EPS[BF16]
    assert error(pre, want + b.double()) < EPS[BF16]
    assert error(out, reference.ACTIVATIONS["gelu"](pre.double())) < EPS[BF16]


def rotations(rng, normed):
    """Return a Rope of 96 positions, for two heads of q and one of k; one of v and one more follow
    in a matrix of 320 columns.
    """
    weights = (1 + 0.2 * rng(2, 64)).to(BF16)
    norm = HeadNorm(weights, poisoned(416, 3), poisoned(2, 64), 2, 1e-5) if normed else None
    return Rope(rng(96, 64), 96, 192, norm)


def require_rotated(out, a, w, rope):
    want, _, _, wide = exact("matmul_rope", [out, a, Linear(w), rope])
    assert error(out, want) < EPS[BF16]
    if rope.norm is not None:
        assert error(rope.norm.rstd, wide.norm.rstd) < 2e-6


@seeds
@pytest.mark.parametrize("normed", [False, True])
def test_matmul_rope_matches_float64(rng, seed, normed):
    """The rotated heads end within a tile, and a tile's rows begin within a sequence."""
    a, w, _ = product(rng, 416, 320, 200, w_is_nk=True)
    rope, out = rotations(rng, normed), poisoned(416, 320, dtype=BF16)
    with simulated(hopper_matmul, seed):
        launch(out, a, w, epilogue="rope", rope=rope)
    require_rotated(out, a, w, rope)


@seeds
def test_matmul_swiglu_matches_float64(rng, seed):
    a, w, want = product(rng, 416, 768, 200, w_is_nk=True)
    out, pre = poisoned(416, 384, dtype=BF16), poisoned(416, 768, dtype=BF16)
    with simulated(hopper_matmul, seed):
        launch(out, a, w, epilogue="swiglu", pre=pre)
    assert error(pre, want) < EPS[BF16]
    assert error(out, exact("swiglu", [out], pre)[0]) < EPS[BF16]


def fp8(x, scale, dtype=E4M3):
    return rounded(x * scale, dtype), torch.tensor([scale])


def exact_product(a, a_scale, w, w_scale):
    return (a.double() / a_scale.double()) @ (w.double() / w_scale.double()).T


@seeds
@pytest.mark.parametrize("M,N,K", [(416, 320, 784), (128, 256, 128), (32, 64, 48)], ids=str)
def test_fp8_matmul_matches_float64(rng, M, N, K, seed):
    (a, a_scale), (w, w_scale) = fp8(rng(M, K), 32.0), fp8(rng(N, K), 64.0)
    want = exact_product(a, a_scale, w, w_scale)
    b, res = rng(N, dtype=BF16), rng(M, N, dtype=BF16)
    plain, added = (poisoned(M, N, dtype=BF16) for _ in range(2))
    with simulated(fp8_matmul, seed):
        fp8_matmul.matmul(plain, a, a_scale, w, w_scale, None, None)
        fp8_matmul.matmul(added, a, a_scale, w, w_scale, b, res)
    assert error(plain, want) < EPS[BF16]
    assert error(added, want + b.double() + res.double()) < EPS[BF16]


def quantised(x, dtype, scale):
    rows, given = fp8(x, scale, dtype)
    return Fp8(rows, rows.T.contiguous(), given, None, True)


@pytest.mark.parametrize("R,per_sm,seed", [(640, 1, 1), (656, 33, 2), (128, 33, 3)])
@pytest.mark.parametrize(
    "dtype,sizes", [*((d, s) for d in (E4M3, BF16) for s in SIZES), (E5M2, SIZES[2])], ids=str
)
def test_one_or_two_dw_of_a_launch_match_float64(rng, monkeypatch, sizes, R, per_sm, dtype, seed):
    """Whole tiles and parts of split ones, upright and turned, overwritten and added
    to; odd numbers of steps; tiles of both matrices split, of the second alone, and of none.
    """
    row = dict(
        BLOCK_M=128, BLOCK_N=256, BLOCK_K=64 if dtype == BF16 else 128, GROUP_M=8, PER_SM=per_sm
    )
    monkeypatch.setattr(tuning, "is_hopper", lambda: True)
    monkeypatch.setattr(mm, "_dw_row", lambda *sizes: row)
    pairs = [[rng(R, width, dtype=BF16) for width in size] for size in sizes]
    if dtype != BF16:
        scales = iter((32.0, 16.0, 8.0, 4.0))
        pairs = [[quantised(x, dtype, next(scales)) for x in pair] for pair in pairs]
    wide = [[dequantised(x) if isinstance(x, Fp8) else x.double() for x in pair] for pair in pairs]
    want = [dout.T @ inp for dout, inp in wide]
    dws, scratch = (
        [poisoned(*size) for size in sizes],
        scratch_of(split_tiles(sizes, R, row, 3).scratch),
    )
    for acc in (False, True):
        with simulated(hopper_matmul_dw if dtype == BF16 else fp8_matmul_dw, seed):
            mm._multiply_dw(dws, scratch, *zip(*pairs), acc)
        assert all(
            error(dw, expected * (1 + acc)) < 1e-6 for dw, expected in zip(dws, want, strict=True)
        )


def gelu_and_byte(rng, M, N, K, seed, b=None, **replaced):
    """Run fc with GELU in fp8; return its output, gelu' as bytes, and pre in float64."""
    (a, a_scale), (w, w_scale) = fp8(rng(M, K), 32.0), fp8(rng(N, K) * K**-0.5, 64.0)
    b = rng(N, dtype=BF16) if b is None else b
    out, slope = operand(M, N, 16.0), torch.zeros(M, N, dtype=torch.uint8)
    with simulated(fp8_gelu, seed, **replaced):
        fp8_gelu.matmul(out, a, a_scale, w, w_scale, b, slope, None)
    pre = exact_product(a, a_scale, w, w_scale) + b.double()
    return out, slope, pre


def is_right(out, want):
    """Return whether rows are those of want in e4m3, and columns their transposition."""
    same = torch.equal(bits(out.columns), in_pairs(out.rows))
    return same and error(dequantised(out), want) < 0.03  # e4m3's own error is 0.027


@seeds
@pytest.mark.parametrize("M,N,K", [(256, 512, 200), (128, 256, 64)], ids=str)
def test_fp8_gelu_and_its_derivative_match_float64(rng, M, N, K, seed):
    """Four tiles, of which one of three programs has two, and one tile."""
    out, slope, pre = gelu_and_byte(rng, M, N, K, seed)
    want = reference.ACTIVATIONS["gelu"](pre)
    assert is_right(out, want)
    assert abs(amax_of(out) / want.max().item() - 1) < 1e-3  # fp16

    (dout, dout_scale), (w, w_scale) = fp8(rng(M, 80), 32.0), fp8(rng(N, 80), 64.0)
    product = exact_product(dout, dout_scale, w, w_scale)
    dpre, part = operand(M, N, 4.0), poisoned(M // 128, N)
    with simulated(fp8_gelu, seed):
        fp8_gelu.matmul(dpre, dout, dout_scale, w, w_scale, None, slope, part)
    want = product * reference.dactivation(pre, "gelu")
    assert is_right(dpre, want)
    # half a step of the byte
    assert abs(amax_of(dpre) / want.abs().max().item() - 1) < 0.01
    assert error(part, want.view(-1, 128, N).sum(1)) < 0.01  # the same in each of 128 terms


def test_fp8_gelu_of_negative_numbers_records_an_amax_that_covers_them(rng):
    """The kernel finds the largest input; below 0 another one may have the largest |gelu|."""
    b = torch.full((256,), -9.0, dtype=BF16)
    out, _, pre = gelu_and_byte(rng, 128, 256, 64, 1, b)
    most = reference.ACTIVATIONS["gelu"](pre).abs().max().item()
    assert pre.max() < 0 < most <= amax_of(out)


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_fp8_gelu_of_an_infinite_bias_is_nan(rng, value):
    """In both halves of a tile; fp16 alone would cut it to a finite number."""
    b = torch.zeros(256, dtype=BF16)
    b[[3, 200]] = value
    out, *_ = gelu_and_byte(rng, 128, 256, 64, 1, b)
    assert out.rows.float()[:, [3, 200]].isnan().all()


@seeds
@pytest.mark.parametrize("normed", [False, True])
def test_fp8_matmul_rope_matches_float64(rng, seed, normed):
    (a, a_scale), (w, w_scale) = fp8(rng(416, 200), 32.0), fp8(rng(320, 200), 64.0)
    out, rope = poisoned(416, 320, dtype=BF16), rotations(rng, normed)
    with simulated(fp8_matmul, seed):
        fp8_matmul.matmul(out, a, a_scale, w, w_scale, None, None, RopeArguments.of(rope))
    operands = a.double() / a_scale.double(), w.double() / w_scale.double()
    require_rotated(out, *operands, rope)


@seeds
def test_fp8_swiglu_and_its_derivative_match_float64(rng, monkeypatch, seed):
    R, F = 144, 192
    pre, dout = 2 * rng(R, 2 * F, dtype=BF16), rng(R, F, dtype=BF16)
    [want], [dwant] = exact("swiglu", [dout], pre), exact("swiglu_bwd", [pre], dout, pre)
    monkeypatch.setattr(tuning, "is_hopper", lambda: True)
    for launch8, inputs, right in ((K.swiglu, (pre,), want), (K.swiglu_bwd, (dout, pre), dwant)):
        out = operand(*right.shape, 16.0)
        with simulated(hopper_swiglu, seed):
            launch8(out, *inputs)
        assert is_right(out, right)
        assert abs(amax_of(out) / right.abs().max().item() - 1) < 1e-5


@seeds
def test_fp8_transpose_is_exact(rng, seed):
    x, _ = fp8(rng(272, 144), 16.0)
    out = unwritten(144, 272)
    with simulated(transpose, seed):
        transpose.transpose(out, x)
    assert torch.equal(bits(out), in_pairs(x))


@seeds
@pytest.mark.parametrize("recorded, alone", [(True, False), (False, False), (True, True)])
def test_fp8_weights_are_exact(rng, recorded, alone, seed):
    weights = []
    for scale, (R, C) in enumerate(((272, 144), (16, 48), (128, 256), (144, 272)), start=64):
        forms = unwritten(R, C), unwritten(C, R), rng(R, C, dtype=BF16) * 0.02
        amax = amax_cells() if recorded else None
        weights.append((*forms, torch.tensor([float(scale)]), amax))
    with simulated(cast, seed):
        cast.cast_weights(weights[:1] if alone else weights)
    for rows, columns, w, scale, amax in weights[:1] if alone else weights:
        want = bits((w.float() * scale).to(E4M3))
        assert torch.equal(bits(rows), want) and torch.equal(bits(columns), want.T)
        assert amax is None or amax.max().view(torch.float32).item() == w.float().abs().max().item()


@seeds
@pytest.mark.parametrize("M,N,K", [*SHAPES, (1056, 592, 72)], ids=str)
def test_matmul_wide_matches_float64(rng, M, N, K, seed):
    for w_is_nk in (True, False):
        a, w, want = product(rng, M, N, K, w_is_nk)
        b, res = rng(N, dtype=BF16), rng(M, N, dtype=BF16)
        plain, added = (poisoned(M, N, dtype=BF16) for _ in range(2))
        with simulated(hopper_matmul_wide, seed):
            hopper_matmul_wide.matmul(plain, a, w, None, w_is_nk=w_is_nk, res=None)
            hopper_matmul_wide.matmul(added, a, w, b, w_is_nk=w_is_nk, res=res)
        assert error(plain, want) < EPS[BF16]
        assert error(added, want + b.double() + res.double()) < EPS[BF16]


@seeds
def test_classifier_dx_wide_matches_float64(rng, seed):
    R, C, Vp = 200, 592, 320
    p, wte, want = product(rng, R, C, Vp, w_is_nk=False)
    rs, ks, targets = (
        rng(R),
        rng(R),
        torch.randint(Vp, (R,), generator=rng.generator, dtype=torch.int32),
    )
    targets[::5], targets[1] = -1, Vp - 1
    dln = poisoned(R, C, dtype=BF16)
    with simulated(hopper_matmul_wide, seed):
        hopper_matmul_wide.classifier_dx(dln, p, wte, rs, ks, targets)
    rows = wte.double()[targets.clamp(min=0)] * (targets >= 0)[:, None]
    assert error(dln, rs.double()[:, None] * want + ks.double()[:, None] * rows) < EPS[BF16]


@seeds
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_fp8_classifier_fwd_matches_float64(rng, seed, cap):
    R, C, V, Vp = 208, 208, 500, 512
    (lnf, lnf_scale), (wte, wte_scale) = fp8(rng(R, C), 32.0), fp8(rng(Vp, C) * C**-0.5, 256.0)
    zt, ids = rng(R), torch.randint(-1, V, (R,), generator=rng.generator, dtype=torch.int32)
    targets = Targets(ids, zt, cap)
    p, columns = unwritten(R, Vp, dtype=E5M2), unwritten(Vp, R, dtype=E5M2)
    part, peek = poisoned(2, 2, R), rng(R).exp()
    scale, plain = poisoned(1), poisoned(R, Vp, dtype=BF16)
    with simulated(hopper_classifier, seed):
        operands = Forms(lnf, scale=lnf_scale), Forms(wte, scale=wte_scale)
        written = Forms(p, columns.view(torch.int16), scale)
        hopper_classifier.classifier_fwd(written, part, *operands, peek, targets, V)
        sums = poisoned(2, R)
        hopper_classifier.classifier_fwd(Forms(plain), sums, *operands, None, targets, V)
    wide = lnf.double() / lnf_scale.double(), wte.double() / wte_scale.double()
    want, sums = exact("classifier_fwd", [plain, poisoned(R)], *wide, targets, V)
    assert error(plain, want) < EPS[BF16]
    unit = torch.exp2(torch.floor(torch.log2(1 + peek.double())))
    other = bits(p) != bits(rounded((128 * want / unit[:, None]).float(), E5M2))
    assert scale.item() == 128 and other.float().mean() < 1e-4  # rounded the other way
    assert torch.equal(bits(columns), in_pairs(p))
    stored = p.double() / 128  # its sums, or with a cap what rounding adds to them
    kept = stored - want / unit[:, None] if cap else stored
    assert error(part[1].sum(0), kept.sum(1)) < (1e-4 if cap else 1e-6)
    assert error(part[0].sum(0) * unit, sums) < 1e-6


@seeds
@pytest.mark.parametrize("R,C,Vp", [(208, 592, 640), (128, 64, 128)])
def test_fp8_classifier_dx_matches_float64(rng, R, C, Vp, seed):
    """An odd number of steps of 128 columns, tiles with and without a right half."""
    (p, p_scale), (columns, wte_scale) = (
        fp8(rng(R, Vp).exp(), 1 / 8, E5M2),
        fp8(rng(C, Vp) * C**-0.5, 256.0),
    )
    wte, rs, ks = columns.T.contiguous(), rng(R), rng(R)
    targets = torch.randint(-1, Vp, (R,), generator=rng.generator, dtype=torch.int32)
    dln = poisoned(R, C, dtype=BF16)
    with simulated(classifier_dx, seed):
        classifier_dx.classifier_dx(dln, p, p_scale, columns, wte_scale, wte, rs, ks, targets)
    rows = wte.double()[targets.clamp(min=0)] / wte_scale.double() * (targets >= 0)[:, None]
    product = exact_product(p, p_scale, columns, wte_scale)
    assert error(dln, rs.double()[:, None] * product + ks.double()[:, None] * rows) < EPS[BF16]


@seeds
def test_fp8_classifier_lns_is_exact(rng, seed):
    lnf, rs, scale = rng(272, 144, dtype=BF16), rng(272).exp(), torch.tensor([64.0])
    columns = unwritten(144, 272, dtype=E5M2)
    with simulated(classifier_lns, seed):
        classifier_lns.classifier_lns(columns, lnf, rs, scale)
    want = rounded(lnf.float() * (rs * scale)[:, None], E5M2)
    assert torch.equal(bits(columns), in_pairs(want))


@seeds
@shapes
@pytest.mark.parametrize("gelu_out", ["none", "separate", "in place of pre"])
def test_matmul_dgelu_matches_float64(rng, M, N, K, seed, gelu_out):
    a, w, want = product(rng, M, N, K, w_is_nk=False)
    pre, dpre = rng(M, N, dtype=BF16), poisoned(M, N, dtype=BF16)
    x = pre.double().requires_grad_()
    reference.ACTIVATIONS["gelu"](x).backward(want)
    again = {"none": None, "separate": poisoned(M, N, dtype=BF16), "in place of pre": pre}[gelu_out]
    part = poisoned(-(-M // 128), N)
    with simulated(hopper_matmul, seed):
        launch(dpre, a, w, w_is_nk=False, epilogue="dgelu", pre=pre, gelu_out=again, part=part)
    assert error(dpre, x.grad) < ROUNDINGS
    # sums of rounded terms, whose errors cancel in part
    assert error(part.sum(0), x.grad.sum(0)) < EPS[BF16]
    if again is not None:
        assert error(again, reference.ACTIVATIONS["gelu"](x.detach())) < EPS[BF16]


@seeds
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_classifier_fwd_matches_float64(rng, seed, cap):
    R, C, V, Vp = 200, 136, 300, 320
    lnf, wte, zt = rng(R, C, dtype=BF16), rng(Vp, C).mul(C**-0.5).to(BF16), rng(R)
    ids = torch.randint(V, (R,), generator=rng.generator, dtype=torch.int32)
    targets = Targets(ids, zt, cap)
    p, parts = poisoned(R, Vp, dtype=BF16), poisoned(2, 2, R)
    with simulated(hopper_classifier, seed):
        for stored, part in zip((p, None), parts):
            words = Forms(lnf), Forms(wte), None, targets, V
            hopper_classifier.classifier_fwd(Forms(stored), part, *words)
    want, sums = exact("classifier_fwd", [p, poisoned(R)], lnf, wte, targets, V)
    assert error(p, want) < EPS[BF16]
    assert error(parts[0].sum(0), sums) < 1e-6 and torch.equal(*parts)


def matmul_is_wrong(rng, seed, **replaced):
    M, N, K = SHAPES[0]
    a, w, want = product(rng, M, N, K, w_is_nk=True)
    res, out, pre = rng(M, N, dtype=BF16), poisoned(M, N, dtype=BF16), poisoned(M, N, dtype=BF16)
    with simulated(hopper_matmul, seed, **replaced):
        launch(out, a, w, epilogue="add", res=res)
        wrong = not error(out, want + res.double()) < EPS[BF16]
        launch(out, a, w, epilogue="gelu", pre=pre)
        return wrong or not error(out, reference.ACTIVATIONS["gelu"](pre.double())) < EPS[BF16]


def wide_is_wrong(rng, seed, **replaced):
    a, w, want = product(rng, 256, 320, 400, w_is_nk=True)
    out = poisoned(256, 320, dtype=BF16)
    with simulated(hopper_matmul_wide, seed, programs=1, **replaced):
        hopper_matmul_wide.matmul(out, a, w, None, w_is_nk=True, res=None)
    return not error(out, want) < EPS[BF16]


def fp8_gelu_is_wrong(rng, seed, **replaced):
    out, _, pre = gelu_and_byte(rng, 256, 512, 400, seed, **replaced)
    return not is_right(out, reference.ACTIVATIONS["gelu"](pre))


# one store in flight
FINDS = [(matmul_is_wrong, missing) for missing in MISSING if missing != "too short a wait"]
FINDS += [(wide_is_wrong, "early load"), (wide_is_wrong, "early release")]  # of two accumulators
FINDS += [(fp8_gelu_is_wrong, missing) for missing in MISSING]


@pytest.mark.parametrize("is_wrong,missing", FINDS)
def test_simulator_finds_a_missing_wait_or_fence(rng, is_wrong, missing):
    def found(seed, **replaced):
        try:
            return is_wrong(rng, seed, **replaced)
        except Race:
            return True

    assert not found(1)
    assert any(found(seed, **MISSING[missing]) for seed in range(5))


def test_simulator_finds_barriers_that_nothing_uses(rng):
    a, w, _ = product(rng, 128, 256, 64, w_is_nk=True)
    with simulated(hopper_matmul, 1):
        launch(poisoned(128, 256, dtype=BF16), a, w)

    def channel(buf, is_shared, emptied=1):
        barrier = NAMES["gl"].allocate_shared_memory(torch.int64, [1], None).index(0)
        NAMES["mbarrier"].init(barrier, 1)
        return pipeline.Buffer(buf)

    with (
        pytest.raises(Race, match="nothing uses a barrier"),
        simulated(hopper_matmul, 1, channel=channel),
    ):
        launch(poisoned(128, 256, dtype=BF16), a, w)


def test_simulator_finds_an_address_outside_a_tensor(rng):
    a, w, _ = product(rng, 256, 256, 64, w_is_nk=False)
    # one row of sums for two rows of tiles
    too_small, pre = poisoned(1, 256), rng(256, 256, dtype=BF16)
    with pytest.raises(Race, match="outside a tensor"), simulated(hopper_matmul, 1):
        launch(
            poisoned(256, 256, dtype=BF16),
            a,
            w,
            w_is_nk=False,
            epilogue="dgelu",
            pre=pre,
            part=too_small,
        )


def test_simulator_finds_a_store_that_outlives_its_partition(rng):
    a, w, _ = product(rng, 128, 256, 64, w_is_nk=True)
    with pytest.raises(Race, match="ends while a store still reads"):
        # one tile: the last wait is the only one that matters, if the store is slow
        for seed in range(5):
            with simulated(hopper_matmul, seed, **MISSING["no wait for stores"]):
                launch(poisoned(128, 256, dtype=BF16), a, w)


def test_simulator_finds_a_wait_that_never_ends(rng):
    a, w, _ = product(rng, 128, 256, 128, w_is_nk=True)
    silent = SimpleNamespace(**vars(NAMES["mbarrier"]) | dict(arrive=lambda barrier, count: None))
    with pytest.raises(Race, match="wait for ever"), simulated(hopper_matmul, 1, mbarrier=silent):
        launch(
            poisoned(128, 256, dtype=BF16),
            a,
            w,
            epilogue="gelu",
            pre=poisoned(128, 256, dtype=BF16),
        )
