"""The wheel, installed into an empty environment, does from an empty directory what a user does.

The environment links to the packages that the wheel declares and to their requirements, and to nothing else: a package
that is used but not declared is missing, as for a user.  Only the build backend is downloaded.
"""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpt2_triton import __version__
from gpt2_triton.config import recipes
from gpt2_triton.version import code_state

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip")
SMALL = (
    "--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --train.steps 2 --train.batch_size 1 --train.seq_len 64 "
    "--optim.warmup 0 --eval.every 2 --eval.tokens 64 --sample.every 0 --log.stats_every 1"
).split()
QUESTION = dict(activity_label="a", ctx_a="To be", ctx_b="or", ctx="To be or", endings=[*"abcd"], label=1)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a minute of CPU time, longer on a busy machine


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--quiet", "--no-deps", "--wheel-dir", directory, ROOT], check=True)
    (file,) = directory.iterdir()
    return file


def needed(requirements: Iterable[str]) -> Iterator[metadata.Distribution]:
    """Yield the distributions here that the requirements name, and those that these name in turn."""
    seen, todo = set(), [(Requirement(words), "") for words in requirements]
    while todo:
        wanted, extra = todo.pop()
        if wanted.marker and not wanted.marker.evaluate({"extra": extra}):
            continue
        for extra in {"", *wanted.extras}:
            if (wanted.name, extra) in seen:
                continue
            seen.add((wanted.name, extra))
            try:
                found = metadata.distribution(wanted.name)
            except metadata.PackageNotFoundError:  # `pip check` names it
                continue
            yield found
            todo += [(Requirement(words), extra) for words in found.requires or []]


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Install the wheel; return a function that runs one of its environment's programs in a directory of its own."""
    environment, here = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("empty")
    venv.create(environment, symlinks=True)
    pip = [*PIP, "--python", environment / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    (installed,) = metadata.distributions(path=[str(site)])
    for distribution in needed(installed.requires):
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).is_symlink():
                (site / top).symlink_to(distribution.locate_file(top))
    subprocess.run([*pip, "check"], check=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON_INTERPRET"))}

    def run(*words, program="gpt2-triton"):
        command = [environment / "bin" / program, *words]
        ran = subprocess.run(command, cwd=here, env=kept, capture_output=True, text=True)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        return ran.stdout

    run.here = here
    return run


def test_wheel_holds_the_package_with_the_recipes_and_nothing_else(wheel):
    assert wheel.stat().st_size < 500_000
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {name.partition("/")[0] for name in names} == {"gpt2_triton", f"gpt2_triton-{__version__}.dist-info"}
        for file in (ROOT / "configs").iterdir():
            assert archive.read(f"gpt2_triton/configs/{file.name}") == file.read_bytes()
        modules = {str(path.relative_to(ROOT)) for path in (ROOT / "gpt2_triton").rglob("*.py")}
        assert modules == {name for name in names if name.endswith(".py")}


def test_commands_and_recipes_are_there(run):
    versions = run("--version")
    assert versions.startswith(f"gpt2_triton {__version__}\n" + ("commit " if code_state() else "torch "))
    assert versions == run("-m", "gpt2_triton", "--version", program="python")
    assert "Usage: " in run("--help") and "--optim.lr" in run("train", "--help")
    listed = run("configs")
    assert [name for name in recipes.names() if f"\n{name} " not in listed] == []
    (run.here / "mine.yaml").write_text(run("configs", "gpt2_124m"))
    assert run("train", "mine.yaml", "--plan", "--gpu", "h200") == run("train", "gpt2_124m", "--plan", "--gpu", "h200")


def test_text_is_prepared_trained_on_and_sampled(run):
    (run.here / "my.txt").write_text("To be, or not to be: that is the question.\n" * 200)
    (run.here / "questions.jsonl").write_text(json.dumps(QUESTION) + "\n")
    run("prepare", "text", "my.txt", "--tokenizer", "bytes", "--out", "shards", "--workers", "1")
    data = ["--data.train", "shards/train_*.bin", "--data.val", "shards/val_*.bin"]
    assert "\nstep" in run("train", "quickstart", *SMALL, *data, "--run_dir", "run")
    assert "To be" in run("sample", "run", "--prompt", "To be", "--tokens", "2")
    assert "bits per byte" in run("perplexity", "run", "shards/val_*.bin", "--tokens", "64")
    assert "HellaSwag, 1 questions" in run("hellaswag", "run", "--data", "questions.jsonl")
    assert "step 2" in run("stats", "run")
    run("plot", "run", "-o", "loss.png")
    run("export", "run", "--out", "exported")
    assert (run.here / "loss.png").is_file() and (run.here / "exported" / "model.safetensors").is_file()
    start = json.loads((run.here / "run" / "run.json").read_text())["starts"][0]
    assert start["packages"]["gpt2_triton"] == __version__
    assert not start["git"] or f"\ncommit {start['git']['commit']}" in run("--version")
