"""Measures what takes text: tokenizers, sources of a mixture, and a tokenizer trained on a text.

    python -m benchmarks.speed.text encode [TOKENIZER ...]     # MB/s in one and in eight processes
    python -m benchmarks.speed.text batches                    # ms to read a batch
    python -m benchmarks.speed.text sources                    # steps with one source and eight
    python -m benchmarks.speed.text greek greek.txt            # writes 5 MB of Greek, by apt-get
    python -m benchmarks.speed.text own greek.txt              # nats per byte by tokenizer

Each but `greek` fills a section of the record, and names the tokenizers beside its machine.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.losses.prose import Source, fetch, of_html
from benchmarks.record import CURRENT, ROOT, Target
from benchmarks.runs import finish
from benchmarks.speed.sizes import VOCAB, T, work_of
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.data.mixture import Mixture
from gpt2_triton.data.mixture import sources as given_as
from gpt2_triton.data.shards import Shard, open_shards, write_shard
from gpt2_triton.data.tokenizer import GPT2Tokenizer, get_tokenizer, label
from gpt2_triton.data.tokenizer_file import FileTokenizer
from gpt2_triton.training.metrics import METRICS, read_metrics

PIECE, PIECES = 1_000_000, 4  # characters of a piece of text, and pieces of a process
PROCESSES = 8
SOURCES, SHARD_TOKENS = 8, 2_000_000
STEPS, UNCOUNTED = 50, 10  # of a run with sources
READ = 20  # batches
RUNS = 2  # of each source and tokenizer
EARLY = 15  # seconds of training steps, after which losses are compared too
GREEK = Source("apt", "libreoffice-help-el", "MPL-2.0", "**/text/**/*.html", of_html)
GREEK_BYTES = 5_000_000
QUIET = ("--sample.every", "0", "--eval.tokens", "0", "--eval.hellaswag_every", "0")

app = make_app("python -m benchmarks.speed.text", "Tokenizers, sources and one's own tokenizer.")


PACKAGES = ("tiktoken", "tokenizers", "triton")


# ---- encode ----


def encoded(name: str, piece: str) -> int:
    return len(get_tokenizer(name).encode(piece))


def alone(name: str, pieces: list[str], threads: int) -> float:
    """Return MB/s of tiktoken or tokenizers, in threads of this process."""
    tokenizer = get_tokenizer(name)
    if isinstance(tokenizer, FileTokenizer):
        whole = tokenizer._tokenizer
        return mb_per_s(lambda: whole.encode_batch(pieces, add_special_tokens=False), pieces)
    assert isinstance(tokenizer, GPT2Tokenizer)
    tiktoken = tokenizer._encoding
    return mb_per_s(lambda: tiktoken.encode_ordinary_batch(pieces, num_threads=threads), pieces)


def mb_per_s(encode: Callable[[], Any], pieces: list[str]) -> float:
    """Return the best speed of three calls, after one that loads the tokenizer."""
    encode()
    best = min(timeit.repeat(encode, number=1, repeat=3))
    return sum(len(piece.encode()) for piece in pieces) / best / 1e6


def pieces_of_text(count: int) -> list[str]:
    """Return pieces of this checkout's pages and code, which repeat."""
    files = sorted([*ROOT.glob("docs/*/*.md"), *ROOT.glob("gpt2_triton/**/*.py")])
    text = itertools.cycle("".join(file.read_text(encoding="utf-8") for file in files))
    return ["".join(itertools.islice(text, PIECE)) for _ in range(count)]


def speeds(name: str, count: int) -> dict[str, float]:
    """Return MB/s of this package in `count` processes, and of the library in as many threads."""
    pieces = pieces_of_text(PIECES * count)
    with processes(count, TOKENIZERS_PARALLELISM="false") as pool:
        names = [name] * len(pieces)
        ours = mb_per_s(lambda: [*pool.map(encoded, names, pieces)], pieces)
    with processes(1, TOKENIZERS_PARALLELISM="true", RAYON_NUM_THREADS=str(count)) as pool:
        return dict(ours=ours, library=pool.submit(alone, name, pieces, count).result())


def processes(count: int, **env: str) -> ProcessPoolExecutor:
    os.environ |= env
    return ProcessPoolExecutor(count, get_context("spawn"))


@app.command
def encode(*tokenizers: str, target: Target = CURRENT) -> None:
    """Measure MB/s of tokenizers beside the libraries tiktoken and tokenizers alone.

    Args:
        tokenizers: Names as data.tokenizer has them; by default gpt2 and llama3.
    """
    figures: dict[str, float] = {}
    for name, count in itertools.product(tokenizers or ("gpt2", "llama3"), (1, PROCESSES)):
        for who, speed in speeds(name, count).items():
            figures[f"{Path(name).name}.{who}_{count}"] = speed
        print(name, count, figures, flush=True)
        target.write("encode", figures, *PACKAGES)


# ---- training ----


def trained(folder: Path, *words: object) -> list[dict[str, Any]]:
    """Run `gpt2_triton train` in a folder, and return the records of the run."""
    begin = time.monotonic()
    run_dir = tempfile.mkdtemp(dir=folder)
    finish("-m", "gpt2_triton", "train", *words, "--run_dir", run_dir, folder=folder)
    print(*words, f"{time.monotonic() - begin:.0f} s", flush=True)
    return read_metrics(Path(run_dir) / METRICS)


