"""The kernels' launchers in plain torch, with the same signatures: outputs first, written in place.

Tests compare kernels with them in float64, and run the model with this module as `K` to compare the
schedule with autograd.  `acc` is the kernels' ACC: False overwrites a gradient, True adds to it.
"""

import math
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl

from benchmarks.activations import ACTIVATIONS
from gpt2_triton.kernels import step_io
from tests.support.philox import dropout_factors

# the indices as plain integers, because a constexpr cannot index a tensor
io = SimpleNamespace(
    **{name: i.value for name, i in vars(step_io).items() if isinstance(i, tl.constexpr)}
)

LOG2E = 1 / math.log(2)


def scratch_elements(dims, dtype, matrices=()):
    return dims["Rc"]  # sums of p's rows


def _give(out, value, acc):
    out.copy_(out + value if acc else value)


def dactivation(x, act):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(ACTIVATIONS[act](x).sum(), x)[0]


# ---- embedding ----


def embedding_fwd(x, ids, wte, wpe):
    x.copy_((wte[ids.long()] + (0 if wpe is None else wpe[: ids.shape[1]])).reshape(x.shape))


def embedding_bwd(dwte, dwpe, scratch, dx, lnf, ks, tokens, acc):
    """dwte[token] += rows of dx by input, of ks * lnf by target; dwpe[t] =
    sum over the batch of dx.
    """
    order, segments, _, T = tokens
    R = dx.shape[0]
    entries = order.tolist()  # at once: each such read waits for a GPU
    for token, start, length, _ in segments.tolist():
        for e in entries[start : start + length]:
            dwte[token] += dx[e] if e < R else ks[e - R] * lnf[e - R]
    if dwpe is None:
        return
    full = torch.zeros_like(dwpe)
    full[:T] = dx.view(-1, T, dx.shape[1]).to(dwpe.dtype).sum(0)
    _give(dwpe, full, acc)


# ---- dropout ----


def mask(x, step_key, i, p):
    """x with elements of point i of the residual stream dropped."""
    return x * dropout_factors(step_key.tolist(), *x.shape, i, p).to(x)


def dropout(x, res, dropout):
    """x = mask(x) (+ res)"""
    x.copy_(mask(x, *dropout) + (0 if res is None else res))


# ---- layernorm ----


def standardised(x, norm):
    centred = x if norm.mean is None else x - norm.mean[:, None]
    return centred * norm.rstd[:, None]


def normed(x, norm):
    out = standardised(x, norm) * norm.w
    return out if norm.b is None else out + norm.b


def layernorm_fwd(out, norm, x):
    centred = x
    if norm.mean is not None:
        norm.mean.copy_(x.mean(-1))
        centred = x - norm.mean[:, None]
    norm.rstd.copy_((centred.square().mean(-1) + norm.eps).rsqrt())
    out.copy_(normed(x, norm))


def layernorm_bwd(dx, norm, branch, ln, scratch, dout, x, more, acc):
    """dx = (more +) gradient through the norm; the branch's dout: dx, masked, and its
    column sums; ln: the norm's output.
    """
    xhat = standardised(x, norm)
    g = dout * norm.w
    grad = g - xhat * (g * xhat).mean(-1, keepdim=True)
    if norm.mean is not None:
        grad = grad - g.mean(-1, keepdim=True)
    grad = grad * norm.rstd[:, None]
    dx.copy_(grad if more is None else more + grad)
    _give(norm.dw, (dout * xhat).sum(0), acc)
    if norm.db is not None:
        _give(norm.db, dout.sum(0), acc)
    masked = dx if branch.dropout is None else mask(dx, *branch.dropout)
    if branch.dout is not None:
        branch.dout.copy_(masked)
    if branch.db is not None:
        _give(branch.db, masked.sum(0), acc)
    if ln is not None:
        ln.copy_(normed(x, norm))


def rotated(x, rope, positions, back=False):
    """x [rows, heads*HS] with the pairs (i, i + HS/2) of each head rotated to the row's
    position, or back from it.
    """
    cos, sin = (t.to(x.dtype) for t in rope[positions][:, None].chunk(2, -1))
    x1, x2 = x.view(len(x), -1, rope.shape[1]).chunk(2, -1)
    sin = -sin if back else sin
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).view(x.shape)


def head_normed(x, norm, of_k=False):
    """w * xhat of x [rows, heads*HS], and rstd [rows, heads]."""
    w = norm.w[int(of_k)]
    x = x.reshape(len(x), -1, len(w))
    rstd = (x.square().mean(-1) + norm.eps).rsqrt()
    return (x * rstd[..., None] * w).flatten(1), rstd


