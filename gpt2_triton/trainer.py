"""The training loop: data in, schedule on the device, metrics and checkpoints out.

A run is a pure function of its configuration: step s takes the global samples [s*G, (s+1)*G), draws its rounding
noise from (seed, s), and logs no clock but in fields named so.  Stopping after any step and resuming from its
checkpoint therefore gives the bytes of the unbroken run.
"""

import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gpt2_triton.kernels as K
from gpt2_triton import checkpoint, compatible, hellaswag, replicas, stability, watch
from gpt2_triton.arena import GIB
from gpt2_triton.config import Config
from gpt2_triton.data.loader import Prefetcher, TrainLoader, ValidationLoader
from gpt2_triton.data.prepare import builtin_shards
from gpt2_triton.data.shards import fingerprint, open_shards
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.gpus import device_name
from gpt2_triton.log import Logger, Silent
from gpt2_triton.model import GPT2
from gpt2_triton.optim import hyper_row
from gpt2_triton.parallel import World
from gpt2_triton.planning import MODULE_BYTES, choose_recompute
from gpt2_triton.provenance import describe
from gpt2_triton.pulse import Pulse
from gpt2_triton.sample import continuations
from gpt2_triton.sources import initial_weights
from gpt2_triton.stability import NonFinite, Rewind
from gpt2_triton.stream import Step


def train(config: Config, run_dir: Path | None, resume: bool) -> int:
    """Train to the last step, or until a signal; return the exit code (0 done, 130 or 143 stopped; the checkpoint of
    the last finished step is saved).  Every rank calls it; rank 0's run_dir counts.
    """
    device = device_name()
    if device == "cuda":
        local = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local % torch.cuda.device_count())  # SLURM may show each process its own GPU only
    world = World(device, config.parallel.timeout)
    crew = world.crew("trainer")
    run_dir = Path(crew.first(lambda: str(run_dir)))
    found = crew.first(lambda: str(checkpoint.latest(run_dir) or "")) if resume else ""
    trainer = Trainer(config, run_dir, Path(found) if found else None, world)
    try:
        code = trainer.run()
    except NonFinite:
        trainer.in_flight = None  # the run ends with the step that the message names
        trainer.close(failed=True)
        raise
    except BaseException:
        if world.size == 1:  # of several, others may wait for this one, and this one must not wait for them
            trainer.close(failed=True)
        raise
    trainer.close()
    world.close()
    return code


PREEMPTED = "PREEMPTED"  # a file in the run directory while a signal has stopped it: launchers hide exit codes
ECHO = 5  # seconds in which a signal that comes again is the same one: launchers pass on what a whole group got


