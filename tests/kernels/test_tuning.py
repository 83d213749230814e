"""The tables of launch parameters: complete, of equal scratch sizes, chosen by GPU; a wrong one is a line."""

import json

import pytest
import torch

from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.hopper import pipeline
from gpt2_triton.kernels.tiles import split_tiles
from gpt2_triton.kernels.tuning import DTYPES, FIXED, PARAMETERS, TABLES, TableError, choose, read_table

FILES = sorted(file.name for file in TABLES.iterdir())
GPUS = {file.removesuffix(".json"): read_table(TABLES / file) for file in FILES if file != "interpreter.json"}


def test_the_tables_are_package_data():
    assert FILES == ["a100.json", "b200.json", "h200.json", "interpreter.json", "rtx4090.json"]
    assert TABLES.parent.joinpath("tuning.py").is_file()  # inside the package, all of which the wheel takes


@pytest.mark.parametrize("file", FILES)
def test_a_table_has_a_row_for_every_operation_and_dtype(file):
    assert read_table(TABLES / file).rows.keys() == {(op, dtype) for op in PARAMETERS for dtype in DTYPES}


def test_what_sizes_a_scratch_is_the_same_for_every_gpu():
    """A memory plan made where there is no GPU must fit the GPU the run gets."""
    first = GPUS["h200"].rows
    for name, table in GPUS.items():
        for (op, dtype), row in table.rows.items():
            for block in FIXED.get(op, ()):
                assert row[block] == first[op, dtype][block], f"{name}: {op} {dtype} {block}"


@pytest.mark.parametrize("name", GPUS)
def test_dw_needs_no_more_scratch_than_on_hopper(name):
    """Of the pieces of tiles that are cut, for the four products of a layer of each size and the head's."""
    for C, R in ((768, 65536), (1024, 65536), (1280, 32768), (1600, 16384)):
        need = []
        for table in (GPUS[name], GPUS["h200"]):
            row = table.rows["matmul_dw", "bf16"]
            splits = [split_tiles(n, k, R, row) for n, k in ((3 * C, C), (C, C), (4 * C, C), (C, 4 * C), (50304, C))]
            need.append(max(split.scratch for split in splits))
        assert need[0] <= need[1]


def test_what_hoppers_kernels_have_as_constants_is_what_scratch_is_sized_by():
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
def test_a_gpu_gets_its_own_table_or_its_capabilitys(gpu, capability, name):
    assert choose(gpu, capability, GPUS) == name


def test_a_table_of_ones_own_comes_before_that_of_the_capability():
    own = {"h200": GPUS["h200"], "h100": GPUS["h200"]._replace(gpu="NVIDIA H100 80GB HBM3", capabilities=[])}
    assert choose("NVIDIA H100 80GB HBM3", "9.0", own) == "h100"
    assert choose("NVIDIA H200", "9.0", own) == "h200"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's bounds")
def test_in_the_interpreter_a_block_covers_its_dimension_and_rows_are_copies():
    row = tuning.tuned("matmul", "bf16", BLOCK_M=40, BLOCK_N=5000, BLOCK_K=3)
    assert (row["BLOCK_M"], row["BLOCK_N"], row["BLOCK_K"]) == (64, 1024, 16)
    row["BLOCK_M"] = 1
    assert tuning.tuned("matmul", "bf16")["BLOCK_M"] == 1024


def broken(change):
    data = json.loads((TABLES / "h200.json").read_text())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "t.json: cannot be read as JSON"),
        ("[]", "t.json: got list; expected exactly gpu, capabilities"),
        (broken(lambda d: d.pop("date")), "source, triton, notes, rows; expected exactly"),
        (broken(lambda d: d.update(source="guess")), "source is 'guess'; expected 'measured' or 'default'"),
        (broken(lambda d: d.update(rows=[])), "rows are not operation"),
        (broken(lambda d: d["rows"].update(matmol={})), "unknown operation matmol; known are matmul,"),
        (broken(lambda d: d["rows"].pop("adamw")), "no row for adamw bf16, adamw fp32; add it, as in h200.json"),
        (broken(lambda d: d["rows"]["matmul"].pop("fp32")), "no row for matmul fp32"),
        (broken(lambda d: d["rows"]["matmul"].update(fp8={})), "matmul: unknown dtype fp8; known are bf16, fp32, any"),
        (broken(lambda d: d["rows"]["matmul"]["bf16"].update(BLOK_M=64)), "bf16: unknown BLOK_M; expected BLOCK_M"),
        (broken(lambda d: d["rows"]["matmul"]["bf16"].pop("GROUP_M")), "bf16: GROUP_M is missing; expected BLOCK"),
        (broken(lambda d: d["rows"]["adamw"]["any"].pop("num_warps")), "adamw any: num_warps is missing"),
        (broken(lambda d: d["rows"]["adamw"]["any"].update(BLOCK=1000)), "BLOCK is 1000; expected a power of 2"),
        (broken(lambda d: d["rows"]["adamw"]["any"].update(num_stages="3")), "num_stages is '3'; expected a positive"),
    ],
)  # fmt: skip
def test_a_table_that_does_not_fit_is_one_line(tmp_path, text, message):
    file = tmp_path / "t.json"
    file.write_text(text)
    with pytest.raises(TableError) as error:
        read_table(file)
    assert message in str(error.value) and "\n" not in str(error.value)
