"""A model of how Hopper's tensor cores sum fp8 products, held against errors that were measured, and what follows for
sums of one sign (docs/engineering/fp8.md).
"""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

FP8 = Path(__file__).parents[2] / "docs" / "engineering" / "fp8.md"
BITS = 13  # behind the first of the largest number


def e4m3(x: Tensor) -> Tensor:
    """Return x rounded to e4m3, in float64."""
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).double()


def sums(a: Tensor, w: Tensor, part: int) -> Tensor:
    """Return a[M, K] @ w[N, K].T: 32 products and the sum so far, each cut behind BITS of the largest of them, are
    added at a time; the sums of `part` terms are added exactly.
    """
    total = acc = a.new_zeros(len(a), len(w))
    for k in range(0, a.shape[1], 32):
        terms = torch.cat([a[:, None, k : k + 32] * w[None, :, k : k + 32], acc[..., None]], -1)
        unit = torch.exp2(torch.floor(torch.log2(terms.abs().amax(-1, keepdim=True))) - BITS)
        acc = (torch.trunc(terms / unit) * unit).sum(-1)
        if (k + 32) % part == 0:
            total, acc = total + acc, torch.zeros_like(acc)
    return total + acc


def operands(K: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(K)
    return e4m3(64 * torch.randn(32, K, generator=generator)), e4m3(64 * torch.randn(24, K, generator=generator))


def row_of(K: int) -> list[float]:
    """Return the errors in the page's table: in 14 bits, cuBLAS's fast, in parts of 128, cuBLAS's, bf16's alone."""
    [line] = re.findall(rf"^\| {K:,} \|(.*)\|$", FP8.read_text(), re.MULTILINE)
    return [float(cell.split(",")[-1]) for cell in line.split("|")]


@pytest.mark.parametrize("K", [768, 1600, 3072, 6400])
def test_the_model_has_the_measured_errors(K):
    """Within 2%: 768 random sums, against 800,000 on the GPU."""
    a, w = operands(K)
    exact, bf16 = a @ w.T, row_of(K)[4]
    for part, measured in ((K + 32, row_of(K)[0]), (128, row_of(K)[2])):
        error = ((sums(a, w, part) - exact).norm() / exact.norm()).item()
        assert (error**2 + bf16**2) ** 0.5 == pytest.approx(measured, rel=0.02)


def test_sums_of_one_sign_are_too_small_by_what_the_page_states():
    def loss(K: int, part: int) -> float:
        a, w = (x.abs() for x in operands(K))
        exact = a @ w.T
        return 1 - ((sums(a, w, part) * exact).sum() / (exact * exact).sum()).item()

    short, long, parts = loss(1600, 1632), loss(6400, 6432), loss(6400, 128)
    stated = f"1,600 such terms {short:.1%} too small and 6,400 terms {long:.0%}"
    assert stated in FP8.read_text() and f"which leaves {parts:.2%}" in FP8.read_text()
