"""benchmarks/losses/corpus.py: texts are distinct, a package is in one split only,
and parts keep every byte.
"""

import gzip
import json
import tarfile

import numpy as np
import pytest

from benchmarks.losses import corpus, prose
from benchmarks.losses.prose import Source
from gpt2_triton.data.shards import open_shards
from gpt2_triton.errors import DataError


def tree(root):
    for i in range(60):
        folder = root / f"package{i}"
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(f"# {i}\n" + "x = 1\n" * 200)
        (folder / "same.py").write_text("# a copy\n" + "y = 2\n" * 400)
        (folder / "short.py").write_text("z\n")
        (folder / "a.bin").write_text("binary" * 300)


def texts_of(out):
    splits = {}
    for split in ("train", "val"):
        [shard] = open_shards(str(out / f"{split}_*.bin"), 256, 16)
        tokens = np.fromfile(shard.path, "<u2")[512:]
        splits[split] = bytes(tokens[tokens < 256].astype(np.uint8)).decode()
    return splits


def test_texts_are_distinct_long_enough_and_of_known_kinds(tmp_path):
    tree(tmp_path / "site")
    found = corpus.distinct(corpus.code([tmp_path / "site"]))
    assert len(found) == 61 and len({text for _, text in found}) == 61
    assert found == corpus.distinct(corpus.code([tmp_path / "site"]))
    assert (
        sum(len(text) for _, text in corpus.distinct(corpus.code([tmp_path / "site"]), 5000)) < 7000
    )


def test_a_package_is_in_one_split_and_validation_is_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(corpus, "LARGEST_VAL", 0.1)
    monkeypatch.setattr(corpus, "roots", lambda: [tmp_path / "site"])
    tree(tmp_path / "site")
    assert corpus.main([str(tmp_path / "out"), "--tokenizer", "bytes"]) == 0
    files, packages = capsys.readouterr().out.splitlines()[-2:]
    assert files.startswith("61 texts, ")
    chosen = packages.removeprefix("packages of the validation shards: ").split(", ")
    splits = texts_of(tmp_path / "out")
    for i in range(60):
        held = f"package{i}" in chosen
        assert (f"# {i}\n" in splits["val"]) == held and (f"# {i}\n" in splits["train"]) == (
            not held
        )
    assert 0.01 < len(splits["val"]) / sum(map(len, splits.values())) < 0.1


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Made-up sources in place of the real ones: books, and a package that a client fetches."""
    for i in range(60):
        for year in (1929, 1930):
            path = tmp_path / "books" / f"Author {i}" / f"{year}.md"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                f"# Title: T\n\n## Year: {year}\n\n-------\n\nAuthor {i} in {year}. "
                + "Words. " * 100
            )
    monkeypatch.setattr(corpus, "LARGEST_VAL", 0.1)
    client = tmp_path / "client"
    client.write_text(f"#!/bin/sh\ncp {tmp_path}/$1 .\n")
    client.chmod(0o755)
    monkeypatch.setitem(prose.COMMANDS, "pip", (f"{client} NAME", "tar xzf FILE"))
    books = Source("git", "books", "free", "*/*.md", prose.book)
    monkeypatch.setattr(
        prose, "SOURCES", (books, Source("pip", "a.tgz", "MIT", "a/*.gz", prose.unwrapped))
    )
    return [str(tmp_path / "out"), "--tokenizer", "bytes", "--prose", str(tmp_path / "books")]


def package(tmp_path):
    (tmp_path / "dictionary.gz").write_bytes(
        gzip.compress(b"A word\n   and its\n   meaning. " * 50)
    )
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        archive.add(tmp_path / "dictionary.gz", "a/dictionary.gz")


def test_prose_goes_on_after_the_last_source_that_was_read(words, tmp_path, capsys):
    assert corpus.main(words) == DataError.exit_code
    error = capsys.readouterr().err
    assert error.startswith(f"error: `{tmp_path}/client a.tgz`: exit code 1: cp: ")
    assert "the same command again" in error
    package(tmp_path)
    (tmp_path / "books").rename(tmp_path / "away")
    assert corpus.main(words) == 0
    splits = texts_of(tmp_path / "out")
    assert "A word and its meaning." in splits["train"] and "in 1930" not in "".join(
        splits.values()
    )
    assert all(
        (f"Author {i} in" in splits["val"]) != (f"Author {i} in" in splits["train"])
        for i in range(60)
    )
    rows = [
        row.split("\t")[:4] for row in (tmp_path / "out" / "sources.tsv").read_text().splitlines()
    ]
    assert rows[1:] == [
        ["books", "free", str(tmp_path / "books"), "120"],
        ["a.tgz", "MIT", "a.tgz", "1"],
    ]
    assert not (tmp_path / "out.sources").exists()


def test_parts_keep_every_byte_and_a_damaged_part_is_named(words, tmp_path, capsys):
    package(tmp_path)
    parts, copy = tmp_path / "parts", tmp_path / "copy"
    assert corpus.main([*words, "--parts", str(parts)]) == 0
    assert corpus.main([str(copy), "--join", str(parts)]) == 0
    names = {"shards.json", "sources.tsv", "train_000000.bin", "val_000000.bin"}
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        name: (tmp_path / "out" / name).read_bytes() for name in names
    }
    (parts / "val_000000.bin.xz").write_bytes((parts / "train_000000.bin.xz").read_bytes())
    assert corpus.main([str(copy), "--join", str(parts)]) == DataError.exit_code
    (parts / "train_000000.bin.xz").unlink()
    assert corpus.main([str(copy), "--join", str(parts)]) == DataError.exit_code
    damaged, missing = capsys.readouterr().err.splitlines()
    assert "val_000000.bin.xz: sha256 " in damaged and "copy this part again" in damaged
    assert "train_000000.bin.xz: " in missing and "No such file" in missing


@pytest.mark.parametrize(
    ("read", "source", "text"),
    [
        (
            prose.of_html,
            "<head><title>T</title></head><h1>A</h1><nav>x</nav>\n<p>B &amp;\n <b>C</b></p>",
            "A\n\nB & C",
        ),
        (prose.of_pod, "=head1 NAME\n\nThe B<bold> one.\n", "NAME\n\nThe bold one.\n"),
        (
            prose.of_json,
            json.dumps({"a": [{"text": "One."}, {"b": {"text": "Two."}, "id": "x"}]}),
            "One.\nTwo.",
        ),
        (
            prose.glosses,
            "  1 note\n00041614 04 n 01 big_dog 0 001 @ 007 n 0000 | an animal  \n",
            "big dog: an animal",
        ),
        (prose.quotations, "One.\n%\nTwo.\n", "One.\n\nTwo.\n"),
        (prose.book, "## Year: 400 BC\n\n-------\nText.", "Text."),
    ],
)
def test_prose_is_read_as_text(read, source, text):
    assert read(source) == text
