"""A dataset becomes llm.c's shards; one that was killed anywhere and resumed has
the bytes of an unbroken one.

`datasets` streams them from a folder, as from the Hub; the Hub is a server in this process.
"""

import multiprocessing
import os
import random
import shutil
import signal
import time
from types import SimpleNamespace

import datasets
import numpy as np
import pytest

from gpt2_triton.data.prepare import build, dataset
from gpt2_triton.data.prepare.build import PROGRESS
from gpt2_triton.data.prepare.dataset import Dataset, prepare_dataset
from gpt2_triton.data.shards import map_tokens, open_shards
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError
from tests.data.prepare.hub_server import NOBODY
from tests.data.prepare.test_text import Stop, checked_record, contents, stop_at
from tests.support.commands import run_tool
from tests.support.json_files import read_json

# several documents a batch, several batches a shard, and neither ends with the other
SHARD, BATCH = 2200, 700


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(build, "BATCH_CHARS", BATCH)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three parquet files of several row groups: 300 rows, one of them
    longer than a shard, one empty.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, path = random.Random(0), tmp_path_factory.mktemp("source")
    texts = [
        "".join(draw.choices("etaoin \N{GREEK SMALL LETTER PI}", k=draw.randint(1, 150)))
        for _ in range(300)
    ]
    texts[40], texts[41] = "long " * 900, ""
    for i in range(3):
        rows = [{"id": 7, "text": text} for text in texts[100 * i : 100 * i + 100]]
        pq.write_table(pa.Table.from_pylist(rows), path / f"{i}.parquet", row_group_size=30)
    return SimpleNamespace(
        path=path, texts=texts, source=Dataset("kjj0/fineweb10B-gpt2", None, "c" * 40)
    )


def prepare(folder, out, **options):
    """Prepare the dataset of a folder as if it were on the Hub."""
    options = {"shard_tokens": SHARD} | options
    if not hasattr(folder, "path"):
        return prepare_dataset(folder.source, out, "bytes", **options)
    load = datasets.load_dataset
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            datasets, "load_dataset", lambda *_, revision, **given: load(str(folder.path), **given)
        )
        return prepare_dataset(folder.source, out, "bytes", **options)


@pytest.fixture(scope="module")
def unbroken(folder, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "BATCH_CHARS", BATCH)
        return contents(prepare(folder, tmp_path_factory.mktemp("unbroken") / "out"))


def llmc_tokens(texts):
    """Tokens of documents as llm.c's tokenize makes them: for each the
    end-of-text token, then the text.
    """
    return np.frombuffer(b"".join(b"\0" + text.encode() for text in texts), np.uint8)


def tokens_of(directory):
    return np.concatenate(
        [map_tokens(path) for path in sorted(directory.glob("*.bin"), key=lambda p: p.name[-10:])]
    )


# ---- what is written ----


def test_dataset_shards_hold_the_documents_after_end_of_text(folder, tmp_path):
    out = prepare(folder, tmp_path / "out")
    np.testing.assert_array_equal(tokens_of(out), llmc_tokens(filter(None, folder.texts)))
    names = sorted(path.name for path in out.glob("*.bin"))
    assert (
        names == [*(f"train_{i:06d}.bin" for i in range(1, len(names))), "val_000000.bin"]
        and len(names) > 8
    )
    sizes = [shard.count for shard in open_shards(str(out / "*.bin"), 256, 4)]
    *full, last, end, val = sizes
    assert set(full) == {SHARD} == {val} and SHARD // 2 <= end <= last
    record = checked_record(out)
    assert record["source"] == folder.source._asdict() and folder.source.field == "text"
    assert record["tokenizer"] == "bytes"
    assert sorted(record["shards"]) == names and not (out / PROGRESS).exists()


@pytest.mark.parametrize(("tokens", "val"), [(9000, 900), (60_000, SHARD)])
def test_dataset_stops_after_tokens_with_a_tenth_for_validation(folder, tmp_path, tokens, val):
    out = prepare(folder, tmp_path / "out", tokens=tokens)
    expected = llmc_tokens(filter(None, folder.texts))[:tokens]
    np.testing.assert_array_equal(tokens_of(out), expected)
    assert len(map_tokens(out / "val_000000.bin")) == val


def test_dataset_stopped_at_any_shard_resumes_to_the_same_bytes(
    folder, tmp_path, unbroken, monkeypatch
):
    """Before and after each write of progress.json; without it, a shard
    is left that no record has.
    """
    out = tmp_path / "out"
    for count in range(1, len(unbroken) - 1):
        for after in (False, True):
            with monkeypatch.context() as patch, pytest.raises(Stop):
                stop_at(patch, count, after)
                prepare(folder, out)
    assert contents(prepare(folder, out, workers=2)) == unbroken


