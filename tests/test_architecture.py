"""Rules of the design: torch gives memory and nothing else, and the files that explain
a step stay few and short.
"""

import ast
import importlib
import re
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_budgets import code_tokens

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpt2_triton"
FILES = sorted(PACKAGE.rglob("*.py"))

# torch.<name> that the package may use: memory, views of it, names of dtypes and devices,
# streams and the process group
ALLOWED_TORCH = {
    "Tensor", "empty", "from_numpy", "dtype", "device", "cuda", "distributed",
    "uint8", "int16", "int32", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
}  # fmt: skip

# what single modules may use in addition: nanoGPT's checkpoints are pickles, and
# torch.load(weights_only=True) reads them without executing code; torch.version.hip tells AMD's
# GPUs; a program's default device is not for our tensors
ALLOWED_IN = {
    "api": {"get_default_device"},
    "checkpoint/nanogpt": {
        "load",
        "serialization",
        "get_unsafe_globals_in_checkpoint",
        "safe_globals",
    },
    "device": {"version"},
    "distributed/shared_memory": {"UntypedStorage", "from_file", "version"},
}

# aten operations that move, allocate or reinterpret memory
MEMORY_ONLY = {
    "view", "_unsafe_view", "slice", "select", "copy_", "empty", "new_empty", "as_strided", "alias",
    "detach", "lift_fresh", "_to_copy", "set_", "split", "transpose",
}  # fmt: skip


def _name(path: Path) -> str:
    return str(path.relative_to(PACKAGE).with_suffix(""))


def _torch_names(tree: ast.AST):
    """Yield (name, line) of every attribute of torch that the module uses."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "torch"
        ):
            yield node.attr, node.lineno
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                yield alias.name, node.lineno
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch."):
                    yield alias.name.removeprefix("torch."), node.lineno


def test_torch_gives_memory_and_nothing_else():
    refused = [
        f"{path}:{line} torch.{name}"
        for path in FILES
        for name, line in _torch_names(ast.parse(path.read_text()))
        if name not in ALLOWED_TORCH | ALLOWED_IN.get(_name(path), set())
    ]
    assert not refused


class Recorder(TorchDispatchMode):
    """Records the names of all aten operations, those of the launchers too."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.add(str(function).removeprefix("aten.").split(".")[0])
        return function(*args, **(kwargs or {}))


def test_a_training_step_runs_no_torch_arithmetic():
    from tests.support.tiny import packed_batch, tiny_model

    model, config = tiny_model()
    model.eager = True  # a capture sets torch's own random state with fill_
    batch = packed_batch(config)
    lr_schedule = importlib.import_module("gpt2_triton.training.lr_schedule")
    with Recorder() as recorder:
        model.begin_step(lr_schedule.step_inputs(0, config), 0, 1)
        model.micro_step(batch, first=True)
        model.end_step().result()
    assert recorder.seen <= MEMORY_ONLY | {"_local_scalar_dense"}, recorder.seen - MEMORY_ONLY
    with Recorder() as recorder:
        batch + 1
    assert not recorder.seen <= MEMORY_ONLY  # the recorder would have seen a stray sum


def test_schedules_have_types():
    names = {"schedule.py", "decoding.py", "muon_update.py"}
    schedules = [path for path in sorted((PACKAGE / "model").rglob("*.py")) if path.name in names]
    assert len(schedules) == 5
    for path in schedules:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assert "Any" not in {node.id for node in nodes if isinstance(node, ast.Name)}, path


def test_no_code_asks_a_model_what_it_has():
    """An architecture is wired by its wiring.py; only keys of a configuration are read by name."""
    asked = [
        f"{path}: {ast.unparse(node)}"
        for path in sorted((PACKAGE / "model").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr")
        if not ast.unparse(node.args[0]).startswith("config.")
    ]
    assert asked == []


def test_a_launcher_has_at_most_ten_parameters():
    """Nor has a function that passes a launch on; a jit function's parameters are a kernel's."""
    counts = {}
    for path in (PACKAGE / "kernels").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                parameters = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                is_jit = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
                counts[path.name, node.name] = 0 if is_jit else len(parameters)
    assert len(counts) > 300 and {key: n for key, n in counts.items() if n > 10} == {}


def _constants(path: Path) -> set[str]:
    """Return the names in a module of kernels that are a tl.constexpr."""
    import triton.language as tl

    module = importlib.import_module(f"gpt2_triton.kernels.{path.stem}")
    return {name for name, value in vars(module).items() if isinstance(value, tl.constexpr)}


def test_constants_of_portable_kernels_stand_right_of_their_operators():
    """Left of a tensor, a constexpr wraps the result in the interpreter, and some
    Tritons' functions refuse it.
    """
    found = []
    for path in sorted((PACKAGE / "kernels").glob("[!_]*.py")):
        constants = _constants(path)
        for node in ast.walk(ast.parse(path.read_text())):
            left = node.left if isinstance(node, ast.BinOp | ast.Compare) else None
            if isinstance(left, ast.Name) and left.id in constants:
                found.append(f"{path}:{node.lineno} {ast.unparse(node)}")
    assert not found


def test_the_afternoon_path_is_as_short_as_the_page_says_and_its_files_exist():
    page = (
        (ROOT / "docs" / "engineering" / "code.md")
        .read_text(encoding="utf-8")
        .partition("## The afternoon path")[2]
    )
    limit, block = re.findall(
        r"fewer than ([\d,]+) tokens.*?^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )[0]
    tokens = {file: code_tokens(ROOT / file) for file in block.split()}
    assert sum(tokens.values()) < int(limit.replace(",", "")), tokens
    assert {"train.py", "gpt2_triton/model/gpt2/schedule.py"} <= tokens.keys()
