"""Matrix products of a linear layer, with the operation that follows in the
epilogue.  w is [N, K] = [out, in].

matmul           out  = inp @ w.T + b
matmul_act       pre  = inp @ w.T + b,  out = act(pre), gelu or another activation
matmul_add       out  = res + (inp @ w.T + b)
matmul_dx        dinp = dout @ w
matmul_dx_dact   dpre = (dout @ w) * act'(pre),  dbias (+)= sum_R dpre,  act_out = act(pre)
matmul_dw        dw (+)= dout.T @ inp
matmul_dw_pair   dw of two layers: on Hopper one launch, whose tiles
                 together leave less of the GPU idle

R = B*T rows.  Blocks of operands are read and written by blocks.py, zeros and nothing outside a
matrix: no edge needs a mask here, and R is arbitrary.  N and K are multiples of 16: rows begin on
16 bytes, as TMA needs.  Sums are fp32.

On Hopper, hopper.takes decides which products run in the kernels of hopper/.  The kernels here
compute all others, and all products on other GPUs and in the interpreter.

Each program walks output tiles (a persistent kernel), so that the loads of a tile overlap the
epilogue of the tile before.  A tile has the same bits whichever program computes it.  dw has few
tiles and a long sum.  Whole tiles run in waves that fill the GPU; the tiles that are left are split
along R.  Their partial sums go to scratch and are added in a fixed order, so that two runs agree
bit for bit.  This is the hybrid of Stream-K (https://arxiv.org/abs/2301.03598), but with parts of
equal length: parts that run at the same time then read the same rows.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels import fp8_matmul, hopper, tuning
from gpt2_triton.kernels.blocks import (
    INTERPRETED,
    describe,
    describe_halves,
    load_block,
    rounded,
    store_block,
)
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.device_math import (
    activation,
    dactivation,
    dot,
    dot_added_in_fp32,
    product,
)
from gpt2_triton.kernels.dw_split import TileSplit, split_tiles
from gpt2_triton.kernels.e4m3 import cuts_fp8_sums
from gpt2_triton.kernels.epilogue import Epilogue, RopeArguments
from gpt2_triton.kernels.fp8 import Fp8, Operand, stored
from gpt2_triton.kernels.hopper import fp8_matmul_dw, matmul_wide
from gpt2_triton.kernels.hopper import matmul as hopper_matmul
from gpt2_triton.kernels.hopper import matmul_dw as hopper_matmul_dw
from gpt2_triton.kernels.hopper.pipeline import TILE_M
from gpt2_triton.kernels.qk_norm import rotated_before
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.rope import row_for_heads
from gpt2_triton.kernels.tiles import halves, split_item, tile_corner, tile_position, walk
from gpt2_triton.kernels.tuning import (
    INTERPRET,
    PLANNED_SMS,
    dtype_name,
    programs,
    tuned,
)
from gpt2_triton.operands import Linear


@triton.jit
def _epilogue(
    acc, tile_m, m, n, out_desc, b_ptr, res_desc, pre_desc, act_desc, part_ptr, M, N, rope,
    EPILOGUE: tl.constexpr, ACT: tl.constexpr,
):  # fmt: skip
    """Finish and store the fp32 sums of half a tile that begins at row m, column n.
    Return its column sums over each 16th row, which a thread has.
    """
    cols = n + tl.arange(0, acc.shape[1])
    if b_ptr is not None:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "add":
        acc += load_block(res_desc, [m, n]).to(tl.float32)
    elif EPILOGUE == "rope":
        acc = rotated_before(acc, m, n, M, rope)
    elif EPILOGUE == "act":
        # of the stored value: the backward pass can recompute the same bits
        pre = rounded(acc, pre_desc)
        store_block(pre_desc, [m, n], pre)
        acc = activation(pre.to(tl.float32), ACT, pre.dtype)
    elif EPILOGUE == "dact":
        stored_pre = load_block(pre_desc, [m, n])
        pre = stored_pre.to(tl.float32)
        BY_TMA: tl.constexpr = isinstance(out_desc, tl.tensor_descriptor)
        if BY_TMA:
            if act_desc is not None:  # before the sums, else registers spill
                store_block(act_desc, [m, n], activation(pre, ACT, stored_pre.dtype))
            pre += 0.0 * acc  # keeps pre in acc's register layout: else registers spill
            acc = product(acc, dactivation(pre, ACT, stored_pre.dtype))
            tl.store(part_ptr + tile_m * N + cols, tl.sum(acc, 0), mask=cols < N)
        else:
            if not INTERPRETED:  # which cuts numbers off, and so errs in one direction twice
                # as in PyTorch and hopper/: half as many bytes change to the layout of pre
                acc = rounded(acc, out_desc).to(tl.float32)
            if act_desc is not None:  # before the sums, else registers spill
                store_block(act_desc, [m, n], activation(pre, ACT, stored_pre.dtype))
            # rows past the end are 0 and add nothing to the column sums
            acc = product(acc, dactivation(pre, ACT, stored_pre.dtype))
    else:
        tl.static_assert(EPILOGUE == "")
    store_block(out_desc, [m, n], acc)
    return tl.sum(tl.reshape(acc, (acc.shape[0] // 16, 16, acc.shape[1])), 0)


@triton.jit
def tile_product(
    a_desc, w_desc, m, n, K, W_IS_NK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the tile of a[M, K] @ w that begins at row m, column n, in fp32; w is
    stored as [N, K] or as [K, N].
    """
    if not isinstance(a_desc, tl.tensor_descriptor):
        tl.assume(K > 0)  # else the epilogue is begun twice, for zeros too, and registers spill
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = load_block(a_desc, [m, k])
        if W_IS_NK:
            w = load_block(w_desc, [n, k], REPEAT=True).T
        else:
            w = load_block(w_desc, [k, n])
        acc = dot(a, w, acc)
    return acc


