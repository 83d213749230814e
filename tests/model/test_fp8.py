"""A step in fp8: equal bits at every recompute level, gradients beside those of bf16, scales."""

import functools
import math
from pathlib import Path

import pytest
import torch

import gpt2_triton.kernels as K
from gpt2_triton.checkpoint.load import Checkpoint
from gpt2_triton.checkpoint.stored import whole_tensors
from gpt2_triton.config.precision import choose_precision
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.distributed.control import SINGLE_PROCESS
from gpt2_triton.errors import ConfigError
from gpt2_triton.model import fp8
from gpt2_triton.model.gpt2.buffers import Fp8Buffers
from gpt2_triton.model.memory_plan import plan_memory
from gpt2_triton.model.model import Model
from gpt2_triton.model.state_io import SavedState
from gpt2_triton.model.tables import State
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.recovery import find_non_finite_tensor
from tests.conftest import DEVICE
from tests.model.test_lifetimes import poison
from tests.support.models import batches, packed, train_steps
from tests.support.tiny import tiny_config

# dqkv is wider than dfch, and q than the residual stream
LLAMA = dict(arch="llama", n_head=2, n_kv_head=1, head_dim=64, n_embd=96, n_inner=112)
NOT_SCALE = State.__dataclass_fields__.keys() - {"scale"}


def fp8_config(
    level="none", keep="none", precision="fp8", stats_every=0, dropout=0.0, llama=False, **train
):
    """Return a configuration of 2 layers, in two micro-steps."""
    train = dict(dtype="bf16", precision=precision, total_batch_tokens=64) | train
    sections = dict(train=train, memory=dict(recompute=level, head_rows=16))
    sections["fp8"] = dict(keep_bf16=keep)
    model = dict(vocab_size=300, dropout=dropout) | (LLAMA if llama else {})
    return tiny_config(
        model=model, sample=dict(every=1), log=dict(stats_every=stats_every), **sections
    )


def planned(config):
    return plan_memory(config, K, StepShape.of(config))


def fp8_model(level="none", keep="none", precision="fp8", **changes):
    """Return a model of fp8_config with initial weights, and its scales calibrated."""
    config = fp8_config(level, keep, precision, **changes)
    model = Model(config, K, DEVICE)
    model.initialise(seed=1)
    model.eager = True
    if model.has_fp8:
        fp8.calibrate(model, packed(config, 1), step_inputs(0, config))
    return model


def bits(model):
    s = model.state
    return train_steps(model, 2), *(flat.clone() for flat in (s.params, s.m, s.scale, s.history))


@functools.cache
def bits_of_none(dropout, llama):
    return bits(fp8_model(dropout=dropout, llama=llama))


@pytest.mark.slow
@pytest.mark.parametrize(
    "level, dropout, llama",  # `gelu` is as `none`: fp8 keeps GELU's output
    [
        ("gelu+ln:1", 0, False),
        ("gelu+ln+qkv", 0.3, False),
        ("block", 0, False),
        ("gelu+ln+qkv", 0, True),
        ("block:1", 0, True),
    ],
)
def test_recomputation_and_poisoned_memory_change_no_bit(level, dropout, llama, monkeypatch):
    """NaN in every buffer that dies with a phase, fp8 ones too: two steps of the same numbers."""
    history, *tensors = bits(poison(fp8_model(level, dropout=dropout, llama=llama), monkeypatch))
    wanted, *others = bits_of_none(dropout, llama)
    assert history == wanted
    assert all(torch.equal(one, other) for one, other in zip(tensors, others, strict=True))


def gradients(model):
    history = train_steps(model, 1)
    return history[0][0], model.state.grads.double()


@functools.cache
def gradients_in_bf16(dropout, llama):
    return gradients(fp8_model(precision="bf16", dropout=dropout, llama=llama))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keep, dropout, llama",
    [("none", 0, False), ("head", 0, False), ("none", 0.3, False), ("none", 0, True)],
)
def test_gradients_are_those_of_bf16_but_for_rounding(keep, dropout, llama):
    """e4m3 rounds an operand by 2.6e-2; a gradient sums over few tokens here, and
    passes six products in a row.
    """
    loss, want = gradients_in_bf16(dropout, llama)
    got_loss, got = gradients(fp8_model(keep=keep, dropout=dropout, llama=llama))
    off = ((got - want).norm() / want.norm()).item()
    assert 0.012 < off <= 0.12 and abs(got_loss / loss - 1) < 1e-3


@pytest.mark.slow
def test_every_tensor_has_a_scale_that_fits_it():
    """After calibration the maxima recorded by a step times the scales are
    between 448 / 16 and 448.
    """
    model = fp8_model()
    scale = model.state.scale.clone()
    assert torch.equal(scale.log2(), scale.log2().round())
    assert not model.state.history[:, 1:].any()  # of the second pass alone
    train_steps(model, 1)
    amax = model.state.history[:, 0]
    assert len(amax) == 2 * 12 + 2
    assert (amax > 0).all() and not model.state.amax.any()
    # a scale leaves a factor of 2 to 4, and the step has another batch too, whose maxima
    # differ by a factor of up to 4
    assert (amax * scale < 448).all() and (amax * scale > 448 / 16).all()


