"""Weights & Biases: wandb with a server on localhost, and a fake wandb that raises in any call."""

import json
import os
import pty
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2_triton.training import wandb_logger
from gpt2_triton.training.logger import Logger
from gpt2_triton.training.metrics import METRICS, read_metrics
from gpt2_triton.training.run_info import read_run
from tests.support.wandb_server import WandbServer
from tests.training.test_logger import config, result, run

ROOT = Path(__file__).parents[2]


def points(records):
    """Return the points of a chart: (step, metric, value), in order."""
    return [(r["step"], key, r[key]) for r in records for key in ("loss", "val_loss") if key in r]


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """wandb with a key and without a home directory; its process ends with the test."""
    module = pytest.importorskip("wandb")
    module.teardown()
    for name, value in dict(
        API_KEY="x" * 40, SILENT="1", CONFIG_DIR=f"{tmp_path}/home", X_DISABLE_STATS="1"
    ).items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    yield module
    module.teardown()


@pytest.fixture
def server(monkeypatch, wandb):
    with WandbServer() as made:
        monkeypatch.setenv("WANDB_BASE_URL", made.url)
        yield made
        made.shutdown()


@pytest.mark.slow
def test_resume_and_rewind_continue_the_same_run_without_a_repeated_step(server, tmp_path):
    """Killed after step 8, which the server has; the checkpoint is of step 6.  Then a
    rewind from step 12 to 9.
    """
    first = run(tmp_path, range(1, 9), wandb="online")
    assert run(tmp_path, range(7, 13), 6, wandb="online") == first and set(server.names) == {first}
    rows = [json.loads(row) for row in server.rows]
    assert points(rows) == points(read_metrics(tmp_path / METRICS)) and [
        r["_step"] for r in rows
    ] == [*range(1, 13)]
    assert server.config["run"]["value"] == {"git": {"commit": "abc"}}
    assert server.config["optim"]["value"]["lr"] == 6e-4
    logger = Logger(tmp_path, config(wandb="online"), 12)
    logger.rewind(12, 9, sample=99)
    for step in (10, 11, 12, 13):
        logger.step(step, result(loss=7.0, norm=1.0, seconds=0.1))
    logger.close()
    assert [json.loads(row)["_step"] for row in server.rows] == [*range(1, 14)]
    assert read_run(tmp_path)["wandb_id"] == first


