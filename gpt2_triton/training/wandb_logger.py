"""Weights & Biases: sends the records of metrics.jsonl while training, as far as possible, and later by `send_missing`.

Each record becomes one row.  Its number, wandb's `_step`, is ROWS_PER_STEP * step + (earlier records of that step), so
it follows from metrics.jsonl alone.  One rule decides which rows are sent: those from the first unsent row on.  Online
that is the server's step, offline the number in a marker file; without the file, what was recorded counts as sent.  So
no row is sent twice, whether a run resumes after a crash or its rows are sent after an outage.  Charts have our `step`
as their axis.
"""

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

from gpt2_triton.config.config import Config
from gpt2_triton.config.load import load_config
from gpt2_triton.console import command_line, print_line, valid_unicode
from gpt2_triton.errors import ConfigError
from gpt2_triton.files import open_regular, read_regular
from gpt2_triton.training.metrics import METRICS, Record, read_metrics
from gpt2_triton.training.run_info import read_run, write_run

ROWS_PER_STEP = 8  # more than the kinds of records; further rewinds to a step share its last row
START_TIMEOUT = 30.0  # seconds that a start waits for all of it: the import, the login, the connection
GRACE = 10.0  # seconds that wandb.init may take beyond its init_timeout
FINISH_TIMEOUT = 60.0  # seconds to send the last rows; `send_missing` sends the rest later


class WandbLogger:
    """Sends records as rows.  The first failure prints a warning and ends it; training never waits for a server.

    run_id: the run to continue at Weights & Biases; None starts a new one
    history: the run's records so far; those of them that are unsent are sent first
    recorded: the row after the last record that was ever written, also of steps that a resume drops from `history`
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        run_id: str | None,
        about: dict[str, Any] | None = None,
        history: Iterable[Record] = (),
        recorded: int = 0,
    ):
        self._run: Any = None
        self._run_dir, self._rows, self._first_unsent_row = run_dir, RowNumbers(), 0
        self._marker: Path | None = None  # holds the number of the first unsent row, for a run that continues offline
        self.run_id = run_id
        mode = config.log.wandb
        if mode == "disabled":
            return
        self.run_id = run_id = run_id or new_id()  # ours, so that rows can be sent to it after an outage
        self._attempt(lambda: self._start(config, run_id, about, mode, recorded))
        for record in history:
            self.log(record)

    def _start(
        self,
        config: Config,
        run_id: str,
        about: dict[str, Any] | None,
        mode: Literal["online", "offline"],
        recorded: int,
    ) -> None:
        self._marker = self._run_dir / "wandb" / f"first-unsent-row-{run_id}.txt"
        self._marker.parent.mkdir(exist_ok=True)
        end = time.monotonic() + START_TIMEOUT

        def login_and_connect() -> Any:
            import wandb

            if mode == "online" and not wandb.login(prompt=False, verify=False):  # init would ask, and wait forever
                raise LookupError("no API key; `wandb login` asks for it")
            project, seconds = config.log.wandb_project, max(1.0, end - time.monotonic() - GRACE - 1)
            return connect(self._run_dir, config, run_id, about, mode, project, FINISH_TIMEOUT, seconds)

        run = _within(START_TIMEOUT, login_and_connect)
        offline = mode == "offline"
        self._first_unsent_row = _read_marker(self._marker, run_id, recorded) if offline else run.starting_step
        self._run = run

    def log(self, record: Record) -> None:
        """Send the next record of metrics.jsonl, unless it was sent before."""
        row = self._rows.number(record)
        if self._run is not None and row >= self._first_unsent_row:
            self._attempt(lambda: self._send(record, row))

    def _send(self, record: Record, row: int) -> None:
        self._run.log(record, step=row)
        if self._marker:
            with contextlib.suppress(OSError):  # a full disk; without it a resume counts all recorded rows as sent
                with open(self._marker, "w", opener=open_regular) as file:
                    file.write(f"{row + 1}\n")

    def close(self, failed: bool = False) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.finish(exit_code=int(failed)))
            self._run = None

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            reason = (str(error).splitlines() or [""])[0]
            print_line(
                f"warning: no Weights & Biases from here on ({type(error).__name__}: {reason}); {METRICS} has "
                f"everything, `{command_line('wandb-export')} {self._run_dir}` sends what is missing",
                error=True,
            )


class RowNumbers:
    """Numbers the records of a metrics file, in its order."""

    def __init__(self) -> None:
        self._step, self._nth = -1, 0

    def number(self, record: Record) -> int:
        self._nth = self._nth + 1 if record["step"] == self._step else 0
        self._step = record["step"]
        return ROWS_PER_STEP * self._step + min(self._nth, ROWS_PER_STEP - 1)


def next_row(records: Iterable[Record]) -> int:
    """Return the number that follows the last record's."""
    rows = RowNumbers()
    return max((rows.number(record) for record in records), default=-1) + 1