def _prepare_and_die(folder, out, shards, workers, pids):
    """Killed while a shard is half on disk, after `shards` whole ones."""
    build.BATCH_CHARS, write = BATCH, build.write_shard

    def write_shard(path, tokens):
        if path.name[-10:-4] == f"{shards:06d}":
            (path.parent / f".{path.name}.{os.getpid()}.tmp").write_bytes(b"half")
            pids.put([p.pid for p in multiprocessing.active_children()])
            pids.close()
            pids.join_thread()
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, tokens)

    build.write_shard = write_shard
    prepare(folder, out, workers=workers)


@pytest.mark.slow
def test_dataset_killed_resumes_and_its_workers_end(folder, tmp_path, unbroken):
    spawn, out = multiprocessing.get_context("spawn"), tmp_path / "out"
    pids = spawn.Queue()
    process = spawn.Process(target=_prepare_and_die, args=(folder, out, 4, 2, pids))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left, deadline = pids.get(timeout=5), time.monotonic() + 5
    while any(_alive(pid) for pid in left):
        assert time.monotonic() < deadline, "a worker outlives the process it works for"
        time.sleep(0.02)
    assert len(left) == 2
    assert sorted(n for n in contents(out) if n.endswith("bin")) == [
        f"train_{i:06d}.bin" for i in (1, 2, 3)
    ] + ["val_000000.bin"]
    assert contents(prepare(folder, out)) == unbroken


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _stop_after(folder, out, shards, monkeypatch, **options):
    write = build.write_shard

    def write_shard(path, tokens):
        if path.name[-10:-4] == f"{shards:06d}":
            raise Stop
        write(path, tokens)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(build, "write_shard", write_shard)
        prepare(folder, out, **options)


def test_dataset_resumed_tokenises_at_most_one_batch_twice(folder, tmp_path, monkeypatch, capsys):
    _stop_after(folder, tmp_path / "out", 8, monkeypatch)
    seen = []

    def tokenize(tokenizer, special, batch):
        seen.append(tokens := once(tokenizer, special, batch))
        return tokens

    once = build.tokenize
    monkeypatch.setattr(build, "tokenize", tokenize)
    prepare(folder, tmp_path / "out")
    rest = len(llmc_tokens(filter(None, folder.texts))) - 8 * SHARD
    assert rest < sum(map(len, seen)) < rest + 2 * BATCH
    assert f"resuming after 8 finished shards, {8 * SHARD:,} tokens\n" in capsys.readouterr().out


def test_dataset_resumes_with_batches_of_another_size(folder, tmp_path, unbroken, monkeypatch):
    """As when a newer version of this package resumes, and tokens to skip fill several batches."""
    _stop_after(folder, tmp_path / "out", 3, monkeypatch)
    monkeypatch.setattr(build, "BATCH_CHARS", 100)
    assert contents(prepare(folder, tmp_path / "out")) == unbroken


def test_dataset_damaged_shard_and_later_ones_are_made_again(
    folder, tmp_path, unbroken, monkeypatch, capsys
):
    out = tmp_path / "out"
    _stop_after(folder, out, 6, monkeypatch)
    data = bytearray((out / "train_000003.bin").read_bytes())
    data[1500] ^= 1
    (out / "train_000003.bin").write_bytes(data)
    assert contents(prepare(folder, out)) == unbroken
    printed = capsys.readouterr().out
    assert (
        "train_000003.bin is damaged: preparing again from there\nresuming after 3 finished"
        in printed
    )


