"""The rate and decay of each part of a model, as the update uses them and as a run says them."""

import itertools

import pytest

from gpt2_triton.model.rates import bucket_rates, rates_line
from tests.support.tiny import tiny_config, tiny_model

MUON = dict(name="muon", lr=1e-2, adamw_lr=2e-3, embed_lr=0.5, weight_decay=0.2)


@pytest.mark.parametrize("optim", [dict(lr=1e-3, weight_decay=0.1), MUON])
def test_each_span_is_updated_with_its_buckets_rate(optim):
    """A span begins at the flat index where its bucket begins."""
    model, config = tiny_model(optim=optim)
    rates = bucket_rates(config)
    sizes = [model.dims["Ne"], model.dims["L"] * model.dims["Nl"]]
    sizes.append(model.dims["N"] - sum(sizes))
    firsts = dict(zip(itertools.accumulate(sizes, initial=0), zip(rates, sizes)))
    spans = [span for _, span in model.train_view.updates]
    assert len(spans) == (2 if config.optim.name == "muon" else 3)
    for span in spans:
        rate, size = firsts[span.first]
        assert (span.lr_factor, span.decay, len(span.w)) == (
            rate.lr_factor,
            rate.decay,
            size,
        )
    for matrices in model.train_view.matrices:
        assert (rates[1].optimizer, matrices.part.decay) == ("muon", rates[1].decay)


def test_a_line_lists_the_buckets_with_rate_and_decay():
    """The plan has it: tests/model/test_memory_plan.py."""
    config = tiny_config(optim=MUON)
    assert rates_line(config) == (
        f"parameters {config.n_params:,}: embed adamw lr 0.001 decay 0.2, "
        "layers muon lr 0.01 decay 0.2, rest adamw lr 0.002 decay 0"
    )
