"""GPT-2's layers, forward and backward, one launch per line.
model/schedule.py explains K, m and acc.
"""

from torch import Tensor

from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import ModelView
from gpt2_triton.model.schedule import cast
from gpt2_triton.model.sharding import NOT_A_LAYER
from gpt2_triton.model.tables import Decoding
from gpt2_triton.operands import Operand


def embed(K: Kernels, m: ModelView) -> None:
    # x[0] = dropout(wte[ids] + wpe)
    K.embedding_fwd(m.a.x[0], m.ids, m.w.wte, m.w.wpe)
    if m.dropout:
        K.dropout(m.a.x[0], None, m.s.step_key, 0, m.dropout)
    m.observe.tensors(x=0)


def add_branch(K: Kernels, m: ModelView, i: int, inp: Operand, w: Operand, b: Tensor) -> None:
    # x[i] = x[i-1] + dropout(inp @ w.T + b)
    x = m.a.x
    if not m.dropout:
        return K.matmul_add(x[i], x[i - 1], inp, w, b)
    K.matmul(x[i], inp, w, b)
    K.dropout(x[i], x[i - 1], m.s.step_key, i, m.dropout)


def layer(K: Kernels, m: ModelView, l: int) -> None:
    """Run layer l without its last product; at recompute level `block` the
    backward pass runs it again.
    """
    w = m.w
    a = m.a
    i = 2 * l
    # x[i+1] = x[i] + dropout(attproj(attention(qkv(ln[i]))))
    K.layernorm_fwd(a.ln[i], a.mean[i], a.rstd[i], a.x[i], w.lnw[i], w.lnb[i])
    K.matmul(a.qkv[l], a.ln[i], w.qkvw[l], w.qkvb[l])
    K.attention_fwd(a.att[l], a.lse[l], a.qkv[l])
    add_branch(K, m, i + 1, a.att[l], w.attprojw[l], w.attprojb[l])
    m.observe.tensors(ln=i, qkv=l, att=l, x=i + 1)
    # fcg = act(fch), fch = fc(ln[i+1])
    K.layernorm_fwd(
        a.ln[i + 1], a.mean[i + 1], a.rstd[i + 1], a.x[i + 1], w.lnw[i + 1], w.lnb[i + 1]
    )
    K.matmul_act(a.fcg[l], a.fch[l], a.ln[i + 1], w.fcw[l], w.fcb[l], m.activation)
    m.observe.tensors(ln=i + 1, fch=l, fcg=l)


def last_product(K: Kernels, m: ModelView, l: int) -> None:
    # x[2l+2] = x[2l+1] + dropout(fcproj(fcg))
    add_branch(K, m, 2 * l + 2, m.a.fcg[l], m.w.fcprojw[l], m.w.fcprojb[l])


def final_norm(K: Kernels, m: ModelView) -> None:
    w = m.w
    a = m.a
    i = 2 * m.L
    K.layernorm_fwd(a.lnf, a.mean[i], a.rstd[i], a.x[i], w.lnw[i], w.lnb[i])
    m.observe.tensors(lnf=m.L)


def decode(K: Kernels, m: ModelView, d: Decoding) -> None:
    """Take the last token of each sequence of d.seq through the layers, as one row."""
    w, a = m.w, m.a
    K.decode_embed(a.x[0], d.seq, w.wte, w.wpe)
    for l in range(m.L):
        i = 2 * l
        # the arguments after the bias: norm of the input, residual
        K.decode_matmul(a.qkv[l], a.x[i], w.qkvw[l], w.qkvb[l], w.lnw[i], w.lnb[i], None)
        K.decode_attention(a.att[l], d.cache[l], a.qkv[l], d.seq, m.NH)
        K.decode_matmul(a.x[i + 1], a.att[l], w.attprojw[l], w.attprojb[l], None, None, a.x[i])
        norm = w.lnw[i + 1], w.lnb[i + 1]
        K.decode_matmul(a.fcg[l], a.x[i + 1], w.fcw[l], w.fcb[l], *norm, None, m.activation)
        K.decode_matmul(a.x[i + 2], a.fcg[l], w.fcprojw[l], w.fcprojb[l], None, None, a.x[i + 1])


