"""Tuning tables: complete, with valid values and equal scratch sizes, chosen by GPU; an
unusable table is one line.
"""

import contextlib
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.speed.sizes import work_of
from gpt2_triton import device, kernels
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.errors import ConfigError
from gpt2_triton.kernels import layernorm, table_file, tuning
from gpt2_triton.kernels.hopper import attention, pipeline
from gpt2_triton.kernels.table_file import OPTIONS, TABLES, choose, read_table
from gpt2_triton.model.memory_plan import dimensions
from gpt2_triton.training.start import require_own_fp8

# the package exports a function of this name
matmul = importlib.import_module("gpt2_triton.kernels.matmul")
FILES = sorted(file.name for file in TABLES.iterdir())
GPUS = {
    file.removesuffix(".json"): read_table(TABLES / file)
    for file in FILES
    if file != "interpreter.json"
}
LAPTOP = "NVIDIA GeForce RTX 4090 Laptop GPU"


@pytest.mark.parametrize("file", FILES)
def test_table_values_are_valid(file):
    """Blocks, rows and warps are powers of 2; a GPU's row has num_warps, the
    interpreter's no option of Triton's.
    """
    table = read_table(TABLES / file)
    assert table.source in ("measured", "default") and table.rows.keys() == GPUS["h200"].rows.keys()
    for (op, dtype), row in table.rows.items():
        complete = GPUS["h200"].rows[op, dtype].keys() - OPTIONS
        options = row.keys() - complete
        assert (
            options == set()
            if file == "interpreter.json"
            else "num_warps" in options <= set(OPTIONS)
        ), (op, dtype)
        for name, value in row.items():
            assert type(value) is int and value >= 1, (op, dtype, name)
            if name.startswith("BLOCK") or name in ("ROWS", "num_warps"):
                assert value & (value - 1) == 0, (op, dtype, name)


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("size", ["d12", "d24", "d36", "d48", "llama:c768", "llama:1b"])
def test_a_step_needs_no_more_scratch_than_on_hopper(monkeypatch, name, size):
    """A memory plan made without a GPU must fit the GPU that the run gets."""
    need = []
    for module in (matmul, layernorm):
        monkeypatch.setattr(module, "PLANNED_SMS", 132)
    monkeypatch.setattr(tuning, "INTERPRET", False)
    monkeypatch.setattr(
        tuning, "is_hopper", lambda: False
    )  # else Hopper's blocks replace each table's
    for table in (GPUS[name], GPUS["h200"]):
        monkeypatch.setattr(tuning, "table", lambda table=table: table)
        config = work_of(size).config()
        need.append(dimensions(config, kernels, StepShape.of(config))["W"])
    assert need[0] <= need[1]


