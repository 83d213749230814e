"""Wires Llama 3: what each launch of its schedule takes."""

from gpt2_triton.model.fp8_table import Fp8Operands
from gpt2_triton.model.llama.buffers import Acts, Params, UntiedParams
from gpt2_triton.model.model_view import Cut, Embedding, Layer, Wiring
from gpt2_triton.operands import Branch, HeadNorm, Linear, Norm, Rope

Slices = Cut[Params, Acts, Fp8Operands]


def head_norm(m: Slices, l: int) -> HeadNorm | None:
    """Return the norm of layer l's heads of q and k; None without model.qk_norm."""
    if not m.dims["Qn"]:
        return None
    return HeadNorm(m.w.qknormw[l], m.a.qkrstd[l], m.g.qknormw[l], m.dims["NH"], m.norm_eps)


def wire(m: Slices) -> Wiring:
    """Return what Llama's launches take."""
    w = m.w
    g = m.g
    a = m.a
    d = m.dims
    head = Linear(w.wte, dw=g.wte)
    if isinstance(w, UntiedParams) and isinstance(g, UntiedParams):
        head = Linear(w.lmhead, dw=g.lmhead)
    return Wiring(
        embedding=Embedding(w.wte, None, m.embed_g, None),
        head=head,
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
