"""benchmarks/torch_rounded.py: what is rounded, and the products of each kind of operand."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks import torch_train
from benchmarks.torch_rounded import RoundedLinear, kinds_of, of_layer, rounded


def test_numbers_are_rounded_to_three_bits_at_the_scale_of_the_largest():
    x = torch.tensor([224.0, -1.0625, 1.1875, 0.0], dtype=torch.float32)  # ties, to even
    assert rounded(x).tolist() == [224.0, -1.0, 1.25, 0.0]
    assert rounded(x / 1024).tolist() == [number / 1024 for number in (224.0, -1.0, 1.25, 0.0)]
    assert rounded(x * 1.1)[0] == 240.0  # 246.4 is above 224, so at half the scale: 123.2 between 120 and 128
    assert rounded(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("kinds", ["none", "weights", "qkv.activations", "gradients", "weights,activations,gradients"])
def test_products_read_the_rounded_operands(rng, kinds):
    x, w, b, dy = (rng(*shape, dtype=torch.bfloat16) for shape in ((2, 5, 8), (6, 8), (6,), (2, 5, 6)))
    plain = torch.nn.Linear(8, 6)
    plain.weight.data, plain.bias.data = w.float(), b.float()
    layer, leaf = RoundedLinear(plain, of_layer(kinds_of("--rounding", kinds), "qkv")), x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(dy)
    x8 = rounded(x) if "activations" in kinds else x
    w8 = rounded(w) if "weights" in kinds else w
    g8 = rounded(dy) if "gradients" in kinds else dy
    assert torch.equal(y, F.linear(x8, w8, b)) and torch.equal(leaf.grad, g8 @ w8)
    assert torch.equal(plain.weight.grad, (g8.flatten(0, 1).T @ x8.flatten(0, 1)).float())
    assert torch.equal(plain.bias.grad, dy.flatten(0, 1).sum(0).float())


def test_kinds_of_one_layer_are_not_those_of_another():
    kinds = kinds_of("--rounding", "weights,fc.gradients")
    assert of_layer(kinds, "fc") == ["weights", "gradients"] and of_layer(kinds, "qkv") == ["weights"]


@pytest.mark.parametrize("kinds", ["", "weight", "none,weights", "head.weights"])
def test_unknown_kinds_are_refused(kinds, capsys):
    assert torch_train.main(["--rounding", kinds, "configs/quickstart.yaml", "--run_dir", "run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --rounding: got ") and line.endswith("as in qkv.activations, or none")


def test_help_is_the_description(capsys):
    assert torch_train.main(["--help"]) == 0
    assert "--rounding KINDS" in capsys.readouterr().out
