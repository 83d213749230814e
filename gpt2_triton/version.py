"""Versions of this package and its dependencies, and the commit of its
code, for --version and run.json.

It imports no package: --version must be fast, and hatch_build.py calls
`git_state` where nothing is installed.
"""

import json
import re
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

__version__ = "0.4.0"
PACKAGE = Path(__file__).parent
NEWEST_TRITON = "3.9"  # of those that the tests pass with; pyproject.toml has the oldest
COMMIT = "commit.json"  # in a wheel, hatch_build.py writes it: git_state of the checkout
# package: the names of its distributions; torch for AMD's GPUs brings Triton under another name
BELOW = {
    "torch": ("torch",),
    "triton": ("triton", "triton-rocm", "pytorch-triton-rocm"),
    "numpy": ("numpy",),
    "safetensors": ("safetensors",),
    "tiktoken": ("tiktoken",),
}


def package_versions() -> dict[str, str | None]:
    """Return the versions of Python, this package and the packages in BELOW;
    None for a missing package.
    """
    return {"python": sys.version.split()[0], "gpt2_triton": __version__} | {
        name: installed(name) for name in BELOW
    }


def installed(package: str) -> str | None:
    """Return the version of a package in BELOW, None if it is missing."""
    for name in BELOW[package]:
        with suppress(PackageNotFoundError):
            return installed_version(name)
    return None


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def triton_notice() -> str | None:
    """Return a line for the console about a Triton that is newer than the tests'."""
    found = installed("triton")
    if found is None or release(found) <= release(NEWEST_TRITON):
        return None
    todo = "if a kernel fails, install an older torch, which brings its own"
    return f"triton {found}: newer than {NEWEST_TRITON}, the newest that is tested; {todo}"


def code_state() -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of this code's checkout, or of the
    checkout that built its wheel.
    """
    try:
        return git_state(PACKAGE) or json.loads((PACKAGE / COMMIT).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def git_state(directory: Path) -> dict[str, Any] | None:
    """Return {"commit", "dirty"} of the checkout that tracks `directory`; None if there
    is none, as when installed.
    """

    try:
        # fails in a venv inside another checkout
        _git(directory, "ls-files", "--error-unmatch", "__init__.py")
        commit = _git(directory, "rev-parse", "HEAD")
        changes = _git(directory, "status", "--porcelain", "-uno")
        return {"commit": commit, "dirty": bool(changes)}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(directory: Path, *words: str) -> str:
    command = ["git", "-C", str(directory), *words]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=10
    ).stdout.strip()


def version_text() -> str:
    """Return what --version prints, a line for each package."""
    versions = package_versions()
    state = code_state()
    lines = [f"gpt2_triton {versions['gpt2_triton']}"]
    if state:
        lines.append(
            f"commit {state['commit']}" + (" with uncommitted changes" if state["dirty"] else "")
        )
    return "\n".join(
        [
            *lines,
            *(f"{name} {versions[name] or 'missing'}" for name in ("torch", "triton", "python")),
        ]
    )
