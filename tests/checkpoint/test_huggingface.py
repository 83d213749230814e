"""Hugging Face's GPT-2: transformers computes our logits, round trips keep every bit, other models are refused in one
line.
"""

import hashlib
import json
import shutil
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2_triton.checkpoint import huggingface
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.sources import initial_weights
from gpt2_triton.checkpoint.weights import by_name, to_flat_buffers
from gpt2_triton.commands import tools as app
from gpt2_triton.commands.app import main
from gpt2_triton.data.tokenizer import VOCAB_BPE_SHA256, get_tokenizer
from gpt2_triton.errors import CheckpointError
from tests.support.foreign import checkpoint_of, config_of, our_logits, random_params, token_ids
from tests.support.loop import make_trainer
from tests.training.test_trainer import run_config

transformers = pytest.importorskip("transformers")

SIZES = [
    dict(n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16),
    dict(n_layer=1, n_head=2, n_embd=160, vocab_size=256, block_size=24, seq_len=24),
    dict(n_layer=3, n_head=2, n_embd=128, vocab_size=257, block_size=16),
]
TOLERANCE = 1e-4  # logits are about 10; two orders of summation in fp32 are 1e-5 apart


def their_model(n_layer=2, n_head=1, n_embd=64, vocab_size=300, block_size=16, seq_len=None, **keys):
    """Return a GPT-2 of transformers with random biases and norms, since it starts with zeros and ones."""
    config = transformers.GPT2Config(
        n_layer=n_layer, n_head=n_head, n_embd=n_embd, vocab_size=vocab_size, n_positions=block_size,
        bos_token_id=0, eos_token_id=0, **keys,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of their_model() as written by transformers."""
    directory = tmp_path_factory.mktemp("theirs")
    their_model().save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy")


def edit_config(directory, **keys):
    path = directory / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | keys).items() if v != "absent"}))


def edit_tensors(directory, edit):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def imported(directory, **sections):
    """Return our flat tensors from a directory of Hugging Face."""
    return to_flat_buffers(huggingface.read(str(directory)), config_of(**sections))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_imported_weights_give_the_logits_of_transformers(tmp_path, sizes):
    model, config = their_model(**sizes), config_of(**sizes)
    model.save_pretrained(tmp_path)
    ids = token_ids(config)
    with torch.no_grad():
        theirs = model(torch.from_numpy(ids.astype(np.int64))).logits[0, -1].numpy()
    ours = our_logits(config, to_flat_buffers(huggingface.read(str(tmp_path)), config)["params"], ids)
    assert np.abs(ours - theirs).max() < TOLERANCE and np.abs(theirs).max() > 1


@pytest.mark.parametrize("sizes", SIZES)
def test_exported_weights_give_our_logits_in_transformers(tmp_path, sizes):
    config, ids = config_of(**sizes), token_ids(config_of(**sizes))
    params = random_params(config)
    export(str(checkpoint_of(tmp_path / "run", config, {"params": params})), tmp_path / "out", "hf", "fp32")
    model, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = model.eval()(torch.from_numpy(ids.astype(np.int64))).logits[0, -1].numpy()
    assert np.abs(our_logits(config, params, ids) - theirs).max() < TOLERANCE


@pytest.mark.parametrize(
    "sections", [{}, dict(train=dict(dtype="bf16"), optim=dict(master="fp32"))], ids=["fp32", "masters"]
)
def test_import_and_export_keep_every_bit(saved, tmp_path, sections):
    config = config_of(**sections)
    step_dir = checkpoint_of(tmp_path / "run", config, to_flat_buffers(huggingface.read(str(saved)), config))
    export(str(step_dir), tmp_path / "out", "hf", "fp32")
    before, after = load_file(saved / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_import_rounds_bf16_without_masters_as_torch_does(saved):
    exact, rounded = imported(saved)["params"], imported(saved, train=dict(dtype="bf16"))
    assert list(rounded) == ["params"] and torch.equal(rounded["params"], exact.bfloat16())


def test_export_in_bf16_gives_the_stored_weights(tmp_path):
    config = config_of(train=dict(dtype="bf16"))
    params = random_params(config).bfloat16()
    export(str(checkpoint_of(tmp_path / "run", config, {"params": params})), tmp_path / "out", "hf", "bf16")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.transformer.wte.weight, params[: 300 * 64].view(300, 64))


def test_import_zeroes_padding_rows_and_drops_surplus_positions(saved):
    config = config_of(block_size=8, seq_len=8)
    params = to_flat_buffers(huggingface.read(str(saved)), config)["params"]
    theirs = load_file(saved / "model.safetensors")
    assert torch.equal(by_name(params, config.model)["wpe.weight"], theirs["transformer.wpe.weight"][:8])
    assert not params[300 * 64 : config.model.padded_vocab * 64].any()


def test_import_takes_older_spellings_of_the_same_model(saved, copy):
    """No prefix, causal masks, a head that repeats wte: older versions of transformers and others wrote these."""
    expected = imported(saved)["params"]

    def without_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.bool)
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)

    edit_tensors(copy, without_prefix)
    edit_config(copy, tie_word_embeddings=False, layer_norm_epsilon="absent")
    assert torch.equal(imported(copy)["params"], expected)


def test_import_reads_shards_as_one_model(saved, tmp_path):
    their_model().save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(imported(tmp_path)["params"], imported(saved)["params"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_import_of_half_precision_is_exact(saved, copy, dtype):
    edit_tensors(copy, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))
    assert torch.equal(imported(copy)["params"], imported(saved)["params"].to(dtype).float())


REFUSED_CONFIGS = [
    (dict(activation_function="gelu"), "activation_function is 'gelu', and only 'gelu_new' or"),
    (dict(model_type="llama"), "model_type is 'llama'"),
    (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    (dict(n_inner=100), "n_inner is 100"),
    (dict(n_embd="absent"), "n_embd is None, expected a whole number"),
    (dict(n_embd=63), "not a GPT-2 that fits here: n_layer 2, n_head 1, n_embd 63"),
    (dict(n_layer=3), "has no tensor h.2.attn.c_attn.bias"),
    (dict(n_layer=1), "h.1.attn.c_attn.bias belongs to no GPT-2 of 1 layers"),
    (dict(vocab_size=299), r"wte.weight is \(300, 64\), expected \(299, 64\)"),
    (dict(tie_word_embeddings=False), "its output head is not its token embedding"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "message"), REFUSED_CONFIGS)
def test_import_refuses_other_models(copy, keys, message):
    edit_config(copy, **keys)
    with pytest.raises(CheckpointError, match=message) as error:
        imported(copy, vocab_size=keys.get("vocab_size", 300))
    assert "\n" not in str(error.value)


REFUSED_TENSORS = [
    (lambda t: t.update({"lm_head.weight": t["transformer.wte.weight"] + 1}), "its output head is not"),
    (lambda t: t.pop("transformer.h.1.ln_2.bias"), "has no tensor h.1.ln_2.bias"),
    (lambda t: t["transformer.h.0.ln_1.bias"].fill_(float("nan")), "h.0.ln_1.bias has a NaN or an infinity"),
    (lambda t: t.update({"transformer.ln_f.bias": t["transformer.ln_f.bias"].double()}), "is torch.float64, expected"),
]  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), REFUSED_TENSORS)
def test_import_refuses_wrong_tensors(copy, edit, message):
    edit_tensors(copy, edit)
    with pytest.raises(CheckpointError, match=message):
        imported(copy)


def test_import_refuses_damaged_files(copy):
    (copy / "model.safetensors").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match="not safetensors"):
        imported(copy)
    (copy / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        imported(copy)
    (copy / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="config.json: cannot be read"):
        imported(copy)


def test_import_into_a_run_of_other_sizes_names_the_keys_to_set(saved):
    with pytest.raises(CheckpointError, match="has n_layer 2, vocab_size 300, this run n_layer 1, vocab_size 256; set"):
        imported(saved, n_layer=1, vocab_size=256)
    with pytest.raises(CheckpointError, match="has block_size 16, this run block_size 32; set model.block_size to 16"):
        imported(saved, block_size=32)


def test_import_looks_a_name_up_on_the_hub(saved, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda name, allow_patterns: saved if name == "a/b" else 1 / 0)
    assert huggingface.read("a/b").model.n_layer == 2
    with pytest.raises(CheckpointError, match="hf:gpt2: no such directory, and the download failed .ZeroDiv"):
        huggingface.read("gpt2")
    with pytest.raises(CheckpointError, match=r"hf:./gpt2: no such directory; expected one with config.json"):
        huggingface.read("./gpt2")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="hf:gpt2: no such directory, .*ModuleNotFoundError.*huggingface_hub"):
        huggingface.read("gpt2")


def test_trainer_starts_from_imported_weights(tmp_path):
    their_model(vocab_size=256).save_pretrained(tmp_path / "theirs")
    init = f"hf:{tmp_path / 'theirs'}"
    config = run_config(model=dict(n_layer=2), init_from=init, train=dict(dtype="bf16"), optim=dict(master="fp32"))
    expected = initial_weights(config)
    trainer = make_trainer(config, tmp_path / "run")
    try:
        held = trainer.model.state_buffers()
        assert torch.equal(held["params"].cpu(), expected["params"]) and torch.equal(held["low"].cpu(), expected["low"])
        assert expected["low"].any() and not held["m"].cpu().any()
    finally:
        trainer.close()


# ---- the tokenizer ----

TEXTS = ["", "hello world", "  It's 3 o'clock;\n\n\tété 漢字 🙂", "<|endoftext|> a"]


@pytest.fixture(scope="module", params=["gpt2", "bytes"])
def exported(request, tmp_path_factory):
    """(our tokenizer, the directory of a model exported with it)."""
    directory = tmp_path_factory.mktemp(request.param)
    tokenizer = get_tokenizer(request.param)
    config = config_of(vocab_size=tokenizer.vocab_size, data=dict(tokenizer=request.param))
    step_dir = checkpoint_of(directory / "run", config, {"params": random_params(config)})
    export(str(step_dir), directory / "out", "hf", "fp32")
    return tokenizer, directory / "out"


def test_transformers_tokenizers_read_the_exported_files(exported):
    ours, directory = exported
    for theirs in (transformers.GPT2Tokenizer, transformers.AutoTokenizer):
        tokenizer = theirs.from_pretrained(directory)
        assert len(tokenizer) == ours.vocab_size and tokenizer.eos_token_id == ours.eot
        for text in TEXTS[: 4 if ours.name == "bytes" else 3]:  # theirs encode <|endoftext|> as the special token
            assert tokenizer.encode(text) == ours.encode(text).tolist()
            assert tokenizer.decode(ours.encode(text).tolist()) == text


def test_exported_merges_are_those_of_openai(exported):
    ours, directory = exported
    content = (directory / "merges.txt").read_bytes()
    if ours.name == "gpt2":
        assert hashlib.sha256(content).hexdigest() == VOCAB_BPE_SHA256
    else:
        assert content == b"#version: 0.2\n"


def test_exported_generation_config_has_our_end_of_text(exported):
    ours, directory = exported
    generation = transformers.GenerationConfig.from_pretrained(directory)
    assert generation.bos_token_id == generation.eos_token_id == ours.eot


# ---- the command ----


@pytest.fixture
def run(tmp_path):
    config = config_of()
    checkpoint_of(tmp_path / "run", config, {"params": random_params(config)})
    return tmp_path / "run"


def test_export_command_writes_the_files_and_prints_their_place(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()  # an empty directory is allowed
    assert main(app, ["export", str(run), "--out", str(tmp_path / "out"), "--dtype", "bf16"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out'}\n"
    files = "config generation_config model.safetensors merges.txt tokenizer_config vocab"
    expected = {name if "." in name else f"{name}.json" for name in files.split()}
    written = list((tmp_path / "out").iterdir())
    assert {path.name for path in written} == expected
    assert len({path.stat().st_mode for path in written}) == 1  # safetensors alone would make its file private


def test_export_refuses_a_directory_with_files(run, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    assert main(app, ["export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "is there already; choose another" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_failed_export_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "save_file", full)
    before = sorted(tmp_path.iterdir())
    assert main(app, ["export", str(run), "--out", str(tmp_path / "out")]) == 2
    assert "could not be written ([Errno 28] No space left on device); choose another" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
