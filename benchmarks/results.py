"""Measures the record of figures, docs/results/current.json, and renders it into
pages, recipes and pictures.

    python -m benchmarks.results run [--parts steps,ops] [--sizes d12,d48] [--seconds 540] [--plan]
    python -m benchmarks.results losses
    python -m benchmarks.results render [--check]

The record has a section for each kind of machine (h100, or h100x2 for two GPUs), for each code that
it executed for another GPU (h100_sm_80_code, by `run --as a100`), and one for losses
(benchmarks/losses).  A section holds `meta`, which describes machine and commit, and figures such
as steps.d12.fp8.ms.  benchmarks/pages.py explains the markers that `render` fills.

`run` measures the missing figures of this machine's sections, and writes each part at once.  If the
commit, torch or Triton has changed, it empties a section first.  Parts are compared within a group,
so one GPU measures a group in turn.  Several GPUs take groups from one queue, each with its share
of the CPUs; then all of them train together.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import as_gpu, pages, pictures
from benchmarks.as_gpu import Code
from benchmarks.losses import pairs
from benchmarks.speed.sizes import MODELS, SIZES, Work, work_of
from benchmarks.speed.steps import (
    CHUNKED,
    PYTORCH,
    TORCHAO,
    Program,
    ours,
    run_program,
    torchrun,
    within,
)
from gpt2_triton import device
from gpt2_triton.commands.app import main, make_app, require_directory
from gpt2_triton.errors import ConfigError, DataError
from gpt2_triton.files import write_json
from gpt2_triton.version import installed

RECORD = pages.ROOT / "docs" / "results" / "current.json"
MEASURED = ("gpt2_triton", "benchmarks/speed")  # a section names the last commit of this code
KINDS = "steps,recipe_step,first_step,ops,peer,muon,levels,multi,multi_first_step"
MULTI_GPU = "benchmarks.speed.multi_gpu"
STEPS, FEWEST = 30, 6  # steps of a run; steps of a run that times its first step
LEVELS = ("none", "gelu+ln", "gelu+ln+qkv:9")
# tokens of steps with fp32 weights: with Muon, and gpt2_124m_fast's
MUON_STEP, RECIPE_STEP = 131_072, 524_288
FP8 = ("--precision", "fp8", "--recompute", "none")  # of `benchmarks ops` and multi_gpu
FP32_WEIGHTS = ("--optim.master", "fp32", "--train.total_batch_tokens")  # and a number of tokens

Figures = dict[str, Any]
Env = dict[str, str]
app = make_app("python -m benchmarks.results", "The record of figures, docs/results/current.json.")


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
    cold, warm = (
        run_program(program, size, SIZES[size].batch, FEWEST, limit, env) for _ in range(2)
    )
    return dict(cold_s=cold["first_step"], warm_s=warm["first_step"])


def own_first_step(work: Work, gpu: str, limit: float, env: Env) -> Figures:
    """Return `first_step` of this package, the seconds of `compile` without a GPU, and of a
    first step with the cache that it fills.
    """
    program, end = ours(work), time.monotonic() + limit
    figures = first_step(program, work.size, limit, env)
    with tempfile.TemporaryDirectory() as folder:
        config, env = Path(folder) / "config.yaml", env | dict(TRITON_CACHE_DIR=folder)
        config.write_text(work.config().to_yaml())
        begin, gpuless = time.monotonic(), os.environ | env | dict(CUDA_VISIBLE_DEVICES="")
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


def parts_of(sizes: list[str], gpu: str) -> list[list[Part]]:
    """Return groups of parts, the most important first.  Only the first size has all groups."""
    first, compile_s = sizes[0], dict(d12=60, d24=90, d36=120, d48=150)  # torch.compile

    def step(
        kind: str, size: str, arm: str, program: Program, more: int = 0, tokens: int = 0
    ) -> Part:
        seconds = (12 if size == "d12" else 20) + more
        return part(
            f"{kind}.{slug(size)}.{arm}", seconds, steps, program, size, tokens or tokens_of(size)
        )

    def fp8(size: str, *keys: str, level: str = "none", optim: str = "adamw") -> Program:
        return ours(work_of(size, None, level, "fp8", optim, keys))

    def group(size: str) -> list[Part]:
        ends, recipe = size in (first, "d48"), fp8(size, *FP32_WEIGHTS, str(RECIPE_STEP))
        found = [
            step("steps", size, "bf16", ours(work_of(size)), more=0 if size == first else 12),
            *(
                [step("peer", size, "muon", ours(work_of(size, optim="muon")), more=4)]
                if ends
                else ()
            ),
            step("steps", size, "fp8", fp8(size), more=8),
            *(
                [part(f"first_step.{size}.torch", 90, first_step, PYTORCH, size)]
                if size == first
                else ()
            ),
            step("steps", size, "torch", PYTORCH, compile_s[size]),
            *([step("recipe_step", size, "fp8", recipe, 25, RECIPE_STEP)] if size == first else ()),
            *(
                [step("steps", size, "fp8_head", fp8(size, "--fp8.keep_bf16", "head"), more=4)]
                if ends
                else ()
            ),
        ]
        works = dict(fp8=work_of(size, None, "none", "fp8"), bf16=work_of(size))
        own = [
            part(f"first_step.{size}.{arm}", 60, own_first_step, work, gpu)
            for arm, work in works.items()
        ]
        return [*(own if size == first else ()), *found]

    def peers(size: str, *programs: Program) -> list[Part]:
        return [
            step("peer", size, slug(program.name), program, 70) for program in (*programs, *TORCHAO)
        ]

    def muon(arm: str, program: Program, more: int) -> Part:
        program = program._replace(arguments=(*program.arguments, *FP32_WEIGHTS, str(MUON_STEP)))
        return step("muon", first, arm, program, more, MUON_STEP)

    words = (
        "--optim",
        "muon",
        "--weights",
        "fp32",
        "--micro_steps",
        str(MUON_STEP // tokens_of(first)),
    )
    torch_muon = PYTORCH._replace(name="PyTorch muon", arguments=words)
    d, *rest = (group(size) for size in sizes)
    levels = (step("levels", first, slug(level), fp8(first, level=level), 6) for level in LEVELS)
    return [
        [*d, *levels, *peers(first, CHUNKED)],
        *rest[:1],
        [
            step("steps", "llama:1b", "bf16", ours(work_of("llama:1b")), 15),
            step("steps", "llama:1b", "fp8", fp8("llama:1b"), 15),
            step("steps", "llama:1b", "torch", PYTORCH, 60),
            part("ops.llama_1b.bf16", 60, operations, "llama:1b", ()),
            *peers("llama:1b"),
        ],
        [
            muon("bf16", ours(work_of(first, optim="muon")), 15),
            muon("fp8", fp8(first, optim="muon"), 15),
            step("muon", first, "torch", torch_muon, 80, MUON_STEP),
        ],
        [
            part(f"ops.{first}.bf16", 35, operations, first, ()),
            part(f"ops.{first}.fp8", 35, operations, first, FP8),
        ],
        [part("ops.d48.fp8", 60, operations, "d48", FP8)] if "d48" in sizes else [],
        *rest[1:],
        [
            step("steps", "llama:c768", "bf16", ours(work_of("llama:c768")), 15),
            step("steps", "llama:c768", "fp8", fp8("llama:c768"), 15),
            step("steps", "llama:c768", "torch", PYTORCH, 60),
        ],
    ]


def joint_parts(sizes: list[str], gpus: int) -> list[Part]:
    """Return the parts for which all GPUs train together, the most important first."""
    first, muon = sizes[0], ("--optimizer", "muon")
    arms = dict(fp8=FP8, bf16=(), fp8_muon=(*FP8, *muon), bf16_muon=muon, torch=("--torch",))

    def joint(size: str, arm: str, seconds: int) -> Part:
        steps = "20" if size == first else "8"
        return part(
            f"multi.{slug(size)}.{arm}",
            seconds,
            together,
            size,
            [*arms[arm], "--steps", steps],
            gpus,
        )

    started = ours(work_of(first, None, "none", "fp8"))._replace(launcher=torchrun(gpus))
    large = [size for size in sizes[1:] if size == "d48"]
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


def commit_of_code() -> str:
    """Return the last commit that changed the measured code; a commit that changes
    pages only does not count.
    """

    def git(*words: str) -> str:
        command = ["git", *words, "--", *MEASURED]
        return subprocess.run(
            command, cwd=pages.ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        changed, commit = git("status", "--porcelain", "-uno"), git("log", "-1", "--format=%h")
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            "--commit: git finds no checkout here; name the commit of the code"
        ) from None
    if changed or not commit:
        raise ConfigError(
            f"{' or '.join(MEASURED)}: uncommitted changes; commit them, "
            "the record names the commit"
        )
    return commit


def machine(commit: str) -> tuple[str, dict[str, Any]]:
    """Return the name of this machine's section for one GPU, and its
    meta with the number of GPUs.
    """
    if not device.present():
        raise ConfigError("run: needs a CUDA GPU, found none")
    import torch

    from benchmarks.speed.energy import power_limit

    gpu, gpus = device.name(), device.count()
    kinds = [
        key for key, known in device.GPUS.items() if device.is_called(gpu, *known.device_names)
    ]
    if not kinds:
        raise ConfigError(
            f"{gpu}: not among GPUS in gpt2_triton/device.py; add it there under the section's name"
        )
    meta = dict(
        commit=commit, date=str(date.today()), gpu=gpu, gpus=gpus, power_limit_w=power_limit()
    )
    meta |= dict(torch=torch.__version__, triton=installed("triton"), python=sys.version.split()[0])
    return kinds[0], meta | dict(command="python -m benchmarks.results run")


def executed(code: Code, name: str, meta: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the section and the meta of another GPU's code on one GPU of this machine."""
    as_gpu.require_hopper()
    title = as_gpu.title(code)
    meta |= dict(gpu=f"{title} on {meta['gpu']}", gpus=1, command=f"{meta['command']} --as {code}")
    return f"{name}_{slug(title)}", meta


