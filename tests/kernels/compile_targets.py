"""Compiles the kernels of whole runs for GPUs that are not here, and prints what each kernel needs.

    python -m tests.kernels.compile_targets gfx942 sm_100 [--kernels NAME ...]
        two minutes for each target on two cores
    python -m tests.kernels.compile_targets
        all targets: `make compile-all`

A driver that launches nothing stands for the GPU, and compile_run makes the calls of a run.  Left
out are the Gluon kernels of kernels/hopper, which test_hopper.py compiles in the same way.  The
exit code is 1 if a kernel does not compile or fit, spills more than SPILLED, or loads operands
slowly (`faults`).
"""

import argparse
import contextlib
import dataclasses
import itertools
import re
import sys
import tempfile
import time
from collections.abc import Collection, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton

from benchmarks.activations import ACTIVATIONS
from gpt2_triton.console import Progress
from gpt2_triton.kernels.absent_gpu import SHARED_MEMORY, absent_driver
from gpt2_triton.kernels.replaced import Absent
from tests.kernels.operand_loads import operand_loads


class Target(NamedTuple):
    """A GPU: its architecture as Triton names it, threads of a warp, and table."""

    backend: str
    arch: int | str
    warp: int
    table: str
    fp8: bool

    @property
    def shared(self) -> int:
        """Bytes of shared memory that a program may take."""
        return SHARED_MEMORY[self.arch]

    @property
    def tma(self) -> bool:
        return isinstance(self.arch, int) and self.arch >= 90

    @property
    def fails(self) -> bool:
        """Return whether this Triton compiles no attention: 3.6 for RDNA3."""
        return self.arch == "gfx1100" and triton.__version__.startswith("3.6.")


