"""Wires GPT-2: what each launch of its schedule takes."""

from gpt2_triton.model.gpt2.buffers import Acts, Fp8Buffers, Params
from gpt2_triton.model.model_view import Cut, Embedding, Layer, Wiring
from gpt2_triton.operands import Branch, Dropout, Linear, Norm


def wire(m: Cut[Params, Acts, Fp8Buffers]) -> Wiring:
    """Return what GPT-2's launches take; with fp8, a.fch becomes gelu'."""
    w = m.w
    g = m.g
    a = m.a
    if m.q is not None:
        a.fch = m.q.slope  # fp8 keeps gelu' in the place of GELU's input
    points = range(m.dims["S"])
    dropouts = [Dropout(m.s.step_key, i, m.dropout) if m.dropout else None for i in points]
    norms = [Norm(w.lnw[i], w.lnb[i], a.mean[i], a.rstd[i], g.lnw[i], g.lnb[i]) for i in points]
    layers = [
        Layer(
            qkv=Linear(w.qkvw[l], w.qkvb[l], g.qkvw[l], g.qkvb[l]),
            attproj=Linear(w.attprojw[l], w.attprojb[l], g.attprojw[l], g.attprojb[l]),
            fc=Linear(w.fcw[l], w.fcb[l], g.fcw[l], g.fcb[l]),
            fcproj=Linear(w.fcprojw[l], w.fcprojb[l], g.fcprojw[l], g.fcprojb[l]),
        )
        for l in range(m.dims["L"])
    ]
    branches = [Branch()]  # no branch ends at x[0]
    for i in points[1:]:
        layer = layers[(i - 1) // 2]
        linear = layer.attproj if i % 2 else layer.fcproj
        masked = m.branch_grads[i] if dropouts[i] and m.q is None else None
        branches.append(Branch(linear.db, masked, dropouts[i]))
    return Wiring(
        embedding=Embedding(w.wte, w.wpe, g.wte, g.wpe),
        head=Linear(w.wte, dw=g.wte),
        norms=norms,
        layers=layers,
        branches=branches,
        dropouts=dropouts,
    )
