"""tests/gpu/golden_losses.json has every variant of every recorded GPU, without those
in fp8 where it has no fp8.
"""

from tests.gpu.test_golden import ROWS, VARIANTS


def test_losses_of_all_variants_are_recorded():
    rows = {gpu: row.keys() - {"triton"} for gpu, row in ROWS.items()}
    assert rows["NVIDIA H100 80GB HBM3"] == {*VARIANTS}
    assert all(row in ({*VARIANTS}, {"bf16", "fp32"}) for row in rows.values())
