"""Sampling of the next token against numpy: exact sets of top-k and top-p, the Gumbel noise."""

import itertools

import numpy as np
import pytest
import torch

from gpt2_triton.kernels import sample_token
from tests.conftest import DEVICE
from tests.kernels.test_philox import philox

SAMPLE = 2  # the purpose of the numbers, in Philox's counter


def state(seeds, drawn=0):
    fields = [[0, 4, drawn, seed & 0x7FFFFFFF, seed >> 31] for seed in seeds]
    return torch.tensor(fields, dtype=torch.int32, device=DEVICE)


def sampled_tokens(z, seeds, temperature=1.0, top_k=0, top_p=1.0, drawn=0):
    """Return a token per seed, sampled from logits z [V] (or [B, V]) with padding
    that must not be sampled.
    """
    z = np.broadcast_to(np.asarray(z, np.float32), (len(seeds), np.shape(z)[-1]))
    V = z.shape[1]
    logits = np.full((len(seeds), -(-V // 128) * 128), 1e4, np.float32)
    logits[:, :V] = z
    seq = state(seeds, drawn)
    sample_token(seq, torch.from_numpy(logits).to(DEVICE), V, temperature, top_k, top_p)
    return seq[:, 0].tolist()


def kept(z, temperature, top_k, top_p):
    """Return the tokens that may be sampled, by sorting in float64."""
    z = np.asarray(z, np.float64)
    inside = np.ones(len(z), bool)
    if 0 < top_k < len(z):
        inside = z >= np.sort(z)[-top_k]
    if top_p < 1:
        p = np.where(inside, np.exp((z - z.max()) / temperature), 0)
        order = np.argsort(-p, kind="stable")
        mass = np.cumsum(p[order]) / p.sum()
        last = order[min(np.searchsorted(mass, top_p), inside.sum() - 1)]
        inside &= z >= z[last]
    return inside


def scores(z, seed, drawn, temperature):
    """Return z / temperature plus Gumbel noise in float64, from Philox's words."""
    u = (philox(seed, 0, len(z), drawn, SAMPLE) + 0.5) / 2**32
    return np.asarray(z, np.float64) / temperature - np.log(-np.log1p(-u))


LOGITS = np.random.default_rng(3).normal(size=1000) * 3
SEEDS = [0, 1, 5 << 40, (1 << 62) - 1]


def test_sample_token_at_temperature_0_takes_the_first_largest():
    z = np.zeros((2, 300))
    z[0, [17, 120]], z[1, 299] = 3, 1
    assert sampled_tokens(z, [1, 2], temperature=0) == [17, 299]


def test_sample_token_advances_the_sequence():
    seq = state([5, 6], drawn=9)
    sample_token(seq, torch.zeros(2, 128, device=DEVICE), 100, 1.0, 0, 1.0)
    assert seq[:, 1:].tolist() == [[5, 10, 5, 0], [5, 10, 6, 0]]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
@pytest.mark.parametrize(
    "top_k,top_p", [(0, 1.0), (1, 1.0), (50, 1.0), (0, 0.1), (0, 0.9), (40, 0.8), (5000, 1.0)]
)
def test_sample_token_matches_numpy(temperature, top_k, top_p):
    """The token has the largest score of the kept set, for each seed and number
    of tokens sampled before.
    """
    inside = kept(LOGITS, temperature, top_k, top_p)
    want = [
        int(np.where(inside, scores(LOGITS, s, 7, temperature), -np.inf).argmax()) for s in SEEDS
    ]
    assert sampled_tokens(LOGITS, SEEDS, temperature, top_k, top_p, drawn=7) == want


@pytest.mark.parametrize("top_k,top_p", [(0, 1.0), (3000, 0.99)])
def test_sample_token_matches_numpy_where_many_programs_share_a_row(top_k, top_p):
    """The interpreter's programs take 4096 logits; the last one has 808."""
    z = np.random.default_rng(4).normal(size=9000)
    inside = kept(z, 2.0, top_k, top_p)
    want = [int(np.where(inside, scores(z, s, 7, 2.0), -np.inf).argmax()) for s in range(30)]
    assert {token // 4096 for token in want} == {0, 1, 2}
    assert sampled_tokens(z, range(30), 2.0, top_k, top_p, drawn=7) == want


@pytest.mark.parametrize(
    "top_k,top_p", [(1, 1.0), (2, 1.0), (299, 1.0), (0, 0.01), (0, 0.5), (0, 0.99), (9, 0.7)]
)
def test_top_k_and_top_p_sets_are_exact(top_k, top_p):
    """With one seed the winner would be the first token outside the set; with
    another it is the last inside.
    """
    z, temperature = np.random.default_rng(top_k).permutation(np.linspace(-4, 4, 300)), 3.0
    inside = kept(z, temperature, top_k, top_p)
    last, outside = (
        np.flatnonzero(inside)[z[inside].argmin()],
        np.flatnonzero(~inside)[z[~inside].argmax()],
    )
    wider = inside.copy()
    wider[outside] = True

    def winner(seed, tokens):
        return int(np.where(tokens, scores(z, seed, 0, temperature), -np.inf).argmax())

    for token in (outside, last):
        seed = next(seed for seed in itertools.count() if winner(seed, wider) == token)
        assert sampled_tokens(z, [seed], temperature, top_k, top_p) == [winner(seed, inside)]


def test_equal_logits_at_the_bound_are_kept_together():
    """Logits that equal the bound are all kept, so that the set may be larger than top_k."""
    assert set(sampled_tokens([5.0, 3.0, 3.0, 1.0], range(8), 1e4, top_k=2)) == {0, 1, 2}
    assert set(sampled_tokens(np.zeros(4), range(8), 1.0, top_k=3)) == {0, 1, 2, 3}


@pytest.mark.filterwarnings("error:invalid value")  # NaN, which the interpreter's maxima skip
@pytest.mark.parametrize("temperature", [1e46, np.inf])
def test_an_endless_temperature_draws_alike_among_what_is_kept(temperature):
    z = np.random.default_rng(5).normal(size=300)
    kept_by_k = np.argsort(-z)[:5]
    assert set(sampled_tokens(z, range(30), temperature, top_k=5)) == {*kept_by_k}


def test_sample_token_does_not_depend_on_the_batch():
    z = np.random.default_rng(0).normal(size=(6, 200))
    together = sampled_tokens(z, range(6), 0.8, 20, 0.9)
    assert together == [sampled_tokens(z[i : i + 1], [i], 0.8, 20, 0.9)[0] for i in range(6)]


def test_a_likely_token_or_one_kept_alone_is_taken_whatever_its_noise():
    """The word of token 13262 is 101 below 2^32, so in fp32 its u rounds to 1."""
    assert sampled_tokens(LOGITS, SEEDS, temperature=1e-40) == [int(LOGITS.argmax())] * 4
    assert sampled_tokens(np.arange(13263), [3776], top_k=1) == [13262]
