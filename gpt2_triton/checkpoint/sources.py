"""Load weights from any source: a run, one of its step directories, or KIND:WHERE
for another project's files.

`checkpoint:` may stand before a run or a step, as in init_from.  A directory with
a config.json needs no `hf:`.
"""

from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from gpt2_triton.checkpoint import huggingface, llmc, nanogpt, source_files
from gpt2_triton.checkpoint.load import open_newest
from gpt2_triton.checkpoint.resume import config_differences, decides_weights, explicit
from gpt2_triton.checkpoint.stored import StoredTensor, whole_tensors
from gpt2_triton.checkpoint.weights import (
    Weights,
    check_sizes,
    first_problem,
    flat_length,
    from_checkpoint,
    require_runnable,
    to_flat_buffers,
)
from gpt2_triton.config.config import Config
from gpt2_triton.config.removed import without_removed
from gpt2_triton.config.rules import LONGEST_CONTEXT
from gpt2_triton.data.tokenizer import NAMES, identity, located
from gpt2_triton.data.tokenizer_file import FILE
from gpt2_triton.errors import CheckpointError
from gpt2_triton.files import expand

READERS = {"hf": huggingface.read, "llmc": llmc.read, "nanogpt": nanogpt.read}


class Loaded(NamedTuple):
    """What a model that only runs forward is made of."""

    config: Config
    # params, and low of fp32 masters; those of a run are read when they are used
    stored: dict[str, StoredTensor]
    beside: Path | None  # a directory that may have the files of source_files.py


def load_weights(source: str) -> Loaded:
    """Return a source's configuration and weights; other projects' are in memory,
    fp32, with train.dtype bf16.
    """
    kind, where = _kind_and_place(source)
    if kind == "checkpoint":
        step_dir, config, stored = _open_run(where)
        return Loaded(config, stored, source_files.of_step(step_dir))
    weights = READERS[kind](where)
    exact = _config_for(weights)
    stored = whole_tensors(weights.where, to_flat_buffers(weights, exact))
    return Loaded(exact.replace(train={"dtype": "bf16"}), stored, weights.beside)


def open_weights(source: str) -> Weights:
    """Return the weights of a source as stored, to be read one by one."""
    kind, where = _kind_and_place(source)
    if kind != "checkpoint":
        return READERS[kind](where)
    step_dir, config, stored = _open_run(where)
    return from_checkpoint(str(step_dir), stored, config, source_files.of_step(step_dir))


def is_own_run(source: str) -> bool:
    """Return whether the source names one of our runs, not another project's file."""
    return _kind_and_place(source)[0] == "checkpoint"


def _kind_and_place(source: str) -> tuple[str, str]:
    """Return "checkpoint" or a key of READERS, and the place to read."""
    kind, _, where = source.partition(":")
    if where and (kind in READERS or kind == "checkpoint"):
        return kind, expand(where)
    place = expand(source)
    return "hf" if (Path(place) / "config.json").is_file() else "checkpoint", place


def initial_weights(config: Config) -> Weights | None:
    """Return the weights of init_from, from which a run of this configuration
    can start; None for scratch.
    """
    if config.init_from == "scratch":
        return None
    kind, where = _kind_and_place(config.init_from)
    if kind in READERS:
        weights = READERS[kind](where)
    else:
        step_dir, saved, stored = _open_run(where)
        changes, _ = config_differences(explicit(saved), explicit(config))
        for key, (then, now) in changes.items():
            if decides_weights(key):
                raise CheckpointError(
                    f"init_from: {where} has {key} {then}, this run {now}; make them equal"
                )
        weights = from_checkpoint(where, stored, saved, source_files.of_step(step_dir))
    check_sizes(weights, config)
    return weights


def _open_run(path: str) -> tuple[Path, Config, dict[str, StoredTensor]]:
    """Return a run's step directory, its configuration, and its weights: params, low of masters."""
    step_dir, state, tensors = open_newest(Path(path))
    try:
        saved = without_removed(state["config"], any_value=True)
        if saved.get("fp8", {}).get("keep_bf16") not in ("head", "none"):
            # an earlier version had more values; no weight depends on it
            saved["fp8"] = {"keep_bf16": "head"}
        config = Config.model_validate(saved)
    except ValidationError as error:
        wrong = (
            f"{step_dir}: its configuration is of another version of gpt2_triton; use that version"
        )
        raise CheckpointError(wrong) from error
    config = _with_tokenizer(config, step_dir.resolve())
    names = ("params", "low") if config.optim.master == "fp32" else ("params",)
    for name in names:
        if name not in tensors or tensors[name].shape != (flat_length(config.model),):
            raise CheckpointError(
                f"{step_dir}: {name} does not fit its configuration; choose another step"
            )
    return step_dir, config, {name: tensors[name] for name in names}


def _with_tokenizer(config: Config, step_dir: Path) -> Config:
    """Return a configuration with its tokenizer's path here; CheckpointError if it is lost."""
    name = config.data.tokenizer
    run_dir = step_dir.parent.parent
    found = located(name, step_dir)
    if found == name:
        found = located(name, run_dir)
    if name not in NAMES and (found == name or identity(found) != name):
        raise CheckpointError(
            f"{step_dir}: its tokenizer ({name[:15]}...) is not there; "
            f"restore the run's {FILE}, which lies in {run_dir / 'source'}"
        )
    return config.replace(data={"tokenizer": found})


def _config_for(weights: Weights) -> Config:
    """Return a configuration that evaluates another project's model in fp32."""
    require_runnable(weights, weights.tokenizer)
    sections = {
        "model": weights.model.model_dump(),
        "data": {"tokenizer": weights.tokenizer},
        "train": {
            "seq_len": min(weights.model.block_size, LONGEST_CONTEXT),
            "batch_size": 1,
            "dtype": "fp32",
        },
        "eval": {"every": 0},
    }
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        raise CheckpointError(
            f"{weights.where}: does not run here: {first_problem(error)}"
        ) from None
