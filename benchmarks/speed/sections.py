"""Sections of the record that a program of their own measures, with a meta of their own."""

import os
import sys
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks import results
from gpt2_triton import device
from gpt2_triton.files import write_json


def write_section(
    out: Path, name: str, figures: dict[str, Any], commit: str, *packages: str
) -> None:
    """Write a section of the record; its meta names this machine and versions of packages."""
    meta: dict[str, Any] = dict(commit=commit or results.commit_of_code(), date=str(date.today()))
    meta |= dict(gpu=device.name() if device.present() else "", cpus=os.cpu_count())
    meta |= dict(python=sys.version.split()[0])
    meta |= {package: version(package) for package in packages}
    write_json(out, results.read(out) | {name: {"meta": meta} | figures})
