"""Find, verify and load checkpoints.

The manifest's hashes show a flipped bit, which safetensors would load.  A checkpoint may come from a stranger: nothing
is unpickled, and no file name is taken from a file's text.
"""

import os
from pathlib import Path
from typing import Any

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
    Spans,
    best_step,
    fingerprint,
    list_steps,
    step_path,
    tensors_name,
)
from gpt2_triton.console import Progress, print_line
from gpt2_triton.errors import CheckpointError
from gpt2_triton.files import read_json

# ---- verifying ----


def verify(step_dir: Path) -> str:
    """Return the first problem of a checkpoint, or ""."""
    try:
        if not step_dir.is_dir():
            return "is missing or not a directory"
        manifest = read_json(step_dir / MANIFEST)
        names = [*map(tensors_name, range(len(manifest) - 1)), STATE]
        if len(names) == 1 or manifest.keys() != set(names):
            return f"{MANIFEST}: expected a file for each rank, and {STATE}"
        total = sum((step_dir / name).stat().st_size for name in names)
        with Progress(f"verifying {step_dir.name}", total, "bytes") as progress:
            for name in names:
                if fingerprint(step_dir / name, progress.advance) != manifest[name]:
                    return f"{name}: damaged, its size or sha256 is not that of {MANIFEST}"
    except (OSError, CheckpointError) as error:
        return str(error) if isinstance(error, CheckpointError) else f"cannot be read ({error})"
    return ""


# ---- finding ----


def latest_checkpoint(directory: Path, last: int | None = None) -> Path | None:
    """Return the newest intact checkpoint up to `last`, or None; warn of damaged ones.  CheckpointError if all are."""
    steps = [path for step, path in list_steps(directory) if last is None or step <= last]
    for path in reversed(steps):
        if not (problem := verify(path)):
            return path
        if os.path.lexists(path):  # else its run has deleted it
            print_line(f"warning: skipping damaged {path}: {problem}", error=True)
    if steps:  # None would start a new run over checkpoints that may be restored
        raise CheckpointError(f"{directory}: none of {len(steps)} verifies; restore one, or use another run")
    return None


def find_checkpoint(path: Path) -> Path:
    """Return a step that verifies: `path`, the newest of a run or its `checkpoints`, or the step of RUN/best."""
    if path.name == "best" and not path.exists():
        found = best_checkpoint(find_checkpoint(path.parent))
        if found is None:
            raise CheckpointError(f"{path}: its run keeps no best checkpoint; train with checkpoint.best val_loss")
        return find_checkpoint(found)
    if STEP_NAME.fullmatch(path.absolute().name) or (path / MANIFEST).is_file():  # a copy may have any name
        if problem := verify(path):
            others = ", ".join(str(step) for step, other in list_steps(path.parent) if other.name != path.name)
            raise CheckpointError(f"{path}: {problem}; choose another step{others and ': '}{others}")
        return path
    found = latest_checkpoint(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    if found is None and (path / "config.yaml").is_file():
        todo = "wait for its next save, or if it ended, start it again"
        raise CheckpointError(f"{path}: this run has no checkpoint yet; {todo}")
    if found is None:
        todo = "name a run or one of its steps; other projects' weights go as hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE"
        raise CheckpointError(f"{path}: no checkpoint found; {todo}")
    return found


def best_checkpoint(newest: Path) -> Path | None:
    """Return the checkpoint of the lowest validation loss, not verified; None if the state of `newest` names none."""
    step = best_step(read_json(newest / STATE))
    return None if step is None else step_path(newest.parent, step)


# ---- loading ----


def read_checkpoint(path: Path) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Return (step directory, state, host tensors); if the run deletes the step meanwhile, those of a newer step."""
    while True:
        steps = _steps_near(path)
        try:
            found = find_checkpoint(path)
            return found, *load_checkpoint(found)
        except (OSError, CheckpointError):
            if _steps_near(path) == steps:
                raise


def _steps_near(path: Path) -> list[list[tuple[int, Path]]]:
    """Return all steps where `find_checkpoint` may look for `path`; the directory above a run may be closed to us."""
    places = [place for above in (path, path.absolute().parent) for place in (above, above / "checkpoints")]
    return [list_steps(place) for place in places if os.access(place, os.R_OK)]


def load_checkpoint(step_dir: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return (state, host tensors) of a verified checkpoint; CheckpointError for NaN.  One rank's file is mapped."""
    state = read_json(step_dir / STATE)
    if state.get("format") != FORMAT:
        wrong = f"{step_dir / STATE}: format {state.get('format')!r}, expected {FORMAT}"
        raise CheckpointError(f"{wrong}; use the version of gpt2_triton that wrote it")
    spans = state.pop(SHARES, None)
    second = state.pop(SECOND_SHARES, None) or spans
    shards = [_read_tensors(step_dir / tensors_name(rank)) for rank in range(len(spans or [0]))]
    return state, merge_shards(shards, spans, second) if spans else shards[0]


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors ({error}); choose another step") from error
    for name, tensor in tensors.items():
        is_float = tensor.is_floating_point() and tensor.numel()
        if is_float and not all(extreme.isfinite() for extreme in tensor.aminmax()):  # 20 times as fast as isfinite
            raise CheckpointError(f"{path}: {name} has a NaN or an infinity; remove this step and use an older one")
    return tensors


def merge_shards(shards: list[dict[str, Tensor]], spans: list[Spans], second: list[Spans]) -> dict[str, Tensor]:
    """Return whole tensors, from each rank's spans, `second` for v.  A tensor that only rank 0 has is whole."""
    merged = {}
    for name, tensor in shards[0].items():
        if len(shards) > 1 and name not in shards[1]:
            merged[name] = tensor
            continue
        by_rank = second if name == "v" else spans
        total = sum(length for own in by_rank for _, length in own)
        merged[name] = torch.empty(total, dtype=tensor.dtype)
        for shard, own in zip(shards, by_rank, strict=True):
            start = 0
            for first, length in own:
                merged[name][first : first + length].copy_(shard[name][start : start + length])
                start += length
    return merged
