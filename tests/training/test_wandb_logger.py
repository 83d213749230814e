"""Weights & Biases: wandb with a server on localhost that works, refuses, hangs or answers 500, and a fake wandb that
raises in any call.
"""

import contextlib
import json
import os
import pty
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt2_triton.commands import tools as app
from gpt2_triton.commands.app import main
from gpt2_triton.errors import ConfigError
from gpt2_triton.training import wandb_logger
from gpt2_triton.training.logger import Logger
from gpt2_triton.training.metrics import METRICS, read_metrics
from tests.support.wandb_server import WandbServer
from tests.training.test_logger import config, result

ROOT = Path(__file__).parents[2]

# whole, before any test: else the thread of a test that has ended could import it while the next one has a fake for it
with contextlib.suppress(ImportError):
    import wandb as _  # noqa: F401


def run(directory, steps, resume_step=0, wandb_id=None, **log):
    """Log a run with a loss at each step and validation every 3 steps; return its id."""
    logger = Logger(directory, config(**log), resume_step, wandb_id, {"git": {"commit": "abc"}})
    for step in steps:
        logger.step(step, result(loss=10 / step, norm=1.0, seconds=0.1))
        if step % 3 == 0:
            logger.validation(step, 9 / step)
    logger.close()
    return logger.wandb_id


def points(records):
    """Return the points of a chart: (step, metric, value) of each row, in order."""
    return [(r["step"], key, r[key]) for r in records for key in ("loss", "val_loss") if key in r]


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """wandb with a key and without a home directory; its process ends with the test.

    An abandoned wandb.init of an earlier test may have started a session since, which would ignore this environment.
    """
    module = pytest.importorskip("wandb")
    module.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    yield module
    module.teardown()


@pytest.fixture
def server(monkeypatch, wandb):
    with WandbServer() as made:
        monkeypatch.setenv("WANDB_BASE_URL", made.url)
        yield made
        made.shutdown()


def test_resume_continues_the_same_run_without_lost_or_repeated_rows(server, tmp_path):
    """Killed after step 8, which the server has; the checkpoint is of step 6."""
    first = run(tmp_path, range(1, 9), wandb="online")
    assert run(tmp_path, range(7, 13), 6, wandb="online") == first
    assert set(server.names) == {first}
    rows = [json.loads(row) for row in server.rows]
    assert points(rows) == points(read_metrics(tmp_path / METRICS))
    assert server.config["run"]["value"] == {"git": {"commit": "abc"}}
    assert server.config["optim"]["value"]["lr"] == 6e-4


def test_send_missing_after_an_outage_sends_no_row_twice(server, tmp_path, capsys):
    """Steps 5 and 6 were trained without wandb.  A second call sends nothing, --new sends all."""
    first = run(tmp_path, range(1, 5), wandb="online")
    run(tmp_path, range(5, 7), 4)
    assert main(app, ["wandb-export", str(tmp_path)]) == 0
    assert "sent 3 of 8 records" in capsys.readouterr().out  # two losses and a validation
    assert points(map(json.loads, server.rows)) == points(read_metrics(tmp_path / METRICS))
    assert wandb_logger.send_missing(tmp_path)[0] == 0 and len(server.rows) == 8
    server.rows.clear()  # the server has no rows of a new run
    assert wandb_logger.send_missing(tmp_path, new_run=True)[0] == 8 and server.names[-1] != first


def test_send_missing_of_a_run_without_wandb_which_then_continues_there(server, tmp_path):
    run(tmp_path, range(1, 4))
    assert wandb_logger.send_missing(tmp_path)[:2] == (4, 4)
    assert server.names[-1] == json.loads((tmp_path / "run.json").read_text())["wandb_id"]
    assert run(tmp_path, range(4, 7), 3, wandb="online") == server.names[0] == server.names[-1]
    assert points(map(json.loads, server.rows)) == points(read_metrics(tmp_path / METRICS))


def test_rows_of_many_rewinds_to_a_step_stay_below_those_of_the_next_step():
    rows = wandb_logger.RowNumbers()
    numbers = [rows.number({"step": step}) for step in [*[7] * 20, 8]]
    assert numbers == sorted(numbers) and numbers[:2] == [56, 57] and max(numbers[:-1]) < numbers[-1] == 64


