"""docs/guide/config.md is generated from the declarations of the configuration."""

from pathlib import Path

from gpt2_triton.commands.config_table import table

COMMITTED = Path(__file__).parents[2] / "docs" / "guide" / "config.md"


def test_committed_config_table_is_current():
    """Otherwise run `python -m gpt2_triton config-table > docs/guide/config.md`."""
    assert COMMITTED.read_text(encoding="utf-8") == table()


def test_config_table_shows_types_limits_and_defaults():
    lines = table().splitlines()
    for row in (
        "| `optim.final_frac` | float, at least 0, at most 1 | `0.0` | free "
        "| learning rate at the end, as a fraction of lr |",
        "| `log.wandb` | `online`, `offline`, `disabled` | `disabled` | free | send the metrics to Weights & Biases |",
        "| `train.total_batch_tokens` | int or `null`, at least 1, at most 2^40 | `null` | kept "
        "| tokens of a step; null is batch_size * seq_len |",
    ):
        assert row in lines
