"""What only a GPU can show: gradients at GPT-2's width, real memory beside the plan, kernel names, bits run to run."""

import gc
import importlib
import pkgutil

import pytest
import torch
import triton

import gpt2_triton.kernels
from gpt2_triton.model import GPT2
from gpt2_triton.tables import LEVELS
from tests import reference, torch_gpt2
from tests.helpers import error
from tests.test_schedule import F64, batches, train_steps
from tests.tiny import tiny_config

pytestmark = pytest.mark.gpu


def gpt2_config(dtype: str = "bf16", level: str = "gelu", n_layer: int = 2, B: int = 2, T: int = 256, steps: int = 5):
    """GPT-2 124M's width and vocabulary, fewer layers."""
    return tiny_config(
        model=dict(n_layer=n_layer, n_head=12, n_embd=768, vocab_size=50257, block_size=1024),
        train=dict(batch_size=B, seq_len=T, dtype=dtype, steps=steps),
        memory=dict(recompute=level),
    )


def gpt2_model(**shape) -> GPT2:
    model = GPT2(gpt2_config(**shape), gpt2_triton.kernels, "cuda")
    model.initialise(seed=1)
    return model


def exact_gradients(model: GPT2) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step by the reference launchers in float64, from the model's stored weights."""
    exact = GPT2(model.config, reference, "cuda", dtypes=F64)
    exact.eager = True
    exact.state.params.copy_(model.state.params)
    [(loss, _, _)] = train_steps(exact, 1)
    return loss, {name: t.clone() for name, t, _ in torch_gpt2.tensors(exact.full.g, exact.dims)}


def torch_gradients(model: GPT2) -> dict[str, torch.Tensor]:
    """PyTorch's gradients of the first step with everything in bf16."""
    d, params = model.dims, torch_gpt2.leaves(model.state.params, model.dims)
    [(ids, targets)] = batches(model.config, 1)
    torch_gpt2.gpt2_loss(params, ids.cuda(), targets.cuda(), d["V"], d["NH"]).backward()
    return {name: t.grad for name, t, _ in torch_gpt2.tensors(params, d)}


def test_gradients_in_bf16_are_as_good_as_pytorchs():
    """Each tensor's error is at most 1.1 times that of PyTorch in bf16, which also rounds the gradients."""
    model = gpt2_model(dtype="bf16")
    want, exact = exact_gradients(model)
    torchs = torch_gradients(model)
    [(loss, _, _)] = train_steps(model, 1)
    assert abs(loss - want) < 1e-3 * want  # about ten roundings of 2e-3 each in a logit, averaged over 400 tokens
    for name, ours, _ in torch_gpt2.tensors(model.full.g, model.dims):
        off, bound = error(ours, exact[name]), 1.1 * error(torchs[name], exact[name])
        assert off <= bound and off < 0.02, f"{name}: {off:.1e}, PyTorch {bound / 1.1:.1e}"


def test_gradients_in_fp32_equal_float64():
    model = gpt2_model(dtype="fp32")
    want, exact = exact_gradients(model)
    [(loss, _, _)] = train_steps(model, 1)
    assert abs(loss - want) < 1e-6 * want
    for name, ours, _ in torch_gpt2.tensors(model.full.g, model.dims):
        # sums of 512 to 50304 products, 6e-8 each; PyTorch in fp32 is at 7e-7 here
        assert error(ours, exact[name]) < 1e-5, name


def test_a_step_launches_triton_kernels_and_copies_only():
    names = (m.name for m in pkgutil.iter_modules(gpt2_triton.kernels.__path__, "gpt2_triton.kernels."))
    modules = map(importlib.import_module, names)
    ours = {f.__name__ for m in modules for f in vars(m).values() if isinstance(f, triton.JITFunction)}
    model = gpt2_model()
    train_steps(model, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train_steps(model, 1)
        torch.cuda.synchronize()
    launched = {e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA}
    kernels = {name for name in launched if not name.startswith(("Memcpy", "Memset"))}
    assert kernels <= ours, kernels - ours
    assert {"_matmul_kernel", "_matmul_dw_kernel"} <= kernels  # the trace saw the step


def test_the_plan_is_what_a_run_takes():
    """What free memory loses between a warm context (a step of the same kernels) and the third step is the arena."""
    train_steps(gpt2_model(n_layer=1, T=1024), 1)
    gc.collect()
    torch.cuda.empty_cache()
    before, _ = torch.cuda.mem_get_info()
    model = gpt2_model(n_layer=12, B=8, T=1024)
    train_steps(model, 3)
    torch.cuda.synchronize()
    after, _ = torch.cuda.mem_get_info()
    assert abs((before - after) / model.plan.total - 1) < 0.02, f"plan {model.plan.total:,}, taken {before - after:,}"


def test_nothing_allocates_after_the_first_step():
    model = gpt2_model()
    train_steps(model, 1)
    counts = torch.cuda.memory_stats()["allocation.all.allocated"]
    train_steps(model, 3)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == counts
    torch.empty(1, device="cuda")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == counts + 1  # the counter counts


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_runs_give_the_same_bits(dtype):
    first, second = gpt2_model(dtype=dtype), gpt2_model(dtype=dtype)
    assert train_steps(first, 5) == train_steps(second, 5)
    for name, flat in first.persistent().items():
        assert torch.equal(flat, second.persistent()[name]), name


def test_every_recompute_level_gives_the_same_bits():
    runs = {level: (model := gpt2_model(level=level), train_steps(model, 2)) for level in LEVELS}
    model, history = runs["none"]
    for level, (other, others) in runs.items():
        assert others == history, level
        assert torch.equal(other.state.grads, model.state.grads), level
        assert torch.equal(other.state.params, model.state.params), level
