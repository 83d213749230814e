"""A model of how Hopper's tensor cores sum fp8 products, held against errors that were measured, and what follows for
sums of one sign (docs/engineering/fp8.md).
"""

import pytest
import torch
from torch import Tensor

BITS = 13  # behind the first of the largest number
ROUNDING = 0.00166  # error of a product rounded to bf16, relative to its norm
MEASURED = {  # on an H200, by terms: errors of sums in 14 bits, and with each 128 terms added in fp32
    768: (0.00172, 0.00166),
    1600: (0.00181, 0.00166),
    3072: (0.00200, 0.00167),
    6400: (0.00242, 0.00166),
}


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


@pytest.mark.parametrize("K", MEASURED)
def test_the_model_has_the_measured_errors(K):
    """Within 2%: 768 random sums, against 800,000 on the GPU."""
    a, w = operands(K)
    exact = a @ w.T
    for part, measured in zip((K + 32, 128), MEASURED[K], strict=True):
        error = ((sums(a, w, part) - exact).norm() / exact.norm()).item()
        assert (error**2 + ROUNDING**2) ** 0.5 == pytest.approx(measured, rel=0.02)


def test_sums_of_one_sign_are_too_small_by_what_the_page_states():
    def loss(K: int, part: int) -> float:
        a, w = (x.abs() for x in operands(K))
        exact = a @ w.T
        return 1 - ((sums(a, w, part) * exact).sum() / (exact * exact).sum()).item()

    assert f"{loss(1600, 1632):.1%} {loss(6400, 6432):.0%} {loss(6400, 128):.2%}" == "2.3% 10% 0.06%"
