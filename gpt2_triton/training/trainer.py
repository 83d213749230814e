"""The training loop: data in, schedule on the device, metrics and checkpoints out.

A run is a pure function of its configuration, its data, and the kind and number of its GPUs.  Each
step takes the next samples, in one order for all ranks, even after a rewind.  A step's rounding
noise depends only on (seed, step).  Only the time fields of the logs, and a stop by
train.max_minutes, depend on the clock.  A run that stops after any step and resumes from its
checkpoint therefore gives the bytes of an unbroken run.
"""

import contextlib
import functools
import math
import shlex
import time
from pathlib import Path

from gpt2_triton import kernels
from gpt2_triton.checkpoint.async_save import AsyncCheckpointer
from gpt2_triton.checkpoint.save import Retention, try_to_save
from gpt2_triton.config.config import Config
from gpt2_triton.console import command_line
from gpt2_triton.data.loader import MicroBatches, Prefetcher
from gpt2_triton.data.tokenizer import located
from gpt2_triton.device import device_name
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.distributed.watchdog import SAVING, Watchdog
from gpt2_triton.errors import DataError, NonFiniteError
from gpt2_triton.kernels import step_io
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.memory_plan import memory_in_use_report, used_bytes
from gpt2_triton.training import recovery, setup, tasks
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.preemption import PREEMPTED, ShutdownSignals, mark_preempted
from gpt2_triton.training.run_dir import open_run_dir
from gpt2_triton.training.setup import build_model, open_data, open_log, restore, to_save
from gpt2_triton.training.start import Resume
from gpt2_triton.training.step_queue import StepQueue


def train(
    config: Config,
    run_dir: Path | None,
    resume: Resume,
    signals: ShutdownSignals,
    K: Kernels = kernels,
) -> int:
    """Train to the last step, or until a signal or train.max_minutes.  Every rank calls it, and
    uses rank 0's run_dir.  The last finished step is saved.  Return the exit code: 128 + the signal
    if a signal stopped the run, else 0.
    """
    group = ProcessGroup(device_name(), config.parallel.timeout)
    watchdog = Watchdog(group, config.parallel.timeout)
    control = group.control("trainer")
    with contextlib.ExitStack() as held:
        with watchdog.phase("reading checkpoints"):
            run_dir = Path(control.from_rank0(lambda: str(run_dir)))
            found = control.from_rank0(lambda: str(open_run_dir(run_dir, resume, held) or ""))
            try_to_save(run_dir / "checkpoints", control)
        checkpoint = Path(found) if found else None
        with Trainer(config, run_dir, checkpoint, watchdog, signals, K) as trainer:
            code = trainer.run()
    group.close()
    return code


