"""Makes Triton's interpreter patch triton.language once per launch.

The interpreter replaces about 200 functions of triton.language before it runs a kernel, and again before each call of a
device function inside it.  The second time changes nothing, and takes a third of a small model's step.
"""

from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter

LANGUAGES = (interpreter.tl, interpreter.tl.core)


def install() -> None:
    """Replace the interpreter's _patch_lang; does nothing the second time, or in a Triton without such a function."""
    original = getattr(interpreter, "_patch_lang", None)
    if original is None or original.__module__ == __name__:
        return
    patched, nothing = set[int](), SimpleNamespace(restore=lambda: None)

    def patch_lang(fn: Any) -> Any:
        """Patch the languages in fn's globals, unless the kernel that is running has done so."""
        languages = {id(value) for value in fn.__globals__.values() if any(value is each for each in LANGUAGES)}
        if languages <= patched:
            return nothing
        scope = original(fn)
        patched.update(languages)
        if scope is not None:  # else this Triton never takes its patches back
            restore = scope.restore

            def restore_all() -> None:
                restore()
                patched.clear()

            scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_lang
