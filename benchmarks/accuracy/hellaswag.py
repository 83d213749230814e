"""Runs HellaSwag with this package and with plain PyTorch on the same checkpoint:
accuracies, times, different choices.

    python -m benchmarks.accuracy.hellaswag CHECKPOINT [--data hellaswag_val.jsonl]
    [--limit N] [--style completion]

PyTorch runs the questions in groups padded to the longest, in fp32 without TF32 and under bf16
autocast.  Its fp32 run is the reference.  Where another run chooses another ending, fp32 must find
both about equally likely: `largest gap` is their largest difference in nats (for acc_norm per token
in the completion style, per character in the harness style).  Our bf16 model runs again with a
tenth of the tokens per batch; the exit code is 1 if that changes a bit on a GPU.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gpt2_triton.commands.app import select_device
from gpt2_triton.data.hellaswag import STYLES, Questions, load_questions

if TYPE_CHECKING:
    from gpt2_triton.model.model import Model

SEQUENCES = 128  # in PyTorch's groups: their fp32 logits take 4 GB


def torch_losses(
    params: Any, dims: dict[str, int], questions: Questions, device: str, autocast: bool
) -> np.ndarray:
    """Return the summed loss of each ending's tokens, float64 [endings]."""
    from benchmarks.torch_reference import gpt2_loss

    out = []
    endings = list(zip(questions.contexts, questions.endings, strict=True))
    for first in range(0, len(endings), SEQUENCES):
        pairs = endings[first : first + SEQUENCES]
        T = max(len(context) + len(ending) for context, ending in pairs) - 1
        ids = np.zeros((len(pairs), T), np.int64)
        targets = np.full((len(pairs), T), -1, np.int64)
        for row, (context, ending) in enumerate(pairs):
            whole = np.concatenate([context, ending])
            ids[row, : len(whole) - 1] = whole[:-1]
            targets[row, len(context) - 1 : len(whole) - 1] = ending
        x, y = (torch.from_numpy(array).to(device) for array in (ids, targets))
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=autocast):
            losses = gpt2_loss(params, x, y, dims["V"], dims["NH"], reduction="none")
        out.append(losses.double().view(-1, T).sum(1).cpu().numpy())
    return np.concatenate(out)


def our_losses(model: "Model", questions: Questions) -> np.ndarray:
    """Return the summed loss of each ending's tokens, float64 [endings]."""
    from gpt2_triton.inference.hellaswag import ending_losses

    return ending_losses(model, questions)


def gaps(
    questions: Questions, losses: np.ndarray, reference: np.ndarray
) -> list[tuple[int, float]]:
    """Return, for choices by sum and by sum over length, how many differ from the
    reference's and the largest gap.
    """
    from gpt2_triton.inference.hellaswag import predictions

    firsts = 4 * np.arange(len(questions.labels))
    found = []
    pairs = zip(predictions(questions, losses), predictions(questions, reference))
    for (mine, theirs), scale in zip(pairs, (1.0, questions.lengths)):
        likely = reference / scale
        gap = likely[firsts + mine] - likely[firsts + theirs]
        found.append((int((mine != theirs).sum()), float(gap.max())))
    return found


def report(style: str, questions: Questions, runs: dict[str, tuple[np.ndarray, float]]) -> None:
    from gpt2_triton.inference.hellaswag import scores

    print(f"\n{style}, {len(questions.labels):,} questions")
    head = (
        "acc",
        "acc_norm",
        "seconds",
        "differ",
        "largest gap",
        "differ, norm",
        "largest gap, norm",
    )
    print(f"{'':<20}" + "".join(f"{name:>{max(len(name), 8) + 2}}" for name in head))
    for name, (losses, seconds) in runs.items():
        found = scores(questions, losses)
        (plain, gap), (norm, gap_norm) = gaps(questions, losses, runs["PyTorch fp32"][0])
        cells = (
            f"{found['acc']:.4f}",
            f"{found['acc_norm']:.4f}",
            f"{seconds:.1f}",
            plain,
            f"{gap:.4f}",
            norm,
        )
        cells = (*map(str, cells), f"{gap_norm:.4f}")
        print(
            f"{name:<20}" + "".join(f"{c:>{max(len(h), 8) + 2}}" for c, h in zip(cells, head)),
            flush=True,
        )


def timed(function: Callable[..., np.ndarray], *arguments: Any) -> tuple[np.ndarray, float]:
    start = time.perf_counter()
    return function(*arguments), time.perf_counter() - start


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--data", type=Path, help="HellaSwag's .jsonl; by default downloaded")
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--batch_tokens", type=int, default=65536)
    parser.add_argument("--style", choices=("completion", "harness"), help="by default both")
    a = parser.parse_args(argv)
    select_device()
    from benchmarks.torch_reference import leaves
    from gpt2_triton.checkpoint.sources import load_weights
    from gpt2_triton.data.tokenizer import get_tokenizer
    from gpt2_triton.inference.load import load_for_losses

    config, stored, _ = load_weights(a.checkpoint)
    start = time.perf_counter()
    styles = (a.style,) if a.style else tuple(STYLES)
    questions_by_style = load_questions(
        a.data, get_tokenizer(config.data.tokenizer), a.limit, styles
    )
    print(f"questions tokenised in {time.perf_counter() - start:.1f} s")
    start = time.perf_counter()
    models = {
        dtype: load_for_losses(config, stored, a.batch_tokens, dtype) for dtype in ("bf16", "fp32")
    }
    print(f"models ready in {time.perf_counter() - start:.1f} s")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dims = models["fp32"].dims
    params = leaves(stored["params"].whole().to(device), dims, torch.float32)
    all_equal = True
    for style, questions in questions_by_style.items():
        runs = {
            f"ours, {dtype}": timed(our_losses, model, questions) for dtype, model in models.items()
        }
        runs["PyTorch fp32"] = timed(torch_losses, params, dims, questions, device, False)
        runs["PyTorch autocast"] = timed(torch_losses, params, dims, questions, device, True)
        report(style, questions, runs)
        small = load_for_losses(config, stored, a.batch_tokens // 10, "bf16")
        equal = np.array_equal(our_losses(small, questions), runs["ours, bf16"][0])
        print(f"same bits with {small.B * small.T:,} tokens per batch: {'yes' if equal else 'NO'}")
        all_equal &= equal
    # the interpreter's blocks, and so its sums, depend on the batch
    return 0 if all_equal or device == "cpu" else 1


if __name__ == "__main__":
    sys.exit(main())
