"""Commands `hellaswag` and `perplexity`: evaluate a model."""

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from gpt2_triton.commands.app import (
    AT_LEAST_0,
    AT_LEAST_1,
    Checkpoint,
    require_directory,
    select_device,
)
from gpt2_triton.console import print_line
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import write_json

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
    print(f"HellaSwag, {len(next(iter(asked.values())).labels):,} questions")
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
        shards: Token shards: .bin files, or quoted globs of them; by default
            the validation data of a run.
        tokens: Number of first tokens, in whole windows; 0 takes all.
        seq_len: Tokens of a window; by default a run's train.seq_len, for other weights
            their context, at most 8,192.
    """
    require_directory("json", json)
    select_device()
    from gpt2_triton.checkpoint.sources import is_own_run, load_weights
    from gpt2_triton.data.mixture import names, sources
    from gpt2_triton.data.prepare.builtin import pattern_of
    from gpt2_triton.data.shards import Shard, open_shards, require_tokenizer
    from gpt2_triton.inference import losses
    from gpt2_triton.inference.load import load_for_losses

    if not (shards or is_own_run(checkpoint)):
        raise ConfigError(f"perplexity: {checkpoint} is no run with data.val; name shards after it")
    config, stored, _ = load_weights(checkpoint)
    groups = {"": shards}
    shares = [1.0]
    if not shards:
        found = sources(config.data.val)
        shares = [float(source.share) for source in found]
        patterns = [pattern_of(s.pattern, "val", config.data.tokenizer) for s in found]
        groups = {name: (given,) for name, given in zip(names(found), patterns, strict=True)}
        print_line(f"data.val of the run: {' '.join(patterns)}")
    if seq_len:
        config = config.replace(train={"seq_len": seq_len})
    V, T = config.model.vocab_size, config.train.seq_len
    if T > config.model.block_size:
        raise ConfigError(
            f"--seq_len: {T:,}, but the model's longest sequence has "
            f"{config.model.block_size:,}; lower it"
        )
    opened: dict[str, list[Shard]] = {}
    for name, of_source in groups.items():
        for given in of_source:
            require_tokenizer(given, config.data.tokenizer)
        opened[name] = [shard for given in of_source for shard in open_shards(given, V, T)]
    model = load_for_losses(config, stored, batch_tokens, dtype)
    results = [losses.perplexity(model, each, tokens) for each in opened.values()]
    for name, result in zip(opened, results, strict=True):
        computed = f"{result.tokens:,} tokens in {model.config.train.dtype}"
        print(f"{name}: {computed}" if len(opened) > 1 else computed, end="")
        print(f" | loss {result.loss:.4f} | perplexity {result.perplexity:.2f}", end="")
        bits = result.bits_per_byte
        print("" if bits is None else f" | {bits:.4f} bits per byte")
    weighted = sum(share * result.loss for share, result in zip(shares, results, strict=True))
    if len(opened) > 1:
        print(f"all sources, weighted by share | loss {weighted:.4f}")
    if json:
        paths = [str(shard.path) for each in opened.values() for shard in each]
        about: dict[str, object] = {"checkpoint": checkpoint, "shards": paths}
        found_losses = {
            name: result._asdict() for name, result in zip(opened, results, strict=True)
        }
        several = {"sources": found_losses, "loss": weighted}
        write_json(json, about | (several if len(opened) > 1 else results[0]._asdict()))
