"""GPT-2's layers, forward and backward, one launch per line.
model/schedule.py explains K, m and acc.
"""

from gpt2_triton.model.decoding import product_of_norm
from gpt2_triton.model.gpt2.buffers import Acts, Params
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import ModelView
from gpt2_triton.model.schedule import cast, norm_bwd
from gpt2_triton.model.sharding import NOT_A_LAYER
from gpt2_triton.operands import Linear, Operand

View = ModelView[Params, Acts]


def embed(K: Kernels, m: View) -> None:
    # x[0] = dropout(wte[ids] + wpe)
    x = m.a.x[0]
    K.embedding_fwd(x, m.ids, m.net.embedding.wte, m.net.embedding.wpe)
    dropout = m.net.dropouts[0]
    if dropout:
        K.dropout(x, None, dropout)
    m.observe.tensors(x=0)


def add_branch(K: Kernels, m: View, i: int, inp: Operand, layer: Linear) -> None:
    # x[i] = x[i-1] + dropout(inp @ w.T + b)
    x = m.a.x
    dropout = m.net.dropouts[i]
    if dropout is None:
        K.matmul_add(x[i], x[i - 1], inp, layer)
    else:
        K.matmul(x[i], inp, layer)
        K.dropout(x[i], x[i - 1], dropout)


def qkv(K: Kernels, m: View, l: int) -> None:
    a = m.a
    i = 2 * l
    K.layernorm_fwd(a.ln[i], m.net.norms[i], a.x[i])
    K.matmul(a.qkv[l], a.ln[i], m.net.layers[l].qkv)


def layer(K: Kernels, m: View, l: int) -> None:
    """Run layer l without its last product; at recompute level `block` the
    backward pass runs it again.
    """
    a = m.a
    net = m.net.layers[l]
    i = 2 * l
    # x[i+1] = x[i] + dropout(attproj(attention(qkv(ln[i]))))
    qkv(K, m, l)
    K.attention_fwd(a.att[l], a.lse[l], a.qkv[l])
    add_branch(K, m, i + 1, a.att[l], net.attproj)
    m.observe.tensors(ln=i, qkv=l, att=l, x=i + 1)
    # fcg = act(fch), fch = fc(ln[i+1])
    K.layernorm_fwd(a.ln[i + 1], m.net.norms[i + 1], a.x[i + 1])
    K.matmul_act(a.fcg[l], a.fch[l], a.ln[i + 1], net.fc, m.activation)
    m.observe.tensors(ln=i + 1, fch=l, fcg=l)


def last_product(K: Kernels, m: View, l: int) -> None:
    # x[2l+2] = x[2l+1] + dropout(fcproj(fcg))
    add_branch(K, m, 2 * l + 2, m.a.fcg[l], m.net.layers[l].fcproj)


def decode_mlp(K: Kernels, m: View, l: int) -> None:
    # fcg = act(fc(norm(x[2l+1]))), for one token of each sequence
    product_of_norm(K, m, m.a.fcg[l], 2 * l + 1, m.net.layers[l].fc, m.activation)


def block_bwd(K: Kernels, m: View, acc: bool) -> None:
    """Run the layers' backward pass; the embedding's comes before layer 0's last products.

    dx[i] is the gradient at x[i].  branch_grads[i] is the gradient of the branch that ends at x[i],
    which is dx[i] without dropout.  Odd and even i have a buffer each: branch_grads[i] is written
    before dW reads branch_grads[i+1].  The gradient of the branch's bias is the column sums of
    branch_grads[i].
    """
    a = m.a
    dout = m.branch_grads
    acc_layer = acc and not m.grads_sharded
    for l in reversed(range(m.L)):
        m.comm.wait_grad_buffer(l)
        net = m.net.layers[l]
        redo = m.recompute[l]
        i = 2 * l
        cast(K, m.fp8_again[l])
        if redo.block:
            layer(K, m, l)
        # through fcproj, the activation, fc and the norm of x[i+1]; if redo.gelu, act(fch) replaces
        # fch
        fcg = a.fch[l] if redo.gelu else a.fcg[l]
        K.matmul_dx_dact(
            a.dfch[l],
            net.fc.db,
            fcg if redo.gelu else None,
            a.scratch,
            dout[i + 2],
            net.fcproj,
            a.fch[l],
            acc,
            m.activation,
        )
        K.matmul_dx(a.dln, a.dfch[l], net.fc)
        norm_bwd(K, m, i + 1, a.ln[i + 1] if redo.ln else None, acc)
        m.observe.tensors(dfch=l, dx=i + 1)
        K.matmul_dw_pair(
            net.fcproj.dw, net.fc.dw, a.scratch, dout[i + 2], fcg, a.dfch[l], a.ln[i + 1], acc_layer
        )
        # through attproj, attention, qkv and the norm of x[i]
        K.matmul_dx(a.datt, dout[i + 1], net.attproj)
        if redo.qkv:
            qkv(K, m, l)
        K.attention_bwd(
            a.dqkv[l], net.qkv.db, a.delta, a.scratch, a.datt, a.qkv[l], a.att[l], a.lse[l], acc
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
            dout[i + 1],
            a.att[l],
            a.dqkv[l],
            a.ln[i],
            acc_layer,
        )
        m.comm.reduce_grads(l)


def embed_bwd(K: Kernels, m: View, acc: bool) -> None:
    # g.wte[id] += dx and g.wte[target] += ks * lnf (the head's weights are wte too);
    # g.wpe = sum over the batch of dx
    a = m.a
    embedding = m.net.embedding
    dropout = m.net.dropouts[0]
    if dropout:
        K.dropout(a.dx[0], None, dropout)
    K.embedding_bwd(embedding.dwte, embedding.dwpe, a.scratch, a.dx[0], a.lnf, a.ks, m.tokens, acc)
    m.comm.reduce_grads(NOT_A_LAYER)
