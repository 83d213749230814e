"""Small models for tests of a whole step: exact ones in float64, and ones in the real kernels."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.data.packing import pack_batch
from gpt2_triton.model import fp8, state_io
from gpt2_triton.model.arena import Buffer, MemoryPlan
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model import Model
from gpt2_triton.training.lr_schedule import step_inputs
from tests.support import reference, torch_reference
from tests.support.helpers import max_error
from tests.support.tiny import merged, tiny_config, tiny_model

F64 = dict(act=torch.float64, f32=torch.float64, i32=torch.int32, i16=torch.int16)
REFERENCE: Kernels = reference  # mypy compares the names of all arguments
# 3 layers of 2 heads; T < block_size; V < Vp; head chunks of 6, 6 and 4 rows;
# two micro-steps of 16 tokens
EXACT = dict(
    model=dict(n_layer=3, n_head=2, n_embd=128, vocab_size=300, block_size=12),
    train=dict(dtype="fp32", batch_size=2, seq_len=8, total_batch_tokens=32),
)


def exact_model(level: str = "none", **changes: dict) -> Model:
    """Return a model over the reference launchers in float64, with random
    weights in an arena of NaN.
    """
    config = tiny_config(**(EXACT | changes), memory=dict(recompute=level, head_rows=6))
    model = Model(config, REFERENCE, "cpu", dtypes=F64)
    model.arena.fill_(0xFF)
    model.A.fill(model.train_view.a, config.model)
    for buffer in (model.state.m, model.state.v, model.state.window):
        buffer.zero_()
    randomise(model)
    return model


def kernel_model(level: str = "none", dtype: str = "fp32", **sections: dict) -> Model:
    """Return the tiny model in the real kernels: two micro-steps, padded vocabulary, head
    chunks of 20 and 12 rows.
    """
    train, memory = dict(dtype=dtype, total_batch_tokens=64), dict(recompute=level, head_rows=20)
    base = dict(model=dict(vocab_size=300), train=train, memory=memory, sample=dict(every=1))
    model, _ = tiny_model(**merged(base, sections))
    model.eager = True  # tests look at single launches, or replace K
    randomise(model)
    return model


def randomise(model: Model) -> None:
    """Set weights with which no term of a gradient is small: norms about 1, the rest 0.2
    * N(0, 1), padded rows 0.
    """
    generator, params, w = torch.Generator().manual_seed(0), model.state.params, model.train_view.w
    params.copy_(0.2 * torch.randn(params.shape, generator=generator))
    w.lnw.add_(1.0)
    if getattr(w, "qknormw", None) is not None:
        w.qknormw.add_(1.0)
    for rows in (w.wte, model.train_view.net.head.w):
        rows[model.dims["V"] :] = 0


def leaves_of(model: Model) -> Any:
    """Return the parameters as leaves of autograd."""
    return torch_reference.leaves(model.state.params, model.dims, table=model.A.Params)


def gpt2_loss(model: Model, params: Any, *batch: Tensor, **options: Any) -> Tensor:
    """Return torch_reference.gpt2_loss in the sizes of a model, of ids and targets."""
    return torch_reference.gpt2_loss(params, *batch, model.dims["V"], model.dims["NH"], **options)


def require_close(
    model: Model, ours: Any, params: Any, tolerance: float,
    of: Callable[[Tensor], Tensor] = Tensor.detach,
) -> None:  # fmt: skip
    """Compare the model's weights or gradients `ours` with `of` each leaf in `params`."""
    got = {name: t for name, t, _ in torch_reference.tensors(ours, model.dims)}
    for name, leaf, _ in torch_reference.tensors(params, model.dims):
        assert max_error(got[name], of(leaf)) < tolerance, name


def require_gradients(model: Model, params: Any) -> None:
    """Compare a step's gradients with autograd's, of the leaves `params`."""
    require_close(model, model.train_view.g, params, 1e-11, lambda leaf: leaf.grad)


def batches(config: Config, n: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return n batches of random ids and targets [B, T], a fifth of the targets ignored."""
    t, rng = config.train, np.random.default_rng(seed)
    size = (2, n, StepShape.of(config).micro_batch, t.seq_len)
    ids, targets = rng.integers(0, config.model.vocab_size, size, dtype=np.int32)
    targets[rng.random(targets.shape) < 0.2] = -1
    return [(torch.from_numpy(i), torch.from_numpy(j)) for i, j in zip(ids, targets, strict=True)]


def packed(config: Config, n: int, seed: int = 0) -> list[Tensor]:
    """Return `batches` as the loader packs them."""
    sizes, pairs = (config.model.vocab_size, config.model.head_row), batches(config, n, seed)
    return [pack_batch(None, ids.numpy(), targets.numpy(), *sizes) for ids, targets in pairs]


def calibrate(model: Model) -> Model:
    """Give a model its first scales, from the batches of its first step."""
    inputs = step_inputs(0, model.config)
    fp8.calibrate(model, packed(model.config, model.shape.accumulation), inputs)
    return model


def require_equal_states(model: Model, *others: Model) -> None:
    """Require equal bits of all that a checkpoint holds."""
    states = [state_io.state_buffers(each.state) for each in (model, *others)]
    for name, flat in states[0].items():
        assert all(torch.equal(flat, other[name]) for other in states[1:]), name


def train_steps(model: Model, n: int, with_stats: bool = False) -> list[tuple[float, float, bool]]:
    """Return (loss, gradient norm, applied) of n steps on random tokens, which
    are the same in every call.
    """
    config, history = model.config, []
    for step in range(n):
        model.begin_step(step_inputs(step, config), step, 1, with_stats)
        for micro, batch in enumerate(packed(config, model.shape.accumulation, seed=step)):
            model.micro_step(batch, first=micro == 0)
        history.append(model.end_step().result()[:3])
    return history


def require_decoding_equals_the_forward(model: Model) -> None:
    """Cache 3 tokens and decode 2 in a training arena: their logits give the
    losses of the forward pass.
    """
    ids, targets = (t[:1, :5].contiguous() for t in batches(model.config, 1)[0])
    targets[0, 3], targets[0, 4] = 7, 9
    losses, seq = model.evaluate(ids.numpy(), targets.numpy()), model.decoding.seq
    model.prefill(ids[0, :3].tolist(), slice(0, 1))
    for row in (3, 4):
        seq.copy_(torch.tensor([[ids[0, row], row, 0, 0, 0]]))
        model.decode(0.0, 0, 1.0)
        logits = model.decoding.logits[0, :300]
        assert seq[0].tolist() == [logits.argmax(), row + 1, 1, 0, 0]
        assert abs(logits.logsumexp(0) - logits[targets[0, row]] - losses[row]) < 1e-12


def side_by_side(buffers: list[Buffer]) -> MemoryPlan:
    """Return a plan in which no two buffers share a byte, so that an
    address belongs to one buffer.
    """
    offset = 0
    for buffer in buffers:
        buffer.offset, offset = offset, offset + buffer.nbytes
    return MemoryPlan({buffer.name: buffer for buffer in buffers}, offset)
