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
commit, torch or Triton has changed, it empties a section first.  benchmarks/parts.py has the parts.
Several GPUs take groups of them from one queue, each with its share of the CPUs; then all of them
train together.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import as_gpu, pages, pictures
from benchmarks.as_gpu import Code
from benchmarks.losses import pairs
from benchmarks.parts import Env, Figures, Part, joint_parts, parts_as, parts_of
from benchmarks.record import RECORD, ROOT, commit_of_code, read, slug
from benchmarks.speed.sizes import MODELS
from gpt2_triton import device
from gpt2_triton.commands.app import main, make_app, require_directory
from gpt2_triton.errors import ConfigError, DataError
from gpt2_triton.files import write_json
from gpt2_triton.version import installed

KINDS = "steps,recipe_step,first_step,ops,peer,muon,levels,multi,multi_first_step"
JOINT = {"multi", "multi_first_step"}
app = make_app("python -m benchmarks.results", "The record of figures, docs/results/current.json.")


def machine(commit: str) -> tuple[str, dict[str, Any]]:
    """Return the name of this machine's section for one GPU, and its
    meta with the number of GPUs.
    """
    if not device.present():
        raise ConfigError("run: needs a CUDA GPU, found none")
    import torch

    from benchmarks.speed.energy import power_limit

    gpu = device.name()
    gpus = device.count()
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
        self.out = out
        self.end = end
        self.record = read(out)
        self.failed = 0
        self.lock = threading.Lock()
        self.caches = tempfile.TemporaryDirectory()

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
        todo = iter(groups)
        cpus = sorted(os.sched_getaffinity(0))
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
        begin = time.monotonic()
        kind, size, *_ = part.key.split(".")
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
                rounded = float(f"{value:.5g}") if isinstance(value, float) else value
                section[f"{part.key}.{key}"] = rounded
            filled = {name: each for name, each in self.record.items() if len(each) > 1}
            write_json(self.out, filled)
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
    kinds = parts.split(",")
    names = sizes.split(",")
    unknown = {*kinds, *names} - {*KINDS.split(","), *MODELS}
    if unknown:
        raise ConfigError(
            f"{min(unknown)}: unknown part or size; known are {KINDS},{','.join(MODELS)}"
        )
    require_directory("out", out)
    name, meta = machine(commit or commit_of_code())
    if as_:
        name, meta = executed(as_, name, meta)
    gpus = meta["gpus"]
    measuring = Measuring(out, time.monotonic() + seconds)
    one: Figures = {}
    several: Figures = {}
    if {*kinds} - JOINT:
        one = measuring.section(name, meta | dict(gpus=1))
    if gpus > 1 and {*kinds} & JOINT:
        several = measuring.section(f"{name}x{gpus}", meta)
    asked = parts_as(as_, names) if as_ else parts_of(names, name)
    groups = [group for parts in asked if (group := missing(parts, kinds, one))]
    joint = missing(joint_parts(names, gpus), kinds, several) if gpus > 1 else []
    for group in [*groups, *([joint] if joint else ())]:
        print(*(f"{part.key} {part.seconds} s" for part in group), sep=", ")
    alone_s = sum(part.seconds for group in groups for part in group)
    joint_s = sum(part.seconds for part in joint)
    print(f"about {alone_s / gpus + joint_s:.0f} s on {gpus} GPUs", flush=True)
    if not plan:
        every = ",".join(map(str, range(gpus)))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
        each = [dict(CUDA_VISIBLE_DEVICES=gpu) for gpu in visible]
        measuring.queue(groups, one, each, measuring.end - joint_s)
        measuring.queue([joint], several, [{}], measuring.end)
    return measuring.failed


def missing(parts: list[Part], kinds: list[str], section: Figures) -> list[Part]:
    """Return the parts of these kinds of which a section has no figure."""
    asked = [part for part in parts if part.key.partition(".")[0] in kinds]
    return [part for part in asked if not any(key.startswith(f"{part.key}.") for key in section)]


# ---- the record ----


@app.command(name="losses")
def write_losses() -> None:
    """Fill the section of losses from benchmarks/losses/*.jsonl."""
    write_json(RECORD, read() | {"losses": losses()})


def losses() -> dict[str, Any]:
    """Return the section of losses: each arm's means, and its mean differences from
    another arm with 95% intervals.
    """
    found = dict[str, Any]()
    devices = set[str]()
    commits = set[str]()
    for file in sorted(pictures.LOSSES.glob("*.jsonl")):
        series = pairs.read_series(file.with_suffix(".yaml"))
        rows = pairs.read_results(file)
        devices |= {row["device"] for row in rows}
        commits |= {row["commit"][:7] for row in rows if row["commit"]}
        for arm in dict.fromkeys(row["arm"] for row in rows):
            key = f"{file.stem}.{slug(arm)}"
            mine = [row for row in rows if row["arm"] == arm]
            found[f"arms.{key}.runs"] = len(mine)
            timed = [row["ms"] for row in mine if row["ms"]]
            if file.stem.startswith("minutes") and timed:  # these runs had a GPU each
                ms = statistics.fmean(timed)
                found[f"arms.{key}.minutes"] = round(mine[0]["steps"] * ms / 60e3, 4)
            for name in ("train", "val"):
                values = [row[f"{name}_loss"] for row in mine]
                found[f"arms.{key}.{name}"] = round(statistics.fmean(values), 5)
                pair = pairs.difference(rows, arm, series.against(arm), f"{name}_loss")
                if pair and pair.half_width is not None:
                    found[f"pairs.{key}.{name}.mean"] = round(pair.mean, 5)
                    found[f"pairs.{key}.{name}.half_width"] = round(pair.half_width, 5)
                    found[f"pairs.{key}.{name}.pairs"] = pair.pairs
    meta = dict(files="benchmarks/losses/*.jsonl")
    return {"meta": meta | dict(devices=sorted(devices), commits=sorted(commits))} | found


@app.command
def render(*, check: bool = False) -> int:
    """Fill the markers of pages and recipes, and draw the pictures.

    Args:
        check: Change nothing; exit with 1 if something would change.
    """
    record = read()
    changed = list[str]()
    errors = list[str]()
    for path in pages.files():
        name = path.relative_to(ROOT)
        old = path.read_text(encoding="utf-8")
        try:
            new = pages.render(old, record, name)
        except DataError as error:
            errors.append(f"error: {error}")
            continue
        changed += [f"{name}: other figures"] if old != new else []
        if not check:
            path.write_text(new, encoding="utf-8")
    changed += pictures.draw(record, check)
    print("\n".join([*changed, *errors]) or "nothing changes")
    return int(bool(errors or (check and changed)))


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