class Measuring:
    """One run of parts, which writes the record after each."""

    def __init__(self, out: Path, end: float):
        self.out, self.end, self.record, self.failed = out, end, read(out), 0
        self.lock, self.caches = threading.Lock(), tempfile.TemporaryDirectory()

    def section(self, name: str, meta: dict[str, Any]) -> dict[str, Any]:
        """Return a section of the record, emptied if its commit or a version is another."""
        old = self.record.get(name, {}).get("meta", {})
        if any(old.get(key) != meta[key] for key in ("commit", "torch", "triton")):
            self.record[name] = {"meta": meta}
        return self.record[name]

    def queue(
        self, groups: list[list[Part]], section: dict[str, Any], envs: list[Env], end: float
    ) -> None:
        """Measure groups until `end`, with a worker for each of the environments."""
        todo, cpus = iter(groups), sorted(os.sched_getaffinity(0))
        share = len(cpus) // len(envs)

        def work(i: int) -> None:
            # of this thread and its processes
            os.sched_setaffinity(0, cpus[i * share : (i + 1) * share])
            while group := next(todo, None):
                for each in group:
                    self.measure(each, section, envs[i], end)

        with ThreadPoolExecutor(len(envs)) as pool:
            try:
                list(pool.map(work, range(len(envs))))
            except KeyboardInterrupt:
                self.end = 0.0  # the workers leave the rest
                raise

    def measure(self, part: Part, section: dict[str, Any], env: Env, end: float) -> None:
        begin, (kind, size, *_) = time.monotonic(), part.key.split(".")
        caches = f"{self.caches.name}/{part.key if 'first_step' in kind else size}"
        if begin + part.seconds > min(end, self.end):
            print(
                f"{part.key}: left for another run, because it takes about {part.seconds} s",
                flush=True,
            )
            return
        env = env | dict(
            TRITON_CACHE_DIR=f"{caches}/triton", TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor"
        )
        try:
            found = part.measure(min(self.end - begin, 60 + 3 * part.seconds), env)
        except (subprocess.SubprocessError, OSError, LookupError, ValueError) as error:
            print(f"{part.key}: failed: {error}", file=sys.stderr, flush=True)
            self.failed = 1
            return
        with self.lock:
            for key, value in found.items():
                section[f"{part.key}.{key}"] = (
                    float(f"{value:.5g}") if isinstance(value, float) else value
                )
            write_json(
                self.out,
                {name: figures for name, figures in self.record.items() if len(figures) > 1},
            )
        print(f"{part.key}: {time.monotonic() - begin:.0f} s", flush=True)


