"""Find, verify and load checkpoints.

A flipped bit is noticed by the hashes of the manifest; safetensors would load it.  Nothing is unpickled, and no name
in a file is followed: a checkpoint may come from somebody else.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gpt2_triton.checkpoint.format import (
    FORMAT,
    MANIFEST,
    SECOND_SHARES,
    SHARES,
    STATE,
    STEP_NAME,
    TENSORS_NAME,
    Spans,
    best_step,
    fingerprint,
    list_steps,
    state_problem,
    step_path,
    tensors_name,
)
from gpt2_triton.console import Progress, print_line
from gpt2_triton.errors import CheckpointError
from gpt2_triton.files import read_regular, utf8_path

ATTEMPTS = 100  # to read from a run that deletes steps
SCAN = 1 << 20  # elements per scan for NaN and infinity: they stay in the cache, and a core does 7 GB/s
# by dtype: integers of the same size, and the bits of the exponent, which are all set in NaN and infinity alone
EXPONENT = {torch.bfloat16: (torch.int16, 0x7F80), torch.float32: (torch.int32, 0x7F800000)}


# ---- verifying ----


def verify(step_dir: Path) -> list[str]:
    """Return the problems of a checkpoint, one line each; empty if its files are exactly those that were written."""
    try:
        return list(_problems(step_dir))
    except OSError as error:
        return [f"cannot be read ({error})"]


def _problems(step_dir: Path) -> Iterator[str]:
    if step_dir.is_symlink() or not step_dir.is_dir():
        yield "is missing or not a directory"
        return
    regular = {path.name: path.is_file() and not path.is_symlink() for path in step_dir.iterdir()}
    try:
        manifest = _read_json(step_dir / MANIFEST) if regular.get(MANIFEST) else {}
    except CheckpointError:
        manifest = {}
    # the number of ranks is that of a manifest with the right names; else count the files
    whole = manifest.keys() == {*map(tensors_name, range(len(manifest) - 1)), STATE}
    ranks = len(manifest) - 1 if whole else sum(TENSORS_NAME.fullmatch(name) is not None for name in regular)
    files = [*map(tensors_name, range(max(ranks, 1))), STATE]
    for extra in sorted(regular.keys() - {*files, MANIFEST}):
        yield f"{extra}: does not belong there"
    irregular = [name for name in (*files, MANIFEST) if not regular.get(name)]
    yield from (f"{name}: is missing or not a regular file" for name in irregular)
    if not irregular:
        differences = list(_differences_from_manifest(step_dir, files, manifest))
        yield from differences or _problems_of_state(step_dir, files)
        yield from _other_step(step_dir)


def _problems_of_state(step_dir: Path, files: list[str]) -> Iterator[str]:
    """Yield what is wrong in a state.json that is the one that was written: a bug, or a stranger's."""
    try:
        state = _read_json(step_dir / STATE)
    except CheckpointError as error:
        yield str(error).removeprefix(f"{step_dir}/")
        return
    if state.get("format") != FORMAT:
        return  # load_checkpoint names the version
    if problem := state_problem(state):
        yield f"{STATE}: {problem}"
        return
    for key in (SHARES, SECOND_SHARES):
        if (spans := state.get(key)) is not None and (len(spans) != len(files) - 1 or not covered_length(spans)):
            yield f"{STATE}: {key}: do not cover the parameters with those of {len(files) - 1} files"


def _differences_from_manifest(step_dir: Path, files: list[str], manifest: dict[str, Any]) -> Iterator[str]:
    if manifest.keys() != set(files) or not all(isinstance(entry, dict) for entry in manifest.values()):
        yield f"{MANIFEST}: expected a JSON object with exactly the keys {', '.join(files)}"
        return
    total = sum((step_dir / name).stat().st_size for name in files)
    with Progress(f"verifying {step_dir.name}", total, "bytes") as progress:
        for name in files:
            for key, found in fingerprint(step_dir / name, progress.advance).items():
                if found != manifest[name].get(key):
                    yield f"{name}: {key} is {found!r}, expected {manifest[name].get(key)!r} as in {MANIFEST}"


def _other_step(step_dir: Path) -> Iterator[str]:
    """Yield a problem if the directory was written as another step than its name says."""
    named, saved = STEP_NAME.fullmatch(step_dir.absolute().name), saved_step(step_dir)
    if named and saved != int(named[1]):
        yield f"{STATE}: step is {saved!r}, expected {int(named[1])} as in the name of the directory"


