"""A soft cap of the logits in a step of Llama: gradients of autograd, decoding, and buffers inside
their phases.
"""

import numpy as np
import pytest

from tests.model.test_lifetimes import recorded_step, violations
from tests.model.test_llama import llama, require_autograd_s_step
from tests.support.models import exact_model, require_decoding_equals_the_forward


def capped(cap=0.5, **more) -> dict:
    """Return the sections of a Llama whose logits the cap changes before any training."""
    sections = llama(**more)
    return sections | dict(model=sections["model"] | dict(logit_cap=cap))


def test_loss_and_gradients_equal_autograd():
    require_autograd_s_step(exact_model(**capped()))


def test_decoding_equals_the_training_forward():
    require_decoding_equals_the_forward(exact_model(**capped(sample=dict(every=1))))


def test_logits_are_capped():
    plain, model = (exact_model(**capped(cap, sample=dict(every=1))) for cap in (0, 0.5))
    ids = np.arange(8, dtype=np.int32)[None]
    want = plain.logits(ids, 2, 8)
    assert abs(want).max() > 0.5
    assert model.logits(ids, 2, 8) == pytest.approx(0.5 * np.tanh(want / 0.5), rel=1e-5)


def test_every_launch_stays_inside_live_buffers(monkeypatch):
    model, launches = recorded_step("none", monkeypatch, **capped())
    assert violations(model, launches) == []
