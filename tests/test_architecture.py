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
ALLOWED_IN = {"checkpoint/nanogpt": {"load"}, "distributed/shared_memory": {"UntypedStorage", "from_file"}}


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


def test_a_training_step_runs_no_torch_arithmetic():
    """Record every aten op of a step: only views, allocation, copies may appear, here and in the launchers."""
    from tests.support.tiny import packed_batch, tiny_model

    model, config = tiny_model()
    batch = packed_batch(config)
    optim = importlib.import_module("gpt2_triton.training.lr_schedule")

    class Record(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.add(str(function).removeprefix("aten.").split(".")[0])
            return function(*args, **(kwargs or {}))

    with Record() as record:
        model.begin_step(optim.step_inputs(0, config, 1.0 / 32), 0, 1)
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
