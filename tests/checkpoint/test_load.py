"""Loading: one flipped bit is noticed, a damaged step is skipped, nothing in a
checkpoint is followed or executed.
"""

import json
import os
import pickle
import random
import shutil
import threading
from pathlib import Path

import pytest
import torch

from gpt2_triton.checkpoint import load
from gpt2_triton.checkpoint.format import FORMAT, MANIFEST, STATE
from gpt2_triton.checkpoint.load import find_checkpoint, latest_checkpoint, verify
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.errors import CheckpointError
from tests.support.checkpoints import (
    FILES,
    STEP_10,
    STEP_20,
    STEP_30,
    TENSORS,
    content,
    example,
    load_checkpoint,
    names,
    reseal,
    whole,
    write,
)
from tests.support.checkpoints import state as made_state


def assert_refused(newest, problem, capsys):
    """Finding the step is an error; finding its run prints one warning and
    gives the previous checkpoint.
    """
    with pytest.raises(CheckpointError) as error:
        find_checkpoint(newest)
    assert f"{newest}: {problem}" in str(error.value)
    assert (
        find_checkpoint(newest.parents[1])
        == latest_checkpoint(newest.parent)
        == newest.with_name(STEP_10)
    )
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 2 and all(f"damaged {newest}: {problem}" in line for line in warnings)


def test_load_gives_the_saved_bytes_in_private_memory(newest):
    state, tensors = load_checkpoint(newest)
    assert newest.name == STEP_20 and names(newest) == sorted(FILES)
    assert state == {"format": FORMAT} | made_state(20)
    assert content(tensors) == content(example(20))
    for tensor in tensors.values():  # mapped from the file, but privately
        tensor.view(torch.uint8).fill_(255)
    assert verify(newest) == ""


# ---- damage ----


@pytest.mark.parametrize("name", FILES)
def test_verify_notices_one_flipped_bit(newest, capsys, name):
    good, generator = (newest / name).read_bytes(), random.Random(name)
    for _ in range(20):
        damaged = bytearray(good)
        damaged[generator.randrange(len(good))] ^= 1 << generator.randrange(8)
        (newest / name).write_bytes(damaged)
        assert name in verify(newest)
        assert_refused(newest, verify(newest), capsys)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("missing", [False, True])
def test_verify_notices_a_truncated_and_a_missing_file(newest, capsys, name, missing):
    path = newest / name
    good = path.read_bytes()
    path.unlink()
    if not missing:
        path.write_bytes(good[:-1])
    assert ("cannot be read" in verify(newest)) == (missing or name == MANIFEST)
    assert_refused(newest, verify(newest), capsys)


def test_latest_checkpoint_refuses_a_run_with_damaged_ones_only(newest, capsys):
    for path in newest.parent.iterdir():
        (path / STATE).unlink()
    with pytest.raises(CheckpointError, match="none of 2 verifies"):
        latest_checkpoint(newest.parent)
    assert capsys.readouterr().err.count("warning: ") == 2


def test_latest_checkpoint_up_to_a_step(newest):
    assert latest_checkpoint(newest.parent, 19) == newest.parent / STEP_10
    assert (
        latest_checkpoint(newest.parent, 20) == newest
        and latest_checkpoint(newest.parent, 9) is None
    )


# ---- finding ----


def test_find_takes_a_run_its_checkpoints_or_a_step(newest, monkeypatch):
    run, older, copy = (
        newest.parents[1],
        newest.with_name(STEP_10),
        shutil.copytree(newest, newest.parents[1] / "mine"),
    )
    assert [find_checkpoint(path) for path in (run, newest.parent, newest, older)] == [
        newest,
        newest,
        newest,
        older,
    ]
    for directory, found in ((run, newest), (newest.parent, newest), (older, older), (copy, copy)):
        monkeypatch.chdir(directory)
        assert find_checkpoint(Path(".")).resolve() == found
    with pytest.raises(CheckpointError, match=f"{STEP_30}: is missing.* choose another step$"):
        find_checkpoint(newest.with_name(STEP_30))
    # as text, step_1234... would be older
    assert write(newest.parent, 123_456_789) == find_checkpoint(run)


def test_latest_checkpoint_gives_none_where_find_raises(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert (
        latest_checkpoint(tmp_path / "checkpoints")
        is latest_checkpoint(tmp_path / "nowhere")
        is None
    )
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "checkpoints"):
        with pytest.raises(CheckpointError, match=f"{path}: no checkpoint found"):
            find_checkpoint(path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CheckpointError, match="; wait for .* start it again$"):
        find_checkpoint(tmp_path / "best")
    (tmp_path / "ckpt.pt").touch()
    with pytest.raises(CheckpointError, match="ckpt.pt: no checkpoint found; .* or nanogpt:FILE$"):
        find_checkpoint(tmp_path / "ckpt.pt")
    with pytest.raises(CheckpointError, match=f"{STEP_30}: is missing"):
        find_checkpoint(tmp_path / "checkpoints" / STEP_30)


# ---- hostile ----


