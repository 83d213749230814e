"""fc's product with GELU, and dX of fcproj times GELU's derivative, of fp8 operands for Hopper.

fp8_multiply_partition  two warpgroups multiply tiles of 128 x 256, as two halves of 128 columns: so
                        the registers suffice for 16 warps
(d)gelu_partition       four warps read the tile before, in fp16, in slices of 64 x 64,
                        and write e4m3 in both orders
load_partition, slope_partition  one warp each loads the operands, and the bytes of gelu'

Products are summed in the tensor cores' 14 bits over all of K: adding parts in fp32, as
fp8_matmul.py does, would take 64 more registers of each thread that multiplies.

A slice is computed in pairs of fp16, with an error far below e4m3's.  gelu' is a byte (e4m3.py
has its scale).  An fp16 multiply-add makes the byte; a permutation of bytes and a subtraction
turn the byte into fp16.  A tile stays in fp16's range: pre is cut at fp16's largest number, and a
gradient is first multiplied by the output's scale.  Each 16 bytes of gelu' in a row belong to one
thread, and slice follows slice.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from gpt2_triton.kernels.device_math import CURVE, SLOPE, gelu
from gpt2_triton.kernels.e4m3 import CELLS, STEPS, ZERO
from gpt2_triton.kernels.hopper.fp8_matmul import unscale_of
from gpt2_triton.kernels.hopper.mainloop import load_partition
from gpt2_triton.kernels.hopper.pipeline import (
    BLOCK_M,
    BLOCK_N,
    TILE_M,
    TILE_N,
    Channel,
    Operands,
    barriers,
    channel,
    corner,
    describe,
    tiles,
    tma_load,
    tma_store,
    wait_empty,
    wait_full,
)
from gpt2_triton.kernels.hopper.transpose import pairs
from gpt2_triton.kernels.tuning import programs
from gpt2_triton.operands import Fp8

BLOCK_K = gl.constexpr(64)
STAGES = gl.constexpr(5)
HALF = gl.constexpr(TILE_N // 2)
HALF_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [8, 1], [16, HALF.value, 32]))
SIDE = gl.constexpr(64)  # of a slice
DOWN = gl.constexpr(TILE_M // SIDE.value)
SLICES = gl.constexpr(DOWN.value * (TILE_N // SIDE.value))
RING = gl.constexpr(4)  # slices of gelu' in flight
WARPS = gl.constexpr(4)  # of the activation partition
SLICE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [WARPS.value, 1], [16, 8]))
# in shared memory
TILE_LAYOUT = gl.constexpr(gl.NVMMASharedLayout.get_default_for([TILE_M, TILE_N], gl.float16))
BYTES_LAYOUT = gl.constexpr(  # of a slice's bytes as [32, 128]
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]], [[0, 16], [0, 32], [0, 64], [1, 0], [2, 0]],
        [[4, 0], [16, 0]], [], [32, 128],
    )
)  # fmt: skip
LOWEST = gl.constexpr(0.17)  # the largest |gelu| of a negative number
FP16_MAX = gl.constexpr(65504.0)
OPTIONS = dict(num_warps=8, maxnreg=128)


def fp16_pair(x: float) -> str:
    """Return a pair of equal fp16 numbers as a constant of PTX."""
    bits = int(np.float16(x).view(np.uint16))
    return f"0x{bits:04X}{bits:04X}"


class Output(NamedTuple):
    """An fp8 tensor that is written in slices: its two orders, shared memory for two
    slices of each, scale and amax.
    """

    rows_desc: Any
    columns_desc: Any
    row_bufs: Any
    column_bufs: Any
    scale_ptr: Any
    amax_ptr: Any


BYTE_AT = 1024.0  # fp16 numbers from here on are 1 apart, so that the low byte of BYTE_AT + n is n
CONSTANTS = dict(
    c1=CURVE.value, c2=SLOPE.value, c3=6 * CURVE.value, c4=2 * SLOPE.value, half=0.5, top=64.0,
    m1=STEPS.value, m2=BYTE_AT + ZERO.value,
)  # fmt: skip

# four fp16 numbers x in $2, $3 -> e4m3 of gelu(x) times the scale in $4, and bytes of
# gelu'(x).  With y = min(x^2, 64):
# u = x (c2 + c1 y),  s = tanh(u) / 2 + 1/2,  gelu = x s,  gelu' = s + (c4 + c3 y) (x (s - s^2)).
# x (s - s^2) comes
# first: for a large finite x it is 0.  The low bits of m1 gelu' + m2 are the byte
_GELU = """
mul.f16x2 y, {x}, {x}; min.f16x2 y, y, top; fma.rn.f16x2 u, y, c1, c2; mul.f16x2 u, u, {x}; \
tanh.approx.f16x2 t, u;
fma.rn.f16x2 s, t, half, half; mul.f16x2 g, {x}, s; mul.f16x2 g, g, sc; \
cvt.rn.satfinite.e4m3x2.f16x2 {e}, g;
fma.rn.f16x2 y, y, c3, c4; neg.f16x2 t, s; fma.rn.f16x2 t, t, s, s; mul.f16x2 t, t, {x}; \
fma.rn.f16x2 d, y, t, s;
fma.rn.f16x2 {d}, d, m1, m2;"""
GELU_ASM = gl.constexpr(
    (
        "{ .reg .b32 y, u, t, s, g, d, c1, c2, c3, c4, half, m1, m2, sc, top, d0, "
        "d1; .reg .b16 e0, e1; mov.b32 sc, $4;"
    )
    + "".join(f"mov.b32 {name}, {fp16_pair(value)};" for name, value in CONSTANTS.items())
    + _GELU.format(x="$2", e="e0", d="d0")
    + _GELU.format(x="$3", e="e1", d="d1")
    + "mov.b32 $0, {e0, e1}; prmt.b32 $1, d0, d1, 0x6420; }"
)

# multiplies fp16 $3, $4 by the derivatives in the bytes $5; the products are
# fp16 in $1, $2 and e4m3 in $0
DGELU_ASM = gl.constexpr(
    f"{{ .reg .b32 a, b, o; .reg .b16 e0, e1; mov.b32 o, {fp16_pair(-BYTE_AT - ZERO.value)};"
    "prmt.b32 a, $5, 0x64646464, 0x4140; prmt.b32 b, $5, 0x64646464, 0x4342;"
    "add.rn.f16x2 a, a, o; add.rn.f16x2 b, b, o; mul.f16x2 $1, a, $3; mul.f16x2 $2, b, $4;"
    "cvt.rn.satfinite.e4m3x2.f16x2 e0, $1; "
    "cvt.rn.satfinite.e4m3x2.f16x2 e1, $2; mov.b32 $0, {e0, e1}; }"
)


# In SLICE_LAYOUT a row is warp (2 x 2), half of a warp's rows (2), lane // 4 (8); a column is tile
# (2 x 4), lane % 4 (4), number (2).  A thread's 16 bytes are 4 tiles x 2 halves x 2 numbers.


@gluon.jit
def to_bytes(d):
    """Return a slice's bytes as [32, 128], 16 in a row from each thread."""
    parts = gl.reshape(d, (2, 2, 2, 8, 2, 4, 4, 2))
    return gl.reshape(gl.permute(parts, (0, 4, 1, 3, 6, 5, 2, 7)), (32, 128))


