"""`python -m benchmarks tune`: the search with a made-up clock, refused candidates, the tables that it writes."""

import contextlib
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gpt2_triton.kernels
from benchmarks import calls, candidates, rehearsal, tune, tuning_tables, tuning_time
from benchmarks.our_gpt2 import run_steps
from benchmarks.tuning_record import Record
from benchmarks.tuning_time import Speed
from gpt2_triton import __version__, device
from gpt2_triton.errors import ConfigError
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.table_file import OPTIONS, TABLES, choose, read_table
from gpt2_triton.model.memory_plan import CONTEXT_BYTES, MODULE_BYTES
from tests.support.tiny import packed_batch, tiny_model

H200 = read_table(TABLES / "h200.json")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs the interpreter's table")

# ---- the choice of a row ----


@pytest.mark.parametrize(
    ("times", "keep"),
    [
        ({"d12": [1.0, 0.99]}, 0),
        ({"d12": [1.0, 0.982]}, 0),  # 1.8%
        ({"d12": [1.0, 0.979, 0.99]}, 1),  # 2.1%
        ({"d12": [1.0, 0.97, 0.9]}, 2),
        ({"d12": [1.0, 0.9], "d48": [2.0, 2.03]}, 1),  # 1.5% slower at one size
        ({"d12": [1.0, 0.9], "d48": [2.0, 2.05]}, 0),  # 2.5%
        ({"d12": [1.0, 0.9], "d48": [2.0, None]}, 0),  # failed or wrong at one size
        ({"d12": [1.0, 1.3, 1.4]}, 0),
        ({}, 0),  # no call used it
    ],
)
def test_winner_gains_2_percent_and_loses_2_percent_at_no_size(times, keep):
    rows = [{}] * len(next(iter(times.values()), [0]))
    assert tune.winner(rows, times) == keep


def test_gain_is_the_geometric_mean_over_sizes():
    assert tune.gain({"d12": [2.0, 1.0], "d24": [8.0, 8.0]}, 1) == pytest.approx(math.sqrt(2))


def test_finalists_are_the_current_row_and_the_best_that_gain():
    rows = [dict(BLOCK=b) for b in range(6)]
    times = {"d12": [1.0, 0.9, 1.01, 0.8, 0.99, 0.7]}
    assert [row["BLOCK"] for row in tune.finalists(rows, times)] == [0, 5, 3, 1]
    assert tune.finalists(rows, {"d12": [1.0] * 6}) == rows[:1]


# ---- the estimate ----

# a machine with an RTX 4090: NVIDIA's data sheet, dense bf16 with fp32 sums
RTX4090 = Speed(flops=165.2e12, bandwidth=1.008e12, cores=8)


def work_for(name, gpu):
    """Return batches and work of a search with table `name` on a GPU of device.py, without a GPU."""
    rows = calls.Rows(read_table(TABLES / f"{name}.json").rows)
    rows.used = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "table", lambda: H200._replace(rows=rows))
        tries = {op: candidates.candidates(op, rows[op, "bf16"], 99 << 10) for op in candidates.SPACE}
        batches = tuning_time.batches_of(None, None, device.memory_bytes(gpu) - CONTEXT_BYTES - MODULE_BYTES)
        return tries, batches, tuning_time.work_of(batches, tries, rows, "bf16")


@no_gpu
def test_search_on_24_gb_is_estimated_at_10_minutes_at_most():
    """For the sizes that the GPU can train, on a machine with eight cores."""
    tries, batches, work = work_for("rtx4090", "4090")
    assert batches == {"d12": 64, "d24": 32, "d36": 8}
    seconds = tuning_time.seconds_of(work, RTX4090, tune.SCREEN, tune.FINAL, tune.FINALISTS + 1)
    assert 120 < sum(seconds.values()) <= 600
    page = Path(__file__).parents[2] / "docs" / "guide" / "hardware.md"
    assert f"{sum(seconds.values()) / 60:.0f} minutes for 24 GB" in page.read_text()
    assert {w.op for w in work} == set(tries)
    assert all(w.candidates == len(tries[w.op]) for w in work)
    first = [w for w in work if w.op == "matmul"][:2]  # the products of qkv and attproj: the second adds a residual
    assert [w.kernels for w in first] == [len(tries["matmul"])] * 2 and first[0].flops == 2 * 65536 * 768 * 2304
    assert first[1].nbytes == 2 * (3 * 65536 * 768 + 768 * 768 + 768)
    assert sum(w.kernels for w in work if w.size == "d36") < sum(w.kernels for w in work if w.size == "d12") / 2


