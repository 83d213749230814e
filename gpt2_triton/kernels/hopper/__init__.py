"""Matrix products and attention for Hopper (sm_90: H100, H200), in Gluon, for bf16 and fp8 operands.

`takes` decides what these kernels compute: kernels/matmul.py, fp8_matmul.py, classifier.py and attention.py launch the
module it returns, which holds one kernel and its launcher.  pipeline.py, mainloop.py, activation.py and attention.py
are the kernels' parts.
"""

import triton

from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.hopper import attention_dkdv
from gpt2_triton.kernels.hopper.activation import SLICE_M, SLICE_N
from gpt2_triton.kernels.hopper.attention import HEAD
from gpt2_triton.kernels.hopper.pipeline import TILE_M, TILE_N, WIDE_N


def takes(op: str, M: int, N: int, dtype: str) -> str | None:
    """Return the module of this package that computes an output [M, N] of operands in `dtype`, or None for the generic
    kernel.  `op` is "matmul" (dX too), "matmul_add", "matmul_gelu", "matmul_dgelu", "matmul_dw", "classifier_fwd",
    "classifier_dx", "attention_fwd", "attention_bwd_dq" or "attention_bwd_dkdv"; in fp8 also "transpose" and
    "cast_weight".  Attention's M and N are tokens and columns of a head.

    - fp32 has no wgmma, and other GPUs have none at all: generic.
    - dW and the classifier's first product handle every edge with masks: always a kernel of this package.
    - Other products in bf16 need M and N in multiples of 32 and 64, the slices in which GELU is stored; those of fp8
      operands with GELU need whole tiles.
    - Tiles of 320 columns replace those of 256 where they take less time: at 1,600 columns and 16,384 rows add took 150
      instead of 157 us (K = 1,600) and 479 instead of 524 (K = 6,400), dX 129, 350 and 454 instead of 142, 389 and 506.
      With GELU they are not an option: the second accumulator leaves its partition no registers.
    - The classifier's dX is computed here only where tiles of 320 columns are faster (4.46 to 3.62 ms at 1558M); the
      generic kernel has tiles of 256.
    - Attention has heads of 64 columns in whole blocks of 64 tokens: 0.275 instead of 0.306 ms forward, 0.346 instead
      of 0.440 for dQ and 0.486 instead of 0.654 for dK and dV (prototypes; 64 sequences of 1,024, 12 heads).  dK and dV
      keep lse and delta of a sequence in shared memory, which limits its length where three programs share a
      multiprocessor.
    """
    if not tuning.is_hopper() or dtype == "fp32":
        return None
    if dtype == "fp8":
        return _takes_fp8(op, M, N)
    if op.startswith("attention"):
        return _takes_attention(op, M, N)
    if op in ("matmul_dw", "classifier_fwd"):
        return {"matmul_dw": "matmul_dw", "classifier_fwd": "classifier"}[op]
    if op == "classifier_dx":
        return "matmul_wide" if wide_is_faster(M, N) else None
    if M % SLICE_M.value or N % SLICE_N.value:
        return None
    return "matmul_wide" if op in ("matmul", "matmul_add") and wide_is_faster(M, N) else "matmul"


def _takes_fp8(op: str, M: int, N: int) -> str | None:
    """Return the module for a product of fp8 operands with an output [M, N], or for the transposition or the cast of a
    weight [M, N].
    """
    fused = op in ("matmul_gelu", "matmul_dgelu")
    if op in ("transpose", "cast_weight") and (M % 16 or N % 16) or fused and (M % TILE_M or N % TILE_N):
        return None
    own = dict(transpose="transpose", cast_weight="cast", matmul_dw="fp8_matmul_dw", classifier_fwd="classifier")
    return own.get(op, "fp8_gelu" if fused else "fp8_matmul")


def _takes_attention(op: str, T: int, HS: int) -> str | None:
    """Return the module for the forward pass, for dQ, or for dK and dV, of sequences of T tokens and heads of HS
    columns.
    """
    if T % HEAD or HS != HEAD or op == "attention_bwd_dkdv" and T > attention_dkdv.LONGEST:
        return None
    own = dict(attention_fwd="attention_fwd", attention_bwd_dq="attention_dq", attention_bwd_dkdv="attention_dkdv")
    return own[op]


def wide_is_faster(M: int, N: int) -> bool:
    """Return whether tiles of 320 columns take less time than tiles of 256.  The time is taken as the columns that a
    multiprocessor computes, wave after wave of tiles; where both compute as many, tiles of 320 take up to 7% longer.
    """

    def columns(width: int) -> int:
        return width * triton.cdiv(triton.cdiv(M, TILE_M) * triton.cdiv(N, width), tuning.num_sms())

    return columns(WIDE_N) < 0.93 * columns(TILE_N)
