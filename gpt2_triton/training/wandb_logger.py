"""Weights & Biases: sends the records of metrics.jsonl while training.

wandb's environment variables win over our keys.  A row's step is the training step.  A resumed run
continues under the id in run.json.  The server drops rows of steps that it already has.  After a
crash these are the steps computed again; after a rewind, all steps up to the failed step.
"""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_triton.config.config import Config
from gpt2_triton.console import print_line
from gpt2_triton.training.metrics import METRICS, Record

START_SECONDS = 20.0  # wandb.init waits so long for a server, and may add 10
END_SECONDS = 60.0  # wandb.finish sends the last rows for so long


class WandbLogger:
    """Sends records as rows.  The first failure prints a warning and ends
    the sending; the run goes on.

    `close` prints the warning again: hours of steps have passed since the first one.
    """

    def __init__(
        self, run_dir: Path, config: Config, run_id: str | None, about: dict[str, Any] | None
    ):
        """`run_id`: the run to continue at Weights & Biases; None starts a new one."""
        self._run: Any = None
        self._failure = ""
        self.run_id = run_id
        mode: str = config.log.wandb
        if mode == "online":
            mode = os.environ.get("WANDB_MODE") or mode
        if mode != "disabled":
            # a sweep chooses the id
            self.run_id = run_id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)
            self._attempt(lambda: self._start(run_dir, config, mode, about))

    def _start(
        self, run_dir: Path, config: Config, mode: Any, about: dict[str, Any] | None
    ) -> None:
        """Begin the run at W&B, or continue it; LookupError without a key."""
        import wandb

        # wandb.init would ask, and wait for ever
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            raise LookupError("no API key; `wandb login` asks for it")
        log = config.log
        ours: dict[str, tuple[str, Any]] = {
            "WANDB_PROJECT": ("project", log.wandb_project or "gpt2_triton"),
            "WANDB_NAME": ("name", log.wandb_name or run_dir.resolve().name),
            "WANDB_ENTITY": ("entity", log.wandb_entity),
            "WANDB_RUN_GROUP": ("group", log.wandb_group),
            "WANDB_TAGS": ("tags", log.wandb_tags and log.wandb_tags.split(",")),
            "WANDB_DIR": ("dir", str(run_dir)),
        }
        given = [argument for variable, argument in ours.items() if not os.environ.get(variable)]
        self._run = wandb.init(
            **dict(given),
            id=self.run_id,
            resume="allow",
            mode=mode,
            config=config.to_dict() | {"run": about},
            allow_val_change=True,  # a resumed run may have other optimizer or evaluation settings
            settings=wandb.Settings(
                init_timeout=START_SECONDS, finish_timeout=END_SECONDS, finish_timeout_raises=True
            ),
        )

    def log(self, record: Record) -> None:
        """Send a record; the first failure ends sending."""
        if self._run is not None:
            self._attempt(lambda: self._run.log(record, step=record["step"]))

    def close(self, failed: bool = False) -> None:
        """End the wandb run; `failed` marks it so."""
        if self._failure:
            self._warn("W&B lacks steps of this run")
        if self._run is not None:
            self._attempt(lambda: self._run.finish(exit_code=int(failed)))
            self._run = None

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            self._failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            self._warn("no Weights & Biases from here on")

    def _warn(self, what: str) -> None:
        print_line(f"warning: {what} ({self._failure}); {METRICS} has everything", error=True)
