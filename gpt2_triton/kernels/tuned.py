"""Launch parameters as data: operation -> blocks, warps, stages.  Nothing is tuned at run time.

`GPU` holds one row per (operation, storage dtype).  `INTERPRETER` holds upper bounds only: there a program costs a
millisecond and a block nothing, so each block covers its whole dimension up to the bound.
"""

import functools
import os

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"

GPU: dict[tuple[str, str], dict[str, int]] = {
    ("matmul", "bf16"): dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3),
    ("matmul", "fp32"): dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=16, GROUP_M=8, num_warps=8, num_stages=3),
    ("matmul_dw", "bf16"): dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, WAVE=132, num_warps=8, num_stages=3),
    ("matmul_dw", "fp32"): dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=16, GROUP_M=8, WAVE=132, num_warps=8, num_stages=3),
    ("classifier_fwd", "bf16"): dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3),
    ("classifier_fwd", "fp32"): dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=16, GROUP_M=8, num_warps=8, num_stages=3),
    ("classifier_dx", "bf16"): dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=3),
    ("classifier_dx", "fp32"): dict(BLOCK_M=128, BLOCK_N=64, BLOCK_K=16, GROUP_M=8, num_warps=8, num_stages=3),
    ("classifier_rows", "bf16"): dict(BLOCK_R=8, BLOCK_C=256, num_warps=4),
    ("classifier_rows", "fp32"): dict(BLOCK_R=8, BLOCK_C=256, num_warps=4),
    ("encoder_fwd", "bf16"): dict(BLOCK_R=8, BLOCK_C=256, num_warps=4),
    ("encoder_fwd", "fp32"): dict(BLOCK_R=8, BLOCK_C=256, num_warps=4),
    # one warp whose lanes hold 16 bytes of a row each, so that sums over entries stay inside a lane
    ("encoder_bwd_segments", "bf16"): dict(BLOCK_S=1, BLOCK_E=8, BLOCK_C=256, num_warps=1),
    ("encoder_bwd_segments", "fp32"): dict(BLOCK_S=1, BLOCK_E=8, BLOCK_C=128, num_warps=1),
    ("encoder_bwd_hot", "bf16"): dict(BLOCK_E=8, BLOCK_C=128, num_warps=1),
    ("encoder_bwd_hot", "fp32"): dict(BLOCK_E=8, BLOCK_C=128, num_warps=1),
    ("encoder_bwd_wpe", "bf16"): dict(BLOCK=1024, num_warps=4),
    ("encoder_bwd_wpe", "fp32"): dict(BLOCK=512, num_warps=4),
    # maxnreg 128 lets four programs share a multiprocessor; dq spills nothing by it, dk and dv 4 bytes
    ("attention_fwd", "bf16"): dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3),
    ("attention_fwd", "fp32"): dict(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=2),
    ("attention_bwd_dkdv", "bf16"): dict(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2, maxnreg=128),
    ("attention_bwd_dkdv", "fp32"): dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=2),
    ("attention_bwd_dq", "bf16"): dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2, maxnreg=128),
    ("attention_bwd_dq", "fp32"): dict(BLOCK_M=32, BLOCK_N=16, num_warps=4, num_stages=2),
    # heads wider than 64, which run in 128 columns: with the blocks above dk and dv, and all of fp32, spill
    ("attention_fwd_wide", "bf16"): dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=3),
    ("attention_fwd_wide", "fp32"): dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=2),
    ("attention_bwd_dkdv_wide", "bf16"): dict(BLOCK_M=32, BLOCK_N=64, num_warps=4, num_stages=2),
    ("attention_bwd_dkdv_wide", "fp32"): dict(BLOCK_M=32, BLOCK_N=32, num_warps=8, num_stages=2),
    ("attention_bwd_dq_wide", "bf16"): dict(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2),
    ("attention_bwd_dq_wide", "fp32"): dict(BLOCK_M=16, BLOCK_N=16, num_warps=8, num_stages=2),
    ("layernorm_fwd", "bf16"): dict(ROWS=2, num_warps=2),
    ("layernorm_fwd", "fp32"): dict(ROWS=2, num_warps=4),
    ("layernorm_bwd", "bf16"): dict(ROWS=2, STAGES=3, PROGRAMS=528, num_warps=2),
    ("layernorm_bwd", "fp32"): dict(ROWS=1, STAGES=3, PROGRAMS=528, num_warps=4),
    ("layernorm_bwd_wide", "bf16"): dict(ROWS=2, STAGES=3, PROGRAMS=528, num_warps=4),
    ("layernorm_bwd_wide", "fp32"): dict(ROWS=1, STAGES=3, PROGRAMS=528, num_warps=8),
    ("adamw", "bf16"): dict(BLOCK=1024, num_warps=4),
    ("adamw", "fp32"): dict(BLOCK=1024, num_warps=4),
    # up to 16 sequences; more of them (BLOCK_S bounds registers: two programs share a multiprocessor)
    ("decode_matmul", "bf16"): dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=256, BLOCK_S=512, STAGES=4, num_warps=8),
    ("decode_matmul", "fp32"): dict(BLOCK_M=16, BLOCK_N=16, BLOCK_K=32, BLOCK_S=512, STAGES=3, num_warps=8),
    ("decode_matmul_wide", "bf16"): dict(BLOCK_M=32, BLOCK_N=16, BLOCK_K=128, BLOCK_S=256, STAGES=4, num_warps=8),
    ("decode_matmul_wide", "fp32"): dict(BLOCK_M=32, BLOCK_N=16, BLOCK_K=32, BLOCK_S=256, STAGES=3, num_warps=8),
    ("decode_attention", "bf16"): dict(BLOCK_T=128, STAGES=2, num_warps=8),
    ("decode_attention", "fp32"): dict(BLOCK_T=64, STAGES=2, num_warps=8),
    ("cache_fill", "bf16"): dict(BLOCK=2048, num_warps=4),
    ("cache_fill", "fp32"): dict(BLOCK=1024, num_warps=4),
    ("draw", "fp32"): dict(BLOCK=8192, num_warps=16),
}

