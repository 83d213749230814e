"""Exports in several files: transformers reads them, and an import has every bit."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from gpt2_triton.checkpoint import huggingface, safetensors_files
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.weights import to_flat_buffers
from tests.support.foreign import checkpoint_of
from tests.support.tiny import tiny_model


@pytest.mark.parametrize("arch, dtype", [("gpt2", "fp32"), ("llama", "fp32"), ("llama", "bf16")])
def test_several_files_are_the_model_of_one(tmp_path, monkeypatch, arch, dtype):
    model, config = tiny_model(model=dict(arch=arch), train=dict(dtype=dtype))
    step = str(checkpoint_of(tmp_path / "run", config, {"params": model.state.params}))
    export(step, tmp_path / "one", "hf", dtype)
    monkeypatch.setattr(safetensors_files, "LARGEST", 50_000)
    export(step, tmp_path / "several", "hf", dtype)
    files = sorted((tmp_path / "several").glob("*.safetensors"))
    n = len(files)
    assert n > 4 and [f.name for f in files] == [
        f"model-{i:05d}-of-{n:05d}.safetensors" for i in range(1, n + 1)
    ]
    modes = {path.stat().st_mode for path in (tmp_path / "several").iterdir()}
    assert len(modes) == 1  # safetensors would make its files private
    parts, whole = (
        [load_file(path) for path in files],
        load_file(tmp_path / "one" / "model.safetensors"),
    )
    assert all(len(part) == 1 or sum(t.nbytes for t in part.values()) <= 50_000 for part in parts)
    several = {name: tensor for part in parts for name, tensor in part.items()}
    assert several.keys() == whole.keys() and all(
        torch.equal(several[name], whole[name]) for name in whole
    )
    again = huggingface.read(str(tmp_path / "several"))
    assert torch.equal(to_flat_buffers(again, config)["params"], model.state.params.cpu())
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "several", output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=50_000)
    indices = [
        json.loads((tmp_path / kind / safetensors_files.INDEX).read_text())
        for kind in ("several", "theirs")
    ]
    ours, transformers_own = (index["metadata"]["total_size"] for index in indices)
    assert ours == transformers_own
    assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys()
