"""Expressions of triton.language, computed by Triton's interpreter in a process of its own.

    python -m tests.support.interpreted OUT [fast]

writes {name: (dtype, shape, bytes)} of EXPRESSIONS to OUT, with the replacements of
gpt2_triton.interpreter if `fast`.
"""

import os
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

ARITHMETIC = ("+", "-", "*", "<", "<=", ">", ">=", "==", "!=")
PAIRS = (
    "x y;x row;row x;x column;x s;s x;x 2;2 x;x 0.1;0.1 x;x c;c x;s 3;s t;i "
    "j;i k;k i;n i;i n;i 3;3 i;n 3;7 n;n m;p q"
)
WHOLE_PAIRS = "i 3;n 3;k 5;i n;7 n;40 n"
AFFINE = (
    "a", "a + 3", "3 + a", "a - 3", "a * 5", "5 * a", "a * n", "n * a", "n + a", "a.to(tl.int64)",
    "a[None, :]", "a[:, None] * 8 + b[None, :]", "(a.to(tl.int64) * n)[:, None] + b[None, :]",
    "a + a", "a - a", "a * a", "a // 3", "a[:, None] * b[None, :]", "a * 300_000_000",
    "a.to(tl.int64) * 300_000_000", "a < 5", "a * 3 < 10", "3 * a < n", "a < 0", "a < 99",
    "0 - a < -3", "a[:, None] < 5", "(a < 5)[:, None] & (b < 3)[None, :]", "(a < 5) & (a < n)",
    "(a < 5) | (a > 11)", "(a < 5) & True", "a[:, None] >= b[None, :]", "tl.where(a < 5, a, 0)",
    "tl.where((a < 99)[:, None], x16, 0.0)", "tl.where(a < 99, a.to(tl.float32), 0.0)",
    "(a + n) % 5", "tl.sum(a, 0)", "0 * a < n", "(3 - n) // 3", "(3 - n) % 3",
    "tl.arange(0, 1) + 4", "(a < 5).to(tl.float32)",
    "a[:, None] < n + 0 * b[None, :]", "a[:, None] + 0 < b[None, :]",
)  # fmt: skip
OTHERS = (
    "x / y", "x / 3", "x / 3.0", "1.0 / x", "x / s", "x / n", "x * n", "x + n", "-x", "s / t",
    "x[:, None]", "row[None, :]", "m1 & m2", "m1 | m2", "m1 ^ m2", "i & 3", "i | k", "u & 7",
    "u >> 3", "u << 5", "i >> 1", "k << 2", "u + u", "u * 3", "x.to(tl.bfloat16)",
    "x.to(tl.bfloat16).to(tl.float32)", "x.to(tl.int32)", "i.to(tl.float32)", "i.to(tl.int64)",
    "k.to(tl.int32)", "m1.to(tl.int32)", "u.to(tl.float32)", "x.to(tl.int32, bitcast=True)",
    "x.to(tl.float16)", "u.to(tl.uint8)", "n.to(tl.int64)", "x.reshape(4, 16)",
    "x.reshape((2, 4, 8))", "tl.reshape(x, (64,))", "x.T", "tl.exp(x)", "tl.exp2(x)", "tl.log(x)",
    "tl.log2(x)", "tl.sqrt(x)", "tl.sin(x)", "tl.cos(x)", "tl.floor(x)", "tl.sigmoid(x)",
    "tl.abs(x)", "tl.exp(s)", "tl.minimum(x, y)", "tl.maximum(x, row)", "tl.maximum(x, 0.0)",
    "tl.maximum(x, nan)", "tl.maximum(x, nan, propagate_nan=tl.PropagateNan.ALL)",
    "tl.minimum(i, n)", "tl.sum(x, 0)", "tl.sum(x, 1)", "tl.sum(x)", "tl.sum(x, 1, keep_dims=True)",
    "tl.sum(i, 1)", "tl.sum(m1, 0)", "tl.max(x, 1)", "tl.max(nan, 0)",
    "tl.max(x, 0)", "tl.max(i, 1)", "tl.max(x)",
    "tl.min(x, 1)", "tl.sum(row, 0)", "tl.where(m1, x, y)", "tl.where(m1, x, 0.0)",
    "tl.where(m1, i, 0)", "tl.where(m1, x, row)", "tl.where(m1, 1.0, 0.0)", "tl.where(m1, s, x)",
    "tl.where(s > 0.0, x, y)", "tl.where(m1, x, i)", "tl.where(m1, x, s)",
    "tl.where((b < 99)[None, :], column, 0.0)",
    "tl.full((4, 8), 3, tl.int32)", "tl.full((4,), 0.1, tl.float32)",
    "tl.full((4,), True, tl.int1)", "tl.zeros_like(x)", "tl.zeros((4, 8), tl.float32)",
    "tl.zeros((4,), tl.bfloat16)", "tl.full((4, 8), s, tl.float32)",
    "tl.dot(x, y.T, input_precision='ieee')", "tl.dot(x, y.T, square, input_precision='ieee')",
    "tl.dot(x.reshape(2, 4, 8), y.reshape(2, 8, 4), input_precision='ieee')", "tl.cdiv(n, 4)",
    "n % 3", "n // 3",
)  # fmt: skip
MEMORY = (
    "tl.load(fp + a)", "tl.load(fp + 3)", "tl.load(fp + n)",
    "tl.load(fp + a[:, None] * 8 + b[None, :])", "tl.load(fp + a, mask=a < 5)",
    "tl.load(fp + a, mask=a < 5, other=0.0)", "tl.load(fp + a, mask=a < 5, other=-1.5)",
    "tl.load(fp + a, mask=(a > 2) & (a < 5), other=0.0)",
    "tl.load(fp + a * a, mask=a < 5, other=0.0)",
    "tl.load(fp + a[:, None] * 8 + b[None, :], mask=(a < 5)[:, "
    "None] & (b < n)[None, :], other=0.0)",
    "tl.load(fp + a[:, None] * 8 + b[None, :], mask=(a < 5)[:, None], other=0.0)",
    "tl.load(fp + 0 * a)", "tl.load(ip + a, mask=a < 5, other=0)",
    "tl.load(hp + a, mask=a < 5, other=0.0)", "tl.load(hp + a, mask=a < 5, other=-1.5)",
    "tl.load(lp + a)",
    "tl.load(fp + a.to(tl.int64) * n, mask=a < 4, other=0.0)", "tl.load(bp + a)",
    "tl.load(fp + a, mask=a < 5, other=row16)", "tl.load(ip + n) + 1", "tl.load(fp + 15 - a)",
    "tl.load(fp + n + a)", "tl.load(fp + (n + a))", "desc.load([0, 0])", "desc.load([4, 8])",
    "desc.load([12, 4])", "desc.load([n, 4])", "desc.load([99, 4])",
)  # fmt: skip
STORES = (
    "tl.store(out + a, tl.load(fp + a))", "tl.store(out + a, 1.5)", "tl.store(out + a, s)",
    "tl.store(out + n, s)",
    "tl.store(out + a, row16, mask=a < 5)", "tl.store(out + a, row16, mask=(a > 2) & (a < 9))",
    "tl.store(out + a, a)",
    "tl.store(out + a[:, None] * 8 + b[None, :], x16, mask=(a < 5)[:, None] & (b < n)[None, :])",
    "tl.store(out + a * a % 7, row16)", "tl.store(outh + a, row16)",
    "tl.store(outh + a, row16.to(tl.bfloat16), mask=a < 3)",
    "tl.store(out + a[:, None] * 8 + b[None, :], "
    "row16[:, None])", "tl.store(out + b, 0.0 * row + 2.0, mask=b < 3)",
    "odesc.store([4, 8], x)", "odesc.store([12, 4], x)", "odesc.store([14, 16], x)",
)  # fmt: skip
EXPRESSIONS = (
    *(
        f"{left} {op} {right}"
        for op in ARITHMETIC
        for left, right in map(str.split, PAIRS.split(";"))
    ),
    *(
        f"{left} {op} {right}"
        for op in ("//", "%")
        for left, right in map(str.split, WHOLE_PAIRS.split(";"))
    ),
    *AFFINE,
    *OTHERS,
    *MEMORY,
)