TARGETS = {
    "sm_80": Target("cuda", 80, 32, "a100", False),
    "sm_86": Target("cuda", 86, 32, "rtx4090", False),
    "sm_89": Target("cuda", 89, 32, "rtx4090", True),
    "sm_90": Target("cuda", 90, 32, "h200", True),
    "sm_100": Target("cuda", 100, 32, "b200", True),
    "sm_120": Target("cuda", 120, 32, "rtx5090", True),
    "gfx942": Target("hip", "gfx942", 64, "mi300x", False),
    "gfx950": Target("hip", "gfx950", 64, "mi300x", True),
    "gfx1100": Target("hip", "gfx1100", 32, "rdna3", False),
}
BF16: dict[str, dict[str, object]] = dict(
    model=dict(n_layer=2),
    data=dict(train="builtin", val="builtin"),
    train=dict(batch_size=4, total_batch_tokens=None),
    memory=dict(recompute="none"),
    log=dict(stats_every=1),
    sample=dict(every=1, top_k=50),
)
FP8 = dict(precision="fp8")
GROUPED = dict(arch="llama", n_kv_head=4, n_inner=2048)
MODERN = GROUPED | dict(qk_norm=True, logit_cap=15)
RUNS: dict[str, dict[str, dict[str, object]]] = {  # what each changes of BF16
    "bf16": {},
    "bf16, recompute": dict(
        memory=dict(recompute="gelu+ln"), optim=dict(master="none", m="bf16", v="bf16")
    ),
    "bf16, dropout": dict(model=dict(dropout=0.1), memory=dict(recompute="gelu+ln")),
    "bf16, muon": dict(optim=dict(name="muon")),
    "bf16, wide heads": dict(model=dict(n_head=6)),
    "bf16, 1600 channels": dict(model=dict(n_head=25, n_embd=1600)),
    "bf16, llama": dict(model=GROUPED),
    "bf16, qk_norm": dict(model=MODERN),
    "bf16, llama 8B": dict(
        model=dict(
            arch="llama", n_layer=1, n_head=32, n_kv_head=8, n_embd=4096, n_inner=14_336, tied=False
        )
    ),
    "fp32": dict(train=dict(dtype="fp32"), optim=dict(master="none")),
    "fp32, recompute": dict(
        train=dict(dtype="fp32"), optim=dict(master="none"), memory=dict(recompute="gelu+ln")
    ),
    "fp32, muon": dict(train=dict(dtype="fp32"), optim=dict(name="muon", master="none")),
    "fp32, wide heads": dict(
        train=dict(dtype="fp32"), optim=dict(master="none"), model=dict(n_head=6)
    ),
    "fp8": dict(train=FP8, fp8=dict(keep_bf16="head")),
    "fp8, llama": dict(train=FP8, model=GROUPED),
    "fp8, qk_norm": dict(train=FP8, model=MODERN),
    "fp8, dropout": dict(train=FP8, model=dict(dropout=0.1)),
    "fp8, head": dict(train=FP8, optim=dict(name="muon", m="bf16")),
}
RUNS |= {act: dict(model=dict(activation=act)) for act in ACTIVATIONS if act != "gelu"}
WIDE_HEADS = dict(arch="llama", n_head=6, n_kv_head=2, head_dim=128, n_inner=2048)
HOPPER_RUNS: dict[str, dict[str, dict[str, object]]] = {  # of kernels/hopper, beside some of RUNS
    "1600 channels": dict(model=dict(n_head=25, n_embd=1600), train=dict(batch_size=16)),
    "2048 tokens": dict(model=dict(block_size=2048), train=dict(seq_len=2048)),
    "8192 tokens": dict(model=GROUPED | dict(block_size=8192), train=dict(seq_len=8192)),
    "heads of 128": dict(model=WIDE_HEADS),
    "normed heads of 128": dict(model=WIDE_HEADS | dict(qk_norm=True)),
    "fp8, heads of 128": dict(train=FP8, model=WIDE_HEADS),
    "fp8, normed heads of 128": dict(train=FP8, model=WIDE_HEADS | dict(qk_norm=True)),
}
OTHER_RUNS = ("decoding", "several GPUs")
PRODUCTS = "products"  # in the place of kernels: all that multiply
SPILLED = 64  # bytes
# known faults.  Ada, in fp8 with the norms of heads: once a block, behind its loop; and by Triton
# 3.6, in fp8, the gradient of the last norm, once a batch.  Hopper, with dropout: 3.6 spills 48,
# 3.8 24, and only the assembler of 3.9 more.  RDNA3, heads wider than 64: WMMA takes no fp32, and
# Triton's multiply-adds hold whole rows of both operands, 256 numbers; smaller blocks spill as
# much.
SPILLED_MORE = {
    ("sm_89", "_attention_bwd_dq_kernel"): 76,
    ("sm_89", "_layernorm_bwd_kernel"): 92,
    ("sm_90", "_layernorm_bwd_kernel"): 116,
    ("gfx1100", "_attention_bwd_dq_kernel"): 680,
    ("gfx1100", "_attention_bwd_dkdv_kernel"): 448,
}
# Blocks that are multiplied along both of their dimensions, as k in dQ, or stored turned too, as
# Muon's symmetric tiles: one copy in shared memory serves both, and along one of them each number
# is alone.  No block of a table helps, and gfx942 has no load that transposes, as gfx950 has.  In
# decoding each thread has one row of a small block.
NARROW = {
    "gfx942": (
        "_attention_bwd_dkdv_kernel",
        "_attention_bwd_dq_kernel",
        "_symmetric_kernel",
        "_decode_matmul_kernel",
    ),
    "gfx950": (
        "_attention_bwd_dkdv_kernel",
        "_attention_bwd_dq_kernel",
        "_symmetric_kernel",
        "_decode_matmul_kernel",
    ),
    "gfx1100": (
        "_attention_fwd_kernel",
        "_attention_bwd_dkdv_kernel",
        "_attention_bwd_dq_kernel",
        "_decode_matmul_kernel",
    ),
}
WHOLE = 128  # bits that a thread loads at once
# exceptions: to gfx950's shared memory a thread copies 128 or 32 bits; Triton takes 32 in fp32, and
# for decoding's small blocks
COPIED = {("gfx950", "f32"): 32, ("gfx950", "_decode_matmul_kernel"): 32}


@dataclasses.dataclass
class Needs:
    """The most shared memory that a variant of a kernel needs, and the most
    bytes that its threads spill.
    """

    variants: int = 0
    shared: int = 0
    spilled: int = 0


def device(name: str) -> Any:
    """Return a driver of a target; its number keeps its kernels apart from other targets'."""
    from triton.backends.compiler import GPUTarget

    target = TARGETS[name]
    return absent_driver(
        GPUTarget(target.backend, target.arch, target.warp), [*TARGETS].index(name)
    )


class Compiler:
    """Takes the place of triton.compiler.compile; keeps the kernels,
    and what they need, by name.
    """

    def __init__(self, compile_kernel: Any):
        self._compile = compile_kernel
        self.kernels: dict[str, list[Any]] = {}
        self.needs: dict[str, Needs] = {}
        self.failures: list[str] = []
        self.launched: set[str] = set()  # names of kernels, also of those that are left out
        self.log = ""  # of ptxas

    def __call__(self, source: Any, **keywords: Any) -> Any:
        try:
            kernel = self._compile(source, **keywords)
        except Absent:  # another process will compile it
            raise
        except Exception as error:
            raise RuntimeError(f"{source.fn.__name__}: {error}") from error
        self.kernels.setdefault(source.fn.__name__, []).append(kernel)
        needs = self.needs.setdefault(source.fn.__name__, Needs())
        needs.variants += 1
        needs.shared = max(needs.shared, kernel.metadata.shared)
        for scratch in re.findall(
            r"\.private_segment_fixed_size: +(\d+)", kernel.asm.get("amdgcn", "")
        ):
            needs.spilled = max(needs.spilled, int(scratch))
        return kernel

    def read_ptxas(self, log: str) -> None:
        """Take the bytes spilled from the log of all kernels."""
        self.log = log
        for name, stored in re.findall(
            r"entry function '(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL
        ):
            self.needs[name].spilled = max(self.needs[name].spilled, int(stored))


