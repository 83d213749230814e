"""Every kind of source gives a configuration and weights that run."""

import importlib.metadata
import os
import tracemalloc

import pytest
import torch

from gpt2_triton.checkpoint import huggingface, safetensors_files, weights
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.sources import initial_weights, load_weights, open_weights
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import CheckpointError
from gpt2_triton.training.logger import Logger
from tests.data.prepare.test_text import llama3
from tests.support.checkpoints import whole
from tests.support.commands import run_tool
from tests.support.foreign import (
    checkpoint_of,
    config_of,
    nanogpt_checkpoint,
    nanogpt_content,
    random_params,
)
from tests.support.tiny import tiny_model


@pytest.fixture
def sources(tmp_path):
    """The same weights as a run, a step, the run by init_from's form, and files
    of Hugging Face and llm.c.
    """
    config = config_of(vocab_size=256)
    step = checkpoint_of(
        tmp_path / "run", config, {"params": random_params(config), "m": random_params(config)}
    )
    for kind in ("hf", "llmc"):
        export(str(step), tmp_path / kind, kind, "fp32")
    own = [tmp_path / "run", step, f"checkpoint:{tmp_path}/run"]
    return [*own, tmp_path / "hf", f"hf:{tmp_path}/hf", f"llmc:{tmp_path}/llmc/model.bin"]


def test_load_weights_gives_equal_weights_and_a_fitting_configuration(sources):
    for source, dtype in zip(map(str, sources), ["fp32"] * 3 + ["bf16"] * 3):
        config, stored, _ = load_weights(source)
        assert (config.train.dtype, config.model) == (dtype, config_of(vocab_size=256).model)
        assert config.data.tokenizer == "bytes" and config.train.seq_len == 16
        assert stored.keys() == {"params"}
        assert torch.equal(whole(stored["params"]), random_params(config_of(vocab_size=256)))


def test_a_run_keeps_llama3s_vocabulary_and_its_steps_find_it(tmp_path, monkeypatch):
    llama3()
    config = config_of(vocab_size=128256).replace(data=dict(tokenizer="llama3"))
    step = checkpoint_of(tmp_path / "run", config)
    Logger(tmp_path / "run", config).close()
    monkeypatch.setenv("LLAMA3_TOKENIZER", "")
    load_weights(str(step))
    assert os.environ["LLAMA3_TOKENIZER"] == str(tmp_path / "run")
    monkeypatch.setattr(importlib.metadata, "distribution", None)  # the installed vocabulary
    assert get_tokenizer.__wrapped__("llama3").encode(" Việt").tolist() == [101798]


def peak_of(call):
    """Return the most bytes that numpy and Python have at once in a call."""
    tracemalloc.start()
    call()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_a_run_starts_from_weights_without_a_copy_of_them_on_the_host(tmp_path, monkeypatch, arch):
    sizes = dict(arch=arch, n_layer=6, n_head=2, n_embd=128, vocab_size=2048)
    keys = dict(train=dict(dtype="bf16"), optim=dict(master="fp32"), init_from=f"hf:{tmp_path}/hf")
    model, config = tiny_model(model=sizes, **keys)
    step = checkpoint_of(
        tmp_path / "run", config.replace(optim=dict(master="none")), {"params": model.state.params}
    )
    monkeypatch.setattr(weights, "PART", 4096)
    monkeypatch.setattr(safetensors_files, "LARGEST", 1)  # a file for each tensor
    exported, source = tmp_path / "hf", open_weights(str(step))
    peak = peak_of(lambda: export(source, exported, "hf", "fp32"))
    assert peak < model.state.params.nbytes  # the tensors of one file
    expected = weights.to_flat_buffers(huggingface.read(f"{tmp_path}/hf"), config)
    model.state.params.zero_()
    peak = peak_of(lambda: model.load(weights.flat_parts(initial_weights(config), config)))
    assert peak < 0.1 * model.state.params.nbytes
    assert torch.equal(model.state.params.cpu(), expected["params"])
    assert torch.equal(model.state.master_low.cpu(), expected["low"])


@pytest.mark.parametrize(
    "line", ["export checkpoint:run --out out", "perplexity checkpoint:run val.bin --tokens 32"]
)
def test_commands_take_a_run_as_init_from_does(tmp_path, monkeypatch, request, line):
    for name in "run", "val.bin":
        (tmp_path / name).symlink_to(request.config.rootpath / "tests" / "fixtures" / name)
    monkeypatch.chdir(tmp_path)
    assert run_tool(line) == 0


def test_a_plan_refuses_weights_of_other_sizes_and_names_those_that_it_did_not_read(
    sources, tmp_path, capsys
):
    """Of a run and of each project's files; the recipe's sizes are others."""
    plan = "train quickstart --plan --gpu h100 --init_from"
    for source in (*sources[2:3], *sources[-2:]):
        assert run_tool(f"{plan} {source}") == 4
        assert "init_from: " in capsys.readouterr().err, source
    for source in (f"llmc:{tmp_path}/none.bin", "hf:openai-community/gpt2-xl"):
        assert run_tool(f"{plan} {source}") == 0
        note, verdict, *_ = capsys.readouterr().out.splitlines()
        assert note.startswith(f"init_from: {source} is not here, so the plan is of the model in ")
        assert verdict.startswith("fits ")


def test_load_weights_refuses_models_that_cannot_run(tmp_path):
    path = nanogpt_checkpoint(tmp_path, nanogpt_content(random_params(config_of())))
    with pytest.raises(
        CheckpointError, match="its 300 tokens have no known tokenizer; put its meta.pkl"
    ):
        load_weights(f"nanogpt:{path}")
    config = config_of(vocab_size=256, n_embd=192, n_head=3)
    step = checkpoint_of(tmp_path / "run", config)
    export(str(step), tmp_path / "hf", "hf", "bf16")
    text = (tmp_path / "hf" / "config.json").read_text()
    (tmp_path / "hf" / "config.json").write_text(text.replace('"n_head": 3', '"n_head": 6'))
    with pytest.raises(
        CheckpointError,
        match="heads of 32 channels do not run here, .* its weights can only be exported$",
    ):
        load_weights(f"hf:{tmp_path}/hf")
    with pytest.raises(CheckpointError, match="heads of 32 channels do not run here"):
        initial_weights(config.model_copy(update=dict(init_from=f"hf:{tmp_path}/hf")))
