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
    from gpt2_triton.data.mixture import sources
    from gpt2_triton.data.prepare.builtin import pattern_of
    from gpt2_triton.data.shards import Shard, open_shards, require_tokenizer
    from gpt2_triton.data.tokenizer import identity
    from gpt2_triton.inference import losses
    from gpt2_triton.inference.load import load_for_losses

    if not (shards or is_own_run(checkpoint)):
        raise ConfigError(f"perplexity: {checkpoint} is no run with data.val; name shards after it")
    config, stored, _ = load_weights(checkpoint)
    if not shards:
        tokenizer, patterns = config.data.tokenizer, sources(config.data.val)
        shards = tuple(pattern_of(source.pattern, "val", tokenizer) for source in patterns)
        print_line(f"data.val of the run: {' '.join(shards)}")
    if seq_len:
        config = config.replace(train={"seq_len": seq_len})
    V, T = config.model.vocab_size, config.train.seq_len
    if T > config.model.block_size:
        raise ConfigError(
            f"--seq_len: {T:,}, but the model's longest sequence has "
            f"{config.model.block_size:,}; lower it"
        )
    opened: list[Shard] = []
    for given in shards:
        require_tokenizer(given, config.data.tokenizer, identity(config.data.tokenizer))
        opened += open_shards(given, V, T)
    model = load_for_losses(config, stored, batch_tokens, dtype)
    result = losses.perplexity(model, opened, tokens)
    computed = f"{result.tokens:,} tokens in {model.config.train.dtype}"
    print(f"{computed} | loss {result.loss:.4f} | perplexity {result.perplexity:.2f}", end="")
    print(
        f" | {result.bits_per_byte:.4f} bits per byte" if result.bits_per_byte is not None else ""
    )
    if json:
        write_json(
            json,
            {"checkpoint": checkpoint, "shards": [str(s.path) for s in opened]} | result._asdict(),
        )
