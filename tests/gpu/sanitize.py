"""Every launcher of bf16, fp32 and fp8 at ragged sizes, its tensors in allocations of
their own, for compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9
    python -m tests.gpu.sanitize

Arguments are numbers of CASES; by default all are taken.  tests/gpu/races.py
reads what racecheck reports.

In a run all buffers are views of one arena, inside which memcheck sees no overrun.  So each
launch here gets copies of its tensors.  The sanitizer frees no copy, so steps are small.
Without the sanitizer this compiles the kernels, so that the run under it finds them in
Triton's cache.
"""

import dataclasses
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import triton

import gpt2_triton.kernels as kernels
from gpt2_triton.kernels import contract
from gpt2_triton.model.model import Model
from tests.support.launchers import WrappedKernels, mapped
from tests.support.models import calibrate, train_steps
from tests.support.tiny import tiny_config

# n_head, n_embd, sequences, T, dtype, recompute, rows of a head chunk.  Rows in
# multiples of 32 take Hopper's kernels, 2,560 rows of 1,600 channels its wide tiles; the
# others leave partial tiles in every dimension
CASES = (
    (12, 768, 3, 200, "bf16", "gelu", 176),
    (12, 768, 2, 256, "bf16", "gelu+ln+qkv", 512),
    (25, 1600, 2, 160, "bf16", "block", 320),
    (25, 1600, 10, 256, "bf16", "gelu", 2560),
    (16, 1280, 3, 72, "bf16", "none", 100),  # heads of 80
    (3, 288, 5, 40, "bf16", "gelu+ln", 77),  # heads of 96
    (2, 256, 1, 33, "bf16", "gelu", 33),  # heads of 128
    (2, 128, 3, 50, "fp32", "gelu", 41),
    (1, 80, 1, 17, "fp32", "block", 17),
    (12, 768, 2, 256, "fp8", "gelu", 512),
    (2, 128, 3, 48, "fp8", "gelu+ln", 41),
    (12, 768, 2, 256, "fp8", "none", 512),
    (12, 768, 2, 256, "bf16", "gelu+ln", 512),
    (12, 768, 2, 256, "fp8", "none", 512),
    (3, 192, 3, 50, "fp32", "gelu", 41),
    (12, 768, 2, 256, "fp8", "gelu+ln+qkv", 512),
    (3, 192, 3, 50, "bf16", "gelu", 41),
    (12, 768, 2, 256, "bf16", "gelu+ln+qkv", 512),
)
MUON = {4, 8}  # numbers of CASES with optim.name muon
# numbers of CASES with model.arch llama: their n_kv_head
LLAMA = {12: 4, 13: 4, 14: 1, 15: 4, 16: 1, 17: 4}
MODERN = {15, 16, 17}  # those of LLAMA with model.qk_norm and model.logit_cap


class SeparateAllocations(WrappedKernels):
    """The kernels, each launch on copies of its tensors, of which the outputs are copied back."""

    def __init__(self) -> None:
        self.launched: set[str] = set()

    def _launch(self, name: str, *args: Any, **keywords: Any) -> None:
        self.launched.add(name)
        copies = [mapped(argument, torch.clone) for argument in args]
        getattr(kernels, name)(*copies, **keywords)
        torch.cuda.synchronize()
        launcher = contract.LAUNCHERS[name].contract
        inputs = launcher.inputs(copies)
        for argument, operand in launcher.inputs(args).items():
            if isinstance(operand, kernels.Fp8):  # a product writes its columns
                _copy_back(operand, inputs[argument])
        written = launcher.outputs(copies)
        for argument, operand in launcher.outputs(args).items():
            _copy_back(operand, written[argument])


def _copy_back(operand: Any, copy: Any) -> None:
    """Copy a tensor, or those of an fp8 operand."""
    if isinstance(operand, torch.Tensor):
        operand.copy_(copy)
        return
    for field in dataclasses.fields(operand):
        tensor = getattr(operand, field.name)
        if isinstance(tensor, torch.Tensor):
            tensor.copy_(getattr(copy, field.name))


def models(K: Any, numbers: Iterable[int]) -> Iterator[Model]:
    """Yield an initialised model for each of CASES in `numbers`; odd ones keep fp32 masters."""
    for number in numbers:
        heads, C, B, T, dtype, level, rows = CASES[number]
        vocab = 50257 if number == 0 else 301
        config = tiny_config(
            model=dict(
                n_layer=2,
                n_head=heads,
                n_embd=C,
                vocab_size=vocab,
                block_size=T,
                dropout=0.1 if number in MUON else 0,
            )
            | (dict(arch="llama", n_kv_head=LLAMA[number]) if number in LLAMA else {})
            | (dict(qk_norm=True, logit_cap=15) if number in MODERN else {}),
            train=dict(
                batch_size=B,
                seq_len=T,
                dtype=dtype.replace("fp8", "bf16"),
                total_batch_tokens=2 * B * T,
                precision="fp8" if dtype == "fp8" else "bf16",
            ),
            fp8=dict(keep_bf16="head" if number == 9 else "none"),
            optim=dict(
                name="muon" if number in MUON else "adamw",
                master="fp32" if number % 2 and dtype == "bf16" else "none",
            ),
            memory=dict(recompute=level, head_rows=rows),
            log=dict(stats_every=1),
            sample=dict(every=1),
        )
        model = Model(config, K, "cuda")
        model.eager = True
        model.initialise(seed=1)
        if model.has_fp8:
            calibrate(model)
        yield model
        del model
        torch.cuda.empty_cache()


def rest(K: Any) -> None:
    """Launch what a step on one GPU does not: the sums of other ranks' gradients."""
    K.add_partials(torch.randn(5003, device="cuda"), torch.randn(3, 5003, device="cuda"))


def main() -> int:
    if not torch.cuda.is_available():
        print("tests.gpu.sanitize: needs a GPU", file=sys.stderr)
        return 2
    K = SeparateAllocations()
    for model in models(K, map(int, sys.argv[1:]) if sys.argv[1:] else range(len(CASES))):
        B, T, C = model.B, model.T, model.dims["C"]
        train_steps(model, 1, with_stats=True)
        model.evaluate(*torch.zeros((2, B, T), dtype=torch.int32).numpy(), fp8=model.has_fp8)
        model.prefill([1, 2, 3, 4, 5], slice(0, 1))
        for sampling in ((0.0, 0, 1.0), (0.8, 7, 0.9)):
            model.decoding.seq.copy_(torch.tensor([[5, 5, 0, 0, 0]], dtype=torch.int32))
            model.decode(*sampling)
        torch.cuda.synchronize()
        storage = "fp8" if model.has_fp8 else model.config.train.dtype
        print(f"C {C}, {B} x {T}, {storage}, {model.config.memory.recompute}: done", flush=True)
    rest(K)
    torch.cuda.synchronize()
    left = sorted(name for name in contract.LAUNCHERS.keys() - K.launched if hasattr(kernels, name))
    print(
        f"{len(K.launched)} launchers launched; not launched: "
        f"{', '.join(left) or 'none'}; triton {triton.__version__}"
    )
    caching = (
        "off"
        if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
        else "ON: overruns inside it stay unseen"
    )
    print(f"caching of allocations: {caching}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
