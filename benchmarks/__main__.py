"""`python -m benchmarks steps|ops|tune|verify`, run in the root of a checkout.

The modules behind the commands are imported when a command runs: `select_device` must set the environment before torch
is imported.
"""

import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from gpt2_triton.commands.app import AT_LEAST_1, main, make_app, require_directory, select_device
from gpt2_triton.config.values import check_recompute
from gpt2_triton.errors import ConfigError

app = make_app("benchmarks", "Speed and accuracy of the kernels next to PyTorch's, and the search for their tables.")
app.help_epilogue = (
    "Programs of their own, each with --help, as in python -m benchmarks.speed.multi_gpu: "
    "speed.multi_gpu, speed.torch_ddp, accuracy.gradients, losses.pairs, losses.torch_train, losses.corpus, "
    "losses.loss_compare, losses.vs_torch, results."
)

# options of several commands
Count = Annotated[int, AT_LEAST_1]
Sizes = Annotated[str, Parameter(help="Comma-separated among d12 (124M), d24 (350M), d36 (774M) and d48 (1558M).")]
Batch = Annotated[Count | None, Parameter(help="Sequences per step; by default 64, 64, 32 and 16.")]
Recompute = Annotated[
    str | None,
    Parameter(
        help="memory.recompute of our runs: none, gelu, gelu+ln, gelu+ln+qkv, block, or as gelu+ln:4 in the first "
        "layers only; by default gelu for d12, gelu+ln for the others."
    ),
]
Precision = Annotated[
    Literal["bf16", "fp8", "bf16,fp8"], Parameter(help="train.precision of our runs; bf16,fp8 for both.")
]
KeepBf16 = Annotated[
    Literal["head", "none"] | None, Parameter(help="fp8.keep_bf16 of our runs; by default the configuration's.")
]
ALL_SIZES = "d12,d24,d36,d48"


@app.command
def verify() -> int:
    """Compare every kernel with float64 and with PyTorch's own operation on this machine, in one table."""
    select_device()
    from benchmarks.accuracy.verify import verify as check

    return check()


@app.command
def steps(
    *,
    sizes: Sizes = ALL_SIZES,
    batch: Batch = None,
    steps: Annotated[int, Parameter(validator=Number(gte=6))] = 30,
    recompute: Recompute = None,
    precision: Precision = "bf16",
    keep_bf16: KeepBf16 = None,
    baseline: Literal["torch", "muon", "torchao", "none"] = "torch",
    optim: Literal["adamw", "muon", "adamw,muon"] = "adamw",
    json: Path | None = None,
) -> int:
    """Time GPT-2's training steps next to PyTorch's on this GPU.

    Parameters
    ----------
    steps: int
        Steps per run, at least 6; the first five are not counted.
    baseline: str
        torch runs PyTorch too; muon also PyTorch with torch.optim.Muon; torchao also PyTorch with torchao's fp8,
        tensorwise and rowwise; none runs ours alone.
    optim: str
        optim.name of our runs; adamw,muon for both.
    json: Path
        File for the figures of the runs.
    """
    names = _sizes(sizes)
    _require_level(recompute, names)
    require_directory("json", json)
    precisions = _precisions(precision, keep_bf16)
    _require_gpu("steps")
    if baseline == "torchao" and importlib.util.find_spec("torchao") is None:
        raise ConfigError("--baseline: torchao is not installed; install the release made for this torch")
    from benchmarks.speed.sizes import work_of
    from benchmarks.speed.steps import compare

    arms = [(precision, keep_bf16, name) for precision in precisions for name in optim.split(",")]
    return compare([work_of(size, batch, recompute, *arm) for size in names for arm in arms], steps, baseline, json)


@app.command
def ops(
    *,
    sizes: Sizes = ALL_SIZES,
    batch: Batch = None,
    recompute: Recompute = None,
    precision: Precision = "bf16",
    keep_bf16: KeepBf16 = None,
    plot: Path | None = None,
    json: Path | None = None,
) -> None:
    """Time each operation of a training step, and print how near its floor on this GPU it is.

    Parameters
    ----------
    plot: Path
        With one size: a PNG of each operation's time and its floor, in both precisions side by side.
    json: Path
        With one size: a file for the figures of that picture.
    """
    names = _sizes(sizes)
    _require_level(recompute, names)
    for option, file in (("plot", plot), ("json", json)):
        if file and len(names) > 1:
            raise ConfigError(f"--{option}: goes with one size, as in --sizes d12 --{option} {file}")
        require_directory(option, file)
    precisions = _precisions(precision, keep_bf16)
    _require_gpu("ops")
    from benchmarks.speed.ops import report
    from benchmarks.speed.sizes import work_of

    report([work_of(size, batch, recompute, p, keep_bf16) for size in names for p in precisions], plot, json)


@app.command
def tune(
    *, sizes: str | None = None, batch: Count | None = None, only: str | None = None, out: Path | None = None
) -> int:
    """Search the kernels' launch parameters for this GPU, and write the rows that gain 2% into its table.

    Parameters
    ----------
    sizes: str
        Comma-separated among d12, d24, d36 and d48; by default those that this GPU can train.
    batch: int
        Sequences per step; by default at most 64, 64, 32 and 16, as many as this GPU can train with.
    only: str
        Comma-separated operations or families of them, such as attention,layernorm_fwd; by default all.
    out: Path
        The .json file to write, for the variable GPT2_TRITON_TABLE of any installation of this version; by default this
        GPU's in gpt2_triton/kernels/tables.
    """
    names = _sizes(sizes or ALL_SIZES)
    if out and out.suffix != ".json":
        raise ConfigError(f"--out: {out} does not end in .json, as a table does")
    require_directory("out", out)
    _require_gpu("tune")
    from benchmarks.tune.search import tune as search

    return search(names if sizes else None, batch, only, out)


def _sizes(sizes: str) -> list[str]:
    """Return the names in a comma-separated list; ConfigError if one is unknown."""
    names = sizes.split(",")
    unknown = [name for name in names if name not in ALL_SIZES.split(",")]
    if unknown:
        raise ConfigError(f"--sizes: unknown {unknown[0]}; known are {ALL_SIZES.replace(',', ', ')}")
    return names


def _precisions(precision: str, keep_bf16: str | None) -> list[str]:
    """Return the values of --precision; ConfigError if --keep_bf16 has no run in fp8."""
    if keep_bf16 is not None and precision == "bf16":
        raise ConfigError("--keep_bf16: goes with --precision fp8")
    return precision.split(",")


def _require_level(recompute: str | None, sizes: list[str]) -> None:
    """Refuse a recompute level that is unknown, or that names more layers than one of the sizes has."""
    if recompute is None:
        return
    try:
        layers = check_recompute(recompute).partition(":")[2]
    except ValueError as error:
        raise ConfigError(f"--recompute: {error}, got {recompute!r}") from None
    few = [size for size in sizes if layers and int(layers) > int(size.removeprefix("d"))]
    if recompute == "auto" or few:
        wrong = f"{few[0]} has fewer layers" if few else "it is chosen when a run starts"
        raise ConfigError(f"--recompute: {recompute} does not go with a benchmark: {wrong}; name another level")


def _require_gpu(command: str) -> None:
    from gpt2_triton import device

    if not device.present():
        raise ConfigError(f"{command}: needs a CUDA GPU, found none")


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
