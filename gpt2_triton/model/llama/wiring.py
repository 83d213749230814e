"""Wires Llama 3: what each launch of its schedule takes."""

from gpt2_triton.model.llama.buffers import UntiedParams
from gpt2_triton.model.model_view import Cut, Embedding, Layer, Wiring
from gpt2_triton.operands import Branch, HeadNorm, Linear, Norm, Rope


def head_norm(m: Cut, l: int) -> HeadNorm | None:
    if m.w.qknormw is None:
        return None
    return HeadNorm(m.w.qknormw[l], m.a.qkrstd[l], m.g.qknormw[l], m.dims["NH"], m.norm_eps)


def wire(m: Cut) -> Wiring:
    w = m.w
    g = m.g
    a = m.a
    d = m.dims
    untied = isinstance(w, UntiedParams)
    return Wiring(
        embedding=Embedding(w.wte, None, m.embed_g, None),
        head=Linear(w.lmhead, dw=g.lmhead) if untied else Linear(w.wte, dw=g.wte),
        norms=[Norm(w.lnw[i], rstd=a.rstd[i], dw=g.lnw[i], eps=m.norm_eps) for i in range(d["S"])],
        layers=[
            Layer(
                qkv=Linear(w.qkvw[l], dw=g.qkvw[l]),
                attproj=Linear(w.attprojw[l], dw=g.attprojw[l]),
                fc=Linear(w.fcw[l], dw=g.fcw[l]),
                fcproj=Linear(w.fcprojw[l], dw=g.fcprojw[l]),
                rope=Rope(a.rope, d["T"], d["Cq"] + d["Ckv"], head_norm(m, l)),
            )
            for l in range(d["L"])
        ],
        branches=[Branch()] * d["S"],
    )
