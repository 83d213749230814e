"""The command line of `python -m benchmarks`."""

from pathlib import Path

import pytest

from benchmarks.__main__ import app
from benchmarks.speed.sizes import SIZES, Work
from gpt2_triton import device
from gpt2_triton.commands.app import main

MISTAKES = [  # arguments, part of the message
    (
        ["steps", "--sizes", "d12,d13"],
        "--sizes: unknown d13",
    ),
    (["ops", "--json", "nowhere/a.json"], "--json: nowhere is not a directory"),
    (["steps", "--recompute", "auto"], "--recompute: auto is chosen when a run starts"),
    (
        ["steps", "--recompute", "gelu:13", "--sizes", "d24,d12"],
        "gelu:13 names more layers than model.n_layer 12",
    ),
    (["tune", "--out", "a.yaml"], "--out: a.yaml does not end in .json"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES)
def test_main_reports_a_mistake_in_one_line_with_exit_code_2(capsys, argv, message):
    assert main(app, argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1 and err.startswith("error: ")


def test_help_says_the_batch_of_each_size(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(app, ["steps", "--help"]) == 0
    *others, last = (str(size.batch) for size in SIZES.values())
    assert f"by default {', '.join(others)} and {last} for these" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "module", "function", "expected"),
    [
        (
            "steps --sizes d12 --optim adamw,muon --steps 9 --baseline muon --precision fp8 "
            "--json a.json",
            "speed.steps",
            "compare",
            [
                (
                    [Work("d12", 64, "gelu", "fp8", name) for name in ("adamw", "muon")],
                    9,
                    "muon",
                    Path("a.json"),
                    None,
                )
            ],
        ),
        (
            "steps --sizes d12 --as rtx4090",
            "speed.steps",
            "compare",
            [([Work("d12", 64, "gelu")], 30, "torch", None, "rtx4090")],
        ),
        (
            "ops --sizes d24 --batch 4 --precision bf16,fp8 --fp8.keep_bf16 none",
            "speed.ops",
            "report",
            [
                (
                    [
                        Work("d24", 4, "gelu+ln", p, keys=("--fp8.keep_bf16", "none"))
                        for p in ("bf16", "fp8")
                    ],
                    None,
                )
            ],
        ),
        (
            "tune --sizes d12 --batch 8 --only adamw",
            "tune.search",
            "tune",
            [(["d12"], 8, "adamw", None)],
        ),
    ],
)
def test_commands_pass_their_options_and_return_the_code(
    monkeypatch, tmp_path, argv, module, function, expected
):
    calls = []
    monkeypatch.setattr(device, "present", lambda: True)
    monkeypatch.setattr(device, "architecture", lambda: "9.0")
    monkeypatch.setattr(
        f"benchmarks.{module}.{function}", lambda *arguments: calls.append(arguments) or 1
    )
    monkeypatch.chdir(tmp_path)
    assert main(app, argv.split()) == (0 if module == "speed.ops" else 1)
    assert calls == expected
