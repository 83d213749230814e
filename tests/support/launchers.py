"""The kernel package with something done at each launch, and the launchers that no
step of GPT-2 in bf16 calls.
"""

import functools
from typing import Any

import gpt2_triton.kernels as kernels
from gpt2_triton.kernels.contract import LAUNCHERS

STATISTICS = {"tensor_stats", "parameter_stats", "muon_stats"}  # model/test_tensor_stats.py
# model/test_fp8.py
FP8 = {"cast_operand", "cast_weights", "check_amax", "roll_scales", "fp8_stats"}
# model/test_llama.py
LLAMA = {"matmul_rope", "matmul_swiglu", "rmsnorm_fwd", "rmsnorm_bwd", "swiglu", "swiglu_bwd"}
MUON = {name for name in LAUNCHERS if name.startswith("muon_")}  # kernels/test_muon.py
# only launchers call column_sums, and only ZeRO-2 calls add_partials
NO_STEP = STATISTICS | FP8 | LLAMA | MUON | {"fill", "normal_init", "column_sums", "add_partials"}


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
