"""Triton's interpreter with less overhead and the same bits.  What is replaced in
it stands in this room alone.

The interpreter goes through the compiler's front end for each operation: it checks types,
broadcasts, and makes a dozen objects, in some 80 us.  numpy takes one for a small block.
The replacements know the usual types, and leave all others to Triton.  A step of a small
model takes a tenth of the time.

    blocks      types and blocks are made quickly; blocks of consecutive integers and
                pointers are not made at all
    operators   + - * / // % < & >> and so on, [:, None], .to, .reshape
    functions   tl.arange, tl.where, tl.dot, tl.sum and so on
    memory      loads and stores of whole rectangles, without a loop over pointers
    launch      arguments and descriptors

tests/ground/test_interpreter.py compares each replacement with Triton's own, and names each
attribute that is replaced.  Seen with Triton 3.6, 3.8 and 3.9.  Without a GPU no kernel is
compiled, so nothing needs the originals back.
"""

import ctypes
import sys

import triton
from triton.runtime import interpreter

M_TRIM_THRESHOLD = -1  # of malloc.h
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3


def make_fast() -> None:
    """Replace the parts of Triton's interpreter, once a process."""
    from gpt2_triton.interpreter import blocks, functions, launch, memory, operators

    if interpreter._patch_lang.__module__ == launch.__name__:
        return
    _keep_freed_memory()
    _interpret_language()
    for module in (launch, blocks, operators, functions, memory):
        module.replace()


def _interpret_language() -> None:
    """Let the interpreter run functions of triton.language that were decorated for compilation: by
    a program that had imported triton before, as models of transformers do, and
    torch.use_deterministic_algorithms.
    """
    for module in [
        module for name, module in sys.modules.items() if name.startswith("triton.language")
    ]:
        for name, value in list(vars(module).items()):
            if isinstance(value, triton.JITFunction):
                setattr(module, name, interpreter.InterpretedFunction(value.fn))


def _keep_freed_memory() -> None:
    """Let malloc keep what numpy frees: else blocks of 128 KiB come and go by pages."""
    libc = ctypes.CDLL(None)
    for parameter, value in {
        M_MMAP_THRESHOLD: 1 << 25,
        M_TRIM_THRESHOLD: 1 << 30,
        M_TOP_PAD: 1 << 26,
    }.items():
        libc.mallopt(parameter, value)
