"""The rows that `tune` tries: the values of each operation's parameters, and
which combinations are valid.

Rows for heads wider than 64 and for fp32 are not tried, because no step
of the four sizes uses them.
"""

import itertools
import math
from collections.abc import Callable

from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.table_file import Row

_TILES = dict(num_warps=(4, 8), num_stages=(2, 3, 4, 5))
_BACKWARD = dict(num_warps=(4, 8), num_stages=(2, 3), maxnreg=(128, 168, 255))  # 255 sets no limit
_ROWS = dict(BLOCK_R=(2, 4, 8, 16), BLOCK_C=(128, 256, 512), num_warps=(1, 2, 4, 8))

SPACE: dict[str, dict[str, tuple[int, ...]]] = {
    "matmul": dict(BLOCK_N=(64, 128, 256), BLOCK_K=(32, 64)) | _TILES,
    "matmul_dw": dict(BLOCK_N=(128, 256), BLOCK_K=(32, 64), PER_SM=(1, 2)) | _TILES,
    "classifier_fwd": dict(BLOCK_M=(64, 128), BLOCK_N=(128, 256), BLOCK_K=(32, 64)) | _TILES,
    "classifier_dx": dict(BLOCK_M=(64, 128), BLOCK_N=(128, 256), BLOCK_K=(32, 64, 128)) | _TILES,
    "classifier_rows": _ROWS,
    "embedding_fwd": _ROWS,
    "embedding_bwd_segments": dict(
        BLOCK_E=(4, 8, 16, 32), BLOCK_C=(128, 256, 512), num_warps=(1, 2, 4)
    ),
    "embedding_bwd_split": dict(
        BLOCK_E=(4, 8, 16, 32), BLOCK_C=(64, 128, 256), num_warps=(1, 2, 4)
    ),
    "embedding_bwd_wpe": dict(BLOCK=(256, 512, 1024, 2048), num_warps=(1, 2, 4, 8)),
    "attention_fwd": dict(BLOCK_M=(64, 128), BLOCK_N=(32, 64, 128)) | _TILES,
    "attention_bwd_dkdv": dict(BLOCK_M=(16, 32, 64), BLOCK_N=(64, 128)) | _BACKWARD,
    "attention_bwd_dq": dict(BLOCK_M=(64, 128), BLOCK_N=(32, 64)) | _BACKWARD,
    "layernorm_fwd": dict(ROWS=(1, 2, 4, 8), num_warps=(1, 2, 4, 8)),
    "layernorm_bwd": dict(ROWS=(1, 2, 4), STAGES=(2, 3, 4), PER_SM=(2, 3, 4), num_warps=(2, 4, 8)),
    "layernorm_bwd_wide": dict(
        ROWS=(1, 2), STAGES=(2, 3, 4), PER_SM=(2, 3, 4), num_warps=(4, 8, 16)
    ),
    "adamw": dict(BLOCK=(512, 1024, 2048, 4096), num_warps=(2, 4, 8, 16)),
}


def _tile_fits(row: Row, shared: int) -> bool:
    """Return whether a thread has 16 to 128 accumulators in its 255 registers, and shared memory
    holds all stages: one for each but the last, and with TMA for the last, too.
    """
    accumulators = row["BLOCK_M"] * row["BLOCK_N"] // (32 * row["num_warps"])
    buffers = row["num_stages"] if tuning.has_tma() else row["num_stages"] - 1
    operands = 2 * (row["BLOCK_M"] + row["BLOCK_N"]) * row["BLOCK_K"] * buffers
    return 16 <= accumulators <= 128 and operands <= shared


def _few_a_thread(*blocks: str) -> Callable[[Row, int], bool]:
    """Return a check for 4 to 32 elements per thread: loads of at least 8 bytes, and
    registers for all elements.
    """

    def fits(row: Row, shared: int) -> bool:
        return 4 <= math.prod(row[block] for block in blocks) // (32 * row["num_warps"]) <= 32

    return fits


FITS: dict[str, Callable[[Row, int], bool]] = {
    "matmul": _tile_fits,
    "matmul_dw": _tile_fits,
    "classifier_fwd": _tile_fits,
    "classifier_dx": _tile_fits,
    "classifier_rows": _few_a_thread("BLOCK_R", "BLOCK_C"),
    "embedding_fwd": _few_a_thread("BLOCK_R", "BLOCK_C"),
    "embedding_bwd_segments": _few_a_thread("BLOCK_E", "BLOCK_C"),
    "embedding_bwd_split": _few_a_thread("BLOCK_E", "BLOCK_C"),
    "embedding_bwd_wpe": _few_a_thread("BLOCK"),
    # a block of queries is whole blocks of keys
    "attention_fwd": lambda row, shared: row["BLOCK_N"] <= row["BLOCK_M"],
    "attention_bwd_dq": lambda row, shared: row["BLOCK_N"] <= row["BLOCK_M"],
    # and the other way round
    "attention_bwd_dkdv": lambda row, shared: row["BLOCK_M"] <= row["BLOCK_N"],
    "adamw": _few_a_thread("BLOCK"),
}


def candidates(op: str, current: Row, shared: int, caps: bool = True) -> list[Row]:
    """Return `current`, then each other row of the space that fits `shared` bytes
    of shared memory per program.

    `caps` is False on AMD, where Triton takes no maxnreg.
    """
    space = {name: values for name, values in SPACE[op].items() if caps or name != "maxnreg"}
    rows = [current | dict(zip(space, values)) for values in itertools.product(*space.values())]
    fits = FITS.get(op, lambda row, shared: True)
    return [current, *(row for row in rows if row != current and fits(row, shared))]