@pytest.mark.slow
def test_levels_that_cast_weights_in_each_micro_step_count_them_once():
    """The statistics of two micro-steps, with weights far beyond their scales: a
    share of 1 is all of a tensor.
    """
    shares = []
    for level in ("none", "gelu+ln"):
        model = fp8_model(level, stats_every=1)
        model.train_view.w.qkvw[0].value.mul_(1e3)
        config = model.config
        model.begin_step(step_inputs(0, config), 0, 1, with_stats=True)
        for micro, batch in enumerate(packed(config, 2)):
            model.micro_step(batch, first=micro == 0)
        step = model.end_step()
        step.result()
        shares.append(model.stats_recorder.read(step.stats, 2, SINGLE_PROCESS)["fp8"])
    assert shares[0] == shares[1]
    assert 0.9 < shares[0]["qkvw"]["saturated"][0] <= 1


@pytest.mark.slow
def test_an_operand_that_is_not_finite_skips_the_step_and_changes_no_scale():
    """Also where only e4m3 of it is multiplied, in which infinity is 448."""
    model = fp8_model()
    w, before = model.train_view.w, (model.state.history.clone(), model.state.scale.clone())
    operands = {
        "fcw": w.fcw[0].value,
        "wte": w.wte.value,
        "fcprojw": w.fcprojw[0].value,
        "lnw": w.lnw,
        "fcb": w.fcb,
    }
    for name, operand in operands.items():
        first = operand.view(-1)[:1]
        right = first.clone()
        first.fill_(math.nan if name in ("fcw", "wte") else math.inf)
        [(_, norm, applied)] = train_steps(model, 1)
        assert not applied and not math.isfinite(norm) and not model.state.amax.any(), name
        assert torch.equal(model.state.history, before[0]) and torch.equal(
            model.state.scale, before[1]
        ), name
        first.copy_(right)


@pytest.mark.slow
def test_an_infinite_weight_is_named():
    """No tensor of the step that is computed again has a non-finite
    element: in e4m3 infinity is 448.
    """
    model = fp8_model(stats_every=1)
    model.train_view.w.fcw[1].value[0, 0] = float("inf")
    found = find_non_finite_tensor(model, packed(model.config, 2), SINGLE_PROCESS)
    assert found == "fcw of layer 1 (before it is rounded to e4m3)"
    assert not model.state.amax.any()


@pytest.mark.slow
@pytest.mark.parametrize("llama", [False, True])
def test_evaluation_changes_no_scale_and_reads_the_weights_of_the_moment(llama):
    """In fp8 with the step's scales, and in train.dtype as a bf16 model;
    neither changes the next step.
    """
    one, other, plain = (
        fp8_model(precision=precision, llama=llama) for precision in ("fp8", "fp8", "bf16")
    )
    for model in (one, other):
        train_steps(model, 1)
    plain.state.params.copy_(one.state.params)
    ids, targets = (t.numpy() for t in batches(one.config, 1, seed=9)[0])
    scale, history = one.state.scale.clone(), one.state.history.clone()
    in_fp8, in_bf16 = one.evaluate(ids, targets, fp8=True), one.evaluate(ids, targets)
    assert torch.equal(in_bf16, plain.evaluate(ids, targets))
    off = ((in_fp8 - in_bf16).norm() / in_bf16.norm()).item()
    assert 0 < off < 1e-2
    smaller = one.evaluate(ids[:1], targets[:1], fp8=True)
    assert (smaller - in_fp8[:16]).norm() / smaller.norm() < 1e-5
    assert not one.state.amax.any()
    assert torch.equal(one.state.scale, scale) and torch.equal(one.state.history, history)
    assert (one.logits(ids, 0, 4) == plain.logits(ids, 0, 4)).all()
    for model in (one, plain):
        model.prefill([1, 2, 3], slice(0, 1))
        model.decoding.seq.copy_(torch.tensor([[3, 3, 0, 0, 0]], dtype=torch.int32))
        model.decode(0.0, 0, 1.0)
    assert torch.equal(one.decoding.logits[:1], plain.decoding.logits[:1])
    assert train_steps(one, 1) == train_steps(other, 1)
    assert torch.equal(one.state.params, other.state.params)


