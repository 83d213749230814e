"""Sums in a fixed order against float64, and the clip factor with every way a step can fail."""

import math

import pytest
import torch

from gpt2_triton.kernels.add_partials import add_partials
from gpt2_triton.kernels.reduce import (
    clip_factor,
    column_sums,
    loss_sum,
    sum_squares,
    sum_squares_scratch,
)
from tests.conftest import DEVICE
from tests.support.helpers import accumulate, error, exact, poisoned, require_same_bits
from tests.support.reference import io

SUMS = 1e-6  # fp32 sums, of which each lane adds a few hundred terms
NAN, INF = math.nan, math.inf
# blocks of 2^14, in the interpreter 2^18
lengths = pytest.mark.parametrize("n", [1, 7, 1000, (1 << 18) + 3, 3 << 18])


def step_in_row(scale=NAN, clip=NAN):
    """Return step_in with NaN where loss_sum and clip_factor must not read."""
    return torch.tensor([NAN, NAN, NAN, scale, clip, NAN, NAN, NAN], device=DEVICE)


@accumulate
@pytest.mark.parametrize(
    "P,shape",
    [(1, (1,)), (7, (48,)), (33, (2304,)), (528, (768,)), (3, ((1 << 18) + 5,)), (5, (3, 16))],
)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_column_sums_match_float64(rng, P, shape, n, acc):
    """Of one to three outputs of any shape in one launch."""
    N = math.prod(shape)
    part, outs = rng(n * P * N + 64), [rng(*shape) if acc else poisoned(*shape) for _ in range(n)]
    part[n * P * N :] = NAN  # scratch is as large as its largest user needs
    sums = part[: n * P * N].view(n, P, *shape).double().sum(1)
    want = [s + (out.double() if acc else 0) for s, out in zip(sums, outs, strict=True)]
    column_sums(*outs, *[None] * (3 - n), part, P, acc)
    assert all(error(out, w) < SUMS for out, w in zip(outs, want, strict=True))


@lengths
def test_sum_squares_matches_float64(rng, n):
    g, out = rng(n), poisoned(1)
    sum_squares(out, poisoned(sum_squares_scratch(n)), g)
    assert error(out, g.double().square().sum().view(1)) < SUMS


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("value", [NAN, INF, -INF, 1e20])  # the square of 1e20 is beyond fp32
@pytest.mark.parametrize("at", [0, 999, -1])
def test_sum_squares_propagates_one_non_finite_gradient(rng, value, at):
    g, out = rng((1 << 18) + 3), poisoned(1)
    g[at] = value
    sum_squares(out, poisoned(sum_squares_scratch(g.numel())), g)
    assert not torch.isfinite(out).item()


@pytest.mark.parametrize("R", [1, 7, 300, 20000])
def test_loss_sum_matches_float64(rng, R):
    losses, out, step_in = rng(R).exp(), poisoned(1), step_in_row(scale=1 / 3000)
    loss_sum(out, losses, step_in)
    assert error(out, exact("loss_sum", [out], losses, step_in)[0]) < SUMS


@pytest.mark.parametrize("clip", [0.0, 1e-3, 1.0, 5.0, 1e6])
@pytest.mark.parametrize("sumsq", [0.0, 1e-12, 1.0, 25.0, 1e30])
def test_clip_factor_matches_float64(sumsq, clip):
    step_out, step_in = torch.tensor([3.5, NAN, NAN, NAN], device=DEVICE), step_in_row(clip=clip)
    square = torch.tensor([sumsq], device=DEVICE)
    [want] = exact("clip_factor", [step_out], square, step_in)
    clip_factor(step_out, square, step_in)
    # a root and a quotient: an ulp each
    assert torch.allclose(step_out.double(), want, rtol=1e-6, atol=0)
    assert step_out[io.LOSS] == 3.5 and step_out[io.APPLY] == 1
    if clip == 0:
        assert step_out[io.CLIP_FACTOR] == 1
    else:
        assert step_out[io.NORM] * step_out[io.CLIP_FACTOR] <= clip * (1 + 1e-6)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize(
    "loss,sumsq", [(NAN, 4.0), (INF, 4.0), (-INF, 4.0), (2.0, NAN), (2.0, INF), (NAN, NAN)]
)
def test_clip_factor_flags_a_non_finite_step(loss, sumsq, clip):
    step_out = torch.tensor([loss, NAN, NAN, NAN], device=DEVICE)
    clip_factor(step_out, torch.tensor([sumsq], device=DEVICE), step_in_row(clip=clip))
    assert step_out[io.APPLY] == 0
    norm = torch.tensor(sumsq, device=DEVICE).sqrt()
    # the norm itself is kept for the log
    assert torch.allclose(step_out[io.NORM], norm, equal_nan=True)


def test_sum_squares_accumulates_over_ranges():
    """As for a rank's shards of several buckets; two sums with an error of 2^-24 each."""
    g, out = torch.linspace(-1, 2, 5000, device=DEVICE), poisoned(1)
    for i, part in enumerate((g[:4000], g[4000:])):
        sum_squares(out, poisoned(sum_squares_scratch(5000)), part, i > 0)
    assert abs(out.item() - g.double().square().sum().item()) < 1e-6 * out.item()


@pytest.mark.parametrize("n", [1, 4096, 5001])
@pytest.mark.parametrize("k", [1, 3])
def test_add_partials_rounds_after_each_part(n, k):
    generator = torch.Generator().manual_seed(n)
    x, parts = (torch.randn(shape, generator=generator).to(DEVICE) for shape in ((n,), (k, n)))
    want = x.clone()
    for part in parts:
        want += part
    add_partials(x, parts)
    assert torch.equal(x, want)


def run_all(outputs):
    """Run each launcher once on fixed inputs; `outputs(*shape)` allocates outputs and scratch."""
    generator = torch.Generator().manual_seed(1)
    g, n = torch.randn((1 << 18) + 3, generator=generator).to(DEVICE), 2304
    sums, sumsq, total, step_out = outputs(n), outputs(1), outputs(1), outputs(4)
    column_sums(sums, None, None, g, 100, False)
    sum_squares(sumsq, outputs(sum_squares_scratch(g.numel())), g)
    loss_sum(total, g[:20000], step_in_row(scale=0.25))
    step_out[io.LOSS] = 1.0
    clip_factor(step_out, sumsq, step_in_row(clip=1.0))
    return sums, sumsq, total, step_out


def test_reductions_give_the_same_bits_and_write_only_their_outputs():
    require_same_bits(run_all, allocations=5)


@pytest.mark.gpu
def test_reductions_of_gpt2_on_gpu():
    """The gradient norm of GPT-2 124M, and of one so long that element offsets pass 2^31."""
    for n in (124_475_904, (1 << 31) + 5):
        g, out = torch.ones(n, device=DEVICE), poisoned(1)
        g[-1] = 2.0**16  # its square, 2^32, is what is lost when the tail is
        sum_squares(out, poisoned(sum_squares_scratch(n)), g)
        assert abs(out.item() / (n - 1 + 2.0**32) - 1) < SUMS
        del g
