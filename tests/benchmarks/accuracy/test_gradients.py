"""benchmarks/accuracy/gradients.py: its measures; tests/gpu compares fp8's gradients."""

import math

import torch

from benchmarks.accuracy import gradients


def test_kinds_of_tensors_have_q_k_and_v_apart():
    want = {"qkvw[0]": torch.arange(1.0, 7.0).view(6, 1), "wte": torch.ones(2)}
    found = {"qkvw[0]": want["qkvw[0]"].clone(), "wte": torch.tensor([1.0, -1.0])}
    found["qkvw[0]"][2:4] *= 2  # k
    kinds = gradients.by_kind(found, want)
    along = {name: kind.along for name, kind in kinds.items()}
    kind_all = kinds["all"]
    del along["all"]
    assert along == {"qw": (1.0, 1.0), "kw": (2.0, 2.0), "vw": (1.0, 1.0), "wte": (0.0, 0.0)}
    g, e = (torch.cat([tensors[name].flatten() for name in want]) for tensors in (found, want))
    assert math.isclose(kind_all.error, (g - e).norm() / e.norm(), rel_tol=1e-6)
    assert math.isclose(kind_all.cosine, torch.dot(g, e) / (g.norm() * e.norm()), rel_tol=1e-6)
