"""The kernel package with something done at each launch."""

import functools
from typing import Any

import gpt2_triton.kernels as kernels
from gpt2_triton.kernels.contract import LAUNCHERS


class WrappedKernels:
    """gpt2_triton.kernels, with `_launch(name, *arguments)` of a subclass in
    the place of each launcher.
    """

    def __getattr__(self, name: str) -> Any:
        if name not in LAUNCHERS:
            return getattr(kernels, name)
        launch: Any = functools.partial(self._launch, name)
        launch.outputs = LAUNCHERS[name].outputs  # as statistics read them
        return launch

    def _launch(self, name: str, *args: Any, **keywords: Any) -> None:
        raise NotImplementedError
