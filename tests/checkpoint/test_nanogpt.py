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
from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.errors import CheckpointError
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


def test_character_level_models_are_exported_and_else_refused_in_one_line(tmp_path, capsys):
    """nanoGPT keeps their 65 characters in meta.pkl, which is not read: it would execute code."""
    config = config_of(vocab_size=300)
    saved = nanogpt_content(random_params(config))
    saved["model"]["transformer.wte.weight"] = saved["model"]["transformer.wte.weight"][:65].clone()
    saved["model"]["lm_head.weight"] = saved["model"]["transformer.wte.weight"]
    saved["model_args"]["vocab_size"] = 65
    source = f"nanogpt:{nanogpt_checkpoint(tmp_path, saved)}"
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps(Malice()))
    (tmp_path / "val.bin").write_bytes(np.arange(64, dtype=np.uint16).tobytes())
    assert main(tools, ["export", source, "--out", str(tmp_path / "out")]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(exported["transformer.wte.weight"], saved["model"]["transformer.wte.weight"])
    told = capsys.readouterr()
    assert told.out.startswith(f"wrote {tmp_path}/out, ")
    assert "65 of 65 tokens" in told.err
    told = "its 65 tokens have no known tokenizer; .* its weights can only be exported$"
    for command in (
        ["sample", source],
        ["hellaswag", source],
        ["perplexity", source, str(tmp_path / "val.bin")],
    ):
        assert main(tools, command) == 4
        err = capsys.readouterr().err
        assert re.search(told, err) and len(err.splitlines()) == 1
    with pytest.raises(CheckpointError, match=told):
        initial_weights(config_of(init_from=source))


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