@gluon.jit
def from_bytes(d):
    """Return the slice of to_bytes."""
    parts = gl.reshape(d, (2, 2, 2, 8, 4, 4, 2, 2))
    return gl.reshape(gl.permute(parts, (0, 2, 6, 3, 1, 5, 4, 7)), (SIDE, SIDE))


@gluon.jit
def sums_of_thread(x):
    """Return the sums over the rows of a slice that one thread holds."""
    return gl.reshape(gl.sum(gl.reshape(x, (2, 2, 2, 8, SIDE)), 2), (4, 8, SIDE))


@gluon.jit
def to_fp16(x, SATURATE: gl.constexpr):
    """Round to fp16; with SATURATE, numbers beyond fp16's range become its
    largest, and NaN stays NaN.
    """
    if SATURATE:
        return gl.inline_asm_elementwise(
            "cvt.rn.satfinite.f16x2.f32 $0, $2, $1;",
            "=r,f,f",
            [x],
            dtype=gl.float16,
            is_pure=True,
            pack=2,
        )
    else:
        return x.to(gl.float16)


@gluon.jit
def fp8_multiply_partition(b_ptr, scales, ring, c, M, N, K, DGELU: gl.constexpr):
    """Multiply and pass the tile on in fp16: pre, or (DGELU) the gradient of gelu's
    output times scale / STEPS.
    """
    a_scale_ptr, w_scale_ptr, scale_ptr = scales
    factor = unscale_of(a_scale_ptr, w_scale_ptr)
    if DGELU:
        factor *= gl.load(scale_ptr) * (1.0 / STEPS)
    step = 0
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        _, n = corner(tile, M, N, BLOCK_N)
        left = warpgroup_mma_init(gl.zeros([BLOCK_M, HALF], gl.float32, HALF_LAYOUT))
        right = warpgroup_mma_init(gl.zeros([BLOCK_M, HALF], gl.float32, HALF_LAYOUT))
        for k in range(0, gl.cdiv(K, BLOCK_K)):
            wait_full(ring.full, step, STAGES)
            a = ring.a.index(step % STAGES)
            w = ring.w[0].index(step % STAGES)
            left = warpgroup_mma(a, w.slice(0, HALF, 0).permute((1, 0)), left, is_async=True)
            right = warpgroup_mma(a, w.slice(HALF, HALF, 0).permute((1, 0)), right, is_async=True)
            left, right = warpgroup_mma_wait(2, deps=(left, right))
            left = warpgroup_mma_init(left)
            right = warpgroup_mma_init(right)
            mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            step += 1
        left, right = warpgroup_mma_wait(0, deps=(left, right))
        mbarrier.arrive(ring.empty.index((step + STAGES - 1) % STAGES), count=1)
        left = left * factor
        right = right * factor
        if b_ptr is not None:
            cols = n + gl.arange(0, HALF, layout=gl.SliceLayout(0, HALF_LAYOUT))
            b_left = gl.load(b_ptr + cols).to(gl.float32)
            b_right = gl.load(b_ptr + HALF + cols).to(gl.float32)
            left += (b_left + 0.0 * b_left)[None, :]  # NaN if b is infinite, as to_fp16 saturates
            right += (b_right + 0.0 * b_right)[None, :]
        mbarrier.wait(c.empty, (turn & 1) ^ 1)
        c.buf.index(0).store(to_fp16(left, not DGELU))
        c.buf.index(1).store(to_fp16(right, not DGELU))
        fence_async_shared()
        mbarrier.arrive(c.full, count=1)
        turn += 1


