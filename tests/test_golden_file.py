"""tests/gpu/golden_losses.json has every variant of every recorded GPU, but for those that golden.py names."""

from tests.gpu import golden


def test_losses_of_all_variants_are_recorded():
    for gpu, row in golden.read().items():
        assert {*golden.VARIANTS} - row.keys() == golden.NOT_RECORDED.get(gpu, set()), gpu