def _within(seconds: float, function: Callable[[], Any]) -> Any:
    """Return function(), called in a thread, which is left behind by TimeoutError after `seconds`."""
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name="wandb", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        if result.done():  # a TimeoutError of wandb's own
            raise
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _read_marker(marker: Path, run_id: str, recorded: int) -> int:
    """Return the first unsent row; without a marker, `recorded` if wandb's directory shows that rows were sent."""
    try:
        return int(read_regular(marker, most=100))
    except (OSError, ValueError):
        # earlier versions wrote no marker, and a kill can leave it empty
        sent = any(marker.parent.glob(f"offline-run-*-{run_id}*"))
        return recorded if sent else 0


def new_id() -> str:
    """Return a random id of a run; in a sweep the one that its agent has chosen, since wandb.init takes no other."""
    chosen = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
    return chosen or secrets.token_hex(4)


def connect(
    run_dir: Path,
    config: Config,
    run_id: str,
    about: dict[str, Any] | None,
    mode: Literal["online", "offline"],
    project: str,
    finish_timeout: float,
    init_timeout: float = START_TIMEOUT - GRACE,
) -> Any:
    """Return the wandb run `run_id`, new or continued; any exception of wandb's passes.

    finish_timeout, init_timeout: seconds; the first 0 for none
    """
    import wandb

    sent = json.loads(valid_unicode(json.dumps(config.to_dict() | {"run": about}, ensure_ascii=False)))
    run = wandb.init(
        project=project,
        name=valid_unicode(run_dir.resolve().name),
        dir=str(run_dir),
        id=run_id,
        resume="allow",
        mode=mode,
        config=sent,
        allow_val_change=True,  # a resumed run may have other optimizer or evaluation settings
        settings=wandb.Settings(
            init_timeout=init_timeout, finish_timeout=finish_timeout, finish_timeout_raises=finish_timeout > 0
        ),
    )
    run.define_metric("*", step_metric="step")
    return run


def send_missing(run_dir: Path, project: str | None = None, new_run: bool = False) -> tuple[int, int, str]:
    """Send the records that the server lacks, or all of them to a new run; return (sent, records, address).

    Raise ConfigError if `run_dir` holds no run, wandb is missing or the server cannot be reached; a repeated call
    continues.
    """
    path = run_dir / METRICS
    if not path.is_file() or not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: no {METRICS} and config.yaml there; expected a run directory")
    try:
        records, found = read_metrics(path), read_run(run_dir)
    except OSError as error:
        todo = "remove it, or copy the run without it"
        raise ConfigError(f"wandb-export: cannot read {run_dir}: {error.strerror}; {todo}") from error
    starts, run_id = found.get("starts") or [], found.get("wandb_id")
    about = starts[-1] if starts else None
    config = load_config(run_dir / "config.yaml", gpus=(about or {}).get("gpus", 1))
    if new_run or not run_id:
        run_id = new_id()
        try:
            write_run(run_dir, run_id, starts)
        except OSError as error:
            raise ConfigError(f"wandb-export: cannot write to {run_dir}: {error.strerror}; copy the run") from error
    try:
        run = connect(run_dir, config, run_id, about, "online", project or config.log.wandb_project, 0)
        sent = _send_from(run, records, first_unsent_row=run.starting_step)
        address = run.url or run_id
        run.finish()
    except ModuleNotFoundError:
        raise ConfigError("wandb-export: wandb is not installed; pip install wandb") from None
    except Exception as error:  # wandb's, or of its process
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"wandb-export: Weights & Biases cannot be reached ({type(error).__name__}: {reason}); "
            "check the network and `wandb login`, then run it again: it continues where it stopped"
        ) from error
    return sent, len(records), address


def _send_from(run: Any, records: list[Record], first_unsent_row: int) -> int:
    """Send the records from this row on; return how many."""
    rows, sent = RowNumbers(), 0
    for record in records:
        row = rows.number(record)
        if row >= first_unsent_row:
            run.log(record, step=row)
            sent += 1
    return sent
