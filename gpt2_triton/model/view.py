"""Makes the schedule's view of a model."""

from typing import Any, Protocol

import torch
from torch import Tensor

from gpt2_triton.config.config import Config
from gpt2_triton.data.packing import unpack_batch
from gpt2_triton.model import muon, sharding, spans
from gpt2_triton.model.architecture import Architecture
from gpt2_triton.model.arena import MemoryPlan, carve
from gpt2_triton.model.communicator import Communicator
from gpt2_triton.model.fp8 import place_operands
from gpt2_triton.model.model_view import Cut, ModelView, Observer
from gpt2_triton.model.rates import bucket_rates
from gpt2_triton.model.recompute import Recompute
from gpt2_triton.model.tables import State, param_views
from gpt2_triton.operands import Betas, Fp8, Step, Targets, TokenRows


class Planned(Protocol):
    """What make_view reads of a Model."""

    A: Architecture
    config: Config
    plan: MemoryPlan
    dims: dict[str, int]
    arena: Tensor
    state: State
    recompute: list[Recompute]
    rank: int
    comm: Communicator


def make_view(model: Planned, B: int, T: int, fp8: bool, train: bool = False) -> ModelView:
    """Return a Model's view; with `fp8` operands are Fp8, with `train` kernels record
    maxima, and dropout is on.
    """
    A = model.A
    state = model.state
    config = model.config
    rank = model.rank
    optim = config.optim
    plan = model.plan if fp8 else model.plan.between or model.plan
    d = model.dims | dict(B=B, T=T, R=B * T, Rc=min(model.dims["Rc"], B * T))
    has_grads = state.grads is not None
    starts = [b.start for b in sharding.buckets(d)]
    grads, grad_starts = _gradients(state, d, starts)
    w = param_views(A.Params, state.params, d, starts)
    g = param_views(A.Params, grads, d, grad_starts)
    a = carve(A.Acts, plan, model.arena, d)
    q = None
    fp8_weights: list[list[Fp8]] = [[]] * (d["L"] + 1)
    if fp8:
        q = carve(A.Fp8Buffers, plan, model.arena, d)
        fp8_weights = place_operands(w, a, q, state, d, train)
    branch_grads = _branch_grads(a, d["S"])
    ids, targets, order, segments, split_tokens = unpack_batch(
        state.batch, d["R"], d["Ns"], d["Nh"]
    )
    cut = Cut(
        w=w,
        g=g,
        a=a,
        embed_g=grads[: d["Ne"]].view(-1, d["C"]),
        branch_grads=branch_grads,
        s=state,
        dims=d,
        dropout=config.model.dropout if train else 0.0,
        norm_eps=config.model.norm_eps,
        q=q,
    )
    _, layers, _ = bucket_rates(config)
    return ModelView(
        w=w,
        g=g,
        a=a,
        net=A.wire(cut),
        s=state,
        observe=Observer(),
        fp8=fp8,
        fp8_weights=fp8_weights,
        fp8_again=[fp8_weights[l] if redo.ln else [] for l, redo in enumerate(model.recompute)],
        ids=ids.view(B, T),
        targets=Targets(targets, a.zt, config.model.logit_cap),
        tokens=TokenRows(order, segments, split_tokens, T),
        branch_grads=branch_grads,
        activation=config.model.activation,
        L=d["L"],
        NH=d["NH"],
        V=d["V"],
        head_chunks=[slice(i, min(i + d["Rc"], d["R"])) for i in range(0, d["R"], d["Rc"])],
        recompute=model.recompute,
        step=Step(state.step_out, state.step_in, state.step_key),
        betas=Betas(optim.beta1, optim.beta2, optim.eps),
        comm=model.comm,
        grads_sharded=d["zero"] == 2,
        norm_grads=spans.norm_grads(state, d, rank) if has_grads else [],
        updates=list(spans.update_spans(state, d, rank, config)) if has_grads else [],
        matrices=list(muon.matrix_classes(A.Params, state, d, rank, optim.momentum, layers.decay)),
    )


def _gradients(state: State, d: dict[str, int], starts: list[int]) -> tuple[Tensor, list[int]]:
    """Return flat gradients and their buckets' offsets; a shape alone if none are trained."""
    grads: Tensor | None = state.grads
    if grads is None:
        return torch.empty(d["Nf"], device="meta"), starts
    return grads, sharding.grad_offsets(d)


def _branch_grads(a: Any, S: int) -> list[Any]:
    """Return the gradient of the branch that ends at each x[i]; without dropout it is dx[i]."""
    if a.dmid is None:  # place_operands has made them operands in fp8
        return a.dx
    even = a.dx[0] if a.dbranch is None else a.dbranch
    # the buffers take turns, as block_bwd reads two neighbours
    branch_grads = [(even, a.dmid)[i % 2] for i in range(S)]
    if a.dbranch is None:
        a.dx = branch_grads
    return branch_grads
