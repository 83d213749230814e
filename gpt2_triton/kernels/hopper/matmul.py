"""Forward products and dX of kernels/matmul.py for Hopper, in Gluon: partitions of
warps that work at the same time.

compute_partition        two warpgroups multiply tiles of 128 x 256 with wgmma,
                         one product always in flight
load_partition           one warp keeps STAGES pairs of blocks in flight by TMA, tile after tile,
                         and never waits for an epilogue
activation_partition     two warps apply GELU to a tile while compute_partition multiplies the next
swiglu_partition         the same for SwiGLU; gated_load_partition loads gates and
                         values as the halves of a tile
derivative_partition     the same for GELU's derivative; preactivation_partition, one
                         warp, loads its operand ahead

A tile has one writer, and the same bits whichever program computes it.  With GELU or its
derivative, compute_partition rounds a tile to bf16 before it passes the tile on.  So gelu'(pre) is
multiplied with a rounded product, as in PyTorch.
"""

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from gpt2_triton.kernels.epilogue import Epilogue, RopeArguments
from gpt2_triton.kernels.hopper.activation import (
    RING,
    SLICE_M,
    SLICE_N,
    SLICES,
    activation_partition,
    derivative_partition,
    preactivation_partition,
    swiglu_partition,
)
from gpt2_triton.kernels.hopper.mainloop import (
    compute_partition,
    gated_load_partition,
    load_partition,
)
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    OPTIONS,
    STAGES,
    TILE_K,
    TILE_M,
    TILE_N,
    Channel,
    Operands,
    barriers,
    channel,
    describe,
)
from gpt2_triton.kernels.tuning import programs


@gluon.jit
def passing_partition(out_desc, b_ptr, res_desc, ring, c, M, N, K, W_T: gl.constexpr):
    """Pass compute_partition's tiles on to an activation; no heads are rotated."""
    nothing = RopeArguments(None, None, None, None, None, None, None, None)
    compute_partition(out_desc, b_ptr, res_desc, nothing, ring, c, M, N, K, W_T, True)


@gluon.jit
def _matmul_kernel(
    out_ptr, out_desc, a_desc, w_desc, b_ptr, res_desc, pre_desc, gelu_ptr, part_ptr, M, N, K, rope,
    W_T: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_shape: gl.constexpr = [BLOCK_N, BLOCK_K] if W_T else [BLOCK_K, BLOCK_N]
    w_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + w_shape, w_desc.layout)
    # TMA's layout of a tile stores columns 0 ... 63 row by row, then columns 64 ... 127, and so on
    c_slices = gl.allocate_shared_memory(gl.bfloat16, [SLICES, SLICE_M, SLICE_N], out_desc.layout)
    c_buf = c_slices.reinterpret(gl.bfloat16, [BLOCK_M, BLOCK_N], out_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES))
    c = channel(c_buf, res_desc is not None or pre_desc is not None)
    # fmt: off
    if EPILOGUE == "dgelu":
        pre_bufs = gl.allocate_shared_memory(gl.bfloat16, [RING, SLICE_M, SLICE_N], pre_desc.layout)
        pre = Channel(pre_bufs, barriers(RING), barriers(RING))
        gl.warp_specialize([
            (passing_partition, (out_desc, b_ptr, res_desc, ring, c, M, N, K, W_T)),
            (derivative_partition, (out_ptr, gelu_ptr, part_ptr, pre, c, c_slices, M, N)),
            (load_partition, (a_desc, (w_desc,), res_desc, ring, c, M, N, K, BLOCK_N, W_T)),
            (preactivation_partition, (pre_desc, pre, M, N)),
        ], [2, 1, 1], [184, 184, 184])
    elif EPILOGUE == "swiglu":
        gl.warp_specialize([
            (passing_partition, (out_desc, b_ptr, res_desc, ring, c, M, N, K, W_T)),
            (swiglu_partition, (out_ptr, pre_desc, c, c_slices, M, N)),
            (gated_load_partition, (a_desc, w_desc, ring, M, N, K)),
        ], [2, 1], [104, 104])
    elif EPILOGUE == "gelu":
        gl.warp_specialize([
            (passing_partition, (out_desc, b_ptr, res_desc, ring, c, M, N, K, W_T)),
            (activation_partition, (out_ptr, pre_desc, c, c_slices, M, N)),
            (load_partition, (a_desc, (w_desc,), res_desc, ring, c, M, N, K, BLOCK_N, W_T)),
        ], [2, 1], [104, 104])
    else:
        gl.warp_specialize([
            (compute_partition, (out_desc, b_ptr, res_desc, rope, ring, c, M, N, K, W_T, False)),
            (load_partition, (a_desc, (w_desc,), res_desc, ring, c, M, N, K, BLOCK_N, W_T)),
        ], [1], [24])
    # fmt: on


def matmul(out: Tensor, a: Tensor, w: Tensor, epilogue: Epilogue, w_is_nk: bool) -> int:
    """Write out[M, N] = epilogue(a[M, K] @ w), like the kernel of kernels/matmul.py
    and with the same arguments.
    Return the number of rows of tiles, and so of `part`.
    """
    name, b, res, pre, gelu_out, part, _ = epilogue
    rope = RopeArguments.of(epilogue.rope)
    (M, K), N = a.shape, out.shape[1]
    w_desc = describe(w, TILE_N, TILE_K) if w_is_nk else describe(w, TILE_K, TILE_N)
    pre_block = (SLICE_M.value, SLICE_N.value) if name == "dgelu" else (TILE_M, TILE_N)
    if name == "swiglu":  # N is 2F; a tile has 128 gates and their values
        N = 2 * N
        w_desc = describe(w, TILE_N // 2, TILE_K)
        pre_block = (TILE_M, TILE_N // 2)
    tiles = triton.cdiv(M, TILE_M) * triton.cdiv(N, TILE_N)
    _matmul_kernel[(programs(tiles),)](
        out, describe(out, TILE_M, TILE_N), describe(a, TILE_M, TILE_K), w_desc, b,
        describe(res, TILE_M, TILE_N), describe(pre, *pre_block), gelu_out, part, M, N, K, rope,
        W_T=w_is_nk, EPILOGUE=name, **OPTIONS,
    )  # fmt: skip
    return triton.cdiv(M, TILE_M)
