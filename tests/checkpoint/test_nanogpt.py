"""Importing nanoGPT's checkpoints: plain, compiled, without biases; nothing in them is executed."""

import os
import pickle
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gpt2_triton.checkpoint import nanogpt
from gpt2_triton.checkpoint.sources import initial_weights
from gpt2_triton.checkpoint.weights import by_name, to_flat_buffers
from gpt2_triton.data.shards import write_shard
from gpt2_triton.errors import CheckpointError, DataError
from tests.support.commands import run_tool
from tests.support.foreign import (
    config_of,
    nanogpt_checkpoint,
    nanogpt_content,
    random_params,
)


@pytest.fixture
def params():
    return random_params(config_of())


def imported(directory, content):
    """Return our flat parameters from a checkpoint of nanoGPT."""
    return to_flat_buffers(nanogpt.read(nanogpt_checkpoint(directory, content)), config_of())[
        "params"
    ]


def test_nanogpt_reader_sets_missing_biases_to_zero(params, tmp_path):
    read = by_name(imported(tmp_path, nanogpt_content(params, bias=False)), config_of().model)
    original = by_name(params, config_of().model)
    for name, view in read.items():
        assert not view.any() if name.endswith(".bias") else torch.equal(view, original[name])


def test_nanogpt_reader_takes_parameters(params, tmp_path):
    """`dict(model.named_parameters())` in place of a state dict."""
    saved = nanogpt_content(params)
    saved["model"] = {name: torch.nn.Parameter(t) for name, t in saved["model"].items()}
    assert torch.equal(imported(tmp_path, saved), params)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda saved: saved.pop("model_args"), "has no model and model_args"),
        (lambda saved: saved["model_args"].pop("n_head"), "model_args have no n_head"),
    ],
)
def test_nanogpt_reader_refuses_other_content(params, tmp_path, damage, message):
    """What it shares with other readers is tested at Hugging Face's."""
    saved = nanogpt_content(params)
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as error:
        imported(tmp_path, saved)
    assert "\n" not in str(error.value)


def test_nanogpt_reader_takes_the_biases_that_are_there(params, tmp_path):
    saved = nanogpt_content(params)
    saved["model_args"]["bias"] = False
    assert torch.equal(imported(tmp_path, saved), params)


CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"  # Shakespeare's


def meta_pkl(directory, content):
    (directory / "meta.pkl").write_bytes(pickle.dumps(content))


@pytest.fixture
def of_characters(tmp_path):
    """The source of a model of 65 characters."""
    saved = nanogpt_content(random_params(config_of(vocab_size=300)))
    saved["model"]["transformer.wte.weight"] = saved["model"]["transformer.wte.weight"][:65].clone()
    saved["model"]["lm_head.weight"] = saved["model"]["transformer.wte.weight"]
    saved["model_args"]["vocab_size"] = 65
    return f"nanogpt:{nanogpt_checkpoint(tmp_path, saved)}"


def test_models_of_characters_run_with_the_meta_pkl_beside_them(of_characters, tmp_path, capsys):
    itos = dict(enumerate(CHARACTERS))
    meta_pkl(tmp_path, {"vocab_size": 65, "itos": itos, "stoi": {c: i for i, c in itos.items()}})
    words = "--prompt ROMEO: --tokens 9 --temperature 0"
    assert run_tool(f"sample {of_characters} {words}") == 0
    text = capsys.readouterr().out
    assert text.startswith("ROMEO:") and len(text) == len("ROMEO:") + 9 + 1
    assert run_tool(f"sample {of_characters} --prompt 'ROMÉO: ñ'") == 3
    assert "meta.pkl: has no 'É', 'ñ'; leave them out" in capsys.readouterr().err
    assert run_tool(f"sample {of_characters} --tokens 30") == 0
    assert len(capsys.readouterr().out) == 30 + 1  # no character ends it, not even \n
    assert run_tool(f"export {of_characters} --out {tmp_path}/out") == 0
    assert run_tool(f"sample {tmp_path}/out {words}") == 0
    told = capsys.readouterr()
    assert told.out.endswith(text) and "no text" not in told.err
    tokenizer = str(tmp_path / "meta.pkl")
    config = config_of(vocab_size=65, init_from=of_characters, data=dict(tokenizer=tokenizer))
    assert initial_weights(config).tokenizer == tokenizer
    write_shard(tmp_path / "val.bin", np.arange(64, dtype=np.uint16))
    assert run_tool(f"perplexity {of_characters} {tmp_path}/val.bin") == 0


