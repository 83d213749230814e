"""What a run tells: one console line a step, metrics.jsonl (metrics.py), main.log and wandb (mirror.py) made from it.

Lines are written as they come.  A resumed run first drops what lies after its checkpoint, so that in the end the files
hold the lines of an unbroken run, the times (ms, tok_s, mfu) aside.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.console import Lines, print_line
from gpt2_triton.errors import ConfigError
from gpt2_triton.model.step import StepResult
from gpt2_triton.training.lr_schedule import learning_rate
from gpt2_triton.training.metrics import (
    MAIN_LOG,
    METRICS,
    STATS,
    Record,
    finite,
    llmc_line,
    read_metrics,
    replace_text,
    truncate,
)
from gpt2_triton.training.run_info import read_run, write_run
from gpt2_triton.training.wandb_logger import WandbLogger, row_after


class Logger:
    """Writes config.yaml and run.json at once and metrics as they come; `step` is always the number of finished steps.

    `about` is what provenance.describe tells of this start.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        resume_step: int = 0,
        wandb_id: str | None = None,
        about: dict[str, Any] | None = None,
    ):
        self.config, self.steps = config, config.train.steps
        self._first = True
        self._seconds: float | None = None
        peak = device.peak_flops() if config.train.dtype == "bf16" else None  # the table's peaks are bf16
        self._mfu_of_tok_s = config.flops_per_token / (peak * config.gpus) if peak else None
        self._run_dir, self._about = run_dir, about
        try:
            self._begin(resume_step, wandb_id)
        except OSError as error:
            raise ConfigError(f"--run_dir: cannot write to {run_dir}: {error.strerror}; choose another") from error

    def _begin(self, resume_step: int, wandb_id: str | None) -> None:
        run_dir, config, about = self._run_dir, self.config, self._about
        offline = config.log.wandb == "offline" and (run_dir / METRICS).exists()
        handed_over = row_after(read_metrics(run_dir / METRICS)) if offline else 0
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        before = self._go_on_after(resume_step)
        found = read_run(run_dir) if resume_step else {}
        wandb_id = found.get("wandb_id") or wandb_id  # an export or a rewind may have made it after the checkpoint
        self._mirror = WandbLogger(run_dir, config, wandb_id, about, before, handed_over)
        starts = found.get("starts", [])
        write_run(run_dir, self.wandb_id, [*starts, about] if about else starts)

    def _go_on_after(self, step: int) -> list[Record]:
        """Open the files to append to, with what they hold up to `step`; return the metrics of it."""
        before = truncate(self._run_dir / METRICS, step)
        self._file = Lines(self._run_dir / METRICS)
        llmc = self.config.log.main_log == "llmc"
        self._main_log = _open_main_log(self._run_dir / MAIN_LOG, before) if llmc else None
        self._stats = _open_stats(self._run_dir / STATS, step) if self.config.log.stats_every else None
        return before

    @property
    def wandb_id(self) -> str | None:
        """The run's id at Weights & Biases, for the checkpoint; None when there is no such run."""
        return self._mirror.run_id

    def info(self, text: str) -> None:
        print_line(text)

    def step(self, step: int, result: StepResult, cause: str = "") -> None:
        """Report a finished step; with log.every k only each k-th, the last, and those that were skipped.  `cause` says
        what was not finite.
        """
        loss, norm, applied, seconds, z, _ = result
        self._measure(seconds)
        if step % self.config.log.every and step != self.steps and applied:
            return
        lr, tokens = learning_rate(step - 1, self.config.optim, self.steps), self.config.total_batch_tokens
        ms, tok_s = seconds * 1e3, tokens / seconds
        mfu = tok_s * self._mfu_of_tok_s if self._mfu_of_tok_s else None
        times = {"ms": ms, "tok_s": tok_s, "mfu": mfu}
        record = {"step": step, "loss": loss, "lr": lr, "norm": norm, **times, "tokens": step * tokens}
        record |= {"loss_z": z[0], "norm_z": z[1]} if any(z) else {}
        record |= {} if applied else {"skipped": True}
        self._write(record | ({"outlier": True} if result.outlier else {}))
        line = f"{self._at(step)} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.4f} | {ms:.1f} ms | {tok_s:,.0f} tok/s"
        line += f" | mfu {mfu:.1%}" if mfu else ""
        line += f" | eta {duration((self._seconds or seconds) * (self.steps - step))}"
        first_non_finite = f"not finite{cause and ', first: '}{cause}"
        why = f"outlier, loss z {z[0]:.1f}, norm z {z[1]:.1f}" if result.outlier else first_non_finite
        self.info(line + ("" if applied else f" | skipped: {why}"))

    def rewind(self, step: int, target: int, sample: int) -> None:
        """The run goes back from `step` to `target` and on with `sample`: forget what lies between.  Rows at Weights &
        Biases cannot be taken back, so the run goes on in a new one there.
        """
        self._close_files()
        before = self._go_on_after(target)
        self._mirror.close(failed=True)
        self._mirror = WandbLogger(self._run_dir, self.config, None, self._about, before)
        write_run(self._run_dir, self.wandb_id, read_run(self._run_dir).get("starts", []))
        record = {"step": target, "rewound_from": step, "sample": sample}
        if record not in before:  # a run that is resumed before its next checkpoint comes by again
            self._write(record)
        self.info(f"{self._at(step)} | rewind to step {target}; data goes on at sample {sample:,}")

    def _measure(self, seconds: float) -> None:
        """Running mean of a step's time, for the eta; the first step compiles and does not count."""
        if self._first:
            self._first = False
        else:
            self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds

    def _at(self, step: int) -> str:
        return f"step {step:{len(str(self.steps))}d}/{self.steps}"

    def statistics(self, step: int, record: dict[str, Any], summary: str) -> None:
        """Append a record of watch.py to stats.jsonl, which Weights & Biases does not get: it has a number a layer."""
        assert self._stats is not None
        self._stats.write(json.dumps({"step": step} | record, allow_nan=False) + "\n")
        self.info(f"{self._at(step)} | stats: {summary}")

    def validation(self, step: int, loss: float) -> None:
        self._write({"step": step, "val_loss": loss})
        self.info(f"{self._at(step)} | val loss {loss:.4f}")

    def hellaswag(self, step: int, acc: float, acc_norm: float) -> None:
        self._write({"step": step, "hellaswag": acc_norm, "hellaswag_acc": acc})
        self.info(f"{self._at(step)} | hellaswag acc_norm {acc_norm:.4f}, acc {acc:.4f} (completion style)")

    def sample(self, step: int, text: str) -> None:
        self._write({"step": step, "sample": text})
        self.info(f"--- sample after step {step} ---\n{text}\n---")

    def close(self, failed: bool = False) -> None:
        self._close_files()
        self._mirror.close(failed)

    def _close_files(self) -> None:
        for file in (self._file, self._main_log, self._stats):
            if file:
                file.close()

    def _write(self, record: Record) -> None:
        record = finite(record)
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        if self._main_log:
            self._main_log.write(llmc_line(record))
        self._mirror.log(record)


class NullLogger:
    """The Logger of every rank but the first."""

    wandb_id = None

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args, **keywords: None


def _open_stats(path: Path, step: int) -> Lines:
    truncate(path, step)
    return Lines(path)


def _open_main_log(path: Path, before: list[Record]) -> Lines:
    """llm.c's main.log, made anew from the records so far: on resume llm.c itself leaves lines of steps undone."""
    replace_text(path, "".join(map(llmc_line, before)))
    return Lines(path)


def duration(seconds: float) -> str:
    """1h 23m, 4m 05s or 12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h {m:02d}m" if hours else f"{m}m {s:02d}s" if m else f"{s}s"
