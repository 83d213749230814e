"""What sample, hellaswag and perplexity print and refuse; eval/lm_eval.sh."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import run_tool

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"


def test_stdout_of_sample_is_the_text_alone(capsys):
    """A prompt is text: no option, and no path."""
    prompts = ["The ", "-", "- an item", "-- of a row-wise sum", "~/.bashrc sets"]
    words = " ".join(f"--prompt {shlex.quote(prompt)}" for prompt in prompts)
    assert run_tool(f"sample {FIXTURES}/run --tokens 2 {words}") == 0
    out, err = capsys.readouterr()
    assert all(
        text.startswith(prompt) for text, prompt in zip(out.split("\n---\n"), prompts, strict=True)
    )
    assert err.startswith("10 tokens in ") and err.count("\n") == 1


@pytest.mark.parametrize("name", ["hellaswag", "perplexity"])
@pytest.mark.parametrize(
    ("place", "fault"),
    [
        (".", ". is no file;"),
        ("/dev/null", "/dev/null is no file;"),  # root would replace the device
        ("none/x.json", "none is no directory that can be written;"),
        ("/etc/x.json", "/etc is no directory that can be written;"),
    ],
)
def test_place_that_cannot_be_written_is_refused_before_the_work(
    monkeypatch, capsys, name, place, fault
):
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, _: path != Path("/etc"))
    assert run_tool(f"{name} {FIXTURES}/run --json {place}") == 2
    assert capsys.readouterr().err.startswith(f"error: --json: {fault}")


@pytest.mark.parametrize(
    ("begin", "more"), [("<|begin_of_text|>", ",add_bos_token=True"), ("<|endoftext|>", "")]
)
def test_lm_eval_begins_llama_3s_texts(tmp_path, begin, more):
    """A harness that prints its arguments, and an export that is there."""
    (tmp_path / "lm_eval").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "lm_eval").chmod(0o755)
    (tmp_path / "config.json").touch()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": begin}))
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HELLASWAG": ""}
    command = [ROOT / "eval" / "lm_eval.sh", "run", tmp_path]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"--model_args pretrained={tmp_path},dtype=float32{more} --tasks hellaswag" in ran.stdout


@pytest.mark.parametrize("words", [[], ["run"], ["--help"]])
def test_lm_eval_without_source_and_out_prints_its_usage(tmp_path, words):
    ran = subprocess.run(
        [ROOT / "eval" / "lm_eval.sh", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, [*tmp_path.iterdir()]) == (2, "", [])
    assert (
        "eval/lm_eval.sh SOURCE OUT [TASKS]" in ran.stderr and "OUT: a new directory" in ran.stderr
    )
    assert (
        ran.stderr.endswith("from the Hugging Face Hub.\n") and "unbound variable" not in ran.stderr
    )
