"""`compile` needs no GPU, nor a GPU's memory; a second process finds the kernels,
in a folder that was moved.
"""

import json

import pytest

from gpt2_triton.commands import compile as command
from gpt2_triton.errors import ConfigError
from tests.support.elsewhere import compiled_elsewhere

SOME = """
import sys

from triton import JITFunction

run = JITFunction.run


def run_some(self, *args, **words):
    if %s:
        return run(self, *args, **words)


JITFunction.run = run_some
from gpt2_triton.commands import run as run_command

sys.exit(run_command())
"""


@pytest.mark.slow
def test_kernels_of_a_large_run_are_compiled_once(monkeypatch, tmp_path):
    """A few stand for all.  The run in fp8 computes 1,558 million parameters in 60 GB."""
    some = SOME % 'self.__name__ in ("_fill_kernel", "_clip_factor_kernel")'
    words = "-c", some, "compile", "gpt2_1558m", "--train.precision=fp8", "--gpu", "h100"
    built, moved = tmp_path / "built", tmp_path / "moved"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(built))
    printed = compiled_elsewhere(*words)
    targets = [
        json.loads(file.with_suffix(".json").read_text())["target"]
        for file in built.rglob("*.cubin")
    ]
    assert len(targets) > 1 and all(target["arch"] == 90 for target in targets)
    assert f"{len(targets)} kernels for h100 are in {built}; " in printed
    built.rename(moved)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(moved))
    assert (
        f"{len(targets)} kernels for h100 are in {moved}, of which {len(targets)} were"
        in compiled_elsewhere(*words)
    )
    modules = [file.read_bytes() for file in moved.rglob("*.so")]
    # among the names of libraries to load, not only in a text
    assert modules and all(b"\0libcuda.so.1\0" in module for module in modules)


@pytest.mark.slow
def test_kernels_of_a_narrow_model_compile(monkeypatch, tmp_path):
    """Its products have one tile, and Triton takes an argument of 1 as a constant: the kernels that
    are launched with one.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    some = SOME % "any(type(word) is int and word == 1 for word in args)"
    narrow = "--model.n_embd", "128", "--model.n_head", "2", "--train.dtype", "bf16"
    printed = compiled_elsewhere("-c", some, "compile", "quickstart", *narrow, "--gpu", "h100")
    assert " kernels for h100 are in " in printed
    assert {"_add_dw_partials_kernel", "_dw_kernel"} <= {f.stem for f in tmp_path.rglob("*.cubin")}


def test_a_cache_that_cannot_be_made_is_no_missing_compiler(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/cache")
    why = "/proc/cache: No such file or directory; choose another place"
    with pytest.raises(AssertionError, match=why):
        compiled_elsewhere("-m", "gpt2_triton", "compile", "quickstart", "--train.dtype", "bf16")


@pytest.mark.parametrize(("words", "why"), [
    (dict(gpu="24GiB"), "--gpu: expected a100-40, .*, 5090; got 24GiB"),
    (dict(gpu="a100-80", precision="fp8"), "fp8 needs a GPU that multiplies e4m3"),
    (dict(gpus=3), "no multiple of"),
])  # fmt: skip
def test_a_run_that_could_not_be_started_is_refused(words, why):
    keys = [f"--train.precision={precision}"] if (precision := words.pop("precision", "")) else []
    with pytest.raises(ConfigError, match=why):
        command.compile_kernels("gpt2_124m", *keys, **words)
