"""Commands `hellaswag` and `perplexity`: evaluate a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

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
    from gpt2_triton.data.mixture import Source
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
    from gpt2_triton.data.mixture import Validation
    from gpt2_triton.inference import losses
    from gpt2_triton.inference.load import load_for_losses

    if not (shards or is_own_run(checkpoint)):
        raise ConfigError(f"perplexity: {checkpoint} is no run with data.val; name shards after it")
    config, stored, _ = load_weights(checkpoint)
    if seq_len:
        config = config.replace(train={"seq_len": seq_len})
    if config.train.seq_len > config.model.block_size:
        raise ConfigError(
            f"--seq_len: {config.train.seq_len:,}, "
            f"but the model's longest sequence has {config.model.block_size:,}; lower it"
        )
    validation = Validation(_open_sources(shards, config), config.train.seq_len, tokens)
    model = load_for_losses(config, stored, batch_tokens, dtype)
    results = [losses.perplexity(model, loader) for loader in validation.loaders]
    loss = validation.mean([result.loss for result in results])
    several = len(results) > 1
    for name, result in zip(validation.names, results, strict=True):
        line = _line(result, model.config.train.dtype)
        print(f"{name}: {line}" if several else line)
    if several:
        print(f"all sources, weighted by share | loss {loss:.4f}")
    if json:
        paths = [str(shard.path) for shard in validation.shards]
        found: dict[str, object] = {"checkpoint": checkpoint, "shards": paths}
        rows = [result._asdict() for result in results]
        by_name = dict(zip(validation.names, rows, strict=True))
        found |= {"sources": by_name, "loss": loss} if several else rows[0]
        write_json(json, found)


def _open_sources(shards: Sequence[str], config: Config) -> "list[tuple[Source, list[Shard]]]":
    """Return the sources of `shards`, or without them those of a run's data.val, with their shards.
    Several patterns without weights are one source.
    """
    from gpt2_triton.data.mixture import sources

    found = sources(",".join(shards) or config.data.val)
    groups = [[source.pattern] for source in found]
    if len(found) == 1 and len(shards) > 1:
        groups = [[*shards]]
    if not shards:
        print_line(f"data.val of the run: {config.data.val}")
    return [(source, _open(group, config)) for source, group in zip(found, groups, strict=True)]


def _open(patterns: Sequence[str], config: Config) -> "list[Shard]":
    """Return the shards of one source; DataError if they have another tokenizer's tokens."""
    from gpt2_triton.data.prepare.builtin import pattern_of
    from gpt2_triton.data.shards import open_shards, require_tokenizer

    tokenizer = config.data.tokenizer
    found = []
    for given in patterns:
        pattern = pattern_of(given, "val", tokenizer)
        require_tokenizer(pattern, tokenizer)
        found += open_shards(pattern, config.model.vocab_size, config.train.seq_len)
    return found


def _line(result: "Perplexity", dtype: str) -> str:
    line = f"{result.tokens:,} tokens in {dtype} | loss {result.loss:.4f}"
    line += f" | perplexity {result.perplexity:.2f}"
    bits = result.bits_per_byte
    return line if bits is None else f"{line} | {bits:.4f} bits per byte"
