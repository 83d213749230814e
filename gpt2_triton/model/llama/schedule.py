"""Llama 3's layers, forward and backward, one launch per line.
model/schedule.py explains K, m and acc.
"""

from gpt2_triton.model.decoding import product_of_norm
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.llama.buffers import Acts, Params
from gpt2_triton.model.model_view import ModelView
from gpt2_triton.model.schedule import cast, norm_bwd
from gpt2_triton.model.sharding import NOT_A_LAYER

View = ModelView[Params, Acts]


def embed(K: Kernels, m: View) -> None:
    # x[0] = wte[ids]
    K.embedding_fwd(m.a.x[0], m.ids, m.net.embedding.wte, None)
    m.observe.tensors(x=0)


def qkv(K: Kernels, m: View, l: int) -> None:
    # q and k of a row are normed, if model.qk_norm, and rotated to its position
    a = m.a
    net = m.net.layers[l]
    i = 2 * l
    K.layernorm_fwd(a.ln[i], m.net.norms[i], a.x[i])
    K.matmul_rope(a.qkv[l], a.ln[i], net.qkv, net.rope)


def layer(K: Kernels, m: View, l: int) -> None:
    """Run layer l without its last product; at recompute level `block` the
    backward pass runs it again.
    """
    a = m.a
    net = m.net.layers[l]
    i = 2 * l
    # x[i+1] = x[i] + attproj(attention(qkv(ln[i])))
    qkv(K, m, l)
    K.attention_fwd(a.att[l], a.lse[l], a.qkv[l])
    K.matmul_add(a.x[i + 1], a.x[i], a.att[l], net.attproj)
    m.observe.tensors(ln=i, qkv=l, att=l, x=i + 1)
    # fcg = silu(gate) * value, fch = (gate, value) = fc(ln[i+1])
    K.layernorm_fwd(a.ln[i + 1], m.net.norms[i + 1], a.x[i + 1])
    K.matmul_swiglu(a.fcg[l], a.fch[l], a.ln[i + 1], net.fc)
    m.observe.tensors(ln=i + 1, fch=l, fcg=l)


def last_product(K: Kernels, m: View, l: int) -> None:
    # x[2l+2] = x[2l+1] + fcproj(fcg)
    a = m.a
    i = 2 * l
    K.matmul_add(a.x[i + 2], a.x[i + 1], a.fcg[l], m.net.layers[l].fcproj)


def decode_mlp(K: Kernels, m: View, l: int) -> None:
    # fcg = swiglu(fc(norm(x[2l+1]))), for one token of each sequence
    fch = m.a.fch[l]
    product_of_norm(K, m, fch, 2 * l + 1, m.net.layers[l].fc)
    K.swiglu(m.a.fcg[l], fch)


def block_bwd(K: Kernels, m: View, acc: bool) -> None:
    """Run the layers' backward pass; the embedding's comes before layer 0's last products.

    dx[i] is the gradient at x[i].  Odd and even i have a buffer each: dx[i] is
    written before dW reads dx[i+1].
    """
    a = m.a
    acc_layer = acc and not m.grads_sharded
    for l in reversed(range(m.L)):
        m.comm.wait_grad_buffer(l)
        net = m.net.layers[l]
        redo = m.recompute[l]
        i = 2 * l
        cast(K, m.fp8_again[l])
        if redo.block:
            layer(K, m, l)
        elif redo.gelu:
            K.swiglu(a.fcg[l], a.fch[l])
        # through fcproj, SwiGLU, fc and the norm of x[i+1]
        K.matmul_dx(a.dfcg, a.dx[i + 2], net.fcproj)
        K.swiglu_bwd(a.dfch[l], a.dfcg, a.fch[l])
        K.matmul_dx(a.dln, a.dfch[l], net.fc)
        norm_bwd(K, m, i + 1, a.ln[i + 1] if redo.ln else None, acc)
        m.observe.tensors(dfch=l, dx=i + 1)
        K.matmul_dw_pair(
            net.fcproj.dw,
            net.fc.dw,
            a.scratch,
            a.dx[i + 2],
            a.fcg[l],
            a.dfch[l],
            a.ln[i + 1],
            acc_layer,
        )
        # through attproj, attention, qkv and the norm of x[i]
        K.matmul_dx(a.datt, a.dx[i + 1], net.attproj)
        if redo.qkv:
            qkv(K, m, l)
        K.attention_bwd(
            a.dqkv[l],
            None,
            a.delta,
            a.scratch,
            a.datt,
            a.qkv[l],
            a.att[l],
            a.lse[l],
            acc,
            net.rope,
        )
        K.matmul_dx(a.dln, a.dqkv[l], net.qkv)
        norm_bwd(K, m, i, a.ln[i] if redo.ln and not redo.qkv else None, acc)
        m.observe.tensors(dqkv=l, dx=i)
        # before the last products, which hide the transfer of wte's gradient, the largest of all
        if l == 0:
            embed_bwd(K, m, acc)
        K.matmul_dw_pair(
            net.attproj.dw,
            net.qkv.dw,
            a.scratch,
            a.dx[i + 1],
            a.att[l],
            a.dqkv[l],
            a.ln[i],
            acc_layer,
        )
        m.comm.reduce_grads(l)


def embed_bwd(K: Kernels, m: View, acc: bool) -> None:
    # g.wte[id] += dx and head.dw[target] += ks * lnf; the head has overwritten head.dw,
    # which may be g.wte
    a = m.a
    dwte = m.net.embedding.dwte
    if m.net.head.dw is not m.g.wte and not acc:
        K.fill(m.g.wte, 0.0)
    K.embedding_bwd(dwte, None, a.scratch, a.dx[0], a.lnf, a.ks, m.tokens, acc)
    m.comm.reduce_grads(NOT_A_LAYER)
