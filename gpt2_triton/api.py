"""The Python API: write tokens, train a model, and use one.  `gpt2_triton` exports the names.

Only `train(console=True)` prints; warnings are issued as UserWarning.  The first call of
`train` or `load` selects Triton's interpreter if there is no GPU, then imports torch and the
kernels.  Calls of several threads run one after the other: CUDA graphs and the interpreter
have one state for a process.
"""

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gpt2_triton.config import recipes
from gpt2_triton.config.config import Config as Config
from gpt2_triton.console import print_line, silent
from gpt2_triton.errors import ConfigError, DataError
from gpt2_triton.inference.sampling import Sampling

if TYPE_CHECKING:
    from gpt2_triton.checkpoint.stored import StoredTensor
    from gpt2_triton.data.tokenizer import Tokenizer
    from gpt2_triton.model.model import Model as ArenaModel

_one_call = threading.RLock()


@contextlib.contextmanager
def _exclusive(console: bool = False) -> Iterator[None]:
    """Let one thread at a time into the context; print in it only if `console`.

    A default device of the program is for tensors of the program: torch's and
    safetensors' functions get the host.
    """
    torch = sys.modules.get("torch")
    host = contextlib.nullcontext()
    if torch and torch.get_default_device().type != "cpu":
        host = torch.device("cpu")
    with _one_call, silent(not console), host:
        yield


def _path(name: str, given: str | Path) -> Path:
    """Return a path with ~/ expanded, as by the commands; ConfigError for an empty one."""
    if given == "":
        raise ConfigError(f"{name}: empty, perhaps from an unset variable; give a path")
    return Path(given).expanduser()


def _free_unused_memory() -> None:
    """Return the memory of unreferenced models to the driver, which then reports it as free."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def _integers(tokens: Any, least: int, vocab_size: int) -> np.ndarray:
    """Return int32 [n] or [sequences, n]; DataError if n < `least`, or for unknown tokens."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise DataError(
            "tokens: got sequences of several lengths, expected integers [sequences, n]; "
            "give each sequence by itself"
        ) from None
    if (
        array.dtype.kind not in "iu"
        or array.ndim not in (1, 2)
        or not array.size
        or array.shape[-1] < least
    ):
        raise DataError(
            f"tokens: got {array.dtype} {list(array.shape)}, "
            f"expected integers [n] or [sequences, n], n at least {least}"
        )
    if array.min() < 0 or array.max() >= vocab_size:
        raise DataError(
            f"tokens: {array.min()} to {array.max()}, but the vocabulary is 0 to {vocab_size - 1}"
        )
    return array.astype(np.int32)


def _require_text(name: str, given: Any) -> None:
    if not isinstance(given, str):
        raise ConfigError(
            f"{name}: expected a text, got {type(given).__name__}; `decode` makes one of tokens"
        )


def write_shard(path: str | Path, tokens: Any, vocab_size: int) -> None:
    """Write tokens to a file that data.train and data.val may name.

    path         of the file, which is replaced; its directory is made
    tokens       integers [n], or [sequences, n], which follow each other
    vocab_size   model.vocab_size of the models; DataError for tokens outside it
    """
    from gpt2_triton.data import shards

    array = _integers(tokens, 1, vocab_size).reshape(-1)
    file = _path("path", path)
    file.parent.mkdir(parents=True, exist_ok=True)
    shards.write_shard(file, array.astype(shards.token_dtype(vocab_size)))


