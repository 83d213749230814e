"""Tuning tables: complete, with valid values and equal scratch sizes, chosen by GPU; an unusable table is one line."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks.candidates import FIXED
from gpt2_triton import device
from gpt2_triton.errors import ConfigError
from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.hopper import attention, pipeline
from gpt2_triton.kernels.table_file import DTYPES, OPTIONS, TABLES, choose, read_table
from gpt2_triton.kernels.tiles import split_tiles

FILES = sorted(file.name for file in TABLES.iterdir())
GPUS = {file.removesuffix(".json"): read_table(TABLES / file) for file in FILES if file != "interpreter.json"}


def test_tables_are_package_data():
    assert FILES == [
        *("a100.json", "b200.json", "h200.json", "interpreter.json"),
        *("mi300x.json", "rdna3.json", "rtx4090.json", "rtx5090.json"),
    ]
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
    assert rows["attention_bwd_dq", "bf16"]["BLOCK_M"] == attention.HEAD
    assert rows["attention_bwd_dkdv", "bf16"]["BLOCK_N"] == attention.HEAD
    assert rows["classifier_fwd", "bf16"]["BLOCK_N"] == tile[1]
    assert tuple(rows["matmul_dw", "bf16"][block] for block in ("BLOCK_M", "BLOCK_N", "BLOCK_K")) == tile
    assert rows["matmul_dw", "bf16"]["GROUP_M"] == pipeline.GROUP_M.value  # the order in which tiles are cut


@pytest.mark.parametrize(
    ("gpu", "architecture", "name"),
    [
        ("NVIDIA H200", "9.0", "h200"),
        ("NVIDIA H100 80GB HBM3", "9.0", "h200"),
        ("NVIDIA A100-SXM4-80GB", "8.0", "a100"),
        ("NVIDIA GeForce RTX 4090", "8.9", "rtx4090"),
        ("NVIDIA L40S", "8.9", "rtx4090"),
        ("NVIDIA GeForce RTX 3090", "8.6", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "12.0", "rtx5090"),
        ("NVIDIA GeForce RTX 5080", "12.0", "rtx5090"),
        ("NVIDIA B200", "10.0", "b200"),
        ("NVIDIA B300", "10.3", "b200"),
        ("something new", "13.0", "rtx4090"),
        ("AMD Instinct MI300X", "gfx942", "mi300x"),
        ("AMD Instinct MI355X", "gfx950", "mi300x"),
        ("AMD Radeon RX 7900 XTX", "gfx1100", "rdna3"),
        ("AMD Instinct MI210", "gfx90a", "rdna3"),
    ],
)
def test_choose_prefers_own_table_then_architecture(gpu, architecture, name):
    assert choose(gpu, architecture, GPUS) == name


@pytest.fixture
def gpu(monkeypatch):
    """Make this machine's GPU one of this architecture; AMD's report a compute capability, too."""

    def set_gpu(architecture: str, capability: tuple[int, int]) -> None:
        hip = "7.2" if architecture.startswith("gfx") else None
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        properties = SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
        monkeypatch.setattr(tuning, "INTERPRET", False)
        for function in (tuning.is_hopper, tuning.table_name):
            monkeypatch.setattr(tuning, function.__name__, function.__wrapped__)

    return set_gpu


@pytest.mark.parametrize(
    ("architecture", "capability", "table", "hopper", "fp8"),
    [
        ("8.0", (8, 0), "a100", False, False),
        ("8.6", (8, 6), "rtx4090", False, False),
        ("8.9", (8, 9), "rtx4090", False, True),
        ("9.0", (9, 0), "h200", True, True),
        ("12.0", (12, 0), "rtx5090", False, True),
        ("gfx90a", (9, 0), "rdna3", False, False),
        ("gfx942", (9, 4), "mi300x", False, False),
        ("gfx950", (9, 5), "mi300x", False, True),
        ("gfx1201", (12, 0), "rdna3", False, False),
    ],
)
def test_architecture_selects_table_hopper_kernels_and_fp8(gpu, architecture, capability, table, hopper, fp8):
    gpu(architecture, capability)
    assert device.architecture() == architecture
    assert (tuning.table_name(), tuning.is_hopper(), device.has_fp8(architecture)) == (table, hopper, fp8)


def test_fp8_without_fp8_products_is_refused_in_one_line(gpu):
    gpu("gfx942", (9, 4))
    with pytest.raises(ConfigError, match="^train.precision: fp8 needs .*, a GPU is gfx942; set it to bf16$"):
        device.require_own_fp8()


def test_fp8_with_fp8_products_or_without_a_gpu_is_not_refused(gpu, monkeypatch):
    gpu("9.0", (9, 0))
    device.require_own_fp8()
    gpu_without_fp8 = dict(get_device_capability=lambda: (8, 0), is_available=lambda: False)
    for name, function in gpu_without_fp8.items():
        monkeypatch.setattr(torch.cuda, name, function)
    device.require_own_fp8()


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
