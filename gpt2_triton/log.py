"""What a run tells: one console line a step, metrics.jsonl (the truth), and a mirror of it to Weights & Biases.

metrics.jsonl has one object a line, each with `step`, the number of finished steps:
    {"step": 12, "loss": ..., "lr": ..., "norm": ..., "ms": ..., "tok_s": ..., "mfu": ..., "tokens": ...}
    {"step": 250, "val_loss": ...}   and   {"step": 250, "sample": ...}
    {"step": 250, "hellaswag": acc_norm, "hellaswag_acc": acc}
    {"step": 300, "rewound_from": 412, "sample": ...}
A step has "loss_z" and "norm_z" besides once 128 steps are known, and "skipped": true when its update was skipped, as
an outlier also "outlier": true.  Lines are written as they come.  A resumed run first drops what lies after its
checkpoint, so that in the end the file holds the lines of an unbroken run, the times (ms, tok_s, mfu) aside; a rewind
does the same.  Numbers that are not finite are null: JSON has no NaN.
"""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from gpt2_triton import gpus
from gpt2_triton.config import Config
from gpt2_triton.optim import learning_rate

METRICS, STATS = "metrics.jsonl", "stats.jsonl"
WANDB_TIMEOUT = 30  # seconds to wait for the server before training goes on without it; the default is 90


class Logger:
    """Writes config.yaml at once and metrics as they come; `step` is always the number of finished steps."""

    def __init__(self, run_dir: Path, config: Config, resume_step: int = 0, wandb_id: str | None = None):
        self.config, self.steps = config, config.train.steps
        self._first = True
        self._seconds: float | None = None
        peak = gpus.peak_flops() if config.train.dtype == "bf16" else None  # the table's peaks are bf16
        self._mfu_of_tok_s = gpus.flops_per_token(config) / peak if peak else None
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
        self._metrics = run_dir / METRICS
        self._file = _open_after(self._metrics, resume_step)
        self._stats = run_dir / STATS if config.log.stats_every else None
        if self._stats:
            _open_after(self._stats, resume_step).close()
        self._wandb = Wandb(run_dir, config, wandb_id)

    @property
    def wandb_id(self) -> str | None:
        """The run's id at Weights & Biases, for the checkpoint; None when there is no such run."""
        return self._wandb.run_id

    def note(self, text: str) -> None:
        print(text, flush=True)

    def step(
        self,
        step: int,
        loss: float,
        norm: float,
        seconds: float,
        skipped: bool = False,
        z: tuple[float, float] = (0.0, 0.0),
        cause: str = "",
    ) -> None:
        """Report a finished step; with log.every k only each k-th, the last, and those that were skipped.  `z` are the
        z-scores of loss and norm, `cause` says what was not finite.
        """
        self._measure(seconds)
        if step % self.config.log.every and step != self.steps and not skipped:
            return
        lr, tokens = learning_rate(step - 1, self.config.optim, self.steps), self.config.total_batch_tokens
        ms, tok_s = seconds * 1e3, tokens / seconds
        mfu = tok_s * self._mfu_of_tok_s if self._mfu_of_tok_s else None
        times = {"ms": ms, "tok_s": tok_s, "mfu": mfu}
        record = {"step": step, "loss": loss, "lr": lr, "norm": norm, **times, "tokens": step * tokens}
        outlier = skipped and math.isfinite(loss) and math.isfinite(norm)
        record |= {"loss_z": z[0], "norm_z": z[1]} if any(z) else {}
        self._write(record | ({"skipped": True} if skipped else {}) | ({"outlier": True} if outlier else {}))
        line = f"{self._at(step)} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.4f} | {ms:.1f} ms | {tok_s:,.0f} tok/s"
        line += f" | mfu {mfu:.1%}" if mfu else ""
        line += f" | eta {duration((self._seconds or seconds) * (self.steps - step))}"
        why = (
            f"outlier, loss z {z[0]:.1f}, norm z {z[1]:.1f}" if outlier else f"not finite{cause and ', first: '}{cause}"
        )
        self.note(line + (f" | skipped: {why}" if skipped else ""))

    def rewind(self, step: int, target: int, sample: int) -> None:
        """The run goes back from `step` to `target` and on with `sample`: forget what lies between."""
        self._file.close()
        self._file = _open_after(self._metrics, target)
        if self._stats:
            _open_after(self._stats, target).close()
        record = {"step": target, "rewound_from": step, "sample": sample}
        if record not in read_metrics(self._metrics):  # a run that is resumed before its next checkpoint comes by again
            self._write(record)
        self.note(f"{self._at(step)} | rewind to step {target}; data goes on at sample {sample:,}")

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
        with open(self._stats, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | record, allow_nan=False) + "\n")
        self.note(f"{self._at(step)} | stats: {summary}")

    def validation(self, step: int, loss: float) -> None:
        self._write({"step": step, "val_loss": loss})
        self.note(f"{self._at(step)} | val loss {loss:.4f}")

    def hellaswag(self, step: int, acc: float, acc_norm: float) -> None:
        self._write({"step": step, "hellaswag": acc_norm, "hellaswag_acc": acc})
        self.note(f"{self._at(step)} | hellaswag acc_norm {acc_norm:.4f}, acc {acc:.4f} (completion style)")

    def sample(self, step: int, text: str) -> None:
        self._write({"step": step, "sample": text})
        self.note(f"--- sample after step {step} ---\n{text}\n---")

    def close(self) -> None:
        self._file.close()
        self._wandb.close()

    def _write(self, record: dict[str, Any]) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._wandb.log(finite)


class Wandb:
    """Weights & Biases at best effort: the first failure is one warning, and then there is nothing to mirror to."""

    def __init__(self, run_dir: Path, config: Config, run_id: str | None):
        self._run: Any = None
        self.run_id = run_id
        if config.log.wandb == "disabled":
            return
        try:
            import wandb

            self._run = wandb.init(
                project=config.log.wandb_project, name=run_dir.name, dir=str(run_dir), id=run_id, resume="allow",
                mode=config.log.wandb, config=config.to_dict(), settings=wandb.Settings(init_timeout=WANDB_TIMEOUT),
            )  # fmt: skip
            # its own counter drops what is logged for an earlier step, as happens after a resume; ours is a metric
            self._run.define_metric("*", step_metric="step")
            self.run_id = self._run.id
        except Exception as error:
            self._give_up(error)

    def log(self, record: dict[str, Any]) -> None:
        self._attempt("log", record)

    def close(self) -> None:
        self._attempt("finish")

    def _attempt(self, method: str, *arguments: Any) -> None:
        if self._run is None:
            return
        try:
            getattr(self._run, method)(*arguments)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._run = None
        reason = (str(error).splitlines() or [""])[0]
        print(
            f"warning: no Weights & Biases from here on ({type(error).__name__}: {reason}); {METRICS} has everything",
            file=sys.stderr,
            flush=True,
        )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a crash cut short is left out."""
    with open(path, encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if line.endswith("\n")]
    return [json.loads(line) for line in lines if line.strip()]


def _open_after(path: Path, resume_step: int) -> TextIO:
    """The file to append to, with the records up to resume_step; all go when the run starts afresh."""
    if path.exists():
        _truncate(path, resume_step)
    return open(path, "a", buffering=1, encoding="utf-8")


def _truncate(path: Path, resume_step: int) -> None:
    kept = [record for record in read_metrics(path) if record["step"] <= resume_step] if resume_step else []
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)


def duration(seconds: float) -> str:
    """1h 23m, 4m 05s or 12s."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h {m:02d}m" if hours else f"{m}m {s:02d}s" if m else f"{s}s"
