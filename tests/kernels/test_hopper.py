"""The kernels of kernels/hopper/ compile for sm_90 without a GPU, fit its shared
memory and spill no registers.

Their results are tested in test_hopper_simulated.py and test_hopper_attention.py without a GPU, and
on one in the tests of the operations.
"""

import re
import sys

import pytest

from gpt2_triton.kernels.epilogue import RopeArguments
from tests.support.elsewhere import compiled_elsewhere

BF16, F32, I32 = "*bf16", "*fp32", "i32"
SHARED = 228 * 1024  # bytes of a multiprocessor, of which 1 KB of each program is CUDA's
# programs that share one; those of other kernels do not
TOGETHER = {"attention_fwd": 5, "attention_dq": 4, "attention_dkdv": 3}


def cases() -> dict[str, tuple[str, dict[str, object]]]:
    """Return name -> (kernel, argument -> type, (rows, columns) of a descriptor in bf16
    or a third, or constant).
    """
    tile, sizes = (128, 256), dict(M=I32, N=I32, K=I32)
    nothing = dict(b_ptr=None, res_desc=None, pre_desc=None, gelu_ptr=None, part_ptr=None)
    no_rope = RopeArguments(0, None, I32, I32, None, None, I32, F32[1:])
    nothing |= dict(rope=no_rope)
    base = dict(out_ptr=BF16, out_desc=tile, a_desc=(128, 64)) | nothing | sizes
    forward = base | dict(w_desc=(256, 64), b_ptr=BF16, W_T=True, EPILOGUE="")
    backward = base | dict(w_desc=(64, 256), W_T=False, EPILOGUE="")
    dgelu = backward | dict(pre_desc=(32, 64), part_ptr=F32, EPILOGUE="dgelu")
    dw = dict(
        out_ptr=F32,
        out2_ptr=F32,
        part_ptr=F32,
        first2=I32,
        N=I32,
        N2=I32,
        K=I32,
        K2=I32,
        turned=I32,
        add=I32,
    )
    dw |= dict(whole_tiles=I32, split_tiles=I32, items=I32, steps=I32, part_steps=I32)
    a, w = (128, 128, "fp8e4nv"), (256, 128, "fp8e4nv")
    fp8_dw = dw | dict(
        a_desc=a, w_desc=w, a2_desc=a, w2_desc=w, dout_scale_ptr=F32, inp_scale_ptr=F32
    )
    fp8_dw |= dict(dout2_scale_ptr=F32, inp2_scale_ptr=F32)
    dw |= dict(a_desc=(64, 128), w_desc=(64, 256), a2_desc=(64, 128), w2_desc=(64, 256))
    head = dict(
        part_ptr=F32, lnf_desc=(128, 64), wte_desc=(256, 64), zt_ptr=F32, targets_ptr="*i32"
    )
    head |= dict(R=I32, C=I32, V=I32, Vp=I32, lnf_scale_ptr=None, wte_scale_ptr=None)
    head |= dict(columns_desc=None, p_scale_ptr=None, peek_ptr=None)
    head8 = head | dict(lnf_desc=(128, 128, "fp8e4nv"), wte_desc=(256, 128, "fp8e4nv"))
    head8 |= dict(lnf_scale_ptr=F32, wte_scale_ptr=F32)
    p8 = dict(
        p_desc=(128, 256, "fp8e5"), columns_desc=(256, 64, "i16"), p_scale_ptr=F32, peek_ptr=F32
    )
    dx8 = dict(
        dln_desc=(64, 32),
        p_desc=(128, 128, "fp8e5"),
        columns_desc=(256, 128, "fp8e4nv"),
        p_scale_ptr=F32,
    )
    dx8 |= dict(
        wte_scale_ptr=F32,
        rs_ptr=F32,
        ks_ptr=F32,
        targets_ptr="*i32",
        wte_ptr="*fp8e4nv",
        R=I32,
        C=I32,
        Vp=I32,
    )
    lns8 = dict(
        columns_desc=(128, 64, "i16"), lnf_desc=(128, 128), rs_ptr=F32, scale_ptr=F32, R=I32
    )
    wide = dict(out_desc=(128, 64), a_desc=(128, 32), b_ptr=None, res_desc=None) | sizes
    wide |= dict(rs_ptr=None, ks_ptr=None, targets_ptr=None, wte_ptr=None)
    factors = dict(rs_ptr=F32, ks_ptr=F32, targets_ptr="*i32", wte_ptr=BF16)
    wide_forward = wide | dict(w_desc=(256, 32), w_strip_desc=(64, 32), b_ptr=BF16, W_T=True)
    wide_backward = wide | dict(w_desc=(32, 256), w_strip_desc=(32, 64), W_T=False)
    fp8 = (
        dict(
            out_desc=(64, 128),
            a_desc=(128, 128, "fp8e4nv"),
            w_desc=(256, 128, "fp8e4nv"),
            res_desc=None,
        )
        | sizes
    )
    fp8 |= dict(
        b_ptr=BF16,
        a_scale_ptr=F32,
        w_scale_ptr=F32,
    )
    fp8 |= dict(rope=no_rope)
    swiglu = dict(
        rows_desc=(64, 64, "fp8e4nv"), columns_desc=(64, 32, "i16"), scale_ptr=F32, amax_ptr="*i32"
    )
    swiglu |= dict(dout_desc=None, pre_desc=(64, 64), F=I32)
    fp8_gelu = (
        dict(
            a_desc=(128, 64, "fp8e4nv"), w_desc=(256, 64, "fp8e4nv"), rows_desc=(64, 64, "fp8e4nv")
        )
        | sizes
    )
    fp8_gelu |= dict(
        columns_desc=(64, 32, "i16"), slope_desc=(32, 128, "u8"), b_ptr=BF16, part_ptr=None
    )
    fp8_gelu |= dict(a_scale_ptr=F32, w_scale_ptr=F32, scale_ptr=F32, amax_ptr="*i32", DGELU=False)
    block, block8, pairs = (64, 64), (64, 64, "fp8e4nv"), (64, 32, "i16")
    attention = dict(
        dqkv_desc=block,
        columns_desc=None,
        scale_ptr=None,
        amax_ptr=None,
        part_ptr=F32,
        delta_ptr=F32,
    )
    attention |= dict(
        dout_desc=block,
        qkv_desc=block,
        out_ptr=BF16,
        lse_ptr=F32,
        NH=I32,
        T=1024,
        GROUP=1,
        SPAN=1024,
    )
    attention |= dict(out_columns_desc=None, out_scale_ptr=None, rope_ptr=None)
    attention |= dict(norm_ptr=None, rstd_ptr=None)
    attention8 = attention | dict(
        dqkv_desc=block8, columns_desc=pairs, scale_ptr=F32, amax_ptr="*i32"
    )
    attention8 |= dict(out_columns_desc=pairs, out_scale_ptr=F32)
    attention_fwd = attention | dict(out_desc=block, out8_desc=None)
    attention_fwd8 = attention8 | dict(out_desc=block, out8_desc=block8)
    grouped = dict(part_ptr=None, rope_ptr=F32, T=2048, SPAN=2048, GROUP=4)
    normed = dict(rope_ptr=F32, norm_ptr=BF16, rstd_ptr=F32)
    grouped_normed = grouped | normed | dict(part_ptr=F32)
    rotated = forward | dict(b_ptr=None, EPILOGUE="rope")
    rotated8 = fp8 | dict(b_ptr=None)
    rope64 = no_rope._replace(HS=64, table=F32)
    rope128 = no_rope._replace(HS=128, table=F32)
    ropes = {
        "": rope64,
        ", heads of 128": rope128,
        ", normed": rope64._replace(w=BF16, rstd=F32),
        ", normed heads of 128": rope128._replace(w=BF16, rstd=F32),
    }
    transpose = dict(out_desc=(128, 64, "i16"), x_desc=(128, 128, "fp8e4nv"))
    weight = dict(
        rows=(128, 128, "fp8e4nv"), columns=(128, 64, "i16"), x=(128, 128), scale=F32, amax="*i32"
    )
    cast = {
        f"{name}_{i}": form
        for i in range(4)
        for name, form in (weight | dict(across=I32, end=I32)).items()
    }
    return {
        "fp8 matmul": ("_fp8_kernel", fp8),
        "fp8 matmul_add": ("_fp8_kernel", fp8 | dict(res_desc=(64, 128))),
        "fp8 matmul_dx": ("_fp8_kernel", fp8 | dict(b_ptr=None)),
        **{
            f"fp8 matmul_rope{of}": ("_fp8_kernel", rotated8 | dict(rope=rope))
            for of, rope in ropes.items()
        },
        "fp8 swiglu": ("_swiglu_kernel", swiglu),
        "fp8 swiglu, evaluation": ("_swiglu_kernel", swiglu | dict(amax_ptr=None)),
        "fp8 swiglu_bwd": ("_swiglu_kernel", swiglu | dict(dout_desc=(64, 64))),
        "fp8 matmul_gelu": ("_fp8_gelu_kernel", fp8_gelu),
        "fp8 matmul_gelu, evaluation": ("_fp8_gelu_kernel", fp8_gelu | dict(amax_ptr=None)),
        "fp8 matmul_dx_dgelu": (
            "_fp8_gelu_kernel",
            fp8_gelu | dict(b_ptr=None, part_ptr=F32, DGELU=True),
        ),
        "fp8 matmul_dw": ("_fp8_dw_kernel", fp8_dw),
        "attention_fwd": ("_attention_fwd_kernel", attention_fwd),
        "fp8 attention_fwd": ("_attention_fwd_kernel", attention_fwd8),
        "fp8 attention_fwd, evaluation": (
            "_attention_fwd_kernel",
            attention_fwd8 | dict(amax_ptr=None),
        ),
        "attention_fwd, grouped": ("_attention_fwd_kernel", attention_fwd | grouped),
        "attention_dq": ("_attention_dq_kernel", attention),
        "attention_dq, grouped": ("_attention_dq_kernel", attention | grouped),
        "attention_dq, normed": ("_attention_dq_kernel", attention | grouped_normed),
        "fp8 attention_dq, grouped": ("_attention_dq_kernel", attention8 | grouped),
        "fp8 attention_dq, normed": ("_attention_dq_kernel", attention8 | grouped_normed),
        "fp8 attention_dq": ("_attention_dq_kernel", attention8),
        "attention_dkdv": ("_attention_dkdv_kernel", attention),
        "attention_dkdv, longest": ("_attention_dkdv_kernel", attention | dict(T=2048, SPAN=2048)),
        "attention_dkdv, spans": ("_attention_dkdv_kernel", attention | grouped | dict(T=8192)),
        "attention_dkdv, grouped": ("_attention_dkdv_kernel", attention | grouped),
        "fp8 attention_dkdv": ("_attention_dkdv_kernel", attention8),
        "fp8 attention_dkdv, grouped": ("_attention_dkdv_kernel", attention8 | grouped),
        "attention_dkdv, normed": ("_attention_dkdv_kernel", attention | grouped_normed),
        "fp8 attention_dkdv, normed": ("_attention_dkdv_kernel", attention8 | grouped_normed),
        "fp8 attention_dkdv, rows only": (
            "_attention_dkdv_kernel",
            attention8 | dict(columns_desc=None),
        ),
        "fp8 transpose": ("_transpose_kernel", transpose),
        "fp8 cast": ("_cast_weights_kernel", cast),
        "fp8 cast, evaluation": (
            "_cast_weights_kernel",
            cast | {f"amax_{i}": None for i in range(4)},
        ),
        "matmul": ("_matmul_kernel", forward),
        "matmul_add": ("_matmul_kernel", forward | dict(res_desc=tile)),
        **{
            f"matmul_rope{of}": ("_matmul_kernel", rotated | dict(rope=rope))
            for of, rope in ropes.items()
        },
        "matmul, wide": ("_wide_kernel", wide_forward),
        "matmul_add, wide": ("_wide_kernel", wide_forward | dict(res_desc=(128, 64))),
        "matmul_dx, wide": ("_wide_kernel", wide_backward),
        "matmul_gelu": ("_matmul_kernel", forward | dict(pre_desc=tile, EPILOGUE="gelu")),
        "matmul_swiglu": (
            "_matmul_kernel",
            forward | dict(b_ptr=None, w_desc=(128, 64), pre_desc=(128, 128), EPILOGUE="swiglu"),
        ),
        "matmul_dx": ("_matmul_kernel", backward),
        "matmul_dx_dgelu": ("_matmul_kernel", dgelu | dict(gelu_ptr=BF16)),
        "matmul_dw": ("_dw_kernel", dw),
        "classifier_dx, wide": ("_wide_kernel", wide_backward | factors),
        "classifier_fwd": ("_classifier_kernel", head | dict(p_desc=tile)),
        "classifier_fwd, loss only": ("_classifier_kernel", head | dict(p_desc=None)),
        "fp8 classifier_fwd": ("_classifier_kernel", head8 | p8),
        "fp8 classifier_fwd, loss only": ("_classifier_kernel", head8 | dict(p_desc=None)),
        "fp8 classifier_dx": ("_classifier_dx_kernel", dx8),
        "fp8 classifier_lns": ("_classifier_lns_kernel", lns8),
    }


