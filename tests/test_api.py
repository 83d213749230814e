"""The Python API: what it promises about results, files, output, imports, threads,
signals, memory and errors.
"""

import os
import signal
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

import gpt2_triton
from gpt2_triton import api, device, kernels
from gpt2_triton.checkpoint import save
from gpt2_triton.checkpoint.format import list_steps
from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.data.loader import ValidationLoader
from gpt2_triton.data.prepare.builtin import builtin_shards
from gpt2_triton.data.shards import open_shards
from gpt2_triton.errors import CheckpointError, ConfigError, DataError, UserError
from gpt2_triton.inference import load, losses
from gpt2_triton.inference.load import load_for_losses
from gpt2_triton.training import preemption, trainer
from gpt2_triton.training.logger import Logger
from tests.support import loop, reference
from tests.support.commands import run_tool, run_train
from tests.support.tiny import tiny_config

ROOT = Path(__file__).parents[1]
NUMBERS = preemption.NUMBERS


def small_config(**sections):
    """Return tiny_config with one layer, a validation of 32 tokens after each second
    step, and the best step kept.
    """
    evaluation, checkpoint = dict(every=2, tokens=32), dict(best="val_loss", every=2)
    return tiny_config(
        **dict(model=dict(n_layer=1), eval=evaluation, checkpoint=checkpoint) | sections
    )


@pytest.fixture(scope="module", autouse=True)
def reference_kernels():
    """On a CPU train and load over tests/support/reference.py; other
    processes have the real kernels.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(trainer, "train", loop.train)
            patch.setattr(load, "K", reference)
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> api.Run:
    return gpt2_triton.train(small_config(), tmp_path_factory.mktemp("api") / "run")


@pytest.fixture(scope="module")
def model(run):
    with gpt2_triton.load(run) as model:
        yield model


@pytest.fixture
def kernel_model(run, monkeypatch):
    """The run's model in the real kernels, which the commands take too."""
    monkeypatch.setattr(load, "K", kernels)
    with gpt2_triton.load(run) as model:
        yield model


@pytest.fixture(autouse=True)
def own_handlers():
    """Handlers of a plain program, put back after commands that were
    run here have replaced them.
    """
    before = handlers()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(NUMBERS, before, strict=True):
        signal.signal(number, handler)


def content(run_dir: Path) -> dict:
    """Return what equal runs have in common: configuration, records without times, checkpoints."""
    found = {"metrics": loop.records(run_dir), "config": (run_dir / "config.yaml").read_text()}
    for _, step in list_steps(run_dir / "checkpoints"):
        found |= {f"{step.name}/{file.name}": file.read_bytes() for file in step.iterdir()}
    return found


def handlers():
    return [signal.getsignal(number) for number in NUMBERS]


def test_config_takes_a_file_a_dictionary_and_overrides(tmp_path):
    sections = {"model": {"n_layer": 2}, "optim": {"lr": 1e-3}}
    (tmp_path / "a.yaml").write_text("model:\n  n_layer: 2\noptim:\n  lr: 1e-3\n")
    made = [
        gpt2_triton.Config.load(source, {"train.steps": 1000})
        for source in (tmp_path / "a.yaml", sections)
    ]
    assert made[0] == made[1] and made[0].train.steps == 1000 and made[0].optim.lr == 1e-3
    # overrides change no argument
    assert sections == {"model": {"n_layer": 2}, "optim": {"lr": 1e-3}}


# ---- training ----


def test_train_writes_the_bytes_of_the_command(run, tmp_path):
    (tmp_path / "a.yaml").write_text(small_config().to_yaml())
    assert run_train(f"{tmp_path}/a.yaml --run_dir {tmp_path}/run") == 0
    assert content(run.directory) == content(tmp_path / "run")


def test_run_reads_its_files(run):
    assert run.state == "done" and run.config == small_config()
    assert [record["step"] for record in run.metrics if "loss" in record] == [1, 2, 3, 4]
    validated = {
        record["step"]: record["val_loss"] for record in run.metrics if "val_loss" in record
    }
    assert list(validated) == [0, 2, 4] and run.val_loss == validated[4]
    assert run.loss == run.metrics[-2]["loss"]
    best = min((2, 4), key=validated.__getitem__)
    assert run.last.name == "step_00000004" and run.best.name == f"step_{best:08d}"
    assert api.Run(str(run.directory)).metrics == run.metrics


