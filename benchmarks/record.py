"""The record of figures, docs/results/current.json: its sections, and how a program fills one."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cyclopts import Parameter

from gpt2_triton.errors import ConfigError
from gpt2_triton.files import write_json

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "results" / "current.json"
MEASURED = ("gpt2_triton", "benchmarks/speed")  # a section names the last commit of this code

Record = dict[str, dict[str, Any]]


def read(path: Path = RECORD) -> Record:
    return dict(json.loads(path.read_text())) if path.exists() else {}


def slug(name: str) -> str:
    """Return a name as a part of a key."""
    return re.sub(r"\W+", "_", name).strip("_")


def commit_of_code() -> str:
    """Return the last commit that changed the measured code; a commit that changes
    pages only does not count.
    """

    def git(*words: str) -> str:
        command = ["git", *words, "--", *MEASURED]
        run = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        return run.stdout.strip()

    try:
        changed = git("status", "--porcelain", "-uno")
        commit = git("log", "-1", "--format=%h")
    except (OSError, subprocess.CalledProcessError):
        raise ConfigError(
            "--commit: git finds no checkout here; name the commit of the code"
        ) from None
    if changed or not commit:
        raise ConfigError(
            f"{' or '.join(MEASURED)}: uncommitted changes; commit them, "
            "the record names the commit"
        )
    return commit


@Parameter(name="*")
@dataclass(frozen=True)
class Target:
    """Where a program writes its section of the record.

    Args:
        out: The record.
        commit: Commit of the code; give it where there is no git checkout.
    """

    out: Path = RECORD
    commit: str = ""

    def write(self, name: str, figures: dict[str, Any], *packages: str) -> None:
        """Write a section; its meta names this machine and versions of packages."""
        from gpt2_triton import device  # imports torch, which `select_device` precedes

        meta: dict[str, Any] = dict(commit=self.commit or commit_of_code(), date=str(date.today()))
        meta |= dict(gpu=device.name() if device.present() else "", cpus=os.cpu_count())
        meta |= dict(python=sys.version.split()[0])
        meta |= {package: version(package) for package in packages}
        write_json(self.out, read(self.out) | {name: {"meta": meta} | figures})


CURRENT = Target()
