"""Matrix products of a linear layer; what follows a product is done in its epilogue.  w is [N, K] = [out, in].

matmul           out  = inp @ w.T + b
matmul_gelu      pre  = inp @ w.T + b,  out = gelu(pre)
matmul_add       out  = res + (inp @ w.T + b)
matmul_dx        dinp = dout @ w
matmul_dx_dgelu  dpre = (dout @ w) * gelu'(pre),  dbias (+)= sum_R dpre,  gelu_out = gelu(pre)
matmul_dw        dw (+)= dout.T @ inp

R = B*T rows.  Operands reach shared memory through TMA descriptors, which read zeros and write nothing outside a
matrix: no edge needs a mask, and any R will do; N and K are multiples of 16, as TMA wants rows that begin on 16 bytes.
Sums run in fp32.

On Hopper the kernels are those of hopper.py and hopper_dw.py, which this file's launchers prefer where sizes allow; the
ones here run everywhere else, and in the interpreter.

Each program walks output tiles (a persistent kernel), so that the loads of the next tile overlap the epilogue of the
last.  What a tile holds does not depend on which program computes it.  dw has few tiles and a long sum: when that would
leave multiprocessors idle, R is cut into splits whose partial products go to scratch and are added in a fixed order, so
that two runs agree bit for bit.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2_triton.kernels import hopper, hopper_dw
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.dot import dot
from gpt2_triton.kernels.gelu import dgelu, gelu
from gpt2_triton.kernels.reduce import column_sums
from gpt2_triton.kernels.tile import halves, tile_position
from gpt2_triton.kernels.tuned import dtype_name, is_hopper, num_sms, tuned


@triton.jit
def _epilogue(acc, tile_m, m, n, out_desc, b_ptr, res_desc, pre_desc, gelu_desc, part_ptr, N, EPILOGUE: tl.constexpr):
    """Finish and store the fp32 sums of half a tile that begins at row m, column n."""
    cols = n + tl.arange(0, acc.shape[1])
    if b_ptr is not None:
        acc += tl.load(b_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if EPILOGUE == "add":
        acc += res_desc.load([m, n]).to(tl.float32)
    elif EPILOGUE == "gelu":
        pre = acc.to(pre_desc.dtype)  # GELU sees the stored value: the backward pass can recompute the same bits
        pre_desc.store([m, n], pre)
        acc = gelu(pre.to(tl.float32))
    elif EPILOGUE == "dgelu":
        # "+ 0 * acc" keeps pre in acc's register layout; without it gelu_out and dpre each compute the sigmoid, and at
        # 128x256 registers spill
        pre = pre_desc.load([m, n]).to(tl.float32) + 0.0 * acc
        acc *= dgelu(pre)  # rows past the end are 0 * dgelu(0): nothing for the column sums
        tl.store(part_ptr + tile_m * N + cols, tl.sum(acc, 0), mask=cols < N)
        if gelu_desc is not None:
            gelu_desc.store([m, n], gelu(pre).to(gelu_desc.dtype))
    out_desc.store([m, n], acc.to(out_desc.dtype))


@triton.jit
def _matmul_kernel(
    out_desc, a_desc, w_desc, b_ptr, res_desc, pre_desc, gelu_desc, part_ptr, M, N, K,
    W_IS_NK: tl.constexpr, EPILOGUE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[M, N] = epilogue(a[M, K] @ w), with w stored as [N, K] (forward) or as [K, N] (dX)."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        m = tile_m * BLOCK_M
        n = tile_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([m, k])
            if W_IS_NK:
                w = w_desc.load([n, k]).T
            else:
                w = w_desc.load([k, n])
            acc = dot(a, w, acc)
        left, right = halves(acc)
        _epilogue(left, tile_m, m, n, out_desc, b_ptr, res_desc, pre_desc, gelu_desc, part_ptr, N, EPILOGUE)
        n += BLOCK_N // 2
        _epilogue(right, tile_m, m, n, out_desc, b_ptr, res_desc, pre_desc, gelu_desc, part_ptr, N, EPILOGUE)


@triton.jit
def _store_dw(acc, out_desc, split, n, k, ACC: tl.constexpr):
    if ACC:
        acc += tl.reshape(out_desc.load([split, n, k]), acc.shape)
    out_desc.store([split, n, k], tl.reshape(acc, (1, acc.shape[0], acc.shape[1])))


@triton.jit
def _matmul_dw_kernel(
    out_desc, dout_desc, inp_desc, N, K, splits, steps, ACC: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """out[split, N, K] (+)= dout[rows].T @ inp[rows]; the rows of a split are `steps` blocks of BLOCK_K."""
    tiles_n = tl.cdiv(N, BLOCK_M)
    tiles_k = tl.cdiv(K, BLOCK_N)
    tiles = tiles_n * tiles_k
    for item in tl.range(tl.program_id(0), tiles * splits, tl.num_programs(0), flatten=True):
        split = item // tiles  # the tiles of one split run together and share its rows in L2
        tile_n, tile_k = tile_position(item % tiles, tiles_n, tiles_k, GROUP_M)
        n = tile_n * BLOCK_M
        k = tile_k * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps):
            r = (split * steps + step) * BLOCK_K
            acc = dot(dout_desc.load([r, n]).T, inp_desc.load([r, k]), acc)
        left, right = halves(acc)
        _store_dw(left, out_desc, split, n, k, ACC)
        _store_dw(right, out_desc, split, n, k + BLOCK_N // 2, ACC)


def _describe(tensor: Tensor | None, rows: int, columns: int) -> TensorDescriptor | None:
    return None if tensor is None else TensorDescriptor.from_tensor(tensor, [rows, columns])


def _launch(
    out: Tensor, a: Tensor, w: Tensor, b: Tensor | None = None, *, epilogue: str = "", w_is_nk: bool = True,
    res: Tensor | None = None, pre: Tensor | None = None, gelu_out: Tensor | None = None, part: Tensor | None = None,
) -> None:  # fmt: skip
    (M, K), N = a.shape, out.shape[1]
    if is_hopper() and dtype_name(a) == dtype_name(out) == "bf16" and M % hopper.ROWS.value == 0 and N % 64 == 0:
        hopper.matmul(out, a, w, b, w_is_nk=w_is_nk, epilogue=epilogue, res=res, pre=pre, gelu_out=gelu_out, part=part)
        return
    row = tuned("matmul", dtype_name(a), BLOCK_M=M, BLOCK_N=N, BLOCK_K=K)
    block_m, block_n, block_k = row["BLOCK_M"], row["BLOCK_N"], row["BLOCK_K"]
    out_desc, res_desc, pre_desc, gelu_desc = (_describe(t, block_m, block_n // 2) for t in (out, res, pre, gelu_out))
    a_desc = _describe(a, block_m, block_k)
    w_desc = _describe(w, block_n, block_k) if w_is_nk else _describe(w, block_k, block_n)
    programs = min(num_sms(), triton.cdiv(M, block_m) * triton.cdiv(N, block_n))
    _matmul_kernel[(programs,)](
        out_desc, a_desc, w_desc, b, res_desc, pre_desc, gelu_desc, part, M, N, K,
        W_IS_NK=w_is_nk, EPILOGUE=epilogue, **row,
    )  # fmt: skip


@contract("out[R,N] <- inp[R,K] w[N,K] b[N]?")
def matmul(out: Tensor, inp: Tensor, w: Tensor, b: Tensor | None) -> None:
    """out = inp @ w.T + b; out may be fp32 while inp and w are bf16."""
    _launch(out, inp, w, b)


@contract("out[R,N] pre[R,N] <- inp[R,K] w[N,K] b[N]")
def matmul_gelu(out: Tensor, pre: Tensor, inp: Tensor, w: Tensor, b: Tensor) -> None:
    """pre = inp @ w.T + b; out = gelu(pre as it is stored)."""
    _launch(out, inp, w, b, epilogue="gelu", pre=pre)


@contract("out[R,N] <- res[R,N] inp[R,K] w[N,K] b[N]")
def matmul_add(out: Tensor, res: Tensor, inp: Tensor, w: Tensor, b: Tensor) -> None:
    """out = res + (inp @ w.T + b), the residual add."""
    _launch(out, inp, w, b, epilogue="add", res=res)


@contract("dinp[R,K] <- dout[R,N] w[N,K]")
def matmul_dx(dinp: Tensor, dout: Tensor, w: Tensor) -> None:
    """dinp = dout @ w."""
    _launch(dinp, dout, w, w_is_nk=False)


@contract("dpre[R,K] dbias[K]+ gelu_out[R,K]? scratch[*] <- dout[R,N] w[N,K] pre[R,K]")
def matmul_dx_dgelu(
    dpre: Tensor, dbias: Tensor, gelu_out: Tensor | None, scratch: Tensor,
    dout: Tensor, w: Tensor, pre: Tensor, acc: bool,
) -> None:  # fmt: skip
    """dpre = (dout @ w) * gelu'(pre); dbias (+)= its sums before rounding; gelu_out = gelu(pre), bit for bit."""
    _launch(dpre, dout, w, epilogue="dgelu", w_is_nk=False, pre=pre, gelu_out=gelu_out, part=scratch)
    R = dout.shape[0]
    column_sums(dbias, scratch, triton.cdiv(R, tuned("matmul", dtype_name(dout), BLOCK_M=R)["BLOCK_M"]), acc)


