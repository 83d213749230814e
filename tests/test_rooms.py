"""Rooms: what each part of the package may import.

A rule is a list of prefixes of dotted module names below gpt2_triton.  The longest prefix of a
module's own name in WITHIN, else its room in ROOMS, decides.  A module without a rule fails, as
does any import of the code around the package, since neither is in the wheel.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "gpt2_triton"
MODULES = sorted(path.relative_to(ROOT) for path in PACKAGE.rglob("*.py"))
BENCHMARKS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))
OUTSIDE = {"benchmarks", "eval", "tests", "train"}

GROUND = "errors console device files operands version"
ROOMS = {
    "errors": "",
    "console": "errors files",
    "device": "errors version interpreter",
    "interpreter": "interpreter",
    "files": "errors",
    "operands": "",
    "version": "",
    "kernels": "kernels operands",
    "config": "errors files config",
    "data": "errors console files data",
    "distributed": "errors console device files distributed",
    "model": "errors device console operands config data.packing distributed model",
    "checkpoint": "errors console files config data.tokenizer data.tokenizer_file "
    "distributed.control distributed.run_lock model.architecture "
    "model.tables model.memory_plan checkpoint",
    "inference": (
        "errors console device kernels config data distributed.control model checkpoint inference"
    ),
    "training": f"{GROUND} kernels config data distributed model checkpoint inference training",
    "api": f"{GROUND} config data distributed model checkpoint inference training",
    "commands": (
        f"{GROUND} kernels config data distributed model checkpoint inference training commands"
    ),
    "__init__": "errors api version",
    "__main__": "commands",
}
LAYERS = "operands model.decoding model.schedule model.launchers model.model_view model.sharding"
WITHIN = {
    "kernels.hopper": "operands kernels.hopper kernels.epilogue kernels.dw_split kernels.tiles "
    "kernels.device_math kernels.e4m3 kernels.rope "
    "kernels.tuning",
    "kernels.device_math": "kernels.e4m3 kernels.tuning",
    "kernels.e4m3": "kernels.tuning",
    "kernels.contract": "operands",
    "kernels.absent_gpu": "device errors",
    "kernels.tuning": "device kernels.table_file",
    "kernels.table_file": "device errors",
    "kernels.tiles": "",
    "kernels.dw_split": "",
    "data.shards": "errors console files data.text_names data.tokenizer",
    "data.loader": "data.shards data.packing errors",
    "data.mixture": "data.loader data.shards errors",
    "data.packing": "",
    "data.text_names": "",
    "data.tokenizer": "errors files data.tokenizer_file",
    "data.tokenizer_file": "errors files",
    "data.prepare": "errors console files data",
    "model.schedule": "operands model.launchers model.model_view model.muon_update model.tables",
    "model.muon_update": "model.launchers model.model_view model.muon model.tables",
    "model.decoding": "model.arena model.launchers model.model_view model.schedule model.tables "
    "operands",
    "model.launchers": "operands",
    "model.model_view": "operands model.communicator model.launchers model.muon model.recompute "
    "model.tables",
    "model.fp8_table": "model.arena model.tables",
    "model.gpt2": "model.arena model.tables model.fp8_table model.gpt2",
    "model.gpt2.wiring": "operands model.model_view model.gpt2.buffers",
    "model.gpt2.schedule": f"{LAYERS} model.gpt2.buffers",
    "model.llama": "model.arena model.tables model.fp8_table model.llama",
    "model.llama.wiring": "operands model.fp8_table model.model_view model.llama.buffers",
    "model.llama.schedule": f"{LAYERS} model.llama.buffers",
    "model.arena": "model.recompute",
    "model.recompute": "config.values",
    "model.tables": "operands model.arena",
    "model.optimizers": "",
    "model.sharding": "model.optimizers model.tables",
    "model.cuda": "",
    "model.communicator": "distributed model.launchers model.muon model.sharding "
    "model.side_stream model.tables",
    "model.peer_copies": "distributed model.communicator model.launchers model.muon model.tables",
    "model.muon": "operands model.arena model.tables model.sharding",
}


def name_of(path: Path) -> str:
    """Return the dotted name below gpt2_triton, a package's for its __init__;
    "__init__" for the root's.
    """
    parts = path.with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def within(name: str, prefixes: str) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes.split())


def rule_of(name: str) -> str | None:
    """Return the rule of the longest prefix of the name; None if there is none."""
    rules = ROOMS | WITHIN
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((rules[prefix] for prefix in prefixes if prefix in rules), None)


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield each imported module and its line, inside functions too;
    `from a import b` is a.b if b is a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"line {node.lineno}: a relative import"
            for alias in node.names:
                file = (ROOT / f"{node.module}.{alias.name}".replace(".", "/")).with_suffix(".py")
                is_module = file.exists() or file.with_suffix("").is_dir()
                yield (f"{node.module}.{alias.name}" if is_module else node.module), node.lineno


def violations(path: Path, source: str) -> Iterator[str]:
    name, rule = name_of(path), rule_of(name_of(path))
    if rule is None:
        yield f"{path}: belongs to no room; add it to ROOMS"
        return
    for module, line in imports(ast.parse(source)):
        top, _, rest = module.partition(".")
        if top in OUTSIDE:
            yield f"{path}:{line}: {name} imports {module}, which is not part of the package"
        elif top == "gpt2_triton" and not within(rest or "__init__", rule):
            yield (
                f"{path}:{line}: {name} may import {rule or 'nothing'}, not {rest or 'the package'}"
            )


def test_imports_follow_the_rooms():
    assert not [line for path in MODULES for line in violations(path, (ROOT / path).read_text())]


def circles(sources: dict[str, str]) -> list[list[str]]:
    """Return the groups of modules that import each other, also inside functions."""
    graph = {
        name: {to for to, _ in imports(ast.parse(source))} & sources.keys()
        for name, source in sources.items()
    }

    def reached(name: str) -> set[str]:
        found, todo = set[str](), [*graph[name]]
        while todo:
            if (new := todo.pop()) not in found:
                found.add(new)
                todo += graph[new]
        return found

    reach = {name: reached(name) for name in graph}
    groups = {
        tuple(sorted({name} | {to for to in reach[name] if name in reach[to]})) for name in graph
    }
    return sorted([*group] for group in groups if len(group) > 1)


def test_no_modules_import_each_other():
    def name(path: Path) -> str:
        return ".".join(path.with_suffix("").parts).removesuffix(".__init__")

    found = circles({name(path): (ROOT / path).read_text() for path in [*MODULES, *BENCHMARKS]})
    assert found == []


def test_circles_are_found():
    sources = dict(
        a="from b import x", b="def f():\n    import c", c="from a import x", d="import a"
    )
    assert circles(sources) == [["a", "b", "c"]]
    assert circles(sources | {"c": ""}) == []


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("attic.py", "", "belongs to no room"),
        ("attic/box.py", "", "belongs to no room"),
        (
            "model/arena.py",
            "def f():\n    from gpt2_triton.training import trainer",
            "2: model.arena may import",
        ),
        ("model/model.py", "import gpt2_triton.kernels", "may import"),
        ("model/model.py", "from gpt2_triton import kernels", "may import"),
        ("config/rules.py", "from gpt2_triton import __version__", "not the package"),
        (
            "commands/app.py",
            "def f():\n    from benchmarks import step_time",
            "not part of the package",
        ),
        ("training/trainer.py", "import tests.support.tiny", "not part of the package"),
        ("training/trainer.py", "from benchmarks import verify", "not part of the package"),
        (
            "kernels/layernorm.py",
            "from gpt2_triton.errors import ConfigError",
            "may import kernels operands, not errors",
        ),
    ],
)
def test_violations_are_found(file, source, found):
    [message] = violations(Path("gpt2_triton") / file, source)
    assert found in message
