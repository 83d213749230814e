"""benchmarks/centred.py: the same function and gradients, from operands that lose less."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import gpt2_triton.kernels as K
from benchmarks import gradients
from benchmarks.centred import CentredKernels
from gpt2_triton.data.shards import write_shard
from gpt2_triton.model.buffers import param_views
from tests.support.tiny import tiny_config, tiny_model


@pytest.mark.parametrize("recompute", ["gelu+ln", "gelu+ln+qkv"])
def test_gradients_of_q_and_k_survive_where_tokens_are_nearly_alike(rng, monkeypatch, recompute):
    """Biases of four times the norm's deviation: e4m3's step is 0.125 to 0.25 of it, so its rounding error is 0.05 of
    what differs between tokens; without them 0.027 of it.
    """
    sections = dict(train=dict(dtype="bf16", precision="fp8"), memory=dict(recompute=recompute))
    model, saved = tiny_model(**sections)
    params = model.state.params.clone()
    for bias in param_views(params, model.dims).lnb[:4:2]:
        bias.copy_(4 * torch.sign(rng(bias.numel())) + rng(bias.numel()))
    tokens = [np.random.default_rng(i).integers(0, 256, (2, 17), dtype=np.int32) for i in range(2)]
    config = gradients.config_of(tiny_config(**sections), 2, 2, "fp8", "head")
    want_loss, want = gradients.exact(params, model.dims, tokens)

    def agreement():
        loss, found, _ = gradients.ours(config, params, tokens)
        return loss, gradients.by_kind(found, want)

    _, plain = agreement()
    monkeypatch.setattr(gradients, "K", CentredKernels(K))
    loss, centred = agreement()
    assert abs(loss - want_loss) < 2e-3 * want_loss
    for kind in ("qw", "kw"):
        assert centred[kind].error < 0.7 * plain[kind].error, (kind, plain[kind], centred[kind])
    assert centred["all"].error < plain["all"].error


@pytest.mark.slow
def test_a_run_with_the_lever_has_the_losses_of_one_without(tmp_path):
    """They differ by the rounding of e4m3, in three steps from the same weights."""
    write_shard(tmp_path / "train.bin", np.random.default_rng(0).integers(0, 250, 4000).astype(np.uint16))
    words = "configs/quickstart.yaml --train.batch_size 2 --train.seq_len 16 --train.total_batch_tokens 32"
    words += " --model.n_layer 1 --model.n_head 1 --model.n_embd 64 --model.block_size 16 --train.steps 3"
    words += (
        " --optim.warmup 1 --eval.every 3 --eval.tokens 64 --sample.every 0 --checkpoint.every 0 --train.dtype bf16"
    )
    words += f" --train.precision fp8 --data.train {tmp_path}/train.bin --data.val {tmp_path}/train.bin"
    losses = []
    for program in ("gpt2_triton train", "benchmarks.levers centred"):
        run = tmp_path / str(len(losses))
        command = [sys.executable, "-m", *program.split(), *words.split(), "--run_dir", str(run)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([record.get("loss", record.get("val_loss")) for record in records])
    assert losses[0] != losses[1] and len(losses[0]) > 3
    np.testing.assert_allclose(*losses, rtol=2e-3)
