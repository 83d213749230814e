"""A model of the step on 8 to 1024 GPUs: arithmetic from a step on one GPU and the speed of the links, no measurement.

python -m benchmarks.scaling [--link GB/s] [--hop MICROSECONDS] > the tables of docs/scaling.md

N GPUs, each bucket of b bytes, ring algorithms: reduce-scatter of fp32 gradients and all-gather of bf16 parameters take
    (N - 1) / N * b / link + (N - 1) * hop    each
Of that the backward pass hides what is sent before its end, the forward pass what arrives before its layer is due:
    exposed = max(scatter of all - backward, scatter of layer 0)  + max(gather of the layers - forward, 0)
with two thirds of a step on one GPU for the backward and one for the forward pass.  Computation is taken as proportional
to the tokens, which flatters small batches.
"""

import argparse
from typing import NamedTuple

GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)


class Size(NamedTuple):
    name: str
    layers: int
    layer: int  # parameters of a layer's bucket
    embed: int  # those of wte and wpe
    tok_s: float  # tokens/s of one H200, measured (README.md)
    batch: int  # tokens of a GPU at that speed
    total: int  # tokens of a step in llm.c's recipe


SIZES = (
    Size("124M", 12, 7_077_888, 39_419_904, 624e3, 64 * 1024, 524_288),
    Size("1558M", 48, 30_720_000, 82_124_800, 51e3, 16 * 1024, 1_048_576),
)


def seconds(elements: float, width: int, gpus: int, link: float, hop: float) -> float:
    """A reduce-scatter or all-gather of `elements` of `width` bytes."""
    return (gpus - 1) / gpus * elements * width / link + (gpus - 1) * hop


def step(size: Size, tokens: float, gpus: int, link: float, hop: float) -> tuple[float, float, float]:
    """(computation, communication, exposed part of it) of a step with `tokens` on each GPU, in seconds."""
    compute = tokens / size.tok_s
    layer, embed = (seconds(n, 4, gpus, link, hop) for n in (size.layer, size.embed))
    scatter = size.layers * layer + embed
    gather = size.layers * seconds(size.layer, 2, gpus, link, hop)
    first = seconds(size.embed, 2, gpus, link, hop)  # under the update, which hides about nothing of it
    exposed = max(scatter - compute * 2 / 3, layer) + max(gather - compute / 3, 0) + first
    return compute, scatter + gather + first, exposed


def table(size: Size, fixed: bool, link: float, hop: float) -> str:
    """Markdown: GPUs with `batch` tokens each, or with a fixed step of `total` tokens divided among them."""
    lines = [
        "| GPUs | tokens a GPU | computation, ms | communication, ms | exposed, ms | tokens/s | of N times one GPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpus in GPUS:
        tokens = size.total / gpus if fixed else size.batch
        if tokens < 1024:
            break
        compute, communicate, exposed = step(size, tokens, gpus, link, hop)
        rate = gpus * tokens / (compute + exposed)
        cells = [f"{x * 1e3:,.1f}" for x in (compute, communicate, exposed)]
        share = compute / (compute + exposed)
        lines.append(f"| {gpus} | {tokens:,.0f} | {' | '.join(cells)} | {rate / 1e6:,.2f}M | {share:.0%} |")
    return "\n".join(lines)


def report(link: float, hop: float) -> str:
    """All tables, with what they assume."""
    parts = [
        f"Arithmetic, not measurement: links of {link / 1e9:.0f} GB/s a GPU, {hop * 1e6:.1f} us a hop, ZeRO-1.",
        "",
    ]
    for size in SIZES:
        for fixed in (False, True):
            what = f"{size.total:,} tokens a step, divided" if fixed else f"{size.batch:,} tokens on each GPU"
            parts += [f"**{size.name}, {what}**", "", table(size, fixed, link, hop), ""]
    return "\n".join(parts).rstrip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", type=float, default=300.0, help="GB/s that a GPU sends in a large collective")
    parser.add_argument("--hop", type=float, default=3.0, help="microseconds from a GPU to the next in the ring")
    given = parser.parse_args()
    print(report(given.link * 1e9, given.hop * 1e-6))
