"""docs/guide/api.ipynb and the example of docs/guide/api.md run as they stand, in a fresh process."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gpt2_triton
from gpt2_triton import api

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
PAGE = (GUIDE / "api.md").read_text()
NOTEBOOK = json.loads((GUIDE / "api.ipynb").read_text())


def run(program: str, directory: Path) -> list[str]:
    """Run a program in a new process and directory, without TRITON_INTERPRET; return the lines that it prints."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "OMP_NUM_THREADS")}
    environment |= {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg", "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    words = [sys.executable, "-W", "error::UserWarning:gpt2_triton", "-c", program]
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def source(cell: dict) -> str:
    return "".join(cell["source"])


def test_notebook_has_the_form_of_nbformat_4():
    """The keys that nbformat's schema 4.5 requires, unique ids, and no outputs."""
    assert NOTEBOOK.keys() == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    for cell in NOTEBOOK["cells"]:
        common = {"cell_type", "id", "metadata", "source"}
        assert cell.keys() == common | ({"execution_count", "outputs"} if cell["cell_type"] == "code" else set())
        assert cell["cell_type"] in ("code", "markdown") and re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"])
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert all(line.endswith("\n") for line in cell["source"][:-1])
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_page_is_short_and_has_every_name():
    assert len([word for word in PAGE.split() if re.search(r"\w", word)]) <= 700
    methods = [name for kind in (api.Run, api.Model) for name in vars(kind) if not name.startswith("_")]
    missing = {*gpt2_triton.__all__, *methods} - set(re.findall(r"\w+", PAGE))
    assert missing == {"PeerLostError", "ReplicaMismatchError"}  # of several GPUs


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_notebook_runs_from_top_to_bottom(tmp_path):
    cells = [source(cell) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    printed = run("\n".join(cells) + "\nprint(run.state, steps[0]['loss'] - run.loss)", tmp_path)
    state, fall = printed[-1].split()
    assert state == "done" and float(fall) > 1.5  # from 5.5, of equally likely bytes, to about 3.3
    losses = [line for line in printed if line.endswith("nats per token")]
    assert len(losses) == 2 and losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_example_of_the_page_runs(tmp_path):
    [example] = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    printed = run(example, tmp_path)
    assert printed[0].startswith("done ") and (tmp_path / "exported" / "model.safetensors").is_file()
