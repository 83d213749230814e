"""Any tokenizer.json has the tokens that transformers gives, and knows itself on every machine."""

import json

import numpy as np
import pytest

from gpt2_triton.data import hellaswag, tokenizer
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.data.tokenizer_file import FileTokenizer
from gpt2_triton.errors import DataError
from gpt2_triton.inference.sample import stream_text
from tests.support.tokenizer_files import HARD, PROSE, byte_level, sentencepiece

KINDS = {"bytes": byte_level, "sentencepiece": sentencepiece}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("tokenizer") / request.param)


def test_tokens_and_texts_are_those_of_transformers(folder):
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    ours = FileTokenizer(str(folder))
    for text in [*HARD, PROSE]:
        special = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=True).tolist() == special
        ordinary = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours.encode(text).tolist() == ordinary
        assert ours.decode(special) == theirs.decode(special)


@pytest.mark.parametrize("text", [*HARD, PROSE])
def test_a_stream_has_the_text_of_the_whole(folder, text):
    ours = FileTokenizer(str(folder))
    before = ours.encode("it was")
    ids = tokenizer.encode_rest(ours, f" {text}").tolist()
    streamed = "".join(stream_text(ours, ids, before.tolist()))
    assert "it was" + streamed == ours.decode([*before, *ids])


def test_special_tokens_are_the_files(tmp_path):
    ours = FileTokenizer(str(byte_level(tmp_path)))
    assert ours.special == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert (ours.eot, ours.delimiter, ours.begin, ours.vocab_size) == (2, 2, None, 345)
    assert ours.encode("<|im_start|>a", special=True)[0] == 1
    assert min(ours.encode("<|im_start|>a")) > 2
    ids = tokenizer.encode_documents(ours, "a<|endoftext|>b")
    assert ids.dtype == np.uint16 and ids.tolist().count(2) == 1 and 0 not in ids


def test_documents_and_prompts_begin_as_the_file_says(tmp_path):
    ours = FileTokenizer(str(sentencepiece(tmp_path)))
    it, was = ours.encode("it").tolist(), ours.encode("it was").tolist()
    assert (ours.begin, ours.eot) == (1, 2)
    assert tokenizer.encode_prompt(ours, "").tolist() == [1]
    assert tokenizer.encode_prompt(ours, "it").tolist() == [1, *it]
    assert tokenizer.encode_prompt(ours, "<s>it").tolist().count(1) == 1
    assert tokenizer.with_delimiter(ours, np.array(it, np.uint16)).tolist() == [2, 1, *it]
    assert tokenizer.with_delimiter(ours, np.array([1, *it], np.uint16)).tolist() == [2, 1, *it]
    assert [*it, *tokenizer.encode_rest(ours, " was")] == was  # no second space


def test_the_end_of_a_text_is_named_and_never_guessed(tmp_path):
    plain = byte_level(tmp_path / "plain", config=False)
    assert FileTokenizer(str(plain)).end == "<|endoftext|>"
    assert FileTokenizer(f"{plain}#<|im_end|>").eot == 2
    assert FileTokenizer(f"{plain}/tokenizer.json#<|im_end|>").eot == 2
    with pytest.raises(DataError, match="tokenizer.json: no token </x>, .*; write .*#TOKEN"):
        FileTokenizer(f"{plain}#</x>")
    other = sentencepiece(tmp_path / "other")
    (other / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match="no token <.endoftext.>, .*; write .*json#TOKEN"):
        FileTokenizer(str(other))
    (other / "special_tokens_map.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert FileTokenizer(str(other)).eot == 2


def test_an_identity_is_of_the_tokens_not_of_the_file(tmp_path):
    folder = byte_level(tmp_path)
    before = FileTokenizer(str(folder)).identity
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
    content["truncation"] = {
        "max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=3, sort_keys=True))
    again = FileTokenizer(str(folder))
    assert again.identity == before and len(again.encode(PROSE)) > 4
    content["model"]["merges"].pop()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert FileTokenizer(str(folder)).identity != before


def test_bytes_of_tokens_are_those_of_the_text(folder):
    ours = FileTokenizer(str(folder))
    bytes_of = ours.token_bytes()
    for text in HARD:
        found = b"".join(bytes_of[i] for i in ours.encode(text))
        assert found.decode().strip(" ") == text.strip(" ")


def test_hellaswags_endings_continue_their_context(folder):
    row = hellaswag.Example(
        activity_label="Age",
        ctx_a="it",
        ctx_b="was",
        ctx="it was",
        endings=["the age"] * 4,
        label=0,
    )
    ours = FileTokenizer(str(folder))
    asked = hellaswag.completion([row], ours)
    whole = tokenizer.encode_prompt(ours, "it was the age").tolist()
    assert [*asked.contexts[0], *asked.endings[0]] == whole


def test_half_a_character_is_replaced(folder):
    ours = FileTokenizer(str(folder))
    assert ours.decode(ours.encode("a\ud800b")) == "a?b"


def test_a_copy_is_found_where_the_file_is_not(tmp_path):
    folder = byte_level(tmp_path / "here", config=False)
    (tmp_path / "run" / "source").mkdir(parents=True)
    tokenizer.keep(f"{folder}#<|im_end|>", tmp_path / "run" / "source")
    assert tokenizer.located(str(folder), tmp_path / "run") == str(folder)
    found = tokenizer.located("/elsewhere/tok", tmp_path / "run")
    assert found == str(tmp_path / "run" / "source")
    assert (get_tokenizer(found).eot, tokenizer.identity(found)) == (
        2,
        tokenizer.identity(str(folder)),
    )
    assert tokenizer.located("gpt2", tmp_path / "run") == "gpt2"
    assert tokenizer.label(str(folder)) == f"here-{tokenizer.identity(found)[7:15]}"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot read: No such file or directory; give gpt2, llama3, bytes, or a tokeni"),
        ("{", "tokenizer.json: not JSON: .*; give gpt2, llama3, bytes, or a tokenizer.json"),
        ("[]", "no tokenizer.json of Hugging Face: it has no model; give another file"),
        ('{"model": {"type": "New"}}', "library tokenizers refuses it: .*; update the package"),
    ],
)
def test_a_bad_file_is_one_line(tmp_path, content, told):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=told) as error:
        FileTokenizer(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "tokenizer.model"])
def test_a_tokenizer_model_alone_is_told_what_makes_the_file(tmp_path, name):
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x80")
    made = "transformers makes a tokenizer.json of tokenizer.model: AutoTokenizer.from_pretrained"
    with pytest.raises(DataError, match=made):
        FileTokenizer(str(tmp_path / name))
