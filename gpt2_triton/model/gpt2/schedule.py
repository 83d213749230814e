"""GPT-2's forward pass, backward pass and update, one launch per line.

K is the kernel package (or tests/support/reference.py, to check the mathematics) and m a ModelView: w parameters, g
gradients, a activations, s state, ids/targets/order/segments/split_tokens the batch.  buffers.py explains the names.
With train.precision fp8 the launchers get the operands of products as Fp8 (kernels/fp8.py) instead of tensors.
`acc` is False in a step's first micro-step, which overwrites the gradients, and True in the others, which add to them.
m.comm exchanges parameters and gradients with other ranks: it is called before a layer's parameters are read and after
its gradients are complete.  On one rank it does nothing (communicator.py).
m.observe takes statistics: of tensors just after they are written, named as in m.a and m.w, and of updates just before
they are made.  In most steps it does nothing (tensor_stats.py).
"""

from typing import Any

NOT_A_LAYER = -1  # m.comm's number for everything outside the layers' matrices: wte and wpe, norms and biases


def embed(K: Any, m: Any) -> None:
    # x[0] = dropout(wte[ids] + wpe)
    K.embedding_fwd(m.a.x[0], m.ids, m.w.wte, m.w.wpe)
    if m.dropout:
        K.dropout(m.a.x[0], None, m.s.step_key, 0, m.dropout)
    m.observe.tensors(x=0)


def add_branch(K: Any, m: Any, i: int, inp: Any, w: Any, b: Any) -> None:
    # x[i] = x[i-1] + dropout(inp @ w.T + b)
    x = m.a.x
    if not m.dropout:
        return K.matmul_add(x[i], x[i - 1], inp, w, b)
    K.matmul(x[i], inp, w, b)
    K.dropout(x[i], x[i - 1], m.s.step_key, i, m.dropout)


def layer(K: Any, m: Any, l: int) -> None:
    """Run layer l without its last product; at recompute level `block` the backward pass runs it again."""
    w, a, i = m.w, m.a, 2 * l
    # x[i+1] = x[i] + dropout(attproj(attention(qkv(ln[i]))))
    K.layernorm_fwd(a.ln[i], a.mean[i], a.rstd[i], a.x[i], w.lnw[i], w.lnb[i])
    K.matmul(a.qkv[l], a.ln[i], w.qkvw[l], w.qkvb[l])
    K.attention_fwd(a.att[l], a.lse[l], a.qkv[l])
    add_branch(K, m, i + 1, a.att[l], w.attprojw[l], w.attprojb[l])
    m.observe.tensors(ln=i, qkv=l, att=l, x=i + 1)
    # fcg = gelu(fch), fch = fc(ln[i+1])
    K.layernorm_fwd(a.ln[i + 1], a.mean[i + 1], a.rstd[i + 1], a.x[i + 1], w.lnw[i + 1], w.lnb[i + 1])
    K.matmul_gelu(a.fcg[l], a.fch[l], a.ln[i + 1], w.fcw[l], w.fcb[l])
    m.observe.tensors(ln=i + 1, fch=l, fcg=l)


def cast(K: Any, operands: list[Any]) -> None:
    for x8 in operands:
        K.cast_operand(x8, x8.value)


def block(K: Any, m: Any, acc: bool = False) -> None:
    w, a = m.w, m.a
    for l in range(m.L):
        m.comm.wait_params(l)
        if not acc or m.recompute[0].ln:  # else the first micro-step's casts are still there
            cast(K, m.fp8_weights[l])
            m.observe.tensors(qkvw=l, attprojw=l, fcw=l, fcprojw=l)
        layer(K, m, l)
        # x[i+2] = x[i+1] + dropout(fcproj(fcg))
        add_branch(K, m, 2 * l + 2, a.fcg[l], w.fcprojw[l], w.fcprojb[l])
        m.observe.tensors(x=2 * l + 2)


def final_norm(K: Any, m: Any) -> None:
    w, a, i = m.w, m.a, 2 * m.L
    K.layernorm_fwd(a.lnf, a.mean[i], a.rstd[i], a.x[i], w.lnw[i], w.lnb[i])
    m.observe.tensors(lnf=m.L)


def head(K: Any, m: Any, acc: bool) -> None:
    """losses += cross entropy; dx = gradient at x[2L]; g.wte = the head's part of its gradient.

    embedding_bwd adds the targets' rows to g.wte later.  kernels/classifier.py has the formulas.
    """
    w, g, a, i = m.w, m.g, m.a, 2 * m.L
    final_norm(K, m)
    if not acc:
        cast(K, m.fp8_weights[m.L])
    m.observe.tensors(wte=m.L)
    K.classifier_target(a.zt, a.lnf, w.wte, m.targets)
    for r in m.head_chunks():
        n = r.stop - r.start
        p, lns = a.p[:n], a.lns[:n]
        K.classifier_fwd(p, a.scratch, a.lnf[r], w.wte, a.zt[r], m.targets[r], m.V)
        K.classifier_loss(a.losses[r], a.rs[r], a.ks[r], lns, a.scratch, a.lnf[r], m.targets[r], m.s.step_in, acc)
        K.classifier_dx(a.dln[r], p, w.wte, a.rs[r], a.ks[r], m.targets[r])
        K.matmul_dw(g.wte, a.scratch, p, lns, acc or r.start > 0)
    norm_bwd(K, m, i, None, acc, add_dx=False)
    m.observe.tensors(dx=i)