def dispatch(ptx: str) -> str:
    """Count what starts partitions: reads of shared memory at a kernel's own line, those after a
    barrier of all warps, writes, and writes before such a barrier.  races.py relies on it.
    """
    barrier = r"barrier\.sync\s+1;\n"
    parts = re.split(r"^\s*\.loc\s+", ptx, flags=re.MULTILINE)
    own = [part for part in parts if not re.match(r".*(@\[|inlined_at)", part)]
    reads = sum(part.count("ld.shared") for part in own)
    after = re.findall(rf"{barrier}(?:\s+(?:mov|add)\..*\n)*\s+ld\.shared\.[bu]8", ptx)
    write = r"st\.shared(?:\.v\d)?\.b\d+\s+\[global_smem\+\d+\], [{}, \d]+;\n"
    writes = len(re.findall(write, ptx))
    before = len(re.findall(rf"{write}\s+{barrier}", ptx))
    return (
        f"dispatch: {reads} reads, {len(after)} after a barrier; {writes} writes, {before} before"
    )


def compile_for_hopper(kernel_name: str, arguments: dict[str, object]) -> None:
    """Compile a kernel; print ptxas' log, the bytes of shared memory and the barriers."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from gpt2_triton.kernels.hopper import pipeline, transpose
    from tests.support.gluon_simulator import KERNELS

    module = next(module for module in KERNELS if kernel_name in vars(module))
    kernel = vars(module)[kernel_name]
    types = dict(
        bf16=gl.bfloat16, fp8e4nv=gl.float8e4nv, fp8e5=gl.float8e5, i16=gl.int16, u8=gl.uint8
    )
    signature, constants, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if isinstance(value, RopeArguments):
            signature[name] = RopeArguments(
                *(each if isinstance(each, str) else "constexpr" for each in value)
            )
            for j, each in enumerate(value):
                if isinstance(each, str):
                    aligned[i, j] = [["tt.divisibility", 16]]
                else:
                    constants[i, j] = each
        elif isinstance(value, tuple):
            rows, columns, dtype = (*value, "bf16")[:3]
            layout = gl.NVMMASharedLayout.get_default_for([rows, columns], types[dtype])
            signature[name] = f"tensordesc<{dtype}[{rows}, {columns}],{layout!r}>"
        elif name != "EPILOGUE" and isinstance(value, str):
            signature[name] = value
            aligned[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], constants[name] = "constexpr", value
    source = GluonASTSource(kernel, signature, constants, aligned)
    options = vars(module).get(
        "OPTIONS", dict(num_warps=8) if module is transpose else pipeline.OPTIONS
    )
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    print(f"shared memory: {compiled.metadata.shared} bytes")
    ptx = compiled.asm["ptx"]
    places = dict(re.findall(r"add\.s32\s+(%r\d+), %r\d+, (\d+);", ptx))
    made = [
        places.get(register)
        for register in re.findall(r"mbarrier\.init\.shared::cta\.b64 \[(%r\d+)\]", ptx)
    ]
    print(
        f"barriers: {len(made)} made in {len({*made})} places, "
        f"{ptx.count('mbarrier.inval')} invalidated"
    )
    print(dispatch(ptx))


NAMES = [*cases()]
DISPATCH = "dispatch: 1 reads, 1 after a barrier; 2 writes, 2 before"  # what `dispatch` returns
# of a kernel at line 67, with a function at line 88 of another file
PTX = """
    .loc 1 67 0 // matmul.py:67
    st.shared.b32 \t[global_smem+8], 33619968;
    barrier.sync \t1;
    .loc 1 67 0 // matmul.py:67
    barrier.sync \t1;
    add.s32 \t%r3, %r1, %r2;
    ld.shared.b8 \t%r4, [%r3+8];
    .loc 6 88 42 // activation.py:88:42 @[ matmul.py:67 ]
    ld.shared.v4.b32 \t{%r8, %r7, %r6, %r5}, [%r12+98304];
    .loc 1 80 4 // matmul.py:80:4
    st.shared.b32 \t[global_smem+8], 50529027;
    barrier.sync \t1;