# of the names of the expressions: what is loaded from which pointer, from which element on
LOADED = {
    "x": ("fp", 0, 8, 8), "y": ("fp", 64, 8, 8), "square": ("fp", 128, 8, 8),
    "row": ("fp", 70, 8), "column": ("fp", 9, 8, 1), "x16": ("fp", 5, 16, 8),
    "row16": ("fp", 31, 16),
    "i": ("ip", 0, 8, 8), "j": ("ip", 64, 8, 8), "k": ("lp", 0, 8, 8), "p": ("fp", 3, 16),
    "s": ("fp", 1), "t": ("fp", 2), "q": ("fp", 4),
}  # fmt: skip


def operands(convert: Callable[[Any], Any] = interpreter._implicit_cvt) -> dict[str, Any]:
    """Return the names of the expressions: tensors, and pointers and
    descriptors as `convert` makes them.
    """
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 9).to(dtype)

    given = {
        "fp": tensor(300), "hp": tensor(300, dtype=torch.bfloat16),
        "ip": tensor(300, dtype=torch.int32), "lp": tensor(300, dtype=torch.int64),
        "bp": tensor(300) > 0, "matrix": tensor(15, 20), "out": tensor(300),
        "outh": tensor(300, dtype=torch.bfloat16), "omatrix": tensor(15, 20),
    }  # fmt: skip
    names: dict[str, Any] = {name: convert(value) for name, value in given.items()}
    for name, matrix in (("desc", "matrix"), ("odesc", "omatrix")):
        names[name] = convert(TensorDescriptor.from_tensor(given[matrix], [8, 8]))

    def loaded(pointer: str, at: int, *shape: int) -> Any:
        handle = names[pointer].handle
        # the values, in Triton's way and without what is tested
        array = interpreter._interpreter.load
        size = given[pointer].element_size()
        addresses = handle.data + size * (
            at + torch.arange(max(1, torch.Size(shape).numel())).numpy().astype("uint64")
        )
        mask = addresses > 0
        element = names[pointer].dtype.element_ty
        dtype = interpreter._get_np_dtype(element)
        data = array(addresses, mask, addresses.astype(dtype), dtype).reshape(shape or (1,))
        type = core.block_type(element, list(shape)) if shape else element
        return core.tensor(interpreter.TensorHandle(data, element), type)

    names |= {name: loaded(*place) for name, place in LOADED.items()}
    names |= {"c": tl.constexpr(3), "m": convert(3), "n": convert(7)}
    names["u"] = names["i"].to(tl.uint32, bitcast=True)
    names["m1"], names["m2"] = names["x"] > names["y"], names["x"] > 0.0
    nan = names["y"].handle.data.copy()
    nan[::3] = float("nan")
    names["nan"] = core.tensor(interpreter.TensorHandle(nan, core.float32), names["y"].type)
    names |= {"a": tl.arange(0, 16), "b": tl.arange(0, 8), "tl": tl, "True": True}
    return names | {"memory": given}


