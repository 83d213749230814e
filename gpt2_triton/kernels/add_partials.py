"""out += sum_k parts[k]: the gradients that other ranks have sent, added in the ranks' order."""

import triton
import triton.language as tl
from torch import Tensor

from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.tuning import flat_block


@triton.jit
def _add_partials_kernel(out_ptr, parts_ptr, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(out_ptr + i, mask=mask, other=0.0)
    for _ in tl.static_range(PARTS):
        total += tl.load(parts_ptr + i, mask=mask, other=0.0)
        parts_ptr += n
    tl.store(out_ptr + i, total, mask=mask)


@contract("out[n]+ <- parts[k,n]")
def add_partials(out: Tensor, parts: Tensor) -> None:
    """out += parts[0], then parts[1] ..., in fp32."""
    k, n = parts.shape
    block = flat_block(n, 4096)
    _add_partials_kernel[(triton.cdiv(n, block),)](out, parts, n, PARTS=k, BLOCK=block)
