"""Weights & Biases as a mirror of metrics.jsonl: at best effort while training, in full afterwards by `export`.

Each record becomes one row.  A row's number, wandb's `_step`, is ROWS_A_STEP * step + (records of that step before it):
it follows from the file alone.  The server holds rows up to some number, so whoever connects, a resumed run after
a crash or an export after an outage, sends exactly the records past it; what was sent is never sent twice.
Charts have our `step` as their axis.
"""

import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from gpt2_triton.config.config import Config
from gpt2_triton.config.load import load_config
from gpt2_triton.errors import ConfigError
from gpt2_triton.training.metrics import METRICS, Record, read_metrics
from gpt2_triton.training.run_info import read_run, write_run

ROWS_A_STEP = 8  # more than the kinds of records
INIT_TIMEOUT = 20.0  # seconds; wandb may take ten more to notice, and a start is to wait 30 at most
FINISH_TIMEOUT = 60.0  # seconds to send the last rows; what stays behind is a case for `export`


class WandbLogger:
    """The first failure is one warning, and from then on there is nothing to mirror to; training never waits for it.

    `before` are the records that the run goes on from, `handed_over` the number of the first row that no process of the
    run has given to wandb: offline, where no server can be asked, it is what tells the missing rows.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        run_id: str | None,
        about: dict[str, Any] | None = None,
        before: Iterable[Record] = (),
        handed_over: int = 0,
    ):
        self._run: Any = None
        self._start = 0  # rows below it were sent before
        self._run_dir, self._rows = run_dir, Rows()
        self.run_id = run_id
        mode = config.log.wandb
        if mode == "disabled":
            return
        self.run_id = run_id or new_id()  # ours, so that an export after an outage has one
        if not any(run_dir.glob(f"wandb/offline-run-*-{self.run_id}*")):
            handed_over = 0
        self._attempt(lambda: self._connect(config, about, mode, handed_over))
        for record in before:
            self.log(record)

    def _connect(
        self, config: Config, about: dict[str, Any] | None, mode: Literal["online", "offline"], handed_over: int
    ) -> None:
        import wandb

        assert self.run_id is not None
        if mode == "online" and not wandb.login(
            prompt=False, verify=False
        ):  # init would ask on a terminal, and wait for ever
            raise LookupError("no API key; `wandb login` asks for it")
        run = connect(self._run_dir, config, self.run_id, about, mode, config.log.wandb_project, FINISH_TIMEOUT)
        self._run, self._start = run, handed_over if mode == "offline" else run.starting_step

    def log(self, record: Record) -> None:
        row = self._rows.number(record)
        if self._run is not None and row >= self._start:
            self._attempt(lambda: self._run.log(record, step=row))

    def close(self, failed: bool = False) -> None:
        if self._run is not None:
            self._attempt(lambda: self._run.finish(exit_code=int(failed)))
            self._run = None

    def _attempt(self, action: Any) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            reason = (str(error).splitlines() or [""])[0]
            print(
                f"warning: no Weights & Biases from here on ({type(error).__name__}: {reason}); {METRICS} has "
                f"everything, `python -m gpt2_triton wandb-export {self._run_dir}` sends what is missing",
                file=sys.stderr,
                flush=True,
            )


class Rows:
    """Numbers the records of a metrics file, in its order."""

    def __init__(self) -> None:
        self._step, self._nth = -1, 0

    def number(self, record: Record) -> int:
        self._nth = self._nth + 1 if record["step"] == self._step else 0
        self._step = record["step"]
        return ROWS_A_STEP * self._step + self._nth


def row_after(records: Iterable[Record]) -> int:
    """The number that follows the last record's."""
    rows = Rows()
    return max((rows.number(record) for record in records), default=-1) + 1


def new_id() -> str:
    return secrets.token_hex(4)


def connect(
    run_dir: Path,
    config: Config,
    run_id: str,
    about: dict[str, Any] | None,
    mode: Literal["online", "offline"],
    project: str,
    finish_timeout: float,
) -> Any:
    """The run `run_id` at the server, new or gone on with; whatever wandb raises comes through.  0 waits for ever."""
    import wandb

    run = wandb.init(
        project=project,
        name=run_dir.resolve().name,
        dir=str(run_dir),
        id=run_id,
        resume="allow",
        mode=mode,
        config=config.to_dict() | {"run": about},
        allow_val_change=True,  # a resumed run may have other optimizer or evaluation settings
        settings=wandb.Settings(
            init_timeout=INIT_TIMEOUT, finish_timeout=finish_timeout, finish_timeout_raises=finish_timeout > 0
        ),
    )
    run.define_metric("*", step_metric="step")
    return run


def export(run_dir: Path, project: str | None = None, afresh: bool = False) -> tuple[int, int, str]:
    """Send the records that the server lacks, or all of them to a new run; return (sent, records, address).

    ConfigError if `run_dir` holds no run, wandb is missing or the server cannot be reached; calling it again goes on.
    """
    path = run_dir / METRICS
    if not path.is_file() or not (run_dir / "config.yaml").is_file():
        raise ConfigError(f"{run_dir}: no {METRICS} and config.yaml there; expected a run directory, as train.py makes")
    records, found = read_metrics(path), read_run(run_dir)
    starts, run_id = found.get("starts") or [], found.get("wandb_id")
    about = starts[-1] if starts else None
    config = load_config(run_dir / "config.yaml", gpus=(about or {}).get("gpus", 1))
    if afresh or not run_id:
        run_id = new_id()
        try:
            write_run(run_dir, run_id, starts)
        except OSError as error:
            raise ConfigError(f"wandb-export: cannot write to {run_dir}: {error.strerror}; copy the run") from error
    try:
        run = connect(run_dir, config, run_id, about, "online", project or config.log.wandb_project, 0)
        rows, sent = Rows(), 0
        for record in records:
            row = rows.number(record)
            if row >= run.starting_step:
                run.log(record, step=row)
                sent += 1
        address = run.url or run_id
        run.finish()
    except ModuleNotFoundError:
        raise ConfigError("wandb-export: wandb is not installed; pip install 'gpt2_triton[wandb]'") from None
    except Exception as error:  # wandb's own, or of its process
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"wandb-export: Weights & Biases cannot be reached ({type(error).__name__}: {reason}); "
            "check the network and `wandb login`, then run it again: it goes on where it stopped"
        ) from error
    return sent, len(records), address
