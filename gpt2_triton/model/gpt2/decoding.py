"""GPT-2's layers for one token of each sequence, one launch per line.
model/schedule.py explains K and m.
"""

from gpt2_triton.model.decoding import Decoding, product_of_norm
from gpt2_triton.model.gpt2.buffers import Acts, Params
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import ModelView


def decode(K: Kernels, m: ModelView[Params, Acts], d: Decoding) -> None:
    """Take the last token of each sequence of d.seq through the layers, as one row."""
    a = m.a
    norms = m.net.norms
    K.decode_embed(a.x[0], d.seq, m.net.embedding.wte, m.net.embedding.wpe)
    for l, net in enumerate(m.net.layers):
        i = 2 * l
        # qkv = norm(x[i]) @ w.T; x[i+1] = x[i] + attproj(att); fc as qkv, fcproj as attproj
        product_of_norm(K, a.qkv[l], a.x[i], norms[i], a.ln[i], net.qkv)
        K.decode_attention(a.att[l], d.cache[l], a.qkv[l], d.seq, m.NH)
        K.decode_matmul(a.x[i + 1], a.att[l], net.attproj, None, a.x[i])
        product_of_norm(K, a.fcg[l], a.x[i + 1], norms[i + 1], a.ln[i + 1], net.fc, m.activation)
        K.decode_matmul(a.x[i + 2], a.fcg[l], net.fcproj, None, a.x[i + 1])
