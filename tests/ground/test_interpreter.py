"""The replaced parts of Triton's interpreter give Triton's bits, for all types and shapes
that they know or refuse.
"""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter
from triton.tools.tensor_descriptor import TensorDescriptor

from gpt2_triton.interpreter.blocks import Affine, Box
from gpt2_triton.interpreter.launch import converter
from tests.support import interpreted

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU needs no interpreter")

OPERATORS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod "
    "rmod lt le gt ge eq ne and or xor lshift"
)
METHODS = [f"__{name}__" for name in [*OPERATORS.split(), "rshift", "getitem", "init"]]
REPLACED = {
    interpreter: "_patch_lang _get_np_dtype",
    interpreter.InterpretedFunction: "run __call__",
    interpreter.TensorHandle: "__init__",
    interpreter.InterpreterBuilder: "create_masked_load create_masked_store cast_impl",
    core.tensor: f"to reshape permute {' '.join(METHODS)}",
    core.block_type: "__init__ to_ir",
    core.tensor_descriptor_base: "load store",
}
KEPT = {
    interpreter: (
        "_implicit_cvt GridExecutor interpreter_semantic "
        "interpreter_builder InterpreterOptions _interpreter"
    ),
    interpreter.InterpretedFunction: "rewritten_fn rewrite",
    core: "validate_block_shape _unwrap_shape",
}
FUNCTIONS = (
    "exp exp2 log log2 sqrt sin cos floor minimum maximum sum max arange full "
    "zeros zeros_like program_id where dot "
    "split load store"
)


def test_each_replaced_attribute_is_triton_s():
    """A new Triton fails here, and not in a user's run."""
    for owner, names in REPLACED.items():
        for name in names.split():
            assert vars(owner)[name].__module__.startswith("gpt2_triton.interpreter"), name
    for owner, names in KEPT.items():
        assert all(hasattr(owner, name) for name in names.split())
    for name in FUNCTIONS.split():
        triton_s = getattr(tl, name).args[0]
        assert getattr(triton_s, "__module__", "triton").startswith("triton"), name
    assert {"data", "dtype", "attr"} <= interpreter.TensorHandle.__dataclass_fields__.keys()


@pytest.mark.slow
def test_every_expression_has_triton_s_bits(tmp_path):
    found = []
    for mode in ("", "fast"):
        out = tmp_path / f"results_{mode}"
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.interpreted", out, mode]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        found.append(pickle.loads(out.read_bytes()))
    triton_s, fast = found
    assert len(fast) == len(set(interpreted.EXPRESSIONS)) + len(interpreted.STORES)
    assert [name for name, result in triton_s.items() if fast[name] != result] == []
    assert sum(result[0] == "raises" for result in fast.values()) == 0


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("a[:, None] * 8 + b[None, :]", Affine), ("fp + (a.to(tl.int64) * n + n)", Affine),
        ("fp + n + a", Affine), ("fp + 3", Affine), ("n // 2 * m + 1", Affine),
        ("(a < 5)[:, None] & (b < n)[None, :]", Box), ("a.to(tl.int64) * 300_000_000", Affine),
        ("a * 300_000_000", interpreter.TensorHandle), ("a * a", interpreter.TensorHandle),
        ("a >= 5", interpreter.TensorHandle),
    ],
)  # fmt: skip
def test_a_block_of_consecutive_numbers_is_not_made(expression, kind):
    names = interpreted.operands(converter(interpreter._implicit_cvt))
    handle = eval(expression, names).handle
    assert type(handle) is kind
    assert kind is interpreter.TensorHandle or "data" not in vars(handle)


def test_a_descriptor_is_made_once_for_each_view():
    x = torch.zeros(8, 32)
    views = x[:4], x[::2], x[:2], x[4:], x[:4].view(torch.int32)
    made = [TensorDescriptor.from_tensor(view, [2, 16]) for view in views]
    made += [replace(made[0], block_shape=[4, 16]), replace(made[0], padding="nan")]
    convert = converter(lambda descriptor: descriptor)
    assert all(convert(descriptor) is descriptor for descriptor in made)
    assert all(convert(replace(descriptor)) is descriptor for descriptor in made)


@pytest.mark.slow
def test_a_triton_newer_than_the_tests_keeps_its_own_interpreter(tmp_path):
    """Slower, but its private parts may be others."""
    code = """
from gpt2_triton import version
version.NEWEST_TRITON = "3.0"
from gpt2_triton import Config, train
config = Config.load("quickstart", \
{"train.steps": 1, "train.seq_len": 16, "train.batch_size": 1, "model.n_layer": 1,
    "model.n_head": 1, "model.n_embd": 64, "optim.name": "adamw",
    "optim.warmup": 1, "eval.every": 0, "sample.every": 0})
run = train(config, RUN)
from triton.runtime import interpreter
print(run.loss, interpreter._patch_lang.__module__)
"""
    words = [sys.executable, "-c", code.replace("RUN", repr(str(tmp_path / "run")))]
    done = subprocess.run(
        words,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    loss, module = done.stdout.split()
    assert 4 < float(loss) < 7 and module == "triton.runtime.interpreter"
