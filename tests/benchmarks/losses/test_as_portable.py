"""benchmarks/losses/as_portable.py: the verdict."""

import pytest

from benchmarks.losses import as_portable

BYTES = ["rank_00000.safetensors: params: sha256 1 != 2"]


@pytest.mark.parametrize(("off", "lines", "code"), [(0.019, [], 0), (0.021, [], 1), (0, BYTES, 1)])
def test_code_is_compared_with_the_scatter(off, lines, code):
    portable = [4.0] * 150
    curves = dict(code=[9.0] * 50 + [4.0 - off] * 100, portable=portable, hopper=[4.01] * 150)
    found = dict(code="sm_80 code", curves=curves, bytes=lines)
    found["distance"] = as_portable.distance(curves["code"], portable)
    found["scatter"] = as_portable.distance(portable, curves["hopper"])
    assert as_portable.report(found) == code
