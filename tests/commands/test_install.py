"""`pip install .`, beside a torch that is there, makes an empty environment do what a user does in an empty directory.

The environment links to torch, Triton and CUDA's libraries here, which are large.  pip builds the package and takes all
else from its index, in the newest versions: a package that is used but not declared is missing, as for a user.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

from gpt2_triton import __version__
from gpt2_triton.config import recipes
from gpt2_triton.version import code_state

ROOT = Path(__file__).parents[2]
PIP = (sys.executable, "-m", "pip")
LINKED = re.compile(r"(torch|triton|(nvidia|cuda)[-_].*)$")
SMALL = (
    "--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --train.steps 2 --train.batch_size 1 --train.seq_len 64 "
    "--optim.warmup 0 --eval.every 2 --eval.tokens 64 --sample.every 0 --log.stats_every 1"
).split()
QUESTION = dict(activity_label="a", ctx_a="To be", ctx_b="or", ctx="To be or", endings=[*"abcd"], label=1)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a minute, longer on a busy machine


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Install into a new environment; return its directory of packages."""
    environment, elsewhere = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("download")
    wanted = [*PIP, "download", "--quiet", "--no-deps", "--dest", elsewhere, "hatchling"]
    if subprocess.run(wanted, capture_output=True).returncode:
        pytest.skip("pip reaches no package index")
    venv.create(environment, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))
    for distribution in metadata.distributions():
        if LINKED.match(distribution.name):
            for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                if not (site / top).is_symlink():
                    (site / top).symlink_to(distribution.locate_file(top))
    pip = [*PIP, "--python", environment / "bin" / "python"]
    subprocess.run([*pip, "install", "--quiet", "--no-compile", ROOT], check=True)
    subprocess.run([*pip, "check"], check=True)
    assert (site / "torch").is_symlink()  # pip took what was there
    return site


@pytest.fixture(scope="module")
def run(site, tmp_path_factory):
    """Return a function that runs one of the environment's programs in a directory of its own."""
    here, programs = tmp_path_factory.mktemp("empty"), site.parents[2] / "bin"
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRITON_INTERPRET"))}

    def run(*words, program="gpt2-triton"):
        ran = subprocess.run([programs / program, *words], cwd=here, env=kept, capture_output=True, text=True)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)
        return ran.stdout

    run.here = here
    return run


def test_the_package_has_its_modules_and_the_recipes_and_nothing_else(site):
    (installed,) = metadata.distributions(name="gpt2_triton", path=[str(site)])
    files = [file for file in installed.files if file.parts[0] != ".." and "__pycache__" not in file.parts]
    assert sum(file.locate().stat().st_size for file in files) < 1_500_000
    assert {file.parts[0] for file in files} == {"gpt2_triton", f"gpt2_triton-{__version__}.dist-info"}
    assert {str(file) for file in files if file.suffix == ".py"} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "gpt2_triton").rglob("*.py")
    }
    for file in (ROOT / "configs").iterdir():
        assert (site / "gpt2_triton" / "configs" / file.name).read_bytes() == file.read_bytes()


def test_commands_and_recipes_are_there(run):
    versions = run("--version")
    assert versions.startswith(f"gpt2_triton {__version__}\n" + ("commit " if code_state() else "torch "))
    assert versions == run("-m", "gpt2_triton", "--version", program="python")
    assert "Usage: " in run("--help") and "--optim.lr" in run("train", "--help")
    listed = run("configs")
    assert [name for name in recipes.names() if f"\n{name} " not in listed] == []
    (run.here / "mine.yaml").write_text(run("configs", "gpt2_124m"))
    plan = run("train", "mine.yaml", "--plan", "--gpu", "h100")
    assert plan.startswith("fits the GPU h100 of ") and "\ntime about " in plan


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
