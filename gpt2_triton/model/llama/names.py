"""Hugging Face's names of Llama's weights."""

from torch import Tensor

from gpt2_triton.model.llama.buffers import Params, UntiedParams


def by_name(p: Params, V: int) -> dict[str, Tensor]:
    """Return the parameters in the order of the forward pass; wte and
    lmhead without padding rows.
    """
    L = len(p.qkvw)
    out = {"model.embed_tokens.weight": p.wte[:V]}
    for l in range(L):
        columns = p.attprojw[l].shape[1]  # of q
        q, k, v = p.qkvw[l].split([columns, *[(len(p.qkvw[l]) - columns) // 2] * 2])
        gate, up = p.fcw[l].split(len(p.fcw[l]) // 2)
        layer = {
            "input_layernorm": p.lnw[2 * l],
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": p.attprojw[l],
            "post_attention_layernorm": p.lnw[2 * l + 1],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": p.fcprojw[l],
        }
        if p.qknormw is not None:
            layer |= {"self_attn.q_norm": p.qknormw[l, 0], "self_attn.k_norm": p.qknormw[l, 1]}
        out |= {f"model.layers.{l}.{name}.weight": tensor for name, tensor in layer.items()}
    out |= {"model.norm.weight": p.lnw[2 * L]}
    return out | ({"lm_head.weight": p.lmhead[:V]} if isinstance(p, UntiedParams) else {})
