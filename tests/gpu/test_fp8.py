"""Tests of fp8 that need a GPU with fp8 products: gradients at GPT-2's width, equal bits, graphs, memory, compiling."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton

import gpt2_triton.kernels
from benchmarks import torch_reference
from gpt2_triton import device
from gpt2_triton.config.values import RECOMPUTE_LEVELS
from gpt2_triton.inference.generate import fill_cache
from gpt2_triton.model.gpt2 import GPT2
from tests.gpu.test_gpu import (
    compare_plan_with_memory,
    exact_gradients,
    gpt2_config,
    jit_functions,
    late_steps,
    launched_kernels,
    our_kernels,
    require_no_allocation,
)
from tests.support.models import calibrate, train_steps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and not device.has_fp8(device.architecture()), reason="needs fp8 products"
    ),
]


def fp8_config(keep: str = "", **shape):
    return gpt2_config(**shape).replace(train={"precision": "fp8"}, fp8={"keep_bf16": keep})


def fp8_model(**shape) -> GPT2:
    model = GPT2(fp8_config(**shape), gpt2_triton.kernels, "cuda")
    model.initialise(seed=1)
    return calibrate(model)


@pytest.mark.parametrize("keep", ["", "head"])
def test_a_step_launches_triton_kernels_and_copies_only(keep):
    kernels = launched_kernels(fp8_model(keep=keep))
    assert kernels <= our_kernels(), kernels - our_kernels()
    assert any("scale" in name for name in kernels)  # the trace saw the step


def test_plan_equals_the_memory_in_use():
    compare_plan_with_memory(fp8_model)


def test_nothing_allocates_after_the_first_step():
    require_no_allocation(fp8_model(accumulation=2))


@pytest.mark.parametrize("keep", ["", "head"])
def test_gradients_point_where_those_of_float64_do(keep):
    """FP8 rounds an operand by 2.7%; a product's gradients have two of them, and those of the layers below."""
    model = fp8_model(keep=keep)
    want, exact = exact_gradients(SimpleNamespace(config=gpt2_config(), state=model.state))
    [(loss, _, _)] = train_steps(model, 1)
    assert abs(loss - want) < 2e-3 * want
    for name, ours, _ in torch_reference.tensors(model.train_view.g, model.dims):
        cosine = torch.nn.functional.cosine_similarity(ours.double().flatten(), exact[name].flatten(), dim=0).item()
        ratio = (ours.double().norm() / exact[name].norm()).item()
        assert cosine > 0.99 and 0.97 < ratio < 1.03, f"{name}: cosine {cosine:.4f}, norm {ratio:.3f} of float64's"


def test_every_recompute_level_gives_the_same_bits():
    runs = {level: (model := fp8_model(level=level), train_steps(model, 2)) for level in (*RECOMPUTE_LEVELS, "block:1")}
    model, history = runs["none"]
    for level, (other, others) in runs.items():
        assert others == history, level
        for name, flat in other.state_buffers().items():
            assert torch.equal(flat, model.state_buffers()[name]), (level, name)


def test_graphs_give_the_bits_of_eager_launches():
    eager, graphs = fp8_model(accumulation=2), fp8_model(accumulation=2)
    eager.eager = True
    assert train_steps(eager, 4) == late_steps(graphs, 4)
    for name, flat in eager.state_buffers().items():
        assert torch.equal(flat, graphs.state_buffers()[name]), name


def test_a_run_compiles_nothing_after_compile():
    for function in jit_functions():
        function.device_caches.clear()
    model, late = GPT2(fp8_config(accumulation=2, every=1), gpt2_triton.kernels, "cuda"), []
    model.compile([(model.B, model.T)])
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, src, **_: late.append(src.name)
        model.initialise(seed=1)
        calibrate(model)
        train_steps(model, 2)
        zeros = np.zeros((model.B, model.T), np.int32)
        for in_fp8 in (False, True):
            model.evaluate(zeros, zeros, in_fp8)
        fill_cache(model, [[1, 2, 3]], 0, seeds=[7])
        model.decode(1.0, 0, 1.0)
    assert late == []
