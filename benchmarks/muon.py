"""Checks Muon's kernels against float64, and times its update beside AdamW's, on a GPU.

python -m benchmarks.muon [SIZE ...]     default d12 d48

For each size: the error of each kernel and PyTorch's for the same storage; the singular values of the orthogonalised
momentum of random gradients; milliseconds and TFLOP/s of each launch, with the products of a symmetric matrix counted
once; the update with either optimizer; steps of the recipe's tokens with either in turn, because clocks drift.  Exit
code 1 if a kernel is out of its bound.
"""

import argparse
import dataclasses
import gc
import statistics
import sys
from collections.abc import Callable

import torch
import triton

import gpt2_triton.kernels as K
from benchmarks import accuracy
from benchmarks.our_gpt2 import run_steps
from benchmarks.sizes import SIZES, config_of, tokens_of
from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.muon import POLAR_EXPRESS, MatrixClass
from gpt2_triton.model.view import ModelView

RECIPE_TOKENS = {"d48": 1_048_576}  # a step's; 524,288 with the other sizes
RESIDENT = {"d24": 32, "d36": 16, "d48": 8}  # sequences, so that two models fit into 80 GB
PAIRS = {"d48": 3}  # timed steps with each optimizer, after one; 20 with the other sizes


def check_kernels(C: int) -> bool:
    """Print the errors of the kernels for width C; return whether all are within their bounds."""
    torch.manual_seed(0)
    passed = True
    for c in accuracy.muon(dataclasses.replace(accuracy.Sizes(), C=C)):
        ours, torchs, ok = c.verdict()
        passed &= ok
        print(f"{c.op:<18}{c.output:<12}{ours:>10.1e}{torchs:>10.1e}  {'ok' if ok else 'FAIL'}")
    return passed


def model_of(size: str, optimizer: str) -> GPT2:
    """Return a model that takes steps of the recipe's tokens."""
    config = config_of(size, RESIDENT.get(size, SIZES[size].batch), SIZES[size].recompute)
    sections = config.to_dict()
    sections["optim"] |= dict(name=optimizer)
    sections["train"] |= dict(total_batch_tokens=RECIPE_TOKENS.get(size, 524_288))
    model = GPT2(Config.model_validate(sections), K, "cuda")
    model.compile()
    model.initialise(model.config.train.seed)
    return model


def milliseconds(launch: Callable[[], None]) -> float:
    return triton.testing.do_bench_cudagraph(launch, rep=200)


def time_updates(models: dict[str, GPT2]) -> None:
    updates = {name: milliseconds(lambda model=model: model._update(False)) for name, model in models.items()}
    print("update: " + ", ".join(f"{name} {ms:.3f} ms" for name, ms in updates.items()))


def time_steps(models: dict[str, GPT2], pairs: int) -> None:
    """Time pairs of steps, one with each optimizer, of which each is first in every second pair; print the medians, and
    that of the differences.  The device is idle before each step, where a run has the next one waiting.
    """
    adamw = models["adamw"]
    packed = pack_batch(None, *tokens_of(adamw.B), adamw.config.model.vocab_size).pin_memory()
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(pairs + 1):
        for name, model in sorted(models.items(), reverse=number % 2 == 1):
            [result] = run_steps(model, packed, range(number, number + 1))
            times[name].append(result.seconds * 1e3)
    for name, each in times.items():
        tokens = f"{adamw.config.total_batch_tokens:,} tokens, B {adamw.B}"
        print(f"{name:<6} step of {tokens}: {statistics.median(each[1:]):.2f} ms")
    more = sorted(b - a for a, b in zip(times["adamw"][1:], times["muon"][1:], strict=True))
    share = statistics.median(more) / statistics.median(times["adamw"][1:])
    print(f"Muon takes {statistics.median(more):+.2f} ms more, from {more[0]:+.2f} to {more[-1]:+.2f}: {share:+.2%}")