def plain(value: Any) -> Any:
    return value.value if isinstance(value, tl.constexpr) else value


def results(convert: Callable[[Any], Any]) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Return dtype, shape and bytes of each expression, and what each store has
    written; an error by its kind.
    """
    found = dict[str, tuple[str, tuple[int, ...], bytes]]()
    for expression in EXPRESSIONS:
        try:
            value = plain(eval(expression, operands(convert)))
            shape = tuple(getattr(n, "value", n) for n in value.shape)
            found[expression] = str(value.dtype), shape, value.handle.data.tobytes()
        except Exception as error:
            found[expression] = "raises", (), str(type(error)).encode()
    for expression in STORES:
        names = operands(convert)
        eval(expression, names)
        written = (
            names["memory"][name].view(torch.uint8).numpy() for name in ("out", "outh", "omatrix")
        )
        found[expression] = "stored", (), b"".join(array.tobytes() for array in written)
    return found


if __name__ == "__main__":
    assert triton  # with its interpreter
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    if "fast" in sys.argv:
        from gpt2_triton.interpreter import launch, make_fast

        make_fast()
        convert = launch.converter(interpreter._implicit_cvt)
    else:
        convert = interpreter._implicit_cvt
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": core}))
    interpreter.interpreter_builder.set_grid_dim(4, 1, 1)
    interpreter.interpreter_builder.set_grid_idx(2, 0, 0)
    with open(sys.argv[1], "wb") as file:
        pickle.dump(results(convert), file)
