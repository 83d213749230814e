"""The start in a run directory: what is resumed, what is refused, and that no metrics are lost."""

import contextlib
import os

import pytest

from gpt2_triton.checkpoint.load import read_checkpoint
from gpt2_triton.errors import CheckpointError, ConfigError
from gpt2_triton.training.preemption import PREEMPTED
from gpt2_triton.training.run_dir import open_run_dir
from gpt2_triton.training.start import check_run_dir
from tests.support.checkpoints import STEP_10, STEP_20, write

METRICS = '{"step": 1, "loss": 2.0}\n{"step": 7, "loss": 1.0}\n'


@pytest.fixture
def held():
    with contextlib.ExitStack() as stack:
        yield stack


def test_newest_checkpoint_is_found_and_nothing_is_removed(tmp_path, held, capsys):
    write(tmp_path / "checkpoints", 10)
    write(tmp_path / "checkpoints", 20)
    (tmp_path / PREEMPTED).touch()
    (tmp_path / "metrics.jsonl").write_text(METRICS)
    assert open_run_dir(tmp_path, True, held).name == STEP_20
    assert sorted(os.listdir(tmp_path)) == [".lock", PREEMPTED, "checkpoints", "metrics.jsonl"]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["a[1]", "*", "?", "[!x]", "a b", "ü", "{a,b}"])
def test_names_with_the_characters_of_patterns_are_names(tmp_path, held, name):
    for other in ("a1", "x", "ab"):
        write(tmp_path / other / "checkpoints", 30)
    step_dir = write(tmp_path / name / "checkpoints", 10)
    assert open_run_dir(tmp_path / name, True, held) == step_dir
    assert read_checkpoint(tmp_path / name)[0] == read_checkpoint(step_dir)[0] == step_dir
    write(tmp_path / name / "checkpoints", 20, keep=1)
    assert os.listdir(tmp_path / name / "checkpoints") == [STEP_20]


def test_files_that_a_killed_start_has_not_finished_are_removed(tmp_path, held):
    for name in (".metrics.jsonl.0a1b2c3d.7-1.tmp", ".seen.0a1b2c3d.tmp", ".mine.txt.1.tmp", ".run.json.bak"):
        (tmp_path / name).touch()
    open_run_dir(tmp_path, True, held)
    assert sorted(os.listdir(tmp_path)) == [".lock", ".mine.txt.1.tmp", ".run.json.bak"]


def test_resume_of_nothing_is_said(tmp_path, held, capsys):
    assert open_run_dir(tmp_path / "typo", True, held) is None
    assert capsys.readouterr().out == f"nothing to resume in {tmp_path / 'typo'}: starting a new run\n"


def test_resume_must_refuses_a_new_run_and_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match="^--resume must: .*typo has no checkpoint; correct --run_dir"):
        with contextlib.ExitStack() as held:
            open_run_dir(tmp_path / "typo", "must", held)
    assert os.listdir(tmp_path / "typo") == []


def test_metrics_without_a_checkpoint_are_refused_or_kept_aside(tmp_path, capsys):
    (tmp_path / "stats.jsonl").touch()
    for number in (1, 2):
        (tmp_path / "metrics.jsonl").write_text(METRICS)
        with contextlib.ExitStack() as held, pytest.raises(ConfigError, match="has metrics up to step 7, but no check"):
            open_run_dir(tmp_path, False, held)
        assert (tmp_path / "metrics.jsonl").read_text() == METRICS
        with contextlib.ExitStack() as held:
            assert open_run_dir(tmp_path, True, held) is None
        assert not (tmp_path / "metrics.jsonl").exists() and (tmp_path / "stats.jsonl.1").exists()
        assert (tmp_path / f"metrics.jsonl.{number}").read_text() == METRICS
        assert f", are now metrics.jsonl.{number}" in capsys.readouterr().out


def test_metrics_of_a_start_without_a_step_are_overwritten(tmp_path, held):
    (tmp_path / "metrics.jsonl").touch()
    assert open_run_dir(tmp_path, False, held) is None


@pytest.mark.parametrize("inside", ["", STEP_10, f"{STEP_10}/more", "new"])
def test_directory_inside_checkpoints_belongs_to_their_run(tmp_path, inside):
    write(tmp_path / "run" / "checkpoints", 10)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoints")
    for path in (tmp_path / "run" / "checkpoints" / inside, tmp_path / "link" / inside):
        with pytest.raises(ConfigError, match=f"^--run_dir: {path} is inside the run {tmp_path / 'run'}; "):
            check_run_dir(path, True)


def test_directory_of_that_name_may_hold_runs(tmp_path):
    write(tmp_path / "checkpoints" / "a" / "checkpoints", 10)
    for free in ("checkpoints", "checkpoints/a", "checkpoints/new"):
        check_run_dir(tmp_path / free, True)
