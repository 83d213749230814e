"""The design's rules as tests: torch gives memory and nothing else, and imports point one way."""

import ast
import importlib
import pathlib

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = pathlib.Path(__file__).parent.parent / "gpt2_triton"
FILES = sorted(PACKAGE.rglob("*.py"))

# torch.<name> that the package may use: memory, views of it, names of dtypes and devices, streams and the process group
ALLOWED_TORCH = {
    "Tensor", "empty", "from_numpy", "dtype", "device", "cuda", "distributed",
    "uint8", "int16", "int32", "float32", "bfloat16", "float16",
}  # fmt: skip

# and what one module may use beside: nanoGPT's checkpoints are pickles, and torch.load(weights_only=True) is the reader
# of them that executes nothing
ALLOWED_IN = {"nanogpt": {"load"}, "peers": {"UntypedStorage", "from_file"}}

# who may import whom: a module's own imports from the package, by prefix
ALLOWED_IMPORTS = {
    "kernels/contract": set(),
    "kernels/step_io": set(),
    "kernels/tuning": set(),
    "kernels/device_math": {"kernels.tuning"},
    "kernels/tiles": set(),
    "kernels/__init__": {"kernels"},
    "kernels/": {"kernels"},
    "arena": set(),
    "tables": {"arena"},
    "schedule": set(),
    "optim": {"config", "kernels.step_io", "sections"},
    "sections": set(),
    "config": {"sections"},
    "data/": {"data"},
    "best": set(),
    "checkpoint": {"best", "checks", "crew", "shares"},
    "saver": {"checkpoint", "crew", "lines"},
    "compatible": {"checkpoint"},
    "crew": set(),
    "shares": set(),
    "signals": set(),
    "ranks": {"config"},
    "parallel": {"crew", "lines", "peers", "ranks"},
    "peers": set(),
    "pulse": {"parallel"},
    "layout": {"tables"},
    "link": {"layout", "parallel", "stream"},
    "replicas": {"config", "crew", "layout", "model"},
    "checks": set(),
    "configfile": {"config", "sections"},
    "configtable": {"compatible", "config"},
    "gpus": {"arena", "config"},
    "lines": set(),
    "log": {"config", "gpus", "lines", "metrics", "mirror", "optim", "provenance", "stream"},
    "metrics": {"lines"},
    "mirror": {"config", "configfile", "metrics", "provenance"},
    "provenance": {"", "config", "metrics"},  # "" is the version of the package
    "plot": {"config", "metrics"},
    "weights": {"checkpoint", "config", "planning", "sections", "tables"},
    "huggingface": {"checkpoint", "data.tokenizer", "sections", "weights"},
    "llmc": {"checkpoint", "data.tokenizer", "weights"},
    "nanogpt": {"checkpoint", "weights"},
    "sources": {"checkpoint", "config", "huggingface", "llmc", "nanogpt", "weights"},
    "export": {"checkpoint", "config", "data.tokenizer", "huggingface", "llmc", "sources"},
    "sample": {"kernels", "config", "data", "decoding", "gpus", "model", "sources"},
    "decoding": {"model", "stream"},
    "stream": set(),
    "view": {"link", "tables"},
    "watch": {"crew", "tables"},
    "stability": {"best", "checkpoint", "config", "crew", "model", "saver", "stream"},
    "hellaswag": {"config", "crew", "data", "model"},
    "evaluation": {"kernels", "arena", "config", "crew", "data", "gpus", "model", "planning"},
    "planning": {"tables", "arena", "config", "data.loader", "layout", "sections", "watch"},
    "model": {
        "schedule",
        "tables",
        "arena",
        "config",
        "crew",
        "layout",
        "link",
        "parallel",
        "planning",
        "stream",
        "view",
        "watch",
    },
}


def _name(path: pathlib.Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def _torch_names(tree: ast.AST):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.attr, node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield alias.name, node.lineno
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch."):
                    yield alias.name.removeprefix("torch."), node.lineno


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_torch_gives_memory_and_nothing_else(path):
    refused = [
        f"{path.name}:{line} torch.{name}"
        for name, line in _torch_names(ast.parse(path.read_text()))
        if name not in ALLOWED_TORCH | ALLOWED_IN.get(_name(path), set())
    ]
    assert not refused


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_imports_point_one_way(path):
    name = _name(path)
    rule = next((allowed for prefix, allowed in ALLOWED_IMPORTS.items() if name == prefix), None)
    if rule is None:
        rule = next(
            (
                allowed
                for prefix, allowed in ALLOWED_IMPORTS.items()
                if prefix.endswith("/") and name.startswith(prefix)
            ),
            None,
        )
    if rule is None:
        return  # commands, trainer: the top, which may import all below
    for node in ast.walk(ast.parse(path.read_text())):
        modules = []
        if isinstance(node, ast.ImportFrom) and node.module:
            submodules = [
                f"{node.module}.{a.name}"
                for a in node.names
                if (PACKAGE.parent / f"{node.module}.{a.name}".replace(".", "/")).with_suffix(".py").exists()
            ]
            modules = submodules or [node.module]
        elif isinstance(node, ast.Import):
            modules = [a.name for a in node.names]
        for module in modules:
            if module.startswith("gpt2_triton"):
                target = module.removeprefix("gpt2_triton").lstrip(".")
                assert any(target == a or target.startswith(a + ".") for a in rule), f"{name} may not import {module}"


def test_a_training_step_runs_no_torch_arithmetic():
    """Record every aten op of a step: only views, allocation, copies may appear, here and in the launchers."""
    from tests.tiny import packed_batch, tiny_model

    model, config = tiny_model()
    batch = packed_batch(config)
    optim = importlib.import_module("gpt2_triton.optim")

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.add(str(function).removeprefix("aten.").split(".")[0])
            return function(*args, **(kwargs or {}))

    with Record() as record:
        model.begin_step(optim.hyper_row(0, config, 1.0 / 32), 0, 1)
        model.micro_step(batch, first=True)
        model.end_step().result()
    memory_only = {
        "view",
        "_unsafe_view",
        "slice",
        "select",
        "copy_",
        "empty",
        "new_empty",
        "as_strided",
        "alias",
        "detach",
        "lift_fresh",
        "_to_copy",
        "set_",
        "split",
    }
    assert record.seen <= memory_only | {"_local_scalar_dense"}, record.seen - memory_only
    with Record() as record:
        batch + 1
    assert not record.seen <= memory_only  # the recorder would have seen a stray sum
