"""Mixtures: each source has its share of any samples, in an order that only numbers decide."""

import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2_triton.config.config import Config
from gpt2_triton.data.loader import TrainLoader
from gpt2_triton.data.mixture import (
    LONGEST_PERIOD,
    Mixture,
    Validation,
    names,
    parts_of_period,
    sources,
    turns,
)
from gpt2_triton.data.shards import open_shards, write_shard
from gpt2_triton.errors import ConfigError, DataError

T = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sources a to d; the tokens of a source are its letter's hundreds plus a counter."""
    root = tmp_path_factory.mktemp("sources")
    for i, (name, count) in enumerate({"a": 41, "b": 101, "c": 30, "d": 61}.items()):
        (root / name).mkdir()
        tokens = (1000 * i + np.arange(count)).astype(np.uint16)
        write_shard(root / name / "train_000000.bin", tokens)
    return root


def parts(folder, given):
    found = sources(",".join(f"{folder}/{part}" for part in given.split(",")))
    return [(source, open_shards(source.pattern, 5000, T)) for source in found]


def mixture(folder, given, seed=42, shifted=False):
    return Mixture(parts(folder, given), T, seed, shifted)


FOUR = "a/*.bin=4,b/*.bin=3,c/*.bin=2,d/*.bin=0.5"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_any_successive_samples_have_the_shares(weights):
    order = turns(tuple(weights))
    counts = np.bincount(order, minlength=len(weights))
    assert counts.tolist() == weights
    twice = np.concatenate([order, order])
    for i, weight in enumerate(weights):
        had = np.concatenate([[0], np.cumsum(twice == i)])
        ahead = had * sum(weights) - weight * np.arange(len(had))
        # the largest difference of two prefixes is that of the worst window
        assert ahead.max() - ahead.min() <= 2 * sum(weights)


def test_one_source_has_the_samples_of_today(folder):
    shards = open_shards(f"{folder}/b/*.bin", 5000, T)
    for shifted in (False, True):
        want = TrainLoader(shards, T, 42, shifted).batch(7, 200)
        assert np.array_equal(mixture(folder, "b/*.bin", shifted=shifted).batch(7, 200), want)
        assert np.array_equal(mixture(folder, "b/*.bin=3", shifted=shifted).batch(7, 200), want)


def test_samples_depend_on_their_number_and_the_seed_alone(folder):
    reader = mixture(folder, FOUR)
    whole = reader.batch(0, 300)
    cuts = [(0, 1), (1, 7), (8, 100), (108, 192)]
    assert np.array_equal(np.concatenate([reader.batch(*cut) for cut in cuts]), whole)
    assert np.array_equal(mixture(folder, FOUR).batch(0, 300), whole)
    assert not np.array_equal(mixture(folder, FOUR, seed=43).batch(0, 300), whole)
    of = whole[:, 0] // 1000
    assert np.bincount(of[:190]).tolist() == [80, 60, 40, 10]
    for i, row in enumerate(whole[:20]):
        path, _, start = reader.place(i).rpartition(":")
        assert f"/{'abcd'[of[i]]}/" in path and row[0] % 1000 == int(start)


