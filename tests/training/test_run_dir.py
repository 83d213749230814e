"""The start in a run directory: what is resumed, what is refused, and that no metrics are lost."""

import contextlib
import os

import pytest

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


def test_resume_of_nothing_is_said(tmp_path, held, capsys):
    assert open_run_dir(tmp_path / "typo", True, held) is None
    assert (
        capsys.readouterr().out == f"nothing to resume in {tmp_path / 'typo'}: starting a new run\n"
    )


@pytest.mark.parametrize("name", ["typo", "stopped"])
def test_resume_must_refuses_a_new_run_and_leaves_nothing(tmp_path, name):
    (tmp_path / "stopped").mkdir()
    (tmp_path / "stopped" / PREEMPTED).touch()
    refused = f"^--resume must: .*{name} has no checkpoint; correct --run_dir"
    with pytest.raises(CheckpointError, match=refused):
        check_run_dir(tmp_path / name, "must")
    assert not (tmp_path / name / PREEMPTED).exists() and not (tmp_path / "typo").exists()


@pytest.mark.parametrize(("error", "stays"), [(CheckpointError, False), (KeyboardInterrupt, True)])
def test_start_that_fails_removes_the_mark_of_the_stop_before_it(tmp_path, error, stays):
    """Else a script that looks for PREEMPTED would start the run for ever.  A signal at
    the start leaves the mark.
    """
    write(tmp_path / "checkpoints", 10)
    (tmp_path / PREEMPTED).touch()
    with contextlib.suppress(error), contextlib.ExitStack() as held:
        open_run_dir(tmp_path, True, held)
        raise error
    assert (tmp_path / PREEMPTED).exists() == stays


def test_metrics_without_a_checkpoint_are_refused_or_kept_aside(tmp_path, capsys):
    for number, also in ((1, ""), (2, ", stats.jsonl.2")):
        (tmp_path / "metrics.jsonl").write_text(METRICS)
        with (
            contextlib.ExitStack() as held,
            pytest.raises(ConfigError, match="has metrics up to step 7, but no check"),
        ):
            open_run_dir(tmp_path, False, held)
        assert (tmp_path / "metrics.jsonl").read_text() == METRICS
        with contextlib.ExitStack() as held:
            assert open_run_dir(tmp_path, True, held) is None
        assert not (tmp_path / "metrics.jsonl").exists()
        assert (tmp_path / f"metrics.jsonl.{number}").read_text() == METRICS
        assert f", are now metrics.jsonl.{number}{also}\n" in capsys.readouterr().out
        (tmp_path / "stats.jsonl").touch()
    assert (tmp_path / "stats.jsonl.2").exists()


def test_metrics_of_a_start_without_a_step_are_overwritten(tmp_path, held):
    (tmp_path / "metrics.jsonl").touch()
    assert open_run_dir(tmp_path, False, held) is None


def test_directory_inside_checkpoints_belongs_to_their_run(tmp_path):
    write(tmp_path / "run" / "checkpoints", 10)
    for inside in ("", STEP_10, "new"):
        path = tmp_path / "run" / "checkpoints" / inside
        with pytest.raises(
            ConfigError, match=f"^--run_dir: {path} is inside the run {tmp_path / 'run'}; "
        ):
            check_run_dir(path, True)
    # a directory of that name may hold runs
    write(tmp_path / "checkpoints" / "a" / "checkpoints", 10)
    for free in ("checkpoints", "checkpoints/a", "checkpoints/new"):
        check_run_dir(tmp_path / free, True)
