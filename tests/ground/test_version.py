"""--version and the code's commit in run.json: of a checkout, of a wheel, of neither."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_triton import __version__, version
from gpt2_triton.version import git_state


def git(directory, *words):
    subprocess.run(
        ["git", "-C", directory, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True
    )


def test_git_state_is_the_commit_and_whether_tracked_files_differ(tmp_path):
    assert git_state(tmp_path) is None
    git(tmp_path, "init", "-q")
    (tmp_path / "__init__.py").write_text("")
    # not tracked, as an installed package inside another checkout
    assert git_state(tmp_path) is None
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one")
    head = subprocess.run(
        ["git", "-C", tmp_path, "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    (tmp_path / "notes.txt").write_text("untracked files do not count")
    assert git_state(tmp_path) == {"commit": head, "dirty": False}
    (tmp_path / "__init__.py").write_text("1")
    assert git_state(tmp_path) == {"commit": head, "dirty": True}


@pytest.mark.parametrize("dirty", [False, True])
def test_installed_package_has_the_commit_of_its_wheel(tmp_path, monkeypatch, dirty):
    monkeypatch.setattr(version, "PACKAGE", tmp_path)
    assert version.code_state() is None
    state = {"commit": "1a2b", "dirty": dirty}
    (tmp_path / version.COMMIT).write_text(json.dumps(state))
    assert version.code_state() == state
    assert (
        version.version_text().splitlines()[1]
        == "commit 1a2b" + " with uncommitted changes" * dirty
    )


def test_version_text_without_a_commit_and_without_triton(tmp_path, monkeypatch):
    monkeypatch.setattr(version, "PACKAGE", tmp_path)
    found = {"gpt2_triton": __version__, "torch": "3", "triton": None, "python": "3"}
    monkeypatch.setattr(version, "package_versions", lambda: found)
    assert version.version_text() == f"gpt2_triton {__version__}\ntorch 3\ntriton missing\npython 3"


def test_triton_of_torch_for_amd_has_another_name(monkeypatch):
    def find(name):
        if name != "triton-rocm":
            raise version.PackageNotFoundError(name)
        return "3.6.0"

    monkeypatch.setattr(version, "installed_version", find)
    assert version.installed("triton") == "3.6.0" and version.installed("torch") is None


def test_version_imports_no_other_package():
    program = (
        "import sys; before = {*sys.modules}; import gpt2_triton.version as v; v.version_text();"
        "print({name.partition('.')[0] for name in {*sys.modules} - "
        "before} - {*sys.stdlib_module_names})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "{'gpt2_triton'}\n"


def test_hardware_page_names_the_oldest_and_the_newest_tested_versions():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "guide" / "hardware.md").read_text(encoding="utf-8")
    project = (root / "pyproject.toml").read_text(encoding="utf-8")
    oldest = dict(re.findall(r'"(torch|triton)>=([\d.]+)', project))
    assert f"torch {oldest['torch']} to " in page
    assert f"Triton {oldest['triton']} to {version.NEWEST_TRITON}" in page


def test_changelog_begins_with_this_version():
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", text, re.M)[0] == __version__
