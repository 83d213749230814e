"""Private attributes of torch and Triton that the package uses, and all that it replaces.

A new torch or Triton fails here, and not in a user's run; so does a use that this page does not
name.  test_interpreter.py checks that the interpreter's own parts are replaced.
"""

import ast
import importlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "gpt2_triton"
# file: module, then attributes of it; one of several between | is enough: versions differ
PRIVATE = {
    "../benchmarks/as_gpu.py": {
        "triton.backends.nvidia.compiler": "CUDABackend.hash CUDABackend.make_cubin"
    },
    "distributed/shared_memory.py": {
        "torch": "UntypedStorage._new_shared_cuda UntypedStorage._share_cuda_",
        "torch.distributed": "ProcessGroup._get_backend",
    },
    "interpreter/__init__.py": {"triton.runtime.interpreter": "_patch_lang"},
    "interpreter/blocks.py": {
        "triton.language.core": "_unwrap_shape",
        "triton.runtime.interpreter": "_get_np_dtype",
    },
    "interpreter/launch.py": {"triton.runtime.interpreter": "_implicit_cvt _patch_lang"},
    "interpreter/memory.py": {"triton.runtime.interpreter": "_get_np_dtype"},
    "kernels/absent_gpu.py": {
        "triton.backends.nvidia.driver": "CudaLauncher CudaUtils",
        "triton.runtime.build": "_load_module_from_path",
    },
    "kernels/hopper/pipeline.py": {
        "triton.experimental.gluon.language": "shared_memory_descriptor._reinterpret|"
        "shared_memory_descriptor.reinterpret",
    },
    "kernels/precompile.py": {
        "triton": "JITFunction.run",
        "triton.runtime._async_compile": "AsyncCompileMode FutureKernel.result active_mode",
    },
    "kernels/replaced.py": {
        "triton": "JITFunction._do_compile",
        "triton.runtime._async_compile": "FutureKernel",
        "triton.runtime.cache": "triton_key FileCacheManager._make_path FileCacheManager.has_file",
        "triton.runtime.jit": "DependenciesFinder._update_hash",
    },
}


def libraries(tree: ast.Module) -> set[str]:
    """Return the names in a file that come from torch or Triton."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "torch",
            "triton",
        ):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.Import):
            names |= {(a.asname or a.name).split(".")[0] for a in node.names}
    return names


def private_names(file: Path) -> set[str]:
    """Return the private modules and attributes of torch and Triton that a file names."""
    tree = ast.parse(file.read_text())
    known = libraries(tree)
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "triton")):
            found |= {part for part in (node.module or "").split(".") if part.startswith("_")}
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root = ast.unparse(node).split(".")[0]
            if root in known and not node.attr.startswith("__"):
                found.add(node.attr)
    return found - {"_exit"}  # of os


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.name)
def test_each_private_attribute_is_named_here(file):
    named = PRIVATE.get(file.relative_to(PACKAGE).as_posix(), {})
    words = f"{' '.join(named)} {' '.join(named.values())}".replace("|", ".").replace(" ", ".")
    assert private_names(file) <= set(words.split("."))


@pytest.mark.parametrize("file", PRIVATE)
def test_each_private_attribute_is_there(file):
    for module, attributes in PRIVATE[file].items():
        for attribute in attributes.split():
            assert any(has(module, one) for one in attribute.split("|")), f"{module}.{attribute}"


def has(module: str, attribute: str) -> bool:
    found = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            return False
        found = getattr(found, part)
    return True