def test_run_that_has_only_begun_has_no_losses(tmp_path):
    (tmp_path / "config.yaml").write_text(small_config().to_yaml())
    run = api.Run(tmp_path)
    assert (
        run.metrics == []
        and run.loss is run.val_loss is run.last is run.best is None
        and run.state == "stopped"
    )
    assert repr(run) == f"Run('{tmp_path}': stopped, loss None, val_loss None)"


def test_step_of_two_gpus_that_one_could_not_divide(tmp_path, monkeypatch):
    """A GPU has 3 sequences; one GPU would have 6, which 4 does not divide."""

    def train(config, run_dir, *_):
        (run_dir / "config.yaml").write_text(config.to_yaml())

    for name, value in dict(
        RANK=0, WORLD_SIZE=2, LOCAL_RANK=0, MASTER_ADDR="localhost", MASTER_PORT=1
    ).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(trainer, "train", train)
    config = small_config(train=dict(batch_size=4, total_batch_tokens=6 * 16))
    assert gpt2_triton.train(config.to_dict(), tmp_path / "run").config == config


@pytest.mark.slow
def test_default_device_of_the_program_is_for_its_own_tensors(run, tmp_path):
    """As "cuda" in tutorials; a CPU has "meta"."""
    torch.set_default_device("meta")
    try:
        made = gpt2_triton.train(small_config(), tmp_path / "run")
        with gpt2_triton.load(made) as model:
            assert model.loss([1, 2, 3]) > 0
        assert torch.empty(1).is_meta
    finally:
        torch.set_default_device(None)
    assert content(made.directory) == content(run.directory)


