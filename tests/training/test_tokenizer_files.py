"""A run on any tokenizer.json: from text to an export, also on a machine without the file."""

import pickle
import shutil

import pytest
from tokenizers import Tokenizer

import gpt2_triton
from gpt2_triton.checkpoint import hf_tokenizer, sources
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.format import list_steps
from gpt2_triton.data.prepare import build, text
from gpt2_triton.data.shards import map_tokens, require_tokenizer
from gpt2_triton.data.tokenizer import get_tokenizer, identity
from gpt2_triton.errors import CheckpointError, ConfigError, DataError
from gpt2_triton.files import object_in
from tests.support.tiny import tiny_config
from tests.support.tokenizer_files import PROSE, byte_level, sentencepiece


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text(PROSE * 4 + "<|endoftext|>" + PROSE * 8)
    return tmp_path


def prepared(folder, tokenizer, out="shards"):
    measured = text.measure_text([folder / "my.txt"], 1)
    return text.prepare_text(measured, folder / out, str(tokenizer), 0.2, 1)


def config_of(shards, tokenizer, **sections):
    data = {"train": f"{shards}/train_*.bin", "val": f"{shards}/val_*.bin"}
    model = {"vocab_size": get_tokenizer(str(tokenizer)).vocab_size}
    data["tokenizer"] = str(tokenizer)
    return tiny_config(data=data, **{"model": model, "train": {"steps": 2}} | sections)


@pytest.mark.parametrize("kind", [byte_level, sentencepiece])
def test_shards_are_the_tokens_of_the_documents(here, kind, monkeypatch):
    """Also of one in pieces, which sentencepiece would each begin with a space."""
    monkeypatch.setattr(build, "BATCH_CHARS", 50)
    prose = PROSE.replace(" ", "\t")
    (here / "my.txt").write_text(f"{prose}<|endoftext|>{prose}")
    tokenizer = kind(here / "tok")
    shards = prepared(here, tokenizer)
    coder = get_tokenizer(str(tokenizer))
    tokens = [*map_tokens(shards / "train_000000.bin"), *map_tokens(shards / "val_000000.bin")]
    first = coder.encode(prose).tolist()
    assert tokens.count(coder.eot) == 1 and tokens[: len(first)] == first
    record = object_in(shards / "shards.json")
    assert record["tokenizer"] == identity(str(tokenizer)) == identity(str(shards))
    assert record["end_of_text"] == coder.end


def test_shards_of_another_tokenizer_are_refused(here):
    shards = prepared(here, byte_level(here / "tok"))
    other = sentencepiece(here / "other")
    with pytest.raises(DataError, match="made with another tokenizer, sha256:.*, not .*other; "):
        require_tokenizer(f"{shards}/*.bin", str(other))
    with pytest.raises(DataError, match=f"or take a model with data.tokenizer {shards}"):
        require_tokenizer(f"{shards}/*.bin", "gpt2")


def with_a_token_more(folder, out):
    """Write the tokenizer of a folder with an added token, as a finetuned model has it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|tool|>"])
    shutil.copytree(folder, out)
    tokenizer.save(str(out / "tokenizer.json"))
    return out


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "llama3")]


@pytest.mark.parametrize("name", ["file", *SLOW])
def test_shards_serve_a_tokenizer_with_more_tokens(here, name, monkeypatch):
    monkeypatch.setenv("LLAMA3_TOKENIZER", "")
    base = byte_level(here / "base")
    fewer = str(base) if name == "file" else name
    if name != "file":
        hf_tokenizer.write(base, get_tokenizer(name), 64)
    shards = prepared(here, fewer)
    more = str(with_a_token_more(base, here / "more"))
    require_tokenizer(f"{shards}/*.bin", more)
    with pytest.raises(DataError, match="made with another tokenizer"):
        require_tokenizer(f"{prepared(here, more, 'others')}/*.bin", fewer)


@pytest.mark.slow
def test_a_run_carries_its_tokenizer(here):
    tokenizer = byte_level(here / "tok")
    shards = prepared(here, tokenizer)
    config = config_of(shards, tokenizer, checkpoint={"every": 1, "keep": 0})
    run = gpt2_triton.train(config, here / "run")
    with gpt2_triton.load(run) as model:
        expected = model.generate("it was", 8)
    shutil.rmtree(tokenizer)
    get_tokenizer.cache_clear()
    (here / "run").rename(here / "moved")
    with gpt2_triton.load(here / "moved") as model:
        assert model.generate("it was", 8) == expected
    again = config.replace(train={"steps": 3})
    assert gpt2_triton.train(again, here / "moved", resume=True).state == "done"
    export(str(here / "moved"), here / "out", "hf", "fp32")
    assert identity(str(here / "out")) == identity(str(shards))
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(here / "out")
    ids = get_tokenizer(str(here / "out")).encode(PROSE, special=True).tolist()
    assert theirs.encode(PROSE) == ids and theirs.eos_token == "<|im_end|>"
    [*_, (_, step)] = list_steps(here / "moved" / "checkpoints")
    shutil.copytree(step, here / "step")
    assert sources.load_weights(str(here / "step")).config.data.tokenizer == str(here / "step")
    shutil.rmtree(here / "moved" / "source")
    (step / "tokenizer.json").unlink()
    get_tokenizer.cache_clear()
    for has_another in (False, True):
        if has_another:
            other = with_a_token_more(here / "out", here / "other")
            shutil.copy(other / "tokenizer.json", step)
        with pytest.raises(CheckpointError, match="its tokenizer .* is not there; restore the run"):
            gpt2_triton.load(step)


@pytest.mark.slow
def test_another_tokenizer_is_no_resume_and_no_start(here):
    shards = prepared(here, byte_level(here / "tok"))
    config = config_of(shards, here / "tok")
    gpt2_triton.train(config, here / "run")
    other = byte_level(here / "other", vocab=300)
    with pytest.raises(DataError, match="made with another tokenizer"):
        gpt2_triton.train(config.replace(data={"tokenizer": str(other)}), here / "run", resume=True)
    small = config.replace(model={"vocab_size": 256})
    with pytest.raises(ConfigError, match="has 345 tokens, got 256; set model.vocab_size to 345"):
        gpt2_triton.train(small, here / "new")


def test_a_prompt_that_the_characters_lack_is_refused_at_the_start(here):
    characters = here / "meta.pkl"
    characters.write_bytes(pickle.dumps({"itos": dict(enumerate(sorted({*PROSE})))}))
    (here / "my.txt").write_text(PROSE * 12)
    shards = prepared(here, characters)
    sections = dict(model={"vocab_size": 256}, sample={"every": 2, "prompt": "#"})
    with pytest.raises(ConfigError, match="sample.prompt: .*meta.pkl: has no .#.; leave"):
        gpt2_triton.train(config_of(shards, characters, **sections), here / "run")
    assert not (here / "run").exists()
