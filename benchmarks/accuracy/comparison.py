"""Sizes, random inputs and bounds that the comparisons of `python -m benchmarks verify` share."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import gpt2_triton.kernels as K
from gpt2_triton.data.packing import scatter_bounds

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
STORAGE = BF16 if GPU else F32
RATIO, FLOOR = 1.1, 1e-6


@dataclasses.dataclass(frozen=True)
class Sizes:
    """GPT-2 124M with 4 sequences; tiny without a GPU.  The classifier takes 1 sequence:
    float64 logits are large.
    """

    B: int = 4 if GPU else 2
    T: int = 1024 if GPU else 32
    NH: int = 12 if GPU else 1
    C: int = 768 if GPU else 64
    V: int = 50257 if GPU else 300
    Vp: int = 50304 if GPU else 384
    updated: int = 1 << (24 if GPU else 14)  # parameters that AdamW updates

    @property
    def R(self) -> int:
        return self.B * self.T


@dataclasses.dataclass
class Comparison:
    op: str
    output: str
    ours: Tensor
    torch: Tensor | None  # None if PyTorch has no such operation; then `limit` is the bound
    exact: Tensor
    equal: bool = False  # bit for bit
    limit: float = 0.0

    def verdict(self) -> tuple[float, float | None, bool]:
        """Return our error, PyTorch's, and whether ours is within the bound."""
        ours = error(self.ours, self.exact)
        if self.torch is None:
            return ours, None, ours <= self.limit
        torchs = error(self.torch, self.exact)
        bound = max(RATIO * torchs, 0.0 if self.ours.dtype == BF16 else FLOOR)
        return ours, torchs, ours == 0 if self.equal else ours <= bound


def error(got: Tensor, exact: Tensor) -> float:
    return ((got.double() - exact).norm() / exact.norm()).item()


def randn(*shape: int, scale: float = 1.0, dtype: torch.dtype = STORAGE) -> Tensor:
    return (scale * torch.randn(*shape, device=DEVICE)).to(dtype)


def empty(*shape: int, dtype: torch.dtype = STORAGE) -> Tensor:
    """Return an output, NaN until a kernel writes it."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


empty32 = functools.partial(empty, dtype=F32)


@functools.cache
def scratch(s: Sizes) -> Tensor:
    dims = dict(
        B=s.B,
        T=s.T,
        R=s.R,
        C=s.C,
        Cq=s.C,
        D=3 * s.C,
        F=4 * s.C,
        G=4 * s.C,
        NH=s.NH,
        HS=s.C // s.NH,
        Rc=s.R,
        Vp=s.Vp,
        N=s.updated,
        Qn=2 * s.NH,
        slots=scatter_bounds(s.R, s.V)[2],
    )
    return empty32(K.scratch_elements(dims, "bf16" if GPU else "fp32"))


def run(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dout: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """Return the output and the gradients of a differentiable function, computed in `dtype`."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.to(out.dtype))]


def compare(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], dout: Tensor, ours: dict, op: str
) -> Iterator[Comparison]:
    """Compare `ours` with PyTorch: first the output, then the gradients
    in the order of the inputs.
    """
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        values = run(function, inputs, dout, STORAGE)
        exact = run(function, inputs, dout, F64)
    for (name, tensor), value, truth in zip(ours.items(), values, exact, strict=False):
        if tensor is not None:
            yield Comparison(op, name, tensor, value, truth)
            # its column sums are the gradient of the previous operation's bias
            if name in ("dpre", "dx", "dqkv") and "dbias" in ours:
                yield Comparison(op, "dbias", ours["dbias"], value.sum(0), truth.sum(0))


def same(op: str, output: str, ours: Tensor, want: Tensor) -> Comparison:
    """Return a comparison that passes if both are equal bit for bit."""
    return Comparison(op, output, ours, want, want.double(), equal=True)


def beside(
    op: str, output: str, ours: Tensor, formula: Callable[..., Tensor], *inputs: Tensor
) -> Comparison:
    """Return a comparison with a formula in the dtypes of its inputs, rounded to ours, and in
    float64.
    """
    exact = formula(*(x.double() for x in inputs))
    return Comparison(op, output, ours, formula(*inputs).to(ours.dtype), exact)


def within(op: str, output: str, ours: Tensor, exact: Tensor, limit: float) -> Comparison:
    """Return a comparison with a limit of its own, where PyTorch has no such operation."""
    return Comparison(op, output, ours, None, exact, limit=limit)
