"""The tables of the embedding's backward hold every entry once; their sizes are the
largest that any input needs.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data import packing
from gpt2_triton.data.packing import SEGMENT, pack_batch, packed_size, scatter_bounds, scatter_table

VOCAB = 300


def test_scatter_table_of_the_example(monkeypatch):
    monkeypatch.setattr(packing, "SEGMENT", 2)
    order, segments, split = table_of([7, 4, 7], [4, 7, 9], vocab_size=10)
    assert order.tolist() == [1, 3, 0, 2, 4, 5]
    assert segments.tolist() == [
        [4, 0, 2, -1],
        [7, 2, 2, 0],
        [7, 4, 1, 1],
        [9, 5, 1, -1],
        [0] * 4,
        [0] * 4,
    ]
    assert split.tolist() == [[7, 0, 2, 0], [0] * 4]


def table_of(ids, targets, vocab_size):
    order, segments, split = scatter_table(
        np.array(ids, np.int32), np.array(targets, np.int32), vocab_size
    )
    ns, nh, _ = scatter_bounds(len(ids), vocab_size)
    assert order.dtype == segments.dtype == split.dtype == np.int32
    assert order.shape == (2 * len(ids),) and segments.shape == (ns, 4) and split.shape == (nh, 4)
    return order, segments, split


def check_table(ids, targets, vocab_size):
    """Compare the tables with a search; return the numbers of segments, split tokens
    and slots that were used.
    """
    order, segments, split = table_of(ids, targets, vocab_size)
    entries = [*ids, *targets]
    used_segments, used_split = (
        segments[segments[:, 2] > 0].tolist(),
        split[split[:, 2] > 0].tolist(),
    )
    assert not segments[len(used_segments) :].any() and not split[len(used_split) :].any()
    assert not order[sum(t >= 0 for t in entries) :].any()
    slots = []
    for token in range(vocab_size):
        expected = [e for e, t in enumerate(entries) if t == token]
        mine = [s for s in used_segments if s[0] == token]
        assert [
            e for _, start, length, _ in mine for e in order[start : start + length]
        ] == expected
        assert all(length <= SEGMENT for _, _, length, _ in mine)
        if len(expected) <= SEGMENT:
            assert [slot for *_, slot in mine] == [-1] * bool(expected) and token not in [
                h[0] for h in used_split
            ]
        else:
            (row,) = [h for h in used_split if h[0] == token]
            assert [slot for *_, slot in mine] == list(range(row[1], row[1] + row[2])) and row[
                3
            ] == 0
            slots += [slot for *_, slot in mine]
    assert slots == list(range(len(slots)))
    return len(used_segments), len(used_split), len(slots)


@st.composite
def tokens_and_vocabulary(draw):
    """Few tokens many times, or many a few times; some targets -1."""
    vocab_size, R = draw(st.integers(1, 40)), draw(st.integers(1, 500))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = (vocab_size * rng.random((2, R)) ** draw(st.sampled_from([1, 4, 20]))).astype(np.int32)
    tokens[1, rng.random(R) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = -1
    return tokens[0].tolist(), tokens[1].tolist(), vocab_size


@given(tokens_and_vocabulary())
@settings(max_examples=60, deadline=None)
def test_scatter_table_matches_a_search(case):
    used, bounds = check_table(*case), scatter_bounds(len(case[0]), case[2])
    assert all(u <= b for u, b in zip(used, bounds, strict=True))


@pytest.mark.parametrize("vocab_size", [65_536, 65_537, 131_072])
def test_scatter_table_sorts_large_vocabularies(vocab_size):
    tokens = (
        np.random.default_rng(vocab_size)
        .choice(np.r_[0:vocab_size:977, vocab_size - 1], 3000)
        .astype(np.int32)
    )
    tokens[2990:] = -1
    order, segments, _ = table_of(tokens[:1500], tokens[1500:], vocab_size)
    np.testing.assert_array_equal(
        order, np.append(np.argsort(tokens[:2990], kind="stable"), [0] * 10)
    )
    np.testing.assert_array_equal(np.repeat(segments[:, 0], segments[:, 2]), np.sort(tokens[:2990]))


@pytest.mark.parametrize(
    "count, used",
    [(1, (1, 0, 0)), (128, (1, 0, 0)), (129, (2, 1, 2)), (256, (2, 1, 2)), (257, (3, 1, 3))],
)
def test_scatter_table_splits_tokens_beyond_one_segment(count, used):
    assert check_table([3] * count, [-1] * count, vocab_size=5) == used


@given(R=st.integers(1, 700), vocab_size=st.integers(1, 1500))
@settings(max_examples=40, deadline=None)
def test_scatter_bounds_are_reached(R, vocab_size):
    """With the inputs of the proof in scatter_bounds: many tokens of the least
    count, one with the rest.
    """
    bounds, E = scatter_bounds(R, vocab_size), 2 * R

    def used(tokens, least):
        entries = np.repeat(np.arange(tokens), least).tolist()
        entries += [tokens - 1] * (E - len(entries))
        _, segments, split = table_of(entries[:R], entries[R:], vocab_size)
        return (segments[:, 2] > 0).sum(), (split[:, 2] > 0).sum(), split[:, 2].sum()

    assert used(min(vocab_size, E), 1)[0] == bounds[0]
    most = min(vocab_size, E // (SEGMENT + 1))
    assert bounds[1:] == (used(most, SEGMENT + 1)[1:] if most else (0, 0))


def test_pack_batch_fills_the_layout():
    rng, R = np.random.default_rng(0), 12
    tokens = rng.integers(0, VOCAB, (3, 5), dtype=np.int32)
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    buffer = torch.full((packed_size(R, VOCAB),), -7, dtype=torch.int32)
    assert pack_batch(buffer, ids, targets, VOCAB) is buffer
    tables = scatter_table(ids.ravel(), targets.ravel(), VOCAB)
    ns, nh, _ = scatter_bounds(R, VOCAB)
    assert buffer.numel() == 4 * R + 4 * ns + 4 * nh
    np.testing.assert_array_equal(
        buffer, np.concatenate([ids.ravel(), targets.ravel(), *(t.ravel() for t in tables)])
    )
    assert torch.equal(pack_batch(None, ids, targets, VOCAB), buffer)
    targets = np.where(targets % 2, targets, -1)
    untied = pack_batch(None, ids, targets, VOCAB, head_row=VOCAB)
    in_head = np.where(targets < 0, -1, VOCAB + targets).ravel()
    order = scatter_table(ids.ravel(), in_head, 2 * VOCAB)[0]
    assert untied[2 * R : 4 * R].tolist() == order.tolist()
