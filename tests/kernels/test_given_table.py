"""GPT2_TRITON_TABLE, and what a run prints and records about its table, on GPUs that are not there."""

import json

import pytest
import torch

from gpt2_triton import __version__
from gpt2_triton.errors import ConfigError
from gpt2_triton.kernels import given_table, tuning
from gpt2_triton.kernels.table_file import TABLES


@pytest.fixture
def on_gpu(monkeypatch):
    """on_gpu(name, capability, file) makes the process one on such a GPU, with GPT2_TRITON_TABLE=file."""

    def made(name, capability, file=None):
        monkeypatch.setattr(tuning, "INTERPRET", False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(tuning, "table_name", tuning.table_name.__wrapped__)
        monkeypatch.setattr(tuning, "table", tuning.table.__wrapped__)
        if file is None:
            monkeypatch.delenv("GPT2_TRITON_TABLE", raising=False)
        else:
            monkeypatch.setenv("GPT2_TRITON_TABLE", str(file))

    return made


MAY_GAIN = f"; `python -m benchmarks tune` in a checkout of version {__version__} may gain"


@pytest.mark.parametrize(
    ("gpu", "capability", "line"),
    [
        ("NVIDIA H200", (9, 0), None),
        ("NVIDIA H100 80GB HBM3", (9, 0), f"no table for NVIDIA H100 80GB HBM3: h200's rows{MAY_GAIN}"),
        ("NVIDIA L40S", (8, 9), f"no table for NVIDIA L40S: rtx4090's rows{MAY_GAIN}"),
        (
            "NVIDIA A100-SXM4-80GB",
            (8, 0),
            f"launch parameters are not measured on NVIDIA A100-SXM4-80GB: a100's rows{MAY_GAIN}",
        ),
    ],
)
def test_notice_names_a_table_that_was_not_measured_on_this_gpu(on_gpu, gpu, capability, line):
    on_gpu(gpu, capability)
    assert given_table.notice() == line


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's table")
def test_no_notice_without_a_gpu(monkeypatch):
    monkeypatch.setenv("GPT2_TRITON_TABLE", "nowhere.json")  # of a machine with a GPU
    assert given_table.notice() is None and given_table.about()["file"] == "interpreter.json"


def own_table(directory, **changes):
    data = json.loads((TABLES / "rtx4090.json").read_text()) | dict(gpu="NVIDIA L40S", version=__version__) | changes
    data["rows"]["adamw"] = {"any": {"BLOCK": 4096, "num_warps": 8}}
    file = directory / "l40s.json"
    file.write_text(json.dumps(data))
    return file


def test_given_table_replaces_the_machines(on_gpu, tmp_path):
    on_gpu("NVIDIA L40S", (8, 9), file := own_table(tmp_path, source="measured", date="2026-11-22"))
    assert tuning.tuned("adamw", "bf16") == dict(BLOCK=4096, num_warps=8)
    assert given_table.notice() == f"launch parameters of {file} (GPT2_TRITON_TABLE), measured on 2026-11-22"
    assert given_table.about() == dict(file=str(file), gpu="NVIDIA L40S", source="measured", date="2026-11-22")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(version="0.1.0"), f"l40s.json is of version 0.1.0, this is {__version__}; write it again"),
        (dict(version=""), f"l40s.json is of no known version, this is {__version__}; write it again"),
        (dict(gpu="NVIDIA A100-SXM4-80GB"), "is for NVIDIA A100-SXM4-80GB, this GPU is NVIDIA L40S; write it again"),
        (dict(rows={}), "l40s.json: row matmul bf16 is missing; expected BLOCK_K, BLOCK_M"),
        (dict(rows=3), "l40s.json: not a tuning table like h200.json"),
        (None, "none.json: no such file; write it again by `python -m benchmarks tune`, or unset the variable"),
    ],
)
def test_given_table_that_does_not_fit_is_one_line(on_gpu, tmp_path, changes, message):
    file = tmp_path / "none.json" if changes is None else own_table(tmp_path)
    if changes is not None:
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    on_gpu("NVIDIA L40S", (8, 9), file)
    with pytest.raises(ConfigError) as error:
        tuning.table()
    assert str(error.value).startswith("GPT2_TRITON_TABLE: ") and message in str(error.value)
    assert "\n" not in str(error.value) and error.value.exit_code == 2
