"""Find, verify and open checkpoints.

The manifest's hashes show a flipped bit, which safetensors would load.  A checkpoint may come from
a stranger: nothing is unpickled, and no file name is taken from a file's text.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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
    best_step,
    fingerprint,
    list_steps,
    read_object,
    step_path,
    tensors_name,
)
from gpt2_triton.checkpoint.stored import StoredTensor, join_shards, whole_tensors
from gpt2_triton.console import Progress, print_line
from gpt2_triton.errors import CheckpointError
from gpt2_triton.model.tables import Extent, Part

# ---- verifying ----


def verify(step_dir: Path) -> str:
    """Return the first problem of a checkpoint, or ""."""
    try:
        if not step_dir.is_dir():
            return "is missing or not a directory"
        manifest = read_object(step_dir / MANIFEST)
        names = [*map(tensors_name, range(len(manifest) - 1)), STATE]
        if len(names) == 1 or manifest.keys() != set(names):
            return f"{MANIFEST}: expected a file for each rank, and {STATE}"
        total = sum((step_dir / name).stat().st_size for name in names)
        with Progress(f"verifying {step_dir.name}", total, "bytes") as progress:
            for name in names:
                if fingerprint(step_dir / name, progress.advance) != manifest[name]:
                    return f"{name}: damaged, its size or sha256 is not that of {MANIFEST}"
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"cannot be read ({error})"
    return ""


# ---- finding ----


def latest_checkpoint(directory: Path, last: int | None = None) -> Path | None:
    """Return the newest intact checkpoint up to `last`, or None; warn of damaged ones.
    CheckpointError if all are.
    """
    steps = [path for step, path in list_steps(directory) if last is None or step <= last]
    for path in reversed(steps):
        problem = verify(path)
        if not problem:
            return path
        if os.path.lexists(path):  # else its run has deleted it
            print_line(f"warning: skipping damaged {path}: {problem}", error=True)
    if steps:  # None would start a new run over checkpoints that may be restored
        raise CheckpointError(
            f"{directory}: none of {len(steps)} verifies; restore one, or use another run"
        )
    return None


def find_checkpoint(path: Path) -> Path:
    """Return a step that verifies: `path`, the newest of a run or its
    `checkpoints`, or the step of RUN/best.
    """
    if path.name == "best" and not path.exists():
        found = best_checkpoint(find_checkpoint(path.parent))
        if found is None:
            todo = f"take {path.parent}, its newest, or train with checkpoint.best val_loss"
            raise CheckpointError(f"{path}: its run keeps no best checkpoint; {todo}")
        return find_checkpoint(found)
    # a copy may have any name
    if STEP_NAME.fullmatch(path.absolute().name) or (path / MANIFEST).is_file():
        problem = verify(path)
        if problem:
            raise CheckpointError(f"{path}: {problem}; choose another step")
        return path
    inside = path / "checkpoints"
    found = latest_checkpoint(inside if inside.is_dir() else path)
    if found is None and (path / "config.yaml").is_file():
        todo = "wait for its next save, or if it ended, start it again"
        raise CheckpointError(f"{path}: this run has no checkpoint yet; {todo}")
    if found is None:
        todo = (
            "name a run or one of its steps; other projects' weights go as "
            "hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE"
        )
        raise CheckpointError(f"{path}: no checkpoint found; {todo}")
    return found


def best_checkpoint(newest: Path) -> Path | None:
    """Return the checkpoint of the lowest validation loss, not verified; None if the
    state of `newest` names none.
    """
    step = best_step(read_object(newest / STATE))
    return None if step is None else step_path(newest.parent, step)


# ---- opening ----


class Checkpoint(NamedTuple):
    """A step that verifies: its state, and its tensors, which are read when they are used."""

    step_dir: Path
    state: dict[str, Any]
    tensors: dict[str, StoredTensor]

    def parts(self, spans: Mapping[str, Iterable[Extent]]) -> Iterator[Part]:
        """Yield what the checkpoint has of the spans of these tensors;
        CheckpointError for a NaN in them.
        """
        asked = [(name, *span) for name in self.tensors for span in spans.get(name, ())]
        total = sum(length * self.tensors[name].dtype.itemsize for name, _, length in asked)
        with Progress(f"loading {self.step_dir.name}", total, "bytes") as progress:
            for name, start, length in asked:
                for first, elements in self.tensors[name].span(start, length):
                    yield name, first, elements
                    progress.advance(elements.nbytes)


def open_newest(path: Path) -> Checkpoint:
    """Open what `find_checkpoint` finds at `path`; if the run deletes that step
    meanwhile, open a newer one.
    """
    while True:
        steps = _steps_near(path)
        try:
            return open_checkpoint(find_checkpoint(path))
        except (OSError, CheckpointError):
            if _steps_near(path) == steps:
                raise


def _steps_near(path: Path) -> list[list[tuple[int, Path]]]:
    """Return the steps beside or below `path`; the directory above a run may be closed to us."""
    places = [
        place
        for above in (path, path.absolute().parent)
        for place in (above, above / "checkpoints")
    ]
    return [list_steps(place) for place in places if os.access(place, os.R_OK)]


def open_checkpoint(step_dir: Path) -> Checkpoint:
    """Read the state of a step that verifies, and map the files of its ranks."""
    state = read_object(step_dir / STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(
            f"{step_dir / STATE}: format {state.get('format')!r}, expected {FORMAT}; "
            "use the version of gpt2_triton that wrote it"
        )
    spans = state.pop(SHARES, None)
    second = state.pop(SECOND_SHARES, None) or spans
    where = str(step_dir)
    if spans is None:
        return Checkpoint(step_dir, state, whole_tensors(where, _map(step_dir / tensors_name(0))))
    shards = [_map(step_dir / tensors_name(rank)) for rank in range(len(spans))]
    return Checkpoint(step_dir, state, join_shards(where, shards, spans, second))


def _map(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, mapped, not read; writes to them do not reach the file."""
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not safetensors ({error}); choose another step") from error
