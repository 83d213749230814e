"""Commands hellaswag and perplexity: results equal those of training for any
batch; mistakes are one line.
"""

import json
import math
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.data.loader import ValidationLoader
from gpt2_triton.data.shards import open_shards, write_shard
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import DataError
from gpt2_triton.inference import losses
from gpt2_triton.inference.load import load_for_losses
from tests.conftest import DEVICE
from tests.data.prepare.test_text import gpt2
from tests.inference.test_hellaswag import row, write
from tests.support.checkpoints import whole
from tests.support.commands import run_tool
from tests.support.loop import records, train
from tests.support.tiny import tiny_config, tiny_model
from tests.support.tokenizer_files import byte_level

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a run of one step and its two shards of text, records of its metrics)."""
    directory = tmp_path_factory.mktemp("trained")
    text = get_tokenizer("bytes").encode("To be, or not to be: that is the question. " * 10)
    for i, part in enumerate((text[:200], np.append(text[200:], 0).astype(np.uint16))):
        write_shard(directory / f"val_{i}.bin", part)
    config = tiny_config(
        data=dict(train=str(directory / "val_*.bin"), val=str(directory / "val_*.bin")),
        eval=dict(every=1, tokens=256), train=dict(steps=1), model=dict(block_size=192),
    )  # fmt: skip
    assert train(config, directory / "run") == 0
    return directory, records(directory / "run")


def test_perplexity_equals_the_validation_loss_of_training(trained, tmp_path, capsys):
    directory, logged = trained
    [val_loss] = [
        record["val_loss"] for record in logged if record["step"] == 1 and "val_loss" in record
    ]
    out = tmp_path / "out.json"
    arguments = f"--tokens 256 --json {out} --batch_tokens 200"
    assert run_tool(f"perplexity {directory}/run {arguments}") == 0
    found = json.loads(out.read_text())
    assert found["loss"] == pytest.approx(val_loss, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(val_loss), rel=1e-5)
    assert found["tokens"] == 256 and len(found["shards"]) == 2
    printed = f"256 tokens in fp32 | loss {val_loss:.4f} | perplexity {math.exp(val_loss):.2f} | "
    assert f"data.val of the run: {directory}/val_*.bin\n{printed}" in capsys.readouterr().out


def test_perplexity_takes_all_windows_of_the_shards(trained):
    directory, _ = trained
    config, stored, _ = load_weights(str(directory / "run"))
    opened = open_shards(str(directory / "val_0.bin"), 256, 16)
    model = load_for_losses(config, stored, 210)
    assert (model.B, model.T) == (13, 16)
    assert load_for_losses(config, stored, 64).B == 192 // 16  # at least one sequence of block_size
    found = losses.perplexity(model, ValidationLoader(opened, 16, 0))
    assert found.tokens == 199 // 16 * 16
    # one byte per token, no end of text
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))


@pytest.mark.slow
def test_bits_per_byte_count_the_bytes_of_gpt2_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(losses, "get_tokenizer", lambda name: gpt2())
    text = "To be, \N{GREEK SMALL LETTER PI} or  not: that\nis the question, or was it?"
    tokens = np.append(gpt2().encode(text)[:16], gpt2().eot).astype(np.uint16)
    write_shard(tmp_path / "a.bin", tokens)
    model, _ = tiny_model(model=dict(vocab_size=50300), data=dict(tokenizer="gpt2"))
    found_losses = model.evaluate(
        tokens[None, :16].astype(np.int32), tokens[None, 1:].astype(np.int32)
    ).numpy()
    opened = open_shards(str(tmp_path / "a.bin"), 50300, 16)
    found = losses.perplexity(model, ValidationLoader(opened, 16, 0))
    # the first token is no target, the last has no text
    size = len(gpt2().decode(tokens[1:16]).encode())
    assert found.bits_per_byte == pytest.approx(found_losses[:15].sum() / size / math.log(2))


def test_special_tokens_have_no_bytes(tmp_path):
    config = tiny_config(model=dict(vocab_size=350), data=dict(tokenizer=str(byte_level(tmp_path))))
    has_bytes = losses._byte_lengths(config) > 0
    assert np.flatnonzero(has_bytes).tolist() == [*range(3, 345)]


def test_words_without_bytes_have_no_bits_per_byte(tmp_path, capsys):
    """A tokenizer of words joins them with spaces that no token has."""
    file = byte_level(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": None}))
    assert losses._byte_lengths(tiny_config(data=dict(tokenizer=str(file)))) is None
    assert re.match("warning: no bits per byte: .* tokens have no bytes", capsys.readouterr().err)


def test_perplexity_without_a_tokenizer_has_no_bits_per_byte(tmp_path, monkeypatch, capsys):
    def missing(name):
        raise DataError("tokenizer gpt2: not available")

    monkeypatch.setattr(losses, "get_tokenizer", missing)
    write_shard(tmp_path / "a.bin", np.arange(17, dtype=np.uint16))
    model, _ = tiny_model()
    opened = open_shards(str(tmp_path / "a.bin"), 256, 16)
    assert losses.perplexity(model, ValidationLoader(opened, 16, 0)).bits_per_byte is None
    assert capsys.readouterr().err.startswith("warning: no bits per byte: tokenizer gpt2: ")


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("hellaswag none", 4, "none: no checkpoint found"),
        ("hellaswag RUN --data none.jsonl", 3, "none.jsonl: cannot read or write"),
        (
            "perplexity hf:DIR",
            2,
            "perplexity: hf:DIR is no run with data.val; name shards after it",
        ),
        (
            "perplexity RUN my.txt",
            3,
            "my.txt: text, not a shard; `python -m gpt2_triton prepare text my.txt ",
        ),
        ("perplexity RUN 'none_*.bin'", 3, "none_*.bin: no such shards; "),
        ("perplexity RUN large.bin", 3, "must be less than 256; choose other data, or"),
        (
            "perplexity RUN gpt2/val.bin",
            3,
            "made with another tokenizer, gpt2, not bytes; prepare the text",
        ),
        (
            "perplexity RUN VAL --tokens 15",
            3,
            "eval.tokens, or --tokens, asks for 15; give 16 to",
        ),
        (
            "perplexity RUN VAL --seq_len 193",
            2,
            "--seq_len: 193, but the model's longest sequence has 192",
        ),
        (
            "perplexity RUN large.bin --seq_len 17",
            3,
            "a smaller train.seq_len; perplexity has --seq_len",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(
    trained, tmp_path, monkeypatch, capsys, line, code, message
):
    directory, _ = trained
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").touch()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "shards.json").write_text('{"tokenizer": "gpt2"}')
    (tmp_path / "gpt2" / "val.bin").touch()
    write_shard(tmp_path / "large.bin", np.array([300] * 17, np.uint16))
    words = {"RUN": str(directory / "run"), "VAL": str(directory / "val_0.bin")}
    assert run_tool(" ".join(words.get(word, word) for word in line.split())) == code
    err = capsys.readouterr().err
    assert message in err.replace(words["RUN"], "RUN") and len(err.splitlines()) == 1


def test_perplexity_takes_windows_of_another_length(trained, tmp_path, capsys):
    """Also longer ones than those of training; for other projects' weights the
    usual length is their context.
    """
    directory, _ = trained
    assert run_tool(f"export {directory}/run --out {tmp_path}/out") == 0
    for source, seq_len, tokens, dtype in (
        ("run", 8, 192, "fp32"),
        ("run", 100, 100, "fp32"),
        (tmp_path / "out", 100, 100, "fp32" if DEVICE == "cpu" else "bf16"),
    ):
        words = f"{directory / source} {directory}/val_0.bin --seq_len {seq_len}"
        assert run_tool(f"perplexity {words} --batch_tokens 200") == 0
        assert f"{tokens} tokens in {dtype} | loss " in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hellaswag", "perplexity"])
def test_the_scripts_of_eval_are_the_commands(trained, tmp_path, monkeypatch, capsys, name):
    words = [str(trained[0] / "run")]
    words += (
        ["--data", str(write(tmp_path / "rows.jsonl", [row(0)]))] if name == "hellaswag" else []
    )
    assert run_tool(" ".join([name, *words])) == 0
    printed = capsys.readouterr().out
    script = str(ROOT / "eval" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *words])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit, match="^0$"):
        runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out == printed and printed.count("\n") >= 2


@pytest.mark.parametrize(
    "dtype, stored", [("bf16", torch.bfloat16), ("fp32", torch.float32), (None, None)]
)
def test_load_for_losses_takes_the_dtype(trained, dtype, stored):
    """By default that of training, here bf16, but fp32 on a CPU."""
    config, saved, _ = load_weights(str(trained[0] / "run"))
    model = load_for_losses(config.replace(train=dict(dtype="bf16")), saved, 192, dtype)
    stored = stored or (torch.float32 if model.arena.device.type == "cpu" else torch.bfloat16)
    assert model.state.params.dtype == stored
    assert torch.equal(model.state.params.cpu(), whole(saved["params"]).to(stored))
