"""Every compute operation of training as a Triton kernel.  The schedules in
model/ call this package K.
"""

# ruff: noqa: E402, F401, the imports are the package's attributes
import os
from collections.abc import Sequence

# a * b + c rounds once; the default of Triton before 3.10
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from gpt2_triton.kernels import step_io
from gpt2_triton.kernels.adamw import adamw
from gpt2_triton.kernels.add_partials import add_partials
from gpt2_triton.kernels.attention import attention_bwd, attention_bwd_scratch, attention_fwd
from gpt2_triton.kernels.classifier import (
    classifier_dx,
    classifier_fwd,
    classifier_fwd_scratch,
    classifier_loss,
    classifier_target,
)
from gpt2_triton.kernels.decode import cache_fill, decode_attention, decode_embed, decode_matmul
from gpt2_triton.kernels.dropout import dropout
from gpt2_triton.kernels.e4m3 import AMAX_CELLS
from gpt2_triton.kernels.embedding import embedding_bwd, embedding_bwd_scratch, embedding_fwd
from gpt2_triton.kernels.fp8 import Fp8, cast_operand, cast_weights, check_amax, roll_scales
from gpt2_triton.kernels.layernorm import (
    layernorm_bwd,
    layernorm_bwd_scratch,
    layernorm_fwd,
)
from gpt2_triton.kernels.llama_products import matmul_rope, matmul_swiglu
from gpt2_triton.kernels.matmul import (
    matmul,
    matmul_act,
    matmul_add,
    matmul_dw,
    matmul_dw_pair,
    matmul_dw_scratch,
    matmul_dx,
    matmul_dx_dact,
    matmul_dx_dact_scratch,
)
from gpt2_triton.kernels.muon import (
    muon_apply,
    muon_gram,
    muon_momentum,
    muon_normalise,
    muon_normalise_scratch,
    muon_poly,
    muon_update,
)
from gpt2_triton.kernels.outlier import skip_outliers
from gpt2_triton.kernels.philox import fill, normal_init
from gpt2_triton.kernels.precompile import compiling
from gpt2_triton.kernels.reduce import (
    clip_factor,
    loss_sum,
    sum_squares,
    sum_squares_scratch,
)
from gpt2_triton.kernels.sampling import sample_token
from gpt2_triton.kernels.swiglu import swiglu, swiglu_bwd
from gpt2_triton.kernels.tensor_stats import (
    fp8_stats,
    muon_stats,
    parameter_stats,
    stats_parts,
    tensor_stats,
)


def scratch_elements(
    d: dict[str, int], dtype: str, matrices: Sequence[tuple[int, int, int]] = ()
) -> int:
    """Return the most fp32 elements of scratch that a launch needs; `matrices`:
    (rows, columns, count) in Muon.
    """
    R = d["R"]
    C = d["C"]
    Rc = d["Rc"]
    Vp = d["Vp"]
    products = "fp8" if d.get("Q") else dtype
    head = "fp8" if d.get("fp8_head") else dtype
    qkv = (d["D"], C)
    attproj = (C, d["Cq"])
    fc = (d["G"], C)
    fcproj = (C, d["F"])
    # singly if not on Hopper
    layer = [(qkv,), (attproj,), (fc,), (fcproj,), (fcproj, fc), (attproj, qkv)]
    return max(
        layernorm_bwd_scratch(R, C, dtype),
        matmul_dx_dact_scratch(R, d["F"], dtype),
        attention_bwd_scratch(d["B"], d["T"], d["Cq"], d["HS"], dtype, d.get("Qn", 0) > 0),
        classifier_fwd_scratch(Rc, Vp, head),
        embedding_bwd_scratch(d["slots"], C),
        sum_squares_scratch(d["N"]),
        *(muon_normalise_scratch(count, rows, columns) for rows, columns, count in matrices),
        *(matmul_dw_scratch(rows, head, (Vp, C)) for rows in (Rc, R % Rc or Rc)),
        *(matmul_dw_scratch(R, products, *sizes) for sizes in layer),
    )
