"""What a run does between its steps, besides saving: validations, HellaSwag, samples, and
comparisons of the ranks' weights; the first scales of fp8, and statistics of tensors.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from gpt2_triton.checkpoint import source_files
from gpt2_triton.config.config import Config
from gpt2_triton.console import counted
from gpt2_triton.errors import ReplicaMismatchError
from gpt2_triton.inference import hellaswag
from gpt2_triton.inference.losses import Stopped, validation_loss
from gpt2_triton.inference.sample import sample_in_training
from gpt2_triton.model import fp8, tensor_stats
from gpt2_triton.training.lr_schedule import step_inputs
from gpt2_triton.training.run import Run


def is_due(step: int, every: int, config: Config) -> bool:
    """Return True after every `every` steps and after the last step; 0 is never."""
    return every > 0 and (step % every == 0 or step == config.train.steps)


def by_key(config: Config) -> dict[str, tuple[int, Callable[[Run, int], None]]]:
    """Map the key that sets a task's interval to (interval, function)."""
    return {
        "eval.every": (config.eval.every, validate),
        "eval.hellaswag_every": (config.eval.hellaswag_every, answer_hellaswag),
        "sample.every": (config.sample.every, write_sample),
        "debug.hash_state": (config.debug.hash_state, compare_replicas),
    }


def due_after(step: int, config: Config) -> list[str]:
    """Return the keys of the tasks that are due after `step` steps."""
    return [key for key, (every, _) in by_key(config).items() if is_due(step, every, config)]


def call(run: Run, due: list[str], step: int) -> None:
    """Call the tasks of the keys `due`; if the run stops, state.left_out keeps
    the keys of tasks not yet done.

    The run then saves and ends, and the resumed run calls these tasks.
    """
    tasks = {key: task for key, (every, task) in by_key(run.config).items() if every}
    # a resumed run may have turned a key off
    run.state.left_out = [key for key in due if key in tasks]
    if run.state.left_out and not run.signals.stop:
        run.model.comm.gather_params()
    try:
        while run.state.left_out and not run.signals.stop:
            key = run.state.left_out[0]
            tasks[key](run, step)
            run.state.left_out.remove(key)  # a task that fails stays
    except Stopped:
        run.signals.all_ranks_agree = True


def validate(run: Run, step: int) -> None:
    """Log the validation loss, in fp8 runs both losses, and remember the best."""
    validation = run.data.validation
    assert validation
    with run.watchdog.phase("validating"):
        losses = _losses(run)
        loss = validation.mean(losses)
        in_fp8 = validation.mean(_losses(run, fp8=True)) if run.model.has_fp8 else None
    by_source = dict(zip(validation.names, losses, strict=True))
    run.log.validation(step, loss, in_fp8, by_source if len(losses) > 1 else {})
    if run.config.checkpoint.best == "val_loss":
        run.state.record_validation(step, loss)


def _losses(run: Run, fp8: bool = False) -> list[float]:
    """Return the validation loss of each source."""
    assert run.data.validation
    given = run.control, run.signals.is_requested, fp8
    return [validation_loss(run.model, loader, *given) for loader in run.data.validation.loaders]


def answer_hellaswag(run: Run, step: int) -> None:
    """Log the accuracy on HellaSwag's questions."""
    questions = run.data.hellaswag
    assert questions
    if run.group.device == "cpu":
        number = counted(len(questions.labels), "question")
        run.log.info(f"answering {number} of HellaSwag")
    with run.watchdog.phase("answering HellaSwag"):
        scores = hellaswag.evaluate(run.model, questions, run.control, run.signals.is_requested)
    run.log.hellaswag(step, scores["acc"], scores["acc_norm"])


def write_sample(run: Run, step: int) -> None:
    """Log a text that the model writes, on rank 0."""
    if run.group.rank != 0:
        return
    with run.watchdog.phase("sampling"):
        if run.group.device == "cpu":
            run.log.info(f"writing a sample of {run.config.sample.tokens} tokens")
        text = sample_in_training(run.model, run.config, run.run_dir / source_files.DIRECTORY)
        run.log.sample(step, text)


def compare_replicas(run: Run, step: int) -> None:
    """Raise ReplicaMismatchError with the ranks whose weights differ from rank 0's."""
    digest = run.model.saved.digest()
    others = run.control.differing(digest)
    if others:
        raise ReplicaMismatchError(
            f"step {step}: the weights of ranks {others} differ from rank 0's"
        )
    run.log.info(f"step {step}: weights {digest} on every rank")


# ---- of some runs ----


def calibrate(run: Run) -> None:
    """Give a run in fp8 its first scales, unless its checkpoint had scales.  Step
    0's inputs serve any step.
    """
    if run.model.lacks_scales:
        with run.watchdog.phase("calibrating the scales of fp8"):
            batches = list(run.batches.step(run.state.sample))
            fp8.calibrate(run.model, batches, step_inputs(0, run.config))
        run.log.info(f"fp8: scales calibrated before step {run.state.step + 1}")


def log_statistics(run: Run, partials: Sequence[Tensor]) -> None:
    """Log the statistics of the last finished step, if log.stats_every selects it; `partials` are
    the host's copies of them.
    """
    recorder = run.model.stats_recorder
    if recorder and is_due(run.state.step, run.config.log.stats_every, run.config):
        record = recorder.read(partials, run.model.shape.accumulation, run.control)
        run.log.statistics(run.state.step, record, tensor_stats.format_summary(record))