# What changes on a GPU whose programs have less shared memory than Hopper's 227 KB: A100 163, RTX 4090 and 5090 99.
# Never a block that sizes a scratch (BLOCK_M of matmul and attention_bwd_dq, BLOCK_N of classifier_fwd and
# attention_bwd_dkdv, any of matmul_dw and of the layernorm backward): memory is planned before the GPU is known.
SMALL_GPU: dict[tuple[str, str], dict[str, int]] = {
    ("matmul", "bf16"): dict(BLOCK_N=128, BLOCK_K=32),
    ("matmul_dw", "bf16"): dict(num_stages=2),
    ("classifier_fwd", "bf16"): dict(BLOCK_M=64, BLOCK_K=32, num_stages=2),
    ("classifier_dx", "bf16"): dict(BLOCK_N=128, BLOCK_K=32),
    # without wgmma all operands of a product pass through registers: smaller blocks or more warps, and no cap (255)
    ("attention_fwd", "bf16"): dict(BLOCK_N=32),
    ("attention_fwd_wide", "bf16"): dict(BLOCK_N=32, num_warps=8),
    ("attention_bwd_dq", "bf16"): dict(BLOCK_N=32, maxnreg=255),
    ("attention_bwd_dq_wide", "bf16"): dict(BLOCK_N=32, num_warps=8),
    ("attention_bwd_dkdv", "bf16"): dict(maxnreg=255),
    ("attention_bwd_dkdv_wide", "bf16"): dict(num_warps=8),
    ("attention_bwd_dkdv_wide", "fp32"): dict(BLOCK_M=16, num_stages=1),
}