class Trainer:
    """Everything one run holds; `run` is the loop."""

    def __init__(self, config: Config, run_dir: Path, found: Path | None, world: World | None = None):
        self.config, self.run_dir, self.device = config, run_dir, device_name()
        self.world = world or World(self.device, config.parallel.timeout)
        self.crew, self.first_rank = self.world.crew("loop"), self.world.rank == 0
        self.pulse = Pulse(self.world, config.parallel.timeout)
        self.context_bytes = self._used_bytes()
        self.stopped_by, self.signalled, self.stop_agreed = 0, 0.0, False
        self.notes: list[str] = []
        with self.pulse.during("loading"):
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
        self.model = self._make_model(found, tensors)
        self.batches = self._prefetch()
        c, back = config.checkpoint, config.checkpoint.every if config.train.rewind_after else 0
        self.saver = checkpoint.Saver(run_dir / "checkpoints", c.keep, c.major, back, self.world.crew("saver"))
        self.host: dict[str, torch.Tensor] = {}
        self.in_flight: Step | None = None
        where = torch.cuda.get_device_name() if self.device == "cuda" else "the CPU, through Triton's interpreter"
        step, wandb_id, planned = self.state["step"], self.state["wandb_id"], self.model.plan.total
        about = describe(self.model.config, planned, where, step)
        self.log: Logger | Silent = Logger(run_dir, config, step, wandb_id, about) if self.first_rank else Silent()
        self.state["wandb_id"] = self.log.wandb_id
        for note in self.notes:
            self.log.note(note)
        each = f" each on {self.world.size} ranks, ZeRO-{config.zero}," if self.world.size > 1 else ""
        self.log.note(f"run directory {run_dir}")
        self.log.note(f"{self.model.dims['N']:,} parameters; arena {planned / GIB:.2f} GiB{each} on {where}")

    # ---- setting up ----

    def _make_model(self, found: Path | None, tensors: dict[str, torch.Tensor]) -> GPT2:
        """The model with its weights: new ones, then whatever `tensors` has."""
        fitting = choose_recompute(self.config, K, min(self.crew.all(self._budget())))
        if fitting is not self.config:
            self.notes.append(f"memory.recompute auto: {fitting.memory.recompute}")
        model = GPT2(fitting, K, self.device, world=self.world)
        if self.first_rank:
            checkpoint.require_room(self.run_dir / "checkpoints", model.whole())
        if self.device == "cuda":
            made = self._compile(model)
            self.notes.append(
                f"{made.kernels} kernels ready in {made.seconds:.1f} s, {made.from_cache} from Triton's cache"
            )
        if not found:
            model.initialise(self.config.train.seed)
        else:
            compatible.check_tensors(found, tensors, model.whole())
        model.load(tensors)
        return model

    def _compile(self, model: GPT2) -> Any:
        """One rank of a host compiles; the others then find all kernels in Triton's cache."""
        first, evaluated = os.environ.get("LOCAL_RANK", "0") == "0", self._evaluated(model)
        made = model.compile(evaluated) if first else None
        self.crew.all(None)
        return made or model.compile(evaluated)

    def _evaluated(self, model: GPT2) -> set[tuple[int, int]]:
        """Shapes of the batches of validation and HellaSwag."""
        shapes = self.validation.shapes(self.config.micro_batch) if self.validation else set()
        return shapes | (hellaswag.shapes(model, self.questions) if self.questions else set())

    def _prefetch(self) -> Prefetcher:
        c, first, pinned = self.config, self.state["sample"], self.device != "cpu"
        ranks = dict(rank=self.world.rank, ranks=self.world.size)
        return Prefetcher(self.loader, c.micro_batch, c.accumulation, c.model.vocab_size, first, pinned, **ranks)

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
        changed = compatible.check_config(saved["config"], self._resolved_config())
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
        if self.first_rank:
            (self.run_dir / PREEMPTED).unlink(missing_ok=True)
        if step == 0:
            self._evaluate_if_due(step)
        if step >= last:
            self.log.note(f"all {last} steps are done; raise train.steps to go on")
        while step < last and not self._stopping():
            try:
                self._train_step(step)
                step += 1
                if step == first + 3:
                    self._report_memory()
                self._between_steps(step)
            except Rewind:
                step = self._rewind()
        stopping = self._stopping()
        if stopping and step > 0:
            with contextlib.suppress(Rewind):  # resumed, the run comes to this step again, and goes back then
                self._save(step)
        with self.pulse.during("saving"):
            self.saver.wait(raise_errors=True)
        if not stopping or step >= last:
            return 0
        if self.first_rank:
            (self.run_dir / PREEMPTED).touch()
        self.log.note(f"stopped after step {step}; the same command with --run_dir {self.run_dir} --resume goes on")
        return 128 + (self.stopped_by or signal.SIGTERM)

    def _stopping(self) -> bool:
        """On several ranks only what they know alike: the sum over ranks, which comes with a step's loss."""
        return self.stop_agreed if self.world.size > 1 else bool(self.stopped_by)

    def _between_steps(self, step: int) -> None:
        """What is due now that `step` steps are launched."""
        self._evaluate_if_due(step)
        self._hellaswag_if_due(step)
        self._sample_if_due(step)
        if self._due(step, self.config.debug.hash_state):
            self._settle()
            self.log.note(f"step {step}: weights {replicas.compare(self.model, self.crew, step)} on every rank")
        if self._due(step, self.config.checkpoint.every) or step == self.config.train.steps:
            self._save(step)

    def _train_step(self, step: int) -> None:
        """Launch step `step`; then, while the device is at it, report the step before."""
        hyper = hyper_row(step, self.config, loss_scale=1.0 / self.config.total_batch_tokens)
        hyper[7] = self.stopped_by > 0
        watched = self._due(step + 1, self.config.log.stats_every)
        self.model.begin_step(hyper, step, self.config.train.seed, watched)
        micro_steps = self.config.accumulation
        for micro in range(micro_steps):
            packed = next(self.batches)
            self.pulse.beat(step + 1)
            self.model.micro_step(packed, first=micro == 0, last=micro == micro_steps - 1)
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
        loss, norm, applied, seconds, z, self.stop_agreed = result
        self.pulse.begin_steps()
        self.log.step(step, loss=loss, norm=norm, seconds=seconds, skipped=not applied, z=z, cause=cause)
        if self.model.watch and self._due(step, self.config.log.stats_every):
            record = self.model.watch.read(launched.watched, self.config.accumulation)
            self.log.statistics(step, record, watch.summary(record))
        stability.check(self.state, self.config)

    def _settle(self) -> None:
        """The step in flight is over and reported, and the weights are up to date on this rank."""
        self._report_step()
        self.model.link.gather()

    def _rewind(self) -> int:
        """Back to an earlier step, which it returns, and on with the data after the present one."""
        if self.in_flight is not None:
            self.in_flight.result()
            self.in_flight = None
        self.saver.wait()
        failed, target = self.state["step"], stability.rewind_target(self.state, self.config)
        stability.go_back(self.state, target, self.run_dir / "checkpoints", self.model.load, self.crew)
        self.log.rewind(failed, target, self.state["sample"])
        self.batches.close()
        self.batches = self._prefetch()
        return target

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.train.steps)

    def _evaluate_if_due(self, step: int) -> None:
        if self.validation is None or not self._due(step, self.config.eval.every):
            return
        self._settle()
        total, batches = 0.0, self.validation.batches(self.config.micro_batch)
        with self.pulse.during("validating"):
            for ids, targets in itertools.islice(batches, self.world.rank, None, self.world.size):
                total += float(self.model.evaluate(ids, targets).numpy().sum(dtype=np.float64))
            total = sum(self.crew.all(total))
        self.log.validation(step, total / self.validation.tokens)

    def _hellaswag_if_due(self, step: int) -> None:
        if self.questions is not None and self._due(step, self.config.eval.hellaswag_every):
            self._settle()
            with self.pulse.during("answering HellaSwag"):
                scores = hellaswag.evaluate(self.model, self.questions, self.crew)
            self.log.hellaswag(step, scores.acc, scores.acc_norm)

    def _sample_if_due(self, step: int) -> None:
        s = self.config.sample
        if not self._due(step, s.every):
            return
        self._settle()
        if self.first_rank:
            with self.pulse.during("sampling"):
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
        """Copy this rank's share to the host and let the saver write it while training goes on."""
        self._report_step()
        if self._due(step, self.config.checkpoint.every):
            self.state["rewinds"] = 0
        with self.pulse.during("saving"):
            self.saver.wait()
            for name, parts in self.model.share().items():
                self._copy_to_host(name, parts)
        state = self.state | {"config": self._resolved_config(), "data": self.data}
        self.saver.submit(step, self.host, state | self.model.spans())

    def _copy_to_host(self, name: str, parts: list[torch.Tensor]) -> None:
        if name not in self.host:
            shape = parts[0].shape if len(parts) == 1 else (sum(part.numel() for part in parts),)
            self.host[name] = torch.empty(shape, dtype=parts[0].dtype, pin_memory=self.device != "cpu")
        at, flat = 0, self.host[name].view(-1)
        for part in parts:
            flat[at : at + part.numel()].copy_(part.view(-1))
            at += part.numel()

    def _stop(self, number: int, _frame: Any) -> None:
        """First signal: finish the step, save, leave.  Second: leave at once; half a checkpoint stays hidden."""
        again = time.monotonic() - self.signalled > ECHO if self.world.size > 1 else True
        if self.stopped_by and again:
            os._exit(128 + number)
        self.stopped_by, self.signalled = number, time.monotonic()

    def close(self, failed: bool = False) -> None:
        with contextlib.suppress(Exception):  # the step in flight may have finished, or be lost with the device
            self._report_step()
        with contextlib.ExitStack() as closing:  # each of them, also when one before it fails
            if self.world.size > 1:  # NCCL's graphs have to go before its communicator
                closing.callback(self.model.forget_graphs)
            closing.callback(self.log.close, failed)
            closing.callback(self.batches.close)
            closing.callback(self.pulse.stop)
            closing.callback(self.saver.wait)
