"""Compiles a run's kernels before the run begins: it makes the run's calls without
launches (kernels/precompile.py).
"""

import functools
from collections.abc import Set
from typing import Any

import numpy as np

from gpt2_triton.console import Progress
from gpt2_triton.model.communicator import Communicator

Shapes = Set[tuple[int, int]]  # (B, T) of batches


def compile_run(model: Any, validated: Shapes = frozenset(), answered: Shapes = frozenset()) -> Any:
    """Compile the kernels of a training run on all cores; return kernels/precompile.py's Compiled.
    All ranks call it; one of each host compiles.

    `validated` are the shapes of validation batches, which an fp8 run evaluates in
    fp8 too.  `answered` are the shapes of HellaSwag's questions, which every run evaluates
    in bf16.  Kernels depend on shapes: they are specialised on multiples of 16 and 32, and
    B*T selects among some kernels.
    """
    make = functools.partial(_compile, model, validated, answered)
    return model.group.first_on_host(make) if model.group else make()


def _compile(model: Any, validated: Shapes, answered: Shapes) -> Any:
    model.train_view.comm = Communicator()
    try:
        with (
            Progress("compiling", None, "kernels") as progress,
            model.K.compiling(report=progress.show) as compiled,
        ):
            _make_calls(model, validated, answered)
        return compiled
    finally:
        model.train_view.comm = model.comm


def _make_calls(model: Any, validated: Shapes, answered: Shapes) -> None:
    model.initialise(model.config.train.seed)
    for with_stats in sorted({False, model.stats_recorder is not None}):
        for acc in sorted({False, model.shape.accumulation > 1}):
            model.launch_forward_backward(acc, with_stats, last=True)
        model.launch_update(with_stats)
    model.comm.precompile()
    for shape in validated | answered:
        zeros = np.zeros(shape, np.int32)
        model.evaluate(zeros, zeros)
        if model.has_fp8 and shape in validated:
            model.evaluate(zeros, zeros, fp8=True)
    s = model.config.sample
    if s.every:
        model.launch_prefill(model.T)
        model.launch_decode(s.temperature, s.top_k, 1.0)


def compile_decoding(model: Any, temperature: float, top_k: int, top_p: float) -> Any:
    """Compile the kernels of `prefill` and `decode` in the same way."""
    with model.K.compiling() as compiled:
        model.launch_prefill(model.T)
        model.launch_decode(temperature, top_k, top_p)
    return compiled
