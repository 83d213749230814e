"""OpenAI's names of GPT-2's weights, which Hugging Face and nanoGPT use."""

from torch import Tensor

from gpt2_triton.model.gpt2.buffers import Params


def by_name(p: Params, V: int) -> dict[str, Tensor]:
    """Return the parameters by OpenAI's names, in the order of the forward pass; wte
    without its padding rows.
    """
    L = len(p.qkvw)
    out = {"wte.weight": p.wte[:V], "wpe.weight": p.wpe}
    for l in range(L):
        layer = {
            "ln_1.weight": p.lnw[2 * l],
            "ln_1.bias": p.lnb[2 * l],
            "attn.c_attn.weight": p.qkvw[l],
            "attn.c_attn.bias": p.qkvb[l],
            "attn.c_proj.weight": p.attprojw[l],
            "attn.c_proj.bias": p.attprojb[l],
            "ln_2.weight": p.lnw[2 * l + 1],
            "ln_2.bias": p.lnb[2 * l + 1],
            "mlp.c_fc.weight": p.fcw[l],
            "mlp.c_fc.bias": p.fcb[l],
            "mlp.c_proj.weight": p.fcprojw[l],
            "mlp.c_proj.bias": p.fcprojb[l],
        }
        out |= {f"h.{l}.{name}": tensor for name, tensor in layer.items()}
    return out | {"ln_f.weight": p.lnw[2 * L], "ln_f.bias": p.lnb[2 * L]}
