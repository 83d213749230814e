"""Compares each launch of a training step with the same launch under other conditions, bit by bit:

    python -m tests.gpu.shared_gpu [bf16|fp8 ...]

alone        again, alone on the GPU
dirty        after filling every buffer whose contents do not outlive a step with NaN
shared       while another process trains on the same GPU, PASSES times

The model has two layers of GPT-2 1558M's shape and micro-batch, whose kernels take milliseconds, long enough for the
GPU to interrupt them for the other process.  Printed are the first launches whose results differ; exit code 1 if there
are any.  tests/gpu/sanitize.py looks for reads and writes out of bounds.
"""

import contextlib
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import gpt2_triton.kernels as kernels
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.kernels import contract
from gpt2_triton.model import state_io
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.training.lr_schedule import step_inputs
from tests.support.models import batches, calibrate
from tests.support.tiny import tiny_config

PASSES = 30
KEPT = ("window", "scale", "history", "amax", "step_out", "step_in", "step_key", "batch")  # beside the checkpoint's

Sums = list[tuple[str, list[int]]]  # of each launch: its launcher, and a sum of each output's bytes


class Checksums:
    """The kernels, each launch followed by sums of its outputs on the device."""

    def __init__(self, K: Any) -> None:
        self._K, self.launches = K, list[tuple[str, list[Tensor]]]()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._K, name)
        if name not in contract.LAUNCHERS:
            return attribute
        launch: Any = functools.partial(self._launch, name)
        launch.outputs = contract.LAUNCHERS[name].outputs
        return launch

    def _launch(self, name: str, *args: Any, **keywords: Any) -> None:
        getattr(self._K, name)(*args, **keywords)
        launcher: Any = contract.LAUNCHERS[name]
        written = list(zip(inspect.signature(launcher).parameters, args))[: launcher.outputs]
        results = [t for output, t in written if t is not None and output not in contract.WORKSPACE]
        self.launches.append((name, [sum_of_bytes(t) for result in results for t in tensors_of(result)]))

    def take(self) -> Sums:
        """Return the sums since the last call."""
        found, self.launches = self.launches, []
        return [(name, [int(t) for t in sums]) for name, sums in found]


def tensors_of(output: Any) -> list[Tensor]:
    """Return the tensors that a launch writes: of an fp8 operand its forms, without what is not written."""
    if not isinstance(output, kernels.Fp8):
        return [output]
    forms = [output.rows, output.columns if output.transposed else None, output.value, output.amax]
    return [t for t in forms if t is not None]


def sum_of_bytes(t: Tensor) -> Tensor:
    """Return an int64 that nearly every change of the tensor's bytes changes; sums of integers have no order."""
    flat = t.reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 4 * 4].view(torch.int32)
    place = torch.arange(len(words), device=t.device) % 1021 + 1  # moved words count too
    return (words * place).sum() + flat[len(words) * 4 :].sum()


def one_pass(model: GPT2, pristine: Tensor) -> Sums:
    """Run a step from the arena's contents `pristine`; return the sums of its launches, and of the logits as PyTorch
    computes them: a kernel as long as the head's that is not ours.
    """
    model.arena.copy_(pristine)
    model._forward_backward(False, False, True)
    model._update(False)
    view = model.train_view
    lnf, wte = (getattr(operand, "value", operand) for operand in (view.a.lnf, view.w.wte))
    return [*model.K.take(), ("torch.mm", [int(sum_of_bytes(lnf @ wte.T))])]


def dirty(model: GPT2, pristine: Tensor) -> Tensor:
    """Return the arena's contents with bytes of 0xFF, which are NaN, in all buffers that do not outlive a step."""
    kept = torch.zeros_like(pristine, dtype=torch.bool)
    state = {**state_io.state_buffers(model.state), **{name: getattr(model.state, name) for name in KEPT}}
    for tensor in state.values():
        if tensor is not None and tensor.numel():
            first = tensor.data_ptr() - model.arena.data_ptr()
            kept[first : first + tensor.nbytes] = True
    return torch.where(kept, pristine, 0xFF)


def differing(found: Sums, want: Sums) -> str:
    """Return the first of ours whose results differ, as "launch 12, layernorm_bwd, output 0"; "" if none does."""
    assert [name for name, _ in found] == [name for name, _ in want]
    for i, ((name, ours), (_, theirs)) in enumerate(zip(found[:-1], want)):
        for j, (a, b) in enumerate(zip(ours, theirs)):
            if a != b:
                return f"launch {i}, {name}, output {j}"
    return ""


def prepare(precision: str, **sections: Any) -> tuple[GPT2, Tensor]:
    """Return a model with the sections of a configuration, and the contents of its arena before a step."""
    sections["train"] |= dict(precision=precision)
    config = tiny_config(log=dict(stats_every=0), sample=dict(every=0), **sections)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT2(config, Checksums(kernels), device)
    model.eager = True
    model.arena.zero_()
    model.initialise(seed=1)
    if model.has_fp8:
        calibrate(model)
    [(ids, targets)] = batches(config, 1)
    model.state.batch.copy_(pack_batch(None, ids.numpy(), targets.numpy(), config.model.vocab_size))
    model.state.step_in.copy_(torch.from_numpy(step_inputs(0, config, 1.0 / config.total_batch_tokens)))
    model.state.step_key.zero_()
    model.K.take()
    return model, model.arena.clone()


def large(precision: str) -> tuple[GPT2, Tensor]:
    """Return `prepare` of the model whose kernels take milliseconds."""
    return prepare(
        precision,
        model=dict(n_layer=2, n_head=25, n_embd=1600, vocab_size=50257, block_size=1024),
        train=dict(batch_size=16, seq_len=1024, total_batch_tokens=16384, dtype="bf16"),
        memory=dict(recompute="gelu+ln"),
    )


@contextlib.contextmanager
def another_process(precision: str) -> Iterator[None]:
    """Run steps of the same model in another process from its first step to the end of the block."""
    command = [sys.executable, "-m", "tests.gpu.shared_gpu", "--load", precision]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def load(precision: str) -> None:
    """Run steps until the process is killed; print a line after the first."""
    model, pristine = large(precision)
    while True:
        one_pass(model, pristine)
        print("running", flush=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("tests.gpu.shared_gpu: needs a GPU", file=sys.stderr)
        return 2
    words = sys.argv[1:] or ["bf16", "fp8"]
    if words[0] == "--load":
        load(words[1])
    wrong = 0
    for precision in words:
        model, pristine = large(precision)
        want = one_pass(model, pristine)
        found = {"alone": [one_pass(model, pristine)], "dirty": [one_pass(model, dirty(model, pristine))]}
        for other in ("bf16", "fp8"):
            with another_process(other):
                found[f"shared with {other}"] = [one_pass(model, pristine) for _ in range(PASSES)]
        for condition, passes in found.items():
            first = [line for line in (differing(sums, want) for sums in passes) if line]
            wrong += len(first)
            counts = ", ".join(f"{first.count(line)} x {line}" for line in dict.fromkeys(first))
            equal = f"{len(passes) - len(first)} of {len(passes)} passes equal"
            print(f"{precision}, {condition}: {equal}{'; first to differ: ' if first else ''}{counts}", flush=True)
            if others := sum(sums[-1] != want[-1] for sums in passes):
                print(f"  PyTorch's logits differ in {others} passes", flush=True)
        del model, pristine
        torch.cuda.empty_cache()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
