"""Embedding forward and its deterministic backward against float64."""

import functools

import numpy as np
import pytest
import torch

from gpt2_triton.data.packing import SEGMENT, scatter_bounds, scatter_table
from gpt2_triton.kernels import embedding
from gpt2_triton.kernels.embedding import embedding_bwd, embedding_bwd_scratch, embedding_fwd
from gpt2_triton.kernels.tuning import INTERPRET
from gpt2_triton.operands import TokenRows
from tests.conftest import DEVICE
from tests.support.helpers import (
    EPS,
    accumulate,
    dtypes,
    error,
    exact,
    poisoned,
    require_same_bits,
    scratch_of,
)

# B, T, Tmax, C, V: one row; ragged; two programs of rows (blocks of the interpreter); few
# tokens, so that all are split
SHAPES = [(1, 1, 1, 16, 5), (3, 37, 50, 48, 60), (2, 600, 600, 80, 700), (4, 150, 160, 32, 3)]
shapes = pytest.mark.parametrize("B,T,Tmax,C,V", SHAPES, ids=str)


def token_rows(ids, targets, V, T):
    ids, targets = (np.asarray(tokens, np.int32) for tokens in (ids, targets))
    tables = scatter_table(ids, targets, V)
    return TokenRows(*(torch.from_numpy(table).to(DEVICE) for table in tables), T)


def scratch(R, V, C):
    return scratch_of(embedding_bwd_scratch(scatter_bounds(R, V)[2], C))


def draw_tokens(rng, R, V):
    """Return ids and targets that follow Zipf's law, as words do; each
    seventh target is ignored.
    """
    weights = 1 / torch.arange(1, V + 1)
    ids, targets = (
        torch.multinomial(weights, R, replacement=True, generator=rng.generator).int()
        for _ in range(2)
    )
    targets[6::7] = -1
    return ids, targets


FORWARD = [(*shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)]
GPT2 = [(64, 1024, 1024, 768, 50257), (16, 1024, 1024, 1600, 50257)]  # 124M, 1558M
FORWARD += [pytest.param(*shape, torch.bfloat16, marks=pytest.mark.gpu) for shape in GPT2]


@pytest.mark.parametrize("B,T,Tmax,C,V,dtype", FORWARD, ids=str)
def test_embedding_fwd_adds_two_rows(rng, B, T, Tmax, C, V, dtype):
    ids = draw_tokens(rng, B * T, V)[0].view(B, T).to(DEVICE)
    wte, wpe, x = rng(V, C, dtype=dtype), rng(Tmax, C, dtype=dtype), poisoned(B * T, C, dtype=dtype)
    embedding_fwd(x, ids, wte, wpe)
    want = (wte.float()[ids.long()] + wpe.float()[:T]).view(B * T, C)
    if dtype == torch.bfloat16 and INTERPRET:  # it truncates, so only the error is known
        assert error(x, want) < 2 * EPS[dtype]
    else:
        assert torch.equal(x, want.to(dtype))  # one addition, one rounding


@accumulate
@dtypes
@shapes
def test_embedding_bwd_matches_float64(rng, B, T, Tmax, C, V, dtype, acc):
    R, Vp = B * T, V + 7
    ids, targets = draw_tokens(rng, R, V)
    dx, lnf, ks = rng(R, C, dtype=dtype), rng(R, C, dtype=dtype), rng(R)
    dwte, dwpe = rng(Vp, C), rng(Tmax, C) if acc else poisoned(Tmax, C)
    before, inputs = dwte.clone(), [dx, lnf, ks, token_rows(ids, targets, V, T), acc]
    want = exact("embedding_bwd", [dwte, dwpe], None, *inputs)
    embedding_bwd(dwte, dwpe, scratch(R, V, C), *inputs)
    assert error(dwte, want[0]) < 1e-6  # fp32 sums of a few hundred terms
    assert error(dwpe, want[1]) < 1e-6
    untouched = torch.ones(Vp, dtype=torch.bool)
    untouched[ids.long()] = untouched[targets[targets >= 0].long()] = False
    assert torch.equal(dwte[untouched], before[untouched])
    assert acc or (dwpe[T:] == 0).all()


