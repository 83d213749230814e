"""Data that changes: while a run reads it, the run saves and ends; before a
resume, the resume is refused.
"""

import json
import os
import shutil

import numpy as np
import pytest

from gpt2_triton.checkpoint.load import find_checkpoint
from gpt2_triton.data.shards import map_tokens, write_shard
from gpt2_triton.errors import CheckpointError, DataError
from gpt2_triton.training import tasks
from tests.support.checkpoints import load_checkpoint
from tests.support.loop import before_steps, final_bytes, make_trainer, records, train
from tests.support.tiny import merged, tiny_config

STEPS = 5


def write_data(directory, train_tokens=4000):
    """Two shards to train on and two to validate."""
    directory.mkdir()
    rng = np.random.default_rng(1)
    for name in ("train_0", "train_1", "val_0", "val_1"):
        write_shard(directory / f"{name}.bin", rng.integers(0, 256, train_tokens).astype(np.uint16))
    return directory


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data")


def run_config(folder, **sections):
    base = dict(
        model=dict(n_layer=1),
        train=dict(steps=STEPS, total_batch_tokens=64, batch_size=2),
        checkpoint=dict(every=0, keep=0),
        data=dict(train=f"{folder}/train_*.bin", val=f"{folder}/val_*.bin"),
    )
    return tiny_config(**merged(base, sections))


def steps(run):
    return [record["step"] for record in records(run)]


def cut(path):
    os.truncate(path, 1024)


def other_tokens(path):
    """Write over a shard in place, as `cp` does."""
    with open(path, "r+b") as file:
        file.seek(1024)
        file.write(np.random.default_rng(2).integers(0, 256, 4000).astype(np.uint16).tobytes())


def wrong_ids(path):
    """Write ids beyond the vocabulary behind the time of the file, as a disk that decays would."""
    state = path.stat()
    with open(path, "r+b") as file:
        file.write(path.read_bytes()[:1024] + b"\xff\xff" * 4000)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.parametrize(
    "change, message",
    [
        (cut, "train_1.bin: changed while the run reads it, at byte "),
        (other_tokens, "train_1.bin: changed while the run reads it, at byte "),
        (wrong_ids, "outside the vocabulary: 65535"),
    ],
)
def test_run_saves_and_ends_where_training_data_is_damaged(
    data, tmp_path, monkeypatch, change, message
):
    """Resumed on the changed data it is refused; on the data as it was, it gives the
    bytes of an unbroken run.
    """
    shutil.copytree(data, tmp_path / "kept")
    with monkeypatch.context() as patch, pytest.raises(DataError, match=message):
        before_steps(lambda _, step: step == 2 and change(data / "train_1.bin"), patch)
        train(run_config(data), tmp_path / "run")
    saved = load_checkpoint(find_checkpoint(tmp_path / "run"))[0]
    assert (
        2 <= saved["step"] < STEPS
        and saved["sample"] == 4 * saved["step"]
        and saved["skipped"] == 0
    )
    assert steps(tmp_path / "run") == list(range(1, saved["step"] + 1))

    refused = "is other data than before|outside the vocab|wrong size"
    with pytest.raises((CheckpointError, DataError), match=refused) as raised:
        train(run_config(data), tmp_path / "run", resume=True)
    # which only the ranks that reach them find
    assert raised.value.on_every_rank == (change is not wrong_ids)
    shutil.copy(tmp_path / "kept" / "train_1.bin", data)
    assert train(run_config(data), tmp_path / "run", resume=True) == 0
    assert train(run_config(tmp_path / "kept"), tmp_path / "unbroken") == 0
    assert final_bytes(tmp_path / "run") == final_bytes(tmp_path / "unbroken")


def test_run_saves_and_ends_where_validation_data_is_damaged(data, tmp_path, monkeypatch):
    """The resumed run makes up for the validation that failed."""
    config, run = run_config(data, eval=dict(every=2, tokens=160)), tmp_path / "run"
    kept = shutil.copy(data / "val_0.bin", tmp_path)
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match="val_0.bin: changed while") as raised,
    ):
        before_steps(lambda _, step: step == 3 and cut(data / "val_0.bin"), patch)
        train(config, run)
    assert raised.value.on_every_rank and find_checkpoint(run).name == "step_00000004"
    shutil.copy(kept, data)
    assert train(config, run, resume=True) == 0
    assert [record["step"] for record in records(run) if "val_loss" in record] == [0, 2, 4, 5]