def test_paths_are_those_of_the_commands(run, tmp_path, monkeypatch):
    """Somebody would remove a directory ~ by `rm -r ~`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    made = gpt2_triton.train(small_config(), "~/run")
    assert made.directory == tmp_path / "run" == api.Run("~/run").directory
    with gpt2_triton.load("~/run/best") as model:
        assert model.export("~/exported") == tmp_path / "exported"
        with pytest.raises(
            ConfigError, match="^directory: empty, perhaps from an unset variable; give a path$"
        ):
            model.export("")
    with pytest.raises(ConfigError, match="^run_dir: empty, perhaps"):
        gpt2_triton.train(small_config(), "")


@pytest.mark.parametrize("filtered", ["default", "error"])
def test_each_failed_save_warns_and_none_ends_the_training(tmp_path, monkeypatch, capfd, filtered):
    """Python shows equal warnings once, and a filter may make errors of them."""

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "save_file", refuse)
    monkeypatch.setattr(trainer, "try_to_save", lambda *_: None)
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter(filtered)
        with pytest.raises(CheckpointError, match="step_00000004 could not be written"):
            gpt2_triton.train(small_config(checkpoint=dict(every=1)), tmp_path / "run")
    shown = (
        [str(warning.message) for warning in recorded]
        if filtered == "default"
        else capfd.readouterr().err.split("\n")
    )
    failed = [line for line in shown if "could not be written" in line]
    assert [line.count(f"step_{step:08d}") for step, line in enumerate(failed, 1)] == [1, 1, 1]
    assert len(loop.losses(tmp_path / "run")) == 4


def test_train_prints_only_when_asked(tmp_path, capfd):
    config = tiny_config(model=dict(n_layer=1), train=dict(steps=1), sample=dict(every=1, tokens=2))
    gpt2_triton.train(config, tmp_path / "a")
    with gpt2_triton.load(tmp_path / "a") as model:
        model.generate("a", 2)
        model.loss(model.encode("abc"))
    assert capfd.readouterr() == ("", "")
    gpt2_triton.train(config, tmp_path / "b", console=True)
    out = capfd.readouterr().out
    assert "step 1/1 | loss" in out and (out.startswith(device.NO_GPU) or device.present())
    assert [set(r) for r in api.Run(tmp_path / "a").metrics] == [
        set(r) for r in api.Run(tmp_path / "b").metrics
    ]


def test_train_refuses_what_the_command_refuses(run, tmp_path):
    with pytest.raises(ConfigError, match="^config: own is a recipe of the command line"):
        gpt2_triton.train("own", tmp_path / "own")
    with pytest.raises(
        ConfigError, match="^--run_dir: .* has checkpoints up to step_00000004; add --resume, or"
    ):
        gpt2_triton.train(small_config(), run.directory)
    missing = str(tmp_path / "nothing.bin")
    with pytest.raises(DataError, match=f"^{missing}"):
        gpt2_triton.train(tiny_config(data=dict(train=missing, val=missing)), tmp_path / "run")
    # nor has it the data
    with pytest.raises(CheckpointError, match="restore these keys, as in its config.yaml,"):
        gpt2_triton.train(
            tiny_config(data=dict(train=missing, val=missing)), run.directory, resume=True
        )
    if not device.present():
        with pytest.raises(
            ConfigError, match=r"^no GPU: .* days, .* each; .* set train\.max_minutes"
        ):
            gpt2_triton.train("gpt2_124m", tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="expected the directory of a run"):
        api.Run(tmp_path)


@pytest.mark.slow
def test_train_runs_in_a_thread_and_leaves_the_signals_alone(run, tmp_path, monkeypatch):
    before, seen, runs = handlers(), [], []
    step = Logger.step
    monkeypatch.setattr(
        Logger, "step", lambda self, *rest: (seen.append(handlers()), step(self, *rest))
    )
    thread = threading.Thread(
        target=lambda: runs.append(gpt2_triton.train(small_config(), tmp_path / "run"))
    )
    thread.start()
    thread.join()
    assert runs[0].state == "done" and content(tmp_path / "run") == content(run.directory)
    assert seen == [before] * 4 and handlers() == before


# ---- signals in the main thread ----


def send(monkeypatch, step: int, *numbers: int) -> None:
    """Send signals to this process when `step` is logged."""
    log = Logger.step

    def log_and_send(self, at, *rest):
        log(self, at, *rest)
        if at == step:
            for number in numbers:
                signal.raise_signal(number)

    monkeypatch.setattr(Logger, "step", log_and_send)


def test_interrupt_saves_and_raises_and_the_run_can_be_resumed(run, tmp_path, monkeypatch, capfd):
    before = handlers()
    send(monkeypatch, 1, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        gpt2_triton.train(small_config(), tmp_path / "run", console=True)
    assert handlers() == before and capfd.readouterr().out.endswith(
        "; the same call with resume=True continues\n"
    )
    stopped = api.Run(tmp_path / "run")
    assert stopped.state == "stopped" and stopped.last.name in ("step_00000001", "step_00000002")
    monkeypatch.undo()
    resumed = gpt2_triton.train(small_config(), tmp_path / "run", resume=True)
    whole, found = content(run.directory), content(resumed.directory)
    assert resumed.state == "done" and all(
        found[name] == whole[name] for name in whole if "step_00000002" not in name
    )


def test_second_interrupt_raises_at_once(tmp_path, monkeypatch):
    before = handlers()
    # two Ctrl-C of a user are further apart than a test's signals
    monkeypatch.setattr(preemption, "REPEAT_WINDOW", -1)
    send(monkeypatch, 1, signal.SIGINT, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        gpt2_triton.train(tiny_config(), tmp_path / "run")
    assert handlers() == before and api.Run(tmp_path / "run").last is None


def test_signal_reaches_the_programs_own_handler_after_the_checkpoint(tmp_path, monkeypatch):
    saved = []
    before = signal.signal(signal.SIGTERM, lambda *_: saved.append(api.Run(tmp_path / "run").last))
    try:
        send(monkeypatch, 2, signal.SIGTERM)
        stopped = gpt2_triton.train(tiny_config(), tmp_path / "run")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped.state == "stopped" and saved == [stopped.last] and saved[0] is not None


# ---- models ----


def test_loss_is_that_of_perplexity_over_windows(run, model):
    """3 windows of 16; with a rest of 5 it is the mean over all; a batch's is
    the mean of its sequences'.
    """
    shards = open_shards(str(builtin_shards("bytes") / "val_*.bin"), 256, 16)
    tokens = (text := shards[0].read(0, 54))[:49]
    evaluator = load_for_losses(*load_weights(str(run.directory))[:2], 64)
    want = losses.validation_loss(evaluator, ValidationLoader(shards, 16, 48))
    assert model.context == 16 and model.loss(tokens) == pytest.approx(want, rel=1e-6)
    rest = model.loss(text[48:54])
    assert model.loss(text) == pytest.approx((48 * want + 5 * rest) / 53, rel=1e-6)
    pair = np.stack([tokens[:20], tokens[20:40]])
    assert model.loss(pair) == pytest.approx(
        (model.loss(pair[0]) + model.loss(pair[1])) / 2, rel=1e-6
    )


@pytest.mark.slow
def test_logits_give_the_loss(kernel_model):
    """fp32 logits of 14 tokens: minus the log of the softmax at the next token is the
    loss, to a rounding of each.
    """
    model = kernel_model
    tokens = np.stack([model.encode("Some text here"), model.encode("And other text")])
    every = model.logits(tokens, "all")
    assert every.shape == (2, 14, 256) and every.dtype == np.float32
    z = every[:, :-1].astype(np.float64)
    log_softmax = z - np.log(np.exp(z).sum(-1, keepdims=True))
    want = -np.take_along_axis(log_softmax, tokens[:, 1:, None], -1).mean()
    assert model.loss(tokens) == pytest.approx(want, rel=1e-5)
    last = model.logits(tokens)
    assert last.shape == (2, 256) and np.array_equal(last, every[:, -1])
    assert model.logits(tokens[0]).shape == (256,) and model.logits(tokens[0], "all").shape == (
        14,
        256,
    )
    alone = model.logits(list(map(int, tokens[1])))  # in another batch, sums round in another order
    np.testing.assert_allclose(alone, last[1], rtol=0, atol=1e-5 * np.abs(last[1]).max())


@pytest.mark.slow
def test_text_is_that_of_the_command_whole_and_streamed(run, kernel_model, capfd):
    how = dict(temperature=0.9, top_k=40, top_p=0.95, seed=3)
    text = kernel_model.generate("The ", 6, **how)
    pieces = list(kernel_model.stream("The ", 6, **how))
    assert "".join(pieces) == text and len(pieces) > 1 and all(pieces)
    words = "--prompt 'The ' --tokens 6 --temperature 0.9 --top_k 40 --top_p 0.95 --seed 3"
    assert run_tool(f"sample {run.directory} {words}") == 0
    assert capfd.readouterr().out.endswith(f"The {text}\n")


def test_stream_refuses_to_continue_after_another_text(model):
    first = model.stream("a", 4)
    next(first)
    second = model.generate("b", 3)
    with pytest.raises(ConfigError, match="another text was begun"):
        next(first)
    assert model.generate("b", 3) == second


@pytest.mark.slow
def test_two_models_and_two_threads_give_the_results_of_one(run, model):
    tokens, texts = model.encode("To be<|endoftext|>or not to be"), {}
    assert tokens.tolist() == [*model.encode("To be"), 0, *model.encode("or not to be")]
    want = model.loss(tokens), model.generate("a", 4)
    with gpt2_triton.load(run.last, batch_tokens=16) as other:

        def work(name, one):
            texts[name] = one.loss(tokens), one.generate("a", 4)

        threads = [
            threading.Thread(target=work, args=item)
            for item in (("a", model), ("b", other), ("c", model))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == dict.fromkeys("abc", want)


def test_close_frees_the_memory_and_later_calls_say_so(run):
    with gpt2_triton.load(run) as model:
        stream = model.stream("a", 8)
        next(stream)
        text = weakref.ref(model._text)
        arena = weakref.ref(model._model.arena)
    assert text() is None and arena() is None
    model.close()
    dropped = gpt2_triton.load(run)
    arena = weakref.ref(dropped._model.arena)
    del dropped
    api._free_unused_memory()
    assert arena() is None
    for call in (
        lambda: model.loss([1, 2]),
        lambda: model.generate(),
        lambda: next(stream),
        lambda: model.export("x"),
    ):
        with pytest.raises(ConfigError, match="this model was closed; load it again"):
            call()


def test_export_writes_the_files_of_the_command(run, model, tmp_path):
    for kind, dtype in (("hf", "fp32"), ("llmc", "bf16")):
        ours, theirs = tmp_path / f"{kind}1", tmp_path / f"{kind}2"
        assert model.export(ours, format=kind, dtype=dtype) == ours
        words = f"export {run.directory} --out {theirs} --format {kind} --dtype {dtype}"
        assert run_tool(words) == 0
        assert {f.name: f.read_bytes() for f in ours.iterdir()} == {
            f.name: f.read_bytes() for f in theirs.iterdir()
        }
    with gpt2_triton.load(f"hf:{tmp_path}/hf1", dtype="fp32") as again:
        tokens = model.encode("some text")
        assert again.loss(tokens) == pytest.approx(model.loss(tokens), rel=1e-6)


def test_a_run_with_fp32_masters_has_the_loss_of_its_export(tmp_path):
    found = gpt2_triton.train(
        small_config(train=dict(dtype="bf16"), optim=dict(master="fp32")), tmp_path / "run"
    )
    with (
        gpt2_triton.load(found) as model,
        gpt2_triton.load(f"hf:{model.export(tmp_path / 'hf')}") as again,
    ):
        assert model.loss(tokens := model.encode("some text")) == again.loss(tokens)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.loss([1]), DataError, "tokens: got int64 [1], expected integers [n]"),
        (
            lambda m: m.loss([[1, 2], [3]]),
            DataError,
            "tokens: got sequences of several lengths, expected integers [sequences, n]; give each",
        ),
        (lambda m: m.loss([1, 256]), DataError, "tokens: 1 to 256, but the vocabulary is 0 to 255"),
        (
            lambda m: m.logits([1] * 17),
            DataError,
            "tokens: sequences of 17, but the context is 16; cut them",
        ),
        (
            lambda m: m.encode(b"hi"),
            ConfigError,
            "text: expected a text, got bytes",
        ),
        (
            lambda m: m.generate("a", 1, top_k=None),
            ConfigError,
            "top_k: expected a whole number, got None",
        ),
        (
            lambda m: m.generate("a", "3"),
            ConfigError,
            "tokens: expected a whole number, got '3'",
        ),
        (
            lambda m: m.generate("a", 1, temperature="0.8"),
            ConfigError,
            "temperature: expected a number, got '0.8'",
        ),
        (
            lambda m: m.generate([1]),
            ConfigError,
            "prompt: expected a text, got list; `decode` makes",
        ),
        (
            lambda m: m.logits([1], "first"),
            ConfigError,
            "positions: expected last or all, got 'first'",
        ),
        (
            lambda m: m.export("out", dtype="fp16"),
            ConfigError,
            "dtype: expected fp32 or bf16, got fp16",
        ),
        (
            lambda m: gpt2_triton.train("quickstart", "run", resume="mst"),
            ConfigError,
            "resume: expected False, True",
        ),
        (
            lambda m: gpt2_triton.load("run", dtype="fp16"),
            ConfigError,
            "dtype: expected bf16, fp32 or None",
        ),
        (lambda m: gpt2_triton.load("nowhere"), CheckpointError, "nowhere: no checkpoint found"),
    ],
)
def test_mistakes_raise_user_errors_of_one_line(model, call, error, message):
    with pytest.raises(error) as raised:
        call(model)
    assert message in str(raised.value) and len(str(raised.value).splitlines()) == 1
    assert isinstance(raised.value, UserError) and type(raised.value) is getattr(
        gpt2_triton, error.__name__
    )


# ---- imports ----


def python(program: str, *arguments: object) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": str(ROOT)
    }
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(words, env=environment, capture_output=True, text=True)


def test_import_is_fast_and_names_are_listed():
    program = (
        "import sys, gpt2_triton; print(*dir(gpt2_triton)); "
        "print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    names, imported = python(program).stdout.splitlines()
    assert (
        set(gpt2_triton.__all__) | {"__version__"} <= set(names.split())
        and imported == "False False"
    )
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        _ = gpt2_triton.nope
    assert (ROOT / "gpt2_triton" / "py.typed").is_file()


FIRST = ("import torch, numpy", "from gpt2_triton import Config, train, load", "import triton")
USE = """
import gpt2_triton, sys
with gpt2_triton.load(sys.argv[1]) as model:
    print(model.loss([1, 2, 3]))
    print(repr(model.generate("a", 5)))