@pytest.mark.parametrize(
    ("architecture", "train", "chosen"),
    [
        (
            "9.0",
            {},
            "fp8 (faster on compute capability 9.0; its price in loss: docs/engineering/fp8.md)",
        ),
        ("8.9", {}, "bf16 (fp8 is faster on compute capability 9.0, this is 8.9)"),
        (None, {}, "bf16 (fp8 is faster on compute capability 9.0, this is a CPU)"),
        (
            "9.0",
            dict(seq_len=8),
            "bf16 (fp8 needs train.dtype bf16 and a multiple of 16 in train.seq_len)",
        ),
        (
            "9.0",
            dict(dtype="fp32"),
            "bf16 (fp8 needs train.dtype bf16 and a multiple of 16 in train.seq_len)",
        ),
    ],
)
def test_auto_is_fp8_where_it_is_faster(architecture, train, chosen):
    config, notes = choose_precision(fp8_config(precision="auto", **train), architecture)
    assert (
        notes == [f"train.precision auto: {chosen}"] and config.train.precision == chosen.split()[0]
    )
    assert choose_precision(fp8_config(), architecture) == (fp8_config(), [])
    llama = config.replace(model={"arch": "llama"}, train={"precision": "auto"})
    assert choose_precision(llama, architecture)[0].train.precision == "bf16"


def test_plan_has_no_buffer_that_no_precision_needs():
    configs = fp8_config(), fp8_config(keep="head"), fp8_config(precision="bf16")
    everything, head, bf16 = (planned(config)[0].buffers.keys() for config in configs)
    assert not {"ln", "fch", "fcg", "dfch", "dqkv"} & everything
    assert everything - head == {
        "lnf8",
        "wte8",
        "wte8t",
        "p8",
        "p8t",
        "lns8t",
        "p_scale",
        "lns_scale",
    }
    assert head - everything == {"p", "lns"}
    assert not bf16 & (Fp8Buffers.__dataclass_fields__.keys() | {"scale", "history", "amax"})


@pytest.mark.parametrize("llama", [False, True])
def test_forward_pass_between_steps_overlaps_nothing_that_is_kept(llama):
    plan, _ = planned(fp8_config(llama=llama))
    kept = {*State.__dataclass_fields__, "rope"}
    state = [b for b in plan.between.buffers.values() if b.name in kept]
    assert {b.name: b.offset for b in state} == {b.name: plan.buffers[b.name].offset for b in state}
    acts = [b for b in plan.between.buffers.values() if b not in state]
    assert {"x", "ln", "qkv", "att", "fcg"} <= {b.name for b in acts}
    for a in acts:
        for b in state:
            apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
            assert apart or not a.phases & b.phases, (a.name, b.name)
    assert all(b.offset + b.nbytes <= plan.total for b in acts)


def test_chunks_of_the_head_are_whole_pairs_of_rows():
    """The columns of p hold rows g and g + 8 of each 16 side by side."""
    for precision, rows in (("fp8", 32), ("bf16", 20)):
        config = fp8_config(precision=precision).replace(memory=dict(head_rows=20))
        assert planned(config)[1]["Rc"] == rows


def test_guessed_scales_follow_the_loss_scale():
    _, dims = planned(fp8_config())
    names = fp8.scales(dims)
    state = State(scale=torch.zeros(len(names)), **dict.fromkeys(NOT_SCALE))
    fp8.guess_scales(state, dims, 2.0**-20)
    guess = dict(zip(names, state.scale.tolist(), strict=True))
    assert (
        guess["dfch", 1] == 2.0**22
        and guess["fcw", 0] == guess["wte", 2] == 64
        and guess["lnf", 2] == 8
    )


@pytest.mark.parametrize("then, kept", [("none", "none head"), ("head", "head")])
def test_a_checkpoint_has_scales_of_what_was_in_fp8(then, kept):
    """They are kept while they suffice: if one is missing, all are left out."""
    count = fp8.saved_spec({}, fp8_config(keep=then).to_dict())["scale"].numel()
    rows = torch.arange(1.0, 1 + count)
    stored = whole_tensors("", dict(scale=rows, history=rows[:, None].repeat(1, 16)))
    for keep in ("none", "head"):
        dims = planned(fp8_config(keep=keep))[1]
        now = dims["Q"]
        buffers = dict(scale=torch.zeros(now), history=torch.zeros(now, 16))
        state = State(**dict.fromkeys(State.__dataclass_fields__) | buffers)
        saved = SavedState(state, dims, 0)
        saved.load(Checkpoint(Path("step"), {}, stored).parts(saved.needs()))
        expected = rows[:now] if keep in kept else torch.zeros(now)
        assert torch.equal(state.scale, expected)
        assert torch.equal(state.history, expected[:, None].expand(-1, 16))


def test_saved_configurations_of_other_versions():
    """One without fp8, one in which "" kept nothing in bf16, and one
    that kept single operations.
    """
    saved = fp8_config(precision="bf16").to_dict()
    del saved["fp8"], saved["train"]["precision"]
    assert fp8.saved_spec({}, saved) == {}
    saved = fp8_config(keep="none").to_dict()
    saved["fp8"]["keep_bf16"] = ""
    assert fp8.saved_spec({}, saved)["history"].shape == (2 * 12 + 2, 16)
    saved["fp8"]["keep_bf16"] = "head,mlp:0"
    with pytest.raises(
        ConfigError, match="fp8.keep_bf16: the run had 'head,mlp:0', only head and none exist"
    ):
        fp8.saved_spec({}, saved)
