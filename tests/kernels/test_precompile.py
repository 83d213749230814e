"""Compiling without launching, on a machine without a GPU: Triton compiles for sm_90 with
a driver that only counts.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2_triton.kernels import replaced

ROOT = Path(__file__).parents[2]
SCRIPT = """
    import os
    import time

    import torch
    import triton
    import triton.language as tl
    from triton.compiler.errors import CompilationError
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.language.target_info import is_hip
    from triton.runtime import driver

    from tests.kernels import compile_targets

    launched = 0

    def launcher_cls(src, metadata):
        global module
        module = src  # as Triton 3.6's launchers, which are all the module of one name
        time.sleep(0.01)
        loaded = module
        def launch(*_):
            global launched
            launched += loaded is src
        return launch

    device = compile_targets.device("sm_90")
    device.launcher_cls, device.get_current_device = launcher_cls, lambda: 0
    target, parent = device.get_current_target(), os.getpid()

    def get_current_target():
        assert os.getpid() == parent, "CUDA refuses forks"
        return target

    device.get_current_target = get_current_target
    driver.set_active(device)
    torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None

    from gpt2_triton.kernels import clip_factor, compiling, fill

    @gluon.jit
    def gluon_kernel(out_ptr):
        gl.store(out_ptr, 2.0 if is_hip() else 1.0)

    @triton.jit
    def wrong_kernel(out_ptr):
        tl.static_assert(False)

    TEN = tl.constexpr(10)

    def caller_and_callee():
        @triton.jit
        def callee():
            return TEN

        @triton.jit
        def caller(out_ptr):
            tl.store(out_ptr, callee())

        return caller, callee

    upwards = [kernel.cache_key for kernel in reversed(caller_and_callee())]
    assert caller_and_callee()[0].cache_key == upwards[1], \
"the key depends on the kernels hashed before"

    x = torch.empty(16)

    def launches():
        gluon_kernel[(1,)](x)
        clip_factor(x[:4], x[4:5], x[8:])
        fill(x, 1.0)
        fill(x.view(4, 4), 2.0)

    shown, found = [], []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append(
        (src.name, cache_hit)
    )
    with compiling(report=lambda *counts: shown.append(counts)) as compiled:
        launches()
    missing = compiled.kernels - compiled.from_cache
    assert shown == [(n, missing) for n in range(1, 1 + missing)], shown
    assert all(cache_hit for _, cache_hit in found), "this process has compiled"
    most_source_first = ["_clip_factor_kernel", "_fill_kernel", "gluon_kernel"]
    assert not missing or [name for name, _ in found] == most_source_first, found
    print(compiled.kernels, compiled.from_cache, launched)
    with compiling() as again:
        launches()
    launches()
    print(again.kernels, again.from_cache, launched)
    for ignore_errors in (True, False):
        try:
            with compiling(ignore_errors) as some:
                launches()
                wrong_kernel[(1,)](x)
            print("passed over", some.kernels)
            wrong_kernel[(1,)](x)
        except CompilationError:
            print("raised")
"""


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="tests/gpu/test_gpu.py does this with the real driver"
)
def test_compiling_compiles_each_kernel_once_without_launching(tmp_path):
    """One of three kernels is Gluon's.  Forks compile, so that a parent's lock holds up
    none, and fill Triton's cache.  A second process finds all in Triton's cache, though its
    folder was moved.  Each has its own launcher.  A kernel that does not compile raises,
    immediately or when it is launched.
    """
    script = tmp_path / "script.py"  # Triton reads the source of kernels from a file
    script.write_text(textwrap.dedent(SCRIPT))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    for cache, from_cache in ((tmp_path / "cache", 0), (tmp_path / "moved", 3)):
        environment["TRITON_CACHE_DIR"] = str(cache)
        run = subprocess.run(
            [sys.executable, "-W", "ignore", str(script)],
            env=environment,
            capture_output=True,
            text=True,
        )
        expected = [f"3 {from_cache} 0", "3 0 4", "passed over 3", "raised", "raised"]
        assert run.stdout.splitlines() == expected, run.stderr[-2000:]
        if not from_cache:
            cache.rename(tmp_path / "moved")


def test_triton_is_known_by_the_list_of_files_in_its_wheel(monkeypatch):
    """Files of other packages in the list, and bytecode, which differ between
    installations, do not count.
    """

    def key(*lines):
        monkeypatch.setattr(
            replaced, "distribution", lambda name: SimpleNamespace(read_text=lambda _: text)
        )
        text = "\n".join(lines)
        return replaced.triton_key.__wrapped__()

    monkeypatch.setattr(replaced, "_hash_triton", lambda: "Triton's own")
    library, ptxas = (
        f"{replaced.LIBRARY},sha256=1,400",
        "triton/backends/nvidia/bin/ptxas,sha256=",
    )
    first = key(library, ptxas + "1,5", "../bin/proton,sha256=1,228")
    assert len(first) == 64
    assert key(ptxas + "2,5", library) != first
    assert key("triton/__pycache__/a.pyc,,", ptxas + "1,5", library) == first
    assert key("__editable__.triton.pth,sha256=1,80") == "Triton's own"