class Trainer:
    """The loop of a run.  Leaving its `with` block closes the log, the threads
    and what the ranks share.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        found: Path | None,
        watchdog: Watchdog,
        signals: ShutdownSignals,
        K: Kernels,
    ):
        """Resume from the checkpoint `found`, or start a new run; tests pass
        tests/support/reference.py as K.
        """
        self.watchdog = watchdog
        self.group = watchdog.group
        self.control = self.group.control("loop")
        # in use on this GPU before the model is built
        self.bytes_before = used_bytes(self.group.device)
        with self.watchdog.phase("loading"):
            tokenizer = {"tokenizer": located(config.data.tokenizer, run_dir)}
            config, notes = setup.choose_precision(config.replace(data=tokenizer), found)
            self.data = open_data(config, self.control)
            start = restore(found, config, self.data)
            start.notes.extend(notes)
        self.config = start.continued(config)
        self.run_dir = run_dir
        self.state = start.state
        self.model = build_model(
            self.config, K, run_dir, self.group, self.control, self.data, start
        )
        saver = self.group.control("saver")
        self.checkpointer = AsyncCheckpointer(
            run_dir / "checkpoints", Retention.of(self.config), saver
        )
        self.log = open_log(self.config, run_dir, self.data, self.model, start)
        self.signals = signals
        self.ends_at = self.signals.made_at + 60 * (self.config.train.max_minutes or math.inf)
        self.queue = StepQueue(self.model, self.watchdog)
        shape = self.model.shape
        self.batches = MicroBatches(
            self.data.train,
            shape.micro_batch,
            shape.accumulation,
            config.model.vocab_size,
            config.model.head_row,
            self.group.rank,
            self.group.size,
        )
        self.prefetcher = self._prefetch()

    def _prefetch(self) -> Prefetcher:
        """Return this rank's batches from the present sample on."""
        return Prefetcher(self.batches, self.state.sample, pinned=self.group.device != "cpu")

    # ---- the loop ----

    def run(self) -> int:
        """Train to the last step, a signal or the time limit; return the exit code.

        On one rank save before raising DataError: among several, other
        ranks may have read their data.
        """
        self.signals.begin_loop(self.run_dir)
        if self.group.rank == 0:
            (self.run_dir / PREEMPTED).unlink(missing_ok=True)  # of an earlier start
        try:
            return self._loop()
        except DataError:
            if self.group.size == 1:
                self._save_before_missing_data()
            raise
        except NonFiniteError:
            self.control.leave()
            raise

    def _save_before_missing_data(self) -> None:
        """Save the last finished step, unless the run has to rewind, or fp8 has no scales yet."""
        rewind = self._read_step()
        if not rewind and self.state.step > 0 and not self.model.lacks_scales:
            self.log.info(
                f"saving step {self.state.step}, because the next step's data cannot be read"
            )
            self._save(self.state.step)
            self.wait_for_save()

    def _loop(self) -> int:
        first = step = self.state.step
        last = self.config.train.steps
        tasks.calibrate(self)
        due = self.state.left_out
        if step == 0 and self._due(step, self.config.eval.every):
            due = ["eval.every"]
        if due:
            tasks.call(self, due, step)
            if step >= last:  # no later save has what these tasks found
                self._save(step)
        if step >= last:
            self.log.info(f"all {last} steps are done; raise train.steps to continue")
        while (
            step < last and not self.signals.stop and not self.state.is_out_of_patience(self.config)
        ):
            self._train_step(step)
            step += 1
            rewind = self._read_step(running=1)
            if not rewind and step == first + 3 and self.group.device == "cuda":
                self.log.info(memory_in_use_report(self.model.plan, self.bytes_before))
            if not rewind:
                rewind = self._between_steps(step)
            if rewind:
                step = self._rewind()
        return self._end(step)

    def _end(self, step: int) -> int:
        """Save a run that ends early; return the exit code once all checkpoints are written."""
        stopping = self.signals.stop
        is_done = step >= self.config.train.steps
        impatient = not is_done and self.state.is_out_of_patience(self.config)
        if impatient:
            best = self.run_dir / "best"
            why = f"{self.config.train.patience} validations without a lower loss than in {best}"
            self.log.info(f"ended after step {step}: {why}; raise train.patience to continue")
        if (stopping or impatient) and step > 0:
            rewind = self._read_step()
            if not rewind:  # else the resumed run does it
                self._save(step)
        self.wait_for_save(raise_errors=True)
        if not stopping or (is_done and not self.state.left_out):
            run = shlex.quote(str(self.run_dir))
            sample = command_line(f"sample {run}")
            self.log.info(f"next: {sample}, {command_line(f'plot {run} -o loss.png')}")
            return 0
        received = max(self.control.all_gather(self.signals.received))
        if self.group.rank == 0:
            mark_preempted(self.run_dir)
        why = "" if received else ", by train.max_minutes"
        self.log.info(f"stopped after step {step}{why}; {self.signals.how_to_continue()}")
        return 128 + received if received else 0

    def _train_step(self, step: int) -> None:
        inputs = step_inputs(step, self.config)
        self.signals.time_is_up |= time.monotonic() > self.ends_at
        inputs[step_io.STOP] = self.signals.is_requested()
        self.queue.launch(
            step, inputs, self.prefetcher, self._due(step + 1, self.config.log.stats_every)
        )

    def _read_step(self, running: int = 0) -> bool:
        """Log the finished step when at most `running` are in flight; return True to rewind."""
        # with running=1 the device computes the next step meanwhile; evaluation, samples and
        # checkpoints pass 0 first, so that the logs do not show the step in flight
        result = self.queue.finish(running)
        if result is None:
            return False
        self.state.step += 1
        self.state.sample += self.config.train.step_sequences
        self.state.count(result)
        self.signals.all_ranks_agree = result.stop
        self.watchdog.end_startup()
        is_searched = self.model.stats_recorder and not (result.applied or result.outlier)
        cause = recovery.first_non_finite(self) if is_searched else ""
        self.log.step(self.state.step, result, cause)
        tasks.log_statistics(self, result.stats)
        target = recovery.rewind_target(self)
        find = functools.partial(recovery.non_finite_losses, self)
        self.state.raise_if_unstable(self.config, target, find)
        return target > 0

    def _rewind(self) -> int:
        """Return to an earlier step, and go on from there with the data after the present step."""
        self.queue.finish()  # the step in flight, if any, is undone too
        failed = self.state.step
        target = recovery.rewind_target(self)
        with self.watchdog.phase("rewinding"):
            target, best = recovery.restore_model(self, target)
            self.state.rewind_to(target, best)
            self.control.from_rank0(lambda: self.log.rewind(failed, target, self.state.sample))
        self.prefetcher.close()
        self.prefetcher = self._prefetch()
        tasks.calibrate(self)
        return target

    # ---- between steps ----

    def _due(self, step: int, every: int) -> bool:
        return tasks.is_due(step, every, self.config)

    def _between_steps(self, step: int) -> bool:
        """Evaluate, sample and save what is due after `step` steps; return True to rewind."""
        due = tasks.due_after(step, self.config)
        save = self._due(step, self.config.checkpoint.every) or step == self.config.train.steps
        if not self.signals.stop and (due or save):
            rewind = self._read_step()
            if rewind:
                return True
        tasks.call(self, due, step)
        if not self.signals.stop and (save or self.state.best_step == step):
            self._save(step)
        return False

    def _save(self, step: int) -> None:
        """Copy this rank's shards to the host; a thread writes them while training continues."""
        assert step == self.state.step  # no step is in flight
        self.wait_for_save()
        state = self.state.as_dict() | to_save(self.config, self.data) | self.model.saved.spans()
        with self.watchdog.phase(SAVING):
            self.checkpointer.save(step, self.model.saved.shards(), state, before=self.log.sync)

    def wait_for_save(self, raise_errors: bool = False) -> None:
        """Wait for the last save.  If it failed, print a warning, or raise CheckpointError."""
        with self.watchdog.phase(SAVING):
            self.checkpointer.wait(raise_errors)
        self.state.forget_best_of(self.checkpointer.failed_step)

    # ---- the end ----

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # other ranks may wait for a rank that fails alone, and it must not wait for them
        if error is None or self.group.size == 1 or isinstance(error, NonFiniteError):
            self.close(failed=error is not None)

    def close(self, failed: bool = False) -> None:
        """Close every part, even if closing another part fails."""
        with contextlib.ExitStack() as closing:
            if self.group.size > 1:  # CUDA graphs must go before the communicator that they use
                closing.callback(self.model.release_graphs)
            closing.callback(self.log.close, failed)
            closing.callback(self.prefetcher.close)
            closing.callback(self.watchdog.stop)
            closing.callback(self.wait_for_save)