def test_sizes_and_batches_follow_the_memory():
    assert tuning_time.batches_of(None, None, device.memory_bytes("h200")) == dict(d12=64, d24=64, d36=32, d48=16)
    assert tuning_time.batches_of(None, None, 2 << 30) == dict(d12=1)
    assert tuning_time.batches_of(["d48"], None, 22 << 30) == dict(d48=1)
    assert tuning_time.batches_of(["d12", "d48"], 2, 1 << 30) == dict(d12=2, d48=2)
    assert tuning_time.batches_of(None, 2, 23 << 30) == dict(d12=2, d24=2, d36=2)


@no_gpu
def test_rehearsed_calls_are_those_of_a_step(monkeypatch):
    """The same launchers, shapes, flags and rows, in the same order."""
    model, packed = small_model(n_layer=1)
    monkeypatch.setattr(calls, "model_of", lambda config, K: small_model(K, n_layer=1))
    stopped = []
    with calls.recorded_rows() as rows:
        calls.intercepted_step("d12", 2, rows, lambda call: stopped.append((call.key, call.used)))
        rehearsed = [(call.key, call.used) for call in rehearsal.calls_of(model.config, rows)]
    assert rehearsed == stopped and len(stopped) > 20


@no_gpu
def test_kernels_that_triton_compiles_once_are_equal(rng):
    """Sizes are arguments; blocks, warps, flags and missing tensors make another kernel."""
    x, wide, w, bias = rng(32, 64), rng(32, 128), rng(64, 64), rng(64)
    with rehearsal.recorded_kernels() as found:
        gpt2_triton.kernels.matmul(x, x, w, bias)
        gpt2_triton.kernels.matmul(x.clone(), x, w, bias)
        one = len(found)
        gpt2_triton.kernels.matmul(x, x, w, None)
        two = len(found)
        gpt2_triton.kernels.matmul_gelu(x, x, x, w, bias)
    assert (one, two, len(found)) == (1, 2, 3) and not torch.equal(x, wide[:, :64])


# ---- a search that is interrupted ----


def recorded(path, **changes):
    return Record(path, dict(gpu="a", batches=dict(d12=64)) | changes)


def test_record_keeps_measurements_of_the_same_search(tmp_path):
    line = {"pass": "screening", "size": "d12", "call": "adamw 8", "op": "adamw", "ms": {"0": 1.0}, "dropped": {}}
    path = tmp_path / "t.json.part"
    recorded(path).add(line)
    with open(path, "a") as file:
        file.write('{"pass": "scree')  # cut off by the interruption
    again = recorded(path)
    assert again.of("screening", "d12") == {("adamw 8", "adamw"): line} and again.measurements == 1
    assert not again.is_complete("screening", "d12")
    again.add({"pass": "screening", "size": "d12"})
    assert recorded(path).is_complete("screening", "d12") and not recorded(path).is_complete("finals", "d12")
    other = recorded(path, gpu="b")
    assert other.replaced and other.measurements == 0  # and the file is the new search's
    assert recorded(path).replaced and not recorded(path).replaced
    recorded(path).remove()
    assert not path.exists()


