"""Programs that fill sections of the record: text.py and epilogues.py of benchmarks/speed."""

import json

import numpy as np
import pytest

from benchmarks.speed import epilogues, text
from gpt2_triton.data.shards import write_shard
from tests.conftest import DEVICE


def test_losses_of_tokens_become_nats_per_byte(tmp_path):
    shards = tmp_path / "data" / "my_gpt2_0123abcd"
    shards.mkdir(parents=True)
    write_shard(shards / "val_000000.bin", np.array([464, 3290, 464, 3290], np.uint16))  # The dog
    steps = [{"step": step, "loss": 5.0, "ms": 100.0} for step in range(1, 21)]
    losses = [{"step": step, "val_loss": loss} for step, loss in ((0, 9.1), (4, 8.4), (10, 7.0))]
    found = text.outcome([*steps, *losses, losses[0] | {"step": 20}], tmp_path, "gpt2", 0.5)
    assert found["bytes_per_token"] == len("The dogThe dog") / 4
    assert found["nats"] == pytest.approx(7.0 / 3.5) and found["seconds"] == pytest.approx(1.0)
    assert found["early_nats"] == pytest.approx(8.4 / 3.5) and found["ms"] == 100.0


def test_epilogues_are_shares_of_the_plain_products_of_their_shape(tmp_path, monkeypatch):
    shape = epilogues.Shape(32, 16, 16, (40, 48))
    pairs = epilogues.pairs(shape, DEVICE)
    calls = [call for pair in pairs.values() for call in pair]
    times = {call: 3.0 if i % 2 == 0 else 2.0 for i, call in enumerate(calls)}
    monkeypatch.setattr(epilogues, "SHAPES", {"d12": shape})
    monkeypatch.setattr(epilogues, "pairs", lambda shape: pairs)
    monkeypatch.setattr(epilogues, "median_ms", lambda call, milliseconds: times[call])
    out = tmp_path / "record.json"
    epilogues.measure(out, commit="abc1234")
    section = json.loads(out.read_text())["epilogues"]
    assert section.pop("meta")["commit"] == "abc1234"
    assert section == {f"{name}.d12": 0.5 for name in pairs}
