"""What the record measures on a machine: parts, in groups (`python -m benchmarks.results run`).

Parts are compared within a group, so one GPU measures a group in turn.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import as_gpu
from benchmarks.as_gpu import Code
from benchmarks.record import slug
from benchmarks.speed.sizes import SIZES, Work, work_of
from benchmarks.speed.steps import (
    CHUNKED,
    PYTORCH,
    TORCH_MUON,
    TORCHAO,
    Program,
    ours,
    run_program,
    torchrun,
    within,
)

MULTI_GPU = "benchmarks.speed.multi_gpu"
STEPS = 30  # of a run
FEWEST = 6  # steps of a run that times its first step
LARGE = "d48"
LEVELS = ("none", "gelu+ln", "gelu+ln+qkv:9")
MUON_STEP = 131_072  # tokens of a step with fp32 weights and Muon
RECIPE_STEP = 524_288  # gpt2_124m_fast's
COMPILE_S = {"d12": 60, "d24": 90, "d36": 120, LARGE: 150, "llama:c768": 60, "llama:1b": 60}
FP8 = ("--precision", "fp8", "--recompute", "none")  # of `benchmarks ops` and multi_gpu
FP32_WEIGHTS = ("--optim.master", "fp32", "--train.total_batch_tokens")  # and a number of tokens

Figures = dict[str, Any]
Env = dict[str, str]


class Part(NamedTuple):
    """One measurement.  The keys of its figures are `key`.NAME."""

    key: str
    seconds: int  # about what the measurement takes on an H100
    # takes a limit in seconds and variables of the environment
    measure: Callable[[float, Env], Figures]


# ---- measuring ----


def steps(program: Program, size: str, tokens: int, limit: float, env: Env) -> Figures:
    """Return the figures of a program, or the fact that torchao does not run with this torch."""
    try:
        found = run_program(program, size, SIZES[size].batch, STEPS, limit, env)
    except subprocess.CalledProcessError as error:
        if program not in TORCHAO:
            raise
        return dict(absent=f"exit code {error.returncode}")
    figures = {name: found[name] for name in ("ms", "joules", "gib", "planned") if found.get(name)}
    figures["tok_s"] = 1e3 * tokens / found["ms"]
    return figures | ({"recompute": program.recompute} if program.recompute else {})


def first_step(program: Program, size: str, limit: float, env: Env) -> Figures:
    """Return the seconds from the start of a process to the end of its first step,
    with empty and filled caches.
    """
    runs = [run_program(program, size, SIZES[size].batch, FEWEST, limit, env) for _ in range(2)]
    cold, warm = (found["first_step"] for found in runs)
    return dict(cold_s=cold, warm_s=warm)


def own_first_step(work: Work, gpu: str, limit: float, env: Env) -> Figures:
    """Return `first_step` of this package, the seconds of `compile` without a GPU, and of a
    first step with the cache that it fills.
    """
    end = time.monotonic() + limit
    program = ours(work)
    figures = first_step(program, work.size, limit, env)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(work.config().to_yaml())
        env = env | dict(TRITON_CACHE_DIR=folder)
        gpuless = os.environ | env | dict(CUDA_VISIBLE_DEVICES="")
        begin = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "gpt2_triton", "compile", str(config), "--gpu", gpu],
            check=True,
            timeout=end - begin,
            env=gpuless,
        )
        figures["compile_s"] = time.monotonic() - begin
        rest = end - time.monotonic()
        compiled = run_program(program, work.size, work.batch, FEWEST, rest, env)
    return figures | dict(compiled_s=compiled["first_step"])


def operations(size: str, options: tuple[str, ...], limit: float, env: Env) -> Figures:
    """Return the milliseconds of a step's operations and their floors."""
    found = json_of(["benchmarks", "ops", "--sizes", size, *options], limit, env)[0]
    figures = dict(ms=found["step_ms"], floor_ms=found["floors_ms"])
    figures |= {} if found["joules"] is None else dict(joules=found["joules"])
    for op in found["operations"]:
        figures |= {f"{op['name']}.ms": op["ms"], f"{op['name']}.floor_ms": op["floor_ms"]}
    return figures


def together(size: str, options: list[str], gpus: int, limit: float, env: Env) -> Figures:
    """Return median milliseconds of the kinds of steps (multi_gpu.py), alone those of each GPU and
    of the slowest too, and the tokens/s of all GPUs together.
    """
    ranks = json_of([*torchrun(gpus), MULTI_GPU, size, *options], limit, env)["ranks"]
    medians = {
        kind: statistics.median(ms for rank in ranks for ms in rank[kind]) for kind in ranks[0]
    }
    figures: Figures = {f"{slug(kind)}_ms": ms for kind, ms in medians.items()}
    alone = [round(statistics.median(rank["alone"]), 3) for rank in ranks]
    figures |= dict(slowest_ms=max(alone), each_ms=alone, batch=SIZES[size].batch)
    return figures | dict(tok_s=1e3 * gpus * tokens_of(size) / medians["together"])