# ---- the candidates ----


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090", "b200"])
@pytest.mark.parametrize("op", candidates.SPACE)
def test_candidates_begin_with_the_current_row_and_keep_fixed_values(name, op):
    current = read_table(TABLES / f"{name}.json").rows[op, "bf16"]
    rows = candidates.candidates(op, current, 99 << 10)
    assert rows[0] == current and len(rows) > 2
    assert len({tuple(sorted(row.items())) for row in rows}) == len(rows)
    for row in rows:
        assert all(row[block] == current[block] for block in candidates.FIXED.get(op, ()))
        assert set(row) <= {*current, *OPTIONS}


def test_candidates_without_caps_on_registers():
    current = {name: n for name, n in H200.rows["attention_bwd_dq", "bf16"].items() if name != "maxnreg"}
    rows = candidates.candidates("attention_bwd_dq", current, 64 << 10, caps=False)
    assert len(rows) > 2 and not any("maxnreg" in row for row in rows)


DECODING = {"decode_matmul", "decode_matvec", "decode_attention", "cache_fill", "sample_token"}  # in no training step
MUON = {"muon_symmetric", "muon_apply"}  # tune trains with AdamW
TRAINING = {op for op, _ in H200.rows} - DECODING - MUON


def test_space_covers_training_rows_except_wide_heads():
    assert set(candidates.SPACE) == {op for op in TRAINING if not (op.startswith("attention") and "wide" in op)}


def test_select_takes_operations_and_families(monkeypatch):
    monkeypatch.setattr(tuning, "is_hopper", lambda: False)
    assert tune.select(None) == list(candidates.SPACE)
    assert tune.select("attention,adamw") == ["attention_fwd", "attention_bwd_dkdv", "attention_bwd_dq", "adamw"]
    assert tune.select("layernorm_fwd") == ["layernorm_fwd"]
    with pytest.raises(ConfigError, match="--only: unknown conv; known are matmul, classifier, embedding"):
        tune.select("adamw,conv")


def test_select_leaves_out_operations_with_hopper_kernels(monkeypatch):
    monkeypatch.setattr(tuning, "is_hopper", lambda: True)
    assert "classifier_dx" in tune.select(None) and "matmul" not in tune.select(None)
    for only in ("matmul", "attention"):
        with pytest.raises(ConfigError, match=f"--only: {only} has no rows to tune on this GPU"):
            tune.select(only)


# ---- the comparison of outputs ----


def test_worst_is_the_error_of_the_worst_256_numbers():
    want = torch.randn(100, 300)
    got = want.clone()
    assert calls.worst(got, want) == 0.0
    got[50] *= 1 + 2.0**-7  # a unit in the last place of bf16 in one row
    assert 2.0**-8 < calls.worst(got, want) < tune.TOLERANCE
    got[50] = 0.0
    assert calls.worst(got, want) > 0.5
    got[50] = math.nan
    assert calls.worst(got, want) == math.inf
    want[50] = math.nan  # neither wrote it
    assert calls.worst(got, want) == 0.0


# ---- a search, on a step of the tiny model ----


@pytest.fixture
def tiny(monkeypatch):
    """tiny(ops, clock) replaces sizes by a model of one layer in bf16, compiles nothing, and makes a launch take
    clock(rows) milliseconds, with the rows when it was recorded.
    """

    @contextlib.contextmanager
    def compiling(ignore_errors):
        with monkeypatch.context() as patch:
            patch.setattr(calls.Call, "__call__", lambda self: None)
            yield

    def made(spaces, clock=lambda rows: 1.0):
        monkeypatch.setattr(candidates, "SPACE", spaces)
        monkeypatch.setattr(tune, "SPACE", spaces)
        monkeypatch.setattr(candidates, "FITS", {})
        monkeypatch.setattr(gpt2_triton.kernels, "compiling", compiling)
        monkeypatch.setattr(calls.Trial, "_launches", lambda self: 1)
        monkeypatch.setattr(calls.Trial, "graph", lambda self: dict(tuning.table().rows))
        monkeypatch.setattr(calls, "interleaved", lambda graphs, _: {i: clock(rows) for i, rows in graphs.items()})
        monkeypatch.setattr(calls, "model_of", lambda config, K: small_model(K, n_layer=1))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA RTX 9 Ada")
        properties = SimpleNamespace(shared_memory_per_block_optin=99 << 10)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(tuning_time, "speed_of_this_machine", lambda: RTX4090)

    return made


