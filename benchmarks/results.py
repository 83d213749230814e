"""Measures the record of figures, docs/results/current.json, and renders it into pages, recipes and pictures.

    python -m benchmarks.results run [--parts steps,ops] [--sizes d12,d48] [--seconds 540]
    python -m benchmarks.results losses
    python -m benchmarks.results render [--check]

The record has a section for each kind of machine (h100, or h100x2 for two GPUs), and one for losses
(benchmarks/losses).  A section holds `meta`, which describes machine and commit, and figures such as steps.d12.fp8.ms.
benchmarks/pages.py explains the markers that `render` fills.

`run` measures the missing figures of this machine's section, and writes each part at once.  If the commit has changed,
it empties the section first.  On several GPUs `run` times joint training; CUDA_VISIBLE_DEVICES=0 selects a single GPU.
"""

import importlib.util
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import pages, pictures
from benchmarks.losses import pairs
from benchmarks.speed.sizes import MODELS, T, work_of
from benchmarks.speed.steps import PYTORCH, TORCH_MUON, TORCHAO, Program, ours, run_program
from gpt2_triton import device
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.errors import ConfigError, DataError
from gpt2_triton.version import installed

RECORD = pages.ROOT / "docs" / "results" / "current.json"
MEASURED = ("gpt2_triton", "benchmarks/speed")  # a section names the last commit of this code
KINDS = "steps,first_step,ops,peer,first_step_torch,multi"
MULTI_GPU, TORCH_DDP = "benchmarks.speed.multi_gpu", "benchmarks.speed.torch_ddp"
BATCH_OF_TWO = {"d24": 32, "d36": 16, "d48": 8}  # sequences with which two models fit into 80 GB
STEPS, FEWEST = 30, 6  # steps of a run; steps of a run that times its first step

Figures = dict[str, Any]
app = make_app("python -m benchmarks.results", "The record of figures, docs/results/current.json.")


class Part(NamedTuple):
    """One measurement.  The keys of its figures are `key`.NAME."""

    key: str
    seconds: int  # the most that the measurement takes
    measure: Callable[[float], Figures]  # takes a limit in seconds


# ---- measuring ----


def steps(program: Program, size: str, limit: float) -> Figures:
    found = run_program(program, size, MODELS[size].batch, STEPS, limit)
    figures = {name: found[name] for name in ("ms", "joules", "gib", "planned") if found.get(name)}
    figures["tok_s"] = 1e3 * MODELS[size].batch * T / found["ms"]
    return figures | ({"recompute": program.recompute} if program.recompute else {})


def first_step(program: Program, size: str, limit: float) -> Figures:
    """Return the seconds from the start of a process to the end of its first step, with empty and filled caches."""
    with tempfile.TemporaryDirectory() as cache:
        caches = dict(TRITON_CACHE_DIR=f"{cache}/triton", TORCHINDUCTOR_CACHE_DIR=f"{cache}/inductor")
        cold, warm = (run_program(program, size, MODELS[size].batch, FEWEST, limit, **caches) for _ in range(2))
    return dict(cold_s=cold["first_step"], warm_s=warm["first_step"])


def operations(size: str, options: list[str], limit: float) -> Figures:
    """Return the milliseconds of a step's operations and their floors."""
    found = json_of(["benchmarks", "ops", "--sizes", size, *options], limit)[0]
    figures = dict(ms=found["step_ms"], floor_ms=found["floors_ms"])
    figures |= {} if found["joules"] is None else dict(joules=found["joules"])
    for op in found["operations"]:
        figures |= {f"{op['name']}.ms": op["ms"], f"{op['name']}.floor_ms": op["floor_ms"]}
    return figures