class Run:
    """A run on disk; its properties read its files.  ConfigError if the directory holds no run."""

    def __init__(self, directory: str | Path):
        self.directory = _path("directory", directory)
        if not (self.directory / "config.yaml").is_file():
            raise ConfigError(f"{directory}: no config.yaml there; expected the directory of a run")

    def __repr__(self) -> str:
        return (
            f"Run({str(self.directory)!r}: {self.state}, "
            f"loss {self.loss}, val_loss {self.val_loss})"
        )

    @property
    def config(self) -> Config:
        # the run may have had several
        return Config.load(self.directory / "config.yaml", gpus=None)

    @property
    def state(self) -> Literal["done", "stopped"]:
        """Return "done" if step train.steps is saved, else "stopped": the run can be resumed."""
        done = (
            self.last is not None
            and int(self.last.name.removeprefix("step_")) >= self.config.train.steps
        )
        return "done" if done else "stopped"

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl in their order, such as {"step": 12, "loss": 3.1};
        see docs/guide/logging.md.
        """
        from gpt2_triton.training.metrics import METRICS, read_metrics

        return read_metrics(self.directory / METRICS) if (self.directory / METRICS).exists() else []

    @property
    def loss(self) -> float | None:
        """The training loss of the last logged step; None if there is none or it was not finite."""
        return self._final("loss")

    @property
    def val_loss(self) -> float | None:
        """The last validation loss; None if there is none or it was not finite."""
        return self._final("val_loss")

    def _final(self, name: str) -> float | None:
        return next((record[name] for record in reversed(self.metrics) if name in record), None)

    @property
    def last(self) -> Path | None:
        """The newest checkpoint, not verified (`load` does); None if there is none."""
        from gpt2_triton.checkpoint.format import list_steps

        steps = list_steps(self.directory / "checkpoints")
        return steps[-1][1] if steps else None

    @property
    def best(self) -> Path | None:
        """The checkpoint of the lowest validation loss; None unless the run has
        checkpoint.best val_loss.
        """
        from gpt2_triton.checkpoint.load import best_checkpoint

        return best_checkpoint(self.last) if self.last else None


def train(
    config: Config | str | Path | Mapping[str, Any],
    run_dir: str | Path,
    *,
    resume: bool | Literal["must"] = False,
    console: bool = False,
) -> Run:
    """Train to the last step, or to train.max_minutes, and return the run.  `config`
    may be what Config.load takes.

    resume    continue after run_dir's newest intact checkpoint; if there is none,
              "must" raises CheckpointError
    console   print what the command prints; the files are the same
    In the main thread, a signal calls the program's handler after the step is
    saved; a second signal, at once.
    """
    from gpt2_triton.distributed.launcher_env import rank_and_size, set_env_from_slurm
    from gpt2_triton.training.preemption import BorrowedSignals
    from gpt2_triton.training.start import starting

    if str(config) == recipes.OWN:
        raise ConfigError(
            "config: own is a recipe of the command line: `gpt2-triton train own --data FILES`"
        )
    if resume not in (False, True, "must"):
        raise ConfigError(f'resume: expected False, True or "must", got {resume!r}')
    set_env_from_slurm()
    rank, ranks = rank_and_size()
    directory = _path("run_dir", run_dir)
    settings = config if isinstance(config, Config) else Config.load(config, gpus=ranks)
    with (
        _exclusive(console and rank == 0),
        starting(settings, directory, resume),
    ):
        from gpt2_triton import device

        if device.select_interpreter():
            print_line(device.NO_GPU)
        from gpt2_triton.training import trainer

        _free_unused_memory()
        try:
            with BorrowedSignals(ranks) as signals:
                trainer.train(settings, directory, resume, signals)
        finally:
            _free_unused_memory()
    return Run(directory)


def load(
    source: Run | str | Path,
    *,
    dtype: Literal["bf16", "fp32"] | None = None,
    batch_tokens: int = 16384,
) -> "Model":
    """Return a model that only runs forward.  CheckpointError if none is intact,
    OutOfMemoryError if it does not fit.

    source         a Run, its directory, one of its steps, RUN/best, or
                   hf:DIR_OR_NAME, llmc:FILE, nanogpt:FILE
    dtype          storage of weights and activations; None: as in training, other
                   projects' bf16; without a GPU fp32
    batch_tokens   most tokens that go through the model at once; the results do not depend on it
    """
    if dtype not in (None, "bf16", "fp32"):
        raise ConfigError(f"dtype: expected bf16, fp32 or None, got {dtype!r}")
    with _exclusive():
        from gpt2_triton import device

        device.select_interpreter()
        from gpt2_triton.checkpoint.sources import load_weights
        from gpt2_triton.inference.load import load_for_losses

        _free_unused_memory()
        where = str(source.directory if isinstance(source, Run) else source)
        config, stored, beside = load_weights(where)
        return Model(
            where,
            config,
            stored,
            beside,
            load_for_losses(config, stored, batch_tokens, dtype, sequences=1),
        )


class Model:
    """A model that only runs forward; `load` makes it.

    config    the Config of its training
    context   the most tokens that it sees at once, train.seq_len
    `close`, the end of a `with` block and garbage collection free its memory on the device.
    """

    def __init__(
        self,
        source: str,
        config: Config,
        stored: "dict[str, StoredTensor]",
        beside: Path | None,
        model: "ArenaModel",
    ):
        """`stored` are the weights as they were loaded, and `beside` their source's
        other files: for `export`.
        """
        self.config = config
        self.context = config.train.seq_len
        self._source = source
        self._stored = stored
        self._beside = beside
        self._model: ArenaModel | None = model
        # the text in the cache; an iterator has only its number, or it would keep the memory
        self._text: Iterator[str] = iter(())
        self._texts = 0
        self._compiled: set[Sampling] = set()  # decode steps are compiled for these, on a GPU

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory on the device.  Later calls raise ConfigError; a
        second `close` does nothing.
        """
        with _exclusive():
            self._model = None
            self._text = iter(())
            self._stored = {}
            _free_unused_memory()

    def _open(self) -> "ArenaModel":
        if self._model is None:
            raise ConfigError(f"{self._source}: this model was closed; load it again")
        return self._model

    def _tokenizer(self) -> "Tokenizer":
        from gpt2_triton.data.tokenizer import get_tokenizer

        return get_tokenizer(self.config.data.tokenizer)

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32 [n]; `<|endoftext|>` and names of
        special tokens are these tokens.
        """
        from gpt2_triton.data.tokenizer import encode_documents

        _require_text("text", text)
        return encode_documents(self._tokenizer(), text).astype(np.int32)

    def decode(self, tokens: Any) -> str:
        """Return the text of tokens [n]; bytes that are not UTF-8 become replacement characters."""
        if np.array_equal(tokens, []):
            return ""
        return self._tokenizer().decode(self._sequences(tokens, 1).reshape(-1).tolist())

    def generate(
        self,
        prompt: str = "",
        tokens: int = 64,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 42,
    ) -> str:
        """Return a continuation of `prompt`, up to an end of text if the model draws one;
        equal calls give equal texts.

        prompt        text to continue; of a long one the model sees the newest tokens;
                      empty: the end-of-text token
        temperature   of the softmax; 0 takes the most likely token
        top_k, top_p  draw among the k most likely tokens (0: all), then among the
                      fewest with probability p together
        """
        with _exclusive():
            return "".join(
                self.stream(
                    prompt, tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
                )
            )

    def stream(
        self,
        prompt: str = "",
        tokens: int = 64,
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 42,
    ) -> Iterator[str]:
        """Return an iterator over the text of `generate`, in pieces of whole
        characters, as soon as they are known.

        A model writes one text at a time: a stream raises ConfigError
        if another was begun after it.
        """
        _require_text("prompt", prompt)
        sampling = Sampling(temperature, top_k, top_p)
        sampling.check("", tokens, seed)
        with _exclusive():
            from gpt2_triton.inference import sample
            from gpt2_triton.model.compiling import compile_decoding

            model = self._open()
            tokenizer = self._tokenizer()
            sample.limit(model, tokenizer)
            if model.arena.is_cuda and sampling not in self._compiled:
                compile_decoding(model, *sampling)
                self._compiled.add(sampling)
            self._text = sample.stream(
                model, tokenizer, prompt, tokens, sampling, seed, self._beside
            )
            self._texts += 1
            return self._pieces(self._texts)

    def _pieces(self, number: int) -> Iterator[str]:
        while True:
            with _exclusive():
                self._open()
                if self._texts != number:
                    raise ConfigError(
                        "stream: another text was begun; read one to its end first, or load twice"
                    )
                piece = next(self._text, None)
            if piece is None:
                return
            if piece:
                yield piece

    def loss(self, tokens: Any) -> float:
        """Return the mean loss in nats of all tokens but the first of each sequence.

        tokens   integers [n] or [sequences, n], n at least 2; DataError for other
                 arrays and for unknown tokens
        Longer sequences are cut into windows of `context` predictions, as
        by the command `perplexity`.
        """
        with _exclusive():
            from gpt2_triton.inference.losses import mean_loss

            return mean_loss(self._open(), self._sequences(tokens, 2))

    def logits(self, tokens: Any, positions: Literal["last", "all"] = "last") -> np.ndarray:
        """Return the logits after the last token, float32 [vocab_size], or after
        each, float32 [n, vocab_size].

        tokens   integers [n] or [sequences, n], n from 1 to `context`;
                 [sequences, n] adds a first axis
        The device holds 16 rows of logits at once.  DataError as in
        `loss`, and for longer sequences.
        """
        if positions not in ("last", "all"):
            raise ConfigError(f"positions: expected last or all, got {positions!r}")
        with _exclusive():
            from gpt2_triton.inference import losses

            model = self._open()
            sequences = self._sequences(tokens, 1)
            n = sequences.shape[1]
            if n > self.context:
                raise DataError(
                    f"tokens: sequences of {n}, but the context is {self.context}; cut them"
                )
            out = losses.logits(model, sequences, n - 1 if positions == "last" else 0)
            out = out[:, 0] if positions == "last" else out
            return out[0] if np.ndim(tokens) == 1 else out

    def _sequences(self, tokens: Any, least: int) -> np.ndarray:
        """Return int32 [sequences, n]; DataError if n < `least`, or for unknown tokens."""
        return np.atleast_2d(_integers(tokens, least, self.config.model.vocab_size))

    def export(
        self,
        directory: str | Path,
        *,
        format: Literal["hf", "llmc"] = "hf",
        dtype: Literal["fp32", "bf16"] = "fp32",
    ) -> Path:
        """Write the weights, as they were loaded, and the tokenizer to a
        new directory; return its path.

        format   "hf" for transformers and programs that build on it, "llmc" for llm.c
        dtype    "fp32" loses nothing, "bf16" takes half the space
        """
        with _exclusive():
            from gpt2_triton.checkpoint.export import export
            from gpt2_triton.checkpoint.weights import from_checkpoint

            self._open()
            made = _path("directory", directory)
            weights = from_checkpoint(self._source, self._stored, self.config, self._beside)
            export(weights, made, format, dtype)
            return made