"""


def test_a_start_of_partitions_without_a_barrier_is_found():
    assert dispatch(PTX) == DISPATCH
    first, *others = PTX.split("    barrier.sync \t1;\n")
    assert len(others) == 3
    for i in range(3):
        joints = ["" if i == n else "    barrier.sync \t1;\n" for n in range(3)]
        assert dispatch(first + "".join(map(str.__add__, joints, others))) != DISPATCH
    assert dispatch(PTX.replace("88:42 @[ matmul.py:67 ]", "88:42")) != DISPATCH


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("names", [NAMES[i::3] for i in range(3)], ids=", ".join)
def test_kernels_compile_for_sm90_without_spills_and_fit_shared_memory(names):
    """Compiled in another process: in this one the kernels may belong to the interpreter.  One
    process compiles several kernels, as its imports take as long as a kernel.  A kernel without
    partitions invalidates its barriers; one with partitions reads at its own line their number.
    """
    printed = compiled_elsewhere("-m", "tests.kernels.test_hopper", *names)
    logs = re.split(r"^kernel: ", printed, flags=re.MULTILINE)[1:]
    assert [log.splitlines()[0] for log in logs] == names
    for log in logs:
        spills = re.findall(r"(\d+) bytes spill", log)
        assert spills and set(spills) == {"0"}, log
        programs = next((n for kernel, n in TOGETHER.items() if kernel in log), 1)
        assert (
            int(re.findall(r"shared memory: (\d+) bytes", log)[0]) <= SHARED // programs - 1024
        ), log
        [(made, places, ended)] = re.findall(
            r"barriers: (\d+) made in (\d+) places, (\d+) invalidated", log
        )
        without_partitions = ("attention", "transpose", "cast", "classifier_lns", "fp8 swiglu")
        alone = any(word in log.splitlines()[0] for word in without_partitions)
        assert made == places != "0" and ended == (made if alone else "0"), log
        assert alone or DISPATCH in log, log
        assert "C75" not in log and "C76" not in log, log  # C75xx: ptxas serialises wgmma


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(f"kernel: {name}", flush=True)
        compile_for_hopper(*cases()[name])
        sys.stdout.flush()
