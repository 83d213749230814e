"""Tuning tables: complete, with valid values and equal scratch sizes, chosen by GPU; an unusable table is one line."""

import json

import pytest
import torch

from benchmarks.candidates import FIXED
from gpt2_triton.errors import ConfigError
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.hopper import pipeline
from gpt2_triton.kernels.tiles import split_tiles
from gpt2_triton.kernels.tuning import DTYPES, OPTIONS, TABLES, choose, read_table

FILES = sorted(file.name for file in TABLES.iterdir())
GPUS = {file.removesuffix(".json"): read_table(TABLES / file) for file in FILES if file != "interpreter.json"}


def test_tables_are_package_data():
    assert FILES == ["a100.json", "b200.json", "h200.json", "interpreter.json", "rtx4090.json"]
    assert TABLES.parent.joinpath("tuning.py").is_file()  # inside the package, all of which the wheel takes


@pytest.mark.parametrize("file", FILES)
def test_table_has_a_row_for_each_operation_and_dtype_and_no_other(file):
    assert read_table(TABLES / file).rows.keys() == GPUS["h200"].rows.keys()
    assert {dtype for _, dtype in GPUS["h200"].rows} == set(DTYPES)


@pytest.mark.parametrize("file", FILES)
def test_table_values_are_valid(file):
    """Blocks, rows and warps are powers of 2; a GPU's row has num_warps, the interpreter's no option of Triton's."""
    table = read_table(TABLES / file)
    assert table.source in ("measured", "default")
    for (op, dtype), row in table.rows.items():
        complete = GPUS["h200"].rows[op, dtype].keys() - OPTIONS
        options = row.keys() - complete
        assert options == set() if file == "interpreter.json" else "num_warps" in options <= set(OPTIONS), (op, dtype)
        for name, value in row.items():
            assert type(value) is int and value >= 1, (op, dtype, name)
            if name.startswith("BLOCK") or name in ("ROWS", "num_warps"):
                assert value & (value - 1) == 0, (op, dtype, name)


def test_blocks_that_size_scratch_are_the_same_for_every_gpu():
    """A memory plan made without a GPU must fit the GPU that the run gets."""
    first = GPUS["h200"].rows
    for name, table in GPUS.items():
        for (op, dtype), row in table.rows.items():
            for block in FIXED.get(op, ()):
                assert row[block] == first[op, dtype][block], f"{name}: {op} {dtype} {block}"


@pytest.mark.parametrize("name", GPUS)
def test_dw_needs_no_more_scratch_than_on_hopper(name):
    """For the partial tiles of the four products of a layer of each size, and of the head's."""
    for C, R in ((768, 65536), (1024, 65536), (1280, 32768), (1600, 16384)):
        need = []
        for table in (GPUS[name], GPUS["h200"]):
            row = table.rows["matmul_dw", "bf16"]
            splits = [split_tiles(n, k, R, row) for n, k in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C), (50304, C))]
            need.append(max(split.scratch for split in splits))
        assert need[0] <= need[1]


def test_constants_of_hopper_kernels_equal_the_table_that_sizes_scratch():
    rows, tile = GPUS["h200"].rows, (pipeline.TILE_M, pipeline.TILE_N, pipeline.TILE_K)
    assert rows["matmul", "bf16"]["BLOCK_M"] == tile[0]
    assert rows["classifier_fwd", "bf16"]["BLOCK_N"] == tile[1]
    assert tuple(rows["matmul_dw", "bf16"][block] for block in ("BLOCK_M", "BLOCK_N", "BLOCK_K")) == tile
    assert rows["matmul_dw", "bf16"]["GROUP_M"] == pipeline.GROUP_M.value  # the order in which tiles are cut


@pytest.mark.parametrize(
    ("gpu", "capability", "name"),
    [
        ("NVIDIA H200", "9.0", "h200"),
        ("NVIDIA H100 80GB HBM3", "9.0", "h200"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "a100"),
        ("NVIDIA GeForce RTX 4090", "8.9", "rtx4090"),
        ("NVIDIA L40S", "8.9", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "12.0", "rtx4090"),
        ("NVIDIA B200", "10.0", "b200"),
        ("NVIDIA B300", "10.3", "b200"),
        ("something new", "13.0", "rtx4090"),
    ],
)
def test_choose_prefers_own_table_then_capability(gpu, capability, name):
    assert choose(gpu, capability, GPUS) == name


def test_choose_prefers_a_hand_made_table_to_the_capabilitys():
    own = {"h200": GPUS["h200"], "h100": GPUS["h200"]._replace(gpu="NVIDIA H100 80GB HBM3", capabilities=[])}
    assert choose("NVIDIA H100 80GB HBM3", "9.0", own) == "h100"
    assert choose("NVIDIA H200", "9.0", own) == "h200"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's bounds")
def test_interpreter_blocks_cover_their_dimension_and_rows_are_copies():
    row = tuning.tuned("matmul", "bf16", BLOCK_M=40, BLOCK_N=5000, BLOCK_K=3)
    assert (row["BLOCK_M"], row["BLOCK_N"], row["BLOCK_K"]) == (64, 1024, 16)
    row["BLOCK_M"] = 1
    assert tuning.tuned("matmul", "bf16")["BLOCK_M"] == 1024


def changed(change):
    data = json.loads((TABLES / "h200.json").read_text())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a tuning table like h200.json (JSONDecodeError"),
        ("[]", "not a tuning table"),
        (changed(lambda d: d.pop("date")), "'date'"),
        (changed(lambda d: d.update(color="red")), "'color'"),
        (changed(lambda d: d.update(rows=[])), "not a tuning table"),
        (changed(lambda d: d["rows"]["adamw"].update(any=3)), "not a tuning table"),
        (changed(lambda d: d["rows"].pop("adamw")), "row adamw bf16 is missing; expected BLOCK"),
        (changed(lambda d: d["rows"]["matmul"].pop("fp32")), "row matmul fp32 is missing; expected BLOCK_K, BLOCK_M"),
        (changed(lambda d: d["rows"]["matmul"]["bf16"].update(BLOK_M=64)), "row matmul bf16 is {'BLOCK_M': 128"),
        (changed(lambda d: d["rows"]["matmul"]["bf16"].pop("GROUP_M")), "row matmul bf16 is {'BLOCK_M': 128"),
        (changed(lambda d: d["rows"]["adamw"]["any"].update(num_stages="3")), "'num_stages': '3'"),
    ],
)  # fmt: skip
def test_unusable_table_is_reported_in_one_line(tmp_path, text, message):
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_table(file)
    assert str(error.value).startswith("t.json: ") and message in str(error.value) and "\n" not in str(error.value)
