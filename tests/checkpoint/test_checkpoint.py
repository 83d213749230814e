"""The promises of checkpoints: whole or absent after a kill at any line; one flipped bit noticed; nothing evil run."""

import errno
import json
import os
import pickle
import random
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt2_triton.checkpoint import checkpoint, checks, resume
from gpt2_triton.checkpoint.checkpoint import MANIFEST, STATE, tensors_name
from gpt2_triton.config.config import options
from gpt2_triton.errors import CheckpointError

TENSORS = tensors_name(0)  # those of a run on one GPU
FILES = (TENSORS, STATE, MANIFEST)
STEP_10, STEP_20, STEP_30 = (f"step_{step:08d}" for step in (10, 20, 30))


def example(step, n=33):
    """A checkpoint's tensors in the dtypes of a run, different at every step."""
    generator = torch.Generator().manual_seed(step)
    bits = torch.randint(-(2**15), 2**15, (n,), generator=generator, dtype=torch.int16)
    moments = torch.randn(n, generator=generator)
    finite = bits & ~(1 << 14)  # no exponent is all ones
    return {"params": finite.view(torch.bfloat16), "m": moments, "v": moments**2, "low": bits.flip(0).contiguous()}


def content(tensors):
    return {name: (t.dtype, t.shape, bytes(t.view(torch.uint8).numpy())) for name, t in tensors.items()}


def write(directory, step, keep=0, major=0):
    return checkpoint.save(directory, step, example(step), {"step": step, "data": None}, keep, major)


def reseal(step_dir):
    """A manifest that agrees with the files, as someone who means harm would write it."""
    (step_dir / MANIFEST).write_text(json.dumps({n: checkpoint._fingerprint(step_dir / n) for n in (TENSORS, STATE)}))


def names(directory):
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def newest(tmp_path):
    """The newest checkpoint, of step 20, of a run that has another of step 10."""
    write(tmp_path / "checkpoints", 10)
    return write(tmp_path / "checkpoints", 20)


def assert_refused(newest, what, capsys):
    """By its path it is an error; for its run, one line of warning, and the previous checkpoint is used."""
    with pytest.raises(CheckpointError) as error:
        checkpoint.find(newest)
    assert f"{newest}: {what}" in str(error.value)
    assert checkpoint.find(newest.parents[1]) == checkpoint.latest(newest.parents[1]) == newest.with_name(STEP_10)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and all(f"{newest} is damaged and passed over: {what}" in line for line in warnings)


# ---- writing ----


def test_what_is_loaded_is_what_was_saved_and_is_the_readers_own(newest):
    state, tensors = checkpoint.load(newest)
    assert newest.name == STEP_20 and names(newest) == sorted(FILES)
    assert state == {"format": checkpoint.FORMAT, "step": 20, "data": None}
    assert content(tensors) == content(example(20))
    for tensor in tensors.values():  # mapped from the file, but privately
        tensor.view(torch.uint8).fill_(255)
    assert checkpoint.verify(newest) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_step_is_written_again_only_if_it_is_damaged(newest, damaged):
    if damaged:
        (newest / STATE).write_text("{}")
    before = (newest / TENSORS).stat().st_ino
    assert write(newest.parent, 20) == newest
    assert ((newest / TENSORS).stat().st_ino != before) == damaged
    assert checkpoint.verify(newest) == [] and names(newest.parent) == [STEP_10, STEP_20]


@pytest.mark.parametrize("call", ["rename", "fsync"])
def test_a_save_that_fails_leaves_nothing_and_the_older_ones_intact(newest, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.EIO, "injected")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="injected"):
        write(newest.parent, 30, keep=1)
    assert names(newest.parent) == [STEP_10, STEP_20] and checkpoint.find(newest.parent) == newest


