"""Row sums of layernorm's backward kernel: their order on Hopper is the same
whichever outputs are in fp8.

    python -m tests.kernels.test_layernorm_layouts

compiles the kernel for an H200, without one, and prints for each variant the layouts
of the tensors that it sums.
"""

import ast
import re

import pytest

from gpt2_triton.kernels.table_file import TABLES, read_table
from tests.support.elsewhere import compiled_elsewhere

WIDTHS = {768: "layernorm_bwd", 1600: "layernorm_bwd_wide"}
# the types of `ln`, which deeper recompute levels write, and of the gradient's fp8
# rows; elements of 65536 dropped
FORMS = [("", ""), ("*bf16", ""), ("*fp8e4nv", ""), ("*fp8e4nv", "*fp8e4nv")]
VARIANTS = [(C, *types, dropped) for C in WIDTHS for types in FORMS for dropped in (0, 6554)]


class Laid(Exception):
    """The code of a kernel whose tensors have layouts."""


def end_at_layouts() -> None:
    """Let Triton compile no further, which takes three quarters of the time, and take no code of
    its cache.
    """
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    def stages_to_layouts(self, stages, *arguments):
        add_stages(self, stages, *arguments)
        stages["llir"] = end

    def end(module, metadata):
        raise Laid(str(module))

    add_stages = CUDABackend.add_stages
    CUDABackend.add_stages = stages_to_layouts
    knobs.compilation.always_compile = True


def summed_layouts(C: int, ln: str, dx8: str, dropped: int) -> list[str]:
    """Return the layouts of the matrices that the kernel sums; ln and dx8 are types,
    "" for outputs not written.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from gpt2_triton.kernels import layernorm
    from gpt2_triton.kernels.tuning import next_power_of_2

    row = dict(read_table(TABLES / "h200.json").rows[WIDTHS[C], "bf16"])
    row.pop("PER_SM")
    options = dict(num_warps=row.pop("num_warps"))
    types = dict.fromkeys(("dx_ptr", "more_ptr", "dout_ptr", "x_ptr", "w_ptr", "b_ptr"), "*bf16")
    types |= dict.fromkeys(("part_ptr", "mean_ptr", "rstd_ptr"), "*fp32") | dict.fromkeys(
        ("R", "C"), "i32"
    )
    types |= dict(ln_ptr=ln) if ln else {}
    types |= dict(ln_scale_ptr="*fp32") if "fp8" in ln else {}
    types |= dict(dx8_ptr=dx8, dx_scale_ptr="*fp32", dx_amax_ptr="*i32") if dx8 else {}
    types |= dict(step_key_ptr="*i32", i="i32") if dropped else {}
    types |= dict(dbranch_ptr="*bf16") if dropped and not dx8 else {}
    constants = row | dict(DROPPED=dropped, BLOCK_C=next_power_of_2(C))
    kernel = layernorm._layernorm_bwd_kernel
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in types}
    source = ASTSource(
        kernel,
        signature,
        {name: constants.get(name) for name in names if name not in types},
        aligned,
    )
    try:
        triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    except Laid as laid:
        ir = str(laid)
    layouts = dict(re.findall(r"^(#\w+) = (#ttg.*)$", ir, re.MULTILINE))
    summed = re.findall(r"\}\) : \(tensor<\d+x\d+xf32, (#\w+)>\) -> tensor", ir)
    return [layouts[name] for name in summed]


@pytest.mark.slow
def test_row_sums_have_the_same_order_whichever_outputs_are_written():
    """Else recompute levels would differ in their last bits.  Outputs are e4m3 too, and
    gradients masked by dropout.
    """
    printed = compiled_elsewhere("-m", "tests.kernels.test_layernorm_layouts")
    found = [ast.literal_eval(line) for line in printed.splitlines()]
    assert len(found) == len(VARIANTS)
    for width in WIDTHS:
        first, *others = (layouts for (C, *_), layouts in found if width == C)
        assert len(first) >= 5  # two means of a row, three sums of columns
        assert all(layouts[: len(first)] == first for layouts in others)


if __name__ == "__main__":
    end_at_layouts()
    for variant in VARIANTS:
        print((variant, summed_layouts(*variant)))
