"""docs/config.md is what the configuration's declarations say."""

from pathlib import Path

from gpt2_triton.commands.config_table import table
from gpt2_triton.config.config import options

COMMITTED = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_committed_table_is_the_generated_one():
    """If not: python -m gpt2_triton config-table > docs/config.md"""
    assert COMMITTED.read_text(encoding="utf-8") == table()


def test_every_key_has_a_meaning_and_one_row():
    text = table()
    for key, field in options():
        assert field.description and text.count(f"| `{key}` |") == 1


def test_types_limits_and_defaults():
    lines = table().splitlines()
    for row in (
        "| `optim.final_frac` | float, at least 0, at most 1 | `0.0` | free "
        "| learning rate at the end, as a fraction of lr |",
        "| `log.wandb` | `online`, `offline`, `disabled` | `disabled` | free "
        "| mirror the metrics to Weights & Biases |",
        "| `train.total_batch_tokens` | int or `null`, at least 1 | `null` | kept "
        "| tokens of a step; null is batch_size * seq_len |",
    ):
        assert row in lines
