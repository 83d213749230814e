"""Blocks by TMA descriptors and by pointers: the same elements, and the same steps."""

import pytest
import torch
import triton
from triton.runtime.errors import InterpreterError

from gpt2_triton.kernels import tuning
from gpt2_triton.kernels.blocks import (
    describe,
    describe_halves,
    load_block,
    store_block,
)
from gpt2_triton.kernels.table_file import TABLES, read_table
from gpt2_triton.kernels.tuning import INTERPRET, has_tma, table
from gpt2_triton.model import state_io
from tests.kernels import test_attention, test_matmul
from tests.support.helpers import EPS, Guarded, dtypes, error, poisoned
from tests.support.models import calibrate, train_steps
from tests.support.tiny import merged, tiny_model

in_interpreter = pytest.mark.skipif(not INTERPRET, reason="checks what only the interpreter checks")
either_way = pytest.mark.parametrize("tma", [True, False], ids=["tma", "pointers"])
B, T, NH, HS = 2, 48, 3, 16


@triton.jit
def _copy_kernel(out, x, turned, at, to):
    store_block(out, to, load_block(x, at))
    store_block(turned, [0, 0], load_block(x, at, TRANSPOSED=True))


def heads(x):
    return x.view(B, T, NH, HS).transpose(1, 2)


# a view of 96 x 48 numbers, a block's shape, its place, and the part of
# the view that the block covers
PLACES = {
    "inside": (lambda x: x.view(96, 48), (32, 16), (32, 16), lambda x: x[32:64, 16:32]),
    "rows past the end": (lambda x: x.view(96, 48), (64, 16), (64, 32), lambda x: x[64:, 32:]),
    "columns past the end": (lambda x: x.view(96, 48), (32, 32), (0, 32), lambda x: x[:32, 32:]),
    "of one of three": (
        lambda x: x.view(3, 32, 48),
        (1, 16, 32),
        (1, 16, 32),
        lambda x: x[1, 16:, 32:],
    ),
    "a head's tokens": (heads, (1, 1, 32, 16), (1, 2, 32, 0), lambda x: x[1, 2, 32:]),
    "tokens of a head": (
        lambda x: x.view(B, T, NH, HS),
        (1, 32, 1, 16),
        (1, 32, 2, 0),
        lambda x: x[1, 32:, 2],
    ),
    "transposed tokens": (
        lambda x: x.view(NH, HS, B, T),
        (1, 16, 1, 32),
        (2, 0, 1, 32),
        lambda x: x[2, :, 1, 32:],
    ),
}


@either_way
@dtypes
@pytest.mark.parametrize("place", PLACES)
def test_a_block_is_zeros_outside_and_writes_nothing_there(monkeypatch, rng, place, dtype, tma):
    monkeypatch.setattr(tuning, "has_tma", lambda: tma and has_tma())
    view, shape, at, part = PLACES[place]
    x, outputs = view(rng(96 * 48, dtype=dtype)), Guarded()
    rows, columns = (n for n in shape if n > 1)
    out, turned = outputs(96 * 48, dtype=dtype), outputs(columns, rows, dtype=dtype)
    out.fill_(3)
    want = out.clone()
    part(view(want)).copy_(part(x))
    args = describe(view(out), *shape), describe(x, *shape), describe(turned, columns, rows), at, at
    _copy_kernel[(1,)](*args)
    assert torch.equal(out, want) and outputs.intact() == 2
    covered = torch.zeros(rows, columns, dtype=dtype)
    covered[: part(x).shape[0], : part(x).shape[1]] = part(x)
    assert torch.equal(turned, covered.T.to(turned))


@in_interpreter
@pytest.mark.parametrize(
    "describe_right", [lambda x: describe(x, 16, 16), lambda x: describe_halves(x, 16, 32)]
)
def test_a_block_outside_a_tensor_of_whole_blocks_is_an_error_unless_it_is_told(
    monkeypatch, rng, describe_right
):
    """Pointers have no mask there, and so would read or write what is behind the tensor."""
    monkeypatch.setattr(tuning, "has_tma", lambda: False)
    x, out = rng(16, 48), describe(rng(16, 16), 16, 16)
    right = describe_right(x)
    at = (0, 48)  # the right half of a tile of 32 columns
    if right.whole[1].value:
        with pytest.raises(InterpreterError, match="reaches out"):
            _copy_kernel[(1,)](out, right, out, at, (0, 0))
    else:
        _copy_kernel[(1,)](out, right, out, at, (0, 0))


# operations with described tensors
@triton.jit
def _rows_kernel(out, x, at):
    store_block(out, [0, 0], load_block(x, at, REPEAT=True))