@triton.jit
def _matmul_kernel(
    out_desc, a_desc, w_desc, b_ptr, res_desc, pre_desc, act_desc, part_ptr, M, N, K, rope,
    W_IS_NK: tl.constexpr, EPILOGUE: tl.constexpr, ACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Write out[M, N] = epilogue(a[M, K] @ w); w is [N, K] (forward) or [K, N] (dX)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    BY_TMA: tl.constexpr = isinstance(out_desc, tl.tensor_descriptor)
    first, end, step, offset = walk(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), BY_TMA)
    for tile in tl.range(first, end, step, flatten=BY_TMA):
        tile_m, tile_n = tile_position(offset + tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        acc = tile_product(a_desc, w_desc, m, n, K, W_IS_NK, BLOCK_M, BLOCK_N, BLOCK_K)
        left, right = halves(acc)
        left = _epilogue(
            left, tile_m, m, n, out_desc, b_ptr, res_desc, pre_desc, act_desc, part_ptr, M, N,
            rope, EPILOGUE, ACT,
        )  # fmt: skip
        right = _epilogue(
            right, tile_m, m, n + BLOCK_N // 2, out_desc, b_ptr, res_desc, pre_desc, act_desc,
            part_ptr, M, N, rope, EPILOGUE, ACT,
        )  # fmt: skip
        if EPILOGUE == "dact" and not BY_TMA:
            # one wait for the other warps' sums, not one for each half
            sums = tl.sum(tl.join(left, right), 0)
            half = tl.arange(0, 2)[None, :] * (BLOCK_N // 2)
            cols = n + half + tl.arange(0, BLOCK_N // 2)[:, None]
            tl.store(part_ptr + tile_m * N + cols, sums, mask=cols < N)


@triton.jit
def _matmul_dw_kernel(
    out_desc, part_desc, dout_desc, inp_desc, dout_scale_ptr, inp_scale_ptr, N, K, whole_tiles,
    k_parts, steps, part_steps, ACC: tl.constexpr, CUT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Write whole tiles of out[N, K] (+)= dout.T @ inp; others' sums to part[k_part][tile]."""
    tiles_n = tl.cdiv(N, BLOCK_M)
    tiles_k = tl.cdiv(K, BLOCK_N)
    split_tiles = tiles_n * tiles_k - whole_tiles
    if dout_scale_ptr is not None:
        # fp8: operands are [N, R] and [K, R]
        unscale = 1.0 / (tl.load(dout_scale_ptr) * tl.load(inp_scale_ptr))
    BY_TMA: tl.constexpr = isinstance(out_desc, tl.tensor_descriptor)
    first_item, end, stride, offset = walk(
        tl.program_id(0), whole_tiles + split_tiles * k_parts, tl.num_programs(0), BY_TMA
    )
    for i in tl.range(first_item, end, stride):
        item = offset + i
        slot = item - whole_tiles  # negative for a whole tile
        tile, first, count, _ = split_item(item, whole_tiles, split_tiles, steps, part_steps)
        tile_n, tile_k = tile_position(tile, tiles_n, tiles_k, GROUP_M)
        n = tile_n * BLOCK_M
        k = tile_k * BLOCK_N
        if not BY_TMA:  # TMA reads zeros past the end of the last part
            count = tl.minimum(count, steps - first)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(first, first + count):
            r = step * BLOCK_K
            if dout_scale_ptr is not None:
                dout = load_block(dout_desc, [n, r])
                inp = load_block(inp_desc, [k, r]).T
                acc = dot_added_in_fp32(dout, inp, acc) if CUT else dot(dout, inp, acc)
            else:
                dout = load_block(dout_desc, [r, n], TRANSPOSED=True)
                acc = dot(dout, load_block(inp_desc, [r, k]), acc)
        if dout_scale_ptr is not None:
            acc *= unscale
        left, right = halves(acc)
        if slot >= 0:
            store_block(part_desc, [slot * BLOCK_M, 0], left)
            store_block(part_desc, [slot * BLOCK_M, BLOCK_N // 2], right)
        else:
            if ACC:
                left += load_block(out_desc, [n, k])
                right += load_block(out_desc, [n, k + BLOCK_N // 2])
            store_block(out_desc, [n, k], left)
            store_block(out_desc, [n, k + BLOCK_N // 2], right)


@triton.jit(do_not_specialize=["first_tile", "split_tiles", "k_parts"])
def _add_dw_partials_kernel(
    out_ptr, part_ptr, N, K, first_tile, split_tiles, k_parts, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write ROWS rows of a split tile from first_tile on: out (+)= its sums in order."""
    slot = tl.program_id(0) // (BLOCK_M // ROWS)
    rows = tl.program_id(0) % (BLOCK_M // ROWS) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_N)
    stride = tl.cast(split_tiles, tl.int64) * (BLOCK_M * BLOCK_N)
    part_ptr += slot.to(tl.int64) * (BLOCK_M * BLOCK_N)
    in_tile = rows[:, None] * BLOCK_N + cols[None, :]
    total = tl.load(part_ptr + in_tile)
    for _ in range(1, k_parts):
        part_ptr += stride
        total += tl.load(part_ptr + in_tile)
    first_n, first_k = tile_corner(first_tile + slot, N, K, BLOCK_M, BLOCK_N, GROUP_M)
    n = first_n + rows
    k = first_k + cols
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    mask = (n < N)[:, None] & (k < K)[None, :]
    if ACC:
        total += tl.load(out_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, total, mask=mask)


def launch(
    out: Operand,
    a: Operand,
    w: Operand,
    epilogue: Epilogue,
    act: str = "",
    w_is_nk: bool = True,
) -> int:
    """Launch a product; return the number of rows of tiles, and so of `part`."""
    named = epilogue.name.replace("act", act)  # as the kernels for Hopper and fp8 know it
    special = epilogue._replace(name=named)
    if isinstance(a, Fp8):
        return fp8_matmul.launch(out, a, w, special, w_is_nk)
    (M, K), N = a.shape, out.shape[1]
    kernel = None
    if a.dtype == out.dtype:
        kernel = hopper.takes(special.op, M, N, dtype_name(a))
    if kernel == "matmul_wide":
        return matmul_wide.matmul(out, a, w, epilogue.b, w_is_nk=w_is_nk, res=epilogue.res)
    if kernel == "matmul":
        return hopper_matmul.matmul(out, a, w, special, w_is_nk)
    name, b, res, pre, act_out, part, _ = epilogue
    rope = RopeArguments.of(epilogue.rope)
    row = tuned("matmul", dtype_name(a), BLOCK_M=M, BLOCK_N=N, BLOCK_K=K)
    row = row_for_heads(row, rope.HS.value)
    block_m = row["BLOCK_M"]
    block_n = row["BLOCK_N"]
    block_k = row["BLOCK_K"]
    out_desc, res_desc, pre_desc, act_desc = (
        describe_halves(t, block_m, block_n) for t in (out, res, pre, act_out)
    )
    a_desc = describe(a, block_m, block_k)
    w_desc = describe(w, block_n, block_k) if w_is_nk else describe(w, block_k, block_n)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, block_n)
    _matmul_kernel[(programs(tiles),)](
        out_desc, a_desc, w_desc, b, res_desc, pre_desc, act_desc, part, M, N, K, rope,
        W_IS_NK=w_is_nk, EPILOGUE=name, ACT=act, **row,
    )  # fmt: skip
    return triton.cdiv(M, block_m)


@contract("out[R,N] <- inp[R,K] layer.w[N,K] layer.b[N]?")
def matmul(out: Tensor, inp: Operand, layer: Linear) -> None:
    """Write out = inp @ w.T + b; out may be fp32 while inp and w are bf16."""
    launch(out, inp, layer.w, Epilogue(b=layer.b))


@contract("out[R,N] pre[R,N] <- inp[R,K] layer.w[N,K] layer.b[N]?")
def matmul_act(out: Operand, pre: Tensor, inp: Operand, layer: Linear, act: str) -> None:
    """Write pre = inp @ w.T + b and out = act(pre as stored); in fp8, which has
    gelu alone, `pre` holds bytes of gelu'(pre).
    """
    launch(out, inp, layer.w, Epilogue("act", layer.b, pre=pre), act)


@contract("out[R,N] <- res[R,N] inp[R,K] layer.w[N,K] layer.b[N]?")
def matmul_add(out: Tensor, res: Tensor, inp: Operand, layer: Linear) -> None:
    """Write out = res + (inp @ w.T + b), the residual add."""
    launch(out, inp, layer.w, Epilogue("add", layer.b, res))


@contract("dinp[R,K] <- dout[R,N] layer.w[N,K]")
def matmul_dx(dinp: Tensor, dout: Operand, layer: Linear) -> None:
    """Write dinp = dout @ w."""
    launch(dinp, dout, layer.w, Epilogue(), w_is_nk=False)


@contract("dpre[R,K] dbias[K]+ act_out[R,K]? scratch[*] <- dout[R,N] layer.w[N,K] pre[R,K]")
def matmul_dx_dact(
    dpre: Operand, dbias: Tensor, act_out: Tensor | None, scratch: Tensor,
    dout: Operand, layer: Linear, pre: Tensor, acc: bool, act: str,
) -> None:  # fmt: skip
    """Write dpre = (dout @ w) * act'(pre), dbias (+)= its column sums before rounding, and
    act_out = act(pre), with the bits of matmul_act.  act_out may be pre: a program reads its
    elements of pre before it writes them.
    """
    epilogue = Epilogue("dact", pre=pre, act_out=act_out, part=scratch)
    rows = launch(dpre, dout, layer.w, epilogue, act, w_is_nk=False)
    column_sums(dbias, None, None, scratch, rows, acc)


def matmul_dx_dact_scratch(R: int, K: int, dtype: str) -> int:
    """Return the fp32 elements of scratch: one row of column sums per row of tiles."""
    return K * triton.cdiv(R, min(TILE_M, tuned("matmul", dtype, BLOCK_M=R)["BLOCK_M"]))


def _dw_row(N: int, K: int, R: int, dtype: str) -> dict[str, int]:
    row = tuned("matmul_dw", dtype, BLOCK_M=N, BLOCK_N=K, BLOCK_K=R)
    return row | hopper.blocks("matmul_dw", N, K, dtype)


@contract("dw[N,K]+ scratch[*] <- dout[R,N] inp[R,K]")
def matmul_dw(dw: Tensor, scratch: Tensor, dout: Operand, inp: Operand, acc: bool) -> None:
    """Write dw (+)= dout.T @ inp, in fp32."""
    _multiply_dw([dw], scratch, [dout], [inp], acc)


@contract("dw[N,K]+ dw2[M,J]+ scratch[*] <- dout[R,N] inp[R,K] dout2[R,M] inp2[R,J]")
def matmul_dw_pair(
    dw: Tensor,
    dw2: Tensor,
    scratch: Tensor,
    dout: Operand,
    inp: Operand,
    dout2: Operand,
    inp2: Operand,
    acc: bool,
) -> None:
    """Write dw (+)= dout.T @ inp and dw2 (+)= dout2.T @ inp2, in fp32."""
    if hopper.takes("matmul_dw", *dw.shape, dtype_name(stored(dout)[0])):
        return _multiply_dw([dw, dw2], scratch, [dout, dout2], [inp, inp2], acc)
    _multiply_dw([dw], scratch, [dout], [inp], acc)
    _multiply_dw([dw2], scratch, [dout2], [inp2], acc)


def _multiply_dw(
    dws: Sequence[Tensor],
    scratch: Tensor,
    douts: Sequence[Operand],
    inps: Sequence[Operand],
    acc: bool,
) -> None:
    """Write each dw (+)= dout.T @ inp, in fp32; on Hopper there may be two."""
    (N, K), R = dws[0].shape, douts[0].shape[0]
    operands, scales = zip(*map(fp8_matmul.dw_operands, douts, inps))
    douts, inps = zip(*operands)
    dtype = dtype_name(douts[0])
    row = _dw_row(N, K, R, dtype)
    kernel = hopper.takes("matmul_dw", N, K, dtype)
    cut = not kernel and dtype == "fp8" and cuts_fp8_sums()
    if cut:
        row["BLOCK_N"] //= 2  # registers hold a product beside the sum
    split = split_tiles([dw.shape for dw in dws], R, row, tuning.num_sms(), scratch.numel())
    if kernel == "fp8_matmul_dw":
        fp8_matmul_dw.matmul_dw(dws, scratch, douts, inps, scales, split, acc)
    elif kernel == "matmul_dw":
        hopper_matmul_dw.matmul_dw(dws, scratch, douts, inps, split, acc)
    else:
        _launch_dw(dws[0], scratch, *operands[0], *scales[0], split, acc, row | dict(CUT=cut))
    for dw, grid in zip(dws, split.grids):
        first = max(split.whole_tiles, grid.first)
        count = grid.first + grid.tiles - first
        if count <= 0:
            continue
        rows = grid.rows if INTERPRET else 8
        size = grid.rows * grid.columns
        _add_dw_partials_kernel[(count * grid.rows // rows,)](
            dw, scratch[(first - split.whole_tiles) * size :], *dw.shape, first - grid.first,
            split.split_tiles, split.k_parts, ACC=acc, BLOCK_M=grid.rows, BLOCK_N=grid.columns,
            GROUP_M=row["GROUP_M"], ROWS=rows,
        )  # fmt: skip


def _launch_dw(
    dw: Tensor, scratch: Tensor, dout: Tensor, inp: Tensor, dout_scale: Tensor | None,
    inp_scale: Tensor | None, split: TileSplit, acc: bool, row: dict[str, int],
) -> None:  # fmt: skip
    N, K = dw.shape
    block_m, block_n, _, _ = split.grids[0]
    block_k = row["BLOCK_K"]
    del row["PER_SM"]
    row |= dict(BLOCK_M=block_m, BLOCK_N=block_n)
    part = dw  # not written where all tiles are whole
    if split.split_tiles:
        part = scratch[: split.scratch].view(-1, block_n)
    if dout_scale is None:
        dout_desc = describe(dout, block_k, block_m)
        inp_desc = describe(inp, block_k, block_n)
    else:  # stored transposed
        dout_desc = describe(dout, block_m, block_k)
        inp_desc = describe(inp, block_n, block_k)
    _matmul_dw_kernel[(programs(split.items),)](
        describe_halves(dw, block_m, block_n), describe_halves(part, block_m, block_n), dout_desc,
        inp_desc, dout_scale, inp_scale, N, K, split.whole_tiles, split.k_parts, split.steps,
        split.part_steps, ACC=acc, **row,
    )  # fmt: skip


def matmul_dw_scratch(R: int, dtype: str, *sizes: tuple[int, int]) -> int:
    """Return the fp32 elements of scratch: the partial sums of the split tiles
    of dw[N, K], or of a pair.
    """
    return split_tiles(sizes, R, _dw_row(*sizes[0], R, dtype), PLANNED_SMS).scratch
