"""Launches of the kernels in hopper/: hopper.takes decides.  A function returns None, or False,
where it leaves the launch to the generic kernel.
"""

from collections.abc import Sequence

from torch import Tensor

from gpt2_triton.kernels import hopper
from gpt2_triton.kernels.dw_split import TileSplit
from gpt2_triton.kernels.epilogue import Epilogue, RopeArguments
from gpt2_triton.kernels.fp8 import Fp8, Operand, full, stored
from gpt2_triton.kernels.hopper import (
    attention_dkdv,
    attention_dq,
    classifier,
    fp8_matmul_dw,
    matmul_wide,
)
from gpt2_triton.kernels.hopper import attention_fwd as hopper_fwd
from gpt2_triton.kernels.hopper import classifier_dx as hopper_classifier_dx
from gpt2_triton.kernels.hopper import matmul as hopper_matmul
from gpt2_triton.kernels.hopper import matmul_dw as hopper_matmul_dw
from gpt2_triton.kernels.hopper.attention import Forms
from gpt2_triton.kernels.hopper.classifier import Stored
from gpt2_triton.kernels.tuning import dtype_name


def matmul(out: Tensor, a: Tensor, w: Tensor, epilogue: Epilogue, w_is_nk: bool) -> int | None:
    """Launch a product of matmul.py; return the number of rows of tiles."""
    op = f"matmul_{epilogue.name}" if epilogue.name else "matmul"
    kernel = hopper.takes(op, len(a), out.shape[1], dtype_name(a)) if a.dtype == out.dtype else None
    if kernel == "matmul_wide":
        b, res = epilogue.b, epilogue.res
        return matmul_wide.matmul(out, a, w, b, w_is_nk=w_is_nk, res=res)
    if kernel == "matmul":
        return hopper_matmul.matmul(out, a, w, epilogue, w_is_nk)
    return None


def matmul_dw(
    dws: Sequence[Tensor], scratch: Tensor, operands: Sequence[tuple[Tensor, Tensor]],
    scales: Sequence[tuple[Tensor | None, Tensor | None]], split: TileSplit, acc: bool,
) -> bool:  # fmt: skip
    """Launch dW of one layer or two; return True if it was launched."""
    kernel = hopper.takes("matmul_dw", *dws[0].shape, dtype_name(operands[0][0]))
    douts, inps = zip(*operands)
    if kernel == "fp8_matmul_dw":
        fp8_matmul_dw.matmul_dw(dws, scratch, douts, inps, scales, split, acc)
    elif kernel == "matmul_dw":
        hopper_matmul_dw.matmul_dw(dws, scratch, douts, inps, split, acc)
    return kernel is not None


def attention_fwd(out: Operand, lse: Tensor, qkv: Tensor, HS: int, group: int) -> bool:
    """Launch attention's forward pass; return True if it was launched."""
    if not hopper.takes("attention_fwd", lse.shape[2], HS, dtype_name(qkv)):
        return False
    form = Forms.of(out)
    out8 = None if form.scale is None else form.rows
    hopper_fwd.attention_fwd(full(out), out8, form.scale, form.amax, lse, qkv, group)
    return True


def attention_bwd_dq(
    dqkv: Operand, part: Tensor | None, delta: Tensor, dout: Tensor, qkv: Tensor, out: Operand,
    lse: Tensor, rope: RopeArguments, HS: int, group: int,
) -> int | None:  # fmt: skip
    """Launch dQ; return the number of part's rows."""
    if not hopper.takes("attention_bwd_dq", lse.shape[2], HS, dtype_name(qkv)):
        return None
    tensors = Forms.of(dqkv), part, delta, dout, qkv, Forms.of(out), full(out), lse
    return attention_dq.attention_bwd_dq(*tensors, rope, group)


def attention_bwd_dkdv(
    dqkv: Operand, part: Tensor | None, dout: Tensor, qkv: Tensor, lse: Tensor, delta: Tensor,
    rope: RopeArguments, HS: int, group: int,
) -> int | None:  # fmt: skip
    """Launch dK and dV; return the number of part's rows."""
    if not hopper.takes("attention_bwd_dkdv", lse.shape[2], HS, dtype_name(qkv)):
        return None
    tensors = Forms.of(dqkv), part, dout, qkv, lse, delta
    return attention_dkdv.attention_bwd_dkdv(*tensors, rope, group)


def _form(x: Operand | None) -> Stored:
    return Stored(x.rows, x.scale) if isinstance(x, Fp8) else Stored(x)


def classifier_fwd(
    p: Operand | None, part: Tensor, lnf: Operand, wte: Operand, zt: Tensor, peek: Tensor | None,
    targets: Tensor, V: int,
) -> bool:  # fmt: skip
    """Launch the head's first product; return True if it was launched."""
    if not hopper.takes("classifier_fwd", len(zt), wte.shape[0], dtype_name(stored(lnf)[0])):
        return False
    written = _form(p)
    if isinstance(p, Fp8):
        written = written._replace(columns=p.columns)
    classifier.classifier_fwd(written, part, _form(lnf), _form(wte), zt, peek, targets, V)
    return True


def classifier_dx(
    dln: Tensor, p: Tensor, p_scale: Tensor | None, w: Tensor, wte_scale: Tensor | None,
    target_rows: Tensor, rs: Tensor, ks: Tensor, targets: Tensor,
) -> bool:  # fmt: skip
    """Launch the head's input gradient; return True if it was launched."""
    kernel = hopper.takes("classifier_dx", *dln.shape, dtype_name(p))
    if kernel == "classifier_dx":
        hopper_classifier_dx.classifier_dx(
            dln, p, p_scale, w, wte_scale, target_rows, rs, ks, targets
        )
    elif kernel == "matmul_wide":
        matmul_wide.classifier_dx(dln, p, w, rs, ks, targets)
    return kernel is not None