def json_of(module: list[str], limit: float, env: Env) -> Any:
    """Run a module with --json FILE, and return the content of the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        subprocess.run(
            [*within(limit), *module, "--json", str(file)], check=True, env=os.environ | env
        )
        return json.loads(file.read_text())


def tokens_of(size: str) -> int:
    return work_of(size).config().train.step_tokens


def part(key: str, seconds: int, measure: Callable[..., Figures], *words: Any) -> Part:
    return Part(key, seconds, lambda limit, env: measure(*words, limit, env))


# ---- groups ----


def timed(kind: str, size: str, arm: str, program: Program, more: int = 0, tokens: int = 0) -> Part:
    """Return the steps of a program; `more`: seconds beside those of any program."""
    seconds = (12 if size == "d12" else 20) + more
    tokens = tokens or tokens_of(size)
    return part(f"{kind}.{slug(size)}.{arm}", seconds, steps, program, size, tokens)


def fp8(size: str, *keys: str, level: str = "none", optim: str = "adamw") -> Program:
    return ours(work_of(size, None, level, "fp8", optim, keys))


def ops(size: str, arm: str, seconds: int) -> Part:
    options = FP8 if arm == "fp8" else ()
    return part(f"ops.{slug(size)}.{arm}", seconds, operations, size, options)


def first_steps(size: str, gpu: str) -> list[Part]:
    works = dict(fp8=work_of(size, None, "none", "fp8"), bf16=work_of(size))
    own = [
        part(f"first_step.{size}.{arm}", 60, own_first_step, work, gpu)
        for arm, work in works.items()
    ]
    return [*own, part(f"first_step.{size}.torch", 90, first_step, PYTORCH, size)]


def whole_steps(size: str) -> list[Part]:
    """Return steps in bf16 and in fp8, and PyTorch's."""
    return [
        timed("steps", size, "bf16", ours(work_of(size)), 12),
        timed("steps", size, "fp8", fp8(size), 8),
        timed("steps", size, "torch", PYTORCH, COMPILE_S[size]),
    ]


def variants(size: str) -> list[Part]:
    """Return steps with Muon, and in fp8 with the head in bf16."""
    return [
        timed("peer", size, "muon", ours(work_of(size, optim="muon")), 4),
        timed("steps", size, "fp8_head", fp8(size, "--fp8.keep_bf16", "head"), 4),
    ]


def peers(size: str, *programs: Program) -> list[Part]:
    return [timed("peer", size, slug(each.name), each, 70) for each in (*programs, *TORCHAO)]


def muon_steps(size: str) -> list[Part]:
    """Return steps of MUON_STEP tokens with fp32 weights and Muon."""
    keys = (*FP32_WEIGHTS, str(MUON_STEP))
    words = ("--weights", "fp32", "--micro_steps", str(MUON_STEP // tokens_of(size)))
    torch = TORCH_MUON._replace(arguments=(*TORCH_MUON.arguments, *words))
    return [
        timed("muon", size, "bf16", ours(work_of(size, optim="muon", keys=keys)), 15, MUON_STEP),
        timed("muon", size, "fp8", fp8(size, *keys, optim="muon"), 15, MUON_STEP),
        timed("muon", size, "torch", torch, 80, MUON_STEP),
    ]


def parts_of(sizes: list[str], gpu: str) -> list[list[Part]]:
    """Return groups of parts, the most important first.  Only the first size has all groups."""
    first, *others = sizes
    rest = [[*whole_steps(size), *(variants(size) if size == LARGE else ())] for size in others]
    recipe = fp8(first, *FP32_WEIGHTS, str(RECIPE_STEP))
    return [
        [
            *first_steps(first, gpu),
            *whole_steps(first),
            timed("recipe_step", first, "fp8", recipe, 25, RECIPE_STEP),
            *variants(first),
            *(timed("levels", first, slug(each), fp8(first, level=each), 6) for each in LEVELS),
            *peers(first, CHUNKED),
        ],
        *rest[:1],
        [*whole_steps("llama:1b"), ops("llama:1b", "bf16", 60), *peers("llama:1b")],
        muon_steps(first),
        [ops(first, "bf16", 35), ops(first, "fp8", 35)],
        [ops(LARGE, "fp8", 60)] if LARGE in sizes else [],
        *rest[1:],
        whole_steps("llama:c768"),
    ]


def joint_parts(sizes: list[str], gpus: int) -> list[Part]:
    """Return the parts for which all GPUs train together, the most important first."""
    first = sizes[0]
    large = [LARGE] if LARGE in sizes[1:] else []
    muon = ("--optim", "muon")
    arms = dict(fp8=FP8, bf16=(), fp8_muon=(*FP8, *muon), bf16_muon=muon, torch=("--torch",))

    def joint(size: str, arm: str, seconds: int) -> Part:
        options = [*arms[arm], "--steps", "20" if size == first else "8"]
        return part(f"multi.{slug(size)}.{arm}", seconds, together, size, options, gpus)

    started = fp8(first)._replace(launcher=torchrun(gpus))
    return [
        # first: with an empty cache
        part(f"multi_first_step.{first}", 35, first_step, started, first),
        *(joint(size, arm, 40) for arm in ("fp8", "bf16") for size in (first, *large)),
        joint(first, "fp8_muon", 40),
        joint(first, "torch", 75),
        *(joint("llama:1b", arm, 45) for arm in ("bf16", "fp8")),
        joint(first, "bf16_muon", 40),
        *(joint(size, arm, 55) for size in large for arm in ("fp8_muon", "bf16_muon")),
        *(joint(size, "torch", 220) for size in large),  # torch.compile
    ]


def parts_as(code: Code, sizes: list[str]) -> list[list[Part]]:
    """Return the parts for the code of another GPU: of this package alone, at recompute
    level `none`, and fp8 where Hopper has its products.
    """

    def group(size: str) -> list[Part]:
        arms = ["bf16"] if code in as_gpu.KEYS else ["bf16", "fp8"]
        works = {arm: work_of(size, None, "none", arm) for arm in arms}
        timed = [
            part(f"steps.{size}.{arm}", 45, steps, ours(work, code), size, tokens_of(size))
            for arm, work in works.items()
        ]
        options = ("--as", code, "--recompute", "none")
        return [*timed, part(f"ops.{size}.bf16", 90, operations, size, options)]

    return [group(size) for size in sizes]
