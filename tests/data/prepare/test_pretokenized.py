"""Shards of other projects are downloaded from the Hub, here a server in this
process, checked and recorded.
"""

import json

import pytest

from gpt2_triton.data.prepare import build, pretokenized
from gpt2_triton.data.prepare.hub import hub_errors
from gpt2_triton.errors import DataError
from tests.data.prepare.hub_server import NOBODY
from tests.support.commands import run_tool


def require_refused(message, *arguments):
    with pytest.raises(DataError, match=message):
        pretokenized.download(*arguments)


def test_pretokenized_shards_are_checked_renamed_and_recorded(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_tool("prepare pretokenized fineweb10B --shards 2") == 0
    out = tmp_path / "data" / "fineweb10B"
    names = ["shards.json", "train_000001.bin", "train_000002.bin", "val_000000.bin"]
    assert sorted(path.name for path in out.iterdir()) == names
    for name in names[1:]:
        assert (out / name).read_bytes() == hub.files[f"fineweb_{name}"]
    record = json.loads((out / "shards.json").read_text())
    assert record["source"] == {"name": "kjj0/fineweb10B-gpt2", "revision": hub.commit}
    assert record["shards"] == {
        name: build.shard_record(out / name) for name in ("val_000000.bin", *names[1:3])
    }
    assert "prepared data/fineweb10B: 3 shards, 1,500 tokens" in capsys.readouterr().out


def test_pretokenized_downloads_missing_and_damaged_shards(hub, tmp_path):
    out = pretokenized.download("fineweb10B", tmp_path / "out", 1)
    hub.gets.clear()
    pretokenized.download("fineweb10B", out, None)
    assert hub.gets == ["fineweb_train_000002.bin", "fineweb_train_000003.bin"]
    damaged = hub.files["fineweb_train_000002.bin"][:-1] + b"\0"
    (out / "train_000002.bin").write_bytes(damaged)
    hub.gets.clear()
    pretokenized.download("fineweb10B", out, 3)
    assert hub.gets == ["fineweb_train_000002.bin"]
    assert (out / "train_000002.bin").read_bytes() == hub.files["fineweb_train_000002.bin"]


def test_pretokenized_damaged_download_leaves_no_shard(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "broken", True)
    require_refused(
        "fineweb_val_000000.bin: .*; run the same command again", "fineweb10B", tmp_path / "out", 1
    )
    assert not list((tmp_path / "out").glob("*.bin"))
    monkeypatch.setattr(hub, "broken", False)
    pretokenized.download("fineweb10B", tmp_path / "out", 1)


def test_pretokenized_refuses_other_files(hub, tmp_path, monkeypatch):
    bad = b"not a shard" * 200
    monkeypatch.setitem(hub.files, "fineweb_train_000001.bin", bad)
    require_refused("not a shard: it begins with", "fineweb10B", tmp_path / "out", 1)
    assert [path.name for path in (tmp_path / "out").glob("*.bin")] == ["val_000000.bin"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "val_000000.bin").write_bytes(b"mine")
    require_refused("val_000000.bin: in use: ", "fineweb10B", tmp_path / "other", 1)
    assert (tmp_path / "other" / "val_000000.bin").read_bytes() == b"mine"
    require_refused(
        "--shards 9: kjj0/fineweb10B-gpt2 has 3; ask", "fineweb10B", tmp_path / "out", 9
    )
    require_refused("unknown data 'fineweb'; choose fineweb10B, ", "fineweb", tmp_path / "out", 9)
    hub.files.clear()
    require_refused(
        "kjj0/fineweb10B-gpt2: no files .*_train_NNNNNN.bin or", "fineweb10B", tmp_path / "out", 1
    )


def test_pretokenized_without_a_network_is_one_line(tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    assert run_tool(f"prepare pretokenized fineweb10B --out {tmp_path}/out") == 3
    err = capsys.readouterr().err
    assert (
        len(err.splitlines()) == 1
        and "kjj0/fineweb10B-gpt2: cannot read" in err
        and "copy the files" in err
    )
    assert not (tmp_path / "out").exists()


def test_a_dataset_that_needs_a_licence_says_so(hub, tmp_path):
    """The Hub's answer for a repository that it does not show."""
    require_refused(
        "a/b: cannot read: RepositoryNotFound.*; check the name; .* `hf auth login`",
        "a/b",
        tmp_path / "out",
    )
    with (
        pytest.raises(DataError, match="; accept the licence .* log in"),
        hub_errors("a", ""),
    ):
        raise ValueError("Dataset 'a' is a gated dataset on the Hub.")
