"""Llama 3's MLP for one token of each sequence; model/decoding.py has the rest of a layer."""

from gpt2_triton.model.decoding import product_of_norm
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.llama.buffers import Acts, Params
from gpt2_triton.model.model_view import ModelView


def mlp(K: Kernels, m: ModelView[Params, Acts], l: int) -> None:
    # fcg = swiglu(fc(norm(x[2l+1])))
    a, i = m.a, 2 * l + 1
    product_of_norm(K, m, a.fch[l], i, m.net.layers[l].fc)
    K.swiglu(a.fcg[l], a.fch[l])