def compile_for(
    name: str,
    only: Iterable[str] | None = None,
    runs: Collection[str] = (*RUNS, *OTHER_RUNS),
    hopper: bool = False,
) -> Compiler:
    """Compile the kernels of these runs for a target.

    only     the kernels that are not left out: NAME, NAME:EPILOGUE for one
             epilogue of a product, or PRODUCTS
    hopper   compile the Gluon kernels, and no others

    For a process that does nothing else: torch and Triton remain changed.
    """
    import torch
    import triton.compiler
    from triton import JITFunction, knobs
    from triton.runtime import driver
    from triton.runtime.cache import FileCacheManager

    import gpt2_triton.kernels as K
    from gpt2_triton.commands.compile import absent_ranks
    from gpt2_triton.config.config import Config
    from gpt2_triton.kernels import table_file, tuning
    from gpt2_triton.model.compiling import compile_decoding, compile_run
    from gpt2_triton.model.model import Model

    target, number = TARGETS[name], [*TARGETS].index(name)
    driver.set_active(device(name))
    torch.cuda.is_available = lambda: hopper  # also on a machine with a GPU
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.current_device, torch.cuda.set_device = lambda: number, lambda _: None
    torch.cuda.get_device_properties = lambda number: SimpleNamespace(
        multi_processor_count=132 if hopper else 108
    )
    table_file.table_name = lambda: target.table
    tuning.table.cache_clear()
    tuning.has_tma.cache_clear()
    knobs.nvidia.dump_ptxas_log = True
    wanted = None if only is None else {*only} | (multiplying() if PRODUCTS in only else set())
    run, compile_kernel = JITFunction.run, triton.compiler.compile
    triton.compiler.compile = compiler = Compiler(compile_kernel)

    def run_some(self: JITFunction, *args: Any, **keywords: Any) -> Any:
        compiler.launched.add(self.__name__)
        names = {self.__name__, f"{self.__name__}:{keywords.get('EPILOGUE')}"}
        is_wanted = wanted is None or names & wanted
        if is_wanted and (".hopper." in self.__module__) == hopper:
            return run(self, *args, **keywords)
        return None

    def model(changes: dict[str, dict[str, object]], **options: Any) -> Model:
        sections = {
            key: BF16.get(key, {}) | changes.get(key, {}) for key in BF16.keys() | changes.keys()
        }
        ranks = absent_ranks(1)  # the largest arenas do not fit a laptop
        return Model(Config.model_validate(sections), K, "cpu", group=ranks, **options)

    def decode(dtype: str, sequences: int) -> None:
        train = {"train": {"dtype": dtype}, "optim": {"master": "none"}}
        compile_decoding(model(train, batch=1, sequences=sequences), 0.8, 50, 0.9)

    JITFunction.run = run_some
    with (
        tempfile.TemporaryDirectory() as cache,
        tempfile.NamedTemporaryFile("a+") as log,  # of this process and those that compile
        Progress(name, len(runs), "runs") as progress,
        contextlib.redirect_stdout(log),
        knobs.cache.scope(),
    ):
        knobs.cache.dir = cache
        knobs.cache.manager_class = FileCacheManager  # reads all of a kernel, not its binary alone
        for key in runs:
            progress.advance(0, key)
            try:
                if key == "decoding":
                    for dtype, sequences in itertools.product(table_file.DTYPES, (1, 64)):
                        decode(dtype, sequences)
                elif key == "several GPUs":
                    for others in (1, 3, 7):  # of 2, 4 and 8 ranks
                        K.add_partials(torch.empty(1 << 20), torch.empty(others, 1 << 20))
                elif target.fp8 or "fp8" not in key:
                    compile_run(model((RUNS | HOPPER_RUNS)[key]), {(4, 1024)})
            except Exception as error:
                # of Triton or of a backend; other runs are compiled nevertheless
                compiler.failures.append(f"{key}: {type(error).__name__}: {error}")
            progress.advance(1, key)
        log.seek(0)
        compiler.read_ptxas(log.read())
    JITFunction.run, triton.compiler.compile = run, compile_kernel
    return compiler