def head_norm_bwd(dz, z, norm, of_k, acc):
    """dx of dz and z = w * xhat; dw (+)= its sums.  z has an error of about eps times the weight of
    the pair's other element, so xhat is z * w / (w^2 + error^2).
    """
    w = norm.w[int(of_k)]
    dz, z = (t.view(len(t), -1, len(w)) for t in (dz, z))
    NH = norm.NH
    rstd = (norm.rstd[:, NH:] if of_k else norm.rstd[:, :NH])[..., None]
    error = torch.finfo(z.dtype).eps / 2 * w.roll(len(w) // 2)
    xhat = z * (w / (w.square() + error.square()).clamp(min=1e-30))
    _give(norm.dw[int(of_k)], (dz * xhat).sum((0, 1)), acc)
    return ((dz * w - xhat * (dz * z).mean(-1, keepdim=True)) * rstd).flatten(1)


# ---- matmul: w is [N, K] = [out, in] ----


def matmul(out, inp, layer):
    w, b = layer.w, layer.b
    out.copy_(inp @ w.T if b is None else inp @ w.T + b)


def matmul_act(out, pre, inp, layer, act):
    matmul(pre, inp, layer)
    out.copy_(ACTIVATIONS[act](pre))


def matmul_add(out, res, inp, layer):
    b = layer.b
    out.copy_(res + (inp @ layer.w.T + (0 if b is None else b)))


def matmul_rope(out, inp, layer, rope):
    table, T, n, norm = rope
    y = inp @ layer.w.T
    if norm is not None:
        Cq = norm.NH * table.shape[1]
        (q, q_rstd), (k, k_rstd) = head_normed(y[:, :Cq], norm), head_normed(y[:, Cq:n], norm, True)
        y = torch.cat([q, k, y[:, n:]], 1)
        norm.rstd.copy_(torch.cat([q_rstd, k_rstd], 1))
    q_and_k = rotated(y[:, :n].contiguous(), table, torch.arange(len(y)) % T)
    out.copy_(torch.cat([q_and_k, y[:, n:]], 1))


def swiglu(out, pre):
    gate, value = pre.chunk(2, -1)
    out.copy_(F.silu(gate) * value)


def matmul_swiglu(out, pre, inp, layer):
    matmul(pre, inp, layer)
    swiglu(out, pre)


def swiglu_bwd(dpre, dout, pre):
    gate, value = pre.chunk(2, -1)
    s = gate.sigmoid()
    dpre.copy_(torch.cat([dout * value * s * (1 + gate * (1 - s)), dout * gate * s], -1))


def matmul_dx(dinp, dout, layer):
    dinp.copy_(dout @ layer.w)


def matmul_dx_dact(dpre, dbias, act_out, scratch, dout, layer, pre, acc, act):
    """dpre = (dout @ layer.w) * act'(pre); dbias (+)= column sums of dpre; act_out, if
    given, is act(pre) recomputed.
    """
    dpre.copy_((dout @ layer.w) * dactivation(pre, act))
    _give(dbias, dpre.sum(0), acc)
    if act_out is not None:
        act_out.copy_(ACTIVATIONS[act](pre))


def matmul_dw(dw, scratch, dout, inp, acc):
    _give(dw, dout.to(dw.dtype).T @ inp.to(dw.dtype), acc)


def matmul_dw_pair(dw, dw2, scratch, dout, inp, dout2, inp2, acc):
    matmul_dw(dw, scratch, dout, inp, acc)
    matmul_dw(dw2, scratch, dout2, inp2, acc)


# ---- attention: qkv is packed [B*T, NH + 2*NKV, HS]; lse in the log2 domain ----


def _split(qkv, lse, HS):
    """q [B, NH, T, HS], and k and v, expanded to as many heads."""
    B, NH, T = lse.shape
    q, k, v = (
        qkv.view(B, T, -1, HS).transpose(1, 2).split([NH, *[(qkv.shape[1] // HS - NH) // 2] * 2], 1)
    )
    return q, *(t.repeat_interleave(NH // t.shape[1], 1) for t in (k, v))


def _scores(q, k):
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), float("-inf"))


def attention_fwd(out, lse, qkv):
    q, k, v = _split(qkv, lse, out.shape[1] // lse.shape[1])
    s = _scores(q, k)
    lse.copy_(s.logsumexp(-1) * LOG2E)
    out.copy_((s.softmax(-1) @ v).transpose(1, 2).reshape(out.shape))


def attention_bwd(dqkv, dbias, delta, scratch, dout, qkv, out, lse, acc, rope=None):
    """dqkv from dout; dbias (+)= column sums of dqkv; delta is workspace for rowsum(dout * out)."""
    B, NH, T = lse.shape
    HS = out.shape[1] // NH
    q, k, v = _split(qkv, lse, HS)
    p = (_scores(q, k) - lse[..., None] / LOG2E).exp()
    do, o = (t.view(B, T, NH, -1).transpose(1, 2) for t in (dout, out))
    delta.copy_((do * o).sum(-1))
    ds = p * (do @ v.transpose(-1, -2) - delta[..., None]) / math.sqrt(q.shape[-1])
    groups = (qkv.shape[1] // HS - NH) // 2
    dkv = (
        t.view(B, groups, -1, T, HS).sum(2)
        for t in (ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ do)
    )
    d = [t.transpose(1, 2).reshape(B * T, -1) for t in (ds @ k, *dkv)]
    if rope is not None:
        positions = torch.arange(B * T) % T
        d[:2] = (rotated(t, rope.table, positions, back=True) for t in d[:2])
        if rope.norm is not None:
            C = out.shape[1]
            for of_k, y in enumerate((qkv[:, :C], qkv[:, C : C + groups * HS])):
                z = rotated(y.contiguous(), rope.table, positions, back=True)
                d[of_k] = head_norm_bwd(d[of_k], z, rope.norm, bool(of_k), acc)
    dqkv.copy_(torch.cat(d, 1))
    if dbias is not None:
        _give(dbias, dqkv.sum(0), acc)


# ---- decoding: seq is [B, 5], token, row in the cache, tokens sampled, two halves of the seed ----


def decode_embed(x, seq, wte, wpe):
    x.copy_(wte[seq[:, 0].long()] + (0 if wpe is None else wpe[seq[:, 1].long()]))


def decode_matmul(out, x, layer, norm=None, res=None, act="", cap=0.0):
    """out = res + act(norm(x) @ w.T + b), capped; the norm is LayerNorm, or RMSNorm without b"""
    if norm is not None and norm.b is None:
        x = F.rms_norm(x, x.shape[1:], norm.w, norm.eps)
    elif norm is not None:
        x = F.layer_norm(x, x.shape[1:], norm.w, norm.b, norm.eps)
    y = x @ layer.w.T if layer.b is None else x @ layer.w.T + layer.b
    y = ACTIVATIONS[act](y) if act else y
    out.copy_(capped(y if res is None else res + y, cap))


def decode_attention(att, cache, qkv, seq, NH, rope=None):
    """Row seq[b, 1] of cache[b] = k, v; att = attention of q over the rows up to it."""
    C, Ckv = att.shape[1], cache.shape[3]
    for b, row in enumerate(seq[:, 1].tolist()):
        q, k, v = (t[None].contiguous() for t in qkv[b].split([C, Ckv, Ckv]))
        if rope is not None and rope.norm is not None:
            q, k = (head_normed(t, rope.norm, of_k)[0] for t, of_k in ((q, False), (k, True)))
        if rope is not None:
            q, k = (rotated(t, rope.table, torch.tensor([row])) for t in (q, k))
        cache[b, row] = torch.cat([k, v])
        k, v = cache[b, : row + 1].view(row + 1, 2, -1, C // NH).permute(1, 2, 0, 3)
        k, v = (t.repeat_interleave(C // Ckv, 0) for t in (k, v))
        p = (k @ q.view(NH, -1, 1) / math.sqrt(C // NH)).softmax(1)
        att[b] = (p * v).sum(1).flatten()


def cache_fill(cache, qkv, filled):
    kv = qkv[:, -2 * cache.shape[3] :]
    for b in filled.nonzero().flatten().tolist():
        cache[b, : len(qkv)] = kv.view(len(qkv), 2, -1)


def sample_token(seq, logits, V, temperature, top_k, top_p):
    """Draw a token from the whole softmax; tests/kernels/test_sampling.py compares the
    kernel's choice with numpy.
    """
    assert top_k == 0 and top_p == 1.0
    for row, z in zip(seq, logits[:, :V].cpu()):
        key = torch.Generator().manual_seed(hash(tuple(row[2:].tolist())) % 2**63)
        row[0] = (
            torch.multinomial((z / temperature).softmax(0), 1, generator=key)[0]
            if temperature
            else z.argmax()
        )
    seq[:, 1:3] += 1


# ---- classifier with deferred normalisation ----


def capped(z, cap):
    """cap * tanh(z / cap), or z"""
    return cap * torch.tanh(z / cap) if cap else z


def slope(logits, cap):
    """The derivative of `capped`, of its result."""
    return 1 - (logits / cap) ** 2 if cap else torch.ones_like(logits)


def classifier_target(targets, lnf, wte):
    """logits = log2(e) * the logit of the target; 0 where the target is -1."""
    rows = wte[targets.ids.clamp(min=0).long()]
    logits = capped((lnf * rows).sum(-1), targets.cap)
    targets.logits.copy_(logits * LOG2E * (targets.ids >= 0))


def classifier_fwd(p, rowsum, lnf, wte, targets, V):
    """p = exp(logit - target logit) times the cap's derivative, 0 at the target and in the padding;
    rowsum: sums of rows without the derivative.
    """
    ids, zt, cap = targets
    logits = capped(lnf @ wte.T, cap)
    e = torch.exp2(torch.clamp(logits * LOG2E - zt[:, None], max=108))
    e[:, V:] = 0
    rows = torch.arange(len(ids), device=ids.device)[ids >= 0]
    e[rows, ids[rows].long()] = 0
    rowsum[: len(ids)] = e.sum(-1)
    if p is not None:
        p.copy_(e * slope(logits, cap))


def classifier_loss(losses, rs, ks, lns, rowsum, lnf, targets, step_in, acc):
    """losses (+)= log(1 + S); rs, ks scale the parts of dlogits; lns = rs * lnf;
    all None for losses alone.
    """
    ids, zt, cap = targets
    s, valid, scale = rowsum[: len(ids)], ids >= 0, step_in[io.LOSS_SCALE]
    _give(losses, torch.log1p(s) * valid, acc)
    if lns is not None:
        rs.copy_(scale / (1 + s) * valid)
        ks.copy_(-scale * s / (1 + s) * slope(zt / LOG2E, cap) * valid)
        lns.copy_(rs[:, None] * lnf)


def classifier_dx(dln, p, wte, rs, ks, targets):
    """dln = rs * (p @ wte) + ks * wte[target]"""
    dln.copy_(rs[:, None] * (p @ wte) + ks[:, None] * wte[targets.clamp(min=0).long()])


# ---- fp8 ----


def cast_operand(x8):
    """Round value * scale to e4m3, also transposed for a weight; amax: the largest |value|."""
    value = x8.value.float()
    x8.rows.copy_((value * x8.scale).clamp(-448, 448).to(x8.rows.dtype))
    x8.amax.view(torch.float32)[0] = value.abs().max()
    if x8.transposed:
        x8.columns.view(torch.uint8).copy_(x8.rows.view(torch.uint8).T)


def cast_weights(a8, b8, c8, d8):
    for x8 in (a8, b8, c8, d8):
        cast_operand(x8)


def check_amax(squares, amax):
    """squares = NaN if an amax is not finite"""
    if not amax.view(torch.float32).isfinite().all():
        squares.fill_(math.nan)


def roll_scales(scale, history, amax, step_out):
    """history = amax, then the older ones; scale = the largest 2^n with 2^n * 2 * max <= 448"""
    for i, top in enumerate(amax.view(torch.float32).amax(1).tolist()):
        if step_out[io.APPLY] == 1 and math.isfinite(top):
            history[i] = torch.cat([torch.tensor([top], device=history.device), history[i, :-1]])
            if most := history[i].max().item():
                scale[i] = 2.0 ** min(math.floor(math.log2(224 / most)), 100)
    amax.zero_()


def fp8_stats(out, x, acc):
    rows = x.rows.float()
    found = torch.stack([(rows.abs() == 448).sum(), (rows == 0).sum()])
    previous = out.sum(1) if acc else torch.zeros(2, device=out.device)
    out.zero_()
    out[:, 0] = previous + found


# ---- reductions and the update ----


def loss_sum(out, losses, step_in):
    """out = loss scale * sum of losses"""
    out.copy_(losses.sum() * step_in[io.LOSS_SCALE])


def sum_squares(out, scratch, g, acc=False):
    _give(out, (g * g).sum(), acc)


def add_partials(out, parts):
    for part in parts:
        out.add_(part)


def clip_factor(step_out, sumsq, step_in):
    """The clip factor brings the norm to at most CLIP (1 if CLIP is 0); APPLY = 1 if
    norm and loss are finite.
    """
    norm, clip = sumsq[0].sqrt(), step_in[io.CLIP]
    step_out[io.NORM] = norm
    step_out[io.CLIP_FACTOR] = torch.clamp(clip / (norm + 1e-6), max=1.0) if clip > 0 else 1.0
    step_out[io.APPLY] = float(torch.isfinite(norm) and torch.isfinite(step_out[io.LOSS]))


def skip_outliers(step_out, window, z, step_in):
    """APPLY = 0 if loss or norm is more than LOSS_LIMIT or NORM_LIMIT deviations
    above the mean of its window.
    """
    z.zero_()
    if step_out[io.APPLY] == 0:
        return
    for which, row in zip((io.LOSS, io.NORM), window):
        seen, size = int(row[-1]), len(row) - 1
        row[seen % size] = step_out[which]
        row[-1] = seen + 1 if seen + 1 < 2 * size else size
        if seen >= size:
            deviation = row[:-1].std(correction=0)
            z[which] = (step_out[which] - row[:-1].mean()) / deviation if deviation > 0 else 0.0
    if any(
        z[which] > step_in[limit] > 0 for which, limit in enumerate((io.LOSS_LIMIT, io.NORM_LIMIT))
    ):
        step_out[io.APPLY] = 0.0


def adamw(span, step, betas):
    """Update w, m and v, unless APPLY is 0; in float64, so nothing is rounded."""
    w, m, v, _, g, _, lr_factor, decay = span
    if step.out[io.APPLY] == 0:
        return
    lr = step.inp[io.LR] * lr_factor
    m_correction = step.inp[io.M_CORRECTION]
    v_correction = step.inp[io.V_CORRECTION]
    grad = g * step.out[io.CLIP_FACTOR]
    m.copy_(m + (1 - betas.beta1) * (grad - m))
    v.copy_(v + (1 - betas.beta2) * (grad * grad - v))
    w.copy_(w - lr * (m * m_correction / ((v * v_correction).sqrt() + betas.eps) + decay * w))


# ---- Muon ----


def muon_momentum(c, step):
    if step.out[io.APPLY] != 0:
        grad = c.g * step.out[io.CLIP_FACTOR]
        c.m.copy_(c.momentum * c.m + (1 - c.momentum) * grad)
        c.x.copy_(c.momentum * c.m + (1 - c.momentum) * grad)


def muon_normalise(out, scratch, x):
    """Divide each matrix by 1.02 times its Frobenius norm, or by 1e-12 if that is more."""
    out.copy_(x / (1.02 * torch.linalg.matrix_norm(x)).clamp(min=1e-12)[:, None, None])


def muon_gram(gram, x):
    gram.copy_(x.mT @ x if x.shape[1] > x.shape[2] else x @ x.mT)


def muon_poly(poly, gram, b, c):
    poly.copy_(b * gram + c * gram @ gram)


def muon_apply(out, x, poly, a):
    out.copy_(a * x + (x @ poly if x.shape[1] > x.shape[2] else poly @ x))


def muon_update(c, step):
    if step.out[io.APPLY] != 0:
        c.w.copy_(c.w - step.inp[io.LR] * (c.scale * c.x + c.decay * c.w))


# ---- statistics: partial results, of which the first has everything ----


def tensor_stats(out, x, acc):
    finite = torch.isfinite(x)
    size = x.float().abs().where(finite, torch.zeros(()))
    squares, bad = (size * size).sum(), (~finite).sum()
    previous = out[:, 0].clone() if acc else torch.zeros(3)
    out.zero_()
    out[:, 0] = torch.stack(
        [previous[0] + squares, previous[1].maximum(size.max()), previous[2] + bad]
    )


def parameter_stats(out, span, step, betas):
    new = span._replace(w=span.w.clone(), m=span.m.clone(), v=span.v.clone())
    adamw(new, step, betas)
    _give_stats(out, span.w, new.w, span.g)


def muon_stats(out, c, step):
    new = c._replace(w=c.w.clone())
    muon_update(new, step)
    _give_stats(out, c.w, new.w, c.g)


def _give_stats(out, w, new, g):
    tensor_stats(out[:3], g, False)
    out[3:].zero_()
    out[3, 0], out[4, 0] = (w * w).sum(), ((new - w) ** 2).sum()


def stats_parts():
    return 1


def normal_init(w, low, seed, first, std):
    """Draw each element by its flat index, `first` for the first, so that ranks
    draw what one rank would.
    """
    u, v = np.random.Generator(np.random.PCG64(seed).advance(2 * first)).random((w.numel(), 2)).T
    normal = np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v)
    w.copy_(torch.from_numpy(normal * std).view(w.shape))


def fill(w, value):
    w.fill_(value)