def test_everything_is_synced_before_the_rename_and_the_directories_after_it(tmp_path, monkeypatch):
    """The order that a power cut needs: contents, then names, then the place."""
    events, fsync, rename, run = [], os.fsync, os.rename, tmp_path
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("rename"), rename(a, b)))
    write(run / "checkpoints", 10)
    temporary = f"{run}/checkpoints/.{STEP_10}.tmp-{os.getpid()}"
    assert sorted(events[:3]) == sorted(f"{temporary}/{name}" for name in FILES)
    assert events[3:] == [temporary, "rename", f"{run}/checkpoints", str(run)]


def killed_at_line(n, directory):
    """In a child, save step 30 with kill -9 at the n-th line, those of rmtree too; False if there are fewer."""
    child = os.fork()
    if child == 0:
        lines = 0

        def trace(frame, event, _):
            nonlocal lines
            if frame.f_code.co_filename not in (checkpoint.__file__, shutil.__file__):
                return None
            lines += event == "line"
            if lines == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        write(directory, 30, keep=1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


def kill_at_every_line(directory):
    """Print what a run killed at each line of a save, that would replace steps 10 and 20 by 30, resumes from."""
    n, found = 1, None
    write(directory, 10)
    write(directory, 20)
    while killed_at_line(n, directory):
        assert all(checkpoint.verify(path) == [] for path in directory.glob("step_*")), n
        found = checkpoint.find(directory)
        print(found.name)
        if found.name == STEP_30:
            checkpoint._discard(found)
            write(directory, 10)
            write(directory, 20)
        n += 1


def test_a_run_killed_at_any_line_of_a_save_has_the_old_checkpoint_or_the_new_one(tmp_path):
    """In a process of its own: it forks, and this one may have threads."""
    code = "import sys, pathlib, tests.checkpoint.test_checkpoint as t; t.kill_at_every_line(pathlib.Path(sys.argv[1]))"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    found = done.stdout.split()
    assert found == sorted(found) and set(found) == {STEP_20, STEP_30} and len(found) > 50
    write(tmp_path, 40)
    assert not [name for name in names(tmp_path) if name.startswith(".")]  # what the killed ones left is gone


def test_hidden_directories_of_dead_processes_are_removed_and_those_of_live_ones_stay(newest):
    dead = subprocess.Popen(["true"])
    dead.wait()
    hidden = {p: [f".{STEP_30}.{kind}-{p}" for kind in ("tmp", "old")] for p in (dead.pid, os.getpid(), os.getppid())}
    for name in [*sum(hidden.values(), []), "notes", ".step_x.tmp-1"]:
        (newest.parent / name).mkdir()
    write(newest.parent, 30)
    assert names(newest.parent) == sorted([*hidden[os.getppid()], "notes", ".step_x.tmp-1", STEP_10, STEP_20, STEP_30])


PRUNED = {(0, 0): [10, 20, 30, 40], (1, 0): [40], (2, 0): [30, 40], (9, 0): [10, 20, 30, 40]}
PRUNED |= {(1, 20): [20, 40], (2, 20): [20, 30, 40], (1, 30): [30, 40], (0, 20): [10, 20, 30, 40]}


@pytest.mark.parametrize(("keep", "major"), PRUNED)
def test_the_newest_and_the_major_steps_are_kept(tmp_path, keep, major):
    for step in (10, 20, 30, 40):
        write(tmp_path, step, keep, major)
    assert names(tmp_path) == [f"step_{step:08d}" for step in PRUNED[keep, major]]


def test_a_damaged_checkpoint_of_a_later_step_does_not_count_as_the_newest(newest):
    """Resumed from 10 because 20 is damaged, a run that saves 15 with keep=1 keeps 15."""
    (newest / TENSORS).write_bytes(b"")
    assert write(newest.parent, 15, keep=1) == checkpoint.find(newest.parent)
    assert names(newest.parent) == ["step_00000015", STEP_20]


def test_a_run_without_room_for_a_checkpoint_does_not_begin(tmp_path, monkeypatch):
    asked, needed = [], sum(t.nbytes for t in example(1).values()) + checks.FILES_BYTES
    free = SimpleNamespace(free=needed)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or free)
    checkpoint.require_space(tmp_path / "not" / "yet" / "there", example(1))
    assert asked == [tmp_path]
    free.free -= 1
    with pytest.raises(CheckpointError, match=f"no room for a checkpoint: {needed:,} bytes needed.*another --run_dir"):
        checkpoint.require_space(tmp_path, example(1))