@pytest.mark.skipif(not INTERPRET, reason="in the interpreter a kernel reads is_hip when it runs")
def test_embedding_bwd_for_amd_gives_the_same_bits(rng, monkeypatch):
    R, V, C = 600, 3, 80
    ids, targets = draw_tokens(rng, R, V)
    dx, lnf, ks, before = rng(R, C), rng(R, C), rng(R), rng(V, C)
    found, called = [], []
    for hip in (False, True):
        monkeypatch.setattr(embedding, "is_hip", lambda hip=hip: called.append(hip) or hip)
        dwte, dwpe = before.clone(), poisoned(R, C)
        embedding_bwd(
            dwte, dwpe, scratch(R, V, C), dx, lnf, ks, token_rows(ids, targets, V, R), False
        )
        found.append(dwte)
    assert {*called} == {False, True}
    assert torch.equal(*found) and not torch.equal(found[0], before)


@pytest.mark.parametrize(
    "count", [SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT, 2 * SEGMENT + 1, 128 * SEGMENT + 1]
)
def test_embedding_bwd_with_full_segments(count):
    """Entries alternate between 1, 2, 4 and 8: their sum is exact in fp32, so a lost
    or doubled one is visible.
    """
    R, C = count + 43, 16
    ids = np.full(R, 1, np.int32)
    ids[count:] = 2
    dx = (2.0 ** torch.arange(R).remainder(4)).to(DEVICE)[:, None].repeat(1, C)
    dwte = torch.zeros(4, C, device=DEVICE)
    batch = token_rows(ids, np.full(R, -1), 4, R)
    embedding_bwd(dwte, poisoned(R, C), scratch(R, 4, C), dx, dx, poisoned(R), batch, False)
    assert torch.equal(dwte[1], dx[:count].sum(0)) and torch.equal(dwte[2], dx[count:].sum(0))


def run_bwd(R, V, C, outputs):
    """Run embedding_bwd on the same inputs each time; `outputs(*shape)` allocates its outputs."""
    generator = torch.Generator().manual_seed(0)
    dx, lnf = (torch.randn(R, C, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(2))
    ks, tokens = (
        torch.randn(R, generator=generator).to(DEVICE),
        torch.randint(V, (2, R), generator=generator),
    )
    dwte, dwpe = outputs(V, C), outputs(R // 2 + 5, C)
    slots = outputs(embedding_bwd_scratch(scatter_bounds(R, V)[2], C))
    dwte.fill_(1)
    embedding_bwd(dwte, dwpe, slots, dx, lnf, ks, token_rows(*tokens, V, R // 2), False)
    return dwte, dwpe


def test_embedding_bwd_gives_the_same_bits_and_writes_only_its_outputs():
    require_same_bits(functools.partial(run_bwd, 1200, 7, 48), allocations=3)


@pytest.mark.gpu
@pytest.mark.parametrize("B,T,Tmax,C,V", GPT2, ids=["124M", "1558M"])
def test_embedding_bwd_of_gpt2_on_gpu(rng, B, T, Tmax, C, V):
    R = B * T
    ids, targets = draw_tokens(rng, R, V)
    dx, lnf, ks = rng(R, C, dtype=torch.bfloat16), rng(R, C, dtype=torch.bfloat16), rng(R)
    start, valid = rng(V, C), (targets >= 0).to(DEVICE)
    want = start.double().index_add_(0, ids.to(DEVICE), dx.double())
    want.index_add_(0, targets.to(DEVICE)[valid], (ks[:, None].double() * lnf.double())[valid])
    dwte, dwpe = start.clone(), poisoned(T, C)
    embedding_bwd(dwte, dwpe, scratch(R, V, C), dx, lnf, ks, token_rows(ids, targets, V, T), False)
    assert error(dwte, want) < 1e-6 and error(dwpe, dx.double().view(B, T, C).sum(0)) < 1e-6
