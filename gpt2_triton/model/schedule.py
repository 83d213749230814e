"""What every model runs in a step: its layers in order, the head, and the
update, one launch per line.

K is the kernel package (or tests/support/reference.py, to check the mathematics), layers the
schedule of the model's layers, such as gpt2/schedule.py, and m a ModelView: w parameters, g
gradients, a activations, s state, ids/targets/tokens the batch, net what the launchers take.
tables.py explains the names.  With train.precision fp8 the launchers get the operands of products
as Fp8 (operands.py) instead of tensors.

acc        False in a step's first micro-step, which overwrites the gradients, and True in the
           others, which add to them
m.comm     exchanges parameters and gradients with other ranks: it is called before a layer's
           parameters are read and after its gradients are complete.  On one rank it does nothing
           (communicator.py)
m.observe  takes statistics: of tensors just after they are written, named as in m.a and m.w, and of
           updates just before they are made.  The head's tensors are number L.  In most steps it
           does nothing (tensor_stats.py)
"""

from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import Layers, ModelView
from gpt2_triton.model.muon_update import update_matrices
from gpt2_triton.model.tables import HeadActs
from gpt2_triton.operands import Fp8, Operand

View = ModelView[object, HeadActs]


def cast(K: Kernels, operands: list[Fp8]) -> None:
    """Cast a layer's four weights; in bf16 there are none."""
    if operands:
        K.cast_weights(*operands)


def cast_head(K: Kernels, operands: list[Fp8]) -> None:
    for x8 in operands:
        K.cast_operand(x8)


def block(K: Kernels, layers: Layers, m: View, acc: bool = False) -> None:
    for l in range(m.L):
        m.comm.wait_params(l)
        if not acc or m.recompute[0].ln:  # else the first micro-step's casts are still there
            cast(K, m.fp8_weights[l])
            m.observe.tensors(qkvw=l, attprojw=l, fcw=l, fcprojw=l)
        layers.layer(K, m, l)
        layers.last_product(K, m, l)
        m.observe.tensors(x=2 * l + 2)


def final_norm(K: Kernels, m: View) -> None:
    i = 2 * m.L
    K.layernorm_fwd(m.a.lnf, m.net.norms[i], m.a.x[i])
    m.observe.tensors(lnf=m.L)


def norm_bwd(K: Kernels, m: View, i: int, ln: Operand | None, acc: bool) -> None:
    """dx[i] = dx[i+1] + dln through the norm of x[i]; also write the gradients of the
    norm, the branch and the bias.
    """
    a = m.a
    more = a.dx[i + 1] if i < 2 * m.L else None  # x[2L] has only the norm before the head
    norm, branch = m.net.norms[i], m.net.branches[i]
    K.layernorm_bwd(a.dx[i], norm, branch, ln, a.scratch, a.dln, a.x[i], more, acc)


def head(K: Kernels, m: View, acc: bool) -> None:
    """losses += cross entropy; dx = gradient at x[2L]; head.dw (+)= that of head.w, to
    which embed_bwd adds ks * lnf.
    """
    a = m.a
    final_norm(K, m)
    if not acc:
        cast_head(K, m.fp8_weights[m.L])
    m.observe.tensors(wte=m.L)
    K.classifier_target(m.targets, a.lnf, m.net.head.w)
    for r in m.head_chunks:
        n = r.stop - r.start
        p, lns = a.p[:n], a.lns[:n]
        targets = m.targets.rows(r)
        K.classifier_fwd(p, a.scratch, a.lnf[r], m.net.head.w, targets, m.V)
        K.classifier_loss(
            a.losses[r], a.rs[r], a.ks[r], lns, a.scratch, a.lnf[r], targets, m.s.step_in, acc
        )
        K.classifier_dx(a.dln[r], p, m.net.head.w, a.rs[r], a.ks[r], targets.ids)
        K.matmul_dw(m.net.head.dw, a.scratch, p, lns, acc or r.start > 0)
    norm_bwd(K, m, 2 * m.L, None, acc)
    m.observe.tensors(dx=2 * m.L)


def roll_scales(K: Kernels, m: View) -> None:
    # scales of the next step's fp8 tensors from the largest absolute values of the last steps
    m.comm.all_reduce_max(m.s.amax)
    K.roll_scales(m.s.scale, m.s.history, m.s.amax, m.s.step_out)


def update(K: Kernels, m: View) -> None:
    """Sum loss and squared gradients over ranks, clip, skip outliers, and
    update this rank's spans.
    """
    s, a = m.s, m.a
    loss = s.step_out[K.step_io.LOSS.value :][:1]
    squares = s.step_out[K.step_io.SUM_SQUARES.value :][:1]
    K.loss_sum(loss, a.losses, s.step_in)
    for i, g in enumerate(m.norm_grads):
        K.sum_squares(squares, a.scratch, g, i > 0)
    if m.fp8:
        K.check_amax(squares, s.amax)
    m.comm.all_reduce_scalars(s.step_out)
    K.clip_factor(s.step_out, squares, s.step_in)
    K.skip_outliers(s.step_out, s.window, s.z, s.step_in)
    if m.fp8:
        roll_scales(K, m)
    for bucket, span in m.updates:
        if len(span.w):  # with many ranks the last ranks own no part of a small bucket
            m.observe.adamw(span)
            K.adamw(span, m.step, m.betas)
        m.comm.gather_after_update(bucket)
    if m.matrices:
        update_matrices(K, m)
        m.comm.gather_after_update(m.L)  # the last layer's bucket