def norm_bwd(K: Any, m: Any, i: int, ln: Any, acc: bool, add_dx: bool = True) -> None:
    """dx[i] (+)= dln through the norm of x[i]; also write the gradients of the norm, the branch and the bias."""
    w, g, a = m.w, m.g, m.a
    p = m.dropout if i else 0.0  # no branch ends at x[0]; embed_bwd masks dx[0]
    K.layernorm_bwd(
        a.dx[i], a.dbranch if p else None, g.lnw[i], g.lnb[i], m.branch_bias_grads[i], ln, a.scratch, a.dln, a.x[i],
        w.lnw[i], w.lnb[i], a.mean[i], a.rstd[i], m.s.step_key if p else None, acc, add_dx, i, p,
    )  # fmt: skip


def head_loss(K: Any, m: Any) -> None:
    """losses = cross entropy of each token; nothing is kept for a backward pass."""
    a = m.a
    final_norm(K, m)
    cast(K, m.fp8_weights[m.L])
    K.classifier_target(a.zt, a.lnf, m.w.wte, m.targets)
    for r in m.head_chunks():
        K.classifier_fwd(None, a.scratch, a.lnf[r], m.w.wte, a.zt[r], m.targets[r], m.V)
        K.classifier_loss(a.losses[r], None, None, None, a.scratch, a.lnf[r], m.targets[r], m.s.step_in, False)


def prefill(K: Any, m: Any, d: Any, sequences: slice) -> None:
    """Write the keys and values of m.ids, one sequence, into the cache of each of `sequences`."""
    embed(K, m)
    for l in range(m.L):
        layer(K, m, l)
        K.cache_fill(d.cache[l][sequences], m.a.qkv[l])
        add_branch(K, m, 2 * l + 2, m.a.fcg[l], m.w.fcprojw[l], m.w.fcprojb[l])


def decode(K: Any, m: Any, d: Any, temperature: float, top_k: int, top_p: float) -> None:
    """Sample the next token of each sequence of d.seq; each sequence's last token goes through the model as one row."""
    w, a = m.w, m.a
    K.decode_embed(a.x[0], d.seq, w.wte, w.wpe)
    for l in range(m.L):
        i = 2 * l
        # the arguments after the bias: norm of the input, residual
        K.decode_matmul(a.qkv[l], a.x[i], w.qkvw[l], w.qkvb[l], w.lnw[i], w.lnb[i], None)
        K.decode_attention(a.att[l], d.cache[l], a.qkv[l], d.seq, m.NH)
        K.decode_matmul(a.x[i + 1], a.att[l], w.attprojw[l], w.attprojb[l], None, None, a.x[i])
        K.decode_matmul(a.fcg[l], a.x[i + 1], w.fcw[l], w.fcb[l], w.lnw[i + 1], w.lnb[i + 1], None, gelu=True)
        K.decode_matmul(a.x[i + 2], a.fcg[l], w.fcprojw[l], w.fcprojb[l], None, None, a.x[i + 1])
    final_norm(K, m)  # separately: each of the head's 3144 programs would have to normalise its input again
    logits = d.logits[: len(d.seq)]
    K.decode_matmul(logits, a.lnf, w.wte, None, None, None, None)
    K.sample_token(d.seq, logits, m.V, temperature, top_k, top_p)