def test_dataset_refuses_a_directory_with_shards_but_not_with_other_files(
    folder, tmp_path, unbroken
):
    """As of `prepare fineweb --out out > out/prepare.log`."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "prepare.log").write_text("log")
    assert contents(prepare(folder, out)) == unbroken | {"prepare.log": b"log"}
    (out / "shards.json").unlink()
    with pytest.raises(DataError, match="out: in use: .* choose another directory"):
        prepare(folder, out)


# ---- mistakes ----


def test_dataset_mistakes_are_one_line(folder, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    monkeypatch.chdir(tmp_path)
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, revision, **given: load(str(folder.path), **given)
    )
    here = "prepare fineweb --out out --tokenizer bytes --workers 1 --source"
    known = f"kjj0/fineweb10B-gpt2 --revision {'c' * 40}"
    for words, code, message in (
        (f"{folder.path}", 3, "or use `prepare text` for its files"),
        (
            f"{known} --field body",
            3,
            "no field 'body', it has id, text; name the field that holds the text",
        ),
        ("no/where", 3, "no/where: cannot read: ConnectError"),
        ("wrong", 3, "; check the name in --source and the network, or use `prepare text`"),
        (
            known,
            3,
            "too little text: the validation shard takes all 29,452 "
            "tokens; give that number as --tokens",
        ),
        (f"{known} --tokens 29452", 0, None),  # as that message says
        (f"{known} --tokens 9", 2, '"9" for --tokens. Must be >= 10'),
        (f"{known} --shard_tokens 0", 2, '"0" for --shard_tokens. Must be >= 1'),
    ):
        assert run_tool(f"{here} {words}") == code, words
        err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert err == [] if message is None else len(err) == 1 and message in err[0], (words, err)


def test_dataset_refuses_a_full_disk_before_reading(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=19_999))
    with pytest.raises(DataError, match="not enough room: 20,000 bytes needed, 19,999 free"):
        prepare(folder, tmp_path / "out", tokens=10_000)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=20_000))
    prepare(folder, tmp_path / "out", tokens=10_000)


@pytest.mark.parametrize("command", ["fineweb", "fineweb-edu"])
def test_dataset_commands_name_their_dataset(command, monkeypatch):
    calls = []
    monkeypatch.setattr(dataset, "prepare_dataset", lambda *arguments: calls.append(arguments))
    words = f"prepare {command} --version sample-100BT --tokens 1000000 --workers 3"
    assert run_tool(words) == 0
    assert run_tool(f"prepare {command}") == 0
    (source, out, *rest), (default, default_out, *_) = calls
    assert (
        source == Dataset(f"HuggingFaceFW/{command}", "sample-100BT")
        and default.version == "sample-10BT"
    )
    assert str(out) == f"data/{command}-sample-100BT" and rest == [
        "gpt2",
        1_000_000,
        3,
        100_000_000,
        False,
        False,
    ]
    assert str(default_out) == f"data/{command}-sample-10BT"


def test_dataset_of_the_hub_keeps_its_first_commit(hub, folder, tmp_path, monkeypatch):
    """The Hub is asked for its newest commit once; a commit that is given is not asked for."""
    load, opened = datasets.load_dataset, []

    def load_dataset(name, version, **options):
        opened.append((name, version, options.pop("revision")))
        return load(str(folder.path), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    on_hub = SimpleNamespace(source=Dataset("kjj0/fineweb10B-gpt2", "sample-10BT"))
    _stop_after(on_hub, tmp_path / "out", 3, monkeypatch)
    first = hub.commit
    monkeypatch.setattr(hub, "commit", "d" * 40)
    prepare(on_hub, tmp_path / "out")
    prepare(SimpleNamespace(source=on_hub.source._replace(revision="branch")), tmp_path / "branch")
    prepare(SimpleNamespace(source=on_hub.source._replace(revision="e" * 40)), tmp_path / "given")
    assert [commit for _, _, commit in opened] == [first, first, "b" * 40, "e" * 40]
    assert opened[0][:2] == on_hub.source[:2]
    record = read_json(tmp_path / "out" / "shards.json")
    assert record["source"] == {**on_hub.source._asdict(), "revision": first}


def test_dataset_of_the_hub_leaves_out_rows_without_text_with_a_count(
    hub, tmp_path, monkeypatch, capsys
):
    """A nested field; the counts survive stops, and a row with a separator is never cut by one."""
    rows = [
        {"doc": {"text": f"row {i}<|endoftext|>more" if i % 3 else None}, "id": i}
        for i in range(300)
    ]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(3)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    on_hub = SimpleNamespace(
        source=Dataset("kjj0/fineweb10B-gpt2", "sample-10BT", field="doc.text")
    )
    for count in range(1, 6):
        _stop_after(on_hub, tmp_path / "out", count, monkeypatch, shard_tokens=400)
    out = prepare(on_hub, tmp_path / "out", shard_tokens=400)
    np.testing.assert_array_equal(
        tokens_of(out), llmc_tokens(t for i in range(300) if i % 3 for t in (f"row {i}", "more"))
    )
    ends = "special tokens: <|endoftext|> 200\n"
    what = (
        "left out: rows without text in the field doc.text: "
        "100, first kjj0/fineweb10B-gpt2, row 1: "
    )
    assert ends + what + '{"doc": {"text": null}}\n' in capsys.readouterr().out


def test_dataset_of_the_hub_is_tokenised_as_llmc_does(hub, tmp_path, monkeypatch):
    texts = [f"row {i}\r\n<|endoftext|>\0more" for i in range(50)]
    stream = datasets.Dataset.from_list([{"text": text} for text in texts]).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    on_hub = SimpleNamespace(source=Dataset("kjj0/fineweb10B-gpt2", "sample-10BT"))
    out = prepare_dataset(
        on_hub.source, tmp_path / "out", "gpt2", shard_tokens=200, endoftext=False
    )
    gpt2 = get_tokenizer("gpt2")
    np.testing.assert_array_equal(
        tokens_of(out), [t for text in texts for t in (gpt2.eot, *gpt2.encode(text))]
    )
