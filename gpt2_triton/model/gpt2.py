"""GPT-2 as memory plus a schedule: the arena, the named views of it, initialisation, and the calls that run each phase.

`K` is the kernel package.  It is an argument so that tests can pass tests/support/reference.py, the same launchers in
plain torch.
"""

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2_triton.config.config import Config
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.errors import ReplicaMismatchError
from gpt2_triton.model import schedule, sharding
from gpt2_triton.model.arena import carve
from gpt2_triton.model.buffers import Acts, Decoding, Recompute, State, layer_levels, named, param_entries
from gpt2_triton.model.communicator import Communicator, make_communicator
from gpt2_triton.model.cuda import STEPS, Replay, Step
from gpt2_triton.model.memory_plan import plan_memory, require_fits
from gpt2_triton.model.tensor_stats import Watch, first_non_finite
from gpt2_triton.model.view import Update, View

INIT_STD = 0.02


class GPT2:
    """A model in its arena.  Nothing is allocated on the device after the constructor."""

    def __init__(
        self,
        config: Config,
        K: Any,
        device: str,
        *,
        batch: int | None = None,
        training: bool = True,
        texts: int = 0,
        dtypes: dict[str, torch.dtype] | None = None,
        group: ProcessGroup | None = None,
    ):
        """`group` are the ranks that train it together; without one it is on its own, whatever started the process."""
        self.config, self.K = config, K
        self.B, self.T = batch or config.micro_batch, config.train.seq_len
        self.plan, self.dims = plan_memory(config, K, self.B, self.T, training, dtypes, texts)
        levels = layer_levels(config.memory.recompute if training else "block", self.dims["L"])
        self.recompute = [Recompute.at(level) for level in levels]
        require_fits(self.plan, config, K, device, texts)
        if group:
            self.arena, arenas = group.allocate_shared(self.plan.total)
        else:
            self.arena, arenas = torch.empty(self.plan.total, dtype=torch.uint8, device=device), []
        self.state: State = carve(State, self.plan.rows, self.arena, self.dims)
        self.decoding: Decoding = carve(Decoding, self.plan.rows, self.arena, self.dims)
        self.eager = device == "cpu"  # True: every launch from Python, as tests want it that look at launches
        self.rank = group.rank if group else 0
        self._own = sharding.owned_shards(self.dims, self.rank)
        self._pieces = sharding.updated_shards(self.dims, self.rank)
        self.comm = make_communicator(group, K, self.state, self.dims, arenas)
        self._replay = Replay()
        self._views: dict[tuple[int, int], View] = {}
        self.train_view = self.view(self.B, self.T)
        watch = self.state.act_stats is not None
        self.watch = Watch(K, self.state, self.train_view.a, self.dims) if watch else None
        self._watched, self._launchers = False, K
        steps = [Step(device, K.step_io, self.watch.buffers if self.watch else ()) for _ in range(STEPS)]
        self._step, self._steps = steps[-1], itertools.cycle(steps)

    def view(self, B: int, T: int) -> View:
        """The schedule's view for B sequences of T tokens, cut from the planned rows; B*T is at most the plan's."""
        if (B, T) not in self._views:
            self._views[B, T] = self._cut(B, T)
        return self._views[B, T]

    def _cut(self, B: int, T: int) -> View:
        d = self.dims | dict(B=B, T=T, R=B * T)
        acts = carve(Acts, self.plan.rows, self.arena, d | dict(Rc=min(d["Rc"], B * T)))
        R, Ns, Nh, packed = B * T, d["Ns"], d["Nh"], self.state.packed
        order_end = 4 * R + 4 * Ns
        starts = [b.start for b in sharding.buckets(d)]
        w, training = named(self.state.params, d, starts), self.state.grads is not None
        g = named(self.state.grads, d, sharding.grad_offsets(d)) if training else None
        bias = [] if g is None else [b for pair in zip(g.attprojb, g.fcprojb) for b in pair]
        o = self.config.optim
        return View(
            w=w, g=g, a=acts, s=self.state,
            ids=packed[:R].view(B, T), targets=packed[R : 2 * R], order=packed[2 * R : 4 * R],
            segments=packed[4 * R : order_end].view(Ns, 4), hot=packed[order_end : order_end + 4 * Nh].view(Nh, 4),
            gb=[None, *bias], L=d["L"], NH=d["NH"], V=d["V"], T=T, R=R, Rc=d["Rc"], recompute=self.recompute,
            betas_eps=(o.beta1, o.beta2, o.eps), comm=self.comm, grads_leave=d["zero"] == 2,
            squared=self._squared() if training else [], updates=list(self._updates()) if training else [],
        )  # fmt: skip

    def _squared(self) -> list[Tensor]:
        """This rank's share of the gradients, in as few stretches as there can be."""
        spans = sharding.coalesce((p.grad, p.length) for p in self._own)
        return [self._reduced()[start : start + n] for start, n in spans]

    def _updates(self) -> Iterator[Update]:
        s, decay = self.state, self.config.optim.weight_decay
        for p in self._pieces:
            own = slice(p.moment, p.moment + p.length)
            low = None if s.low is None else s.low[own]
            w, g = s.params[p.param : p.param + p.length], self._reduced()[p.grad : p.grad + p.length]
            yield Update(p.bucket, w, s.m[own], s.v[own], low, g, p.first, decay if p.decay else 0.0)

    def _reduced(self) -> Tensor:
        return self.state.grads if self.state.reduced is None else self.state.reduced

    def compile(self, evaluated: Iterable[tuple[int, int]] = ()) -> Any:
        """Compile the kernels of a whole run on all cores: its calls without the launches (kernels/compile.py).

        `evaluated`: shapes (B, T) of the batches that it will evaluate.  Whether B*T and T are multiples of 16 or 32 is
        compiled into kernels, and B*T decides between some.
        """
        self.train_view.comm = Communicator()
        with self.K.compiling() as compiled:
            self.initialise(self.config.train.seed)
            for watched in (False, True) if self.watch else (False,):
                for acc in (False, True):
                    self._forward_backward(acc, watched, True)
                self._update(watched)
            self.comm.precompile()
            for shape in evaluated:
                self.evaluate(*np.zeros((2, *shape), np.int32))
            if self.config.sample.every:
                s = self.config.sample
                self.prefill([0], slice(0, 1))
                self._decode(s.temperature, s.top_k, 1.0)
        self.train_view.comm = self.comm
        return compiled

    def compile_decoding(self, temperature: float, top_k: int, top_p: float) -> Any:
        """Compile the kernels of `prefill` and `decode`, likewise."""
        with self.K.compiling() as compiled:
            self.prefill([0], slice(0, 1))
            self._decode(temperature, top_k, top_p)
        return compiled

    def initialise(self, seed: int) -> None:
        """GPT-2's weights from Philox: N(0, 0.02), residual projections / sqrt(2L), norms 1, the rest and moments 0."""
        std = dict(normal=INIT_STD, residual=INIT_STD / math.sqrt(2 * self.dims["L"]))
        for flat in self.state_buffers().values():
            self.K.fill(flat, 0.0)
        for p, e in itertools.product(self._pieces, param_entries(self.dims)):
            n = (self.dims["V"] if e.name == "wte" else e.shape[0]) * math.prod(e.shape[1:])
            first, stop = max(p.first, e.offset), min(p.first + p.length, e.offset + n)
            if first >= stop:
                continue
            w = self.state.params[p.param :][first - p.first : stop - p.first]
            if e.init in std:
                low = None if self.state.low is None else self.state.low[p.moment :][first - p.first : stop - p.first]
                self.K.normal_init(w, low, seed, first, std[e.init])
            elif e.init == "one":
                self.K.fill(w, 1.0)
        self.train_view.comm.gather_params()

    # ---- a training step: begin_step, micro_step for each micro-batch, end_step ----

    def begin_step(self, hyper: np.ndarray, step: int, seed: int, watched: bool = False) -> None:
        """Give the device what changes from step to step: `optim.step_inputs`, and the key of the rounding noise.  A
        watched step takes statistics, which the Step that end_step returns then has in `watched`.
        """
        assert self.watch or not watched, "statistics have no memory: log.stats_every is 0"
        self._watched = watched
        previous, self._step = self._step, next(self._steps)
        self._step.begin(previous, hyper, [step, seed & 0x7FFFFFFF, seed >> 31, 0])
        self.state.step_in.copy_(self._step.step_in, non_blocking=True)
        io = self.K.step_io
        self.state.step_out[io.STOPPING.value].copy_(self._step.step_in[io.STOP.value], non_blocking=True)
        self.state.step_key.copy_(self._step.step_key, non_blocking=True)

    def micro_step(self, packed: Tensor, first: bool, last: bool = True) -> None:
        """Forward and backward of one micro-batch, packed by data.loader; gradients start over if `first`, else add,
        and those of the step's `last` one go to the other ranks.
        """
        self.state.packed.copy_(packed, non_blocking=True)
        alone = self.dims["ranks"] == 1  # then nothing is sent, and one graph does for the last one too
        self._run(self._forward_backward, not first, self._watched, last or alone)

    def end_step(self) -> Step:
        """Update the parameters; result() of what this returns waits for the step's loss, gradient norm and time."""
        self._run(self._update, self._watched)
        self._step.step_out.copy_(self.state.step_out, non_blocking=True)
        self._step.z.copy_(self.state.z, non_blocking=True)
        if self._watched and self.watch:
            for host, buffer in zip(self._step.watched, self.watch.buffers, strict=True):
                host.copy_(buffer, non_blocking=True)
        self._step.ended.record()
        return self._step

    def first_non_finite(self, batches: Iterable[Tensor], control: ControlGroup) -> str:
        """Compute the gradients of these packed micro-batches, watched, and say which tensor is the first with
        non-finite elements on any rank; empty if none has.  To be called between steps, by all ranks; with the weights
        as they then are.
        """
        assert self.watch, "statistics have no memory: log.stats_every is 0"
        self._watched, n = True, 0
        for n, packed in enumerate(batches, start=1):
            self.micro_step(packed, first=n == 1, last=False)
        return first_non_finite(self.watch.read([self.watch.buffers[0].cpu()], n, control))

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        if self.eager:
            function(*args)
        else:
            self._replay(function, *args)

    def _update(self, watched: bool) -> None:
        self._launchers = self.watch.over(self.K, False) if self.watch and watched else self.K
        self._phase("update")

    def _forward_backward(self, acc: bool, watched: bool, last: bool) -> None:
        self._launchers = self.watch.over(self.K, acc) if self.watch and watched else self.K
        self.train_view.comm.begin_micro_step(not acc, last)
        self._phase("embed")
        self._phase("block")
        self._phase("head", acc)
        self._phase("block_bwd", acc)
        self.train_view.comm.end_micro_step()

    def _phase(self, name: str, *acc: bool) -> None:
        getattr(schedule, name)(self._launchers, self.train_view, *acc)

    # ---- evaluation and decoding, between steps ----

    def evaluate(self, ids: np.ndarray, targets: np.ndarray) -> Tensor:
        """Losses [B*T] of every token (0 where the target is -1), on the host; ids and targets are int32 [B, T]."""
        v = self.view(*ids.shape)
        v.ids.copy_(torch.from_numpy(ids))
        v.targets.copy_(torch.from_numpy(targets.reshape(-1)))
        schedule.embed(self.K, v)
        schedule.block(self.K, v)
        schedule.head_loss(self.K, v)
        return v.a.losses.cpu()

    def prefill(self, window: Sequence[int], texts: slice) -> None:
        """Take up to T tokens into the cache of each of `texts`."""
        v = self.view(1, self.T)
        ids = np.zeros((1, self.T), np.int32)  # rows after the window: decoding overwrites each before it reads it
        ids[0, : len(window)] = window
        v.ids.copy_(torch.from_numpy(ids))
        schedule.prefill(self.K, v, self.decoding, texts)

    def decode(self, temperature: float, top_k: int, top_p: float) -> None:
        """Draw the next token of each text, into decoding.seq; it is taken into the cache by the next call."""
        self._run(self._decode, temperature, top_k, top_p)

    def _decode(self, temperature: float, top_k: int, top_p: float) -> None:
        v = self.view(len(self.decoding.seq), 1)
        schedule.decode(self.K, v, self.decoding, temperature, top_k, top_p)

    def release_graphs(self) -> None:
        """Before the process group ends: NCCL waits for graphs that hold collectives of its, and CUDA complains of
        memory that others had open when its owner ended.
        """
        self._replay.forget()
        self.comm.close()

    # ---- checkpoints ----

    def state_buffers(self) -> dict[str, Tensor]:
        """The flat device buffers that live from step to step, by name."""
        s = self.state
        rows = dict(params=s.params, m=s.m, v=s.v, low=s.low, window=s.window)
        return {name: flat for name, flat in rows.items() if flat is not None}

    def checkpoint_spec(self) -> dict[str, Tensor]:
        """Shapes and dtypes of a checkpoint's tensors, whatever the ranks; they have no memory."""
        shapes = {name: (self.dims["N"],) for name in self.state_buffers()} | {"window": self.state.window.shape}
        return {n: torch.empty(shapes[n], dtype=t.dtype, device="meta") for n, t in self.state_buffers().items()}

    def local_shards(self) -> dict[str, list[Tensor]]:
        """Return the slices of the buffers that this rank saves, in the order of `shard_spans`; one rank saves all."""
        flats = self.state_buffers()
        window = flats.pop("window")
        out = {"window": [window]} if self.rank == 0 else {}
        for name, flat in flats.items():
            spans = sharding.coalesce((_place(name, p), p.length) for p in self._own)
            out[name] = [flat[at : at + n] for at, n in spans]
        return out

    def shard_spans(self) -> dict[str, list[list[int]]]:
        """For the state of a checkpoint: [flat index, elements] of each stretch of the share; one rank needs none."""
        return {"shares": [[p.first, p.length] for p in self._own]} if self.dims["ranks"] > 1 else {}

    def state_digest(self) -> str:
        """Return the sha256 of the weights in flat order, and of the moments if every rank has all of them."""
        digest, flats = hashlib.sha256(), self.state_buffers()
        names = ["params"] if self.dims["zero"] else ["params", "m", "v", "low"]
        for flat in (flats[name] for name in names if name in flats):
            for bucket in sharding.buckets(self.dims):
                part = flat[bucket.start : bucket.start + bucket.length]
                digest.update(part.cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def require_equal_replicas(self, control: ControlGroup, step: int) -> str:
        """Return the state digest of all ranks; raise ReplicaMismatchError with the ranks that differ from rank 0."""
        found = control.all_gather(self.state_digest())
        if others := [rank for rank, digest in enumerate(found) if digest != found[0]]:
            raise ReplicaMismatchError(f"step {step}: the weights of ranks {others} are not those of rank 0")
        return found[0]

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Fill the buffers from a checkpoint's whole tensors, of which each rank takes what it holds."""
        flats, every = self.state_buffers(), sharding.updated_shards(self.dims | dict(zero=0), self.rank)
        for name, tensor in tensors.items():
            if name == "window":
                flats[name].copy_(tensor)
                continue
            for p in every if name == "params" else self._pieces:
                at = _place(name, p)
                flats[name][at : at + p.length].copy_(tensor[p.first : p.first + p.length])


def _place(name: str, p: sharding.Shard) -> int:
    return p.param if name == "params" else p.moment