def small_model(K=None, n_layer=2):
    model, config = tiny_model(K, model=dict(n_layer=n_layer), train=dict(dtype="bf16"))
    model.eager = True
    return model, packed_batch(config)


@no_gpu
def test_tune_writes_only_the_row_that_gains(tiny, tmp_path, capsys):
    """adamw is fastest with BLOCK 32768; layernorm gains only 1%."""

    def clock(rows):
        adamw, norm = rows["adamw", "bf16"]["BLOCK"], rows["layernorm_fwd", "bf16"]["ROWS"]
        return (0.5 if adamw == 32768 else 1.0) * (0.99 if norm == 64 else 1.0)

    tiny(dict(adamw=dict(BLOCK=(32768, 65536)), layernorm_fwd=dict(ROWS=(64, 128))), clock)
    out, before = tmp_path / "new.json", tuning.table()
    assert tune.tune(["d12", "d24"], None, None, out) == 0
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
    assert "tuning for NVIDIA RTX 9 Ada: d12 B 64, d24 B 64; " in text and "minutes, an estimate from 165" in text
    assert f"GPT2_TRITON_TABLE={out}" in text and list(tmp_path.iterdir()) == [out]


def read_table_of(file: Path):
    """Read a GPU's table with rows of the interpreter, which have no options."""
    file.write_text(file.read_text().replace('"NVIDIA RTX 9 Ada"', '"interpreter"'))
    return read_table(file)._replace(gpu="NVIDIA RTX 9 Ada")


def launch(out):
    """A launcher of the row of adamw."""
    tuning.tuned("adamw", "bf16")


launch.outputs = 1


def step_of_one_call(size, batch, rows, on_call):
    """Take the place of calls.intercepted_step."""
    on_call(calls.Call(launch, (torch.zeros(4),), {}, {("adamw", "bf16")}))


@no_gpu
def test_tune_writes_nothing_without_a_gain(tiny, tmp_path, monkeypatch, capsys):
    """A GPU that uses another one's table gets its own, with the same rows."""
    monkeypatch.setattr(calls, "intercepted_step", step_of_one_call)
    tiny(dict(adamw=dict(BLOCK=(32768, 65536))))
    assert tune.tune(["d12"], None, "adamw", tmp_path / "new.json") == 0
    assert "0 rows changed" in capsys.readouterr().out
    assert read_table_of(tmp_path / "new.json").rows == tuning.table().rows
    (tmp_path / "new.json").unlink()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: tuning.table().gpu)
    assert tune.tune(["d12"], None, "adamw", tmp_path / "new.json") == 0
    assert "no row gains 2%: nothing is written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@no_gpu
