"""What a model computes between training steps: losses, logits and text."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt2_triton.model import decoding, schedule
from gpt2_triton.model.decoding import Decoding
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.model_view import ModelView
from gpt2_triton.model.view import Planned, make_view


def padded_length(n: int, longest: int) -> int:
    """Return n rounded up to a multiple of 32, so that few kernels are compiled; at most
    `longest`.
    """
    return min(-(-n // 32) * 32, longest)


def head_loss(K: Kernels, m: schedule.View) -> None:
    """losses = cross entropy of each token; nothing is kept for a backward pass."""
    a = m.a
    schedule.final_norm(K, m)
    schedule.cast_head(K, m.fp8_weights[m.L])
    K.classifier_target(m.targets, a.lnf, m.net.head.w)
    for r in m.head_chunks:
        targets = m.targets.rows(r)
        K.classifier_fwd(None, a.scratch, a.lnf[r], m.net.head.w, targets, m.V)
        K.classifier_loss(
            a.losses[r], None, None, None, a.scratch, a.lnf[r], targets, m.s.step_in, False
        )


class ForwardPasses(Planned):
    """The forward passes of a Model."""

    K: Kernels
    T: int
    has_fp8: bool
    decoding: Decoding
    drawn: int  # tokens that `decode` draws among, the first of the vocabulary
    _views: dict[tuple[int, int, bool], ModelView]
    _run: Callable[..., None]

    def view(self, B: int, T: int, fp8: bool = False) -> ModelView:
        """Return the view for B sequences of T tokens, B*T at most the plan's, between
        steps; `fp8`: as in a step.
        """
        if (B, T, fp8) not in self._views:
            self._views[B, T, fp8] = make_view(self, B, T, fp8 and self.has_fp8)
        return self._views[B, T, fp8]

    def evaluate(self, ids: np.ndarray, targets: np.ndarray, fp8: bool = False) -> Tensor:
        """Return the losses in nats, fp32 [B*T] on the host, 0 where the target is -1; with `fp8`
        from a step's fp8 operands.  `ids` and `targets` are int32 [B, T].
        """
        B, T = ids.shape
        v = self.view(B, T, fp8)
        v.targets.ids.copy_(torch.from_numpy(targets.reshape(-1)))
        self._run_layers(v, ids)
        head_loss(self.K, v)
        return v.a.losses.cpu()

    def logits(self, ids: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Return the logits of positions start to stop, fp32 [B, stop -
        start, V], a few rows at once.
        """
        B, T = ids.shape
        v = self.view(B, T)
        self._run_layers(v, ids)
        schedule.final_norm(self.K, v)
        out = np.empty((B, stop - start, v.V), np.float32)
        most = len(self.decoding.logits)
        for b, t in itertools.product(range(B), range(start, stop, most)):
            n = min(most, stop - t)
            chunk = self.decoding.logits[:n]
            rows = slice(b * T + t, b * T + t + n)
            self.K.decode_matmul(chunk, v.a.lnf[rows], v.net.head, cap=v.targets.cap)
            out[b, t - start : t - start + n] = chunk.cpu().numpy()[:, : v.V]
        return out

    def _run_layers(self, v: ModelView, ids: np.ndarray) -> None:
        v.ids.copy_(torch.from_numpy(ids))
        self.A.schedule.embed(self.K, v)
        schedule.block(self.K, self.A.schedule, v)

    def prefill(self, window: Sequence[int], sequences: slice) -> None:
        """Write keys and values of up to T tokens into the cache of each of `sequences`."""
        T = self.T
        if self.arena.is_cpu:  # no more rows than the window needs: the interpreter is slow
            T = padded_length(len(window), T)
        v = self.view(1, T)
        # rows after the window: decoding overwrites each before reading it
        ids = np.zeros((1, T), np.int32)
        ids[0, : len(window)] = window
        v.ids.copy_(torch.from_numpy(ids))
        filled = np.zeros(len(self.decoding.filled), np.int32)
        filled[sequences] = 1
        self.decoding.filled.copy_(torch.from_numpy(filled))
        self._run(self.launch_prefill, T)

    def launch_prefill(self, T: int) -> None:
        """Launch what `prefill` does once the window is on the device."""
        decoding.prefill(self.K, self.A.schedule, self.view(1, T), self.decoding)

    def decode(self, temperature: float, top_k: int, top_p: float) -> None:
        """Sample the next token of each sequence into decoding.seq; the next call
        writes it into the cache.
        """
        self._run(self.launch_decode, temperature, top_k, top_p)

    def launch_decode(self, temperature: float, top_k: int, top_p: float) -> None:
        """Launch what `decode` does."""
        v = self.view(len(self.decoding.seq), 1)
        decoding.sample(
            self.K, self.A.schedule, v, self.decoding, self.drawn, temperature, top_k, top_p
        )
