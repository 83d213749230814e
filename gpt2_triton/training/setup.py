"""The parts of a run, made in this order: data, state with the weights
to start from, model, log.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpt2_triton import device
from gpt2_triton.checkpoint import resume, source_files
from gpt2_triton.checkpoint.format import STATE, read_object
from gpt2_triton.checkpoint.load import Checkpoint
from gpt2_triton.checkpoint.save import require_space
from gpt2_triton.checkpoint.sources import initial_weights
from gpt2_triton.checkpoint.weights import flat_parts
from gpt2_triton.config import precision
from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.console import format_bytes, format_count, print_line
from gpt2_triton.data.hellaswag import Questions
from gpt2_triton.data.mixture import Mixture, Source, Validation, sources
from gpt2_triton.data.prepare.builtin import pattern_of
from gpt2_triton.data.shards import Shard, open_shards
from gpt2_triton.data.tokenizer import Tokenizer, encode_prompt, get_tokenizer, look_in
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.errors import ConfigError, DataError, same_on_all_ranks
from gpt2_triton.files import expand
from gpt2_triton.inference import hellaswag, sample
from gpt2_triton.kernels import table_file
from gpt2_triton.model import fp8
from gpt2_triton.model.compiling import compile_run
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.memory_plan import choose_recompute, free_bytes
from gpt2_triton.model.model import Model
from gpt2_triton.model.rates import rates_line
from gpt2_triton.model.recompute import meaning
from gpt2_triton.model.tables import Part
from gpt2_triton.training.logger import Logger, NullLogger
from gpt2_triton.training.lr_schedule import changes_on_resume
from gpt2_triton.training.run_info import describe_start
from gpt2_triton.training.run_state import RunState
from gpt2_triton.training.start import require_own_fp8


class Data(NamedTuple):
    """What a run reads: training data, validation data, questions."""

    train: Mixture
    validation: Validation | None  # None if eval.every is 0
    hellaswag: Questions | None  # None if eval.hellaswag_every is 0

    @property
    def shards(self) -> dict[str, Sequence[Shard]]:
        """Map the key of state.json that holds fingerprints to the shards."""
        found: dict[str, Sequence[Shard]] = {"data": self.train.shards}
        if self.validation:
            found["validation_data"] = self.validation.shards
        return found

    def describe(self, samples: int) -> Iterator[str]:
        """Yield a line for each of several sources: what a run of so many samples reads."""
        yield from self.train.describe(samples)
        if self.validation:
            yield from self.validation.describe()

    def fingerprints(self) -> dict[str, Any]:
        """Return what identifies the data on every machine."""
        return {key: [shard.fingerprint for shard in shards] for key, shards in self.shards.items()}


class Start(NamedTuple):
    """What a run starts from: its state, notes for the console and run.json, and its
    checkpoint or first weights.
    """

    state: RunState
    notes: list[str]
    checkpoint: Checkpoint | None = None  # None: a new run
    weights: Iterable[Part] = ()  # of a new run's init_from
    # of a new run: a directory that may have the files of source_files.py
    beside: Path | None = None

    def continued(self, config: Config) -> Config:
        """Return `config` with the run's original init_from."""
        if self.checkpoint is None:
            return config
        init_from = self.checkpoint.state["config"].get("init_from", "scratch")
        return config.model_copy(update={"init_from": init_from})


@same_on_all_ranks()
def choose_precision(config: Config, found: Path | None) -> tuple[Config, list[str]]:
    """Replace train.precision `auto`, with notes; a run that continues
    from `found` keeps what it has.

    CheckpointError if `found` is of another run; otherwise this run's data, which may
    not be there, would fail first.
    """
    if found is None:
        architecture = device.architecture() if device.present() else None
        return precision.choose_precision(config, architecture)
    saved = read_object(found / STATE)["config"]
    config, notes = precision.keep_precision(config, saved)
    if config.train.precision == "fp8":
        require_own_fp8()
    resume.check_config(saved, resume.explicit(config))
    return config, notes


def open_data(config: Config, control: ControlGroup) -> Data:
    """Open shards and questions; raise ConfigError if data or
    configuration differ between ranks.
    """
    T = config.train.seq_len
    where = expand(config.init_from.partition(":")[2])
    if where:
        look_in(config.data.tokenizer, Path(where))
    with same_on_all_ranks():
        shifted = config.data.windows == "shifted"
        train = Mixture(open_sources(config, "train"), T, config.data.seed, shifted)
        validation = None
        if config.eval.every:
            validation = Validation(open_sources(config, "val"), T, config.eval.tokens)
        data = Data(train, validation, hellaswag.questions_of_run(config))
    control.require_equal(configuration=config.to_dict(), data=data.fingerprints())
    if validation and control.rank == 0:
        _warn_of_overlap(train, validation)
    return data


def _warn_of_overlap(train: Mixture, validation: Validation) -> None:
    """Print a warning if a run trains on a shard of its validation data."""
    trained = {shard.path.resolve() for shard in train.shards}
    both = [shard.path for shard in validation.shards if shard.path.resolve() in trained]
    if both:
        print_line(
            f"warning: data.train contains the validation data {both[0]}: the validation loss "
            "will be too low; narrow data.train, or name other files in data.val",
            error=True,
        )


def open_sources(config: Config, split: str) -> list[tuple[Source, list[Shard]]]:
    """Open the shards of each source of data.train or data.val; `builtin` ones are written on
    first use.
    """
    found = []
    for source in sources(getattr(config.data, split)):
        pattern = pattern_of(source.pattern, split, config.data.tokenizer)
        shards = open_shards(pattern, config.model.vocab_size, config.train.seq_len)
        found.append((source, shards))
    return found