# ---- damage ----


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_noticed(newest, capsys, name):
    good, generator = (newest / name).read_bytes(), random.Random(name)
    for _ in range(20):
        damaged = bytearray(good)
        damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        (newest / name).write_bytes(damaged)
        assert any(name in problem for problem in checkpoint.verify(newest))
        assert_refused(newest, checkpoint.verify(newest)[0], capsys)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "longer", "empty", "missing", "directory", "symlink", "fifo"])
def test_a_damaged_file_is_noticed(newest, tmp_path, capsys, name, damage):
    """A symlink is refused even to the very bytes, and a pipe, which one would read for ever, is not opened."""
    path, outside = newest / name, tmp_path / "outside"
    good = path.read_bytes()
    path.rename(outside)
    if damage in ("directory", "symlink", "fifo"):
        dict(directory=path.mkdir, symlink=lambda: path.symlink_to(outside), fifo=lambda: os.mkfifo(path))[damage]()
    elif damage != "missing":
        path.write_bytes(dict(truncated=good[:-1], longer=good + b"}", empty=b"")[damage])
    assert_refused(newest, f"{name}: ", capsys)


def test_an_extra_file_is_noticed(newest, capsys):
    (newest / "rank_00003.safetensors").write_bytes(b"")
    assert_refused(newest, "rank_00003.safetensors: does not belong there", capsys)


@pytest.mark.parametrize("missing", [{0}, {1}, {0, 2}, {0, 1, 2}], ids=str)
def test_a_missing_share_of_several_is_named(newest, capsys, missing):
    """By the manifest, unless that is what is damaged."""
    shares = [checkpoint.tensors_name(rank) for rank in range(3)]
    for name in shares[1:]:
        shutil.copy(newest / TENSORS, newest / name)
    files = {name: checkpoint._fingerprint(newest / name) for name in (*shares, STATE)}
    (newest / MANIFEST).write_text(json.dumps(files).replace(shares[2], "rank_x"))
    assert_refused(newest, f"{MANIFEST}: is not a JSON object about {' and '.join(files)} and nothing else", capsys)
    (newest / MANIFEST).write_text(json.dumps(files))
    assert checkpoint.verify(newest) == []
    for rank in missing:
        (newest / shares[rank]).unlink()
    assert_refused(newest, f"{shares[min(missing)]}: is missing", capsys)
    assert checkpoint.verify(newest) == [f"{shares[r]}: is missing or not a regular file" for r in sorted(missing)]


def test_a_file_that_cannot_be_read_is_damage(newest, capsys, monkeypatch):
    fingerprint = checkpoint._fingerprint

    def fail(path):
        if path.parent == newest:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return fingerprint(path)

    monkeypatch.setattr(checkpoint, "_fingerprint", fail)
    assert_refused(newest, f"cannot be read ([Errno 5] Input/output error: '{newest / TENSORS}')", capsys)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_started_afresh(newest, capsys):
    for path in newest.parent.iterdir():
        (path / STATE).unlink()
    with pytest.raises(CheckpointError, match="none of 2 verifies"):
        checkpoint.latest(newest.parents[1])
    assert capsys.readouterr().err.count("warning: ") == 2


# ---- finding ----