def test_each_source_is_permuted_in_its_own_epochs(folder):
    reader = mixture(folder, FOUR)
    rows = reader.batch(0, 600)
    for i, loader in enumerate(reader.loaders):
        starts = rows[rows[:, 0] // 1000 == i][:, 0] % 1000
        n = loader.windows.n
        epochs = [starts[k : k + n] for k in range(0, len(starts) - n + 1, n)]
        assert len(epochs) > 1
        for epoch in epochs:
            assert sorted(epoch) == [T * window for window in range(n)]
        assert not np.array_equal(epochs[0], epochs[1])
    one, other = (loader.batch(0, 25) for loader in mixture(folder, "b/*=1,b/*=1").loaders)
    assert not np.array_equal(one, other)


def test_shares_with_a_long_period_are_rounded():
    shares = [Fraction(10**9 + 7, 3 * 10**9), Fraction(1, 10**7)]
    shares.append(1 - sum(shares))
    found = parts_of_period(shares)
    assert sum(found) == LONGEST_PERIOD and min(found) == 1
    assert abs(found[0] / LONGEST_PERIOD - shares[0]) < 2 / LONGEST_PERIOD
    assert parts_of_period([Fraction(3, 4), Fraction(1, 4)]) == [3, 1]


def test_a_mixture_is_read_from_yaml_and_from_the_command_line(tmp_path):
    rows = [{"path": "a/*.bin", "weight": 3}, {"path": "b/*.bin", "weight": 1.5}]
    config = Config.load({"data": {"train": rows}}, {"data.val": "a/v.bin=2,b/v.bin=1"})
    assert config.data.train == "a/*.bin=3,b/*.bin=1.5"
    assert [source.share for source in sources(config.data.train)] == [
        Fraction(2, 3),
        Fraction(1, 3),
    ]
    for text in ("data/date=2024/train_*.bin", "a/*.bin", "a,b/*.bin"):
        assert sources(text) == [(text, 1)]
    (tmp_path / "lr=x").touch()
    assert sources(str(tmp_path / "lr=x")) == [(str(tmp_path / "lr=x"), 1)]
    for text in ("a/*.bin=1,", "a/*.bin = 1", " a/*.bin =1 , "):
        assert sources(text) == [("a/*.bin", 1)]
    assert names(sources("x/a/*.bin=1,y/a/*.bin=1,b/*.bin=1")) == ["a_1", "a_2", "b"]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("a/*.bin=0,b/*.bin=1", r"a/\*.bin: weight '0' is no number above 0; write "),
        ("a/*.bin=-1,b/*.bin=1", "weight '-1' is no number above 0"),
        ("a/*.bin=x,b/*.bin=1", "weight 'x' is no number above 0; write "),
        ("a/*.bin=nan,b/*.bin=1", "weight 'nan' is no number"),
        ("a/*.bin=,b/*.bin=1", "weight '' is no number"),
        ("a/*.bin,b/*.bin=1", r"a/\*.bin: no weight in .*; write PATH=WEIGHT for each source"),
    ],
)
def test_wrong_weights_are_one_line(given, told):
    with pytest.raises(ConfigError, match=told) as error:
        sources(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], "String should have at least 1 character, got "),
        (["a"], "'a' must be {path: PATTERN, weight: NUMBER}, got "),
        (
            [{"path": "a", "weight": 3}, {"path": "b", "wieght": 1}],
            "{'path': 'b', 'wieght': 1} must be {path: PATTERN, weight: NUMBER}, got ",
        ),
        ([{"path": "a,b", "weight": 1}], "no path of a mixture may have a comma, as a,b does"),
    ],
)
def test_a_wrong_list_is_one_line_that_shows_the_wrong_row(rows, told):
    with pytest.raises(ConfigError, match=f"^config: data.train: {re.escape(told)}") as error:
        Config.load({"data": {"train": rows}})
    assert "\n" not in str(error.value)


def test_an_empty_source_is_one_line(folder):
    with pytest.raises(DataError, match="none/\\*.bin: no such shards; "):
        parts(folder, "a/*.bin=1,none/*.bin=1")


def test_several_patterns_without_weights_are_told_so(folder):
    with pytest.raises(DataError, match="no such shards; .*each needs its weight, as A=3,B=1"):
        parts(folder, "a/*.bin,b/*.bin")


def test_validation_has_the_shares_of_its_tokens(folder):
    found = Validation(parts(folder, "a/*.bin=3,b/*.bin=1"), T, 32)
    assert [loader.tokens for loader in found.loaders] == [24, 8]
    assert found.mean([2.0, 4.0]) == 2.5 and found.names == ["a", "b"]
    every = Validation(parts(folder, "a/*.bin=3,b/*.bin=1"), T, 0)
    assert [loader.tokens for loader in every.loaders] == [40, 100]
    small = Validation(parts(folder, "a/*.bin=30,b/*.bin=1"), T, 100)
    assert [loader.tokens for loader in small.loaders] == [40, 4]  # a has no more
    assert [line.split(":")[0] for line in found.describe()] == ["data.val a", "data.val b"]


def test_fingerprints_of_a_mixture_have_its_shares(folder):
    one = parts(folder, "a/*.bin")
    Mixture(one, T, 42)
    assert "share" not in one[0][1][0].fingerprint
    two = mixture(folder, "a/*.bin=3,b/*.bin=1")
    assert [shard.fingerprint["share"] for shard in two.shards] == ["3/4", "1/4"]
