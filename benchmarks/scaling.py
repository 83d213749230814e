"""Models the step on 4 to 1024 GPUs: arithmetic from a step on one GPU and the speed of the links, no measurement.

python -m benchmarks.scaling [--link GB/s] [--start MICROSECONDS] [--hop MICROSECONDS]

docs/engineering/scaling.md has the last two columns of its tables.

N GPUs exchange buckets of b bytes, fp32 gradients and bf16 parameters.  Up to 8 GPUs of one host use peer copies:
    (N - 1) * (b / N / copy + copy_start)    per bucket
The copy engines work next to the multiprocessors, which add up the gradients.  More GPUs use collectives in rings,
reduce-scatter and all-gather:
    (N - 1) / N * b / link + start + (N - 1) * hop    per bucket
These cost SHARE of their time, for the multiprocessors that they occupy.

Both overlap with the computation, gradients with its backward two thirds and parameters with its forward third; the
rest is lost.  The embedding's gradients overlap with layer 0's last product if they are copied.  Layer 0's gradients
come last and are exposed.  So are the embedding's parameters, except for the time of the layers' update.

NVLink costs AWAKE of a step while it is awake: on one host from the first transfer of gradients to SLEEPLESS seconds
after the last transfer of parameters, between hosts always.  Each GPU updates a share of the parameters, which saves
time.  Computation is proportional to the tokens here, which is too optimistic for small batches.
"""

import argparse
from typing import NamedTuple

from benchmarks.sizes import bucket_elements
from gpt2_triton.model.peer_copies import TOKENS_TO_HIDE_A_LAYER

GPUS = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
HOST = 8  # GPUs per host, which read each other's memory
SHARE = 0.25  # in traces of four H200s 0.34 at 124M and 0.17 at 1558M, where collectives overlapped with attention
MEMORY = 4.2e12  # bytes/s of an H200
UPDATE = 24 / MEMORY  # seconds per parameter: AdamW reads and writes 24 bytes
AWAKE = 0.023  # products at the power limit took 13.55 ms with 64 KB per 30 ms (awake), 13.24 with 16 bytes (asleep)
SLEEPLESS = 50e-3  # seconds from the last transfer until NVLink sleeps (nvidia-smi nvlink -gLowPwrInfo)


class Link(NamedTuple):
    """Rates of NCCL 2.28's collectives on 2 and 4 H200s with one NVSwitch, a least-squares fit over the sizes of
    benchmarks.collectives, and of copies between 2 GPUs, from a step's trace.
    """

    bandwidth: float = 290e9  # bytes/s that a GPU sends in a large collective
    start: float = 30e-6  # seconds
    hop: float = 8e-6  # seconds from a GPU to the next in the ring
    copy: float = 370e9  # bytes/s that a GPU reads from another one
    copy_start: float = 5e-6
    barrier: float = 25e-6


class Size(NamedTuple):
    name: str
    layers: int
    layer: int  # parameters in a layer's bucket
    embed: int  # parameters in the bucket of wte and wpe
    tok_s: float  # tokens/s of one H200, measured (docs/engineering/performance.md)
    batch: int  # tokens per GPU at that speed
    total: int  # tokens per step in llm.c's recipe
    product: float  # seconds of layer 0's last product, dW of qkv, with that batch, in a trace of two H200s


SIZES = (
    Size("124M", 12, *bucket_elements("d12"), 632e3, 64 * 1024, 524_288, 0.35e-3),
    Size("1558M", 48, *bucket_elements("d48"), 54.2e3, 16 * 1024, 1_048_576, 0.41e-3),
)


def seconds(elements: float, width: int, gpus: int, link: Link) -> float:
    """Return the time to reduce-scatter or all-gather `elements` of `width` bytes."""
    if gpus <= HOST:
        return (gpus - 1) * (elements * width / gpus / link.copy + link.copy_start)
    return (gpus - 1) / gpus * elements * width / link.bandwidth + link.start + (gpus - 1) * link.hop


def step(size: Size, tokens: float, gpus: int, link: Link) -> tuple[float, float, float]:
    """Return the seconds of computation, of communication, and of what N GPUs add to the step of one GPU.

    Each GPU has `tokens` tokens.
    """
    compute, lost, near = tokens / size.tok_s, 0.0, gpus <= HOST
    (layer_sum, layer_gather), (embed_sum, embed_gather) = (
        [seconds(n, width, gpus, link) for width in (4, 2)] for n in (size.layer, size.embed)
    )
    sums, gathers = (size.layers - 1) * layer_sum, size.layers * layer_gather
    for under, room in ((sums, compute * 2 / 3), (gathers, compute / 3)):
        lost += (0.0 if near else SHARE) * min(under, room) + max(under - room, 0.0)
    update = size.layers * size.layer / gpus * UPDATE
    product, every = size.product * tokens / size.batch, size.layers * size.layer + size.embed
    lost += max(embed_sum - product * near, 0.0) + layer_sum + link.barrier * near + max(embed_gather - update, 0.0)
    communicate = sums + layer_sum + gathers + embed_sum + embed_gather
    if near:
        lost += (gpus + 1) / gpus * 4 * every / MEMORY
        under = compute * 2 / 3 * -(-size.layers * TOKENS_TO_HIDE_A_LAYER // tokens) / size.layers
        lost += AWAKE * min(compute, SLEEPLESS + under + communicate - sums)
    else:
        lost += AWAKE * compute
    saved = (gpus - 1) / gpus * every * UPDATE
    return compute, communicate, lost - saved


def table(size: Size, fixed: bool, link: Link) -> str:
    """Return Markdown for GPUs with `batch` tokens each, or with a fixed step of `total` tokens divided among them."""
    lines = [
        "| GPUs | tokens per GPU | computation, ms | communication, ms | longer by, ms | tokens/s | of N alone |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        tokens = size.total / gpus if fixed else size.batch
        if tokens < 1024:
            break
        compute, communicate, lost = step(size, tokens, gpus, link)
        rate = gpus * tokens / (compute + lost)
        cells = [f"{x * 1e3:,.1f}" for x in (compute, communicate, lost)]
        share = compute / (compute + lost)
        lines.append(f"| {gpus} | {tokens:,.0f} | {' | '.join(cells)} | {rate / 1e6:,.2f}M | {share:.0%} |")
    return "\n".join(lines)


def report(link: Link) -> str:
    """Return all tables, after a line with the assumptions."""
    parts = [
        f"Arithmetic, not measurement, ZeRO-1: up to {HOST} GPUs copies of {link.copy / 1e9:.0f} GB/s, beyond that "
        f"links of {link.bandwidth / 1e9:.0f} GB/s per GPU, {link.start * 1e6:.0f} us per collective and "
        f"{link.hop * 1e6:.0f} us per hop.",
        "",
    ]
    for size in SIZES:
        for fixed in (False, True):
            what = f"{size.total:,} tokens per step, divided" if fixed else f"{size.batch:,} tokens on each GPU"
            parts += [f"**{size.name}, {what}**", "", table(size, fixed, link), ""]
    return "\n".join(parts).rstrip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", type=float, default=290.0, help="GB/s that each GPU sends in a large collective")
    parser.add_argument("--start", type=float, default=30.0, help="microseconds of latency per collective")
    parser.add_argument("--hop", type=float, default=8.0, help="microseconds from a GPU to the next in the ring")
    given = parser.parse_args()
    if not (given.link > 0 and given.start >= 0 and given.hop >= 0):
        parser.error("--link must be above 0, --start and --hop at least 0")
    print(report(Link(given.link * 1e9, given.start * 1e-6, given.hop * 1e-6)))