@pytest.mark.parametrize("evil", ["../secret", "/etc/hostname", "rank_00002.safetensors"])
@pytest.mark.parametrize("instead", [True, False])
def test_verify_never_opens_names_from_the_manifest(newest, capsys, monkeypatch, evil, instead):
    manifest, opened, real = json.loads((newest / MANIFEST).read_text()), [], open
    manifest[evil] = manifest.pop(TENSORS) if instead else manifest[TENSORS]
    (newest / MANIFEST).write_text(json.dumps(manifest))
    for name in ("builtins.open", "io.open"):
        monkeypatch.setattr(
            name, lambda path, *a, **k: (opened.append(Path(path).name), real(path, *a, **k))[1]
        )
    assert_refused(newest, f"{MANIFEST}: expected a file for each rank, and {STATE}", capsys)
    assert set(opened) == {TENSORS, STATE, MANIFEST}  # the first two of step 10


@pytest.mark.parametrize("version", [FORMAT + 1, 0, "1", None])
def test_load_refuses_another_format(newest, version):
    (newest / STATE).write_text(json.dumps({"format": version, "step": 20}))
    reseal(newest)
    with pytest.raises(
        CheckpointError, match=f"format {version!r}, expected {FORMAT}; use the version"
    ):
        load_checkpoint(find_checkpoint(newest))


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


def test_load_refuses_a_pickle_and_executes_nothing(newest, tmp_path, monkeypatch):
    """The manifest agrees with the file."""
    monkeypatch.chdir(tmp_path)
    (newest / TENSORS).write_bytes(pickle.dumps(Evil()))
    reseal(newest)
    with pytest.raises(CheckpointError, match=f"{TENSORS}: not safetensors"):
        load_checkpoint(find_checkpoint(newest))
    assert names(tmp_path) == ["checkpoints"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["params", "m"])
def test_load_refuses_nan_and_infinity(tmp_path, name, value):
    """In bf16 and fp32; the largest finite number is accepted."""
    for at in (0, 32):
        tensors = example(10)
        tensors[name][at] = torch.finfo(tensors[name].dtype).max
        path = save_checkpoint(tmp_path / f"good{at}", 10, tensors, made_state(10), Retention(0))
        load_checkpoint(find_checkpoint(path))
        tensors[name][at] = value
        path = save_checkpoint(tmp_path / f"bad{at}", 10, tensors, made_state(10), Retention(0))
        with pytest.raises(
            CheckpointError, match=f"{name} has a NaN or an infinity; remove this step"
        ):
            load_checkpoint(find_checkpoint(path))


# ---- beside a run that writes and deletes steps ----


def test_named_step_that_is_deleted_while_it_is_read_is_an_error(newest, monkeypatch):
    original = load.open_checkpoint

    def deleted_before(step_dir):
        write(step_dir.parent, 30, keep=1)
        return original(step_dir)

    monkeypatch.setattr(load, "open_checkpoint", deleted_before)
    with pytest.raises(
        CheckpointError, match=f"{STEP_20}: is missing or not a directory; choose another step"
    ):
        load.open_newest(newest)


def test_run_is_read_in_a_directory_that_may_not_be_listed(newest, monkeypatch):
    """As in another user's home directory of mode 711, which a reader may only pass."""
    closed, listed, list_steps = newest.parents[2], [], load.list_steps
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed)
    monkeypatch.setattr(load, "list_steps", lambda path: listed.append(path) or list_steps(path))
    assert load.open_newest(newest.parents[1])[0] == newest and closed not in listed


def save_best(run_dir, step):
    save_checkpoint(
        run_dir / "checkpoints",
        step,
        example(step),
        made_state(step, best=[step, 1.0]),
        Retention(1),
    )


def test_best_step_that_is_gone_or_damaged_is_an_error(tmp_path):
    save_best(tmp_path, 10)
    save_checkpoint(
        tmp_path / "checkpoints", 20, example(20), made_state(20, best=[10, 1.0]), Retention(1)
    )
    (tmp_path / "checkpoints" / STEP_10 / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"{STEP_10}: state.json"):
        load.open_newest(tmp_path / "best")
    shutil.rmtree(tmp_path / "checkpoints" / STEP_10)
    with pytest.raises(CheckpointError, match=f"{STEP_10}: is missing"):
        load.open_newest(tmp_path / "best")


def test_reader_beside_a_run_that_deletes_as_fast_as_it_can(tmp_path):
    """Whatever step is found, as the newest or as the best, its tensors are its own."""
    save_best(tmp_path, 1)
    running, failed = threading.Event(), []
    running.set()

    def save_on():
        for step in range(2, 100_000):
            if not running.is_set():
                return
            save_best(tmp_path, step)

    writer = threading.Thread(target=save_on)
    writer.start()
    try:
        steps = []
        while len(set(steps)) < 20:
            for path in (tmp_path, tmp_path / "best"):
                _, state, tensors = load.open_newest(path)
                steps.append(state["step"])
                if content({name: whole(tensor) for name, tensor in tensors.items()}) != content(
                    example(steps[-1])
                ):
                    failed.append(steps[-1])
    finally:
        running.clear()
        writer.join()
    assert not failed and steps == sorted(steps)
