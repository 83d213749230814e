"""The order of samples depends on (seed, epoch, index) alone, and batches arrive in it."""

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.data.loader import (
    MicroBatches,
    Prefetcher,
    TrainLoader,
    ValidationLoader,
    Windows,
    permute,
)
from gpt2_triton.data.packing import pack_batch, packed_size
from gpt2_triton.errors import DataError

SEQ_LEN, VOCAB = 4, 1000


class FakeShard:
    """A shard of the tokens first, first + 1, ..."""

    vocab_size, dtype = VOCAB, np.dtype("<u2")

    def __init__(self, path, first, count):
        self.path, self.first, self.count = path, first, count

    def read(self, first, count):
        assert first + count <= self.count
        return np.arange(self.first + first, self.first + first + count, dtype=np.uint16)


def fake_shards(*lengths):
    """Shards whose tokens are all different, so that a window shows its place."""
    starts = np.cumsum([0, *lengths])
    return [FakeShard(f"shard{i}.bin", int(starts[i]), n) for i, n in enumerate(lengths)]


SHARDS = fake_shards(41, 5, 23)  # 10, 1 and 5 windows; 23 = 5 * 4 + 1 and 2 tokens of no window


def pi(n, seed, epoch):
    return permute(np.arange(n, dtype=np.uint64), np.full(n, epoch, np.uint64), n, seed)


# ---- windows and order ----


shifted_or_not = pytest.mark.parametrize("shifted", [False, True])


@shifted_or_not
def test_place_is_the_shard_and_token_of_a_sample(shifted):
    loader = TrainLoader(SHARDS, SEQ_LEN, 3, shifted)
    for sample in range(40):
        shard, _, first = loader.place(sample).partition(":")
        window = next(s for s in SHARDS if s.path == shard).read(int(first), SEQ_LEN + 1)
        assert loader.batch(sample, 1).tolist() == [window.tolist()]


def test_windows_are_seq_len_apart_within_shards():
    windows = Windows(SHARDS, SEQ_LEN)
    starts = [4 * i for i in range(10)] + [41] + [46 + 4 * i for i in range(5)]
    assert windows.n == 16
    read = windows.read(np.arange(16))
    assert read.dtype == np.int32
    np.testing.assert_array_equal(read, np.array(starts)[:, None] + np.arange(5))


@given(n=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_permute_is_a_permutation(n, seed, epoch):
    np.testing.assert_array_equal(np.sort(pi(n, seed, epoch)), np.arange(n))


def test_permute_is_frozen():
    """With another order a resumed run would draw other samples than the run it resumes."""
    assert pi(10, 42, 0).tolist() == [7, 9, 4, 6, 1, 5, 8, 2, 0, 3]
    large = permute(np.arange(3, dtype=np.uint64), np.full(3, 7, np.uint64), 9_700_000, 42)
    assert large.tolist() == [4714510, 258126, 6087276]
    assert TrainLoader(SHARDS, SEQ_LEN, 42, shifted=True).batch(14, 4)[:, 0].tolist() == [
        3,
        19,
        29,
        9,
    ]


@shifted_or_not
def test_train_loader_samples_do_not_depend_on_batch_size(shifted):
    loader = TrainLoader(SHARDS, SEQ_LEN, 1, shifted)
    whole = loader.batch(0, 80)  # five epochs
    for size in (1, 3, 16, 20):
        np.testing.assert_array_equal(
            np.concatenate([loader.batch(g, min(size, 80 - g)) for g in range(0, 80, size)]), whole
        )


def test_train_loader_epoch_has_every_window_once():
    loader = TrainLoader(SHARDS, SEQ_LEN, seed=1)
    epochs = loader.batch(0, 48)[:, 0].reshape(3, 16)
    windows = Windows(SHARDS, SEQ_LEN).read(np.arange(16))[:, 0]
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), windows)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_shifted_windows_start_at_another_phase_in_each_epoch_and_stay_in_their_shards():
    loader = TrainLoader(SHARDS, SEQ_LEN, 1, shifted=True)
    epochs = np.sort(loader.batch(0, 16 * 8)[:, 0].reshape(8, 16))
    phases = [int(starts[0]) for starts in epochs]
    assert sorted(phases[:4]) == sorted(phases[4:]) == [0, 1, 2, 3] and phases[:4] != phases[4:]
    for phase, starts in zip(phases, epochs, strict=True):
        first, third = 4 * np.arange(10) + phase, 46 + 4 * np.arange(5) + phase
        want = np.concatenate([np.minimum(first, 41 - 5), [41], np.minimum(third, 46 + 23 - 5)])
        np.testing.assert_array_equal(starts, want)


# ---- validation ----


