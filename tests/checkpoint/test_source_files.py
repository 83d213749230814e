"""Tokenizer, chat template and ids beside a source's weights: runs keep these
files, exports have them again.
"""

import json
import shutil

import pytest

from gpt2_triton.checkpoint import source_files
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.sources import load_weights
from gpt2_triton.data.tokenizer import identity
from tests.support.foreign import checkpoint_of, config_of
from tests.support.json_files import edit_json, read_json
from tests.support.loop import train
from tests.support.tokenizer_files import byte_level

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
PAD = {"pad_token": "A", "eos_token": "B"}
ENDS = [0, 66, 67]
IDS = {"bos_token_id": 0, "eos_token_id": ENDS, "pad_token_id": 65}


@pytest.fixture
def theirs(tmp_path):
    """A model of transformers with a tokenizer, a chat template, padding and three ends of text."""
    config = config_of(vocab_size=256)
    step = checkpoint_of(tmp_path / "before", config)
    export(str(step), tmp_path / "theirs", "hf", "fp32")
    (tmp_path / "theirs" / "chat_template.jinja").write_text(TEMPLATE)
    edit_json(tmp_path / "theirs" / "tokenizer_config.json", **PAD)
    edit_json(tmp_path / "theirs" / "config.json", **IDS)
    edit_json(tmp_path / "theirs" / "generation_config.json", eos_token_id=ENDS, top_p=0.9)
    return tmp_path / "theirs"


def files_of(directory):
    """Return the content of the files that are not weights; of config.json the ids."""
    content = {
        path.name: path.read_text()
        for path in directory.iterdir()
        if path.name != "model.safetensors"
    }
    config = json.loads(content.pop("config.json"))
    return content | {key: config[key] for key in IDS}


def test_an_export_has_the_files_and_ids_of_its_source(theirs, tmp_path):
    export(f"hf:{theirs}", tmp_path / "out", "hf", "bf16")
    assert files_of(tmp_path / "out") == files_of(theirs) and len(files_of(theirs)) >= 8


def test_an_export_has_its_sources_ids_beside_a_tokenizer_of_its_own(tmp_path):
    config = config_of(vocab_size=345)
    step = checkpoint_of(tmp_path / "before", config)
    export(str(step), tmp_path / "theirs", "hf", "fp32")
    byte_level(tmp_path / "theirs")
    edit_json(tmp_path / "theirs" / "config.json", **IDS)
    export(f"hf:{tmp_path / 'theirs'}", tmp_path / "out", "hf", "fp32")
    found = read_json(tmp_path / "out" / "config.json")
    assert {key: found[key] for key in IDS} == IDS


def test_a_run_keeps_the_files_for_its_exports_and_for_runs_that_start_from_it(theirs, tmp_path):
    expected = files_of(theirs)
    config = config_of(vocab_size=256, init_from=f"hf:{theirs}", train=dict(steps=1))
    assert train(config, tmp_path / "run") == 0
    shutil.rmtree(theirs)
    again = config.model_copy(update={"init_from": f"checkpoint:{tmp_path}/run"})
    assert train(again, tmp_path / "again") == 0
    assert train(again.replace(train=dict(steps=2)), tmp_path / "again", resume=True) == 0
    for run in ("run", "again"):
        export(str(tmp_path / run), tmp_path / f"{run}_out", "hf", "fp32")
        assert files_of(tmp_path / f"{run}_out") == expected
        assert source_files.ends(load_weights(str(tmp_path / run)).beside) == {*ENDS}


def test_a_new_run_has_no_files_of_an_earlier_start(theirs, tmp_path):
    source_files.keep(theirs, tmp_path / "run", "gpt2")
    assert (tmp_path / "run" / "source" / "config.json").exists()
    source_files.keep(None, tmp_path / "run", "gpt2")
    assert not (tmp_path / "run" / "source").exists()


def test_a_run_begins_from_a_run_that_has_a_tokenizer_alone(tmp_path):
    """A run from scratch keeps its tokenizer.json, and has no config.json to pass on."""
    tokenizer = byte_level(tmp_path / "tok")
    source_files.keep(None, tmp_path / "first", str(tokenizer))
    first = tmp_path / "first" / "source"
    source_files.keep(first, tmp_path / "second", str(first))
    assert identity(str(tmp_path / "second" / "source")) == identity(str(tokenizer))


def test_settings_of_a_tokenizer_go_only_with_its_vocabulary(theirs, tmp_path):
    """A tokenizer's settings without its vocabulary fit no other: padding
    may lie outside the rows.
    """
    for name in ("tokenizer.json", "vocab.json"):
        (theirs / name).unlink()
    export(f"hf:{theirs}", tmp_path / "out", "hf", "fp32")
    assert "pad_token" not in read_json(tmp_path / "out" / "tokenizer_config.json")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == TEMPLATE


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (dict(eos_token_id=[1, 2]), dict(eos_token_id=3), {1, 2}), (dict(eos_token_id=0), {}, {0}),
        (dict(eos_token_id=None), dict(eos_token_id=[3]), {3}), ({}, {}, set()),
        (None, None, set()),
    ],
)  # fmt: skip
def test_generation_config_goes_before_config(tmp_path, generation, config, ends):
    for name, content in ((source_files.GENERATION, generation), (source_files.CONFIG, config)):
        if content is not None:
            edit_json(tmp_path / name, **content)
    assert source_files.ends(tmp_path) == ends and source_files.ends(None) == set()
