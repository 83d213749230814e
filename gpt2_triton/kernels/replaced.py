"""What is replaced in Triton where kernels are compiled: all that changes for a whole process.

replaced                 seen with      what it buys
cache.triton_key         3.6, 3.8, 3.9  a second of each start: Triton hashes its own 400 MB
_update_hash             3.6            keys that do not depend on the order of earlier launches
_do_compile              3.6, 3.8       no second compilation of a kernel that a thread compiles
FileCacheManager         3.6, 3.8, 3.9  a cache folder that was moved, by `gpt2-triton compile`

The key of an entry of the cache is a hash of the kernel's source and options, and of Triton.
precompile.py imports this module.  Inside `compiling` it also replaces JITFunction.run, which then
compiles and does not launch, and in its forks the driver's get_current_target, which would ask
CUDA (3.6, 3.8, 3.9).  absent_gpu.py lets torch and Triton find a GPU that is not
there, in a process that does nothing else; distributed/shared_memory.py opens other processes'
memory, and interpreter/ replaces slow parts of Triton's interpreter.  tests/ground/test_replaced.py
names each private attribute of them all: a new Triton or torch fails there first.
"""

import functools
import hashlib
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from triton import JITFunction
from triton.runtime import cache
from triton.runtime._async_compile import FutureKernel
from triton.runtime.cache import FileCacheManager
from triton.runtime.jit import DependenciesFinder

LIBRARY = "triton/_C/libtriton.so"
_hash_triton = cache.triton_key
_update_hash = DependenciesFinder._update_hash
_compile = JITFunction._do_compile


@functools.cache
def triton_key() -> str:
    """Hash the wheel's list of its files and their hashes.  Triton reads all of them, 400
    MB, which takes a second.
    """
    with suppress(PackageNotFoundError):  # AMD's has another name
        lines = (distribution("triton").read_text("RECORD") or "").splitlines()
        files = sorted(line for line in lines if line.startswith("triton/") and ",sha256=" in line)
        if any(line.startswith(LIBRARY) for line in files):  # not a development install
            return hashlib.sha256("\n".join(files).encode()).hexdigest()
    return _hash_triton()


def _hash_callee_first(finder: Any, function: Any) -> None:
    """Hash a callee first: Triton 3.6's key depends on which callees were hashed before."""
    _ = function.cache_key
    _update_hash(finder, function)


def _compile_once(
    function: JITFunction, key: str, signature: Any, device: int, *rest: Any, **options: Any
) -> Any:
    """Compile a kernel; its next launch finds it while a thread compiles, as in Triton 3.9."""
    kernel = _compile(function, key, signature, device, *rest, **options)
    if isinstance(kernel, FutureKernel):
        function.device_caches[device][0][key] = kernel
    return kernel


class MovableCache(FileCacheManager):
    """A folder of Triton's cache that may have been copied from another place, where
    Triton notes absolute paths.
    """

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's metadata, which is written last, and of its binary."""
        if not self.has_file(filename):
            return None
        names = [name for name in os.listdir(self.cache_dir) if name.endswith((".cubin", ".hsaco"))]
        return {name: self._make_path(name) for name in (filename, *names)}


class Absent(Exception):
    """A kernel is not in Triton's cache."""


def only_reading(manager: Any) -> Any:
    """Return a cache manager that raises Absent where Triton would compile."""

    class Reader(manager):
        def get_group(self, filename: str) -> dict[str, str]:
            found: dict[str, str] | None = super().get_group(filename)
            if found is None:
                raise Absent
            return found

    return Reader


cache.triton_key = triton_key
DependenciesFinder._update_hash, JITFunction._do_compile = _hash_callee_first, _compile_once
