"""The log of a run: one console line per step, and metrics.jsonl, which
also feeds Weights & Biases.

Each line is written at once.  A resumed run first drops the lines after its checkpoint.  The final
files therefore equal the files of an unbroken run, except for times (ms, tok_s, mfu).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.console import LogFile, duration, print_line
from gpt2_triton.data.tokenizer import keep_vocabulary
from gpt2_triton.files import write_atomic
from gpt2_triton.model.step import StepResult
from gpt2_triton.training.lr_schedule import learning_rate
from gpt2_triton.training.metrics import METRICS, STATS, Record, line_of, null_non_finite, truncate
from gpt2_triton.training.run_info import read_run, write_run
from gpt2_triton.training.wandb_logger import WandbLogger


class Logger:
    """Writes config.yaml, run.json and Llama 3's vocabulary at once, then each record;
    `step` counts finished steps.

    resume_step: 0 for a new run; a resumed run drops the records of later steps
    about: this start, from run_info.describe_start
    gpus: number of GPUs; MFU is a fraction of the sum of their peaks
    """

    def __init__(
        self,
        run_dir: Path,
        config: Config,
        resume_step: int = 0,
        about: dict[str, Any] | None = None,
        gpus: int = 1,
    ):
        self.config = config
        self.steps = config.train.steps
        self._is_first_step = True
        self._mean_seconds: float | None = None
        # device.py knows no other peaks
        peak = device.peak_flops() if config.train.dtype == "bf16" else None
        self._mfu_per_tok_s = config.flops_per_token / (peak * gpus) if peak else None
        self._run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self._open_files(resume_step)
        found = read_run(run_dir) if resume_step else {}
        self._wandb = WandbLogger(run_dir, config, found.get("wandb_id"), about)
        # others may read it meanwhile
        write_atomic(run_dir / "config.yaml", config.to_yaml().encode())
        keep_vocabulary(config.data.tokenizer, run_dir)
        starts = found.get("starts", [])
        write_run(run_dir, self._wandb.run_id, [*starts, about] if about else starts)

    def _open_files(self, step: int) -> None:
        """Drop the lines of steps after `step`, and open the files to append to."""
        history = truncate(self._run_dir / METRICS, step)
        self._of_last_step = [record for record in history if record["step"] == step]
        self._file = LogFile(self._run_dir / METRICS)
        truncate(self._run_dir / STATS, step)
        self._stats = LogFile(self._run_dir / STATS) if self.config.log.stats_every else None
        self._files = [file for file in (self._file, self._stats) if file]

    def info(self, text: str) -> None:
        """Print a line; metrics.jsonl does not have it."""
        print_line(text)

    def step(self, step: int, result: StepResult, cause: str = "") -> None:
        """Report a finished step, if it is due, last or skipped; `cause`: the first
        tensor that was not finite.
        """
        loss, norm, applied, seconds, z, *_ = result
        self._measure(seconds)
        if step % self.config.log.every and step != self.steps and applied:
            return
        lr = learning_rate(step - 1, self.config.optim, self.steps)
        tokens = self.config.train.step_tokens
        ms = seconds * 1e3
        tok_s = tokens / seconds
        mfu = tok_s * self._mfu_per_tok_s if self._mfu_per_tok_s else None
        record = dict(
            step=step,
            loss=loss,
            lr=lr,
            norm=norm,
            ms=ms,
            tok_s=tok_s,
            mfu=mfu,
            tokens=step * tokens,
        )
        if any(z):
            record |= {"loss_z": z[0], "norm_z": z[1]}
        if not applied:
            record["skipped"] = True
        if result.outlier:
            record["outlier"] = True
        self._write(record)
        line = (
            f"{self._at(step)} | loss {loss:.4f} | lr {lr:.2e} | norm {norm:.4f} "
            f"| {ms:.1f} ms | {tok_s:,.0f} tok/s"
        )
        if mfu:
            line += f" | mfu {mfu:.1%}"
        line += f" | eta {duration((self._mean_seconds or seconds) * (self.steps - step))}"
        if result.outlier:
            line += f" | skipped: outlier, loss z {z[0]:.1f}, norm z {z[1]:.1f}"
        elif not applied:
            line += " | skipped: not finite"
            line += f", first: {cause}" if cause else ""
        self.info(line)

    def rewind(self, step: int, target: int, sample: int) -> None:
        """Drop the records after `target`, to which the run returns from `step`;
        data continues with `sample`.
        """
        self._close_files()
        self._open_files(target)
        self._write({"step": target, "rewound_from": step, "sample": sample})
        self.info(
            f"{self._at(step)} | rewind to step {target}; data continues at sample {sample:,}"
        )

    def _measure(self, seconds: float) -> None:
        """Update the mean of a step's time for the eta, without the first, which compiles."""
        if self._is_first_step:
            self._is_first_step = False
        else:
            self._mean_seconds = 0.9 * (self._mean_seconds or seconds) + 0.1 * seconds

    def _at(self, step: int) -> str:
        return f"step {step:{len(str(self.steps))}d}/{self.steps}"

    def statistics(self, step: int, record: dict[str, Any], summary: str) -> None:
        """Append tensor statistics to stats.jsonl alone: a number per layer would fill a chart."""
        assert self._stats is not None
        self._stats.write(line_of({"step": step} | record))
        self.info(f"{self._at(step)} | stats: {summary}")

    def validation(
        self, step: int, loss: float, fp8_loss: float | None, by_source: Mapping[str, float]
    ) -> None:
        """Log a validation loss, in an fp8 run also the loss of the forward pass in fp8, and the
        loss of each source of several.
        """
        record = {"step": step, "val_loss": loss}
        also = ""
        if fp8_loss is not None:
            record["val_loss_fp8"] = fp8_loss
            also = f", in fp8 {fp8_loss:.4f}"
        self._write(record | {f"val_loss_{name}": value for name, value in by_source.items()})
        also += "".join(f", {name} {value:.4f}" for name, value in by_source.items())
        self.info(f"{self._at(step)} | val loss {loss:.4f}{also}")

    def hellaswag(self, step: int, acc: float, acc_norm: float) -> None:
        """Report the accuracy on HellaSwag, by the sum of losses and by loss per token."""
        self._write({"step": step, "hellaswag": acc_norm, "hellaswag_acc": acc})
        self.info(
            f"{self._at(step)} | hellaswag acc_norm {acc_norm:.4f}, "
            f"acc {acc:.4f} (completion style)"
        )

    def sample(self, step: int, text: str) -> None:
        """Report a generated text."""
        self._write({"step": step, "sample": text})
        self.info(f"--- sample after step {step} ---\n{text}\n---")

    def close(self, failed: bool = False) -> None:
        """Close the files, and end the run of Weights & Biases."""
        self._close_files()
        self._wandb.close(failed)

    def sync(self) -> None:
        """Return once all lines are on the disk."""
        for file in self._files:
            file.sync()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def _write(self, record: Record) -> None:
        record = null_non_finite(record)
        # a second resume from one checkpoint repeats its first records
        if record in self._of_last_step:
            return
        self._file.write(line_of(record))
        self._wandb.log(record)


class NullLogger:
    """The Logger of all ranks except rank 0: does nothing."""

    def __getattr__(self, method: str) -> Callable[..., None]:
        return lambda *args, **keywords: None
