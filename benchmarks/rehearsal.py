"""The launches of a step and the kernels behind them, found without memory and without a GPU: `tune` estimates its time
from them.

The arena is a tensor of the device "meta", which has shapes and addresses and no bytes, and a launch only records which
kernel Triton would compile for it.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.runtime.interpreter import InterpretedFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import gpt2_triton.kernels as kernels
from benchmarks.calls import Call, Interceptor, Rows
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.model import schedule
from gpt2_triton.model.arena import carve
from gpt2_triton.model.buffers import Recompute, State
from gpt2_triton.model.communicator import Communicator
from gpt2_triton.model.memory_plan import plan_memory, recompute_levels
from gpt2_triton.model.view import ModelView, make_view

Kernel = tuple[Any, ...]  # name and what Triton specialises a kernel on; equal ones are compiled once


@contextlib.contextmanager
def recorded_kernels() -> Iterator[set[Kernel]]:
    """Yield the set of kernels that are launched in the context; nothing is compiled or launched."""
    found: set[Kernel] = set()

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        found.add(_kernel(self.fn, args, keywords))

    kinds = (JITFunction, InterpretedFunction)
    launches: list[Callable[..., Any]] = [kind.run for kind in kinds]
    for kind in kinds:
        kind.run = record
    try:
        yield found
    finally:
        for kind, launch in zip(kinds, launches):
            kind.run = launch


def _kernel(function: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> Kernel:
    parameters = inspect.signature(function).parameters
    named = [*zip(parameters, args), *sorted(keywords.items())]
    return function.__name__, *(
        (name, value if _is_constant(parameters.get(name)) else _specialised(value)) for name, value in named
    )


def _is_constant(parameter: inspect.Parameter | None) -> bool:
    """Return whether a kernel is compiled for the parameter's value: a constexpr, or an option such as num_warps."""
    return parameter is None or "constexpr" in str(parameter.annotation)


def _specialised(value: Any) -> Any:
    """Return what a kernel depends on of an argument that is no constant."""
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if type(value) is int:
        return "int", value == 1, value % 16 == 0
    return type(value)


def calls_of(config: Config, rows: Rows) -> list[Call]:
    """Return the calls of a step's launchers that calls.intercepted_step would stop at, with their rows; all tensors
    are on the device "meta".
    """
    K, found = Interceptor(rows), list[Call]()
    with recorded_kernels():
        view = _view_of(config, K)
        for on_call in (None, found.append):  # the first step finds the rows of each call
            K.on_call = on_call
            schedule.embed(K, view)
            schedule.block(K, view)
            schedule.head(K, view, False)
            schedule.block_bwd(K, view, False)
            schedule.update(K, view)
    return found


def _view_of(config: Config, K: Any) -> ModelView:
    shape = StepShape.of(config)
    plan, dims = plan_memory(config, kernels, shape.micro_batch, config.train.seq_len, shape=shape)
    arena = torch.empty(plan.total, dtype=torch.uint8, device="meta")
    state = carve(State, plan.buffers, arena, dims)
    recompute = [Recompute.at(level, False) for level in recompute_levels(config, True)]
    return make_view(plan, arena, dims, state, recompute, config.optim, Communicator(), 0, K, record=True)