@either_way
def test_rows_past_the_end_are_rows_of_the_tensor_or_zeros(monkeypatch, rng, tma):
    monkeypatch.setattr(tuning, "has_tma", lambda: tma and has_tma())
    x = rng(40, 32)
    out = poisoned(32, 32)
    _rows_kernel[(1,)](describe(out, 32, 32), describe(x, 32, 32), (32, 0))
    past = torch.zeros_like(x[:24]) if tuning.has_tma() else x[39:].expand(24, 32)
    assert torch.equal(out, torch.cat([x[32:], past]))


DESCRIBED = ("matmul", "classifier_fwd", "classifier_dx", "attention", "muon")
SMALL = dict(
    model=dict(n_layer=1, vocab_size=300, block_size=96),
    train=dict(dtype="bf16", batch_size=2, seq_len=96, total_batch_tokens=192),
    memory=dict(head_rows=128),
)
RUNS = {
    "bf16": dict(model=dict(n_embd=80)),
    "fp32": dict(model=dict(n_embd=80), train=dict(dtype="fp32")),
    "muon": dict(optim=dict(name="muon")),
    "llama": dict(model=dict(arch="llama", n_head=2, n_kv_head=1, n_embd=128, n_inner=176)),
    "fp8": dict(train=dict(precision="fp8"), fp8=dict(keep_bf16="none")),
}


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS)
def test_a_step_by_pointers_is_a_step_by_tma(monkeypatch, run):
    """With a GPU's blocks: half tiles and blocks of keys past the end, sums in parts, of which
    the last is short.  The interpreter's sums depend on the layout of numpy's arrays, so a few
    numbers are rounded otherwise.
    """
    for key, row in read_table(TABLES / "a100.json").rows.items():
        if key[0].startswith(DESCRIBED):
            known = {name: row[name] for name in table().rows[key] if name != "PER_SM"}
            monkeypatch.setitem(table().rows, key, table().rows[key] | known)
    models, histories = [], []
    for tma in (True, False):
        monkeypatch.setattr(tuning, "has_tma", lambda tma=tma: tma)
        model, _ = tiny_model(**merged(SMALL, RUNS[run]))
        if run == "fp8":
            calibrate(model)
        before = model.state.params.clone()
        histories.append(train_steps(model, 2))
        models.append(model)
        assert all(applied for *_, applied in histories[-1]) and not torch.equal(
            model.state.params, before
        )
    assert torch.allclose(*map(torch.tensor, histories), rtol=1e-5)
    for name in ("params", "m", "v"):
        by_tma, by_pointers = (state_io.state_buffers(model.state)[name] for model in models)
        assert error(by_pointers, by_tma) < 1e-3, name


@pytest.mark.gpu
@pytest.mark.parametrize("R,N,K", [(32768, 3072, 768), (8192 + 40, 1600, 6400)])
def test_products_by_pointers_are_those_by_tma_on_gpu(monkeypatch, R, N, K):
    """In the portable kernels, compiled for this GPU."""
    monkeypatch.setattr(test_matmul.hopper, "takes", lambda *_: None)
    by_tma = test_matmul.run_all(R, N, K, torch.bfloat16, poisoned)
    monkeypatch.setattr(tuning, "has_tma", lambda: False)
    by_pointers = test_matmul.run_all(R, N, K, torch.bfloat16, poisoned)
    # by pointers a product is rounded before gelu' multiplies it: dpre differs as often as its own
    # rounding falls otherwise, too, and dbias sums such terms.  In torch: 2.8e-3, 1.7e-3
    limits = {"dpre": 3e-3, "dbias": EPS[torch.bfloat16]}
    names = "y g z a dx dpre again dbias dw".split()
    for name, a, b in zip(names, by_tma, by_pointers, strict=True):
        assert error(b, a) < limits.get(name, 1e-3), name


@pytest.mark.gpu
@pytest.mark.parametrize("T,HS", [(1024, 64), (1000, 80), (192, 128)])
def test_attention_by_pointers_is_that_by_tma_on_gpu(rng, monkeypatch, T, HS):
    monkeypatch.setattr(test_attention.hopper, "takes", lambda *_: None)
    R, C = test_attention.B * T, test_attention.NH * HS
    qkv, dout = rng(R, 3 * C, dtype=torch.bfloat16), rng(R, C, dtype=torch.bfloat16)
    by_tma = test_attention.run_all(qkv, dout, T, poisoned)
    monkeypatch.setattr(tuning, "has_tma", lambda: False)
    by_pointers = test_attention.run_all(qkv, dout, T, poisoned)
    assert all(error(b, a) < 1e-3 for a, b in zip(by_tma, by_pointers, strict=True))