@pytest.mark.parametrize("rows", [1, 3, 12, 50])
def test_validation_loader_tokens_do_not_depend_on_batch_size(rows):
    loader = ValidationLoader(SHARDS, SEQ_LEN, tokens=50)
    assert loader.tokens == 48
    batches = list(loader.batches(rows))
    ids, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    assert max(len(b) for b, _ in batches) <= rows and ids.dtype == targets.dtype == np.int32
    expected = Windows(SHARDS, SEQ_LEN).read(np.arange(12))
    np.testing.assert_array_equal(ids, expected[:, :-1])
    np.testing.assert_array_equal(targets, expected[:, 1:])


def test_validation_loader_of_0_tokens_takes_all():
    loader = ValidationLoader(SHARDS, SEQ_LEN, tokens=0)
    assert loader.tokens == 64 and sum(len(ids) for ids, _ in loader.batches(5)) == 16
    assert loader.shapes(5) == {(5, SEQ_LEN), (1, SEQ_LEN)}


@pytest.mark.parametrize("tokens", [3, 68])
def test_validation_loader_refuses_too_little_data(tokens):
    assert ValidationLoader(SHARDS, SEQ_LEN, 67).tokens == 64
    message = (
        "shard0.bin: 64 tokens in whole sequences, but eval.tokens, or --tokens, asks for "
        f"{tokens}; give 4 to 64, or 0 for all"
    )
    with pytest.raises(DataError, match=message):
        ValidationLoader(SHARDS, SEQ_LEN, tokens)


# ---- prefetch ----


def micro_batches(loader=None, **ranks):
    return MicroBatches(loader or TrainLoader(SHARDS, SEQ_LEN, seed=1), 3, 2, VOCAB, **ranks)


@pytest.fixture
def prefetch():
    made = []

    def make(batches=None, start=0):
        made.append(Prefetcher(batches or micro_batches(), start))
        return made[-1]

    yield make
    for prefetcher in made:
        prefetcher.close()


def expected_batch(first, count=3):
    tokens = TrainLoader(SHARDS, SEQ_LEN, seed=1).batch(first, count)
    return pack_batch(None, tokens[:, :-1], tokens[:, 1:], VOCAB)


def test_prefetcher_yields_batches_in_order(prefetch):
    batches = prefetch(start=6)
    for k in range(12):
        assert torch.equal(next(batches), expected_batch(6 + 3 * k))


def test_prefetcher_ranks_divide_the_micro_batches(prefetch):
    """Each of two ranks takes 3 + 3 of a global batch of 12: samples 0-2
    and 6-8, and 3-5 and 9-11.
    """
    for rank in (0, 1):
        ours = micro_batches(rank=rank, ranks=2)
        batches = prefetch(ours, start=24)
        for k in range(4):
            assert torch.equal(next(batches), expected_batch(24 + 6 * k + 3 * rank))
        assert [b.tolist() for b in ours.step(24)] == [
            expected_batch(24 + 6 * k + 3 * rank).tolist() for k in (0, 1)
        ]


def test_prefetcher_buffer_is_valid_until_next(prefetch):
    batches = prefetch()
    first = next(batches)
    time.sleep(0.1)  # the thread has filled all it may
    assert torch.equal(first, expected_batch(0))
    next(batches)
    deadline = time.monotonic() + 5
    while not torch.equal(first, expected_batch(9)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert torch.equal(first, expected_batch(9))  # the ring has three buffers


def test_prefetcher_raises_an_error_at_its_batch(prefetch):
    class Loader(TrainLoader):
        def batch(self, first_sample, count):
            if first_sample == 6:
                raise DataError("disk gone")
            return super().batch(first_sample, count)

    batches = prefetch(micro_batches(Loader(SHARDS, SEQ_LEN, seed=1)))
    assert torch.equal(next(batches), expected_batch(0)) and torch.equal(
        next(batches), expected_batch(3)
    )
    for _ in range(2):
        with pytest.raises(DataError, match="disk gone"):
            next(batches)


def test_prefetcher_close_stops_the_thread(prefetch):
    batches = prefetch()
    next(batches)
    start = time.monotonic()
    batches.close()
    assert time.monotonic() - start < 1 and "prefetch" not in [
        thread.name for thread in threading.enumerate()
    ]
    assert len(list(batches)) <= 2  # what was ready


@pytest.mark.gpu
def test_prefetcher_pinned_buffer_waits_for_its_copy():
    """Every copy is issued behind a slow kernel, so the host is far ahead of the device."""
    batches = Prefetcher(micro_batches(), 0, pinned=True)
    copies = [
        torch.empty(packed_size(12, VOCAB), dtype=torch.int32, device="cuda") for _ in range(10)
    ]
    for copy in copies:
        torch.cuda._sleep(20_000_000)  # 10 ms
        copy.copy_(next(batches), non_blocking=True)
    for k, copy in enumerate(copies):
        assert torch.equal(copy.cpu(), expected_batch(3 * k))
    batches.close()
