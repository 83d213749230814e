"""benchmarks/losses/corpus.py: texts are distinct, and a package is in one split only."""

import sys

import numpy as np

from benchmarks.losses import corpus
from gpt2_triton.data.shards import open_shards


def tree(root, packages=60):
    for i in range(packages):
        folder = root / f"package{i}"
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(f"# {i}\n" + "x = 1\n" * 200)
        (folder / "same.py").write_text("# a copy\n" + "y = 2\n" * 400)
        (folder / "short.py").write_text("z\n")
        (folder / "a.bin").write_text("binary" * 300)


def test_texts_are_distinct_long_enough_and_of_known_kinds(tmp_path):
    tree(tmp_path / "site")
    found = corpus.documents([tmp_path / "site"], 1e9)
    assert len(found) == 61 and len({text for _, text in found}) == 61
    assert found == corpus.documents([tmp_path / "site"], 1e9)


def test_a_package_is_in_one_split_and_validation_is_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "LARGEST_VAL", 0.1)
    monkeypatch.setattr(corpus, "roots", lambda: [tmp_path / "site"])
    monkeypatch.setattr(sys, "argv", ["corpus", str(tmp_path / "out"), "--tokenizer", "bytes"])
    tree(tmp_path / "site")
    assert corpus.main() == 0
    files, packages = capsys.readouterr().out.splitlines()[-2:]
    assert files.startswith("61 files, ")
    chosen = packages.removeprefix("packages of the validation shards: ").split(", ")
    splits = {}
    for split in ("train", "val"):
        [shard] = open_shards(str(tmp_path / "out" / f"{split}_*.bin"), 256, 16)
        tokens = np.fromfile(shard.path, "<u2")[512:]
        splits[split] = bytes(tokens[tokens < 256].astype(np.uint8)).decode()
    for i in range(60):
        held = f"package{i}" in chosen
        assert (f"# {i}\n" in splits["val"]) == held and (f"# {i}\n" in splits["train"]) == (not held)
    assert 0.01 < len(splits["val"]) / sum(map(len, splits.values())) < 0.1
