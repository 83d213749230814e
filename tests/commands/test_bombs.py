"""Files and options that could take minutes or all memory: each is answered within 2 CPU seconds and 200 MB."""

import contextlib
import json
import os
import resource
import struct
import time

import pytest
import torch

from gpt2_triton.checkpoint.sources import open_weights
from gpt2_triton.commands.app import main
from gpt2_triton.commands.sample import print_texts
from gpt2_triton.commands.train import app
from gpt2_triton.config.load import load_config
from gpt2_triton.data.hellaswag import load_questions
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import UserError
from gpt2_triton.inference.sample import encode_prompt
from gpt2_triton.inference.sampling import Sampling
from gpt2_triton.training.logger import Logger
from gpt2_triton.training.metrics import read_metrics
from gpt2_triton.training.run_dir import open_run_dir
from tests.support.foreign import checkpoint_of, random_params
from tests.support.tiny import tiny_config

NEXT = list(zip("abcdefgh", "bcdefghi", strict=True))
ALIASES = "a: &a [x, x, x]\n" + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n" for p, c in NEXT)
MERGES = "a: &a {k: v}\n" + "".join(f"{c}: &{c} {{<<: [{','.join(['*' + p] * 9)}]}}\n" for p, c in NEXT)


@pytest.fixture(autouse=True)
def bounded():
    """Fail a test that takes more than 200 MB above what was in use before, or 4 CPU seconds: a busy core gives each
    of its two threads about half of its speed.
    """
    seconds, kilobytes = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - seconds < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - kilobytes < 200_000


def refusal(function, *args):
    with pytest.raises(UserError) as error:
        function(*args)
    assert len(str(error.value)) < 2000
    return str(error.value)


