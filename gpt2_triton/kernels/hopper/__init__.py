"""Products, attention, SwiGLU, casts and transposition for Hopper (sm_90: H100,
H200), in Gluon, in bf16 and fp8.

`takes` decides what these kernels compute: the launchers of kernels/ call the module it returns,
which holds one kernel and its launcher.  pipeline.py, mainloop.py, activation.py, attention.py and
rope.py are the kernels' parts.
"""

import triton

from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.hopper import swiglu
from gpt2_triton.kernels.hopper.activation import SLICE_M, SLICE_N
from gpt2_triton.kernels.hopper.attention import HEAD
from gpt2_triton.kernels.hopper.pipeline import GROUP_M, TILE_K, TILE_M, TILE_N, WIDE_N

# products that a module computes if its condition below holds: all others get the generic kernel
PRODUCTS = ("matmul", "matmul_add", "matmul_gelu", "matmul_dgelu", "matmul_rope", "matmul_swiglu")
MASKED = {"matmul_dw": "matmul_dw", "classifier_fwd": "classifier"}  # these mask every edge
ATTENTION = {
    "attention_fwd": "attention_fwd",
    "attention_bwd_dq": "attention_dq",
    "attention_bwd_dkdv": "attention_dkdv",
}
FP8_PRODUCTS = ("matmul", "matmul_add", "matmul_rope")
FP8_FUSED = ("matmul_gelu", "matmul_dgelu")
FP8_WEIGHTS = {"transpose": "transpose", "cast_weight": "cast"}
FP8_MASKED = {
    "matmul_dw": "fp8_matmul_dw",
    "classifier_fwd": "classifier",
    "classifier_dx": "classifier_dx",
    "classifier_lns": "classifier_lns",
}

TILE = dict(BLOCK_M=TILE_M, BLOCK_N=TILE_N, GROUP_M=GROUP_M.value)
# modules whose partial sums lie in scratch, or are split, by these blocks
BLOCKS: dict[str | None, dict[str, int]] = {
    "matmul_dw": TILE | dict(BLOCK_K=TILE_K),
    "fp8_matmul_dw": TILE | dict(BLOCK_K=2 * TILE_K),
    "classifier": TILE,
    "attention_dq": dict(BLOCK_M=HEAD),
    "attention_dkdv": dict(BLOCK_N=HEAD),
}


def takes(op: str, M: int, N: int, dtype: str) -> str | None:
    """Return the module that computes an output [M, N] of operands in
    `dtype`; None: the generic kernel.

    `op` is the name of a product, with its epilogue, or of another operation in the lists above.
    No module takes an op that is in none of them.  Attention's M and N are tokens and columns of a
    head.
    """
    if not tuning.is_hopper() or dtype == "fp32":  # fp32 has no wgmma
        return None
    if dtype == "fp8":
        return _takes_fp8(op, M, N)
    if op in ATTENTION:
        # ms with 64 sequences of 1,024, 12 heads: forward 0.306 -> 0.275, dQ 0.440 -> 0.346,
        # dK and dV 0.654 -> 0.486
        return None if M % HEAD or N != HEAD else ATTENTION[op]
    if op in MASKED:
        return MASKED[op]
    # tiles of 320 columns take 3.62 ms at 1558M, the generic kernel's tiles of 256 take 4.46 ms
    if op == "classifier_dx":
        return "matmul_wide" if wide_is_faster(M, N) else None
    if op not in PRODUCTS:
        return None
    if M % SLICE_M.value or N % SLICE_N.value:  # the slices in which GELU is stored
        return None
    if op == "matmul_swiglu" and N % (TILE_N // 2):
        return None
    # no wide tiles with GELU: the second accumulator leaves the activation partition no registers
    return "matmul_wide" if op in ("matmul", "matmul_add") and wide_is_faster(M, N) else "matmul"


def blocks(op: str, M: int, N: int, dtype: str) -> dict[str, int]:
    """Return the blocks that replace those of a table's row where a module
    takes this launch: partial sums are counted by them.
    """
    return BLOCKS.get(takes(op, M, N, dtype), {})


def _takes_fp8(op: str, M: int, N: int) -> str | None:
    """Return the module for a product of fp8 operands, or to transpose or cast a weight [M, N]."""
    if op in FP8_WEIGHTS:
        return None if M % 16 or N % 16 else FP8_WEIGHTS[op]
    if op in FP8_FUSED:
        return None if M % TILE_M or N % TILE_N else "fp8_gelu"
    if op == "swiglu":
        return None if N % swiglu.SIDE else "swiglu"
    return "fp8_matmul" if op in FP8_PRODUCTS else FP8_MASKED.get(op)


def wide_is_faster(M: int, N: int) -> bool:
    """Return whether tiles of 320 columns take less time than tiles of 256.

    A time is estimated by the columns that a multiprocessor computes in all waves.  Equal columns
    take up to 7% longer in tiles of 320.
    """

    def columns(width: int) -> int:
        return width * triton.cdiv(triton.cdiv(M, TILE_M) * triton.cdiv(N, width), tuning.num_sms())

    # us at 16,384 x 1,600: add 157 -> 150 (K = 1,600), 524 -> 479 (K = 6,400); dX 142
    # -> 129, 389 -> 350, 506 -> 454
    return columns(WIDE_N) < 0.93 * columns(TILE_N)
