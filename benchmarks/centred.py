"""The kernels, with qkv's input in fp8 less its mean over the tokens: a lever of levers.py.

With c a vector for each layer, qkv = (ln1 - c) w^T + (c w^T + b), whatever c is, and dw = dqkv^T (ln1 - c) + s c^T with
s the sum of dqkv over the tokens.  So e4m3 holds what differs between tokens, which it cannot where they are nearly
alike.  c is the mean of ln1 in the last step.  It is subtracted from the norm's bias, so that no kernel changes.
PyTorch computes the vectors, so a step takes longer: the lever measures loss, not speed.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gpt2_triton.kernels.fp8 import Fp8, Operand
from gpt2_triton.kernels.step_io import APPLY

EVERY = 16  # the mean is taken of each 16th row


class CentredKernels:
    """The kernels, with the vectors of ln1 - c in launches that write or read qkv's input in fp8.  That input is
    the fp8 operand of `matmul`, which only qkv launches.
    """

    def __init__(self, kernels: Any):
        self._kernels = kernels
        self._centres: dict[int, tuple[Tensor, Tensor]] = {}  # of this step and the next, by the address of the scale
        self._sums = torch.empty(0)  # of the last dqkv

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def _centre(self, operand: Operand | None) -> Tensor | None:
        known = self._centres.get(operand.scale.data_ptr()) if isinstance(operand, Fp8) else None
        return known[0] if known else None

    @contextlib.contextmanager
    def compiling(self, *args: Any, **keywords: Any) -> Iterator[Any]:
        with self._kernels.compiling(*args, **keywords) as compiled:
            yield compiled
        for centre in self._centres.values():  # nothing was launched: they are means of what memory held
            for vector in centre:
                vector.zero_()

    def layernorm_fwd(self, out: Operand, mean: Tensor, rstd: Tensor, x: Tensor, w: Tensor, b: Tensor) -> None:
        c = self._centre(out)
        if c is None or not isinstance(out, Fp8):
            return self._kernels.layernorm_fwd(out, mean, rstd, x, w, b)
        self._kernels.layernorm_fwd(out, mean, rstd, x, w, b.float() - c)
        following = self._centres[out.scale.data_ptr()][1]
        following.copy_(c + out.rows[::EVERY].float().mean(0) / out.scale)

    def layernorm_bwd(self, *args: Any, **keywords: Any) -> None:
        c = self._centre(args[4])
        if c is not None:
            args = (*args[:9], args[9].float() - c, *args[10:])
        self._kernels.layernorm_bwd(*args, **keywords)

    def matmul(self, out: Tensor, inp: Operand, w: Operand, b: Tensor) -> None:
        if isinstance(inp, Fp8) and isinstance(w, Fp8) and w.value is not None:
            zeros = torch.zeros(w.shape[1], device=b.device)
            c, _ = self._centres.setdefault(inp.scale.data_ptr(), (zeros, zeros.clone()))
            b = b.float() + w.value.float() @ c
        self._kernels.matmul(out, inp, w, b)

    def attention_bwd(self, dqkv: Operand, dbias: Tensor, *args: Any) -> None:
        *inputs, acc = args
        self._sums = torch.empty_like(dbias)
        self._kernels.attention_bwd(dqkv, self._sums, *inputs, False)
        dbias.copy_(self._sums + dbias if acc else self._sums)

    def matmul_dw(self, dw: Tensor, scratch: Tensor, dout: Operand, inp: Operand, acc: bool) -> None:
        self._kernels.matmul_dw(dw, scratch, dout, inp, acc)
        if (c := self._centre(inp)) is not None:
            dw.addr_(self._sums, c)

    def roll_scales(self, scale: Tensor, history: Tensor, amax: Tensor, step_out: Tensor) -> None:
        self._kernels.roll_scales(scale, history, amax, step_out)
        for c, following in self._centres.values():
            c.copy_(torch.where(step_out[APPLY.value] == 1.0, following, c))
