"""`python -m benchmarks verify`: passes on these kernels, fails on a wrong one and names it."""

import pytest
import torch

import gpt2_triton.kernels
from benchmarks.accuracy import kernels, verify
from benchmarks.accuracy.comparison import Comparison, Sizes
from gpt2_triton.kernels import contract
from tests.support.launchers import launched


@pytest.mark.gpu
def test_verify_passes_at_gpt2s_shapes():
    assert verify.verify() == 0


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the test above has larger shapes")
def test_verify_passes_and_compares_every_launcher(monkeypatch):
    """Also a launcher that only others call: it is in their comparisons."""
    names = launched(monkeypatch)
    assert verify.verify() == 0
    assert names == contract.LAUNCHERS.keys()


def test_verify_fails_on_a_wrong_kernel_and_names_it(monkeypatch, capsys):
    right = gpt2_triton.kernels.matmul_add

    def wrong(out, res, inp, layer):
        right(out, inp, inp, layer)

    monkeypatch.setattr(gpt2_triton.kernels, "matmul_add", wrong)
    monkeypatch.setattr(verify, "comparisons", lambda: kernels.matmul_add(Sizes(B=2, T=32, C=64)))
    assert verify.verify() == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("matmul_add") and line.endswith("FAIL") for line in lines)


def test_verdict_is_by_the_limit_without_a_counterpart_and_fails_for_nan():
    exact, nan = torch.ones(4).double(), torch.full((4,), float("nan"))
    for factor, ok in ((1.009, True), (1.011, False), (float("nan"), False)):
        found = Comparison("op", "out", factor * torch.ones(4), None, exact, limit=0.01)
        assert found.verdict()[1:] == (None, ok)
    assert not Comparison("op", "out", nan, torch.ones(4).bfloat16(), exact).verdict()[2]
