"""The command line of `python -m benchmarks`."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import benchmarks
from benchmarks.__main__ import ALL_SIZES, app
from benchmarks.sizes import SIZES
from gpt2_triton import device
from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main

MISTAKES = [  # arguments, part of the message
    (["steps", "--sizes", "d12,d13"], "--sizes: unknown d13; known are d12, d24, d36, d48"),
    (["steps", "--steps", "5"], "--steps: must be at least 6, got 5"),
    (["steps", "--batch", "0"], "--batch: must be at least 1, got 0"),
    (["steps", "--json", "nowhere/a.json"], "--json: nowhere is not a directory"),
    (["steps", "--baseline", "jax"], "--baseline"),
    (["steps", "--precision", "fp16"], "--precision: expected bf16, fp8 or bf16,fp8, got fp16"),
    (["ops", "--keep_bf16", "head"], "--keep_bf16: goes with --precision fp8"),
    (["ops", "--precision", "fp8", "--keep_bf16", "mlp:12"], "--keep_bf16: mlp:12: there are 12 layers"),
    (["steps", "--recompute", "some"], "--recompute: must be auto, none"),
    (["steps", "--recompute", "auto"], "--recompute: auto does not go with a benchmark"),
    (["steps", "--recompute", "gelu:13", "--sizes", "d24,d12"], "gelu:13 does not go with a benchmark: d12 has fewer"),
    (["steps", "--plot", "a.png"], "--plot"),
    (["steps", "--only", "adamw"], "--only"),
    (["steps", "--out", "a.json"], "--out"),
    (["ops", "--plot", "a.png"], "--plot: goes with one size"),
    (["ops", "--json", "a.json"], "--json: goes with one size"),
    (["ops", "--sizes", "d12", "--plot", "nowhere/a.png"], "--plot: nowhere is not a directory"),
    (["ops", "--json", "a.json"], "--json"),
    (["ops", "--recompute", "auto"], "--recompute: auto does not go with a benchmark"),
    (["ops", "--sizes", "d13"], "--sizes: unknown d13"),
    (["tune", "--json", "a.json"], "--json"),
    (["tune", "--recompute", "gelu"], "--recompute"),
    (["tune", "--steps", "7"], "--steps"),
    (["tune", "--baseline", "none"], "--baseline"),
    (["tune", "--out", "a.yaml"], "--out: a.yaml does not end in .json"),
    (["tune", "--out", "nowhere/a.json"], "--out: nowhere is not a directory"),
    (["tune", "--sizes", "d13"], "--sizes: unknown d13"),
    (["tune", "--batch", "0"], "--batch: must be at least 1, got 0"),
    (["verify", "--fast"], "--fast"),
    (["speed"], 'Unknown command "speed"'),
]


@pytest.fixture
def stand_in(monkeypatch):
    """stand_in(name, **functions) replaces benchmarks.<name>, and reports a GPU."""
    monkeypatch.setattr(device, "present", lambda: True)

    def replace(name, **functions):
        module = SimpleNamespace(**functions)
        monkeypatch.setitem(sys.modules, f"benchmarks.{name}", module)
        monkeypatch.setattr(f"benchmarks.{name}", module, raising=False)

    return replace


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_main_reports_a_mistake_in_one_line_with_exit_code_2(capsys, argv, message):
    assert main(app, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1 and err.startswith("error: ")


@pytest.mark.parametrize("command", ["steps", "ops", "tune"])
def test_main_refuses_to_measure_without_a_gpu(monkeypatch, capsys, command):
    monkeypatch.setattr(device, "present", lambda: False)
    assert main(app, [command]) == 2
    assert capsys.readouterr() == ("", f"error: {command}: needs a CUDA GPU, found none\n")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("steps", ("--sizes", "--batch", "--steps", "--recompute", "--precision", "--baseline", "--json")),
        ("ops", ("--sizes", "--batch", "--recompute", "--precision", "--keep_bf16", "--plot", "--json")),
        ("tune", ("--sizes", "--batch", "--only", "--out")),
        ("verify", ()),
    ],
)
def test_help_lists_commands_and_options(capsys, command, options):
    assert main(app, ["--help"]) == 0
    assert command in capsys.readouterr().out
    assert main(app, [command, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(option in text for option in options)


def test_default_sizes_are_all_sizes():
    assert ALL_SIZES.split(",") == list(SIZES)


def test_steps_passes_its_options(stand_in, tmp_path):
    calls, out = [], tmp_path / "a.json"
    stand_in("step_time", compare_sizes=lambda *arguments: calls.append(arguments) or 1)
    assert main(app, ["steps", "--sizes", "d12,d48", "--baseline", "none", "--json", str(out)]) == 1
    assert calls == [(["d12", "d48"], None, 30, None, ["bf16"], None, "none", out)]


def test_steps_names_a_missing_torchao(stand_in, monkeypatch, capsys):
    stand_in("step_time")
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert main(app, ["steps", "--baseline", "torchao"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: --baseline: torchao is not installed; install the release made for"
    )


def test_ops_passes_its_options(stand_in, tmp_path):
    calls, out = [], tmp_path / "a.png"
    stand_in("ops", report=lambda *arguments: calls.append(arguments))
    assert main(app, ["ops", "--sizes", "d24", "--batch", "4", "--recompute", "block", "--plot", str(out)]) == 0
    assert calls == [("d24", 4, "block", ["bf16"], None, out, None)]
    assert main(app, ["ops", "--sizes", "d12,d36", "--precision", "bf16,fp8", "--keep_bf16", "0"]) == 0
    assert calls[1:] == [(size, None, None, ["bf16", "fp8"], "0", None, None) for size in ("d12", "d36")]


def test_tune_passes_its_options(stand_in, tmp_path):
    calls, out = [], tmp_path / "a.json"
    stand_in("tune", tune=lambda *arguments: calls.append(arguments) or 0)
    assert main(app, ["tune", "--sizes", "d12", "--batch", "8", "--only", "adamw", "--out", str(out)]) == 0
    assert main(app, ["tune"]) == 0
    assert calls == [(["d12"], 8, "adamw", out), (None, None, None, None)]


@pytest.mark.parametrize("code", [0, 1])
def test_verify_returns_the_verdict(stand_in, code):
    stand_in("accuracy", verify=lambda: code)
    assert main(app, ["verify"]) == code


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["bench"], "steps"),
        (["bench", "--ops", "--sizes", "d12", "--plot", "ops.png"], "ops"),
        (["bench", "--tune", "--only=adamw"], "tune"),
        (["verify"], "verify"),
        (["verify", "--fast"], "verify"),
    ],
)
def test_moved_commands_name_the_new_ones(capsys, argv, command):
    assert main(tools, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert "python -m benchmarks" in err and command in err and "checkout of version" in err


def test_importing_the_commands_imports_no_torch_and_no_numpy():
    """Both read environment variables that select_device sets."""
    program = "import sys, benchmarks.__main__; print({'torch', 'numpy'} & sys.modules.keys())"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"


def test_help_names_programs_that_exist():
    listed = re.sub(r"\(.*?\)", "", app.help_epilogue.partition("benchmarks.")[2])
    names = re.findall(r"\w+", listed)
    assert len(names) == 16
    for name in names:
        assert '__name__ == "__main__"' in (Path(benchmarks.__file__).parent / f"{name}.py").read_text(), name