@pytest.mark.parametrize("text, message", [
    (ALIASES, "x.yaml:5: too many values; expected keys in sections"),
    (ALIASES + "model: {n_layer: *i}", "too many values"),
    (MERGES, "too many values"),
    ("model: " + "[" * 10_000, "x.yaml:1: nested too deeply"),
    ("model: " + "{a: " * 10_000, "nested too deeply"),
    ("".join(" " * i + "a:\n" for i in range(300)), "x.yaml:5: nested too deeply"),
    ("".join(f"k{i}: 1\n" for i in range(6_000)), "too many values"),
    ("a: " + "x" * 30_000_000, "x.yaml: more than 64 KiB; expected a configuration"),
    ("train: {steps: " + "9" * 5000 + "}", "x.yaml: not valid YAML: Exceeds the limit (4300 digits)"),
    ("train: {steps: 0x" + "f" * 5000 + "}", "a number of more than 60 digits"),
    ("train: {steps: " + ":".join(["59"] * 10_000) + "}", "a number of more than 60 digits"),
    ("train: {steps: 2001-99-99}", "x.yaml: not valid YAML: month must be in 1..12"),
    ("train: {steps: 0b_}", "not valid YAML"),
], ids=lambda value: repr(value)[:40])  # fmt: skip
def test_yaml(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(text)
    assert message in refusal(load_config, "x.yaml")


@pytest.mark.parametrize("options", [
    "--model.n_layer 1000000", "--model.n_layer 1000000000", "--train.batch_size 1000000000",
    "--model.n_embd 6400000000 --model.n_head 100000000", "--train.total_batch_tokens 1000000007",
    "--train.seq_len 1 --train.total_batch_tokens 1000000007 --parallel.gpus 8",
    "--train.seq_len 1 --train.batch_size 1000000 --train.total_batch_tokens 1099511627689",
    f"--memory.recompute gelu:{'9' * 5000}", f"--train.steps {'9' * 5000}", f"--train.steps {10**30}",
])  # fmt: skip
def test_sizes_that_are_refused(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("eval: {every: 0}")
    assert main(app, ["x.yaml", "--plan", *options.split()]) == 2
    out, error = capsys.readouterr()
    assert not out and error.startswith("error: ") and len(error) < 1500


@pytest.mark.parametrize("options", [
    "--train.batch_size 1000000", "--model.vocab_size 65536 --train.seq_len 1",
    "--model.vocab_size 65536 --train.seq_len 1 --train.batch_size 1000000",
    "--model.n_layer 256", "--model.n_layer 100 --memory.recompute auto",
])  # fmt: skip
def test_sizes_that_are_planned(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text("eval: {every: 0}")
    assert main(app, ["x.yaml", "--plan", "--gpu", "h200", *options.split()]) == 0
    assert "parameters" in capsys.readouterr().out


# ---- other projects' weights ----

HF = dict(n_layer=1, n_head=1, n_embd=64, vocab_size=256, n_positions=8)


def safetensors(header):
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(64)


def f32(*shape, at=(0, 64)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": list(at)}


@pytest.mark.parametrize("config, tensors", [
    (HF | {"n_layer": 10**9}, safetensors({})), (HF | {"n_layer": -1}, safetensors({})),
    (HF | {"n_embd": 10**4000}, safetensors({})), (HF | {"vocab_size": True}, safetensors({})),
    (HF, safetensors({"wte.weight": f32(10**9, 10**9)})), (HF, safetensors({"wte.weight": f32(-4, -4)})),
    (HF, safetensors({"wte.weight": f32(16), "wpe.weight": f32(16)})), (HF, struct.pack("<Q", 10**15) + bytes(64)),
    (HF, safetensors({f"h.{i}": f32(1, at=(0, 4)) for i in range(30_000)})), (HF, b""),
])  # fmt: skip
def test_hugging_face(tmp_path, config, tensors):
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(tensors)
    assert str(tmp_path) in refusal(open_weights, f"hf:{tmp_path}")


def test_hugging_face_with_a_million_brackets(tmp_path):
    (tmp_path / "config.json").write_text("[" * 10**6)
    assert "config.json: cannot be read" in refusal(open_weights, f"hf:{tmp_path}")


@pytest.mark.parametrize("numbers", [
    (8, 256, 10**9, 1, 64, 256), (8, 256, -1, 1, 64, 256), (-8, 256, 1, 1, 64, 256), (8, 256, 1, 1, 64, -256),
    (2**31 - 1, 256, 512, 1024, 65536, 256), (8, 256, 1, 0, 64, 256),
])  # fmt: skip
def test_llmc(tmp_path, numbers):
    (tmp_path / "m.bin").write_bytes(struct.pack("<8i", 20240326, 3, *numbers) + bytes(2000))
    assert "m.bin" in refusal(open_weights, f"llmc:{tmp_path}/m.bin")


NANO = dict(n_layer=1, n_head=1, n_embd=64, vocab_size=256, block_size=8)


@pytest.mark.parametrize("arguments, tensors", [
    (NANO | {"n_layer": 10**9}, {}), (NANO | {"n_embd": -64}, {}), (NANO, {"transformer.wte.weight": 7}),
    (NANO, {3: 4}),
    (NANO, {"transformer.wte.weight": torch.zeros(1).expand(10**6, 10**6)}),
])  # fmt: skip
def test_nanogpt(tmp_path, arguments, tensors):
    torch.save({"model_args": arguments, "model": tensors}, tmp_path / "ckpt.pt")
    assert "ckpt.pt" in refusal(open_weights, f"nanogpt:{tmp_path}/ckpt.pt")


def test_nanogpt_with_a_view_of_one_element_is_refused_before_it_is_expanded(tmp_path):
    from gpt2_triton.checkpoint.weights import parameter_shapes
    from gpt2_triton.config.schema import ModelConfig

    shapes = parameter_shapes(ModelConfig.model_validate(NANO))
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    tensors["wte.weight"] = torch.zeros(1).expand(10**6, 10**6)
    torch.save({"model_args": NANO, "model": tensors}, tmp_path / "ckpt.pt")
    message = refusal(open_weights, f"nanogpt:{tmp_path}/ckpt.pt")
    assert "wte.weight is torch.float32 (1000000, 1000000), expected floating-point numbers (256, 64)" in message


@pytest.mark.parametrize("source", ["llmc", "nanogpt"])
def test_pipes_are_not_waited_for(tmp_path, source):
    os.mkfifo(tmp_path / "pipe")
    assert "pipe: not a regular file" in refusal(open_weights, f"{source}:{tmp_path}/pipe")


def test_pipe_of_questions_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "pipe.jsonl: not a regular file" in refusal(
        load_questions, tmp_path / "pipe.jsonl", get_tokenizer("bytes"), 0, ["completion"]
    )


# ---- records ----


def test_metrics_with_brackets_nan_and_long_lines(tmp_path, capsys):
    good = ['{"step": 1, "loss": 2.5}', '{"step": 2, "loss": 2.0, "sample": "' + "x" * 10**7 + '"}']
    bad = ["[" * 100_000, '{"step": 3, "loss": NaN}', '{"step": 4, "loss": "x"}', '{"step": -1}', '{"step": true}']
    bad += ['{"step": 5, "loss": ' + "9" * 5000 + "}"]
    (tmp_path / "metrics.jsonl").write_text("\n".join([good[0], *bad, good[1]]) + "\n")
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
    assert f"{len(bad)} of {len(bad) + 2} lines are damaged and left out" in capsys.readouterr().err


# ---- the run directory ----


@pytest.mark.timeout(60)
@pytest.mark.parametrize("resume", [False, True])
def test_pipe_in_a_run_directory_is_not_waited_for(tmp_path, resume):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with contextlib.ExitStack() as held:
        message = refusal(open_run_dir, tmp_path, resume, held)
    assert message == f"--run_dir: cannot write to {tmp_path}: metrics.jsonl is not a regular file; choose another"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "stats.jsonl"])
def test_pipe_in_a_resumed_run_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    message = refusal(Logger, tmp_path, tiny_config(log=dict(stats_every=1)), 6)
    assert message == f"--run_dir: cannot write to {tmp_path}: {name} is not a regular file; choose another"


def test_large_file_in_a_run_directory_is_not_read_whole(tmp_path):
    with open(tmp_path / "run.json", "wb") as file:
        file.truncate(3 << 30)
    assert "run.json has more than 16,777,216 bytes" in refusal(Logger, tmp_path, tiny_config(), 6)


# ---- samples ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    config = tiny_config(model=dict(n_layer=1))
    run = tmp_path_factory.mktemp("samples") / "run"
    checkpoint_of(run, config, {"params": random_params(config)})
    print_texts(run, "a", 1, Sampling(1.0, 3), 1, 1, 1)  # compiles
    return run


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1.0, 1e30])
def test_sample_takes_any_top_k_and_temperature(run, capsys, temperature):
    print_texts(run, "a", 2, Sampling(temperature, 2**70), 1, 1, 1)
    all_tokens = capsys.readouterr().out
    print_texts(run, "a", 2, Sampling(temperature), 1, 1, 1)
    assert capsys.readouterr().out == all_tokens


def test_prompt_that_is_not_utf_8_is_encoded_with_a_replacement():
    tokenizer = get_tokenizer("bytes")
    assert encode_prompt(tokenizer, "a\udcff\ud800") == encode_prompt(tokenizer, "a\ufffd\ufffd")
