"""The kernels as the schedules call them.  mypy checks that gpt2_triton.kernels and its reference
in tests/support both are `Kernels`.

A launcher's code and docstring are in the file of kernels/ that stands above it.  It writes into
its outputs, which come first.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

from torch import Tensor

from gpt2_triton.operands import (
    Betas,
    Branch,
    Dropout,
    Fp8,
    Linear,
    Matrices,
    Norm,
    Operand,
    Rope,
    Span,
    Step,
    Targets,
    TokenRows,
)


class Kernels(Protocol):
    """The package of kernels, or another module with the same launchers."""

    @property
    def step_io(self) -> ModuleType:
        """The indices of step_in, step_out and step_key."""

    def scratch_elements(
        self, d: dict[str, int], dtype: str, matrices: Sequence[tuple[int, int, int]] = ()
    ) -> int: ...

    # adamw.py
    def adamw(self, span: Span, step: Step, betas: Betas) -> None: ...

    # add_partials.py
    def add_partials(self, out: Tensor, parts: Tensor) -> None: ...

    # attention.py
    def attention_fwd(self, out: Operand, lse: Tensor, qkv: Tensor) -> None: ...
    def attention_bwd(
        self,
        dqkv: Operand,
        dbias: Tensor | None,
        delta: Tensor,
        scratch: Tensor,
        dout: Tensor,
        qkv: Tensor,
        out: Operand,
        lse: Tensor,
        acc: bool,
        rope: Rope | None = None,
    ) -> None: ...

    # classifier.py
    def classifier_target(self, targets: Targets, lnf: Operand, wte: Operand) -> None: ...
    def classifier_fwd(
        self,
        p: Operand | None,
        rowsum: Tensor,
        lnf: Operand,
        wte: Operand,
        targets: Targets,
        V: int,
    ) -> None: ...
    def classifier_loss(
        self,
        losses: Tensor,
        rs: Tensor | None,
        ks: Tensor | None,
        lns: Operand | None,
        rowsum: Tensor,
        lnf: Operand,
        targets: Targets,
        step_in: Tensor,
        acc: bool,
    ) -> None: ...
    def classifier_dx(
        self, dln: Tensor, p: Operand, wte: Operand, rs: Tensor, ks: Tensor, targets: Tensor
    ) -> None: ...

    # decode.py
    def decode_embed(self, x: Tensor, seq: Tensor, wte: Operand, wpe: Tensor | None) -> None: ...
    def decode_matmul(
        self,
        out: Tensor,
        x: Operand,
        layer: Linear,
        norm: Norm | None = None,
        res: Tensor | None = None,
        act: str = "",
        cap: float = 0.0,
    ) -> None: ...
    def decode_attention(
        self,
        att: Tensor,
        cache: Tensor,
        qkv: Tensor,
        seq: Tensor,
        NH: int,
        rope: Rope | None = None,
    ) -> None: ...
    def cache_fill(self, cache: Tensor, qkv: Tensor, filled: Tensor) -> None: ...

    # dropout.py
    def dropout(self, x: Tensor, res: Tensor | None, dropout: Dropout) -> None: ...

    # embedding.py
    def embedding_fwd(self, x: Tensor, ids: Tensor, wte: Operand, wpe: Tensor | None) -> None: ...
    def embedding_bwd(
        self,
        dwte: Tensor,
        dwpe: Tensor | None,
        scratch: Tensor,
        dx: Tensor,
        lnf: Operand,
        ks: Tensor,
        tokens: TokenRows,
        acc: bool,
    ) -> None: ...

    # fp8.py
    def cast_operand(self, x8: Fp8) -> None: ...
    def cast_weights(self, a8: Fp8, b8: Fp8, c8: Fp8, d8: Fp8) -> None: ...
    def check_amax(self, squares: Tensor, amax: Tensor) -> None: ...
    def roll_scales(
        self, scale: Tensor, history: Tensor, amax: Tensor, step_out: Tensor
    ) -> None: ...

    # layernorm.py
    def layernorm_fwd(self, out: Operand, norm: Norm, x: Tensor) -> None: ...
    def layernorm_bwd(
        self,
        dx: Operand,
        norm: Norm,
        branch: Branch,
        ln: Operand | None,
        scratch: Tensor,
        dout: Tensor,
        x: Tensor,
        more: Operand | None,
        acc: bool,
    ) -> None: ...

    # llama_products.py
    def matmul_swiglu(self, out: Operand, pre: Tensor, inp: Operand, layer: Linear) -> None: ...
    def matmul_rope(self, out: Tensor, inp: Operand, layer: Linear, rope: Rope) -> None: ...

    # matmul.py
    def matmul(self, out: Tensor, inp: Operand, layer: Linear) -> None: ...
    def matmul_act(
        self, out: Operand, pre: Tensor, inp: Operand, layer: Linear, act: str
    ) -> None: ...
    def matmul_add(self, out: Tensor, res: Tensor, inp: Operand, layer: Linear) -> None: ...
    def matmul_dx(self, dinp: Tensor, dout: Operand, layer: Linear) -> None: ...
    def matmul_dx_dact(
        self,
        dpre: Operand,
        dbias: Tensor,
        act_out: Tensor | None,
        scratch: Tensor,
        dout: Operand,
        layer: Linear,
        pre: Tensor,
        acc: bool,
        act: str,
    ) -> None: ...
    def matmul_dw(
        self, dw: Tensor, scratch: Tensor, dout: Operand, inp: Operand, acc: bool
    ) -> None: ...
    def matmul_dw_pair(
        self,
        dw: Tensor,
        dw2: Tensor,
        scratch: Tensor,
        dout: Operand,
        inp: Operand,
        dout2: Operand,
        inp2: Operand,
        acc: bool,
    ) -> None: ...

    # muon.py
    def muon_momentum(self, c: Matrices, step: Step) -> None: ...
    def muon_normalise(self, out: Tensor, scratch: Tensor, x: Tensor) -> None: ...
    def muon_gram(self, gram: Tensor, x: Tensor) -> None: ...
    def muon_poly(self, poly: Tensor, gram: Tensor, b: float, c: float) -> None: ...
    def muon_apply(self, out: Tensor, x: Tensor, poly: Tensor, a: float) -> None: ...
    def muon_update(self, c: Matrices, step: Step) -> None: ...

    # outlier.py
    def skip_outliers(
        self, step_out: Tensor, window: Tensor, z: Tensor, step_in: Tensor
    ) -> None: ...

    # philox.py
    def normal_init(
        self, w: Tensor, low: Tensor | None, seed: int, first: int, std: float
    ) -> None: ...
    def fill(self, w: Tensor, value: float) -> None: ...

    # reduce.py
    def sum_squares(self, out: Tensor, scratch: Tensor, g: Tensor, acc: bool = False) -> None: ...
    def loss_sum(self, out: Tensor, losses: Tensor, step_in: Tensor) -> None: ...
    def clip_factor(self, step_out: Tensor, sumsq: Tensor, step_in: Tensor) -> None: ...

    # sampling.py
    def sample_token(
        self, seq: Tensor, logits: Tensor, V: int, temperature: float, top_k: int, top_p: float
    ) -> None: ...

    # swiglu.py
    def swiglu(self, out: Operand, pre: Tensor) -> None: ...
    def swiglu_bwd(self, dpre: Operand, dout: Tensor, pre: Tensor) -> None: ...

    # tensor_stats.py
    def tensor_stats(self, out: Tensor, x: Operand, acc: bool) -> None: ...
    def fp8_stats(self, out: Tensor, x: Fp8, acc: bool) -> None: ...
    def parameter_stats(self, out: Tensor, span: Span, step: Step, betas: Betas) -> None: ...
    def muon_stats(self, out: Tensor, c: Matrices, step: Step) -> None: ...
    def stats_parts(self) -> int: ...
