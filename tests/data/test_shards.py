"""Shards have llm.c's format byte for byte, appear whole or not at all, and bad
ones are refused in one line.
"""

import hashlib
import json
import os
import struct

import numpy as np
import pytest

from gpt2_triton.data.loader import Windows
from gpt2_triton.data.shards import Shard, map_tokens, open_shards, require_tokenizer, write_shard
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
    assert "\n" not in message and str(path) in message and "; " in message
    return message


def test_write_shard_has_the_bytes_of_llmc(shard):
    assert shard.read_bytes() == struct.pack("<256i", 20240520, 1, 100, *[0] * 253) + struct.pack(
        "<100H", *range(100)
    )


def test_write_shard_has_the_bytes_of_llmc_for_llama_3(tmp_path):
    tokens = np.array([128_000, 65_536, 65_535, 1] * 25, np.uint32)
    write_shard(tmp_path / "a.bin", tokens)
    expected = struct.pack("<256i", 20240801, 7, 100, *[0] * 253) + struct.pack("<100I", *tokens)
    assert (tmp_path / "a.bin").read_bytes() == expected
    [opened] = open_shards(str(tmp_path / "a.bin"), 128_256, SEQ_LEN)
    assert opened.count == 100 and opened.fingerprint["bytes"] == 1424
    np.testing.assert_array_equal(map_tokens(tmp_path / "a.bin"), tokens)
    np.testing.assert_array_equal(Windows([opened], SEQ_LEN).read(np.array([11]))[0], tokens[88:97])


def test_open_shards_returns_the_tokens(shard):
    (opened,) = open_shards(str(shard), VOCAB, SEQ_LEN)
    assert opened.count == len(TOKENS)
    for first, length in ((0, 100), (7, 50), (99, 1)):
        np.testing.assert_array_equal(opened.read(first, length), TOKENS[first : first + length])


def test_shard_of_another_format_is_refused(shard):
    patched(shard, 0, 20240801, 1)
    assert "20240801 1; llm.c's shards begin with 20240520 1 or" in refusal(shard)


def test_shard_of_another_width_is_refused(shard):
    assert "uint16, and a vocabulary of 128,256 has uint32; " in refusal(shard, 128_256)
    write_shard(shard, TOKENS.astype(np.uint32))
    assert "uint32, and a vocabulary of 50,257 has uint16; " in refusal(shard, 50_257)


def test_shard_of_wrong_size_is_refused(shard):
    patched(shard, 8, 101)
    message = refusal(shard)
    assert "1,224 bytes, and 101 tokens by its header" in message and "prepare it again" in message


def test_shard_without_a_whole_header_is_refused(shard):
    shard.write_bytes(shard.read_bytes()[:1023])
    assert "no header in 1,023 bytes" in refusal(shard)


def test_shard_shorter_than_one_window_is_refused(shard):
    assert len(open_shards(str(shard), VOCAB, 99)) == 1
    assert "100 tokens, fewer than seq_len + 1 = 101; " in refusal(shard, seq_len=100)


