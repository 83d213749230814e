"""Launch parameters as data: operation and dtype -> blocks, warps, stages.
Nothing is tuned at run time.

The rows are in the table in use (table_file.py).  PER_SM of a row is the number of programs that
share a multiprocessor, where each program has partial sums in scratch.  Memory is planned before
the GPU is known, for PLANNED_SMS multiprocessors.  On a GPU with more, a launcher takes as many
programs as its scratch has room for.
"""

import functools

import torch
import triton

from gpt2_triton.device import architecture
from gpt2_triton.kernels.table_file import INTERPRET as INTERPRET
from gpt2_triton.kernels.table_file import Row
from gpt2_triton.kernels.table_file import table as table

PLANNED_SMS = 2 if INTERPRET else 132  # of H100 and H200


@functools.cache
def num_sms() -> int:
    """Return the number of programs of a persistent kernel: one per
    multiprocessor; two in the interpreter.
    """
    return (
        2
        if INTERPRET
        else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    )


def programs(tiles: int) -> int:
    """Return the number of programs of a kernel of so many tiles: one on each
    multiprocessor, or a tile (`walk`).
    """
    return min(num_sms(), tiles) if has_tma() else tiles


@functools.cache
def has_tma() -> bool:
    """Return whether Triton compiles descriptors to TMA; the interpreter has descriptors too."""
    if INTERPRET:
        return True
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 90


@functools.cache
def is_hopper() -> bool:
    """Return True on the GPUs that kernels/hopper is for (sm_90: H100, H200)."""
    return not INTERPRET and torch.cuda.is_available() and architecture() == "9.0"


def next_power_of_2(n: int) -> int:
    """Return the least power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def flat_block(n: int, on_gpu: int) -> int:
    """Return the size of the blocks that cut n elements, a power of two; the
    interpreter takes large ones.
    """
    return min(next_power_of_2(max(n, 4)), 1 << 18) if INTERPRET else on_gpu


def tuned(op: str, dtype: str, **sizes: int) -> Row:
    """Return a new dict of the launch parameters of `op` for storage dtype "bf16", "fp32" or "fp8".

    fp8 takes bf16's row with BLOCK_K doubled, so that a block has as many bytes.  `sizes` gives the
    dimension that each block runs along, as in `tuned("matmul", "bf16", BLOCK_M=R, BLOCK_N=N)`.
    Only the interpreter uses `sizes`: a block covers its dimension (a power of two, at least 16).
    """
    row = dict(table().rows[op, "bf16" if dtype == "fp8" else dtype])
    if dtype == "fp8":
        row["BLOCK_K"] *= 2
    if INTERPRET:
        for block, size in sizes.items():
            row[block] = min(row[block], max(16, next_power_of_2(size)))
    return row


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a tensor's storage dtype as the tables spell it, "bf16", "fp32" or "fp8"."""
    return {1: "fp8", 2: "bf16", 4: "fp32"}[tensor.element_size()]
