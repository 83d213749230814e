"""tests/gpu/golden_losses.json has every variant of every recorded GPU, without those in fp8 where it has no fp8."""

from tests.gpu import golden


def test_losses_of_all_variants_are_recorded():
    rows = {gpu: row.keys() - {"triton"} for gpu, row in golden.read().items()}
    assert rows["NVIDIA H200"] == {*golden.VARIANTS}
    assert all(row in ({*golden.VARIANTS}, {*golden.VARIANTS} - golden.KEPT.keys()) for row in rows.values())
