"""`python -m benchmarks tune`: the rows that it tries, and the tables that it writes."""

import pytest

from benchmarks.tune import candidates, tables
from gpt2_triton.kernels.table_file import OPTIONS, TABLES, choose, read_table

H200 = read_table(TABLES / "h200.json")


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090", "b200"])
@pytest.mark.parametrize("op", candidates.SPACE)
def test_candidates_begin_with_the_current_row_and_differ_in_its_parameters(name, op):
    current = read_table(TABLES / f"{name}.json").rows[op, "bf16"]
    rows = candidates.candidates(op, current, 99 << 10)
    assert rows[0] == current and len(rows) > 2
    assert len({tuple(sorted(row.items())) for row in rows}) == len(rows)
    for row in rows:
        assert set(row) <= {*current, *OPTIONS}
    without = {key: value for key, value in current.items() if key != "maxnreg"}
    assert not any(
        "maxnreg" in row for row in candidates.candidates(op, without, 64 << 10, caps=False)
    )


# in no training step
DECODING = {
    *("decode_matmul", "decode_matvec", "decode_attention", "cache_fill", "sample_keep"),
    "sample_token",
}
MUON = {"muon_symmetric", "muon_apply"}  # tune trains with AdamW
TRAINING = {op for op, _ in H200.rows} - DECODING - MUON


def test_space_covers_training_rows_except_wide_heads():
    assert set(candidates.SPACE) == {
        op for op in TRAINING if not (op.startswith("attention") and "wide" in op)
    }


@pytest.mark.parametrize("name", ["h200", "a100", "rtx4090", "b200", "interpreter"])
def test_text_writes_a_table_as_it_was_read(name):
    """A changed row is then one line of a diff."""
    assert tables.text(read_table(TABLES / f"{name}.json")) == (TABLES / f"{name}.json").read_text()


def test_a_changed_table_is_the_gpus_own_or_a_new_one(tmp_path):
    row = H200.rows["adamw", "bf16"] | dict(BLOCK=2048)
    new = tables.updated(H200, "NVIDIA H200", {("adamw", "bf16"): row})
    assert tables.file_of(H200, "h200", "NVIDIA H200").name == "h200.json"
    written = tmp_path / "h200.json"
    written.write_text(tables.text(new))
    assert read_table(written) == new and new.notes == H200.notes and new.capabilities == ["9.0"]
    assert new.rows == H200.rows | {("adamw", "bf16"): row}
    gpu = "NVIDIA H100 80GB HBM3"
    file, new = tables.file_of(H200, "h200", gpu), tables.updated(H200, gpu, {})
    assert (file.name, file.parent.name) == ("h100-80gb-hbm3.json", "tables")
    assert (new.gpu, new.capabilities, new.notes, new.source) == (gpu, [], [], "measured")
    assert choose(gpu, "9.0", {"h200": H200, "h100-80gb-hbm3": new}) == "h100-80gb-hbm3"
