"""Tuning tables of absent GPUs: their rows compile, fit shared memory, and do not spill registers.

Compiles, for each target, those kernels of a training step in bf16 or fp8 that are nearest to a
limit, and for gfx942 all kernels but some large ones.  `make compile-all` compiles all kernels of
all runs for all targets (compile_targets.py).
"""

import dataclasses
import json
import re
import sys

import pytest

from gpt2_triton.kernels.table_file import TABLES
from tests.kernels.compile_targets import TARGETS, compile_for
from tests.support.elsewhere import compiled_elsewhere

PRODUCT, FP8_PRODUCT = "_matmul_kernel:dact", "_fp8_matmul_kernel:dgelu"
ROTATED = "_matmul_kernel:rope"
ATTENTION = ["_attention_bwd_dkdv_kernel", "_attention_bwd_dq_kernel"]
SMALL = [
    *("_adamw_kernel", "_add_dw_partials_kernel", "_attention_fwd_kernel", "_cache_fill_kernel"),
    *(
        "_classifier_loss_kernel",
        "_classifier_target_kernel",
        "_clip_factor_kernel",
        "_column_sums_kernel",
    ),
    *(
        "_decode_attention_kernel",
        "_decode_embed_kernel",
        "_decode_matvec_kernel",
        "_embedding_bwd_segments_kernel",
    ),
    *(
        "_embedding_bwd_split_kernel",
        "_embedding_bwd_wpe_kernel",
        "_embedding_fwd_kernel",
        "_fill_kernel",
    ),
    *(
        "_layernorm_bwd_kernel",
        "_layernorm_fwd_kernel",
        "_normal_init_kernel",
        "_parameter_stats_kernel",
    ),
    *(
        "_keep_kernel",
        "_best_of_part_kernel",
        "_best_of_parts_kernel",
        "_skip_outliers_kernel",
        "_sum_kernel",
        "_sum_squares_kernel",
        "_tensor_stats_kernel",
    ),
]
NEAREST = {
    "sm_80": ATTENTION,
    "sm_86": [PRODUCT],
    "sm_89": [FP8_PRODUCT],
    "sm_90": ATTENTION,
    "sm_100": [PRODUCT, ROTATED],
    "sm_120": ATTENTION,
    "gfx942": [PRODUCT, *ATTENTION, *SMALL],
    "gfx1100": ATTENTION,
}
RUNS = {"sm_89": ["fp8"], "sm_100": ["bf16", "bf16, llama 8B"]}  # of heads of 128
# bytes: sm_90's have maxnreg 128, so that four programs share a multiprocessor; at
# most 2 registers are allowed.
# Triton 3.6 spills 16 for sm_120 and 132 for gfx1100, where 3.9 spills none
SPILLED = {"sm_90": 8, "sm_120": 16, "gfx1100": 132}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("vendor", ["sm", "gfx"])
def test_kernels_nearest_to_the_limits_keep_them(vendor):
    """Compile in a separate process, because kernels may run in the interpreter in this one."""
    targets = [target for target in NEAREST if target.startswith(vendor)]
    printed = compiled_elsewhere("-m", "tests.kernels.test_tables_compile", *targets)
    compiled = json.loads(printed.splitlines()[-1])
    for target in targets:
        needs, failures = compiled[target]
        assert not failures and needs.keys() == {name.partition(":")[0] for name in NEAREST[target]}
        for name, need in needs.items():
            assert need["variants"] and need["shared"] <= TARGETS[target].shared, (
                target,
                name,
                need,
            )
            assert need["spilled"] <= SPILLED.get(target, 0), (target, name, need)


@pytest.mark.slow
def test_every_portable_kernel_is_compiled():
    """The runs of compile_targets launch them all on gfx950, which has fp8;
    nothing is compiled here.
    """
    program = (
        "from tests.kernels.compile_targets import compile_for; "
        "print(*compile_for('gfx950', ()).launched)"
    )
    printed = compiled_elsewhere("-c", program)
    sources = [path.read_text() for path in TABLES.parent.glob("*.py")]
    kernels = {
        name
        for source in sources
        for name in re.findall(r"^def (_\w+_kernel)\(", source, re.MULTILINE)
    }
    assert len(kernels) > 40 and kernels == set(printed.split())


if __name__ == "__main__":
    compiled = {}
    for target in sys.argv[1:]:
        compiler = compile_for(target, NEAREST[target], RUNS.get(target, ["bf16"]))
        needs = {name: dataclasses.asdict(need) for name, need in compiler.needs.items()}
        compiled[target] = needs, compiler.failures
    print(json.dumps(compiled))
