"""`python -m benchmarks tune`: the search with a made-up clock, and refused candidates."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpt2_triton.kernels
from benchmarks.speed.our_gpt2 import run_steps
from benchmarks.tune import calls, candidates, search
from gpt2_triton import __version__
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.table_file import read_table
from tests.benchmarks.tune.test_tables import TRAINING
from tests.support.models import require_equal_states
from tests.support.tiny import packed_batch, tiny_model

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter's table")

# ---- the choice of a row ----


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
    assert search.gain({"d12": [2.0, 1.0], "d24": [8.0, 8.0]}, 1) == pytest.approx(math.sqrt(2))


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


# ---- a search, on a step of the tiny model ----


@pytest.fixture
def tiny(monkeypatch):
    """tiny(ops, clock): a model of one layer, nothing compiled; a recorded launch takes
    clock(rows) milliseconds.
    """

    @contextlib.contextmanager
    def compiling(ignore_errors):
        with monkeypatch.context() as patch:
            patch.setattr(calls.Call, "__call__", lambda self: None)
            yield

    def made(spaces, clock=lambda rows: 1.0):
        monkeypatch.setattr(candidates, "SPACE", spaces)
        monkeypatch.setattr(search, "SPACE", spaces)
        monkeypatch.setattr(candidates, "FITS", {})
        monkeypatch.setattr(gpt2_triton.kernels, "compiling", compiling)
        monkeypatch.setattr(calls.Trial, "_launches", lambda self: 1)
        monkeypatch.setattr(calls.Trial, "graph", lambda self: dict(tuning.table().rows))
        monkeypatch.setattr(
            calls, "interleaved", lambda graphs, _: {i: clock(rows) for i, rows in graphs.items()}
        )
        monkeypatch.setattr(calls, "model_of", lambda config, K: small_model(K, n_layer=1))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX 9 Ada")
        properties = SimpleNamespace(shared_memory_per_block_optin=99 << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)

    return made


def small_model(K=None, n_layer=2):
    model, config = tiny_model(K, model=dict(n_layer=n_layer), train=dict(dtype="bf16"))
    model.eager = True
    return model, packed_batch(config)


@no_gpu
@pytest.mark.slow
def test_tune_writes_only_the_row_that_gains(tiny, tmp_path, capsys):
    """adamw is fastest with BLOCK 32768; layernorm gains only 1%."""

    def clock(rows):
        adamw, norm = rows["adamw", "bf16"]["BLOCK"], rows["layernorm_fwd", "bf16"]["ROWS"]
        return (0.5 if adamw == 32768 else 1.0) * (0.99 if norm == 64 else 1.0)

    tiny(dict(adamw=dict(BLOCK=(32768, 65536)), layernorm_fwd=dict(ROWS=(64, 128))), clock)
    out, before = tmp_path / "new.json", tuning.table()
    assert search.tune(["d12", "d24"], None, None, out) == 0
    assert tuning.table() is before and before.rows["adamw", "bf16"]["BLOCK"] == 1 << 18
    text = capsys.readouterr().out
    adamw = next(line for line in text.splitlines() if line.startswith("adamw"))
    assert "+100.0%  BLOCK 262144 -> 32768" in adamw
    assert "+1.0%  unchanged (ROWS 512 -> 64)" in text
    assert f"wrote {out}: 1 rows changed" in text
    new = read_table_of(out)
    assert new.gpu == "NVIDIA RTX 9 Ada" and new.capabilities == [] and new.source == "measured"
    changed = {key for key in new.rows if new.rows[key] != before.rows[key]}
    assert changed == {("adamw", "bf16")} and new.version == __version__
    assert "tuning for NVIDIA RTX 9 Ada, some minutes: d12 B 64, d24 B 64" in text
    assert f"GPT2_TRITON_TABLE={out}" in text and list(tmp_path.iterdir()) == [out]


def read_table_of(file: Path):
    """Read a GPU's table with rows of the interpreter, which have no options."""
    file.write_text(file.read_text().replace('"NVIDIA RTX 9 Ada"', '"interpreter"'))
    return read_table(file)._replace(gpu="NVIDIA RTX 9 Ada")


@no_gpu
def test_tune_drops_candidates_that_fail_or_are_wrong(tiny, tmp_path, monkeypatch, capsys):
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
    tiny(dict(adamw=dict(BLOCK=(32768, 65536))), lambda rows: rows["adamw", "bf16"]["BLOCK"])
    assert search.tune(["d12"], None, None, tmp_path / "new.json") == 0
    text = capsys.readouterr().out
    assert "1 candidates need more than this GPU has" in text
    assert "WRONG: adamw {'BLOCK': 65536}: its numbers differ from the current row's by" in text
    assert "0 rows changed" in text


@no_gpu
@pytest.mark.slow
def test_intercepted_step_has_the_bytes_of_a_plain_step(tiny):
    """Each row is tried at each launcher, and everything written is restored."""
    stopped = {}
    tiny({})
    model, packed = small_model()
    list(run_steps(model, packed, range(2)))

    def model_of(config, K):
        stopped["model"], batch = small_model(K)
        return stopped["model"], batch

    calls.model_of = model_of  # `tiny` restores it
    with calls.recorded_rows() as rows:
        tries = {op: [rows[op, "bf16"], dict(rows[op, "bf16"])] for op in TRAINING}

        def step(size, on_call):
            calls.intercepted_step(size, 2, rows, on_call)

        found = search.Search(rows, tries, 1)
        found.run(["d12"], step, lambda *measured: None)
    assert not found.dropped
    assert {op for op, times in found.times.items() if not times} == {
        op for op in TRAINING if "wide" in op
    }
    require_equal_states(model, stopped["model"])
    assert torch.equal(model.state.step_out, stopped["model"].state.step_out)