"""


@pytest.mark.slow
def test_model_loads_after_any_imports(run, model):
    """A model of transformers, and torch.use_deterministic_algorithms, import triton."""
    done = [python(first + USE, run.directory) for first in FIRST]
    assert [(each.returncode, each.stderr) for each in done] == [(0, "")] * len(FIRST)
    [printed] = {each.stdout for each in done}
    assert float(printed.splitlines()[0]) == pytest.approx(model.loss([1, 2, 3]), rel=1e-6)


def test_tokens_of_a_program_become_shards_of_either_size(tmp_path):
    """The dtype is that of the vocabulary, not of the array, so a run reads what it wrote."""
    given = np.arange(60, dtype=np.int64).reshape(3, 20)
    for vocab_size in (60, 70_000):
        path = tmp_path / "new" / f"{vocab_size}.bin"
        gpt2_triton.write_shard(path, given, vocab_size)
        [shard] = open_shards(str(path), vocab_size, 16)
        assert shard.read(0, shard.count).tolist() == list(range(60))
    gpt2_triton.write_shard(tmp_path / "val.bin", range(60, 99), 256)
    data = dict(train=str(tmp_path / "new" / "60.bin"), val=str(tmp_path / "val.bin"))
    run = gpt2_triton.train(small_config(data=data), tmp_path / "run")
    assert run.state == "done"
    with pytest.raises(DataError, match="tokens: 0 to 59, but the vocabulary is 0 to 58"):
        gpt2_triton.write_shard(path, given, 59)
    with pytest.raises(DataError, match=r"tokens: got float64 \[2\], expected integers"):
        gpt2_triton.write_shard(path, [0.5, 1.0], 60)
    assert open_shards(str(path), 70_000, 16)  # the refused ones wrote nothing
