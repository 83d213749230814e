"""The order of samples depends on (seed, epoch, index) alone; the scatter tables say what a brute-force search says."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data.loader import Prefetcher, TrainLoader, ValidationLoader, Windows, permute
from gpt2_triton.data.packing import SEGMENT, pack_batch, packed_size, scatter_bounds, scatter_table
from gpt2_triton.errors import DataError

SEQ_LEN, VOCAB = 4, 1000


def fake_shards(*lengths):
    """Shards whose tokens are all different, so a window says where it came from."""
    ends = np.cumsum(lengths)
    return [
        SimpleNamespace(path=f"shard{i}.bin", tokens=np.arange(end - n, end, dtype=np.uint16))
        for i, (n, end) in enumerate(zip(lengths, ends, strict=True))
    ]


SHARDS = fake_shards(41, 5, 23)  # 10, 1 and 5 windows; 23 = 5 * 4 + 1 and 2 tokens of no window


def pi(n, seed, epoch):
    return permute(np.arange(n, dtype=np.uint64), np.full(n, epoch, np.uint64), n, seed)


# ---- windows and order ----


def test_windows_are_seq_len_apart_and_never_cross_a_shard():
    windows = Windows(SHARDS, SEQ_LEN)
    starts = [4 * i for i in range(10)] + [41] + [46 + 4 * i for i in range(5)]
    assert windows.n == 16
    read = windows.read(np.arange(16))
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read, np.array(starts)[:, None] + np.arange(5))


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_the_order_is_a_permutation(n, seed, epoch):
    np.testing.assert_array_equal(np.sort(pi(n, seed, epoch)), np.arange(n))


def test_the_order_stays_what_it_was():
    """Frozen: another order would make a resumed run draw other samples than the run it resumes."""
    assert pi(10, 42, 0).tolist() == [7, 9, 4, 6, 1, 5, 8, 2, 0, 3]
    large = permute(np.arange(3, dtype=np.uint64), np.full(3, 7, np.uint64), 9_700_000, 42)
    assert large.tolist() == [4714510, 258126, 6087276]


def test_the_order_differs_by_epoch_and_seed_and_looks_random():
    orders = [pi(1000, seed, epoch) for seed in (0, 1) for epoch in (0, 1)] + [np.arange(1000)]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).sum() < 12  # of two random orders about 1 (Poisson) agrees; 12 or more: p < 1e-9
            assert abs(np.corrcoef(a, b)[0, 1]) < 0.2  # 6 sigma
    counts = np.bincount([pi(8, 3, epoch)[5] for epoch in range(4000)], minlength=8)
    assert abs(counts - 500).max() < 125  # 6 sigma, sigma = sqrt(4000 * 7) / 8 = 21


def test_samples_do_not_depend_on_the_batch_size():
    loader = TrainLoader(SHARDS, SEQ_LEN, seed=1)
    whole = loader.batch(0, 80)  # five epochs
    for size in (1, 3, 16, 20):
        np.testing.assert_array_equal(
            np.concatenate([loader.batch(g, min(size, 80 - g)) for g in range(0, 80, size)]), whole
        )


def test_every_epoch_holds_every_window_once_in_another_order():
    loader = TrainLoader(SHARDS, SEQ_LEN, seed=1)
    epochs = loader.batch(0, 48)[:, 0].reshape(3, 16)
    windows = Windows(SHARDS, SEQ_LEN).read(np.arange(16))[:, 0]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), windows)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_one_integer_resumes():
    continued = TrainLoader(SHARDS, SEQ_LEN, seed=1).batch(0, 40)[23:]
    np.testing.assert_array_equal(TrainLoader(SHARDS, SEQ_LEN, seed=1).batch(23, 17), continued)


# ---- validation ----


@pytest.mark.parametrize("rows", [1, 3, 12, 50])
def test_validation_covers_the_same_tokens_whatever_the_batch(rows):
    loader = ValidationLoader(SHARDS, SEQ_LEN, tokens=50)
    assert loader.tokens == 48
    batches = list(loader.batches(rows))
    ids, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert max(len(b) for b, _ in batches) <= rows and ids.dtype == targets.dtype == np.int32
    expected = Windows(SHARDS, SEQ_LEN).read(np.arange(12))
    np.testing.assert_array_equal(ids, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])


def test_validation_of_0_tokens_takes_every_window():
    loader = ValidationLoader(SHARDS, SEQ_LEN, tokens=0)
    assert loader.tokens == 64 and sum(len(ids) for ids, _ in loader.batches(5)) == 16
    assert loader.shapes(5) == {(5, SEQ_LEN), (1, SEQ_LEN)}


@pytest.mark.parametrize("tokens", [3, 68])
def test_validation_data_that_does_not_suffice_is_refused(tokens):
    assert ValidationLoader(SHARDS, SEQ_LEN, 67).tokens == 64
    message = f"shard0.bin: eval.tokens .*got {tokens}, .*64 .all 16 windows of 3 shard.*set eval.tokens"
    with pytest.raises(DataError, match=message):
        ValidationLoader(SHARDS, SEQ_LEN, tokens)


# ---- scatter tables ----


def table_of(ids, targets, vocab_size):
    order, segments, hot = scatter_table(np.array(ids, np.int32), np.array(targets, np.int32), vocab_size)
    ns, nh, _ = scatter_bounds(len(ids), vocab_size)
    assert order.dtype == segments.dtype == hot.dtype == np.int32
    assert order.shape == (2 * len(ids),) and segments.shape == (ns, 4) and hot.shape == (nh, 4)
    return order, segments, hot


def check_table(ids, targets, vocab_size):
    """Against a search of the entries of each token; returns how many segments, hot tokens and slots were used."""
    order, segments, hot = table_of(ids, targets, vocab_size)
    entries = [*ids, *targets]
    used_segments, used_hot = segments[segments[:, 2] > 0].tolist(), hot[hot[:, 2] > 0].tolist()
    assert not segments[len(used_segments) :].any() and not hot[len(used_hot) :].any()
    assert not order[sum(t >= 0 for t in entries) :].any()
    slots = []
    for token in range(vocab_size):
        expected = [e for e, t in enumerate(entries) if t == token]
        mine = [s for s in used_segments if s[0] == token]
        assert [e for _, start, length, _ in mine for e in order[start : start + length]] == expected
        assert all(length <= SEGMENT for _, _, length, _ in mine)
        if len(expected) <= SEGMENT:
            assert [slot for *_, slot in mine] == [-1] * bool(expected) and token not in [h[0] for h in used_hot]
        else:
            (row,) = [h for h in used_hot if h[0] == token]
            assert [slot for *_, slot in mine] == list(range(row[1], row[1] + row[2])) and row[3] == 0
            slots += [slot for *_, slot in mine]
    assert slots == list(range(len(slots)))
    return len(used_segments), len(used_hot), len(slots)


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
def test_the_table_is_what_a_search_finds(case):
    used, bounds = check_table(*case), scatter_bounds(len(case[0]), case[2])
    assert all(u <= b for u, b in zip(used, bounds, strict=True))


@pytest.mark.parametrize(
    "count, used", [(1, (1, 0, 0)), (128, (1, 0, 0)), (129, (2, 1, 2)), (256, (2, 1, 2)), (257, (3, 1, 3))]
)
def test_a_token_is_hot_beyond_one_segment(count, used):
    assert check_table([3] * count, [-1] * count, vocab_size=5) == used


@given(R=st.integers(1, 700), vocab_size=st.integers(1, 1500))
@settings(max_examples=40, deadline=None)
def test_the_bounds_are_reached(R, vocab_size):
    """The inputs that the proof in scatter_bounds names: many tokens of the least count, one with the rest."""
    bounds, E = scatter_bounds(R, vocab_size), 2 * R

    def used(tokens, least):
        entries = np.repeat(np.arange(tokens), least).tolist()
        entries += [tokens - 1] * (E - len(entries))
        _, segments, hot = table_of(entries[:R], entries[R:], vocab_size)
        return (segments[:, 2] > 0).sum(), (hot[:, 2] > 0).sum(), hot[:, 2].sum()

    assert used(min(vocab_size, E), 1)[0] == bounds[0]
    hot = min(vocab_size, E // (SEGMENT + 1))
    assert bounds[1:] == (used(hot, SEGMENT + 1)[1:] if hot else (0, 0))


def test_pack_batch_writes_every_element_in_the_layout_of_the_tables():
    rng, R = np.random.default_rng(0), 12
    tokens = rng.integers(0, VOCAB, (3, 5), dtype=np.int32)
    ids, targets = tokens[:, :-1], tokens[:, 1:]
    buffer = torch.full((packed_size(R, VOCAB),), -7, dtype=torch.int32)
    assert pack_batch(buffer, ids, targets, VOCAB) is buffer
    tables = scatter_table(ids.ravel(), targets.ravel(), VOCAB)
    ns, nh, _ = scatter_bounds(R, VOCAB)
    assert buffer.numel() == 4 * R + 4 * ns + 4 * nh
    np.testing.assert_array_equal(buffer, np.concatenate([ids.ravel(), targets.ravel(), *(t.ravel() for t in tables)]))
    assert torch.equal(pack_batch(None, ids, targets, VOCAB), buffer)


# ---- prefetch ----


@pytest.fixture
def prefetch():
    made = []

    def make(loader=None, **kw):
        loader = loader or TrainLoader(SHARDS, SEQ_LEN, seed=1)
        made.append(Prefetcher(loader, **{"micro_batch": 3, "accumulation": 2, "vocab_size": VOCAB} | kw))
        return made[-1]

    yield make
    for prefetcher in made:
        prefetcher.close()


def expected_batch(first, count=3):
    tokens = TrainLoader(SHARDS, SEQ_LEN, seed=1).batch(first, count)
    return pack_batch(None, tokens[:, :-1], tokens[:, 1:], VOCAB)


@pytest.mark.parametrize("depth", [3, 5])
def test_batches_come_in_order_from_any_sample(prefetch, depth):
    batches = prefetch(first_sample=6, depth=depth)
    for k in range(12):
        assert torch.equal(next(batches), expected_batch(6 + 3 * k))


def test_ranks_take_the_micro_batches_of_one_rank_in_turn(prefetch):
    """Of the global batch of 12 each of two ranks has 3 + 3: samples 0-2 and 6-8, and 3-5 and 9-11."""
    for rank in (0, 1):
        batches = prefetch(first_sample=24, rank=rank, ranks=2)
        for k in range(4):
            assert torch.equal(next(batches), expected_batch(24 + 6 * k + 3 * rank))
        assert [b.tolist() for b in batches.step(24)] == [
            expected_batch(24 + 6 * k + 3 * rank).tolist() for k in (0, 1)
        ]


def test_a_buffer_is_left_alone_until_the_next_batch_is_asked_for(prefetch):
    batches = prefetch()
    first = next(batches)
    time.sleep(0.1)  # the thread has filled all it may
    assert torch.equal(first, expected_batch(0))
    next(batches)
    deadline = time.monotonic() + 5
    while not torch.equal(first, expected_batch(9)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.equal(first, expected_batch(9))  # the ring has three buffers


def test_an_error_in_the_thread_comes_when_its_batch_is_due(prefetch):
    class Loader(TrainLoader):
        def batch(self, first_sample, count):
            if first_sample == 6:
                raise DataError("disk gone")
            return super().batch(first_sample, count)

    batches = prefetch(Loader(SHARDS, SEQ_LEN, seed=1))
    assert torch.equal(next(batches), expected_batch(0)) and torch.equal(next(batches), expected_batch(3))
    for _ in range(2):
        with pytest.raises(DataError, match="disk gone"):
            next(batches)


def test_close_stops_the_thread_at_once_and_ends_the_iteration(prefetch):
    batches = prefetch()
    next(batches)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 1 and "prefetch" not in [thread.name for thread in threading.enumerate()]
    assert len(list(batches)) <= 2  # what was ready


@pytest.mark.gpu
def test_a_pinned_buffer_waits_for_its_copy():
    """Every copy is issued behind a slow kernel, so the host is far ahead of the device."""
    batches = Prefetcher(TrainLoader(SHARDS, SEQ_LEN, seed=1), 3, 2, VOCAB, pinned=True)
    copies = [torch.empty(packed_size(12, VOCAB), dtype=torch.int32, device="cuda") for _ in range(10)]
    for copy in copies:
        torch.cuda._sleep(20_000_000)  # 10 ms
        copy.copy_(next(batches), non_blocking=True)
    for k, copy in enumerate(copies):
        assert torch.equal(copy.cpu(), expected_batch(3 * k))
    batches.close()