def matmul_dx_dgelu_scratch(R: int, K: int, dtype: str) -> int:
    """fp32 elements: one row of column sums per row of tiles."""
    return K * triton.cdiv(R, tuned("matmul", dtype, BLOCK_M=R)["BLOCK_M"])


def _dw_row(N: int, K: int, R: int, dtype: str) -> dict[str, int]:
    return tuned("matmul_dw", dtype, BLOCK_M=N, BLOCK_N=K, BLOCK_K=R)


def _splits(N: int, K: int, R: int, row: dict[str, int]) -> tuple[int, int]:
    """How many splits of how many steps take the least time on a GPU that runs WAVE tiles at once; the unit is a step.

    A 128x256x64 step takes an H200 0.75 us at 700 TFLOP/s.  By that measure a tile's start and end are taken for 3
    steps, and its partial sums, which are written, read and added while nothing is multiplied, for 1/4 of one.  WAVE is
    a number of the table and not of the GPU at hand: the same sizes are summed in the same order everywhere.
    """
    tiles = triton.cdiv(N, row["BLOCK_M"]) * triton.cdiv(K, row["BLOCK_N"])
    steps = triton.cdiv(R, row["BLOCK_K"])

    def cost(splits: int) -> float:
        waves = triton.cdiv(tiles * splits, row["WAVE"])
        return waves * (triton.cdiv(steps, splits) + 3) + (tiles * splits / 4 if splits > 1 else 0)

    steps_per_split = triton.cdiv(steps, min(range(1, 17), key=cost))
    return triton.cdiv(steps, steps_per_split), steps_per_split


