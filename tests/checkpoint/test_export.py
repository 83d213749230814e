"""The command export: all files or none."""

import re

import pytest

from gpt2_triton.checkpoint import safetensors_files
from tests.support.commands import run_tool
from tests.support.foreign import checkpoint_of, config_of


@pytest.fixture
def run(tmp_path):
    config = config_of()
    checkpoint_of(tmp_path / "run", config)
    return tmp_path / "run"


def test_export_command_writes_the_files_and_prints_their_place(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()  # an empty directory is allowed
    assert run_tool(f"export {run} --out {tmp_path}/out --dtype bf16") == 0
    size = r"\d\.\d MiB"
    told = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(rf"wrote {tmp_path}/out, {size}; next: .*\(\"{tmp_path}/out\"\)", told)
    files = "config generation_config model.safetensors merges.txt tokenizer tokenizer_config vocab"
    expected = {name if "." in name else f"{name}.json" for name in files.split()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == expected


def test_export_refuses_a_directory_with_files(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    assert run_tool(f"export {run} --out {tmp_path}/out") == 2
    assert "is there already; choose another" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_failed_export_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_files, "write", full)
    before = sorted(tmp_path.iterdir())
    assert run_tool(f"export {run} --out {tmp_path}/out") == 2
    assert "No space left on device; make room\n" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