# ---- other data before a resume ----


@pytest.fixture
def stopped(data, tmp_path):
    """A run of two steps that can be resumed."""
    config = run_config(data, train=dict(steps=2), eval=dict(every=2, tokens=160))
    assert train(config, tmp_path / "run") == 0
    return tmp_path / "run"


def changed_shard(path):
    """Change tokens in the middle of a shard, but not its size."""
    tokens = np.array(map_tokens(path))
    tokens[2000:2100] += 1
    write_shard(path, tokens % 256)


def resume_config(folder, **sections):
    return run_config(folder, train=dict(steps=3), eval=dict(every=2, tokens=160), **sections)


@pytest.mark.parametrize("name, key", [("train_1.bin", "data.train"), ("val_0.bin", "data.val")])
def test_resume_on_changed_data_is_refused_with_a_table_or_recorded(
    data, stopped, capsys, name, key
):
    changed_shard(data / name)
    with pytest.raises(CheckpointError) as error:
        train(resume_config(data), stopped, resume=True)
    title, header, row = str(error.value).splitlines()
    assert f"{key} {data}/" in title and "accept it with data.allow_changed true" in title
    assert header.split() == ["checkpoint", "now"]
    cells = row.split()
    assert (
        cells[0] == name
        and cells[1:3] == ["9,024", "bytes,"] == cells[4:6]
        and cells[3] != cells[6]
    )

    capsys.readouterr()
    assert train(resume_config(data, data=dict(allow_changed=True)), stopped, resume=True) == 0
    line = f"changed: {name} 9,024 bytes, {cells[3]} -> 9,024 bytes, {cells[6]}"
    assert line in capsys.readouterr().out
    assert line in json.loads((stopped / "run.json").read_text())["starts"][1]["notes"]
    # the new data is now that of the run
    assert train(resume_config(data), stopped, resume=True) == 0


def test_loss_on_other_validation_data_is_no_longer_the_best(data, tmp_path, monkeypatch, capsys):
    """The lower loss on the data before would also end the run, by train.patience."""
    best, run = dict(checkpoint=dict(best="val_loss")), tmp_path / "run"
    for loss, steps in ((1.0, 2), (2.0, 3)):
        monkeypatch.setattr(tasks, "validation_loss", lambda *_, loss=loss: loss)
        config = run_config(
            data, eval=dict(every=1, tokens=160), train=dict(steps=steps, patience=1), **best
        )
        assert train(config.replace(data=dict(allow_changed=True)), run, resume=True) == 0
        changed_shard(data / "val_0.bin")
    assert load_checkpoint(find_checkpoint(run))[0]["best"] == [3, 2.0]
    assert "best: step 1's loss is of other validation data" in capsys.readouterr().out
    fewer = config.replace(data=dict(allow_changed=True), eval=dict(tokens=80), train=dict(steps=4))
    assert train(fewer, run, resume=True) == 0
    assert "best: step 3's loss is of other validation data" in capsys.readouterr().out


def test_resume_on_moved_data_with_other_times_continues(data, stopped, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(data, moved)
    for path in moved.iterdir():
        os.utime(path, (1, 1))
    assert train(resume_config(moved), stopped, resume=True) == 0


def test_run_warns_of_validation_data_among_the_training_data(data, tmp_path, capsys):
    (tmp_path / "link").symlink_to(data)
    shards = dict(train=f"{data}/*_1.bin", val=f"{tmp_path}/link/val_*.bin")
    make_trainer(
        run_config(data, data=shards, eval=dict(every=2, tokens=160)), tmp_path / "run"
    ).close()
    warning = (
        f"warning: data.train contains the validation data {tmp_path}/link/val_1.bin: "
        "the validation loss will be too low"
    )
    assert warning in capsys.readouterr().err
