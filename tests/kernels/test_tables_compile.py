"""Tuning tables of absent GPUs: their rows compile, fit shared memory, and do not spill registers.

    python -m tests.kernels.test_tables_compile rtx4090      every launcher in both dtypes, on all cores: minutes

compiles the launchers' kernels with a driver that launches nothing, and prints ptxas's log.  The test compiles, for
each table, the one launcher that is nearest to spilling.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

CAPABILITY = {"a100": (8, 0), "rtx4090": (8, 9), "h200": (9, 0), "b200": (10, 0)}
SHARED = {"a100": 163 << 10, "rtx4090": 99 << 10, "h200": 227 << 10, "b200": 227 << 10}
NEAREST = {"a100": "attention_bwd", "rtx4090": "matmul_dx_dgelu", "h200": "attention_bwd", "b200": "matmul_dx_dgelu"}
R, C, NH, VP = 4096, 768, 12, 50304


def calls(dtype: str, wide: bool) -> list[tuple[str, tuple]]:
    """Return launchers with arguments as in a step; memory that is never touched costs nothing."""
    import torch

    from gpt2_triton import kernels as K

    def x(*shape: int, of: torch.dtype = torch.bfloat16 if dtype == "bf16" else torch.float32) -> torch.Tensor:
        return torch.empty(*shape, dtype=of)

    def f(*shape: int) -> torch.Tensor:
        return x(*shape, of=torch.float32)

    def i(*shape: int) -> torch.Tensor:
        return x(*shape, of=torch.int32)

    heads = (C // 128 if wide else NH, R // 4)
    scratch, targets = f(1 << 28), i(R)
    attention = [
        (K.attention_fwd, (x(R, C), f(4, *heads), x(R, 3 * C))),
        (
            K.attention_bwd,
            (x(R, 3 * C), f(3 * C), f(4, *heads), scratch, x(R, C), x(R, 3 * C), x(R, C), f(4, *heads), False),
        ),
    ]
    if wide:
        return attention
    large = [
        (K.matmul_dx_dgelu, (x(R, 4 * C), f(4 * C), x(R, 4 * C), scratch, x(R, C), x(C, 4 * C), x(R, 4 * C), True)),
        (K.matmul_dw, (f(C, C), scratch, x(R, C), x(R, C), True)),
        (K.muon_gram, (x(12, C, C), x(12, C, 4 * C))),
        (K.muon_gram, (x(12, C, C), x(12, 4 * C, C))),
        (K.muon_poly, (x(12, C, C), x(12, C, C), 1.0, 2.0)),
        (K.muon_apply, (x(12, C, 4 * C), x(12, C, 4 * C), x(12, C, C), 1.0)),
        (K.classifier_fwd, (x(R, VP), scratch, x(R, C), x(VP, C), f(R), targets, 50257)),
        (K.classifier_dx, (x(R, C), x(R, VP), x(VP, C), f(R), f(R), targets)),
    ]
    small = [
        (K.matmul_add, (x(R, C), x(R, C), x(R, C), x(C, C), x(C))),
        (K.matmul_gelu, (x(R, 4 * C), x(R, 4 * C), x(R, C), x(4 * C, C), x(4 * C))),
        (K.classifier_target, (f(R), x(R, C), x(VP, C), targets)),
        (K.classifier_loss, (f(R), f(R), f(R), x(R, C), scratch, x(R, C), targets, f(8), False)),
        (K.embedding_fwd, (x(R, C), i(4, R // 4), x(VP, C), x(1024, C))),
        (
            K.embedding_bwd,
            (f(VP, C), f(1024, C), scratch, x(R, C), x(R, C), f(R), i(2 * R), i(R, 4), i(64, 4), 1024, False),
        ),
        (K.muon_momentum, (x(12, 4 * C * C), f(12, 4 * C * C), f(12, 4 * C * C), f(4), 0.95)),
        (K.muon_normalise, (x(12, C, 4 * C), scratch, x(12, C, 4 * C))),
        (
            K.muon_update,
            (x(12, 4 * C * C), None, x(12, 4 * C * C), f(4), f(8), i(4), 0, 12 * C * C, 0.1, 0.2),
        ),
        (K.adamw, (x(R * C), f(R * C), f(R * C), None, f(R * C), f(4), f(8), i(4), 0, 0.1, 1.0, 0.9, 0.95, 1e-8)),
    ]
    for c in (768, 1600):
        norm = (x(R, c), x(R, c), x(c), x(c), f(R), f(R), False)
        small.append((K.layernorm_fwd, (x(R, c), f(R), f(R), x(R, c), x(c), x(c))))
        small.append((K.layernorm_bwd, (x(R, c), f(c), f(c), f(c), x(R, c), scratch, *norm)))
    for B in (1, 64):
        w, cache, seq = (x(4 * C, C), x(4 * C), x(C), x(C), None, True), x(B, 1024, 2, C), i(B, 5)
        small.append((K.decode_embed, (x(B, C), seq, x(VP, C), x(1024, C))))
        small.append((K.decode_matmul, (x(B, 4 * C), x(B, C), *w)))
        small.append((K.decode_matmul, (x(B, C), x(B, 4 * C), x(C, 4 * C), x(C), None, None, x(B, C))))
        small.append((K.decode_attention, (x(B, C), cache, x(B, 3 * C), seq, NH)))
        small.append((K.cache_fill, (cache, x(1024, 3 * C))))
        small.append((K.sample_token, (seq, f(B, VP), 50257, 0.8, 50, 0.9)))
    return attention + large + small


class Device:
    """A driver of a GPU with this capability and shared memory that loads and launches nothing."""

    utils = property(lambda self: self)

    def __init__(self, name: str):
        self.name = name

    def launcher_cls(self, source, metadata):
        return lambda *_: None

    def load_binary(self, name, kernel, shared, device):
        return 1, 1, 32, 0, 1024

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        major, minor = CAPABILITY[self.name]
        return GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_properties(self, device):
        return dict(max_shared_mem=SHARED[self.name])

    def unload_module(self, module):
        pass


def compile_for(name: str, only: str | None) -> None:
    """Print ptxas's log for each kernel that the launchers, or `only` one in bf16, would launch on this GPU, except
    the Gluon kernels of kernels/hopper; raise if one does not fit.
    """
    import torch
    from triton import knobs
    from triton.runtime import driver

    from gpt2_triton.kernels import compiling, tuning

    driver.set_active(Device(name))
    torch.cuda.is_available = lambda: False  # also on a machine with a GPU: no Gluon kernels
    torch.cuda.current_device, torch.cuda.set_device = lambda: 0, lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=108)
    tuning.table_name = lambda: name
    knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
    with compiling() as compiled:
        for dtype, wide in itertools.product(tuning.DTYPES, (False, True)):
            for launcher, arguments in calls(dtype, wide):
                if only is None or (launcher.__name__, dtype, wide) == (only, "bf16", False):
                    launcher(*arguments)
    print(f"{compiled.kernels} kernels in {compiled.seconds:.0f} s")


def spills(log: str) -> dict[str, int]:
    """Return the bytes of registers that each kernel spills, the most of its variants."""
    out: dict[str, int] = {}
    for name, stored in re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL):
        out[name] = max(out.get(name, 0), int(stored))
    return out


@pytest.mark.parametrize("name", CAPABILITY)
def test_kernel_nearest_to_spilling_does_not_spill(name):
    """Compile in a separate process, because kernels may run in the interpreter in this one."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.test_tables_compile", name, NEAREST[name]],
        cwd=Path(__file__).parents[2], env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = spills(run.stdout)
    assert found.keys() & {"_attention_bwd_dkdv_kernel", "_matmul_kernel"}
    # 4 bytes with maxnreg 128, so that four programs share a multiprocessor: at most 2 registers are allowed
    assert max(found.values()) <= 8, found


if __name__ == "__main__":
    compile_for(*(sys.argv[1:] + [None])[:2])