def saved_step(step_dir: Path) -> Any:
    """Return the step in a checkpoint's state; None if there is none that can be read."""
    try:
        return _read_json(step_dir / STATE).get("step")
    except (OSError, CheckpointError):
        return None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}); choose another step") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(content).__name__}; choose another step")
    return content


# ---- finding ----


def latest_checkpoint(directory: Path, last: int | None = None) -> Path | None:
    """Return the newest checkpoint in `directory`, up to step `last`, that verifies and is finite; None if there are
    none at all.

    Print a warning for each newer one, which is damaged.  Raise CheckpointError if all are damaged.
    """
    for _ in attempts(directory):
        steps = [(step, path) for step, path in list_steps(directory) if last is None or step <= last]
        gone = False
        for _, path in reversed(steps):
            problems = verify(path) or _non_finite(path)
            if not problems:
                return path
            if gone := not (path.exists() or path.is_symlink()):
                break
            inside = [path, *path.glob("*")]
            if unreadable := [file for file in inside if file.exists() and not os.access(file, os.R_OK)]:
                todo = "correct its permissions, or move the checkpoint away"
                raise CheckpointError(f"{unreadable[0]}: cannot be read (permission denied); {todo}")
            print_line(f"warning: skipping damaged {path}: {problems[0]}", error=True)
        if not gone:
            break
    if steps:  # None would start a new run over checkpoints that can perhaps be restored
        raise CheckpointError(f"{directory}: none of {len(steps)} verifies; restore one, or use another run")
    return None


def _non_finite(step_dir: Path) -> list[str]:
    """Return where a checkpoint that verifies has NaN or infinity: not a problem of its files, but of its weights."""
    try:
        for path in sorted(step_dir.glob("rank_*")):
            _read_tensors(path)
    except (OSError, CheckpointError) as error:
        return [str(error)]
    return []


def attempts(path: Path) -> Iterator[int]:
    """Yield the numbers of attempts to read from a run that deletes a step meanwhile, which then has a newer one.
    CheckpointError at the end.
    """
    yield from range(ATTEMPTS)
    raise CheckpointError(f"{path}: its run deletes steps faster than they can be read; raise checkpoint.keep, or wait")


def find_checkpoint(path: Path) -> Path:
    """Return the step directory for `path`; CheckpointError if there is none that verifies.

    `path` is a step directory, a run or its `checkpoints` (the newest step that verifies), or RUN/best (the step of
    the lowest validation loss).
    """
    if path.name == "best" and not path.exists():
        return _find_best(path)
    if STEP_NAME.fullmatch(path.absolute().name):
        if problems := verify(path):
            others = (other for _, other in reversed(list_steps(path.absolute().parent)) if other.name != path.name)
            intact = next((other.name for other in others if not verify(other)), "")
            hint = f", such as {intact}" if intact else ""
            raise CheckpointError(f"{path}: {problems[0]}; choose another step{hint}")
        return path
    inner = path / "checkpoints"
    found = latest_checkpoint(inner if inner.is_dir() else path)
    if found is None and (path / "config.yaml").is_file():
        todo = f"wait for its next one, or continue it by `train` with --run_dir {shlex.quote(str(path))} --resume"
        saves = "it saves every checkpoint.every steps, at its end and when it is stopped"
        raise CheckpointError(f"{path}: this run has no checkpoint yet; {saves}: {todo}")
    if found is None:
        got = f"{path} is a file" if path.is_file() else f"expected {inner}/step_NNNNNNNN"
        todo = "name a run or one of its steps; other projects' weights go as hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE"
        raise CheckpointError(f"{path}: no checkpoint found, {got}; {todo}")
    return found


def _find_best(path: Path) -> Path:
    run_dir, before = path.parent, None
    for _ in attempts(path):
        newest = find_checkpoint(run_dir)
        try:
            found = best_checkpoint(newest)
        except OSError:
            continue  # deleted meanwhile
        if found is None:
            raise CheckpointError(f"{path}: {run_dir} keeps no best checkpoint; train with --checkpoint.best val_loss")
        try:
            return find_checkpoint(found)
        except CheckpointError:
            if found.exists() or newest == before:
                raise
        before = newest  # meanwhile a newer one has replaced the best one
    raise AssertionError


def best_checkpoint(newest: Path) -> Path | None:
    """Return the checkpoint of the lowest validation loss of the run whose newest one is given; None if it keeps none.
    It is not verified.
    """
    step = best_step(_read_json(newest / STATE))
    return None if step is None else step_path(newest.parent, step)


