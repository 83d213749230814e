"""The command line of `python -m benchmarks` measures what its options name."""

import pytest

from benchmarks.__main__ import app
from benchmarks.losses import as_portable, loss_compare, pairs, torch_train, vs_torch
from benchmarks.speed.sizes import Work
from gpt2_triton import device
from gpt2_triton.commands.app import main

STEPS = "steps --sizes d12,d48 --optim adamw,muon --precision fp8 --fp8.keep_bf16 none"
OPS = "ops --sizes d24 --batch 4 --recompute gelu --precision bf16,fp8"
KEYS = ("--fp8.keep_bf16", "none")


@pytest.mark.parametrize("argv", ["steps --sizes d12,d13", "steps --recompute auto"])
def test_work_without_a_name_in_the_record_is_refused(argv, capsys):
    assert main(app, argv.split()) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "function", "works"),
    [
        (STEPS, "steps.compare", [Work("d12", 64, "gelu", "fp8", "adamw", KEYS),
                                  Work("d12", 64, "gelu", "fp8", "muon", KEYS),
                                  Work("d48", 16, "gelu+ln", "fp8", "adamw", KEYS),
                                  Work("d48", 16, "gelu+ln", "fp8", "muon", KEYS)]),
        (OPS, "ops.report", [Work("d24", 4, "gelu", precision) for precision in ("bf16", "fp8")]),
    ],
)  # fmt: skip
def test_every_arm_of_the_options_is_measured(argv, function, works, monkeypatch):
    calls = []
    monkeypatch.setattr(device, "present", lambda: True)
    monkeypatch.setattr(f"benchmarks.speed.{function}", lambda found, *_: calls.append(found))
    main(app, argv.split())
    assert calls == [works]


@pytest.mark.parametrize("module", [as_portable, loss_compare, pairs, torch_train, vs_torch])
def test_the_text_below_the_options_fits_a_narrow_terminal(module):
    assert max(map(len, module.app.help_epilogue.splitlines())) <= 80