@pytest.mark.parametrize(
    ("place", "rows", "dtype"), [(50, 300, "<u2"), (10**5, 300, "<u2"), (50, 128_256, "<u4")]
)
def test_shard_token_outside_the_vocabulary_is_located(shard, place, rows, dtype):
    """In a sampled block at the start of a run, elsewhere in the batch that reads it."""
    tokens = np.zeros(200_000, dtype)
    tokens[[place, place + 20]] = rows - 1, rows
    write_shard(shard, tokens)
    assert (
        Windows(open_shards(str(shard), rows + 1, SEQ_LEN), SEQ_LEN).read(np.arange(20_000)).max()
        == rows
    )
    [opened] = open_shards(str(shard), rows, SEQ_LEN)
    windows, size = Windows([opened], SEQ_LEN), tokens.itemsize
    with pytest.raises(DataError) as error:
        opened.fingerprint if place == 50 else windows.read(
            np.arange(place // SEQ_LEN - 2, place // SEQ_LEN + 5)
        )
    at = place + 20
    found = (
        f"token {at:,} (byte {1024 + size * at:,}) outside the vocabulary: "
        f"{rows}, must be less than {rows:,}; "
    )
    assert found in str(error.value)


def test_open_shards_refuses_a_pattern_without_match(tmp_path):
    message = refusal(tmp_path / "none_*.bin")
    assert (
        "none_*.bin" in message
        and "python -m gpt2_triton prepare" in message
        and "correct the pattern" in message
    )


def test_open_shards_refuses_a_directory(tmp_path):
    assert f"a directory; name the shards in it, as {tmp_path}/train" in refusal(tmp_path)


@pytest.mark.parametrize("record", [{"tokenizer": "bytes"}, {"source": "others"}, [], None])
def test_require_tokenizer_refuses_another_tokenizer(shard, record):
    if record is not None:
        shard.with_name("shards.json").write_text(json.dumps(record))
    require_tokenizer(str(shard), "bytes")
    # open_shards reports that there are none
    require_tokenizer(str(shard.parent / "none_*.bin"), "gpt2")
    if record != {"tokenizer": "bytes"}:
        return require_tokenizer(str(shard.parent / "train_*.bin"), "gpt2")
    for given in (shard, shard.parent / "train_*.bin"):
        with pytest.raises(DataError, match="shards.json: .* bytes, not gpt2; prepare"):
            require_tokenizer(str(given), "gpt2")


def test_open_shards_sorts_an_expanded_glob_without_hidden_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for i in (2, 0, 1):
        write_shard(tmp_path / f"train_{i:06d}.bin", np.full(20, i, np.uint16))
    (tmp_path / ".train_000003.bin.77.tmp").write_bytes(b"unfinished")
    for pattern in ("~/*", "$HOME/*"):
        assert [int(map_tokens(s.path)[0]) for s in open_shards(pattern, VOCAB, SEQ_LEN)] == [
            0,
            1,
            2,
        ]


# ---- fingerprints ----


@pytest.mark.parametrize("count", [20_000, 200_000])
def test_fingerprint_covers_names_sizes_and_the_whole_file(tmp_path, count):
    tokens = (np.arange(count) % VOCAB).astype(np.uint16)

    def of(name="a.bin", tokens=tokens, directory="x"):
        (tmp_path / directory).mkdir(exist_ok=True)
        write_shard(tmp_path / directory / name, tokens)
        return Shard(tmp_path / directory / name, VOCAB, SEQ_LEN).fingerprint

    first = of()
    assert (
        json.loads(json.dumps(first)) == first
        and first["name"] == "a.bin"
        and first["bytes"] == 1024 + 2 * count
    )
    assert of(directory="y") == first  # data may move, and a copy has another time
    changed = [of(name="b.bin"), of(tokens=tokens[:-1])]
    # any sixteenth of the file, among them the first and the last tokens
    for start in range(0, count, count // 16):
        other = tokens.copy()
        other[start : start + count // 16] = 7
        changed.append(of(tokens=other))
    for at in (0, -1):
        other = tokens.copy()
        other[at] += 1
        changed.append(of(tokens=other))
    assert first not in changed


@pytest.mark.parametrize("count", [50_000, 100_000])
def test_fingerprint_of_ends_is_that_of_version_0_1(tmp_path, count):
    """A small shard has the same fingerprint in all versions."""
    write_shard(tmp_path / "a.bin", np.arange(count).astype(np.uint16))
    data = (tmp_path / "a.bin").read_bytes()
    shard = Shard(tmp_path / "a.bin", 1 << 16, SEQ_LEN)
    found = shard.fingerprint if count == 50_000 else shard.fingerprint_of_ends()
    assert found["sha256"] == hashlib.sha256(data[: 1024 + 65536] + data[-65536:]).hexdigest()


# ---- files that change while they are read ----


def cut(path):
    os.truncate(path, 1024 + 100)


def overwrite(path):
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(bytes(200))


CHANGES = {
    cut: "changed while the run reads it, at byte 1,114",
    overwrite: "changed while the run reads it, at byte 1,114",
    os.unlink: "cannot read: No such file or directory",
}


@pytest.mark.parametrize("change", CHANGES)
def test_shard_that_changes_while_it_is_read_is_a_data_error(shard, change):
    os.utime(shard, ns=(1, 10**9))  # the clock of a file system can be coarse
    [opened] = open_shards(str(shard), VOCAB, SEQ_LEN)
    assert opened.fingerprint and len(opened.read(45, 9)) == 9
    change(shard)
    with pytest.raises(DataError, match=f"{shard}: {CHANGES[change]}; restore it and resume$"):
        opened.read(45, 9)


def test_shard_with_a_new_time_and_the_same_content_is_read(shard):
    [opened] = open_shards(str(shard), VOCAB, SEQ_LEN)
    assert opened.fingerprint
    for time in (1, 2):
        os.utime(shard, ns=(time, time))
        np.testing.assert_array_equal(opened.read(45, 9), TOKENS[45:54])


def test_a_directory_among_the_shards_is_refused(shard):
    shard.with_name("train_000001.bin").mkdir()
    with pytest.raises(DataError, match="train_000001.bin: cannot read: Is a directory"):
        open_shards(str(shard.with_name("*.bin")), VOCAB, SEQ_LEN)
