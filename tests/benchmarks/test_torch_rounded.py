"""benchmarks/torch_rounded.py: what is rounded, and the products of each kind of operand."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import torch_train
from benchmarks.torch_rounded import KINDS, RoundedLinear, rounded


def test_numbers_are_rounded_to_three_bits_at_the_scale_of_the_largest():
    x = torch.tensor([224.0, -1.0625, 1.1875, 0.0], dtype=torch.float32)  # ties, to even
    assert rounded(x).tolist() == [224.0, -1.0, 1.25, 0.0]
    assert rounded(x / 1024).tolist() == [number / 1024 for number in (224.0, -1.0, 1.25, 0.0)]
    assert rounded(x * 1.1)[0] == 256.0 * 15 / 16  # 246.4 is above 224, so at half the scale: 123.2 between 120 and 128
    assert rounded(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kinds", [(), *((kind,) for kind in KINDS), KINDS])
def test_products_read_the_rounded_operands(rng, kinds):
    x, w, b, dy = (rng(*shape, dtype=torch.bfloat16) for shape in ((2, 5, 8), (6, 8), (6,), (2, 5, 6)))
    linear = torch.nn.Linear(8, 6)
    linear.weight.data, linear.bias.data = w.float(), b.float()
    layer, leaf = RoundedLinear(linear, kinds), x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    x8 = rounded(x) if "activations" in kinds else x
    w8 = rounded(w) if "weights" in kinds else w
    g8 = rounded(dy) if "gradients" in kinds else dy
    assert torch.equal(y, F.linear(x8, w8, b)) and torch.equal(leaf.grad, g8 @ w8)
    assert torch.equal(linear.weight.grad, (g8.flatten(0, 1).T @ x8.flatten(0, 1)).float())
    assert torch.equal(linear.bias.grad, dy.flatten(0, 1).sum(0).float())


@pytest.mark.parametrize("kinds", ["", "weight", "none,weights", "noneweights"])
def test_unknown_kinds_are_refused(kinds, capsys):
    assert torch_train.main(["--rounding", kinds, "configs/quickstart.yaml", "--run_dir", "run"]) == 2
    assert "KINDS is a comma-separated list of weights, activations, gradients, or none" in capsys.readouterr().err
