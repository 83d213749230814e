"""`python -m benchmarks tune`: the search with a made-up clock, and refused candidates."""

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch

import gpt2_triton.kernels
from benchmarks.tune import calls, candidates, search, tables
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.table_file import TABLES, read_table
from tests.support.tiny import packed_batch, tiny_model


def test_space_has_every_row_of_a_step_but_wide_heads():
    no_step = {"decode_matmul", "decode_matvec", "decode_attention", "cache_fill"}
    no_step |= {"sample_keep", "sample_token"}
    no_step |= {"muon_symmetric", "muon_apply"}  # tune trains with AdamW
    wide = {"attention_fwd_wide", "attention_bwd_dq_wide", "attention_bwd_dkdv_wide"}
    rows = {op for op, _ in read_table(TABLES / "h200.json").rows}
    assert rows - no_step - wide == set(candidates.SPACE)


def test_a_search_writes_the_gpus_own_table_or_a_new_one():
    h200 = read_table(TABLES / "h200.json")
    gpus = ("NVIDIA H200", "NVIDIA H100 80GB HBM3")
    names = [tables.file_of(h200, "h200", gpu).name for gpu in gpus]
    assert names == ["h200.json", "h100-80gb-hbm3.json"]


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090", "b200"])
def test_candidates_begin_with_the_current_row(name):
    """And are unlike each other."""
    for (op, dtype), current in read_table(TABLES / f"{name}.json").rows.items():
        if op in candidates.SPACE and dtype == "bf16":
            rows = candidates.candidates(op, current, 99 << 10)
            assert rows[0] == current and len(rows) > 2
            assert len({tuple(sorted(row.items())) for row in rows}) == len(rows)


@pytest.mark.parametrize(
    ("times", "keep"),
    [
        ({"d12": [1.0, 0.982]}, 0),  # 1.8%
        ({"d12": [1.0, 0.979, 0.99]}, 1),  # 2.1%
        ({"d12": [1.0, 0.9], "d48": [2.0, 2.03]}, 1),  # 1.5% slower at one size
        ({"d12": [1.0, 0.9], "d48": [2.0, 2.05]}, 0),  # 2.5%
        ({"d12": [1.0, 0.9], "d48": [2.0, None]}, 0),  # failed or wrong at one size
        ({}, 0),  # no call used it
    ],
)
def test_winner_gains_2_percent_and_loses_2_percent_at_no_size(times, keep):
    rows = [{}] * len(next(iter(times.values()), [0]))
    assert search.winner(rows, times) == keep


def test_worst_is_the_error_of_the_worst_256_numbers():
    want = torch.randn(100, 300)
    got = want.clone()
    assert calls.worst(got, want) == 0.0
    got[50] *= 1 + 2.0**-7  # a unit in the last place of bf16 in one row
    assert 2.0**-8 < calls.worst(got, want) < search.TOLERANCE
    got[50] = 0.0
    assert calls.worst(got, want) > 0.5
    got[50] = math.nan
    assert calls.worst(got, want) == math.inf
    want[50] = math.nan  # neither wrote it
    assert calls.worst(got, want) == 0.0


@pytest.fixture
def tune(monkeypatch, tmp_path):
    """tune(spaces, clock): tune a model of one layer, nothing compiled, and return the table; a
    recorded launch takes clock(rows) milliseconds.
    """

    @contextlib.contextmanager
    def compiling(ignore_errors):
        with monkeypatch.context() as patch:
            patch.setattr(calls.Call, "__call__", lambda self: None)
            yield

    def model_of(config, K):
        model, config = tiny_model(K, model=dict(n_layer=1), train=dict(dtype="bf16"))
        model.eager = True
        return model, packed_batch(config)

    def made(spaces, clock):
        def timed(graphs, _):
            return {i: clock(rows) for i, rows in graphs.items()}

        for module in (candidates, search):
            monkeypatch.setattr(module, "SPACE", spaces)
        monkeypatch.setattr(candidates, "FITS", {})
        monkeypatch.setattr(gpt2_triton.kernels, "compiling", compiling)
        monkeypatch.setattr(calls.Trial, "_launches", lambda self: 1)
        monkeypatch.setattr(calls.Trial, "graph", lambda self: dict(tuning.table().rows))
        monkeypatch.setattr(calls, "interleaved", timed)
        monkeypatch.setattr(calls, "model_of", model_of)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX 9 Ada")
        properties = SimpleNamespace(shared_memory_per_block_optin=99 << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        out = tmp_path / "new.json"
        assert search.tune(["d12", "d24"], None, None, out) == 0
        # read as a GPU's: rows of the interpreter have no options
        out.write_text(out.read_text().replace('"NVIDIA RTX 9 Ada"', '"interpreter"'))
        return read_table(out)

    return made


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter's table")
def test_tune_writes_only_the_row_that_gains_and_is_right(tune, monkeypatch, capsys):
    """layernorm gains with ROWS 64; adamw would, but fails or is wrong; embedding_fwd gains 1%."""
    right = gpt2_triton.kernels.adamw

    def adamw(*args):
        block = tuning.tuned("adamw", "bf16")["BLOCK"]
        if block == 32768:
            raise RuntimeError("out of resource: shared memory")
        right(*args)
        if block == 65536:
            args[0].w[3] += 1.0  # one weight of all

    adamw.contract = right.contract
    adamw.__wrapped__ = right
    adamw.__name__ = "adamw"
    monkeypatch.setattr(gpt2_triton.kernels, "adamw", adamw)

    def clock(rows):
        norm, wte = rows["layernorm_fwd", "bf16"]["ROWS"], rows["embedding_fwd", "bf16"]["BLOCK_C"]
        faster = rows["adamw", "bf16"]["BLOCK"] / (1 << 18)
        return faster * (0.5 if norm == 64 else 1.0) * (0.99 if wte == 512 else 1.0)

    before = tuning.table()
    spaces = dict(adamw=dict(BLOCK=(32768, 65536)), layernorm_fwd=dict(ROWS=(64, 128)))
    new = tune(spaces | dict(embedding_fwd=dict(BLOCK_C=(512,))), clock)
    text = capsys.readouterr().out
    assert "1 candidates need more than this GPU has" in text
    assert "WRONG: adamw {'BLOCK': 65536}: its numbers differ from the current row's by" in text
    assert "+100.0%  ROWS 512 -> 64" in text and tuning.table() is before
    changed = {key for key in new.rows if new.rows[key] != before.rows[key]}
    assert changed == {("layernorm_fwd", "bf16")}
    assert new.capabilities == [] and new.source == "measured"
