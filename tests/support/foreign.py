"""Checkpoints of ours with random weights, and checkpoints of nanoGPT."""

from pathlib import Path

import torch

from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.checkpoint.stored import whole_tensors
from gpt2_triton.checkpoint.weights import Weights, by_name, from_checkpoint
from gpt2_triton.config.config import Config
from gpt2_triton.model.model import Model
from tests.support import checkpoints
from tests.support.tiny import tiny_config


def config_of(
    n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16, seq_len=16, dropout=0.0,
    **sections
) -> Config:  # fmt: skip
    sizes = dict(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=vocab_size, block_size=block_size
    )
    train = dict(seq_len=seq_len) | sections.pop("train", {})
    return tiny_config(model=sizes | dict(dropout=dropout), train=train, **sections)


def random_params(config: Config) -> torch.Tensor:
    """Return fp32 parameters, random in norms and biases too, the padding of wte zero."""
    flat = torch.zeros(config.n_params)
    generator = torch.Generator().manual_seed(0)
    for name, view in by_name(flat, config.model).items():
        view.copy_(
            torch.randn(view.shape, generator=generator) * 0.1
            + (("ln" in name) and name.endswith("weight"))
        )
    return flat


def checkpoint_of(
    run: Path, config: Config, tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    """Write a run with one checkpoint of these tensors, by default of random weights; return
    its step directory.
    """
    state = checkpoints.state(1, config=config.to_dict())
    tensors = tensors or {"params": random_params(config)}
    return save_checkpoint(run / "checkpoints", 1, tensors, state, Retention(0))


def weights_of(model: Model) -> Weights:
    """Return a copy of a model's weights, to be exported."""
    params = model.state.params.to("cpu", copy=True)
    return from_checkpoint("ours", whole_tensors("", {"params": params}), model.config)


def nanogpt_content(params: torch.Tensor, prefix: str = "", bias: bool = True) -> dict:
    """Return the content of nanoGPT's ckpt.pt for our flat parameters, with
    entries that our reader ignores.
    """
    state = {
        f"{prefix}transformer.{name}": view.clone()
        for name, view in by_name(params, config_of().model).items()
    }
    state[f"{prefix}lm_head.weight"] = state[f"{prefix}transformer.wte.weight"]
    if not bias:
        state = {name: t for name, t in state.items() if not name.endswith(".bias")}
    arguments = dict(
        n_layer=2, n_head=1, n_embd=64, block_size=16, bias=bias, vocab_size=300, dropout=0.0
    )
    return {
        "model": state,
        "optimizer": {
            "state": {0: {"exp_avg": torch.zeros(3)}},
            "param_groups": [{"lr": 6e-4, "betas": (0.9, 0.95)}],
        },
        "model_args": arguments,
        "iter_num": 5000,
        "best_val_loss": torch.tensor(2.9),
        "config": {"dataset": "openwebtext", "compile": True},
    }


def nanogpt_checkpoint(directory: Path, saved: dict) -> str:
    torch.save(saved, directory / "ckpt.pt")
    return str(directory / "ckpt.pt")
