"""`python -m benchmarks ops`: counted work, floors and tables.  The times themselves need a GPU."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from benchmarks.speed import floors, ops
from benchmarks.speed.our_gpt2 import begun, run_steps
from tests.support.launchers import launched
from tests.support.tiny import packed_batch, tiny_model


class Mark:
    def record(self):
        pass


@pytest.fixture
def record(monkeypatch):
    """record(level) runs one step of a tiny model in Timed kernels and returns its
    dimensions and its operations.

    The model has two layers, a padded vocabulary, and logits in chunks of 20 and 12 rows.
    """
    monkeypatch.setattr(ops, "events", lambda: (Mark(), Mark()))

    def run(level="gelu", **sections):
        timed = ops.Timed(on=lambda: False)
        sections["model"] = dict(vocab_size=300) | sections.get("model", {})
        sections |= dict(memory=dict(recompute=level, head_rows=20))
        model, config = tiny_model(timed, **sections)
        model.eager = True  # a capture would count each launch again
        packed = packed_batch(config)
        begun(model, packed)
        timed.on = lambda: True
        [result] = run_steps(model, packed, range(1))
        assert result.applied
        return SimpleNamespace(**model.dims), list(timed.operations.values())

    return run


def calls(operations, name):
    return sorted((op.nbytes, len(op.spans)) for op in operations if op.name == name)


# ---- what is counted ----


def test_timed_records_every_launcher_of_a_step(record, monkeypatch):
    names = launched(monkeypatch)
    _, operations = record()
    no_step = {"column_sums", "fill", "normal_init"}  # of other launchers, and of first weights
    assert {op.name for op in operations} == names - no_step
    with_products = "matmul matmul_add matmul_act matmul_dx matmul_dx_dact matmul_dw matmul_dw_pair"
    with_products += " classifier_fwd classifier_dx attention_fwd attention_bwd"
    assert {op.name for op in operations if op.flops} == {*with_products.split()}


@pytest.mark.parametrize("level", ["gelu", "block"])
def test_flops_of_a_step_are_6n_plus_attention(record, level):
    """N: 12 C^2 per layer, and the head; attention has 2 + 5 half products; `block`
    recomputes all but the last.
    """
    d, operations = record(level)
    C2, attention = d.C * d.C, d.B * d.T * d.T * d.C
    again = d.L * (2 * d.R * 8 * C2 + 2 * attention) if level == "block" else 0
    total = sum(op.flops * len(op.spans) for op in operations)
    assert total == 6 * d.R * (12 * d.L * C2 + d.Vp * d.C) + 7 * d.L * attention + again


def test_flops_of_llama_count_shared_keys_and_the_gate(record):
    d, operations = record(model=dict(arch="llama", n_head=2, n_kv_head=1, n_embd=128, n_inner=96))
    matrices = d.L * 128 * (128 + 2 * 64 + 128 + 3 * 96) + d.Vp * 128
    attention = d.B * d.T * d.T * 128
    total = sum(op.flops * len(op.spans) for op in operations)
    assert total == 6 * d.R * matrices + 7 * d.L * attention
    assert {op.attention for op in operations} == {None, (d.B, 2, 1, d.T, 64)}


def test_moved_bytes_of_a_step(record):
    """Tensors in fp32.  Operands and results count once, what is added to or updated
    twice, scratch not at all.
    """
    d, operations = record()
    rows, row, stats = 4 * d.R * d.C, 4 * d.C, 2 * 4 * d.R
    # step_out, step_in, step_key
    square, wide, numbers = 4 * d.C * d.C, 4 * 4 * d.C, 4 * (6 + 8 + 4)
    # x and out, mean and rstd, w and b
    assert calls(operations, "layernorm_fwd") == [(2 * rows + stats + 2 * row, 2 * d.L + 1)]
    # dout, x and dx, which is also read except by the head's call; layer
    # 0 has no bias in front of it
    head, first = 3 * rows + stats + 5 * row, 4 * rows + stats + 4 * row
    others = 2 * d.L - 1
    assert calls(operations, "layernorm_bwd") == [(head, 1), (first, 1), (first + row, others)]
    assert calls(operations, "matmul_act") == [(rows + 4 * square + wide + 2 * 4 * rows, d.L)]
    # dout, w, pre in; dpre, dbias and, at `gelu`, gelu_out
    assert calls(operations, "matmul_dx_dact") == [(rows + 4 * square + 3 * 4 * rows + wide, d.L)]
    # the head's second chunk also reads dwte, as it adds to it
    chunks = [4 * n * (d.Vp + d.C) + times * 4 * d.Vp * d.C for n, times in ((20, 1), (12, 2))]
    assert calls(operations, "matmul_dw") == sorted((chunk, 1) for chunk in chunks)
    # fcproj and fc: x or dx and a tensor four times as wide each;
    # attproj and qkv: dx, att, dqkv, ln
    narrow, broad = 6 * rows + 4 * square, 10 * rows + 8 * square
    assert calls(operations, "matmul_dw_pair") == [(narrow, d.L), (broad, d.L)]
    # x, ids, the tokens' rows of wte, all of wpe
    assert calls(operations, "embedding_fwd") == [(2 * rows + 4 * d.R + d.Tmax * row, 1)]
    # w, m, v read and written, g read; embedding, layers, norms and biases
    assert sum(n for n, _ in calls(operations, "adamw")) == 4 * 7 * d.N + 3 * numbers


@pytest.mark.slow
def test_bytes_and_products_of_a_step_in_fp8(record):
    """Rows and columns are a byte an element.  GELU's output and its gradient are written in both
    orders, weights and the head's exponentials too; attention's backward pass reads bf16.  The
    head takes all 32 rows at once.
    """
    d, operations = record(train=dict(dtype="bf16", precision="fp8"), fp8=dict(keep_bf16="none"))
    x, square, stats = d.R * d.C, d.C * d.C, 2 * 4 * d.R
    norms, last = 3 * x + stats + 4 * d.C, 5 * x + stats + 4 * d.C
    assert calls(operations, "layernorm_fwd") == [(norms, 2 * d.L), (last, 1)]
    # inp, w, bias; rows, columns, and a byte of the slope
    assert calls(operations, "matmul_act") == [(x + 4 * square + 2 * 4 * d.C + 3 * 4 * x, d.L)]
    # read in bf16, written in both orders
    assert calls(operations, "cast_weights") == [(12 * 4 * square, d.L)]
    exponentials, wte = d.R * d.Vp, d.Vp * d.C
    assert calls(operations, "cast_operand") == [(4 * wte, 1)]
    assert calls(operations, "classifier_fwd") == [(2 * exponentials + x + wte + 2 * 4 * d.R, 1)]
    assert calls(operations, "classifier_dx") == [(exponentials + wte + 2 * x + 3 * 4 * d.R, 1)]
    assert (exponentials + x + 4 * wte, 1) in calls(operations, "matmul_dw")
    in_fp8 = "matmul matmul_add matmul_act matmul_dx matmul_dx_dact matmul_dw matmul_dw_pair"
    in_fp8 += " classifier_fwd classifier_dx"
    found = {op.name for op in operations if op.fp8}
    assert {*in_fp8.split()} <= found and not {"attention_bwd", "adamw"} & found


# ---- floors and tables ----


def operation(name="matmul", products=(("forward", 128, 64, 32),), attention=None, fp8=False):
    return ops.Operation(name, "128x64 128x32", 2 * 10**9, 4 * 10**6, products, attention, fp8)


def test_floor_is_the_longest_time_with_its_name(monkeypatch):
    """Copies at 4 TB/s, so 4 MB take 0.001 ms."""
    monkeypatch.setattr(floors, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(floors, "product_ms", lambda *_: 0.5)
    monkeypatch.setattr(floors, "scaled_product_ms", lambda M, N, K, fast: 0.3 if fast else 0.35)
    monkeypatch.setattr(floors, "attention_ms", lambda *_: 0.25)
    assert ops.floor(operation()) == (0.5, "cuBLAS")
    assert ops.floor(operation(products=())) == (0.001, "copy")
    for layout, ms in (("forward", 0.3), ("dx", 0.3), ("dw", 0.35)):
        found = operation(products=((layout, 128, 64, 32),), fp8=True)
        assert ops.floor(found) == (ms, "cuBLAS fp8")
    assert ops.floor(operation("attention_fwd", (), (2, 1, 1, 16, 64))) == (0.25, "cuDNN")
    monkeypatch.setattr(floors, "copy_bandwidth", lambda: 4e9)
    assert ops.floor(operation()) == (1.0, "copy")


def test_times_are_of_the_second_half_and_a_copy_reads_and_writes(monkeypatch):
    mark, times = MagicMock(), [20.0] * 5 + [9.0] * 5 + [2.0] * 5
    mark.elapsed_time.side_effect = times
    monkeypatch.setattr(floors, "events", lambda: (mark, mark))
    monkeypatch.setattr(floors, "torch", MagicMock(**{"randn.return_value.nbytes": 10**9}))
    assert floors.median_ms(list, 100.0) == 2.0
    monkeypatch.setattr(floors, "median_ms", lambda _: 0.5)
    assert floors.copy_bandwidth.__wrapped__() == 4e12


ROWS = [
    ops.OpTime(operation(), 10, 0.8, 0.5, "cuBLAS"),
    ops.OpTime(operation("layernorm_fwd", ()), 5, 0.002, 0.001, "copy"),
]


def test_figures_add_up_equal_names():
    found = ops.figures([*ROWS, ROWS[0]], ops.Step(20.0, None))
    assert found["floors_ms"] == pytest.approx(10.005) and found["step_ms"] == 20.0
    first, second = found["operations"]
    assert first == dict(name="matmul", ms=16.0, floor_ms=10.0)
    assert second["name"] == "layernorm_fwd" and second["ms"] == pytest.approx(0.01)


def test_the_table_has_rates_floors_and_shares():
    _, product, norm, energy, sums = ops.table(ROWS, ops.Step(20.0, 10.0)).splitlines()
    assert product.split()[2:6] == ["10", "0.800", "8.00", "2.0"]  # GFLOP
    assert norm.split()[6:] == "4.0 1000 2000 0.001 copy 50% 0.1%".split()  # of 0.002 ms
    assert energy == "operations 8.0 ms, step 20.0 ms, 10.0 J, 500 W"
    assert sums == "floors 5.0 ms; operations 1.600x, step 3.996x"
