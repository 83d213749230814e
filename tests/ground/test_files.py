"""A crash leaves the old file or the new one."""

import errno
import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from gpt2_triton.files import (
    FileError,
    free_space,
    new_directory,
    read_json,
    remove,
    sha256,
    write_atomic,
    write_json,
)
from tests.support.checkpoints import record_syncs


def test_write_atomic_replaces_a_file(tmp_path, monkeypatch):
    events = record_syncs(monkeypatch)
    for parts in ((b"old",), (b"ne", memoryview(b"w"))):
        write_atomic(tmp_path / "x", *parts)
        assert (tmp_path / "x").read_bytes() == b"".join(parts) and os.listdir(tmp_path) == ["x"]
    assert events[2::3] == [str(tmp_path)] * 2  # after the file and the rename
    assert sha256(tmp_path / "x") == hashlib.sha256(b"new").hexdigest()


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_write_atomic_failure_keeps_the_old_file(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError("no space")

    write_atomic(tmp_path / "x", b"old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


def test_a_full_disks_error_names_what_was_written(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError) as of_file:
        write_atomic(tmp_path / "x", b"new")
    with pytest.raises(OSError) as of_directory, new_directory(tmp_path / "new"):
        pass
    found = [error.value.filename for error in (of_file, of_directory)]
    assert found == [str(tmp_path / "x"), str(tmp_path / "new")]


def test_an_error_of_the_hidden_file_names_what_was_to_be_written(tmp_path):
    with pytest.raises(OSError) as of_file:
        write_atomic(tmp_path / "none" / "x", b"new")
    (tmp_path / "file").touch()
    with pytest.raises(OSError) as of_directory, new_directory(tmp_path / "file" / "new"):
        pass
    found = [error.value.filename for error in (of_file, of_directory)]
    assert found == [str(tmp_path / "none" / "x"), str(tmp_path / "file" / "new")]


@pytest.mark.parametrize("library", ["safetensors", "tokenizers"])
def test_an_error_of_a_library_in_rust_names_what_was_written(tmp_path, library):
    out = tmp_path / "out"
    with pytest.raises(OSError) as refused, new_directory(out) as directory:
        nowhere = directory / "no" / "file"
        if library == "safetensors":
            save_file({"x": np.zeros(4)}, nowhere)
        else:
            Tokenizer(models.BPE()).save(str(nowhere))
    assert (refused.value.errno, refused.value.filename) == (errno.ENOENT, str(out))


def test_new_directory_appears_at_the_end(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    events = record_syncs(monkeypatch)
    for name in ("new", "empty"):
        with new_directory(tmp_path / name) as directory:
            (directory / "x").write_bytes(b"1")
            assert not (tmp_path / name / "x").exists()
        assert (tmp_path / name / "x").read_bytes() == b"1"
        assert events[-4:] == [f"{directory}/x", str(directory), "rename", str(tmp_path)]


def test_new_directory_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_directory(tmp_path / "new") as directory:
        (directory / "x").write_bytes(b"1")
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


def test_new_directory_refuses_a_taken_place(tmp_path, monkeypatch):
    (tmp_path / "x").touch()
    volume = tmp_path / "volume"  # of a container: no rename replaces it
    volume.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == volume)
    for taken in (tmp_path, tmp_path / "x", volume):
        with pytest.raises(FileError, match=f"{taken} is there already"), new_directory(taken):
            pass


def test_json_is_written_in_unicode(tmp_path):
    content = {"file": "données.txt", "other": "\udcff"}  # a path may hold other bytes
    write_json(tmp_path / "x", content)
    assert "données.txt" in (tmp_path / "x").read_text(encoding="utf-8")
    assert read_json(tmp_path / "x") == content


def test_free_space_of_a_directory_to_be(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=7 if path == tmp_path else 0)
    )
    assert free_space(tmp_path / "a" / "b") == 7


def test_remove_takes_files_links_and_directories(tmp_path):
    (tmp_path / "directory" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "directory")
    for name in ("link", "directory", "missing"):
        assert name == "missing" or (tmp_path / "directory").exists()
        remove(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