def together(module: str, size: str, options: list[str], batch: int, gpus: int, limit: float) -> Figures:
    """Return median milliseconds of the three kinds of steps (multi_gpu.py), and the tokens/s of all GPUs together."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}", "-m", module]
    ranks = json_of([*launcher, size, *options], limit)["ranks"]
    medians = {kind: statistics.median(ms for rank in ranks for ms in rank[kind]) for kind in ranks[0]}
    figures = {f"{slug(kind)}_ms": ms for kind, ms in medians.items()}
    return figures | dict(batch=batch, tok_s=1e3 * gpus * batch * T / medians["together"])


def json_of(module: list[str], limit: float) -> Any:
    """Run a module with --json FILE, and return the content of the file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        subprocess.run([sys.executable, "-m", *module, "--json", str(file)], check=True, timeout=limit)
        return json.loads(file.read_text())


def parts_of(sizes: list[str], gpus: int) -> list[Part]:
    """Return the parts for this number of GPUs, the most important first.  Only the first size has all parts."""
    found, first = list[Part](), sizes[0]

    def add(key: str, seconds: int, measure: Callable[..., Figures], *words: Any) -> None:
        found.append(Part(key, seconds, lambda limit: measure(*words, limit)))

    if gpus > 1:
        for size in sizes:
            batch = BATCH_OF_TWO.get(size, MODELS[size].batch)
            for precision in ("bf16", "fp8"):
                options = ["--precision", precision, "--batch", str(batch)]
                add(f"multi.{size}.{precision}", 120, together, MULTI_GPU, size, options, batch, gpus)
        add(f"multi.{first}.torch", 240, together, TORCH_DDP, first, [], MODELS[first].batch, gpus)
        return found
    for size in sizes:
        slow = 1 if size == "d12" else 2
        add(f"steps.{size}.bf16", 30 * slow, steps, ours(work_of(size)), size)
        add(f"steps.{size}.fp8", 30 * slow, steps, ours(work_of(size, None, "none", "fp8", "none")), size)
        add(f"steps.{size}.torch", 75 * slow, steps, PYTORCH, size)
        add(f"steps.{size}.fp8_head", 30 * slow, steps, ours(work_of(size, precision="fp8")), size)
        if size == first:
            add(f"first_step.{size}", 40, first_step, ours(work_of(size)), size)
    add(f"ops.{first}.bf16", 45, operations, first, [])
    add(f"ops.{first}.fp8", 45, operations, first, ["--precision", "fp8", "--keep_bf16", "none"])
    add(f"peer.{first}.muon", 30, steps, ours(work_of(first, optim="muon")), first)
    add(f"peer.{first}.torch_muon", 75, steps, TORCH_MUON, first)
    for program in TORCHAO if importlib.util.find_spec("torchao") else ():
        add(f"peer.{first}.{slug(program.name)}", 110, steps, program, first)
    add(f"first_step_torch.{first}", 110, first_step, PYTORCH, first)
    return found


