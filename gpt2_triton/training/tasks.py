"""What a run does between its steps, besides saving: validations, HellaSwag, samples, and
comparisons of the ranks' weights.
"""

from collections.abc import Callable

from gpt2_triton.checkpoint import source_files
from gpt2_triton.config.config import Config
from gpt2_triton.inference import hellaswag
from gpt2_triton.inference.losses import Stopped, validation_loss
from gpt2_triton.inference.sample import sample_in_training
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
    tasks = by_key(run.config)
    # a key of an earlier version may be gone
    run.state.left_out = [key for key in due if key in tasks]
    try:
        while run.state.left_out and not run.signals.stop:
            every, task = tasks[run.state.left_out[0]]
            if every:
                task(run, step)  # a task that fails stays in left_out
            run.state.left_out.pop(0)
    except Stopped:
        run.signals.all_ranks_agree = True


def validate(run: Run, step: int) -> None:
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
    assert run.data.hellaswag
    with run.watchdog.phase("answering HellaSwag"):
        scores = hellaswag.evaluate(
            run.model, run.data.hellaswag, run.control, run.signals.is_requested
        )
    run.log.hellaswag(step, scores["acc"], scores["acc_norm"])


def write_sample(run: Run, step: int) -> None:
    if run.group.rank != 0:
        return
    with run.watchdog.phase("sampling"):
        if run.group.device == "cpu":
            run.log.info(f"writing a sample of {run.config.sample.tokens} tokens")
        text = sample_in_training(run.model, run.config, run.run_dir / source_files.DIRECTORY)
        run.log.sample(step, text)


def compare_replicas(run: Run, step: int) -> None:
    digest = run.model.require_equal_replicas(run.control, step)
    run.log.info(f"step {step}: weights {digest} on every rank")
