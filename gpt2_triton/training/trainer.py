"""The training loop: data in, schedule on the device, metrics and checkpoints out.

A run is a pure function of its configuration: step s takes the global samples [s*G, (s+1)*G), draws its rounding
noise from (seed, s), and logs no clock but in fields named so.  Stopping after any step and resuming from its
checkpoint therefore gives the bytes of the unbroken run.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch

import gpt2_triton.kernels as K
from gpt2_triton.checkpoint import best, checkpoint, resume
from gpt2_triton.checkpoint.async_save import AsyncCheckpointer
from gpt2_triton.checkpoint.sources import initial_weights
from gpt2_triton.config.config import Config
from gpt2_triton.data.loader import Prefetcher, TrainLoader, ValidationLoader
from gpt2_triton.data.prepare.builtin import builtin_shards
from gpt2_triton.data.shards import Shard, fingerprint, open_shards
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.device import device_name
from gpt2_triton.distributed import consistency
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.distributed.watchdog import Watchdog
from gpt2_triton.errors import NonFiniteError
from gpt2_triton.inference import hellaswag
from gpt2_triton.inference.losses import validation_loss
from gpt2_triton.inference.sample import sample_in_training
from gpt2_triton.model import tensor_stats
from gpt2_triton.model.arena import GIB
from gpt2_triton.model.cuda import Step
from gpt2_triton.model.gpt2 import GPT2
from gpt2_triton.model.memory_plan import choose_recompute, free_bytes, memory_in_use_report, used_bytes
from gpt2_triton.training import recovery
from gpt2_triton.training.logger import Logger, NullLogger
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.preemption import ShutdownSignals
from gpt2_triton.training.recovery import Rewind
from gpt2_triton.training.run_info import describe

PREEMPTED = "PREEMPTED"  # a file in the run directory while a signal has stopped it: launchers hide exit codes


def train(config: Config, run_dir: Path | None, resume: bool) -> int:
    """Train to the last step, or until a signal; return the exit code (0 done, 130 or 143 stopped; the checkpoint of
    the last finished step is saved).  Every rank calls it; rank 0's run_dir counts.
    """
    watchdog = Watchdog(group := ProcessGroup(device_name(), config.parallel.timeout), config.parallel.timeout)
    control = group.control("trainer")
    with watchdog.phase("reading checkpoints"):
        run_dir = Path(control.from_rank0(lambda: str(run_dir)))
        consistency.require_shared_run_dir(run_dir, control)
        found = control.from_rank0(lambda: str(checkpoint.latest(run_dir) or "")) if resume else ""
    trainer = Trainer(config, run_dir, Path(found) if found else None, watchdog)
    try:
        code = trainer.run()
    except NonFiniteError:
        trainer.in_flight = None  # the run ends with the step that the message names
        trainer.close(failed=True)
        raise
    except BaseException:
        if group.size == 1:  # of several, others may wait for this one, and this one must not wait for them
            trainer.close(failed=True)
        raise
    trainer.close()
    group.close()
    return code


class Trainer:
    """Everything one run holds; `run` is the loop."""

    def __init__(self, config: Config, run_dir: Path, found: Path | None, watchdog: Watchdog | None = None):
        """`watchdog` is that of the run's ranks; without one there is this rank alone, or those of the environment."""
        self.config, self.run_dir = config, run_dir
        self.watchdog = watchdog or Watchdog(
            ProcessGroup(device_name(), config.parallel.timeout), config.parallel.timeout
        )
        self.group = self.watchdog.group
        self.device, self.first_rank, self.control = self.group.device, self.group.rank == 0, self.group.control("loop")
        self.bytes_before = used_bytes(self.device)
        self.signals = ShutdownSignals(self.group.size)
        self.in_flight: Step | None = None
        self.notes: list[str] = []
        # what checkpoints keep: the tokens of a step also where a default gave them, which a resume may not change
        self.resolved = config.replace(train={"total_batch_tokens": config.total_batch_tokens}).to_dict()
        with self.watchdog.phase("loading"):
            train_shards = self._open_shards("train")
            val_shards = self._open_shards("val") if config.eval.every else []
            self.data = fingerprint(train_shards)
            consistency.require_equal(
                self.control, configuration=config.to_dict(), data=[self.data, fingerprint(val_shards)]
            )
            self.state: dict[str, Any] = {"step": 0, "sample": 0, "wandb_id": None, "best": None} | recovery.COUNTS
            tensors = self._load(found) if found else initial_weights(config)
            if config.sample.every:
                get_tokenizer(config.data.tokenizer)  # where it cannot be had, fail now and not at the first sample
            self.questions = hellaswag.questions_of_run(config)
        T, c = config.train.seq_len, config.checkpoint
        self.loader = TrainLoader(train_shards, T, config.data.seed)
        self.validation = ValidationLoader(val_shards, T, config.eval.tokens) if config.eval.every else None
        self.model = self._make_model(found, tensors)
        self.batches = self._prefetch()
        back = c.every if config.train.rewind_after else 0
        self.saver = AsyncCheckpointer(run_dir / "checkpoints", c.keep, c.major, back, self.group.control("saver"))
        self.log = self._open_log()
        self.state["wandb_id"] = self.log.wandb_id

    # ---- setting up ----

    def _open_shards(self, split: str) -> list[Shard]:
        """Those of data.train or data.val; `builtin` is made on first use."""
        d, given = self.config.data, getattr(self.config.data, split)
        pattern = str(builtin_shards(d.tokenizer) / f"{split}_*.bin") if given == "builtin" else given
        return open_shards(pattern, self.config.model.vocab_size, self.config.train.seq_len)

    def _load(self, found: Path) -> dict[str, torch.Tensor]:
        """Everything of the checkpoint to go on from, once it is known to be of this run."""
        saved, tensors = checkpoint.load(found)
        changed = resume.check_config(saved["config"], self.resolved)
        resume.check_data(found, saved["data"], self.data, self.config.data.train)
        self.state = {name: ({"best": None} | saved)[name] for name in self.state}  # older ones had no best
        self.notes.append(f"resuming after step {saved['step']} from {found}")
        self.notes += [f"changed: {key} {then} -> {now}" for key, (then, now) in changed.items()]
        return tensors

    def _make_model(self, found: Path | None, tensors: dict[str, torch.Tensor]) -> GPT2:
        """The model with its weights: new ones, then whatever `tensors` has."""
        fitting = choose_recompute(self.config, K, min(self.control.all_gather(free_bytes(self.device))))
        if fitting is not self.config:
            self.notes.append(f"memory.recompute auto: {fitting.memory.recompute}")
        model = GPT2(fitting, K, self.device, group=self.group)
        if self.first_rank:
            checkpoint.require_space(self.run_dir / "checkpoints", model.checkpoint_spec())
        if self.device == "cuda":
            made = self._compile(model)
            ready = f"{made.kernels} kernels ready in {made.seconds:.1f} s"
            self.notes.append(f"{ready}, {made.from_cache} from Triton's cache")
        if not found:
            model.initialise(self.config.train.seed)
        else:
            resume.check_tensors(found, tensors, model.checkpoint_spec())
        model.load(tensors)
        return model

    def _compile(self, model: GPT2) -> Any:
        """One rank of a host compiles; the others then find all kernels in Triton's cache."""
        evaluated = self.validation.shapes(model.B) if self.validation else set()
        evaluated |= hellaswag.shapes(model, self.questions) if self.questions else set()
        made = model.compile(evaluated) if self.group.local == 0 else None
        self.control.all_gather(None)
        return made or model.compile(evaluated)

    def _prefetch(self) -> Prefetcher:
        c, first, pinned = self.config, self.state["sample"], self.device != "cpu"
        ranks = dict(rank=self.group.rank, ranks=self.group.size)
        return Prefetcher(self.loader, c.micro_batch, c.accumulation, c.model.vocab_size, first, pinned, **ranks)

    def _open_log(self) -> Logger | NullLogger:
        where = torch.cuda.get_device_name() if self.device == "cuda" else "the CPU, through Triton's interpreter"
        step, wandb_id, planned = self.state["step"], self.state["wandb_id"], self.model.plan.total
        about = describe(self.model.config, planned, where, step)
        log = Logger(self.run_dir, self.config, step, wandb_id, about) if self.first_rank else NullLogger()
        each = f" each on {self.group.size} ranks, ZeRO-{self.config.zero}," if self.group.size > 1 else ""
        size = f"{self.model.dims['N']:,} parameters; arena {planned / GIB:.2f} GiB"
        t, sequences = self.config.train, self.loader.windows.n
        epochs = t.steps * self.config.total_batch_tokens / t.seq_len / sequences
        data = f"{sequences:,} training sequences of {t.seq_len:,} tokens; {t.steps:,} steps are {epochs:.3g} epochs"
        for note in (*self.notes, f"run directory {self.run_dir}", f"{size}{each} on {where}", data):
            log.info(note)
        return log

    # ---- the loop ----

    def run(self) -> int:
        self.signals.listen()
        first = step = self.state["step"]
        last = self.config.train.steps
        if self.first_rank:
            (self.run_dir / PREEMPTED).unlink(missing_ok=True)
        if step == 0:
            self._validate_if_due(step)
        if step >= last:
            self.log.info(f"all {last} steps are done; raise train.steps to go on")
        while step < last and not self.signals.stop:
            try:
                self._train_step(step)
                step += 1
                if step == first + 3 and self.device == "cuda":
                    self.log.info(memory_in_use_report(self.model.plan, self.bytes_before))
                self._between_steps(step)
            except Rewind:
                step = self._rewind()
        stopping = self.signals.stop
        if stopping and step > 0:
            with contextlib.suppress(Rewind):  # resumed, the run comes to this step again, and goes back then
                self._save(step)
        with self.watchdog.phase("saving"):
            self.saver.wait(raise_errors=True)
        if not stopping or step >= last:
            return 0
        if self.first_rank:
            (self.run_dir / PREEMPTED).touch()
        self.log.info(f"stopped after step {step}; the same command with --run_dir {self.run_dir} --resume goes on")
        return self.signals.exit_code

    def _between_steps(self, step: int) -> None:
        """What is due now that `step` steps are launched."""
        c = self.config
        lowest = self._validate_if_due(step)
        if self.questions is not None and self._due(step, c.eval.hellaswag_every):
            self._settle()
            with self.watchdog.phase("answering HellaSwag"):
                scores = hellaswag.evaluate(self.model, self.questions, self.control)
            self.log.hellaswag(step, scores.acc, scores.acc_norm)
        if self._due(step, c.sample.every):
            self._settle()
            if self.first_rank:
                with self.watchdog.phase("sampling"):
                    self.log.sample(step, sample_in_training(self.model, c))
        if self._due(step, c.debug.hash_state):
            self._settle()
            self.log.info(f"step {step}: weights {self.model.require_equal_replicas(self.control, step)} on every rank")
        if lowest or self._due(step, c.checkpoint.every) or step == c.train.steps:
            self._save(step)

    def _train_step(self, step: int) -> None:
        """Launch step `step`; then, while the device is at it, report the step before."""
        hyper = step_inputs(step, self.config, loss_scale=1.0 / self.config.total_batch_tokens)
        hyper[7] = self.signals.heard > 0
        watched = self._due(step + 1, self.config.log.stats_every)
        self.model.begin_step(hyper, step, self.config.train.seed, watched)
        micro_steps = self.config.accumulation
        for micro in range(micro_steps):
            packed = next(self.batches)
            self.watchdog.heartbeat(step + 1)
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
        watching = self.model.watch
        if watching and not (result.applied or result.outlier):
            with self.watchdog.phase("looking for what is not finite"):
                batches = self.batches.step(self.state["sample"])
                cause = self.model.first_non_finite(batches, self.control) or "nothing when computed again"
        self.state["sample"] += self.config.total_batch_tokens // self.config.train.seq_len
        recovery.count(self.state, result)
        self.signals.agreed = result.stop
        self.watchdog.end_startup()
        self.log.step(step, result, cause)
        if watching and self._due(step, self.config.log.stats_every):
            record = watching.read(launched.watched, self.config.accumulation, self.control)
            self.log.statistics(step, record, tensor_stats.summary(record))
        recovery.check(self.state, self.config)

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
        failed, target = self.state["step"], recovery.rewind_target(self.state, self.config)
        recovery.go_back(self.state, target, self.run_dir / "checkpoints", self.model, self.saver, self.control)
        self.log.rewind(failed, target, self.state["sample"])
        self.batches.close()
        self.batches = self._prefetch()
        return target

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.config.train.steps)

    def _validate_if_due(self, step: int) -> bool:
        """Whether there was one whose model is to be kept."""
        if self.validation is None or not self._due(step, self.config.eval.every):
            return False
        self._settle()
        with self.watchdog.phase("validating"):
            loss = validation_loss(self.model, self.validation, self.control)
        self.log.validation(step, loss)
        return self.config.checkpoint.best == "val_loss" and best.enter(self.state, step, loss)

    def _save(self, step: int) -> None:
        """Copy this rank's share to the host and let the saver write it while training goes on."""
        self._report_step()
        if self._due(step, self.config.checkpoint.every):
            self.state["rewinds"] = 0
        state = self.state | {"config": self.resolved, "data": self.data} | self.model.spans()
        with self.watchdog.phase("saving"):
            self.saver.submit(step, self.model.share(), state)

    def close(self, failed: bool = False) -> None:
        if self.group.size == 1:  # several ranks report together, or not at all
            with contextlib.suppress(Exception):  # the step in flight may have finished, or be lost with the device
                self._report_step()
        with contextlib.ExitStack() as closing:  # each of them, also when one before it fails
            if self.group.size > 1:  # NCCL's graphs have to go before its communicator
                closing.callback(self.model.release_graphs)
            closing.callback(self.log.close, failed)
            closing.callback(self.batches.close)
            closing.callback(self.watchdog.stop)
            closing.callback(self.saver.wait)