@pytest.mark.parametrize("passes", [1, 2])
def test_interrupted_search_goes_on_where_it_stopped(tiny, tmp_path, monkeypatch, capsys, passes):
    """Interrupted in the second size, of the screening or of the finals; nothing is measured twice, and the table is
    that of an unbroken search.
    """
    sizes, measured = ["d12", "d24"], []

    def clock(rows):
        measured.append(rows["adamw", "bf16"]["BLOCK"])
        return 1.0 if rows["adamw", "bf16"]["BLOCK"] == 1 << 18 else 0.5

    monkeypatch.setattr(calls, "intercepted_step", step_of_one_call)
    tiny(dict(adamw=dict(BLOCK=(32768, 65536))), clock)
    assert tune.tune(sizes, None, None, tmp_path / "whole.json") == 0
    whole, started = measured.copy(), []
    measured.clear()

    def interrupted(size, *arguments):
        started.append(size)
        if len(started) == 2 * passes:
            raise KeyboardInterrupt
        step_of_one_call(size, *arguments)

    monkeypatch.setattr(calls, "intercepted_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(sizes, None, None, tmp_path / "new.json")
    assert {path.name for path in tmp_path.iterdir()} == {"whole.json", "new.json.part"}
    assert tune.tune(sizes, None, None, tmp_path / "new.json") == 0
    assert started == [*(sizes * 2)[: 2 * passes], *(sizes * 2)[2 * passes - 1 :]]
    assert measured == whole and "measurements are in" in capsys.readouterr().out
    assert (tmp_path / "new.json").read_text() == (tmp_path / "whole.json").read_text()


@no_gpu
def test_tune_drops_candidates_that_fail_or_are_wrong(tiny, tmp_path, monkeypatch, capsys):
    right = gpt2_triton.kernels.adamw

    def adamw(*args):
        block = tuning.tuned("adamw", "bf16")["BLOCK"]
        if block == 32768:
            raise RuntimeError("out of resource: shared memory")
        right(*args)
        if block == 65536:
            args[0][3] += 1.0  # one weight of all

    adamw.outputs = right.outputs
    adamw.__wrapped__ = right
    adamw.__name__ = "adamw"
    monkeypatch.setattr(gpt2_triton.kernels, "adamw", adamw)
    tiny(dict(adamw=dict(BLOCK=(32768, 65536))), lambda rows: rows["adamw", "bf16"]["BLOCK"])
    assert tune.tune(["d12"], None, None, tmp_path / "new.json") == 0
    text = capsys.readouterr().out
    assert "1 candidates need more than this GPU has" in text
    assert "WRONG: adamw {'BLOCK': 65536}: its numbers differ from the current row's by" in text
    assert "0 rows changed" in text


@no_gpu
def test_intercepted_step_has_the_bytes_of_a_plain_step(tiny, tmp_path):
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

        search = tune.Search("screening", rows, tries, 1, recorded(tmp_path / "part"))
        search.run(["d12"], step, lambda *measured: None)
    assert not search.dropped
    assert {op for op, times in search.times.items() if not times} == {op for op in TRAINING if "wide" in op}
    for name, flat in model.state_buffers().items():
        assert torch.equal(flat, stopped["model"].state_buffers()[name]), name
    assert torch.equal(model.state.step_out, stopped["model"].state.step_out)


# ---- tables as files ----


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090", "b200", "interpreter"])
def test_text_writes_a_table_as_it_was_read(name):
    """A changed row is then one line of a diff."""
    assert tuning_tables.text(read_table(TABLES / f"{name}.json")) == (TABLES / f"{name}.json").read_text()


def test_updated_keeps_the_rest_of_the_gpus_own_table(tmp_path):
    row = H200.rows["adamw", "bf16"] | dict(BLOCK=2048)
    new = tuning_tables.updated(H200, "NVIDIA H200", {("adamw", "bf16"): row})
    assert tuning_tables.file_of(H200, "h200", "NVIDIA H200").name == "h200.json"
    assert new.notes == H200.notes and new.capabilities == ["9.0"]
    written = tmp_path / "h200.json"
    written.write_text(tuning_tables.text(new))
    again = read_table(written)
    assert again == new and again.rows["adamw", "bf16"] == row
    assert again.rows["adamw", "fp32"] == H200.rows["adamw", "fp32"]
    assert again.rows.keys() == H200.rows.keys()


def test_updated_gives_a_gpu_without_a_table_a_new_one():
    gpu = "NVIDIA H100 80GB HBM3"
    file, new = tuning_tables.file_of(H200, "h200", gpu), tuning_tables.updated(H200, gpu, {})
    assert (file.name, file.parent.name) == ("h100-80gb-hbm3.json", "tables")
    assert (new.gpu, new.capabilities, new.notes, new.source) == (gpu, [], [], "measured")
    assert choose(gpu, "9.0", {"h200": H200, "h100-80gb-hbm3": new}) == "h100-80gb-hbm3"