def test_find_takes_a_run_its_checkpoints_or_a_step(newest, monkeypatch):
    run, older = newest.parents[1], newest.with_name(STEP_10)
    assert [checkpoint.find(path) for path in (run, newest.parent, newest, older)] == [newest, newest, newest, older]
    for directory, found in ((run, newest), (newest.parent, newest), (older, older)):
        monkeypatch.chdir(directory)
        assert checkpoint.find(Path(".")).resolve() == found
    with pytest.raises(CheckpointError, match=f"{STEP_30}: is missing.* another step, as {STEP_10}, {STEP_20}$"):
        checkpoint.find(newest.with_name(STEP_30))
    assert write(newest.parent, 123_456_789) == checkpoint.find(run)  # by number: as text, step_1234... is older


def test_no_checkpoint_is_none_for_a_resume_and_an_error_for_a_path(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint.latest(tmp_path) is checkpoint.latest(tmp_path / "nowhere") is None
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "checkpoints"):
        with pytest.raises(CheckpointError, match=f"{path}: no checkpoint found"):
            checkpoint.find(path)
    (tmp_path / "ckpt.pt").touch()
    with pytest.raises(CheckpointError, match="ckpt.pt: no checkpoint found, .* is a file; .* or nanogpt:FILE$"):
        checkpoint.find(tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=f"{STEP_30}: is missing"):
        checkpoint.find(tmp_path / "checkpoints" / STEP_30)


# ---- hostile ----


def test_a_step_that_is_a_symlink_is_refused(newest, tmp_path, capsys):
    newest.rename(tmp_path / "outside")
    newest.symlink_to(tmp_path / "outside")
    assert_refused(newest, "is missing or not a directory", capsys)


