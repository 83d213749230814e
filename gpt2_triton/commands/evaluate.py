"""Commands `hellaswag` and `perplexity`: evaluate a model."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from cyclopts import Parameter

from gpt2_triton.commands.app import (
    AT_LEAST_0,
    AT_LEAST_1,
    Checkpoint,
    require_directory,
    select_device,
)
from gpt2_triton.config.config import Config
from gpt2_triton.console import counted, print_line
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import write_json

if TYPE_CHECKING:
    from gpt2_triton.data.shards import Shard
    from gpt2_triton.inference.losses import Perplexity

Json = Annotated[Path | None, Parameter(help="File to write the results to, as JSON.")]
BatchTokens = Annotated[
    int, AT_LEAST_1, Parameter(help="Tokens of a batch, at most; the results do not depend on it.")
]
Dtype = Annotated[
    Literal["bf16", "fp32"] | None,
    Parameter(help="By default a run's own, others bf16, on a CPU fp32."),
]


def hellaswag(
    checkpoint: Checkpoint,
    /,
    *,
    data: Path | None = None,
    limit: Annotated[int, AT_LEAST_0] = 0,
    json: Json = None,
    batch_tokens: BatchTokens = 65536,
    dtype: Dtype = None,
) -> None:
    """Print a model's accuracy on HellaSwag, by the rules of llm.c and of lm-evaluation-harness.

    Args:
        data: HellaSwag's .jsonl; by default the validation rows, downloaded once.
        limit: Number of questions, from the first on; 0 takes all.
    """
    require_directory("json", json)
    select_device()
    from gpt2_triton.checkpoint.sources import load_weights
    from gpt2_triton.data.hellaswag import STYLES, URL, load_questions
    from gpt2_triton.data.tokenizer import get_tokenizer
    from gpt2_triton.inference.hellaswag import evaluate, format_table, require_fitting
    from gpt2_triton.inference.load import load_for_losses

    config, stored, _ = load_weights(checkpoint)
    asked = load_questions(data, get_tokenizer(config.data.tokenizer), limit, tuple(STYLES))
    model = load_for_losses(config, stored, batch_tokens, dtype)
    for questions in asked.values():
        require_fitting(model, questions)
    results = {style: evaluate(model, questions) for style, questions in asked.items()}
    number = len(next(iter(asked.values())).labels)
    print(f"HellaSwag, {counted(number, 'question')}")
    print(format_table(results))
    if json:
        write_json(json, {"checkpoint": checkpoint, "data": str(data or URL)} | results)


def perplexity(
    checkpoint: Checkpoint,
    /,
    *shards: str,
    tokens: Annotated[int, AT_LEAST_0] = 0,
    seq_len: Annotated[int | None, AT_LEAST_1] = None,
    json: Json = None,
    batch_tokens: BatchTokens = 65536,
    dtype: Dtype = None,
) -> None:
    """Print a model's loss, perplexity and bits per byte over token shards.

    Args:
        shards: Token shards: .bin files, or quoted globs of them, or sources with
            weights as A=3,B=1; by default the validation data of a run.
        tokens: Number of first tokens, in whole windows; sources share it by weight; 0 takes all.
        seq_len: Tokens of a window; by default a run's train.seq_len, for other weights
            their context, at most 8,192.
    """
    require_directory("json", json)
    select_device()
    from gpt2_triton.checkpoint.sources import is_own_run, load_weights
    from gpt2_triton.data.mixture import validation_tokens
    from gpt2_triton.inference import losses
    from gpt2_triton.inference.load import load_for_losses

    if not (shards or is_own_run(checkpoint)):
        raise ConfigError(f"perplexity: {checkpoint} is no run with data.val; name shards after it")
    config, stored, _ = load_weights(checkpoint)
    groups = _groups(shards, config)
    if seq_len:
        config = config.replace(train={"seq_len": seq_len})
    if config.train.seq_len > config.model.block_size:
        raise ConfigError(
            f"--seq_len: {config.train.seq_len:,}, "
            f"but the model's longest sequence has {config.model.block_size:,}; lower it"
        )
    opened = [_open(group, config) for group in groups]
    model = load_for_losses(config, stored, batch_tokens, dtype)
    T = config.train.seq_len
    results = [
        losses.perplexity(model, each, validation_tokens(group.share, each, T, tokens))
        for group, each in zip(groups, opened, strict=True)
    ]
    several = len(groups) > 1
    for group, result in zip(groups, results, strict=True):
        line = _line(result, model.config.train.dtype)
        print(f"{group.name}: {line}" if several else line)
    pairs = zip(groups, results, strict=True)
    weighted = sum(float(group.share) * result.loss for group, result in pairs)
    if several:
        print(f"all sources, weighted by share | loss {weighted:.4f}")
    if json:
        paths = [str(shard.path) for each in opened for shard in each]
        found: dict[str, object] = {"checkpoint": checkpoint, "shards": paths}
        by_name = {g.name: result._asdict() for g, result in zip(groups, results, strict=True)}
        found |= {"sources": by_name, "loss": weighted} if several else results[0]._asdict()
        write_json(json, found)


class Group(NamedTuple):
    """Patterns of shards that have a loss of their own."""

    name: str
    share: Fraction  # of the loss of all
    patterns: Sequence[str]


def _groups(shards: Sequence[str], config: Config) -> list[Group]:
    """Return the sources of `shards`, or without them those of a run's data.val, and print
    their patterns.  Several patterns without weights are one source.
    """
    from gpt2_triton.data.mixture import names, sources
    from gpt2_triton.data.prepare.builtin import pattern_of

    found = sources(",".join(shards) or config.data.val)
    if len(found) == 1 and len(shards) > 1:
        return [Group("", Fraction(1), shards)]
    patterns = [pattern_of(each.pattern, "val", config.data.tokenizer) for each in found]
    if not shards:
        print_line(f"data.val of the run: {' '.join(patterns)}")
    rows = zip(names(found), found, patterns, strict=True)
    return [Group(name, each.share, [pattern]) for name, each, pattern in rows]


def _open(group: Group, config: Config) -> "list[Shard]":
    """Return the shards of a group; DataError if they have another tokenizer's tokens."""
    from gpt2_triton.data.shards import open_shards, require_tokenizer

    for pattern in group.patterns:
        require_tokenizer(pattern, config.data.tokenizer)
    V = config.model.vocab_size
    T = config.train.seq_len
    return [shard for pattern in group.patterns for shard in open_shards(pattern, V, T)]


def _line(result: "Perplexity", dtype: str) -> str:
    line = f"{result.tokens:,} tokens in {dtype} | loss {result.loss:.4f}"
    line += f" | perplexity {result.perplexity:.2f}"
    bits = result.bits_per_byte
    return line if bits is None else f"{line} | {bits:.4f} bits per byte"
