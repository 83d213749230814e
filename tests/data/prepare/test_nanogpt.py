"""nanoGPT's train.bin and val.bin become shards of the same tokens; other files are refused."""

import json
import pickle

import numpy as np
import pytest

from gpt2_triton.data.prepare import build
from gpt2_triton.data.prepare.nanogpt import prepare_nanogpt
from gpt2_triton.data.shards import map_tokens, open_shards
from gpt2_triton.data.tokenizer import GPT2Tokenizer, get_tokenizer
from gpt2_triton.errors import DataError
from tests.support.commands import run_tool


@pytest.fixture
def folder(tmp_path, monkeypatch):
    # the class: its merges may need a network
    monkeypatch.setattr(build, "get_tokenizer", lambda name: GPT2Tokenizer)
    for split, count in (("train", 2500), ("val", 300)):
        np.random.default_rng(count).integers(0, 50257, count).astype("<u2").tofile(
            tmp_path / f"{split}.bin"
        )
    return tmp_path


def test_nanogpts_tokens_are_kept_whether_stopped_or_not(folder, monkeypatch, capsys):
    monkeypatch.setattr(build, "SHARD_TOKENS", 1000)
    monkeypatch.setattr(build, "BATCH_CHARS", 300)
    out, write = folder / "out", build.write_shard

    for last in ("train_000001.bin", "train_000002.bin"):

        def stop(path, tokens, last=last):
            if path.name == last:
                raise KeyboardInterrupt
            write(path, tokens)

        monkeypatch.setattr(build, "write_shard", stop)
        with pytest.raises(KeyboardInterrupt):
            prepare_nanogpt(folder, out)
        assert "stopped: the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(build, "write_shard", write)
    assert run_tool(f"prepare nanogpt {folder} --out {out}") == 0
    said = (
        f"resuming after 2 finished shards, 2,000 tokens\nprepared {out}: "
        "4 shards, 2,500 tokens to train on, 300 "
    )
    printed = capsys.readouterr().out
    assert printed.startswith(said)
    assert f"--data.tokenizer gpt2 --data.train '{out}/train_*.bin'" in printed
    for split, shards in (("train", 3), ("val", 1)):
        paths = sorted(out.glob(f"{split}_*.bin"))
        tokens = np.concatenate([map_tokens(path) for path in paths])
        assert len(paths) == shards and tokens.tobytes() == (folder / f"{split}.bin").read_bytes()
    assert json.loads((out / "shards.json").read_text())["tokenizer"] == "gpt2"
    assert prepare_nanogpt(folder, out) == out and "is prepared already" in capsys.readouterr().out


def test_other_files_than_nanogpts_are_refused(folder):
    def refusal():
        with pytest.raises(DataError) as error:
            prepare_nanogpt(folder, folder / "out")
        return str(error.value)

    with pytest.raises(
        DataError, match="nanoGPT's have no header; make shards .*`prepare nanogpt DIR`$"
    ):
        open_shards(str(folder / "train.bin"), 50257, 8)
    np.array([3, 50257], "<u2").tofile(folder / "val.bin")
    assert "val.bin: a token 50257 after the first 0, but gpt2 has 50,257; " in refusal()
    np.array([3, 4, 5], "<u4").tofile(folder / "val.bin")
    assert "val.bin: every second token is 0, " in refusal()
    (folder / "val.bin").write_bytes(b"odd")
    assert "val.bin: 3 bytes, expected 2 for each token" in refusal()
    (folder / "val.bin").unlink()
    assert "val.bin: cannot read: No such file" in refusal()
    (folder / "meta.pkl").touch()
    assert "no meta.pkl of nanoGPT: Ran out of input" in refusal()


def test_characters_keep_the_tokens_of_nanogpt_and_their_names(folder, monkeypatch):
    monkeypatch.undo()
    characters = "\n aé🙂"
    (folder / "meta.pkl").write_bytes(pickle.dumps({"itos": dict(enumerate(characters))}))
    for split in ("train", "val"):
        np.arange(5, dtype="<u2").tofile(folder / f"{split}.bin")
    prepare_nanogpt(folder, folder / "out")
    assert map_tokens(folder / "out" / "train_000000.bin").tolist() == [*range(5)]
    assert get_tokenizer(str(folder / "out")).decode(range(5)) == characters
