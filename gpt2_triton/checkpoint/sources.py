"""Weights by where they are: the one place that knows every kind of source.

A source is a run, one of its step directories, or KIND:WHERE for another project's files; a directory with a
config.json is Hugging Face's also without `hf:`.
"""

from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from gpt2_triton.checkpoint import huggingface, llmc, nanogpt
from gpt2_triton.checkpoint.load import find_checkpoint, load_checkpoint
from gpt2_triton.checkpoint.weights import Weights, first_problem, from_checkpoint, pack
from gpt2_triton.config.config import Config
from gpt2_triton.errors import CheckpointError

READERS = {"hf": huggingface.read, "llmc": llmc.read, "nanogpt": nanogpt.read}


def load_weights(source: str) -> tuple[Config, dict[str, Tensor]]:
    """Configuration and host tensors, `params` among them.  Another project's model gets a configuration in bf16, its
    context as the sequence, and `params` in fp32, which a model in bf16 rounds and one in fp32 takes as they are.
    """
    weights = _foreign(source)
    if weights is None:
        return _load_ours(find_checkpoint(Path(source)))
    exact = _config_of(weights)
    return exact.replace(train={"dtype": "bf16"}), pack(weights, exact)


def open_weights(source: str) -> Weights:
    """The weights of a source as they are, to be read one by one."""
    if weights := _foreign(source):
        return weights
    step_dir = find_checkpoint(Path(source))
    config, tensors = _load_ours(step_dir)
    return from_checkpoint(str(step_dir), tensors, config)


def initial_weights(config: Config) -> dict[str, Tensor]:
    """What init_from names, without moments or step: `params`, and `low` where the run keeps fp32 masters; nothing for
    scratch.
    """
    kind, _, where = config.init_from.partition(":")
    if kind == "scratch":
        return {}
    return pack(READERS[kind](where), config) if kind in READERS else _of_equal_run(Path(where), config)


def _of_equal_run(path: Path, config: Config) -> dict[str, Tensor]:
    """The weights of one of our checkpoints, if it stores what this run stores."""
    saved, tensors = load_checkpoint(find_checkpoint(path))
    for section, keys in (("model", None), ("data", ("tokenizer",)), ("train", ("dtype",)), ("optim", ("master",))):
        then, now = saved["config"][section], config.to_dict()[section]
        for key in keys or now:
            if then.get(key) != now[key]:
                raise CheckpointError(
                    f"init_from: {path} has {section}.{key} {then.get(key)}, this run {now[key]}; make them equal"
                )
    return {name: tensors[name] for name in ("params", "low") if name in tensors}


def _foreign(source: str) -> Weights | None:
    kind, _, where = source.partition(":")
    if kind in READERS and where:
        return READERS[kind](where)
    return huggingface.read(source) if (Path(source) / "config.json").is_file() else None


def _load_ours(step_dir: Path) -> tuple[Config, dict[str, Tensor]]:
    state, tensors = load_checkpoint(step_dir)
    ranks = len([*step_dir.glob("rank_*")])  # a batch that divides on these GPUs need not on one
    try:
        return Config.model_validate(state["config"], context=dict(gpus=ranks)), tensors
    except ValidationError as error:
        wrong = f"{step_dir}: its configuration is of another version of gpt2_triton"
        raise CheckpointError(wrong) from error


def _config_of(weights: Weights) -> Config:
    model = weights.model
    if weights.tokenizer is None:
        raise CheckpointError(f"{weights.where}: no tokenizer is known for {model.vocab_size} tokens")
    sections = {
        "model": model.model_dump(),
        "data": {"tokenizer": weights.tokenizer},
        "train": {"seq_len": model.block_size, "batch_size": 1, "dtype": "fp32"},
        "eval": {"every": 0},
    }
    try:
        return Config.model_validate(sections)
    except ValidationError as error:
        raise CheckpointError(f"{weights.where}: does not run here: {first_problem(error)}") from None