def milliseconds(records: Iterable[dict[str, Any]]) -> float:
    """Return the median time of a step."""
    times = [record["ms"] for record in records if record.get("ms")]
    return statistics.median(times[UNCOUNTED:])


def add(figures: dict[str, Any], key: str, value: float) -> None:
    """Add a run's value to the list KEY_each, and write the mean of the list."""
    each = figures.setdefault(f"{key}_each", [])
    each.append(round(value, 4))
    figures[key] = round(statistics.fmean(each), 4)


def random_sources(folder: Path) -> dict[str, str]:
    """Write shards of random tokens; return them as one source and as eight."""
    draw = np.random.default_rng(0)
    for i in range(SOURCES):
        (folder / f"s{i}").mkdir()
        tokens = draw.integers(0, VOCAB, SHARD_TOKENS).astype(np.uint16)
        write_shard(folder / f"s{i}" / "t.bin", tokens)
    mixed = ",".join(f"{folder}/s{i}/t.bin={i + 1}" for i in range(SOURCES))
    return {"one": f"{folder}/s*/t.bin", "eight": mixed}


@app.command
def batches(*, target: Target = CURRENT) -> None:
    """Measure the CPU time in which a batch of 64 x 1,024 tokens is read, by number of sources."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        for arm, given in random_sources(Path(name)).items():
            parts = [(source, open_shards(source.pattern, VOCAB, T)) for source in given_as(given)]
            mixture = Mixture(parts, T, seed=42)
            times = timeit.repeat(
                lambda: [mixture.batch(64 * k, 64) for k in range(READ)],  # noqa: B023
                timer=time.process_time, number=1, repeat=5,
            )  # fmt: skip
            figures[f"{arm}.ms"] = round(1e3 * min(times) / READ, 4)
    target.write("batches", figures, *PACKAGES)


@app.command
def sources(*, target: Target = CURRENT) -> None:
    """Measure steps of 124M with one source and with eight, in turns, on random tokens."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arms = random_sources(folder)
        options = ("--train.steps", STEPS, "--eval.every", 0, "--checkpoint.every", 0, *QUIET)
        turns = itertools.product(range(RUNS), ("bf16", "fp8"), arms.items())
        for _, precision, (arm, pattern) in turns:
            level = "none" if precision == "fp8" else None
            config = work_of("d12", None, level, precision).config()
            (folder / "config.yaml").write_text(config.to_yaml())
            data = ("--data.train", pattern, "--data.val", f"{folder}/s0/t.bin")
            ms = milliseconds(trained(folder, folder / "config.yaml", *data, *options))
            add(figures, f"{precision}.{arm}.ms", ms)
            target.write("sources", figures, *PACKAGES)


@app.command
def greek(out: Path) -> None:
    """Write Greek, LibreOffice's help, from its Debian package."""
    texts = [text for _, text in fetch(GREEK, "")["texts"]]
    whole = "<|endoftext|>".join(texts).encode()[:GREEK_BYTES]
    out.write_bytes(whole.decode(errors="ignore").encode())


@app.command
def own(text: Path, *, vocab: str = "2048,8192", target: Target = CURRENT) -> None:
    """Train `own` on a text through bytes, GPT-2's tokens and tokenizers trained on the text.

    All runs validate on the last tenth of the text, and take what `own` chooses for the tokenizer.

    Args:
        text: A text file.
        vocab: Comma-separated sizes of the tokenizers that are trained.
    """
    figures: dict[str, Any] = {"compared_after_s": EARLY}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = str(text.resolve())
        for size in vocab.split(","):
            words = ("tokenizer", whole, "--vocab", size, "--out", f"own_{size}")
            finish("-m", "gpt2_triton", *words, folder=folder)
        arms = [*(f"{folder}/own_{size}" for size in vocab.split(",")), "gpt2", "bytes"]
        for seed, arm in itertools.product(range(RUNS), arms):
            options = ("--data.tokenizer", arm, "--train.seed", seed, *QUIET)
            records = trained(folder, "own", "--data", whole, *options)
            for figure, value in outcome(records, folder, arm).items():
                add(figures, f"{Path(arm).name}.{figure}", value)
            target.write("own_tokenizer", figures, *PACKAGES)


def outcome(records: list[dict[str, Any]], folder: Path, tokenizer: str) -> dict[str, float]:
    """Return the lowest validation losses in nats per byte, of the run and of its first seconds."""
    [path] = folder.glob(f"data/*_{label(tokenizer)}_*/val_000000.bin")
    coder = get_tokenizer(tokenizer)
    shard = Shard(path, coder.vocab_size, seq_len=1)
    tokens = shard.read(0, shard.count).tolist()
    bytes_per_token = len(coder.decode(tokens).encode()) / len(tokens)
    of_a_step = milliseconds(records) / 1e3
    losses = {
        record["step"] * of_a_step: record["val_loss"] / bytes_per_token
        for record in records
        if "val_loss" in record
    }
    return dict(
        bytes_per_token=bytes_per_token,
        early_nats=min(loss for second, loss in losses.items() if second <= EARLY),
        nats=min(losses.values()),
        seconds=min(losses, key=losses.__getitem__),
        ms=1e3 * of_a_step,
    )


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
