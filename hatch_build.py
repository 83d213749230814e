"""Hook of hatchling: what only a built package needs.

A built package has the commit of the code; a wheel has recipes and figures too.  An editable
install needs neither: it runs in the checkout, which has git, configs/ and docs/results/.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))
from gpt2_triton import version as code  # noqa: E402


class BuiltPackageHook(BuildHookInterface):
    """Adds gpt2_triton/commit.json, gpt2_triton/configs/ and gpt2_triton/results.json."""

    _file: str | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        package = Path(self.root) / "gpt2_triton"
        if self.target_name == "wheel":
            build_data["force_include"][str(Path(self.root) / "configs")] = "gpt2_triton/configs"
            record = Path(self.root) / "docs" / "results" / "current.json"
            build_data["force_include"][str(record)] = "gpt2_triton/results.json"
        if state := code.git_state(package):  # none in an unpacked sdist, which holds the file
            handle, self._file = tempfile.mkstemp()
            os.write(handle, json.dumps(state).encode())
            os.close(handle)
            build_data["force_include"][self._file] = f"gpt2_triton/{code.COMMIT}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if self._file:
            os.unlink(self._file)