INTERPRETER: dict[str, dict[str, int]] = {
    "matmul": dict(BLOCK_M=1024, BLOCK_N=1024, BLOCK_K=512, GROUP_M=8),
    "matmul_dw": dict(BLOCK_M=1024, BLOCK_N=1024, BLOCK_K=1024, GROUP_M=8, WAVE=2),
    "classifier_fwd": dict(BLOCK_M=1024, BLOCK_N=1024, BLOCK_K=512, GROUP_M=8),
    "classifier_dx": dict(BLOCK_M=1024, BLOCK_N=1024, BLOCK_K=512, GROUP_M=8),
    "classifier_rows": dict(BLOCK_R=1024, BLOCK_C=1024),
    "encoder_fwd": dict(BLOCK_R=1024, BLOCK_C=1024),
    "encoder_bwd_segments": dict(BLOCK_S=64, BLOCK_E=16, BLOCK_C=1024),
    "encoder_bwd_hot": dict(BLOCK_E=128, BLOCK_C=1024),
    "encoder_bwd_wpe": dict(BLOCK=1 << 18),
    "attention_fwd": dict(BLOCK_M=256, BLOCK_N=256),
    "attention_fwd_wide": dict(BLOCK_M=256, BLOCK_N=256),
    "attention_bwd_dkdv": dict(BLOCK_M=256, BLOCK_N=256),
    "attention_bwd_dkdv_wide": dict(BLOCK_M=256, BLOCK_N=256),
    "attention_bwd_dq": dict(BLOCK_M=256, BLOCK_N=256),
    "attention_bwd_dq_wide": dict(BLOCK_M=256, BLOCK_N=256),
    "layernorm_fwd": dict(ROWS=512),
    "layernorm_bwd": dict(ROWS=512, STAGES=1, PROGRAMS=2),
    "layernorm_bwd_wide": dict(ROWS=512, STAGES=1, PROGRAMS=2),
    "adamw": dict(BLOCK=1 << 18),
    "decode_matmul": dict(BLOCK_M=16, BLOCK_N=1024, BLOCK_K=1024, BLOCK_S=1024, STAGES=1),
    "decode_matmul_wide": dict(BLOCK_M=32, BLOCK_N=1024, BLOCK_K=1024, BLOCK_S=1024, STAGES=1),
    "decode_attention": dict(BLOCK_T=64, STAGES=1),
    "cache_fill": dict(BLOCK=1 << 18),
    "draw": dict(BLOCK=1 << 14),
}


@functools.cache
def num_sms() -> int:
    """Programs of a persistent kernel: one per multiprocessor of this GPU; two in the interpreter."""
    return 2 if INTERPRET else torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


@functools.cache
def is_hopper() -> bool:
    """Is this machine's GPU one that hopper.py's kernels are for (sm_90: H100, H200)?"""
    return not INTERPRET and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


@functools.cache
def small_gpu() -> bool:
    """Does this machine's GPU need the SMALL_GPU rows?  Without a GPU, plans are made for Hopper."""
    properties = torch.cuda.is_available() and torch.cuda.get_device_properties(torch.cuda.current_device())
    return bool(properties) and properties.shared_memory_per_block_optin < 227 << 10


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tuned(op: str, dtype: str, **sizes: int) -> dict[str, int]:
    """Launch parameters of `op` for storage dtype "bf16" or "fp32".

    `sizes` gives the dimension that each block runs along, as in `tuned("matmul", "bf16", BLOCK_M=R, BLOCK_N=N)`;
    only the interpreter uses them, to make a block cover its dimension (a power of two, at least 16).
    """
    if not INTERPRET:
        return GPU[op, dtype] | (SMALL_GPU.get((op, dtype), {}) if small_gpu() else {})
    row = dict(INTERPRETER[op])
    for block, size in sizes.items():
        row[block] = min(row[block], max(16, next_power_of_2(size)))
    return row


def dtype_name(tensor) -> str:
    """ "bf16" or "fp32", the storage dtype of a tensor, as the tables spell it."""
    return {2: "bf16", 4: "fp32"}[tensor.element_size()]