def multiplying() -> set[str]:
    """Return the names of the kernels that call `dot`, themselves or through other functions."""
    from triton import JITFunction

    import gpt2_triton.kernels as K

    modules = [
        module
        for name, module in sys.modules.items()
        if name.startswith(f"{K.__name__}.") and "hopper" not in name
    ]
    functions = [
        f for module in modules for f in vars(module).values() if isinstance(f, JITFunction)
    ]
    calls = {f.__name__: {*f.fn.__code__.co_names} for f in functions}
    found, more = set[str](), {"dot"}
    while more:
        found |= more
        more = {name for name, called in calls.items() if called & found} - found
    return {name for name in found if name.endswith("_kernel")}


def faults(name: str, compiler: Compiler) -> list[str]:
    """Return a line for each fault of a target's kernels.

    Without TMA a thread loads 16 bytes of an operand at once, or its share of a smaller block.
    NVIDIA's GPUs copy operands to shared memory asynchronously in the loop of their product.  AMD's
    access shared memory by at least 4 bytes, transposed too.
    """
    target, found = TARGETS[name], list[str]()
    for kernel, needs in compiler.needs.items():
        if needs.shared > target.shared:
            found.append(
                f"{kernel}: {needs.shared} bytes of shared memory, {target.shared} are there"
            )
        if needs.spilled > SPILLED_MORE.get((name, kernel), SPILLED):
            found.append(f"{kernel}: spills {needs.spilled} bytes")
    for kernel, variants in compiler.kernels.items():
        loads = [operand_loads(variant) for variant in variants] if not target.tma else []
        for each in filter(None, loads):
            called = f"{kernel} {each.dtype}"
            allowed = (COPIED.get((name, of), WHOLE) for of in (kernel, each.dtype))
            least = min(each.share, *allowed)
            found += [
                f"{called}: {bits} bits of an operand at once"
                for bits in each.accesses
                if bits < least
            ]
            if target.backend == "cuda" and (each.plain or not each.asynchronous):
                found.append(f"{called}: a load in the loop of a product is not asynchronous")
            if each.narrow and kernel not in NARROW.get(name, ()):
                found.append(f"{called}: shared memory is accessed by less than 32 bits")
    return [f"{name} {line}" for line in dict.fromkeys(found)]


def report(name: str, compiler: Compiler) -> str:
    """Return a line for each kernel of a target, and one for all."""
    limit, all_needs = TARGETS[name].shared, compiler.needs.values()
    lines = [
        f"{name:8}{kernel:34}{n.variants:4}{n.shared:8}{n.spilled:7}"
        for kernel, n in compiler.needs.items()
    ]
    most = [
        sum(n.variants for n in all_needs),
        max(n.shared for n in all_needs),
        max(n.spilled for n in all_needs),
    ]
    total = (
        f"{name:8}{f'{len(lines)} kernels, {limit} bytes of shared memory':34}"
        + "{:4}{:8}{:7}".format(*most)
    )
    head = f"{'target':8}{'kernel':34}{'':4}{'shared':>8}{'spilled':>8}"
    return "\n".join([head, *lines, total])


def compile_target(name: str, kernels: Iterable[str] | None) -> tuple[int, list[str]]:
    """Compile for a target and print what it needs; return the number of kernels and the faults."""
    began, compiler = time.perf_counter(), compile_for(name, kernels)
    assert compiler.needs, f"no run of {name} launches {kernels}"
    print(report(name, compiler), f"{time.perf_counter() - began:.0f} s", sep="\n", flush=True)
    failures = [f"{name} FAILED {failure}" for failure in compiler.failures]
    found = failures + faults(name, compiler)
    print("".join(f"{line}\n" for line in found), end="", file=sys.stderr, flush=True)
    return sum(n.variants for n in compiler.needs.values()), found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="*", default="all", choices=[*TARGETS, "all"])
    parser.add_argument(
        "--kernels", nargs="+", help=f"all by default; {PRODUCTS}: all that multiply"
    )
    options = parser.parse_args()
    began = time.perf_counter()
    targets = compiled = 0
    wrong = list[str]()
    names = [*TARGETS] if "all" in options.targets else options.targets
    for name in names:
        if TARGETS[name].fails:
            print(f"{name} left out: Triton {triton.__version__} compiles no attention for it")
            continue
        variants, found = compile_target(name, options.kernels)
        targets += 1
        compiled += variants
        wrong += found
    minutes = (time.perf_counter() - began) / 60
    red = ", ".join(dict.fromkeys(line.partition(" ")[0] for line in wrong)) or "all green"
    print(f"{targets} targets, {compiled} kernels, {minutes:.1f} min, {len(wrong)} faults: {red}")
    sys.exit(bool(wrong))
