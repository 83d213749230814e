"""`python -m benchmarks steps|ops|sample|tune|verify`, run in the root of a checkout.

Each command imports its modules when it runs, because `select_device` must set environment
variables before torch is imported.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number
from pydantic import ValidationError

from benchmarks.as_gpu import Code, execute_as, require_hopper
from benchmarks.record import CURRENT, Target
from benchmarks.runs import Keys
from gpt2_triton.commands.app import AT_LEAST_1, main, make_app, require_directory, select_device
from gpt2_triton.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.speed.sizes import Work

app = make_app(
    "python -m benchmarks",
    "Speed and accuracy of the kernels beside PyTorch, and the search for launch parameters.",
)
app.help_epilogue = (
    "Further programs have --help and are run by name, "
    "such as python -m benchmarks.speed.multi_gpu: "
    "speed.multi_gpu, speed.epilogues, speed.qk_norm, speed.text, accuracy.tokenizers, "
    "losses.pairs, losses.torch_train, losses.corpus, losses.loss_compare, losses.vs_torch, "
    "losses.as_portable, as_gpu, results."
)
As = Annotated[
    Code | None, Parameter(help="Execute this GPU's code, on a Hopper GPU (benchmarks/as_gpu.py).")
]
GPT2_SIZES = "d12,d24,d36,d48"


@Parameter(name="*")
@dataclass(frozen=True)
class Runs:
    """The steps that are measured.

    Args:
        sizes: Comma-separated sizes: d12 (124M), d24 (350M), d36 (774M), d48
            (1558M), llama:c768, llama:1b, qwen3:0.6b.
        batch: Sequences per step; by default 64, 64, 32, 16, 64, 8 and 8 for these sizes.
        recompute: memory.recompute of gpt2_triton, such as gelu+ln:4; by default gelu for d12, none
            for llama:c768, else gelu+ln.
        precision: train.precision of gpt2_triton; bf16,fp8 runs both.
    """

    sizes: str = GPT2_SIZES
    batch: Annotated[int, AT_LEAST_1] | None = None
    recompute: str | None = None
    precision: Literal["bf16", "fp8", "bf16,fp8"] = "bf16"

    def works(self, keys: tuple[str, ...], optim: str = "adamw") -> "list[Work]":
        """Return the work of each size, precision and optimizer; ConfigError if
        a configuration is wrong.
        """
        from benchmarks.speed.sizes import work_of

        names = _sizes(self.sizes, f"{GPT2_SIZES},llama:c768,llama:1b,qwen3:0.6b")
        precisions = self.precision.split(",")
        arms = [(precision, name, keys) for precision in precisions for name in optim.split(",")]
        found = [work_of(size, self.batch, self.recompute, *arm) for size in names for arm in arms]
        try:
            levels = [work.config().memory.recompute for work in found]
        except ValidationError as error:
            raise ConfigError(f"--recompute: {error.errors()[0]['msg']}") from None
        if "auto" in levels:
            raise ConfigError("--recompute: auto is chosen when a run starts; name a level")
        return found


@app.command
def verify(*, as_: As = None) -> int:
    """Compare every kernel with float64 and with PyTorch's own operation on
    this machine, in one table.
    """
    select_device(silent=as_ is not None)
    execute_as(as_)
    from benchmarks.accuracy.verify import verify as check

    return check()


@app.command
def steps(
    *keys: Keys,
    runs: Runs = Runs(),
    steps: Annotated[int, Parameter(validator=Number(gte=6))] = 30,
    baseline: Literal["torch", "chunks", "muon", "torchao", "none"] = "torch",
    optim: Literal["adamw", "muon", "adamw,muon"] = "adamw",
    json: Path | None = None,
    as_: As = None,
) -> int:
    """Time training steps of GPT-2 and Llama 3 beside PyTorch's on this GPU.

    Args:
        keys: Keys of gpt2_triton's configuration, as --fp8.keep_bf16 none.
        steps: Steps per run, at least 6; the first five are not counted.
        baseline: What runs beside gpt2_triton.  torch: PyTorch.  chunks: also with the loss in
            chunks.  muon: also with torch.optim.Muon.  torchao: also with torchao's fp8, tensorwise
            and rowwise.  none: nothing.
        optim: optim.name of gpt2_triton; adamw,muon runs both.
        json: File for the figures of the runs.
    """
    require_directory("json", json)
    works = runs.works(keys, optim)
    _require_gpu("steps")
    if as_:
        require_hopper()
    from benchmarks.speed.steps import compare

    return compare(works, steps, baseline, json, as_)


@app.command
def ops(*keys: Keys, runs: Runs = Runs(), json: Path | None = None, as_: As = None) -> None:
    """Time each operation of a training step, and compare it with its floor on this GPU.

    Args:
        keys: Keys of gpt2_triton's configuration, as --fp8.keep_bf16 none.
        json: File for a list of each step's figures.
    """
    require_directory("json", json)
    works = runs.works(keys)
    _require_gpu("ops")
    execute_as(as_)
    from benchmarks.speed.ops import report

    report(works, json)


@app.command
def sample(*, sizes: str = "d12,llama:1b,d48", target: Target = CURRENT) -> int:
    """Time generated text of GPT-2 and Llama 3 beside transformers' generate on this GPU.

    Args:
        sizes: Comma-separated sizes, as those of steps.
    """
    names = _sizes(sizes, f"{GPT2_SIZES},llama:c768,llama:1b")
    require_directory("out", target.out)
    _require_gpu("sample")
    from benchmarks.speed.sampling import sample as measure

    return measure(names, target)


@app.command
def tune(
    *,
    sizes: str | None = None,
    batch: Annotated[int, AT_LEAST_1] | None = None,
    only: str | None = None,
    out: Path | None = None,
) -> int:
    """Search the kernels' launch parameters for this GPU, and write those that
    gain 2% into the GPU's table.

    Args:
        sizes: Comma-separated sizes: d12, d24, d36, d48; by default all that this GPU can train.
        batch: Sequences per step; by default 64, 64, 32 and 16 for the four sizes,
            or fewer if memory is short.
        only: Comma-separated operations, such as layernorm_fwd, or first words of
            operations, such as attention.
        out: The table to write, a .json file; by default this GPU's table in
            gpt2_triton/kernels/tables.  To use the file in another installation of this version,
            set the variable GPT2_TRITON_TABLE to its path.
    """
    names = _sizes(sizes, GPT2_SIZES) if sizes else None
    if out and out.suffix != ".json":
        raise ConfigError(f"--out: {out} does not end in .json, as a table does")
    require_directory("out", out)
    _require_gpu("tune")
    from benchmarks.tune.search import tune as search

    return search(names, batch, only, out)


def _sizes(sizes: str, known: str) -> list[str]:
    for name in sizes.split(","):
        if name not in known.split(","):
            raise ConfigError(f"--sizes: unknown {name}; known are {known.replace(',', ', ')}")
    return sizes.split(",")


def _require_gpu(command: str) -> None:
    from gpt2_triton import device

    if not device.present():
        raise ConfigError(f"{command}: needs a CUDA GPU, found none")


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