# ---- loading ----


def read_checkpoint(path: Path) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Return (step directory, state, host tensors by name) for what `find_checkpoint` takes, also while the run writes
    and deletes steps.
    """
    named = STEP_NAME.fullmatch(path.absolute().name)
    for _ in attempts(path):
        found = find_checkpoint(path)
        try:
            return found, *load_checkpoint(found)
        except (OSError, CheckpointError, SafetensorError) as error:
            if found.exists():
                raise
            if named:
                raise CheckpointError(f"{path}: was deleted while it was read; choose another step") from error
    raise AssertionError


def load_checkpoint(step_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (state, host tensors by name) of a checkpoint that verifies; CheckpointError for NaN or infinity.

    The tensors of one rank are mapped privately from its file, those of several are merged in memory.
    """
    state = _read_json(step_dir / STATE)
    if state.get("format") != FORMAT:
        wrong = f"{step_dir / STATE}: format {state.get('format')!r}, expected {FORMAT}"
        raise CheckpointError(f"{wrong}; use the version of gpt2_triton that wrote it")
    spans = state.pop(SHARES, None)
    of_tensor = {"v": state.pop(SECOND_SHARES, None) or spans}
    shards = [_read_tensors(step_dir / tensors_name(rank)) for rank in range(len(spans) if spans else 1)]
    if not spans:
        return state, shards[0]
    if covered_length(spans) is None or covered_length(of_tensor["v"]) is None:
        raise CheckpointError(f"{step_dir / STATE}: its shares do not cover the parameters; choose another step")

    def share(name: str, rank: int) -> tuple[int]:
        return (sum(length for _, length in of_tensor.get(name, spans)[rank]),)

    sharded = {name for shard in shards[1:] for name in shard}
    sharded |= {name for name, tensor in shards[0].items() if tensor.shape == share(name, 0)}
    for rank, shard in enumerate(shards):
        for name in sorted(sharded):
            if name not in shard or shard[name].shape != share(name, rank):
                wrong = f"{step_dir / tensors_name(rank)}: {name} is not of the length of its shares in {STATE}"
                raise CheckpointError(f"{wrong}; choose another step")
    return state, merge_shards(shards, spans, of_tensor)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with utf8_path(path) as named:
            tensors = load_file(named)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors ({error}); choose another step") from error
    if found := first_non_finite(tensors):
        raise CheckpointError(f"{path}: {found}; remove this step and use an older one")
    return tensors


def first_non_finite(tensors: dict[str, Tensor]) -> str | None:
    """Return the name and place of the first NaN or infinity in bf16 and fp32 host tensors, or None."""
    for name, tensor in tensors.items():
        integer, exponent = EXPONENT.get(tensor.dtype, (None, 0))
        if integer is None:
            continue
        bits = tensor.view(integer).numpy().reshape(-1)
        for start in range(0, len(bits), SCAN):
            found = (bits[start : start + SCAN] & exponent) == exponent
            if found.any():
                return f"{name}: a NaN or an infinity at element {start + int(np.argmax(found)):,}"
    return None


def covered_length(spans_by_rank: list[Spans]) -> int | None:
    """Return the number of elements that the spans of all ranks cover; None if they overlap or leave gaps."""
    end = 0
    for first, length in sorted((first, length) for spans in spans_by_rank for first, length in spans if length):
        if first != end or length < 0:
            return None
        end += length
    return end


def merge_shards(
    shards: list[dict[str, Tensor]], spans_by_rank: list[Spans], of_tensor: Mapping[str, list[Spans]] = {}
) -> dict[str, Tensor]:
    """Return whole host tensors from the ranks' shards.  Tensors that only rank 0 has are whole already; `of_tensor`
    has the spans of tensors whose are others.
    """
    merged = {}
    for name, tensor in shards[0].items():
        if len(shards) > 1 and name not in shards[1]:
            merged[name] = tensor
            continue
        by_rank = of_tensor.get(name, spans_by_rank)
        total = covered_length(by_rank)
        assert total is not None, "the spans were checked before"
        merged[name] = torch.empty(total, dtype=tensor.dtype)
        for shard, spans in zip(shards, by_rank, strict=True):
            start = 0
            for first, length in spans:
                merged[name][first : first + length].copy_(shard[name][start : start + length])
                start += length
    return merged