def block_bwd(K: Any, m: Any, acc: bool) -> None:
    """Run the layers' backward pass; the embedding's comes before layer 0's last product.

    dx[i] is the gradient at x[i].  All dx are one buffer: layernorm_bwd adds to dx[i+1] to make dx[i].  branch_grads[i]
    is the gradient of the branch that ends at x[i], which is dx[i] without dropout.  The branch has a bias, and
    branch_bias_grads[i] is the bias's gradient, the column sums of branch_grads[i].
    """
    w, g, a, dout, acc_layer = m.w, m.g, m.a, m.branch_grads, acc and not m.grads_sharded
    for l in reversed(range(m.L)):
        m.comm.wait_grad_buffer(l)
        i, redo = 2 * l, m.recompute[l]
        cast(K, m.fp8_again[l])
        if redo.block:
            layer(K, m, l)
        # through fcproj, GELU, fc and the norm of x[i+1]; if redo.gelu, gelu(fch) replaces fch
        fcg = a.fch[l] if redo.gelu else a.fcg[l]
        K.matmul_dx_dgelu(
            a.dfch[l], g.fcb[l], fcg if redo.gelu else None, a.scratch, dout[i + 2], w.fcprojw[l], a.fch[l], acc
        )
        K.matmul_dw(g.fcprojw[l], a.scratch, dout[i + 2], fcg, acc_layer)
        K.matmul_dx(a.dln, a.dfch[l], w.fcw[l])
        norm_bwd(K, m, i + 1, a.ln[i + 1] if redo.ln else None, acc)
        m.observe.tensors(dfch=l, dx=i + 1)
        K.matmul_dw(g.fcw[l], a.scratch, a.dfch[l], a.ln[i + 1], acc_layer)
        # through attproj, attention, qkv and the norm of x[i]
        K.matmul_dx(a.datt, dout[i + 1], w.attprojw[l])
        K.matmul_dw(g.attprojw[l], a.scratch, dout[i + 1], a.att[l], acc_layer)
        if redo.qkv:
            K.layernorm_fwd(a.ln[i], a.mean[i], a.rstd[i], a.x[i], w.lnw[i], w.lnb[i])
            K.matmul(a.qkv[l], a.ln[i], w.qkvw[l], w.qkvb[l])
        K.attention_bwd(a.dqkv[l], g.qkvb[l], a.delta, a.scratch, a.datt, a.qkv[l], a.att[l], a.lse[l], acc)
        K.matmul_dx(a.dln, a.dqkv[l], w.qkvw[l])
        norm_bwd(K, m, i, a.ln[i] if redo.ln and not redo.qkv else None, acc)
        m.observe.tensors(dqkv=l, dx=i)
        if l == 0:  # before the last product, which hides the transfer of wte's gradient, the largest of all
            embed_bwd(K, m, acc)
        K.matmul_dw(g.qkvw[l], a.scratch, a.dqkv[l], a.ln[i], acc_layer)
        m.comm.reduce_grads(l)


def embed_bwd(K: Any, m: Any, acc: bool) -> None:
    # g.wte[id] += dx and g.wte[target] += ks * lnf (the head's weights are wte too); g.wpe = sum over the batch of dx
    a = m.a
    if m.dropout:
        K.dropout(a.dx[0], None, m.s.step_key, 0, m.dropout)
    K.embedding_bwd(m.g.wte, m.g.wpe, a.scratch, a.dx[0], a.lnf, a.ks, m.order, m.segments, m.split_tokens, m.T, acc)
    m.comm.reduce_grads(NOT_A_LAYER)


def roll_scales(K: Any, m: Any) -> None:
    # scales of the next step's fp8 tensors from the largest absolute values of the last steps
    m.comm.all_reduce_max(m.s.amax)
    K.roll_scales(m.s.scale, m.s.history, m.s.amax, m.s.step_out[:4])


def update(K: Any, m: Any) -> None:
    """Sum loss and squared gradients over ranks, clip, skip outliers, and update this rank's spans."""
    s, a = m.s, m.a
    stats, squares = s.step_out[:4], s.step_out[4:5]
    K.loss_sum(stats[:1], a.losses, s.step_in)
    for i, g in enumerate(m.norm_grads):
        K.sum_squares(squares, a.scratch, g, i > 0)
    if m.fp8:
        K.check_amax(squares, s.amax)
    m.comm.all_reduce_scalars(s.step_out)
    K.clip_factor(stats, squares, s.step_in)
    K.skip_outliers(stats, s.window, s.z, s.step_in)
    if m.fp8:
        roll_scales(K, m)
    for p in m.updates:
        if len(p.w):  # with many ranks the last ranks own no part of a small bucket
            m.observe.adamw(p)
            K.adamw(
                p.w, p.m, p.v, p.low, p.g, stats, s.step_in, s.step_key, p.first, p.decay, p.lr_factor, *m.betas_eps
            )
        m.comm.gather_after_update(p.bucket)
    if m.matrices:
        update_matrices(K, m)
        m.comm.gather_after_update(m.L)


def update_matrices(K: Any, m: Any) -> None:
    """Update the layers' matrices by Muon: write their momentum to x, nearly orthogonalise x, and update w with x."""
    s, a, stats = m.s, m.a, m.s.step_out[:4]
    for c in m.matrices:
        if c.x.numel():
            K.muon_momentum(c.x, c.m, c.g, stats, s.step_key, c.first, c.distance, c.momentum)
    m.comm.collect_matrices(m.matrices)
    for c in (c for c in m.matrices if len(c.owned)):
        K.muon_normalise(c.next, a.scratch, c.owned)
        x, y = c.next, c.owned
        for p in c.polynomials:  # y = p[0] x + (p[1] A + p[2] A A) x with A = x x^T; the last y is c.owned
            K.muon_gram(c.gram, x)
            K.muon_poly(c.poly, c.gram, *p[1:])
            K.muon_apply(y, x, c.poly, p[0])
            x, y = y, x
    m.comm.deliver_matrices(m.matrices)
    for c in m.matrices:
        if c.x.numel():  # with many ranks some own no part of a class
            m.observe.muon(c)
            K.muon_update(c.w, c.low, c.x, stats, s.step_in, s.step_key, c.first, c.distance, c.decay, c.scale)
