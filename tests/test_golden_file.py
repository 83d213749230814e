"""tests/gpu/golden_losses.json has every variant on one GPU at least, and of every GPU all of
GPT-2's variants, without those in fp8 where it has no fp8.
"""

from tests.gpu.test_golden import GPT2, ROWS, VARIANTS


def test_losses_of_all_variants_are_recorded():
    rows = {gpu: row.keys() - {"triton"} for gpu, row in ROWS.items()}
    assert {*VARIANTS} in rows.values()
    for variants in rows.values():
        assert variants & {*GPT2} in ({*GPT2}, {"bf16", "fp32"})
        assert variants <= {*VARIANTS}