@pytest.mark.parametrize("evil", ["../secret", "/etc/hostname", "rank_00002.safetensors"])
@pytest.mark.parametrize("instead", [True, False])
def test_names_in_the_manifest_are_never_followed(newest, capsys, monkeypatch, evil, instead):
    manifest, opened, real = json.loads((newest / MANIFEST).read_text()), [], open
    manifest[evil] = manifest.pop(TENSORS) if instead else manifest[TENSORS]
    (newest / MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr("builtins.open", lambda path, *a, **k: (opened.append(Path(path).name), real(path, *a, **k))[1])
    assert_refused(newest, f"{MANIFEST}: is not a JSON object about {TENSORS} and {STATE} and nothing else", capsys)
    assert set(opened) == {TENSORS, STATE}  # of step 10


NOT_OURS = [b"[]", b"null", b"{}", b"[" * 100_000, b'{"rank_00000.safetensors": 1, "state.json": []}', b"\xff"]


@pytest.mark.parametrize("text", NOT_OURS, ids=range(len(NOT_OURS)))
def test_json_of_another_form_is_refused(newest, capsys, text):
    (newest / STATE).write_bytes(text)
    reseal(newest)
    with pytest.raises(CheckpointError, match=STATE):
        checkpoint.load(checkpoint.find(newest))
    (newest / MANIFEST).write_bytes(text)
    assert_refused(newest, MANIFEST, capsys)


@pytest.mark.parametrize("version", [checkpoint.FORMAT + 1, 0, "1", None])
def test_another_format_is_refused(newest, version):
    (newest / STATE).write_text(json.dumps({"format": version, "step": 20}))
    reseal(newest)
    with pytest.raises(CheckpointError, match=f"format {version!r}, expected {checkpoint.FORMAT}; use the version"):
        checkpoint.load(checkpoint.find(newest))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


HUGE_HEADER = struct.pack("<Q", 10**15) + b"{}"
NOT_SAFETENSORS = {"pickle": pickle.dumps(Evil()), "empty": b"", "header of 10^15 bytes": HUGE_HEADER}


@pytest.mark.parametrize("kind", NOT_SAFETENSORS)
def test_what_is_not_safetensors_is_refused_and_not_run(newest, tmp_path, monkeypatch, kind):
    """Even under a manifest that agrees."""
    monkeypatch.chdir(tmp_path)
    (newest / TENSORS).write_bytes(NOT_SAFETENSORS[kind])
    reseal(newest)
    with pytest.raises(CheckpointError, match=f"{TENSORS}: not safetensors"):
        checkpoint.load(checkpoint.find(newest))
    assert names(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["params", "m"])
def test_a_number_that_is_not_finite_is_refused(tmp_path, monkeypatch, name, value):
    """In bf16 and fp32, wherever it is; the largest finite number is none."""
    monkeypatch.setattr(checks, "SCAN", 10)
    for at in (0, 9, 10, 32):
        tensors = example(10)
        tensors[name][at] = torch.finfo(tensors[name].dtype).max
        path = checkpoint.save(tmp_path / f"good{at}", 10, tensors, {}, 0, 0)
        checkpoint.load(checkpoint.find(path))
        tensors[name][at] = value
        path = checkpoint.save(tmp_path / f"bad{at}", 10, tensors, {}, 0, 0)
        with pytest.raises(CheckpointError, match=f"{name}: a NaN or an infinity at element {at}; remove this step"):
            checkpoint.load(checkpoint.find(path))


# ---- does it belong to this run? ----


def test_tensors_that_do_not_fit_are_a_table_of_the_differences():
    expected = {"params": torch.empty(4), "m": torch.empty(4), "low": torch.empty(4, dtype=torch.int16)}
    resume.check_tensors(Path("step"), {name: t.clone() for name, t in expected.items()}, expected)
    saved = {"params": torch.empty(4, dtype=torch.bfloat16), "m": torch.empty(4), "v": torch.empty(2, 2)}
    with pytest.raises(CheckpointError) as error:
        resume.check_tensors(Path("step"), saved, expected)
    assert str(error.value).splitlines() == [
        "step does not fit this model",
        "        checkpoint      now",
        "low     None            int16 (4,)",
        "params  bfloat16 (4,)   float32 (4,)",
        "v       float32 (2, 2)  None",
    ]


FATAL = """model.n_layer model.n_head model.n_embd model.vocab_size model.block_size data.tokenizer data.seed
    train.seq_len train.total_batch_tokens train.dtype train.seed optim.master""".split()
UNKNOWN = ["model.rope", "train.steps_more", "data.train_more", "shards", "logs.every"]


@pytest.mark.parametrize("key", [key for key, field in options() if not field.exclude] + UNKNOWN)
def test_every_key_of_the_configuration_is_fatal_or_free_and_others_are_fatal(key):
    section, _, name = key.rpartition(".")
    saved, current = ({section: {name: value}} if section else {name: value} for value in ("a", "b"))
    change, none = {key: ("a", "b")}, {}
    expected = (change, none) if key in FATAL + UNKNOWN else (none, change)
    assert resume.config_differences(saved, current) == expected
    assert resume.config_differences(saved, saved) == (none, none)


def test_another_run_is_an_error_with_a_table_and_free_changes_are_returned():
    saved = {"model": {"n_layer": 12, "n_head": 12}, "optim": {"lr": 6e-4, "master": "none"}, "train": {"steps": 100}}
    current = {"model": {"n_layer": 12, "n_head": 12}, "optim": {"lr": 3e-4, "master": "none"}, "train": {"steps": 200}}
    assert resume.check_config(saved, current) == {"optim.lr": (6e-4, 3e-4), "train.steps": (100, 200)}
    current["model"]["n_layer"], current["optim"]["master"] = 24, "fp32"
    with pytest.raises(CheckpointError) as error:
        resume.check_config(saved, current)
    assert str(error.value).splitlines()[1:] == [
        "               checkpoint  now",
        "model.n_layer  12          24",
        "optim.master   none        fp32",
    ]


def test_other_training_data_is_an_error():
    now = [{"name": "train_000000.bin", "bytes": 1024, "sha256": "ab"}]
    resume.check_data(Path("step"), [dict(row) for row in now], now, "data/*.bin")
    with pytest.raises(CheckpointError, match=r"step: written with other training data than data/\*.bin; restore it"):
        resume.check_data(Path("step"), [now[0] | {"sha256": "cd"}], now, "data/*.bin")
