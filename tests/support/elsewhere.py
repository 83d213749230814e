"""A process in which Triton compiles, whether or not it interprets in this one.
Imports nothing of Triton.
"""

import os
import subprocess
import sys
from pathlib import Path


def compiled_elsewhere(*words: str) -> str:
    """Return what `python` with these words prints in a process where Triton
    compiles; here it may interpret.
    """
    ours = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION")
    environment = {key: value for key, value in os.environ.items() if key not in ours}
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    # Triton 3.9 warns where its default decides
    assert "TRITON_DEFAULT_FP_FUSION" not in run.stderr
    return run.stdout