@contract("dw[N,K]+ scratch[*] <- dout[R,N] inp[R,K]")
def matmul_dw(dw: Tensor, scratch: Tensor, dout: Tensor, inp: Tensor, acc: bool) -> None:
    """dw (+)= dout.T @ inp, in fp32."""
    (N, K), R = dw.shape, dout.shape[0]
    row = _dw_row(N, K, R, dtype_name(dout))
    splits, steps = _splits(N, K, R, row)
    partial = scratch if splits > 1 else dw
    assert partial.numel() >= splits * N * K, f"matmul_dw: scratch holds {partial.numel()}, needs {splits * N * K}"
    if is_hopper() and dtype_name(dout) == "bf16":
        hopper_dw.matmul_dw(partial, dout, inp, splits, steps, acc and splits == 1)
    else:
        _launch_dw(partial, dout, inp, splits, steps, acc and splits == 1, row)
    if splits > 1:
        column_sums(dw, scratch, splits, acc)


def _launch_dw(
    partial: Tensor, dout: Tensor, inp: Tensor, splits: int, steps: int, acc: bool, row: dict[str, int]
) -> None:
    N, K = dout.shape[1], inp.shape[1]
    row = {name: value for name, value in row.items() if name != "WAVE"}
    block_m, block_n, block_k = row["BLOCK_M"], row["BLOCK_N"], row["BLOCK_K"]
    # three dimensions, so that a tile that hangs over the last row of one split is clipped there
    out_desc = TensorDescriptor(partial, [splits, N, K], [N * K, K, 1], [1, block_m, block_n // 2])
    dout_desc = _describe(dout, block_k, block_m)
    inp_desc = _describe(inp, block_k, block_n)
    items = triton.cdiv(N, block_m) * triton.cdiv(K, block_n) * splits
    _matmul_dw_kernel[(min(num_sms(), items),)](out_desc, dout_desc, inp_desc, N, K, splits, steps, ACC=acc, **row)


def matmul_dw_scratch(N: int, K: int, R: int, dtype: str) -> int:
    """fp32 elements: the partial products, when there is more than one."""
    splits, _ = _splits(N, K, R, _dw_row(N, K, R, dtype))
    return splits * N * K if splits > 1 else 0