@gluon.jit
def slope_partition(slope_desc, slopes, M, N):
    """Load the bytes of gelu', slice after slice, in the order in which the
    activation partition takes them.
    """
    step = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        for s in range(SLICES):
            wait_empty(slopes.empty, step, RING)
            slot = step % RING
            mbarrier.expect(slopes.full.index(slot), slope_desc.block_type.nbytes)
            row = (tile * SLICES + s) * 32
            tma_load(slope_desc, [row, 0], slopes.full.index(slot), slopes.buf.index(slot))
            step += 1


@gluon.jit
def put(out, s, q):
    """Write a slice to shared memory in both orders.  The caller has waited
    until the buffers are free.
    """
    out.row_bufs.index(s % 2).store(q)
    out.column_bufs.index(s % 2).permute((1, 0)).store(pairs(q))


@gluon.jit
def send(out, s, row, col):
    """Begin to store the slice that `put` has written."""
    tma_store(out.rows_desc, [row, col], out.row_bufs.index(s % 2))
    tma_store(out.columns_desc, [col, row // 2], out.column_bufs.index(s % 2))


@gluon.jit
def record(out, largest):
    gl.atomic_max(
        out.amax_ptr + gl.program_id(0) % CELLS, largest.to(gl.int32, bitcast=True), sem="relaxed"
    )


@gluon.jit
def gelu_partition(out, slope_desc, slope_bufs, c_slices, c, M, N):
    """Store each tile's gelu and bytes of gelu'; at the end, record the largest |gelu|."""
    ones = gl.full([SIDE, SIDE], 1.0, gl.float16, SLICE_LAYOUT)
    fp16_scale = ones * gl.load(out.scale_ptr).to(gl.float16)
    top = gl.zeros([SIDE, SIDE], gl.float16, SLICE_LAYOUT)
    turn = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        mbarrier.wait(c.full, turn & 1)
        for s in range(SLICES):
            x = c_slices.index(s).load(SLICE_LAYOUT)
            row = m + s % DOWN * SIDE
            col = n + s // DOWN * SIDE
            q, d = gl.inline_asm_elementwise(
                GELU_ASM, "=r,=r,r,r,r,r", [x, fp16_scale], dtype=(gl.float8e4nv, gl.uint8),
                is_pure=True, pack=4,
            )  # fmt: skip
            top = gl.maximum(top, x)
            tma.store_wait(3)
            put(out, s, q)
            slope_bufs.index(s % 2).store(to_bytes(d))
            fence_async_shared()
            send(out, s, row, col)
            tma_store(slope_desc, [(tile * SLICES + s) * 32, 0], slope_bufs.index(s % 2))
        mbarrier.arrive(c.empty, count=1)
        turn += 1
    if out.amax_ptr is not None:
        largest = gl.max(gl.max(top, 1), 0).to(gl.float32)
        record(out, gl.maximum(gelu(largest), LOWEST))  # above LOWEST, gelu grows with x
    tma.store_wait(0)


@gluon.jit
def dgelu_partition(out, part_ptr, slopes, c_slices, c, M, N):
    """Store each tile's product with gelu', and the product's column sums to part[tile_m]; at the
    end, record the largest |product|.  The record omits NaN, and has fp16's largest number for
    infinity.  After NaN or infinity the column sums are not finite, and so the step is skipped.
    """
    cols = gl.arange(0, SIDE, layout=gl.SliceLayout(0, SLICE_LAYOUT))
    scale = gl.load(out.scale_ptr)
    sums = sums_of_thread(gl.zeros([SIDE, SIDE], gl.float32, SLICE_LAYOUT))
    top = gl.zeros([SIDE, SIDE], gl.float16, SLICE_LAYOUT)
    turn = 0
    step = 0
    for tile in range(gl.program_id(0), tiles(M, N, BLOCK_N), gl.num_programs(0)):
        m, n = corner(tile, M, N, BLOCK_N)
        mbarrier.wait(c.full, turn & 1)
        for s in range(SLICES):
            x = c_slices.index(s).load(SLICE_LAYOUT)
            row = m + s % DOWN * SIDE
            col = n + s // DOWN * SIDE
            slot = step % RING
            wait_full(slopes.full, step, RING)
            d = from_bytes(slopes.buf.index(slot).load(BYTES_LAYOUT))
            d = gl.convert_layout(d, SLICE_LAYOUT, assert_trivial=True)
            mbarrier.arrive(slopes.empty.index(slot), count=1)
            q, v = gl.inline_asm_elementwise(
                DGELU_ASM, "=r,=r,=r,r,r,r", [x, d], dtype=(gl.float8e4nv, gl.float16),
                is_pure=True, pack=4,
            )  # fmt: skip
            top = gl.maximum(top, gl.maximum(v, -v))
            sums += sums_of_thread(v.to(gl.float32))
            tma.store_wait(2)
            put(out, s, q)
            fence_async_shared()
            send(out, s, row, col)
            if s % DOWN == DOWN - 1:
                total = gl.sum(gl.sum(sums, 1), 0)
                total = gl.convert_layout(total, gl.SliceLayout(0, SLICE_LAYOUT))
                gl.store(part_ptr + m // BLOCK_M * N + col + cols, total / scale)
                sums = gl.zeros_like(sums)
            step += 1
        mbarrier.arrive(c.empty, count=1)
        turn += 1
    if out.amax_ptr is not None:
        largest = gl.max(gl.max(top, 1), 0).to(gl.float32)
        record(out, gl.minimum(largest, FP16_MAX) / scale)
    tma.store_wait(0)


@gluon.jit
def _fp8_gelu_kernel(
    a_desc, w_desc, rows_desc, columns_desc, slope_desc, b_ptr, part_ptr, a_scale_ptr, w_scale_ptr,
    scale_ptr, amax_ptr, M, N, K, DGELU: gl.constexpr,
):  # fmt: skip
    a_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_M, BLOCK_K], a_desc.layout)
    w_bufs = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    # TMA's layout of a tile stores columns 0 ... 63 row by row, then columns 64 ... 127, and so on
    c_slices = gl.allocate_shared_memory(gl.float16, [SLICES, SIDE, SIDE], TILE_LAYOUT)
    c_halves = c_slices.reinterpret(gl.float16, [2, BLOCK_M, HALF], TILE_LAYOUT)
    r_bufs = gl.allocate_shared_memory(gl.float8e4nv, [2, SIDE, SIDE], rows_desc.layout)
    t_bufs = gl.allocate_shared_memory(gl.int16, [2, SIDE, SIDE // 2], columns_desc.layout)
    ring = Operands(a_bufs, (w_bufs,), barriers(STAGES), barriers(STAGES))
    c = channel(c_halves, True)
    out = Output(rows_desc, columns_desc, r_bufs, t_bufs, scale_ptr, amax_ptr)
    slope_bufs = gl.allocate_shared_memory(
        gl.uint8, [RING if DGELU else 2, 32, 128], slope_desc.layout
    )
    scales = (a_scale_ptr, w_scale_ptr, scale_ptr)
    # fmt: off
    if DGELU:
        slopes = Channel(slope_bufs, barriers(RING), barriers(RING))
        gl.warp_specialize([
            (fp8_multiply_partition, (b_ptr, scales, ring, c, M, N, K, True)),
            (dgelu_partition, (out, part_ptr, slopes, c_slices, c, M, N)),
            (load_partition, (a_desc, (w_desc,), None, ring, c, M, N, K, BLOCK_N, True)),
            (slope_partition, (slope_desc, slopes, M, N)),
        ], [WARPS, 1, 1], [104, 24, 24])
    else:
        gl.warp_specialize([
            (fp8_multiply_partition, (b_ptr, scales, ring, c, M, N, K, False)),
            (gelu_partition, (out, slope_desc, slope_bufs, c_slices, c, M, N)),
            (load_partition, (a_desc, (w_desc,), None, ring, c, M, N, K, BLOCK_N, True)),
        ], [WARPS, 1], [120, 24])
    # fmt: on


def matmul(
    out: Fp8,
    a: Tensor,
    a_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    b: Tensor | None,
    slope: Tensor,
    part: Tensor | None,
) -> int:
    """Write gelu(a[M, K] @ w[N, K].T / scales + b) in e4m3, out's rows [M, N] and columns
    [N, M], and gelu' bytes to slope.

    With `part`, write the product times slope's gelu' instead, and its column sums to part[M / 128,
    N].  M is a multiple of 128, N of 256.  Return M / 128.
    """
    M, K = a.shape
    N = w.shape[0]
    side = SIDE.value
    k = BLOCK_K.value
    _fp8_gelu_kernel[(programs(M // TILE_M * (N // TILE_N)),)](
        describe(a, TILE_M, k), describe(w, TILE_N, k),
        describe(out.rows, side, side),
        describe(out.columns.view(torch.int16), side, side // 2),
        describe(slope.view(-1, 128), 32, 128), b, part, a_scale, w_scale, out.scale, out.amax,
        M, N, K, DGELU=part is not None, **OPTIONS,
    )  # fmt: skip
    return M // TILE_M
