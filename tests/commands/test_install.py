"""An environment that `pip install .` alone has made does what a user does in an empty directory.

`make test-installed` makes it, with the torch and Triton that pip chooses, and runs these
tests by its Python.  Any other Python skips them.  A package that is used but not
declared is missing, as for a user.
"""

import json
import os
import subprocess
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from gpt2_triton import __version__
from gpt2_triton.config import recipes
from gpt2_triton.version import COMMIT, code_state

ROOT = Path(__file__).parents[2]
SITE = Path(sysconfig.get_path("purelib"))
SMALL = (
    "--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --train.steps 2 "
    "--train.batch_size 1 --train.seq_len 64 "
    "--optim.warmup 0 --eval.every 2 --eval.tokens 64 --sample.every 0 --log.stats_every 1"
).split()
QUESTION = dict(
    activity_label="a", ctx_a="To be", ctx_b="or", ctx="To be or", endings=[*"abcd"], label=1
)

pytestmark = [
    pytest.mark.installed,
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a minute, longer on a busy machine
    pytest.mark.skipif(not (SITE / "gpt2_triton").is_dir(), reason="make test-installed"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs one of the environment's programs in a directory of its own."""
    here, programs = tmp_path_factory.mktemp("empty"), Path(sysconfig.get_path("scripts"))
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON_INTERPRET"))}

    def run(*words, program="gpt2-triton"):
        ran = subprocess.run(
            [programs / program, *words], cwd=here, env=kept, capture_output=True, text=True
        )
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        return ran.stdout

    run.here = here
    return run


def test_pip_finds_no_conflict(run):
    run("-m", "pip", "check", program="python")


def test_the_package_has_its_modules_and_the_recipes_and_nothing_else():
    (installed,) = metadata.distributions(name="gpt2_triton", path=[str(SITE)])
    files = [
        file
        for file in installed.files
        if file.parts[0] != ".." and "__pycache__" not in file.parts
    ]
    assert sum(file.locate().stat().st_size for file in files) < 1_500_000
    assert {file.parts[0] for file in files} == {
        "gpt2_triton",
        f"gpt2_triton-{__version__}.dist-info",
    }
    assert {str(file) for file in files if file.suffix == ".py"} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "gpt2_triton").rglob("*.py")
    }
    record = ROOT / "docs" / "results" / "current.json"
    for file in files:
        if file.parts[0] == "gpt2_triton" and file.name != COMMIT:
            source = ROOT / str(file).replace("gpt2_triton/configs", "configs")
            there = record if file.name == "results.json" else source
            assert file.locate().read_bytes() == there.read_bytes(), file
    assert {*os.listdir(SITE / "gpt2_triton" / "configs")} == {*os.listdir(ROOT / "configs")}


def test_commands_and_recipes_are_there(run):
    versions = run("--version")
    assert versions.startswith(
        f"gpt2_triton {__version__}\n" + ("commit " if code_state() else "torch ")
    )
    assert versions == run("-m", "gpt2_triton", "--version", program="python")
    assert "Usage: " in run("--help") and "--optim.lr" in run("train", "--help")
    listed = run("configs")
    assert [name for name in recipes.names() if f"\n{name} " not in listed] == []
    (run.here / "mine.yaml").write_text(run("configs", "gpt2_124m"))
    plan = run("train", "mine.yaml", "--plan", "--gpu", "h100")
    assert plan.startswith("fits the GPU h100 of ") and "\ntime about " in plan


def test_the_readme_s_first_commands_run(run):
    """The quickstart, with fewer steps: its model, data and sample."""
    quick = (
        "--train.steps 5 --optim.warmup 2 --eval.every 5 --eval.tokens 256 "
        "--sample.every 5 --sample.tokens 4"
    ).split()
    assert "step 5/5" in run("train", "quickstart", "--run_dir", "runs/quickstart", *quick)
    assert "latin " in run("sample", "runs/quickstart", "--prompt", "latin ", "--tokens", "4")


def test_own_text_is_trained_on_with_the_optimizer_of_a_cpu(run):
    (run.here / "own.txt").write_text("To be, or not to be: that is the question.\n" * 2000)
    few = "--train.steps 3 --eval.tokens 128 --sample.tokens 4".split()
    out = run("train", "own", "--data", "own.txt", "--run_dir", "runs/mine", *few)
    assert "optimizer muon" in out and "step 3/3" in out
    assert "Once upon a time" in run(
        "sample", "runs/mine", "--prompt", "Once upon a time", "--tokens", "4"
    )
    run("plot", "runs/mine", "-o", "own.png")
    assert (run.here / "own.png").is_file()


def test_text_is_prepared_trained_on_and_sampled(run):
    (run.here / "my.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    (run.here / "questions.jsonl").write_text(json.dumps(QUESTION) + "\n")
    run("prepare", "text", "my.txt", "--tokenizer", "bytes", "--out", "shards", "--workers", "1")
    data = ["--data.train", "shards/train_*.bin", "--data.val", "shards/val_*.bin"]
    assert "\nstep" in run("train", "quickstart", *SMALL, *data, "--run_dir", "run")
    assert "To be" in run("sample", "run", "--prompt", "To be", "--tokens", "2")
    assert "bits per byte" in run("perplexity", "run", "shards/val_*.bin", "--tokens", "64")
    assert "HellaSwag, 1 question\n" in run("hellaswag", "run", "--data", "questions.jsonl")
    assert "step 2" in run("stats", "run")
    run("plot", "run", "-o", "loss.png")
    run("export", "run", "--out", "exported")
    assert (run.here / "loss.png").is_file() and (
        run.here / "exported" / "model.safetensors"
    ).is_file()
    start = json.loads((run.here / "run" / "run.json").read_text())["starts"][0]
    assert start["packages"]["gpt2_triton"] == __version__
    assert not start["git"] or f"\ncommit {start['git']['commit']}" in run("--version")