@app.command
def run(
    *,
    out: Path = RECORD,
    parts: str = KINDS,
    sizes: str = "d12,d48,d24,d36",
    seconds: float = 86_400,
    commit: str = "",
    plan: bool = False,
    as_: Code | None = None,
) -> int:
    """Measure the missing figures of this machine's sections; return 1 if a part failed.

    Args:
        out: The record; a part that it has is not measured again, so
            name another file to repeat one.
        parts: Comma-separated kinds of figures to measure.
        sizes: Comma-separated sizes of GPT-2; the first size has all parts.
        seconds: Time limit; a part that would exceed it is left for another run.
        commit: Commit of the code; give it where there is no git checkout.
        plan: Print the missing parts and about how many seconds they take, and measure nothing.
        as_: Measure this GPU's code, executed on a Hopper GPU, in a section of its own.
    """
    kinds, names = parts.split(","), sizes.split(",")
    if unknown := {*kinds, *names} - {*KINDS.split(","), *MODELS}:
        raise ConfigError(
            f"{min(unknown)}: unknown part or size; known are {KINDS},{','.join(MODELS)}"
        )
    require_directory("out", out)
    name, meta = machine(commit or commit_of_code())
    if as_:
        name, meta = executed(as_, name, meta)
    gpus, measuring = meta["gpus"], Measuring(out, time.monotonic() + seconds)
    one = (
        measuring.section(name, meta | dict(gpus=1))
        if {*kinds} - {"multi", "multi_first_step"}
        else {}
    )
    several = (
        measuring.section(f"{name}x{gpus}", meta)
        if gpus > 1 and {*kinds} & {"multi", "multi_first_step"}
        else {}
    )

    def missing(group: list[Part], section: dict[str, Any]) -> list[Part]:
        todo = [part for part in group if part.key.partition(".")[0] in kinds]
        return [part for part in todo if not any(key.startswith(f"{part.key}.") for key in section)]

    asked = parts_as(as_, names) if as_ else parts_of(names, name)
    groups = [group for parts in asked if (group := missing(parts, one))]
    joint = missing(joint_parts(names, gpus), several) if gpus > 1 else []
    for group in [*groups, *([joint] if joint else ())]:
        print(*(f"{part.key} {part.seconds} s" for part in group), sep=", ")
    reserve, work = (
        sum(part.seconds for part in joint),
        sum(part.seconds for group in groups for part in group),
    )
    print(f"about {work / gpus + reserve:.0f} s on {gpus} GPUs", flush=True)
    if not plan:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
        each = [dict(CUDA_VISIBLE_DEVICES=gpu) for gpu in visible]
        measuring.queue(groups, one, each, measuring.end - reserve)
        measuring.queue([joint], several, [{}], measuring.end)
    return measuring.failed


