"""Makes Triton's interpreter patch triton.language once per process.

The interpreter replaces about 200 functions of triton.language before each launch and before each call of a device
function inside it, and restores them after the launch.  That was half of the function calls of a small model's step.
Where there is no GPU no kernel is compiled, so nothing needs the originals.
"""

import functools
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def install() -> None:
    """Replace the interpreter's _patch_lang; does nothing the second time, or in a Triton without such a function."""
    original = getattr(interpreter, "_patch_lang", None)
    if original is None or original.__module__ == __name__:
        return
    nothing_to_restore = SimpleNamespace(restore=lambda: None)

    @functools.cache
    def patch_all() -> None:
        languages = {"tl": interpreter.tl, "core": interpreter.tl.core}  # all that the interpreter looks for
        original(SimpleNamespace(__globals__=languages))

    def patch_lang(fn: Any) -> Any:
        patch_all()
        return nothing_to_restore

    interpreter._patch_lang = patch_lang
