"""Runs of training, in processes of their own: keys of a configuration, and what starts one."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from benchmarks.record import ROOT
from gpt2_triton.errors import ConfigError

Keys = Annotated[str, Parameter(allow_leading_hyphen=True)]
# bytes are valid ids of any vocabulary
BUILTIN: dict[str, object] = {
    "data.train": "builtin",
    "data.val": "builtin",
    "data.tokenizer": "bytes",
}
QUIET: dict[str, object] = {  # a checkpoint and a validation at the end alone
    "eval.every": 0, "eval.hellaswag_every": 0, "sample.every": 0,
    "checkpoint.every": 0, "checkpoint.major": 0,
}  # fmt: skip
LAST_LINES = 20  # of what a failed run prints


def words_of(keys: Mapping[str, object]) -> list[str]:
    """Return the words of a command line that give keys their values."""
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def finish(*words: object, folder: Path | None = None, tree: Path = ROOT) -> None:
    """Run Python with these words in a folder, on the modules of a checkout; ConfigError with its
    last lines if it fails.  An exception of a signal asks it to end, and waits for it.
    """
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    with subprocess.Popen(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:  # of a signal
            process.terminate()
            process.communicate()
            raise
    if process.returncode:
        last = "\n".join(output.splitlines()[-LAST_LINES:])
        raise ConfigError(f"{' '.join(map(str, words))}: exit code {process.returncode}\n{last}")