def commit_of_code() -> str:
    """Return the last commit that changed the measured code; a commit that changes pages only does not count."""

    def git(*words: str) -> str:
        command = ["git", *words, "--", *MEASURED]
        return subprocess.run(command, cwd=pages.ROOT, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed, commit = git("status", "--porcelain", "-uno"), git("log", "-1", "--format=%h")
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError("--commit: git finds no checkout here; name the commit of the code") from None
    if changed or not commit:
        raise ConfigError(f"{' or '.join(MEASURED)}: uncommitted changes; commit them, the record names the commit")
    return commit


def machine(commit: str) -> tuple[str, dict[str, Any]]:
    """Return the name of this machine's section, and its meta."""
    if not device.present():
        raise ConfigError("run: needs a CUDA GPU, found none")
    import torch

    from benchmarks.speed.energy import power_limit

    gpu, gpus = torch.cuda.get_device_name(), device.count()
    kinds = [key for key, known in device.GPUS.items() if any(part in gpu for part in known.device_names)]
    if not kinds:
        raise ConfigError(f"{gpu}: not among GPUS in gpt2_triton/device.py; add it there under the section's name")
    meta = dict(commit=commit, date=str(date.today()), gpu=gpu, gpus=gpus, power_limit_w=power_limit())
    meta |= dict(torch=torch.__version__, triton=installed("triton"), python=sys.version.split()[0])
    return kinds[0] + (f"x{gpus}" if gpus > 1 else ""), meta | dict(command="python -m benchmarks.results run")


@app.command
def run(
    *, out: Path = RECORD, parts: str = KINDS, sizes: str = "d12,d48", seconds: float = 86_400, commit: str = ""
) -> int:
    """Measure the missing figures of this machine's section; return 1 if a part failed.

    Parameters
    ----------
    out: Path
        The record to continue.
    parts: str
        Comma-separated kinds of figures to measure.
    sizes: str
        Comma-separated sizes; the first size has all parts.
    seconds: float
        Time limit; a part that may exceed it is left for another run.
    commit: str
        Commit of the code; give it where there is no git checkout.
    """
    kinds, names = parts.split(","), sizes.split(",")
    if unknown := {*kinds, *names} - {*KINDS.split(","), *MODELS}:
        raise ConfigError(f"{min(unknown)}: unknown part or size; known are {KINDS},{','.join(MODELS)}")
    end, record, failed = time.monotonic() + seconds, read(out), 0
    name, meta = machine(commit or commit_of_code())
    section = record.get(name, {})
    if section.get("meta", {}).get("commit") != meta["commit"]:
        section = record[name] = {"meta": meta}
    for part in parts_of(names, meta["gpus"]):
        begin = time.monotonic()
        if part.key.partition(".")[0] not in kinds or any(key.startswith(f"{part.key}.") for key in section):
            continue
        if begin + part.seconds > end:
            print(f"{part.key}: left for another run, because it may take {part.seconds} s", flush=True)
            continue
        try:
            found = part.measure(end - begin)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{part.key}: failed: {error}", file=sys.stderr, flush=True)
            failed = 1
            continue
        for key, value in found.items():
            section[f"{part.key}.{key}"] = float(f"{value:.5g}") if isinstance(value, float) else value
        write(record, out)
        print(f"{part.key}: {time.monotonic() - begin:.0f} s", flush=True)
    return failed


# ---- the record ----


def read(path: Path = RECORD) -> pages.Record:
    found: pages.Record = json.loads(path.read_text()) if path.exists() else {}
    return found


def write(record: pages.Record, path: Path = RECORD) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


@app.command(name="losses")
def write_losses() -> None:
    """Fill the section of losses from benchmarks/losses/*.jsonl."""
    write(read() | {"losses": losses()})


def losses() -> dict[str, Any]:
    """Return the section of losses: each arm's means, and its mean differences from another arm with 95% intervals."""
    found: dict[str, Any] = {}
    devices, commits = set(), set()
    for file in sorted(pictures.LOSSES.glob("*.jsonl")):
        series, rows = pairs.read_series(file.with_suffix(".yaml")), pairs.read_results(file)
        devices |= {row["device"] for row in rows}
        commits |= {row["commit"][:7] for row in rows if row["commit"]}
        for arm in dict.fromkeys(row["arm"] for row in rows):
            key, mine = f"{file.stem}.{slug(arm)}", [row for row in rows if row["arm"] == arm]
            found[f"arms.{key}.runs"] = len(mine)
            for name in ("train", "val"):
                values = [row[f"{name}_loss"] for row in mine]
                found[f"arms.{key}.{name}"] = round(statistics.fmean(values), 5)
                pair = pairs.difference(rows, arm, series.against(arm), f"{name}_loss")
                if pair and pair.half_width is not None:
                    value = dict(mean=round(pair.mean, 5), half_width=round(pair.half_width, 5), pairs=pair.pairs)
                    found |= {f"pairs.{key}.{name}.{part}": number for part, number in value.items()}
    meta = dict(files="benchmarks/losses/*.jsonl", devices=sorted(devices), commits=sorted(commits))
    return {"meta": meta} | found


def slug(arm: str) -> str:
    return re.sub(r"\W+", "_", arm).strip("_")


@app.command
def render(*, check: bool = False) -> int:
    """Fill the markers of pages and recipes, and draw the pictures.

    Parameters
    ----------
    check: bool
        Change nothing; exit with 1 if something would change.
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
