"""How long a run takes, by the speeds in the record of figures:
docs/results/current.json, in a wheel results.json.
"""

import json
from collections.abc import Mapping
from typing import Any

from gpt2_triton.config.config import Config
from gpt2_triton.config.recipes import PACKAGE
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.config.values import SIZES

Figures = Mapping[str, Any]  # of one machine, by name, such as steps.d12.fp8.tok_s
MEASURED_SEQ_LEN = 1024


def figures_of(gpu: str) -> Figures:
    """Return the figures of one GPU with this key of device.GPUS; {} if it was not measured."""
    inside = PACKAGE / "results.json"
    file = inside if inside.is_file() else PACKAGE.parent / "docs" / "results" / "current.json"
    return json.loads(file.read_text(encoding="utf-8")).get(gpu, {})


def measured_size(model: ModelConfig) -> str | None:
    """Return the record's name of a model's size; the shares of QK-norm and of a cap of the logits
    in a step are left out.
    """
    plain = model.model_copy(update={"qk_norm": False, "logit_cap": 0.0})
    for size in SIZES:
        if plain == ModelConfig.model_validate({"size": size}):
            return size.replace(":", "_")
    return None


def training_hours(config: Config, figures: Figures) -> float | None:
    """Return the hours of all steps on one GPU with these figures, without
    validations and saves; None if unknown.

    train.precision must be chosen.  Muon's update takes up to 1% more
    than the one that was measured.
    """
    size = measured_size(config.model)
    train = config.train
    if size is None or train.dtype != "bf16" or train.seq_len != MEASURED_SEQ_LEN:
        return None
    if train.precision == "fp8" and config.fp8.keep_bf16 == "head":
        arm = "fp8_head"
    else:
        arm = train.precision
    ms = figures.get(f"steps.{size}.{arm}.ms")
    if ms is None:
        return None
    tokens = train.steps * train.step_tokens
    micro_batches = tokens / figures[f"steps.{size}.{arm}.tok_s"] / ms * 1e3
    update = figures.get(f"ops.{size}.fp8.adamw.ms", 0.0)  # bf16's too; `ms` has one a micro-batch
    return (micro_batches * (ms - update) + train.steps * update) / 3.6e6
