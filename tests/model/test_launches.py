"""Which kernel is wrong: each launch of a step against its reference in float64."""

import inspect

import pytest
import torch

import gpt2_triton.kernels
from gpt2_triton.kernels import contract
from tests.conftest import DEVICE
from tests.support import reference
from tests.support.helpers import error
from tests.support.launchers import WrappedKernels, mapped
from tests.support.models import kernel_model, train_steps

USED_UP = ("sample_token", "logits")  # an input that its launch takes as workspace


class SideBySide(WrappedKernels):
    """K that runs every kernel, then its reference on float64 copies of the same inputs,
    and compares each output.
    """

    def __init__(self, tolerance: float):
        self.tolerance, self.workspace, self.launched = (
            tolerance,
            torch.empty(64, dtype=torch.float64, device=DEVICE),
            [],
        )

    def _launch(self, name: str, *args, **keywords):
        names = inspect.signature(getattr(reference, name)).parameters
        exact = [
            self.workspace if n in contract.WORKSPACE else mapped(a, self._copy)
            for n, a in zip(names, args, strict=False)
        ]
        getattr(gpt2_triton.kernels, name)(*args, **keywords)
        getattr(reference, name)(*exact, **keywords)
        self.launched.append(name)
        written = contract.LAUNCHERS[name].contract
        wanted = written.outputs(exact)
        for output, got in written.outputs(args).items():
            has_meaning = output not in contract.WORKSPACE and (name, output) != USED_UP
            if got.is_floating_point() and has_meaning:
                off = error(got, wanted[output])
                assert off < self.tolerance, (
                    f"launch {len(self.launched)}, {name}: {output} is off by {off:.1e}"
                )

    @staticmethod
    def _copy(t: torch.Tensor) -> torch.Tensor:
        return t.to(torch.float64 if t.is_floating_point() else t.dtype, copy=True)


# fp32: sums of up to 384 products, 6e-8 each, and cancellation in the backward of attention and
# layernorm bf16: one or two roundings (of pre before GELU, of P before P @ V), 1.7e-3 each; the
# interpreter truncates, 3.4e-3
@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, tolerance", [("fp32", 1e-5), ("bf16", 4e-3 if DEVICE == "cuda" else 8e-3)]
)
@pytest.mark.parametrize("level, p", [("none", 0.0), ("gelu+ln+qkv", 0.3)])
def test_every_launch_of_a_step_equals_its_reference(level, p, dtype, tolerance):
    model = kernel_model(level, dtype, model=dict(dropout=p))
    model.K = SideBySide(tolerance)
    train_steps(model, 1)
    model.K.tolerance *= 1.5  # one more rounding: decoding's products normalise their input
    model.prefill([1, 2, 3, 4], slice(0, 1))
    model.decoding.seq.copy_(torch.tensor([[5, 4, 0, 0, 0]]))
    model.decode(0.0, 0, 1.0)
    assert ("dropout" in model.K.launched) == (p > 0)


def test_a_wrong_kernel_is_named(monkeypatch):
    right = gpt2_triton.kernels.matmul_dx

    def wrong(dinp, dout, layer):
        right(dinp, dout, layer)
        dinp[3, 5] += 1

    monkeypatch.setattr(gpt2_triton.kernels, "matmul_dx", wrong)
    model = kernel_model()
    model.K = SideBySide(1e-5)
    with pytest.raises(AssertionError, match="matmul_dx: dinp is off by"):
        train_steps(model, 1)