def test_an_exported_model_of_characters_has_the_same_tokens_in_transformers(
    of_characters, tmp_path
):
    transformers = pytest.importorskip("transformers")
    meta_pkl(tmp_path, {"itos": dict(enumerate(CHARACTERS))})
    assert run_tool(f"export {of_characters} --out {tmp_path}/out") == 0
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs.encode(CHARACTERS) == [*range(65)] and len(theirs) == 65
    assert theirs.decode([*range(65)]) == CHARACTERS
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.eos_token_id, config.bos_token_id) == (None, 0)


def test_models_of_characters_alone_are_exported_and_else_refused(of_characters, tmp_path, capsys):
    meta_pkl(tmp_path, {"itos": {0: "a"}})  # of another model
    write_shard(tmp_path / "val.bin", np.arange(64, dtype=np.uint16))
    assert run_tool(f"export {of_characters} --out {tmp_path}/out") == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    saved = torch.load(of_characters.removeprefix("nanogpt:"))["model"]
    assert torch.equal(exported["transformer.wte.weight"], saved["transformer.wte.weight"])
    told = capsys.readouterr()
    assert told.out.startswith(f"wrote {tmp_path}/out, ") and "65 of 65 tokens" in told.err
    told = "its 65 tokens have no known tokenizer; put its meta.pkl, with as many .* exported$"
    for command in ("sample {}", "hellaswag {}", f"perplexity {{}} {tmp_path}/val.bin"):
        assert run_tool(command.format(of_characters)) == 4
        err = capsys.readouterr().err
        assert re.search(told, err) and len(err.splitlines()) == 1
    run = config_of(vocab_size=256).replace(data=dict(tokenizer="bytes"))
    with pytest.raises(CheckpointError, match=told):
        initial_weights(run.model_copy(update=dict(init_from=of_characters)))


@pytest.mark.parametrize(
    "content", [{"itos": {0: "a", 1: "bc"}}, {"itos": {}}, {"itos": [0]}, {"stoi": {"a": 0}}, 3]
)
def test_other_meta_pkls_are_refused(of_characters, tmp_path, content):
    meta_pkl(tmp_path, content)
    with pytest.raises(DataError, match="meta.pkl: no meta.pkl of nanoGPT: .*; give another file"):
        nanogpt.read(of_characters.removeprefix("nanogpt:"))


def test_a_meta_pkl_executes_nothing(of_characters, tmp_path, capsys):
    for content in (Malice(), System(), {"itos": Malice()}):
        meta_pkl(tmp_path, content)
        assert run_tool(f"sample {of_characters}") == 3
        told = capsys.readouterr()
        assert told.out == "" and "no meta.pkl of nanoGPT: it names " in told.err


class Malice:
    def __reduce__(self):
        return print, ("executed",)


class System:
    def __reduce__(self):
        return os.system, ("echo executed",)


def test_nanogpt_reader_executes_nothing(params, tmp_path, capsys):
    assert torch.equal(imported(tmp_path, nanogpt_content(params) | {"config": Malice()}), params)
    content = nanogpt_content(params)
    content["model"]["transformer.wte.weight"] = Malice()
    with pytest.raises(CheckpointError, match="wte.weight is a Inert"):
        imported(tmp_path, content)
    with pytest.raises(CheckpointError, match="cannot be read .*; expected"):
        imported(tmp_path, nanogpt_content(params) | {"config": System()})
    assert capsys.readouterr().out == ""


class GPTConfig:
    """As in build-nanogpt, which trains with its class in the main module."""

    def __init__(self, **sizes):
        self.__dict__ |= sizes


def test_nanogpt_reader_takes_the_objects_of_forks(params, tmp_path):
    """build-nanogpt has the sizes in an object, and forks keep losses as numbers of numpy."""
    content = nanogpt_content(params, "module.") | {
        "best_val_loss": np.float64(2.9),
        "step": np.int64(3),
    }
    content["config"] = GPTConfig(**content.pop("model_args"))
    assert torch.equal(imported(tmp_path, content), params)


def test_nanogpt_reader_refuses_other_files(tmp_path):
    (tmp_path / "ckpt.pt").write_bytes(b"not a pickle")
    with pytest.raises(
        CheckpointError, match="cannot be read .*expected nanoGPT's ckpt.pt"
    ) as error:
        nanogpt.read(str(tmp_path / "ckpt.pt"))
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="cannot be read .*No such file"):
        nanogpt.read(str(tmp_path / "none.pt"))