@pytest.mark.slow
def test_dead_network_costs_a_bounded_delay_and_one_warning(wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb_logger, "START_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    start = time.monotonic()
    run(tmp_path, range(1, 4), wandb="online")
    assert time.monotonic() - start < 30
    assert capsys.readouterr().err.count("warning: no Weights & Biases") == 1
    assert len(read_metrics(tmp_path / METRICS)) == 4


@pytest.mark.slow
def test_missing_key_is_a_warning_and_no_prompt(tmp_path):
    """On a terminal wandb would prompt and wait, but a run is often started and left alone."""
    pytest.importorskip("wandb")
    code = (
        "from pathlib import Path; from gpt2_triton.config.config import Config;"
        "from gpt2_triton.training.wandb_logger import WandbLogger;"
        "WandbLogger(Path('.'), Config.model_validate({'log': {'wandb': "
        "'online'}}), None, None); print('continued')"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "WANDB_BASE_URL": "http://127.0.0.1:9",
    }
    terminal, inside = pty.openpty()
    try:
        streams = dict(stdin=inside, stdout=inside, stderr=inside)
        subprocess.run(
            [sys.executable, "-c", code],
            **streams,
            env=environment,
            cwd=tmp_path,
            timeout=60,
            check=True,
        )
        printed = os.read(terminal, 65536).decode()
    finally:
        os.close(terminal)
        os.close(inside)
    assert "no API key; `wandb login` asks for it" in printed and "continued" in printed


# ---- a wandb that raises ----


class FakeWandb(SimpleNamespace):
    """Records its calls, and raises in the one named `broken`."""

    def __init__(self, broken=None):
        self.calls, self.broken = [], broken

    def __getattr__(self, name):
        def call(*arguments, **keys):
            if name == self.broken:
                raise ConnectionError(f"no network in {name}\nmore")
            self.calls.append((name, arguments, keys))
            return self

        return call


def test_each_record_is_logged_at_its_step_under_the_id_of_run_json(tmp_path, monkeypatch):
    for first, last in ((1, 3), (4, 5)):
        monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
        run_id = run(tmp_path / "name", range(first, last + 1), first - 1, wandb="offline")
        keys = next(keys for name, _, keys in fake.calls if name == "init")
        assert (keys["id"], keys["resume"], keys["mode"], keys["name"]) == (
            run_id,
            "allow",
            "offline",
            "name",
        )
        logged = [
            (arguments[0], keys["step"]) for name, arguments, keys in fake.calls if name == "log"
        ]
        assert [step for _, step in logged] == [record["step"] for record, _ in logged]
        assert [record for record, _ in logged] == read_metrics(tmp_path / "name" / METRICS)[
            -len(logged) :
        ]
        assert fake.calls[-1] == ("finish", (), dict(exit_code=0))
    [limits] = [keys for name, _, keys in fake.calls if name == "Settings"]
    assert limits == dict(init_timeout=20, finish_timeout=60, finish_timeout_raises=True)
    (tmp_path / "name").rename(tmp_path / "moved")
    assert run(tmp_path / "moved", [6], 5, wandb="offline") == run_id
    copy = shutil.copytree(tmp_path / "moved", tmp_path / "another" / "moved")
    assert run(copy, [7], 6, wandb="offline") != run_id


def test_a_sweep_chooses_the_id_of_the_run_and_a_failed_run_is_marked(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    monkeypatch.setenv("WANDB_RUN_ID", "abcd1234")
    logger = Logger(tmp_path, config(wandb="online"))
    logger.close(failed=True)
    assert read_run(tmp_path)["wandb_id"] == "abcd1234" and fake.calls[-1] == (
        "finish",
        (),
        dict(exit_code=1),
    )


def init_with(directory, monkeypatch, variables, **log):
    """Return the arguments of wandb.init of a run in this environment; None if it is not called."""
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    for name in ("MODE", "PROJECT", "NAME", "DIR", "ENTITY", "RUN_GROUP", "TAGS"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    Logger(directory / "run", config(**log)).close()
    return next((keys for name, _, keys in fake.calls if name == "init"), None)


KEYS = dict(project="mine", name="third try", entity="team", group="rates", tags=["long", "d12"])


def test_keys_name_the_run_and_wandbs_variables_win(tmp_path, monkeypatch):
    """wandb reads a variable itself, where an argument of `init` would win."""
    log = {f"wandb_{key}": value for key, value in KEYS.items()}
    found = init_with(tmp_path, monkeypatch, dict(PROJECT=""), wandb="online", **log)
    assert KEYS.items() <= found.items()
    assert (
        init_with(tmp_path, monkeypatch, {}, wandb="online", wandb_tags="long,d12")["tags"]
        == KEYS["tags"]
    )
    given = dict(
        PROJECT="theirs", NAME="n", DIR="/d", ENTITY="e", RUN_GROUP="g", TAGS="t", MODE="offline"
    )
    found = init_with(tmp_path, monkeypatch, given, wandb="online", **log)
    assert not {*KEYS, "dir"} & {*found} and found["mode"] == "offline"


def test_a_run_without_keys_has_the_name_of_its_directory_in_the_accounts_project(
    tmp_path, monkeypatch
):
    found = init_with(tmp_path, monkeypatch, {}, wandb="online")
    assert [found[key] for key in ("project", "name", "mode")] == ["gpt2_triton", "run", "online"]
    assert [found[key] for key in ("entity", "group", "tags")] == [None, None, None]


def test_wandbs_mode_turns_online_off_but_nothing_on(tmp_path, monkeypatch):
    assert (
        init_with(tmp_path, monkeypatch, dict(MODE="online"), wandb="offline")["mode"] == "offline"
    )
    assert init_with(tmp_path, monkeypatch, dict(MODE="disabled"), wandb="online") is None
    # log.wandb asks for it, or nobody does
    assert init_with(tmp_path, monkeypatch, dict(MODE="online")) is None


@pytest.mark.parametrize("broken", ["login", "Settings", "init", "log", "finish"])
def test_wandb_errors_warn_at_once_and_at_the_end_and_never_stop_a_run(
    tmp_path, monkeypatch, capsys, broken
):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(broken))
    run(tmp_path, range(1, 4), wandb="online")
    assert len(read_metrics(tmp_path / METRICS)) == 4
    at_once, *at_the_end = capsys.readouterr().err.splitlines()
    assert at_once.startswith("warning: ") and f"no network in {broken}" in at_once
    assert len(at_the_end) == (broken != "finish")
    assert all("metrics.jsonl has everything" in line for line in at_the_end)


def test_missing_wandb_is_a_warning_and_disabled_wandb_is_not_imported(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tmp_path, [1], wandb="offline")
    assert capsys.readouterr().err.count("warning: no Weights & Biases") == 1
    assert run(tmp_path, [1]) is None and capsys.readouterr().err == ""