def print_launches(m: ModelView) -> None:
    """Print time and speed of each launch, and the singular values of the last update's matrices."""
    s, stats, (a, b, c) = m.s, m.s.step_out[:4], POLAR_EXPRESS[0]
    rows = stats, s.step_in, s.step_key
    print(f"{'launch':<16}{'matrices':<18}{'a step':>7}{'ms':>9}{'ms a step':>11}{'TFLOP/s':>9}")
    for k in m.matrices:
        count, M, N = k.owned.shape
        C = min(M, N)
        launches: list[tuple[str, int, float, Callable[[], None]]] = [
            ("muon_momentum", 1, 0, lambda k=k: K.muon_momentum(k.x, k.m, k.g, stats, k.momentum)),
            ("muon_normalise", 1, 0, lambda k=k: K.muon_normalise(k.next, m.a.scratch, k.owned)),
            ("muon_gram", 5, C * (C + 1) * max(M, N), lambda k=k: K.muon_gram(k.gram, k.next)),
            ("muon_poly", 5, C * (C + 1) * C, lambda k=k: K.muon_poly(k.poly, k.gram, b, c)),
            ("muon_apply", 5, 2 * M * N * C, lambda k=k: K.muon_apply(k.owned, k.next, k.poly, a)),
            (
                "muon_update",
                1,
                0,
                lambda k=k: K.muon_update(k.w, k.low, k.x, *rows, k.first, k.distance, k.decay, k.scale),
            ),
        ]
        for name, each, flops, launch in launches:
            ms = milliseconds(launch)
            speed = f"{count * flops / ms / 1e9:>9.0f}" if flops else ""
            print(f"{name:<16}{f'{count} x {M} x {N}':<18}{each:>7}{ms:>9.3f}{each * ms:>11.3f}{speed}")
    print_singular_values(m)


def print_singular_values(m: ModelView) -> None:
    """Orthogonalise random matrices with the model's buffers, and print the range of the first one's singular values.

    Those of a square random matrix come close to 0: the tenth of them that is smallest is left out.
    """
    for k in m.matrices:
        k.owned.copy_(torch.randn_like(k.owned))
        orthogonalise(m, k)
        values = torch.linalg.svdvals(k.owned[0].double())
        kept = values[: len(values) * 9 // 10]
        print(f"singular values {tuple(k.owned.shape)}: {kept.min():.3f} to {kept.max():.3f}")


def orthogonalise(m: ModelView, k: MatrixClass) -> None:
    K.muon_normalise(k.next, m.a.scratch, k.owned)
    x, y = k.next, k.owned
    for a, b, c in k.polynomials:
        K.muon_gram(k.gram, x)
        K.muon_poly(k.poly, k.gram, b, c)
        K.muon_apply(y, x, k.poly, a)
        x, y = y, x


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "benchmarks.muon", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("size", nargs="*", help=f"among {', '.join(SIZES)}; by default d12 d48")
    sizes = parser.parse_args(words).size or ["d12", "d48"]
    if unknown := [size for size in sizes if size not in SIZES]:
        parser.error(f"unknown size {unknown[0]}; known are {', '.join(SIZES)}")
    if not device.present():
        parser.exit(2, "error: muon: needs a CUDA GPU, found none\n")
    passed = True
    for size in sizes:
        print(f"\n{size}: {torch.cuda.get_device_name()}")
        passed &= check_kernels(config_of(size, *SIZES[size]).model.n_embd)
        torch.cuda.empty_cache()  # two models need nearly all memory
        models = {optimizer: model_of(size, optimizer) for optimizer in ("adamw", "muon")}
        time_steps(models, PAIRS.get(size, 20))
        time_updates(models)
        print_launches(models["muon"].train_view)
        for model in models.values():
            model.release_graphs()
        del models, model
        gc.collect()  # frees the arenas
        torch.cuda.empty_cache()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
