"""The products of Llama's layers; matmul.py has the kernels.

matmul_swiglu    pre  = inp @ w.T,  out = swiglu(pre)
matmul_rope      out  = inp @ w.T, with the heads of q and k rotated (rope.py), and before that
                 normed (qk_norm.py) if the rope has a norm
"""

from torch import Tensor

from gpt2_triton.kernels import hopper
from gpt2_triton.kernels.contract import contract
from gpt2_triton.kernels.epilogue import Epilogue
from gpt2_triton.kernels.fp8 import Fp8, Operand
from gpt2_triton.kernels.matmul import launch, matmul
from gpt2_triton.kernels.swiglu import swiglu
from gpt2_triton.kernels.tuning import dtype_name
from gpt2_triton.operands import Linear, Rope


@contract("out[R,F] pre[R,2*F] <- inp[R,K] layer.w[2*F,K]")
def matmul_swiglu(out: Operand, pre: Tensor, inp: Operand, layer: Linear) -> None:
    """Write pre = inp @ w.T and out = swiglu(pre as stored): in one launch on Hopper in bf16."""
    if not isinstance(inp, Fp8) and hopper.takes("matmul_swiglu", *out.shape, dtype_name(inp)):
        launch(out, inp, layer.w, Epilogue("swiglu", pre=pre))
    else:
        matmul(pre, inp, layer)
        swiglu(out, pre)


@contract(
    "out[R,N] rope.norm.rstd[R,H]? <- inp[R,K] layer.w[N,K] rope.table[Tr,HS] rope.norm.w[2,HS]?"
)
def matmul_rope(out: Tensor, inp: Operand, layer: Linear, rope: Rope) -> None:
    """Write out = inp @ w.T, and norm, if the rope has a norm, and rotate the heads in its first
    columns.
    """
    launch(out, inp, layer.w, Epilogue("rope", rope=rope))
