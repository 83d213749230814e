"""nanoGPT's and llm.c's options: what is said about them are keys of ours, and
docs/guide/interop.md says the same.
"""

import re
from inspect import signature

import pytest

from gpt2_triton.commands.sample import sample
from gpt2_triton.commands.train import train
from gpt2_triton.config.other_projects import LLMC, NANOGPT, USUAL, counterpart
from gpt2_triton.config.schema import options

KEYS = {key for key, _ in options()} | {
    f"--{flag}" for flag in (*signature(train).parameters, *signature(sample).parameters)
}


def keys_in(text):
    return {word for word in re.findall(r"-?-?[a-z_]+\.?[a-z_0-9]*", text) if word in KEYS}


@pytest.fixture(scope="module")
def rows(request):
    """The rows of the table: (llm.c's options, nanoGPT's, keys here)."""
    page = (request.config.rootpath / "docs" / "guide" / "interop.md").read_text(encoding="utf-8")
    table = page.partition("## Options of llm.c and nanoGPT")[2].partition("\n## ")[0]
    cells = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ")][1:]
    return [
        (
            set(re.findall(r"`(-[a-z]+)", llmc)),
            set(re.findall(r"`([a-z0-9_]+)", nanogpt)) & NANOGPT.keys()
            | set(re.findall(r"`([a-z0-9_]+)`", nanogpt)),
            keys_in(here),
        )
        for llmc, nanogpt, here in cells
    ]


@pytest.mark.parametrize(("column", "names"), [(0, LLMC), (1, NANOGPT)], ids=["llm.c", "nanoGPT"])
def test_the_page_has_the_same_counterparts(rows, column, names):
    assert len(rows) > 20
    listed = set().union(*(row[column] for row in rows))
    assert names.keys() <= listed
    assert listed - names.keys() <= {key.rpartition(".")[2] for key in KEYS}  # called the same here
    for name, text in names.items():
        said = set().union(*(row[2] for row in rows if name in row[column]))
        assert keys_in(text) <= said, name
        assert bool(keys_in(text)) == bool(said), name


def test_every_counterpart_is_a_key_or_says_why_there_is_none():
    commands = ("python -m gpt2_triton perplexity", "the recipe overfit", "torchrun or srun")
    for text in (*LLMC.values(), *NANOGPT.values(), *USUAL.values()):
        assert text.startswith(("none: ", *commands)) or keys_in(text), text
    assert counterpart("layers") == ""
    assert counterpart("-d") == "; for llm.c's -d use train.total_batch_tokens"