def to_save(config: Config, data: Data) -> dict[str, Any]:
    """Return what a checkpoint's state has of configuration and data; a resume compares it."""
    return {"config": resume.explicit(config)} | data.fingerprints()


@same_on_all_ranks()
def restore(found: Path | None, config: Config, data: Data) -> Start:
    """Open the checkpoint `found`; without a checkpoint return a new state and
    the weights of init_from.
    """
    if found is None:
        source = initial_weights(config)
        if source is None:
            return Start(RunState(), [])
        notes = [f"weights of {source.where}: {format_count(config.n_params)} parameters"]
        return Start(RunState(), notes, weights=flat_parts(source, config), beside=source.beside)
    checkpoint, notes = resume.read(found, config, data.shards)
    state = checkpoint.state
    if 0 < state["step"] < config.train.steps:
        notes += changes_on_resume(state["step"], state["config"], config)
    return Start(RunState.from_checkpoint(state), notes, checkpoint)


def build_model(
    config: Config,
    K: Kernels,
    run_dir: Path,
    group: ProcessGroup,
    control: ControlGroup,
    data: Data,
    start: Start,
) -> Model:
    """Return the compiled model with the weights of `start` or new ones;
    CheckpointError without room to save.
    """
    budget = min(control.all_gather(free_bytes(group.device)))
    fitting = choose_recompute(config, K, budget, StepShape.of(config, group.size))
    if fitting is not config:
        level = fitting.memory.recompute
        start.notes.append(f"memory.recompute auto: {level} ({meaning(level)})")
    model = Model(fitting, K, group.device, group=group)
    _require_tasks(model, run_dir, data, start.state)
    if group.device == "cuda":
        made = compile_kernels(model, data)
        start.notes.append(
            f"{made.kernels} kernels ready in {made.seconds:.1f} s, "
            f"{made.from_cache} from Triton's cache"
        )
    _fill(model, start)
    return model


def _require_tasks(model: Model, run_dir: Path, data: Data, state: RunState) -> None:
    """Let samples, evaluations and checkpoints that cannot be made fail now, not hours later."""
    config = model.config
    if config.sample.every:
        tokenizer = get_tokenizer(config.data.tokenizer)
        _require_prompt(config.sample.prompt, tokenizer)
        sample.limit(model, tokenizer)
    if data.hellaswag:
        hellaswag.require_fitting(model, data.hellaswag)
    if model.rank == 0:
        spec = model.saved.spec()
        require_space(run_dir / "checkpoints", spec, state.step, state.best_step, config)


@same_on_all_ranks()
def _require_prompt(prompt: str, tokenizer: Tokenizer) -> None:
    """Raise ConfigError for a prompt whose characters a tokenizer of characters lacks."""
    try:
        encode_prompt(tokenizer, prompt)
    except DataError as error:
        raise ConfigError(f"sample.prompt: {error}") from None


def _fill(model: Model, start: Start) -> None:
    """Fill the buffers with new weights, init_from's, or this rank's part of the checkpoint."""
    if start.checkpoint is None:
        model.initialise(model.config.train.seed)
        with same_on_all_ranks():
            model.load(start.weights)
    else:
        expected = fp8.saved_spec(model.saved.spec(), start.checkpoint.state["config"])
        resume.check_tensors(start.checkpoint, expected)
        # a rank names a NaN in what it reads
        model.load(start.checkpoint.parts(model.saved.needs()))


def compile_kernels(model: Model, data: Data) -> Any:
    """Compile the kernels of a run on this data."""
    validated = data.validation.shapes(model.B) if data.validation else set()
    answered = hellaswag.shapes(model, data.hellaswag) if data.hellaswag else set()
    return compile_run(model, validated, answered)


def open_log(
    config: Config, run_dir: Path, data: Data, model: Model, start: Start
) -> Logger | NullLogger:
    """Open the log, on rank 0, and write the notes and the sizes of the run to it."""
    if model.rank != 0:
        return NullLogger()
    where = device.name() if model.arena.is_cuda else "the CPU, through Triton's interpreter"
    notice = table_file.notice()
    if notice and (start.checkpoint is None or table_file.given_file()):
        start.notes.append(notice)
    step = start.state.step
    planned = model.plan.total
    about = describe_start(model.config, model.shape, planned, where, step, model.lacks_scales)
    about["notes"] = start.notes
    log = Logger(run_dir, config, step, about, model.shape.gpus)
    if start.checkpoint is None:
        source_files.keep(start.beside, run_dir, config.data.tokenizer)
    for line in (*start.notes, f"run directory {run_dir}", *_sizes(config, data, model, where)):
        log.info(line)
    return log


def _sizes(config: Config, data: Data, model: Model, where: str) -> Iterator[str]:
    """Yield lines about the memory, the parameters and the data of a run."""
    if model.has_fp8:
        head = "" if config.fp8.keep_bf16 == "head" else " and the head"
        yield f"fp8: products of all layers{head}"
    gpus = model.shape.gpus
    each = f" each on {gpus} ranks, ZeRO-{model.shape.zero}," if gpus > 1 else ""
    yield f"memory {format_bytes(model.plan.total)}{each} on {where}"
    yield rates_line(config)
    t = config.train
    samples = t.steps * t.step_sequences
    sequences = sum(loader.windows.n for loader in data.train.loaders)
    text = ", names of Unicode's characters" if config.data.train == "builtin" else ""
    yield (
        f"{sequences:,} training sequences of {t.seq_len:,} tokens{text}; "
        f"{t.steps:,} steps are {samples / sequences:.3g} epochs"
    )
    yield from data.describe(samples)