def norm_bwd(K: Kernels, m: ModelView, i: int, ln: Operand | None, acc: bool) -> None:
    """dx[i] = dx[i+1] + dln through the norm of x[i]; also write the gradients of the
    norm, the branch and the bias.
    """
    w = m.w
    g = m.g
    a = m.a
    more = a.dx[i + 1] if i < 2 * m.L else None  # x[2L] has only the norm before the head
    p = m.dropout if i else 0.0  # no branch ends at x[0]; embed_bwd masks dx[0]
    dbranch = m.branch_grads[i] if p and not m.fp8 else None
    K.layernorm_bwd(
        a.dx[i], dbranch, g.lnw[i], g.lnb[i], m.branch_bias_grads[i], ln, a.scratch, a.dln, a.x[i],
        w.lnw[i], w.lnb[i], a.mean[i], a.rstd[i], more, m.s.step_key if p else None, acc, i, p,
    )  # fmt: skip


def final_norm_bwd(K: Kernels, m: ModelView, acc: bool) -> None:
    norm_bwd(K, m, 2 * m.L, None, acc)


def block_bwd(K: Kernels, m: ModelView, acc: bool) -> None:
    """Run the layers' backward pass; the embedding's comes before layer 0's last products.

    dx[i] is the gradient at x[i].  branch_grads[i] is the gradient of the branch that ends at x[i],
    which is dx[i] without dropout.  Odd and even i have a buffer each: branch_grads[i] is written
    before dW reads branch_grads[i+1].  The branch has a bias, and branch_bias_grads[i] is the
    bias's gradient, the column sums of branch_grads[i].
    """
    w = m.w
    g = m.g
    a = m.a
    dout = m.branch_grads
    acc_layer = acc and not m.grads_sharded
    for l in reversed(range(m.L)):
        m.comm.wait_grad_buffer(l)
        i, redo = 2 * l, m.recompute[l]
        cast(K, m.fp8_again[l])
        if redo.block:
            layer(K, m, l)
        # through fcproj, the activation, fc and the norm of x[i+1]; if redo.gelu, act(fch) replaces
        # fch
        fcg = a.fch[l] if redo.gelu else a.fcg[l]
        K.matmul_dx_dact(
            a.dfch[l],
            g.fcb[l],
            fcg if redo.gelu else None,
            a.scratch,
            dout[i + 2],
            w.fcprojw[l],
            a.fch[l],
            acc,
            m.activation,
        )
        K.matmul_dx(a.dln, a.dfch[l], w.fcw[l])
        norm_bwd(K, m, i + 1, a.ln[i + 1] if redo.ln else None, acc)
        m.observe.tensors(dfch=l, dx=i + 1)
        K.matmul_dw_pair(
            g.fcprojw[l], g.fcw[l], a.scratch, dout[i + 2], fcg, a.dfch[l], a.ln[i + 1], acc_layer
        )
        # through attproj, attention, qkv and the norm of x[i]
        K.matmul_dx(a.datt, dout[i + 1], w.attprojw[l])
        if redo.qkv:
            K.layernorm_fwd(a.ln[i], a.mean[i], a.rstd[i], a.x[i], w.lnw[i], w.lnb[i])
            K.matmul(a.qkv[l], a.ln[i], w.qkvw[l], w.qkvb[l])
        K.attention_bwd(
            a.dqkv[l], g.qkvb[l], a.delta, a.scratch, a.datt, a.qkv[l], a.att[l], a.lse[l], acc
        )
        K.matmul_dx(a.dln, a.dqkv[l], w.qkvw[l])
        norm_bwd(K, m, i, a.ln[i] if redo.ln and not redo.qkv else None, acc)
        m.observe.tensors(dqkv=l, dx=i)
        # before the last products, which hide the transfer of wte's gradient, the largest of all
        if l == 0:
            embed_bwd(K, m, acc)
        K.matmul_dw_pair(
            g.attprojw[l],
            g.qkvw[l],
            a.scratch,
            dout[i + 1],
            a.att[l],
            a.dqkv[l],
            a.ln[i],
            acc_layer,
        )
        m.comm.reduce_grads(l)


def embed_bwd(K: Kernels, m: ModelView, acc: bool) -> None:
    # g.wte[id] += dx and g.wte[target] += ks * lnf (the head's weights are wte too);
    # g.wpe = sum over the batch of dx
    a = m.a
    if m.dropout:
        K.dropout(a.dx[0], None, m.s.step_key, 0, m.dropout)
    K.embedding_bwd(
        m.g.wte,
        m.g.wpe,
        a.scratch,
        a.dx[0],
        a.lnf,
        a.ks,
        m.tokens,
        acc,
    )
    m.comm.reduce_grads(NOT_A_LAYER)
