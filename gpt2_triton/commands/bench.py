"""`verify` and `bench`: accuracy and speed beside PyTorch, on this machine."""

from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from gpt2_triton.commands.app import require_at_least, require_directory, select_device
from gpt2_triton.config.schema import check_recompute
from gpt2_triton.errors import ConfigError


def verify() -> int:
    """Compare every kernel with float64 and with PyTorch's own operation on this machine, in one table."""
    select_device()
    if find_spec("benchmarks") is None:
        raise ConfigError("verify: benchmarks/ is not here; run it in the root of a checkout")
    from benchmarks import accuracy as comparison

    return comparison.verify()


def bench(
    *,
    sizes: str = "d12,d24,d36,d48",
    batch: int | None = None,
    steps: int = 30,
    recompute: str | None = None,
    baseline: Literal["torch", "none"] = "torch",
    ops: bool = False,
    tune: bool = False,
    only: str | None = None,
    out: Path | None = None,
    json: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Time GPT-2's training steps beside PyTorch's on this GPU; with --ops, each operation beside its floor; with
    --tune, search the kernels' launch parameters for this GPU and write its table.

    Parameters
    ----------
    sizes: str
        Comma-separated among d12 (124M), d24 (350M), d36 (774M) and d48 (1558M).
    batch: int
        Sequences a step; by default 64, 64, 32 and 16.
    steps: int
        Steps of each run, at least 6; the first five are not counted.  --ops takes 10 after 10.
    recompute: str
        memory.recompute of our runs: none, gelu, gelu+ln, gelu+ln+qkv, block, or as gelu+ln:4 in the first layers only;
        by default gelu for d12, gelu+ln for the others.
    baseline: str
        torch runs PyTorch too, none does not.
    ops: bool
        Time every operation of one step, and print how near its floor it is.
    tune: bool
        Try other blocks, warps and stages, and write the rows that gain 2% into gpt2_triton/kernels/tables.
    only: str
        With --tune: comma-separated operations or families of them, such as attention,layernorm_fwd.
    out: Path
        With --tune: the .json file to write instead.
    json: Path
        File for the figures of the runs.
    plot: Path
        With --ops and one size: a PNG of each operation's time beside its floor.
    """
    from gpt2_triton import device

    wanted = sizes.split(",")
    unknown = [size for size in wanted if size not in ("d12", "d24", "d36", "d48")]
    if unknown:
        raise ConfigError(f"--sizes: unknown {unknown[0]}; known are d12, d24, d36, d48")
    require_at_least(steps=(steps, 6), **({"batch": (batch, 1)} if batch is not None else {}))
    _require_level(recompute, wanted)
    if plot and (not ops or len(wanted) > 1):
        raise ConfigError("--plot: goes with --ops and one size, as in --ops --sizes d12 --plot ops.png")
    if json and ops:
        raise ConfigError("--json: does not go with --ops")
    if tune:
        _refuse(
            "--tune",
            ops=ops,
            json=json,
            plot=plot,
            recompute=recompute,
            steps=steps != 30,
            baseline=baseline != "torch",
        )
    elif only or out:
        raise ConfigError(f"--{'only' if only else 'out'}: goes with --tune")
    if out and out.suffix != ".json":
        raise ConfigError(f"--out: {out} does not end in .json, as a table does")
    require_directory("json", json)
    require_directory("plot", plot)
    require_directory("out", out)
    if not device.present():
        raise ConfigError("bench: needs a CUDA GPU, found none")
    if find_spec("benchmarks") is None:
        raise ConfigError("bench: benchmarks/ is not here; run it in the root of a checkout")
    if tune:
        from benchmarks import tune as search

        return search.tune(wanted, batch, only, out)
    if ops:
        from benchmarks import ops as operations

        for size in wanted:
            operations.report(size, batch, recompute, plot)
        return 0
    from benchmarks import step_time as steps_of_sizes

    return steps_of_sizes.bench(wanted, batch, steps, recompute, baseline == "torch", json)


def _refuse(beside: str, **given: object) -> None:
    """Refuse the first of the options that was given."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name}: does not go with {beside}")


def _require_level(recompute: str | None, sizes: list[str]) -> None:
    """One level for these sizes, whose names say how many layers they have."""
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