def test_constants_of_hopper_kernels_equal_the_table_that_sizes_scratch():
    rows, tile = GPUS["h200"].rows, (pipeline.TILE_M, pipeline.TILE_N, pipeline.TILE_K)
    assert rows["matmul", "bf16"]["BLOCK_M"] == tile[0]
    assert rows["attention_bwd_dq", "bf16"]["BLOCK_M"] == attention.HEAD
    assert rows["attention_bwd_dkdv", "bf16"]["BLOCK_N"] == attention.HEAD
    assert rows["classifier_fwd", "bf16"]["BLOCK_N"] == tile[1]
    assert (
        tuple(rows["matmul_dw", "bf16"][block] for block in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
        == tile
    )
    # the order in which tiles are cut
    assert rows["matmul_dw", "bf16"]["GROUP_M"] == pipeline.GROUP_M.value


@pytest.fixture
def gpu(monkeypatch):
    """Make this machine's GPU this one; AMD's report a compute capability, too."""

    def set_gpu(name: str, architecture: str, file: Path | None = None) -> None:
        is_amd = architecture.startswith("gfx")
        monkeypatch.setattr(torch.version, "hip", "7.2" if is_amd else None)
        capability = (9, 0) if is_amd else tuple(map(int, architecture.split(".")))
        values = dict(
            is_available=True,
            current_device=0,
            get_device_name=name,
            get_device_capability=capability,
        )
        for function, value in values.items():
            monkeypatch.setattr(torch.cuda, function, lambda value=value: value)
        properties = SimpleNamespace(gcnArchName=f"{architecture}:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
        for module in (tuning, table_file):
            monkeypatch.setattr(module, "INTERPRET", False)
        for cached in "is_hopper", "table":
            monkeypatch.setattr(tuning, cached, getattr(tuning, cached).__wrapped__)
        for cached in "table_name", "table":
            monkeypatch.setattr(table_file, cached, getattr(table_file, cached).__wrapped__)
        monkeypatch.setenv(table_file.VARIABLE, str(file or ""))

    return set_gpu


@pytest.mark.parametrize(
    ("name", "architecture", "table", "hopper", "fp8"),
    [
        ("NVIDIA H200", "9.0", "h200", True, True),
        ("NVIDIA H100 80GB HBM3", "9.0", "h200", True, True),
        ("NVIDIA A100-SXM4-80GB", "8.0", "a100", False, False),
        ("NVIDIA GeForce RTX 4090", "8.9", "rtx4090", False, True),
        ("NVIDIA GeForce RTX 3090", "8.6", "rtx4090", False, False),
        ("NVIDIA GeForce RTX 5080", "12.0", "rtx5090", False, True),
        ("NVIDIA B300", "10.3", "b200", False, True),
        ("something new", "13.0", "rtx4090", False, True),
        ("AMD Instinct MI210", "gfx90a", "rdna3", False, False),
        ("AMD Instinct MI300X", "gfx942", "mi300x", False, False),
        ("AMD Instinct MI355X", "gfx950", "mi300x", False, True),
        ("AMD Radeon RX 7900 XTX", "gfx1100", "rdna3", False, False),
    ],
)
def test_a_gpu_selects_its_table_hopper_kernels_and_fp8(
    gpu, name, architecture, table, hopper, fp8
):
    gpu(name, architecture)
    assert device.architecture() == architecture
    assert (table_file.table_name(), tuning.is_hopper(), device.has_fp8(architecture)) == (
        table,
        hopper,
        fp8,
    )
    refused = pytest.raises(ConfigError, match=f"is {architecture}; set it to bf16$")
    with contextlib.nullcontext() if fp8 else refused:
        require_own_fp8()


def test_a_gpus_own_table_comes_before_its_architectures():
    own = {
        "h200": GPUS["h200"],
        "h100": GPUS["h200"]._replace(gpu="NVIDIA H100 80GB HBM3", capabilities=[]),
    }
    assert choose("NVIDIA H100 80GB HBM3", "9.0", own) == "h100"


@pytest.mark.parametrize(
    ("name", "architecture", "line"),
    [
        ("NVIDIA H200", "9.0", None),
        ("NVIDIA L40S", "8.9", "no launch parameters for NVIDIA L40S: using rtx4090's"),
        (LAPTOP, "8.9", f"no launch parameters for {LAPTOP}: using rtx4090's"),
        (
            "NVIDIA A100-SXM4-80GB",
            "8.0",
            "launch parameters are not measured on NVIDIA A100-SXM4-80GB: using a100's",
        ),
    ],
)
def test_notice_names_a_table_that_was_not_measured_on_this_gpu(gpu, name, architecture, line):
    gpu(name, architecture)
    assert table_file.notice() == (
        line and f"{line}; `python -m benchmarks tune` in a checkout may find faster ones"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's bounds")
def test_interpreter_blocks_cover_their_dimension_and_rows_are_copies():
    row = tuning.tuned("matmul", "bf16", BLOCK_M=40, BLOCK_N=5000, BLOCK_K=3)
    assert (row["BLOCK_M"], row["BLOCK_N"], row["BLOCK_K"]) == (64, 1024, 16)
    row["BLOCK_M"] = 1
    assert tuning.tuned("matmul", "bf16")["BLOCK_M"] == 1024


@pytest.fixture
def given(gpu, tmp_path):
    """given(change) makes this an L40S with GPT2_TRITON_TABLE naming a changed
    table, and returns the file.
    """

    def made(change) -> Path:
        data = json.loads((TABLES / "rtx4090.json").read_text()) | dict(
            gpu="NVIDIA L40S", version="0.1.0"
        )
        change(data)
        file = tmp_path / "l40s.json"
        file.write_text(json.dumps(data))
        gpu("NVIDIA L40S", "8.9", file)
        return file

    return made


def test_given_table_replaces_the_machines(given):
    file = given(
        lambda d: (
            d["rows"].update(adamw={"any": {"BLOCK": 4096, "num_warps": 8}})
            or d.update(date="today")
        )
    )
    assert tuning.tuned("adamw", "bf16") == dict(BLOCK=4096, num_warps=8)
    assert f"{file} (GPT2_TRITON_TABLE)" in table_file.notice()
    assert table_file.about() == dict(
        file=str(file), gpu="NVIDIA L40S", source="default", date="today"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's table")
def test_without_a_gpu_no_table_is_taken_and_no_notice_printed(monkeypatch):
    monkeypatch.setenv(table_file.VARIABLE, "nowhere.json")
    assert table_file.notice() is None and table_file.about()["file"] == "interpreter.json"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(gpu="NVIDIA A100"), "is for NVIDIA A100, this GPU is NVIDIA L40S"),
        (lambda d: d.pop("date"), "l40s.json: not a table in the form of h200.json (TypeError: "),
        (
            lambda d: d.update(rows=3),
            "l40s.json: not a table in the form of h200.json (AttributeError: ",
        ),
        (lambda d: d["rows"].pop("adamw"), "row adamw bf16 is missing; expected integers BLOCK"),
        (lambda d: d["rows"]["matmul"]["bf16"].pop("GROUP_M"), "row matmul bf16 is {'BLOCK_M': "),
        (lambda d: d["rows"]["adamw"]["any"].update(num_stages="3"), "'num_stages': '3'"),
    ],
)
def test_given_table_that_does_not_fit_is_one_line(given, change, message):
    given(change)
    with pytest.raises(ConfigError) as error:
        tuning.table()
    line = str(error.value)
    assert line.startswith("GPT2_TRITON_TABLE: ") and message in line and "\n" not in line
    assert line.endswith("; write it again by `python -m benchmarks tune`, or unset the variable")
