"""The training loop: data in, schedule on the device, metrics and checkpoints out.

A run is a pure function of its configuration: step s takes the global samples [s*G, (s+1)*G), draws its rounding
noise from (seed, s), and logs no clock but in fields named so.  Stopping after any step and resuming from its
checkpoint therefore gives the bytes of the unbroken run.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpt2_triton.kernels as K
from gpt2_triton import checkpoint, hellaswag, stability, watch
from gpt2_triton.arena import GIB
from gpt2_triton.config import Config
from gpt2_triton.data.loader import Prefetcher, TrainLoader, ValidationLoader
from gpt2_triton.data.prepare import builtin_shards
from gpt2_triton.data.shards import fingerprint, open_shards
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.gpus import device_name
from gpt2_triton.log import Logger
from gpt2_triton.model import GPT2
from gpt2_triton.optim import hyper_row
from gpt2_triton.planning import MODULE_BYTES, choose_recompute
from gpt2_triton.provenance import describe
from gpt2_triton.sample import continuations
from gpt2_triton.sources import initial_weights
from gpt2_triton.stability import NonFinite, Rewind
from gpt2_triton.stream import Step


def train(config: Config, run_dir: Path, resume: bool) -> int:
    """Train to the last step, or until a signal; return the exit code (0 done, 130 or 143 stopped; the checkpoint of
    the last finished step is saved).
    """
    found = checkpoint.latest(run_dir) if resume else None
    trainer = Trainer(config, run_dir, found)
    code = 1
    try:
        code = trainer.run()
        return code
    except NonFinite:
        trainer.in_flight = None  # the run ends with the step that the message names
        raise
    finally:
        trainer.close(failed=code == 1)


class Trainer:
    """Everything one run holds; `run` is the loop."""

    def __init__(self, config: Config, run_dir: Path, found: Path | None):
        self.config, self.run_dir, self.device = config, run_dir, device_name()
        self.context_bytes = self._used_bytes()
        self.stopped_by = 0
        self.notes: list[str] = []
        train_shards, val_shards = self._open_data()
        self.data = fingerprint(train_shards)
        self.state: dict[str, Any] = {"step": 0, "sample": 0, "wandb_id": None} | stability.COUNTS
        tensors = self._load(found) if found else initial_weights(config)
        if config.sample.every:
            get_tokenizer(config.data.tokenizer)  # where it cannot be had, fail now and not at the first sample
        self.questions = hellaswag.questions_of_run(config)
        self.loader = TrainLoader(train_shards, config.train.seq_len, config.data.seed)
        self.validation = (
            ValidationLoader(val_shards, config.train.seq_len, config.eval.tokens) if config.eval.every else None
        )
        fitting = choose_recompute(config, K, self._budget())
        if fitting is not config:
            self.notes.append(f"memory.recompute auto: {fitting.memory.recompute}")
        self.model = GPT2(fitting, K, self.device)
        checkpoint.require_room(run_dir / "checkpoints", self.model.persistent())
        if self.device == "cuda":
            made = self.model.compile()
            self.notes.append(
                f"{made.kernels} kernels ready in {made.seconds:.1f} s, {made.from_cache} from Triton's cache"
            )
        if not found:
            self.model.initialise(config.train.seed)
        else:
            checkpoint.check_tensors(found, tensors, self.model.persistent())
        for name, tensor in tensors.items():
            self.model.persistent()[name].copy_(tensor)
        self.batches = self._prefetch()
        c, back = config.checkpoint, config.checkpoint.every if config.train.rewind_after else 0
        self.saver = checkpoint.Saver(run_dir / "checkpoints", c.keep, c.major, back)
        self.host: dict[str, torch.Tensor] = {}
        self.in_flight: Step | None = None
        where = torch.cuda.get_device_name() if self.device == "cuda" else "the CPU, through Triton's interpreter"
        about = describe(fitting, self.model.plan.total, where, self.state["step"])
        self.log = Logger(run_dir, config, self.state["step"], self.state["wandb_id"], about)
        self.state["wandb_id"] = self.log.wandb_id
        for note in self.notes:
            self.log.note(note)
        self.log.note(f"{self.model.dims['N']:,} parameters; arena {self.model.plan.total / GIB:.2f} GiB on {where}")

    # ---- setting up ----

    def _prefetch(self) -> Prefetcher:
        c, first, pinned = self.config, self.state["sample"], self.device != "cpu"
        return Prefetcher(self.loader, c.micro_batch, c.accumulation, c.model.vocab_size, first, pinned)

    def _open_data(self) -> tuple[list, list]:
        d, T, V = self.config.data, self.config.train.seq_len, self.config.model.vocab_size
        if "builtin" in (d.train, d.val):
            directory = builtin_shards(d.tokenizer)
        patterns = [
            str(directory / f"{split}_*.bin") if given == "builtin" else given
            for split, given in (("train", d.train), ("val", d.val))
        ]
        train_shards = open_shards(patterns[0], V, T)
        return train_shards, open_shards(patterns[1], V, T) if self.config.eval.every else []

    def _load(self, found: Path) -> dict[str, torch.Tensor]:
        """Everything of the checkpoint to go on from, once it is known to be of this run."""
        saved, tensors = checkpoint.load(found)
        changed = checkpoint.check_config(saved["config"], self._resolved_config())
        if saved["data"] != self.data:
            raise checkpoint.CheckpointError(
                f"{found}: written with other training data than {self.config.data.train}; "
                "restore it or start another run"
            )
        self.state = {name: saved[name] for name in self.state}
        self.notes = [
            f"resuming after step {saved['step']} from {found}",
            *(f"changed: {key} {then} -> {now}" for key, (then, now) in changed.items()),
        ]
        return tensors

    def _resolved_config(self) -> dict[str, Any]:
        """The configuration as a checkpoint keeps it: with the number of tokens a step takes, also where it was left
        to the default.
        """
        out = self.config.to_dict()
        out["train"]["total_batch_tokens"] = self.config.total_batch_tokens
        return out

    def _used_bytes(self) -> int:
        """Bytes in use on the GPU; the first call creates the CUDA context and so returns its size."""
        if self.device == "cpu":
            return 0
        free, total = torch.cuda.mem_get_info()
        return total - free

    def _budget(self) -> int:
        """Bytes that a plan may have here; no bound on a CPU."""
        return sys.maxsize if self.device == "cpu" else torch.cuda.mem_get_info()[0] - MODULE_BYTES

    def _report_memory(self) -> None:
        if self.device == "cuda":
            grown = self._used_bytes() - self.context_bytes
            self.log.note(
                f"memory: planned {self.model.plan.total / GIB:.3f} GiB, in use {grown / GIB:.3f} GiB, "
                f"before the run {self.context_bytes / GIB:.3f} GiB (CUDA context, other processes)"
            )

    # ---- the loop ----

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        first = step = self.state["step"]
        last = self.config.train.steps
        if step == 0:
            self._evaluate_if_due(step)
        while step < last and not self.stopped_by:
            try:
                self._train_step(step)
                step += 1
                if step == first + 3:
                    self._report_memory()
                self._evaluate_if_due(step)
                self._hellaswag_if_due(step)
                self._sample_if_due(step)
                if self._due(step, self.config.checkpoint.every) or step == last:
                    self._save(step)
            except Rewind:
                step = self._rewind()
        if self.stopped_by and step > 0:
            with contextlib.suppress(Rewind):  # resumed, the run comes to this step again, and goes back then
                self._save(step)
        self.saver.wait(raise_errors=True)
        return 128 + self.stopped_by if self.stopped_by and step < last else 0

    def _train_step(self, step: int) -> None:
        """Launch step `step`; then, while the device is at it, report the step before."""
        hyper = hyper_row(step, self.config, loss_scale=1.0 / self.config.total_batch_tokens)
        watched = self._due(step + 1, self.config.log.stats_every)
        self.model.begin_step(hyper, step, self.config.train.seed, watched)
        for micro in range(self.config.accumulation):
            self.model.micro_step(next(self.batches), first=micro == 0)
        launched = self.model.end_step()
        try:
            self._report_step()
        finally:
            self.in_flight = launched

    def _report_step(self) -> None:
        """Wait for the step in flight, if there is one; count it and log it.  Evaluation, samples and checkpoints come
        after this, so that lines and numbers are those of a loop that waits for every step.
        """
        if self.in_flight is None:
            return
        launched, self.in_flight = self.in_flight, None
        result = launched.result()
        step = self.state["step"] = self.state["step"] + 1
        cause = ""
        if self.model.watch and stability.is_nonfinite(result):
            cause = self.model.first_nonfinite(self.batches.step(self.state["sample"])) or "nothing when computed again"
        self.state["sample"] += self.config.total_batch_tokens // self.config.train.seq_len
        stability.count(self.state, result)
        loss, norm, applied, seconds, z = result
        self.log.step(step, loss=loss, norm=norm, seconds=seconds, skipped=not applied, z=z, cause=cause)
        if self.model.watch and self._due(step, self.config.log.stats_every):
            record = self.model.watch.read(launched.watched, self.config.accumulation)
            self.log.statistics(step, record, watch.summary(record))
        stability.check(self.state, self.config)

    def _rewind(self) -> int:
        """Back to an earlier step, which it returns, and on with the data after the present one."""
        if self.in_flight is not None:
            self.in_flight.result()
            self.in_flight = None
        self.saver.wait()
        failed, target = self.state["step"], stability.rewind_target(self.state, self.config)
        stability.go_back(self.state, target, self.run_dir / "checkpoints", self.model.persistent())
        self.log.rewind(failed, target, self.state["sample"])
        self.batches.close()
        self.batches = self._prefetch()
        return target

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.train.steps)

    def _evaluate_if_due(self, step: int) -> None:
        if self.validation is None or not self._due(step, self.config.eval.every):
            return
        self._report_step()
        total, B = 0.0, self.config.micro_batch
        for ids, targets in self.validation.batches(B):
            total += float(self.model.evaluate(ids, targets).numpy().sum(dtype=np.float64))
        self.log.validation(step, total / self.validation.tokens)

    def _hellaswag_if_due(self, step: int) -> None:
        if self.questions is not None and self._due(step, self.config.eval.hellaswag_every):
            self._report_step()
            scores = hellaswag.evaluate(self.model, self.questions)
            self.log.hellaswag(step, scores.acc, scores.acc_norm)

    def _sample_if_due(self, step: int) -> None:
        s = self.config.sample
        if self._due(step, s.every):
            self._report_step()
            texts = continuations(
                self.model,
                get_tokenizer(self.config.data.tokenizer),
                s.prompt,
                s.tokens,
                s.temperature,
                s.top_k,
                1.0,
                self.config.train.seed,
                1,
            )
            self.log.sample(step, next(texts))

    def _save(self, step: int) -> None:
        """Copy the persistent buffers to the host and let the saver write them while training goes on."""
        self._report_step()
        if self._due(step, self.config.checkpoint.every):
            self.state["rewinds"] = 0
        self.saver.wait()
        for name, flat in self.model.persistent().items():
            if name not in self.host:
                self.host[name] = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=self.device != "cpu")
            self.host[name].copy_(flat)
        self.saver.submit(step, self.host, self.state | {"config": self._resolved_config(), "data": self.data})

    def _stop(self, number: int, _frame: Any) -> None:
        """First signal: finish the step, save, leave.  Second: leave at once; half a checkpoint stays hidden."""
        if self.stopped_by:
            os._exit(128 + number)
        self.stopped_by = number

    def close(self, failed: bool = False) -> None:
        with contextlib.suppress(
            Exception
        ):  # after an exception the step in flight may have finished, or be lost with the device
            self._report_step()
        self.saver.wait()
        self.batches.close()
        self.log.close(failed)