def test_offline_rows_reach_the_server_once_by_wandb_sync(server, tmp_path, capsys):
    """Killed after step 8 and resumed after step 6 without a server: two offline directories."""
    server.broken = True
    first = run(tmp_path, range(1, 9), wandb="offline")
    run(tmp_path, range(7, 13), 6, wandb="offline")
    assert "warning" not in capsys.readouterr().err and server.rows == []
    server.broken = False
    directories = sorted(tmp_path.glob(f"wandb/offline-run-*-{first}*"))
    assert len(directories) == 2
    command = [sys.executable, "-m", "wandb", "sync", *map(str, directories)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert points(map(json.loads, server.rows)) == points(read_metrics(tmp_path / METRICS))


@pytest.mark.parametrize("fault", ["refuses", "hangs", "answers 500"])
def test_dead_network_costs_a_bounded_delay_and_one_warning(wandb, tmp_path, monkeypatch, capsys, fault):
    """wandb.init gives up in time for the whole start to take at most START_TIMEOUT, here 12 s."""
    assert wandb_logger.START_TIMEOUT <= 30
    monkeypatch.setattr(wandb_logger, "START_TIMEOUT", 12.0)
    with WandbServer(broken=True) as broken, socket.create_server(("127.0.0.1", 0)) as silent:
        ports = {"refuses": 9, "hangs": silent.getsockname()[1], "answers 500": broken.server_port}
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{ports[fault]}")
        start = time.monotonic()
        run_id = run(tmp_path, range(1, 4), wandb="online")
        assert time.monotonic() - start < 13
        broken.shutdown()
    assert capsys.readouterr().err.count("warning:") == 1
    assert len(read_metrics(tmp_path / METRICS)) == 4
    assert json.loads((tmp_path / "run.json").read_text())["wandb_id"] == run_id  # for send_missing


def test_missing_key_is_a_warning_and_no_prompt(tmp_path):
    """On a terminal wandb would prompt and wait, but a run is often started and left alone."""
    pytest.importorskip("wandb")
    code = (
        "from pathlib import Path; from gpt2_triton.config.config import Config;"
        "from gpt2_triton.training.wandb_logger import WandbLogger;"
        "WandbLogger(Path('.'), Config.model_validate({'log': {'wandb': 'online'}}), None); print('continued')"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "WANDB_BASE_URL": "http://127.0.0.1:9"}
    terminal, inside = pty.openpty()
    try:
        streams = dict(stdin=inside, stdout=inside, stderr=inside)
        subprocess.run([sys.executable, "-c", code], **streams, env=environment, cwd=tmp_path, timeout=60, check=True)
        printed = os.read(terminal, 65536).decode()
    finally:
        os.close(terminal)
        os.close(inside)
    assert "no API key; `wandb login` asks for it" in printed and "continued" in printed


def test_server_that_dies_during_the_run_does_not_delay_its_end(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb_logger, "FINISH_TIMEOUT", 1.0)
    logger = Logger(tmp_path, config(wandb="online"))
    logger.step(1, result(loss=2.0, norm=1.0, seconds=0.1))
    server.broken = True
    logger.step(2, result(loss=2.0, norm=1.0, seconds=0.1))
    start = time.monotonic()
    logger.close()
    assert time.monotonic() - start < 6 and len(read_metrics(tmp_path / METRICS)) == 2
    assert capsys.readouterr().err.count("warning: no Weights & Biases") == 1


def test_send_missing_that_fails_is_one_line_with_advice(wandb, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wandb_logger, "START_TIMEOUT", 11.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run(tmp_path, range(1, 4))
    capsys.readouterr()
    assert main(app, ["wandb-export", str(tmp_path)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "run it again" in line


def test_send_missing_refuses_a_directory_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match="no metrics.jsonl and config.yaml there"):
        wandb_logger.send_missing(tmp_path)


# ---- a wandb that raises ----


def _raise(error):
    raise error


class FakeWandb(SimpleNamespace):
    """Records its calls, and raises in the one named `broken`."""

    def __init__(self, broken=None):
        self.calls, self.broken, self.starting_step = [], broken, 0

    def __getattr__(self, name):
        def call(*arguments, **keys):
            if name == self.broken:
                raise ConnectionError(f"no network in {name}\nmore")
            self.calls.append((name, arguments, keys))
            return self

        return call


@pytest.mark.parametrize("call", ["login", "init", "define_metric"])
def test_wandb_that_hangs_anywhere_delays_a_start_by_the_timeout_only(tmp_path, monkeypatch, capsys, call):
    fake, released = FakeWandb(), threading.Event()
    setattr(fake, call, lambda *arguments, **keys: released.wait())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_logger, "START_TIMEOUT", 0.2)
    start = time.monotonic()
    run(tmp_path, range(1, 4), wandb="online")
    released.set()
    assert time.monotonic() - start < 10  # not for ever; the machine may be busy
    assert "TimeoutError: no answer within 0 s" in capsys.readouterr().err
    assert len(read_metrics(tmp_path / METRICS)) == 4


def test_wandb_init_is_given_what_is_left_of_the_start(tmp_path, monkeypatch):
    fake, now = FakeWandb(), [0.0]
    fake.login = lambda **keys: now.__setitem__(0, 7.0) or True
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_logger.time, "monotonic", lambda: now[0])
    run(tmp_path, [1], wandb="online")
    [timeout] = [keys["init_timeout"] for name, _, keys in fake.calls if name == "Settings"]
    assert 7.0 + timeout + wandb_logger.GRACE == wandb_logger.START_TIMEOUT - 1


def test_names_that_are_not_utf_8_reach_wandb(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run_dir = tmp_path / "r\udcff"
    wandb_logger.connect(run_dir, config().replace(sample=dict(prompt="a\udcff")), "1", None, "online", "p", 0)
    [keys] = [keys for name, _, keys in fake.calls if name == "init"]
    assert keys["name"] == "r\N{REPLACEMENT CHARACTER}"
    assert keys["config"]["sample"]["prompt"] == "a\N{REPLACEMENT CHARACTER}"


def test_each_record_is_a_row_with_its_own_number(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert run(tmp_path / "name", range(3, 5), wandb="offline", wandb_id="old-id") == "old-id"
    keys = next(keys for name, _, keys in fake.calls if name == "init")
    assert (keys["id"], keys["resume"], keys["mode"], keys["name"]) == ("old-id", "allow", "offline", "name")
    assert ("define_metric", ("*",), dict(step_metric="step")) in fake.calls
    logged = [(arguments[0], keys["step"]) for name, arguments, keys in fake.calls if name == "log"]
    assert [record for record, _ in logged] == read_metrics(tmp_path / "name" / METRICS)
    assert [row for _, row in logged] == [24, 25, 32]  # step 3 has two
    assert fake.calls[-1] == ("finish", (), dict(exit_code=0))


def test_offline_rows_from_a_stretch_without_wandb_are_sent_by_the_next_start(tmp_path, monkeypatch):
    """Steps 4 to 6 are logged without wandb.  The next offline start sends them, and no row that was sent before."""
    monkeypatch.setitem(sys.modules, "wandb", first := FakeWandb())
    run_id = run(tmp_path, range(1, 4), wandb="offline")
    run(tmp_path, range(4, 7), 3)
    monkeypatch.setitem(sys.modules, "wandb", second := FakeWandb())
    assert run(tmp_path, range(7, 9), 6, wandb="offline") == run_id
    rows = [[keys["step"] for name, _, keys in fake.calls if name == "log"] for fake in (first, second)]
    assert rows == [[8, 16, 24, 25], [32, 40, 48, 49, 56, 64]]


def test_offline_rows_of_a_run_without_a_marker_are_taken_as_sent(tmp_path, monkeypatch):
    """Earlier versions wrote no marker; the wandb directory shows that they had sent what was recorded, also the rows
    of steps 4 and 5, after the checkpoint of step 3.
    """
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    run_id = run(tmp_path, range(1, 6), wandb="offline")
    next(tmp_path.glob("wandb/first-unsent-row-*")).unlink()
    (tmp_path / "wandb" / f"offline-run-20260101_000000-{run_id}").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    run(tmp_path, range(4, 8), 3, wandb="offline")
    assert [keys["step"] for name, _, keys in fake.calls if name == "log"] == [48, 49, 56]


def test_offline_rows_after_a_stretch_online_are_sent_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb())
    run(tmp_path, range(1, 3), wandb="offline")
    run(tmp_path, range(3, 5), 2, wandb="online")
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    run(tmp_path, range(5, 7), 4, wandb="offline")
    assert [keys["step"] for name, _, keys in fake.calls if name == "log"] == [40, 48, 49]


def test_full_disk_under_the_marker_does_not_end_wandb(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    monkeypatch.setattr(wandb_logger, "open_regular", lambda *_: _raise(OSError(28, "No space left on device")))
    logger = wandb_logger.WandbLogger(tmp_path, config(wandb="offline"), None)
    logger.log({"step": 1, "loss": 2.0})
    assert [name for name, _, _ in fake.calls if name == "log"] == ["log"] and capsys.readouterr().err == ""


@pytest.mark.timeout(60)
def test_pipe_as_the_marker_is_not_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", fake := FakeWandb())
    (tmp_path / "wandb").mkdir()
    os.mkfifo(tmp_path / "wandb" / "first-unsent-row-abc.txt")
    logger = wandb_logger.WandbLogger(tmp_path, config(wandb="offline"), "abc")
    logger.log({"step": 1, "loss": 2.0})
    assert [name for name, _, _ in fake.calls if name == "log"] == ["log"] and capsys.readouterr().err == ""


def test_rewind_continues_in_a_new_run_with_the_rows_of_the_file(server, tmp_path):
    """From step 5 back to 2: rows of the undone steps cannot be taken back, so the old run stays as it is."""
    logger = Logger(tmp_path, config(wandb="online"))
    for step in range(1, 6):
        logger.step(step, result(loss=10 / step, norm=1.0, seconds=0.1))
    old = logger.wandb_id
    logger._wandb.close()
    server.rows.clear()  # the server has no rows of a new run
    logger.rewind(5, 2, sample=99)
    logger.step(3, result(loss=7.0, norm=1.0, seconds=0.1))
    logger.close()
    assert old != logger.wandb_id == json.loads((tmp_path / "run.json").read_text())["wandb_id"] == server.names[-1]
    assert points(map(json.loads, server.rows)) == points(read_metrics(tmp_path / METRICS))
    assert [step for step, _, _ in points(read_metrics(tmp_path / METRICS))] == [1, 2, 3]


def test_failed_run_is_marked_as_failed(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    Logger(tmp_path, config(wandb="offline")).close(failed=True)
    assert fake.calls[-1] == ("finish", (), dict(exit_code=1))


@pytest.mark.parametrize("broken", ["login", "Settings", "init", "define_metric", "log", "finish"])
def test_wandb_errors_warn_once_and_never_stop_a_run(tmp_path, monkeypatch, capsys, broken):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(broken))
    run(tmp_path, range(1, 4), wandb="online")
    assert len(read_metrics(tmp_path / METRICS)) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"warning: no Weights & Biases from here on (ConnectionError: no network in {broken}); metrics.jsonl has "
        f"everything, `python -m gpt2_triton wandb-export {tmp_path}` sends what is missing"
    )


def test_missing_wandb_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run(tmp_path, [1], wandb="offline")
    assert capsys.readouterr().err.count("warning:") == 1
    with pytest.raises(ConfigError, match="wandb is not installed"):
        wandb_logger.send_missing(tmp_path)


def test_a_sweep_chooses_the_id_of_the_run(monkeypatch):
    """The agent sets both variables, and wandb.init then ignores any other id; WANDB_RUN_ID alone is someone else's."""
    monkeypatch.setenv("WANDB_RUN_ID", "abcd1234")
    monkeypatch.delenv("WANDB_SWEEP_ID", raising=False)
    assert wandb_logger.new_id() != wandb_logger.new_id() != "abcd1234"
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    assert wandb_logger.new_id() == "abcd1234"


def test_wandb_is_not_imported_when_disabled(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb("init"))
    assert run(tmp_path, [1]) is None and sys.modules["wandb"].calls == []
