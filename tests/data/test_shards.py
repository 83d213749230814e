"""Shards have llm.c's format byte for byte, appear whole or not at all, and bad ones are refused in one line."""

import json
import os
import struct

import numpy as np
import pytest

from gpt2_triton.data import shards
from gpt2_triton.data.shards import Shard, fingerprint, open_shards, require_tokenizer, write_shard
from gpt2_triton.errors import DataError

VOCAB, SEQ_LEN = 300, 8
TOKENS = np.arange(100, dtype=np.uint16)


@pytest.fixture
def shard(tmp_path):
    write_shard(tmp_path / "train_000000.bin", TOKENS)
    return tmp_path / "train_000000.bin"


def patched(path, offset, *values):
    """Overwrite int32 values of the header."""
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{len(values)}i", data, offset, *values)
    path.write_bytes(data)


def refusal(path, vocab_size=VOCAB, seq_len=SEQ_LEN):
    with pytest.raises(DataError) as error:
        open_shards(str(path), vocab_size, seq_len)
    message = str(error.value)
    assert (
        "\n" not in message
        and str(path) in message
        and "got " in message
        and "expected " in message
        and "; " in message
    )
    return message


def test_write_shard_has_the_bytes_of_llmc(shard):
    assert shard.read_bytes() == struct.pack("<256i", 20240520, 1, 100, *[0] * 253) + struct.pack("<100H", *range(100))


def test_open_shards_returns_the_tokens(shard):
    (opened,) = open_shards(str(shard), VOCAB, SEQ_LEN)
    assert opened.tokens.dtype == np.uint16
    np.testing.assert_array_equal(opened.tokens, TOKENS)


def test_shard_with_wrong_magic_is_refused(shard):
    patched(shard, 0, 20240801)
    assert "got 20240801, expected 20240520 (llm.c's uint16 shards; nanoGPT's have no header)" in refusal(shard)


def test_shard_with_wrong_version_is_refused(shard):
    patched(shard, 4, 7)
    assert "version: got 7, expected 1" in refusal(shard)


@pytest.mark.parametrize("count", [0, -5])
def test_shard_without_tokens_is_refused(shard, count):
    patched(shard, 8, count)
    assert f"got a count of {count} in the header" in refusal(shard)


@pytest.mark.parametrize("change", [-1, -2, 1, 2])
def test_shard_of_wrong_size_is_refused(shard, change):
    data = shard.read_bytes()
    shard.write_bytes(data[:change] if change < 0 else data + bytes(change))
    message = refusal(shard)
    assert (
        f"got {1224 + change:,} bytes, expected 1,224 for the 100 tokens" in message and "prepare it again" in message
    )


@pytest.mark.parametrize("size", [0, 3, 1023])
def test_shard_without_a_whole_header_is_refused(shard, size):
    shard.write_bytes(shard.read_bytes()[:size])
    assert f"no header: got {size:,} bytes" in refusal(shard)


def test_shard_shorter_than_one_window_is_refused(shard):
    assert len(open_shards(str(shard), VOCAB, 99)) == 1
    assert "got 100 tokens, expected seq_len + 1 = 101 or more; lower train.seq_len" in refusal(shard, seq_len=100)


def test_shard_token_outside_the_vocabulary_is_located(shard, monkeypatch):
    monkeypatch.setattr(shards, "SCAN", 16)  # the token lies in the fifth piece
    tokens = TOKENS.copy()
    tokens[[70, 90]] = 299, 300
    write_shard(shard, tokens)
    assert len(open_shards(str(shard), 301, SEQ_LEN)) == 1
    message = refusal(shard, vocab_size=300)
    assert "token 90 (byte 1,204)" in message and "got 300, expected less than 300" in message
    assert struct.unpack_from("<H", shard.read_bytes(), 1204) == (300,)


def test_open_shards_refuses_a_pattern_without_match(tmp_path):
    message = refusal(tmp_path / "none_*.bin")
    assert "none_*.bin" in message and "python -m gpt2_triton prepare" in message and "data.train" in message


def test_open_shards_refuses_a_directory(tmp_path):
    assert f"got a directory, expected a path or glob of .bin files; name its files, as {tmp_path}/train" in refusal(
        tmp_path
    )


@pytest.mark.parametrize("record", [{"tokenizer": "bytes"}, {"source": "others"}, [], None])
def test_require_tokenizer_refuses_another_tokenizer(shard, record):
    if record is not None:
        shard.with_name("shards.json").write_text(json.dumps(record))
    require_tokenizer(str(shard), "bytes")
    require_tokenizer(str(shard.parent / "none_*.bin"), "gpt2")  # open_shards reports that there are none
    if record != {"tokenizer": "bytes"}:
        return require_tokenizer(str(shard.parent / "train_*.bin"), "gpt2")
    for given in (shard, shard.parent / "train_*.bin"):
        with pytest.raises(DataError, match="shards.json: made with another tokenizer: got bytes, expected gpt2; set"):
            require_tokenizer(str(given), "gpt2")


def test_open_shards_sorts_a_glob_without_hidden_files(tmp_path):
    for i in (2, 0, 1):
        write_shard(tmp_path / f"train_{i:06d}.bin", np.full(20, i, np.uint16))
    (tmp_path / ".train_000003.bin.77.tmp").write_bytes(b"unfinished")
    opened = open_shards(str(tmp_path / "*"), VOCAB, SEQ_LEN)
    assert [int(s.tokens[0]) for s in opened] == [0, 1, 2]


def test_open_shards_takes_a_path_with_glob_characters(tmp_path):
    (tmp_path / "run[1]").mkdir()
    write_shard(tmp_path / "run[1]" / "a.bin", TOKENS)
    assert len(open_shards(str(tmp_path / "run[1]" / "a.bin"), VOCAB, SEQ_LEN)) == 1


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_write_shard_failure_leaves_the_old_shard(shard, monkeypatch, call):
    def fail(*args):
        raise OSError("no space")

    before = shard.read_bytes()
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space"):
        write_shard(shard, TOKENS[:50])
    assert shard.read_bytes() == before and os.listdir(shard.parent) == [shard.name]


def test_fingerprint_covers_names_sizes_and_both_ends(tmp_path):
    tokens = (np.arange(200_000) % VOCAB).astype(np.uint16)

    def of(name="a.bin", tokens=tokens, directory="x"):
        (tmp_path / directory).mkdir(exist_ok=True)
        write_shard(tmp_path / directory / name, tokens)
        return fingerprint([Shard(tmp_path / directory / name, VOCAB, SEQ_LEN)])

    first = of()
    assert json.loads(json.dumps(first)) == first and first[0]["name"] == "a.bin" and first[0]["bytes"] == 401_024
    assert of(directory="y") == first  # data may move
    changed = [of(name="b.bin"), of(tokens=tokens[:-1])]
    for at in (0, -1):
        other = tokens.copy()
        other[at] += 1
        changed.append(of(tokens=other))
    assert first not in changed
