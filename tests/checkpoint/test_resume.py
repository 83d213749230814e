"""A resumed run: which tensors, keys and data must be those of its checkpoint."""

from pathlib import Path

import pytest
import torch

from gpt2_triton.checkpoint import resume
from gpt2_triton.checkpoint.load import Checkpoint
from gpt2_triton.checkpoint.sources import initial_weights
from gpt2_triton.checkpoint.stored import whole_tensors
from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import options
from gpt2_triton.errors import CheckpointError, ConfigError
from tests.support.changes import CHANGES
from tests.support.foreign import checkpoint_of, config_of


def test_check_tensors_raises_a_table_of_the_differences():
    expected = {
        "params": torch.empty(4),
        "m": torch.empty(4),
        "low": torch.empty(4, dtype=torch.int16),
    }
    resume.check_tensors(Checkpoint(Path("step"), {}, whole_tensors("", expected)), expected)
    saved = {
        "params": torch.empty(4, dtype=torch.bfloat16),
        "m": torch.empty(4),
        "v": torch.empty(2, 2),
    }
    with pytest.raises(CheckpointError) as error:
        resume.check_tensors(Checkpoint(Path("step"), {}, whole_tensors("", saved)), expected)
    assert str(error.value).splitlines() == [
        "step does not fit this model",
        "        checkpoint      now",
        "low     absent          int16 (4,)",
        "params  bfloat16 (4,)   float32 (4,)",
        "v       float32 (2, 2)  absent",
    ]


FATAL = [f"{section}.{name}" for section, values in CHANGES.items() for name in values]
UNKNOWN = ["model.rope", "train.steps_more", "data.train_more", "shards", "logs.every"]


@pytest.mark.parametrize("key", [key for key, field in options() if not field.exclude] + UNKNOWN)
def test_config_differences_are_fatal_or_free_for_every_key(key):
    section, _, name = key.rpartition(".")
    saved, current = (
        {section: {name: value}} if section else {name: value} for value in ("a", "b")
    )
    change, none = {key: ("a", "b")}, {}
    expected = (change, none) if key in FATAL + UNKNOWN else (none, change)
    assert resume.config_differences(saved, current) == expected
    assert resume.config_differences(saved, saved) == (none, none)


def test_keys_of_later_versions_have_the_value_of_earlier_runs():
    assert resume.config_differences({"optim": {}}, {"optim": {"name": "adamw", "v": "fp32"}}) == (
        {},
        {},
    )
    fatal, _ = resume.config_differences({"optim": {}}, {"optim": {"name": "muon"}})
    assert fatal == {"optim.name": ("adamw", "muon")}


def test_runs_with_removed_keys_can_be_read_and_resumed():
    (saved := Config().to_dict())["data"]["align"] = "none"
    assert Config.model_validate(saved) == Config()
    saved["eval"]["tasks"] = "piqa"  # no weight depends on it
    assert resume.config_differences(saved, Config().to_dict()) == ({}, {})
    saved["data"]["align"] = "document"  # other rows
    with pytest.raises(ConfigError, match="data.align: unknown key"):
        Config.load(saved)
    assert resume.config_differences(saved, Config().to_dict())[0] == {
        "data.align": ("document", "none")
    }


@pytest.mark.parametrize("key", FATAL)
def test_refusal_of_a_key_names_init_from_where_that_takes_the_weights(tmp_path, key):
    config, (section, name) = config_of(), key.split(".")
    step = checkpoint_of(tmp_path, config)
    other = config.replace(**{section: {name: CHANGES[section][name]}})
    with pytest.raises(CheckpointError) as error:
        resume.check_config(config.to_dict(), other.to_dict())
    hint = "there with init_from checkpoint:RUN to begin with this run's weights" in str(
        error.value
    )
    try:
        initial_weights(other.model_copy(update={"init_from": f"checkpoint:{step}"}))
    except CheckpointError as refused:
        assert not hint and f"{key} " in str(refused) and "make them equal" in str(refused)
    else:
        assert hint


def test_check_config_returns_free_changes_and_raises_a_table_of_fatal_ones():
    saved = {
        "model": {"n_layer": 12, "n_head": 12},
        "optim": {"lr": 6e-4, "master": "none"},
        "train": {"steps": 100},
    }
    current = {
        "model": {"n_layer": 12, "n_head": 12},
        "optim": {"lr": 3e-4, "master": "none"},
        "train": {"steps": 200},
    }
    assert resume.check_config(saved, current) == {
        "optim.lr": (6e-4, 3e-4),
        "train.steps": (100, 200),
    }
    current["model"]["n_layer"], current["optim"]["master"] = None, "fp32"
    with pytest.raises(CheckpointError) as error:
        resume.check_config(saved, current)
    assert str(error.value).splitlines()[1:] == [
        "               checkpoint  now",
        "model.n_layer  12          null",
        "optim.master   none        fp32",
    ]


def test_values_are_printed_as_in_yaml():
    values = {
        "null": None,
        "true": True,
        "false": False,
        '""': "",
        "none": "none",
        "0": 0,
        "0.001": 1e-3,
    }
    assert [*map(resume.as_text, values.values())] == [*values]


def row(name, digest):
    return {"name": name, "bytes": 1024, "blocks": digest}


def test_check_data_raises_a_table_of_the_files_that_differ():
    then = [row("a.bin", "11"), row("b.bin", "22")]
    assert (
        resume.check_data(Path("step"), then, [dict(r) for r in then], "data.train *.bin", False)
        == {}
    )
    now = [row("a.bin", "11"), row("b.bin", "44"), row("c.bin", "55")]
    with pytest.raises(CheckpointError) as error:
        resume.check_data(Path("step"), then, now, "data.train *.bin", False)
    assert str(error.value).splitlines() == [
        "step: data.train *.bin is other data than before; "
        "restore it, start another run, or accept it with "
        "data.allow_changed true",
        "       checkpoint       now",
        "b.bin  1,024 bytes, 22  1,024 bytes, 44",
        "c.bin  absent           1,024 bytes, 55",
    ]
    changed = {"b.bin": ("1,024 bytes, 22", "1,024 bytes, 44"), "c.bin": (None, "1,024 bytes, 55")}
    assert resume.check_data(Path("step"), then, now, "data.train *.bin", True) == changed


def test_check_data_shows_another_order_and_some_of_many_files():
    then = [row("a.bin", "11"), row("b.bin", "22")]
    with pytest.raises(CheckpointError, match="order of the files  another     this"):
        resume.check_data(Path("step"), then, then[::-1], "data.train *.bin", False)
    many = [row(f"{i:02d}.bin", "11") for i in range(30)]
    with pytest.raises(CheckpointError) as error:
        resume.check_data(Path("step"), many, [], "data.train *.bin", False)
    lines = str(error.value).splitlines()
    assert len(lines) == 13 and lines[-1] == "and 20 more files"