# ---- the record ----


def read(path: Path = RECORD) -> pages.Record:
    return dict(json.loads(path.read_text())) if path.exists() else {}


@app.command(name="losses")
def write_losses() -> None:
    """Fill the section of losses from benchmarks/losses/*.jsonl."""
    write_json(RECORD, read() | {"losses": losses()})


def losses() -> dict[str, Any]:
    """Return the section of losses: each arm's means, and its mean differences from
    another arm with 95% intervals.
    """
    found, devices, commits = dict[str, Any](), set(), set()
    for file in sorted(pictures.LOSSES.glob("*.jsonl")):
        series, rows = pairs.read_series(file.with_suffix(".yaml")), pairs.read_results(file)
        devices |= {row["device"] for row in rows}
        commits |= {row["commit"][:7] for row in rows if row["commit"]}
        for arm in dict.fromkeys(row["arm"] for row in rows):
            key, mine = f"{file.stem}.{slug(arm)}", [row for row in rows if row["arm"] == arm]
            found[f"arms.{key}.runs"] = len(mine)
            if file.stem.startswith("minutes"):  # its runs had a GPU each
                ms = statistics.fmean(row["ms"] for row in mine)
                found[f"arms.{key}.minutes"] = round(mine[0]["steps"] * ms / 60e3, 4)
            for name in ("train", "val"):
                values = [row[f"{name}_loss"] for row in mine]
                found[f"arms.{key}.{name}"] = round(statistics.fmean(values), 5)
                pair = pairs.difference(rows, arm, series.against(arm), f"{name}_loss")
                if pair and pair.half_width is not None:
                    value = dict(
                        mean=round(pair.mean, 5),
                        half_width=round(pair.half_width, 5),
                        pairs=pair.pairs,
                    )
                    found |= {
                        f"pairs.{key}.{name}.{part}": number for part, number in value.items()
                    }
    return {
        "meta": dict(
            files="benchmarks/losses/*.jsonl", devices=sorted(devices), commits=sorted(commits)
        )
    } | found


def slug(arm: str) -> str:
    return re.sub(r"\W+", "_", arm).strip("_")


@app.command
def render(*, check: bool = False) -> int:
    """Fill the markers of pages and recipes, and draw the pictures.

    Args:
        check: Change nothing; exit with 1 if something would change.
    """
    record, changed, missing = read(), list[str](), list[str]()
    for path in pages.files():
        name, old = path.relative_to(pages.ROOT), path.read_text(encoding="utf-8")
        try:
            new = pages.render(old, record, name)
        except DataError as error:
            missing.append(f"error: {error}")
            continue
        changed += [f"{name}: other figures"] if old != new else []
        if not check:
            path.write_text(new, encoding="utf-8")
    changed += pictures.draw(record, check)
    print("\n".join([*changed, *missing]) or "nothing changes")
    return int(bool(missing or (check and changed)))


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
