"""What train.precision `auto` chooses."""

from typing import Any

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import choices


def choose_precision(config: Config, architecture: str | None) -> tuple[Config, list[str]]:
    """Replace train.precision `auto`, and say why; `architecture` is the GPU's, None on a CPU."""
    if config.train.precision != "auto":
        return config, []
    precision = "bf16"
    why = f"fp8 is faster on compute capability 9.0, this is {architecture or 'a CPU'}"
    only_bf16 = [choice for choice in choices(config.model) if not choice.fp8]
    if config.model.arch == "llama":
        why = "too few runs bound its price in loss for Llama: docs/engineering/fp8.md"
    elif only_bf16:
        why = f"fp8 has no {only_bf16[0].key} {only_bf16[0].value}"
    elif config.train.dtype == "fp32" or config.train.seq_len % 16:
        why = "fp8 needs train.dtype bf16 and a multiple of 16 in train.seq_len"
    elif architecture == "9.0":
        precision = "fp8"
        why = "faster on compute capability 9.0; its price in loss: docs/engineering/fp8.md"
    note = f"train.precision auto: {precision} ({why})"
    return config.replace(train={"precision": precision}), [note]


def keep_precision(config: Config, saved: dict[str, Any]) -> tuple[Config, list[str]]:
    """Replace train.precision `auto` by what a run with the configuration `saved` has, and say so:
    a resume on another kind of GPU keeps it.
    """
    if config.train.precision != "auto":
        return config, []
    kept = saved["train"].get("precision", "bf16")
    note = f"train.precision auto: {kept} (of the run so far)"
    return config.replace(train={"precision": kept}), [note]
