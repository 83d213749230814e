"""A model in one arena: its buffers, its initial weights, and the calls of a training step.
forward.py evaluates and decodes with it.

`K` is the kernel package.  It is an argument so that tests can pass tests/support/reference.py, the
same launchers in plain torch.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt2_triton.config.config import Config
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.model import architecture, fp8, schedule
from gpt2_triton.model.arena import carve
from gpt2_triton.model.communicator import Communicator, NcclCommunicator
from gpt2_triton.model.cuda import GraphCache
from gpt2_triton.model.decoding import Decoding
from gpt2_triton.model.forward import ForwardPasses
from gpt2_triton.model.init_weights import init_weights
from gpt2_triton.model.launchers import Kernels
from gpt2_triton.model.memory_plan import (
    forward_shape,
    plan_memory,
    recompute_levels,
    require_memory,
)
from gpt2_triton.model.model_view import ModelView, Observer
from gpt2_triton.model.peer_copies import PeerCopyCommunicator
from gpt2_triton.model.recompute import Recompute
from gpt2_triton.model.state_io import SavedState
from gpt2_triton.model.step import STEPS, InFlightStep
from gpt2_triton.model.tables import Part, State
from gpt2_triton.model.tensor_stats import StatsRecorder
from gpt2_triton.model.view import make_view


class Model(ForwardPasses):
    """A model in its arena.  After the constructor nothing is allocated on the device."""

    def __init__(
        self,
        config: Config,
        K: Kernels,
        device: str,
        *,
        batch: int | None = None,
        sequences: int = 0,
        dtypes: dict[str, torch.dtype] | None = None,
        group: ProcessGroup | None = None,
    ):
        """Plan and allocate the arena.  `sequences` is how many are decoded at once.

        batch   sequences at once, for a model that only runs forward; None: the
                micro-batch of StepShape, for training
        group   the ranks that train the model together; None: a single rank,
                whatever started the process
        """
        self.config = config
        self.K = K
        self.A = architecture.of(config.model)
        training = batch is None
        if batch is None:
            self.shape = StepShape.of(config, group.size if group else None)
        else:
            self.shape = forward_shape(batch)
        self.B = self.shape.micro_batch
        self.T = config.train.seq_len
        self.plan, self.dims = plan_memory(config, K, self.shape, training, dtypes, sequences)
        self.has_fp8 = self.dims["Q"] > 0
        self.recompute = [
            Recompute.at(level, self.has_fp8) for level in recompute_levels(config, training)
        ]
        # fp8 whose scales no checkpoint and no fp8.calibrate has set yet
        self.lacks_scales = self.has_fp8
        require_memory(self.plan, config, K, self.shape, device, training)
        arenas: list[Tensor] = []  # of all ranks, if they can read each other's
        if group:
            self.arena, arenas = group.allocate_shared(self.plan.total)
        else:
            self.arena = torch.empty(self.plan.total, dtype=torch.uint8, device=device)
        self.state: State = carve(State, self.plan, self.arena, self.dims)
        self.decoding: Decoding = carve(Decoding, self.plan, self.arena, self.dims)
        self.drawn = self.dims["V"]
        # Llama's rotations
        self.A.fill(carve(self.A.Acts, self.plan, self.arena, self.dims), config.model)
        self.eager = device == "cpu"  # True: no graphs; tests that look at single launches set it
        self.group = group
        self.rank = group.rank if group else 0
        self.saved = SavedState(self.state, self.dims, self.rank)
        self.comm = Communicator()
        if group and group.size > 1:
            ours = group, K, self.state, self.dims
            self.comm = PeerCopyCommunicator(*ours, arenas) if arenas else NcclCommunicator(*ours)
        self._graphs = GraphCache()
        self._views: dict[tuple[int, int, bool], ModelView] = {}
        self.train_view = make_view(self, self.B, self.T, self.has_fp8, train=True)
        has_stats = self.state.act_stats is not None
        self.stats_recorder = (
            StatsRecorder(K, self.A, self.train_view, self.dims) if has_stats else None
        )
        stats = self.stats_recorder.buffers if self.stats_recorder else ()
        steps = [InFlightStep(device, K.step_io, stats) for _ in range(STEPS)]
        self._step = steps[-1]
        self._steps = itertools.cycle(steps)
        self.with_stats = False  # whether this step takes statistics
        self._micro = 0  # index of the micro-step
        # the first row of each micro-batch among the rows of the step
        places = np.arange(self.shape.accumulation) * self.dims["ranks"] + self.rank
        rows = places * self.dims["R"]
        self._first_rows = torch.empty(len(rows), dtype=torch.int32, pin_memory=device != "cpu")
        self._first_rows.numpy()[:] = rows

    def initialise(self, seed: int) -> None:
        """Set initial weights and zero moments."""
        init_weights(self.K, self.state, self.A.Params, self.dims, self.rank, seed)
        self.train_view.comm.gather_params()

    # ---- a training step: begin_step, micro_step for each micro-batch, end_step ----

    def begin_step(
        self, step_in: np.ndarray, step: int, seed: int, with_stats: bool = False
    ) -> None:
        """Copy a step's inputs, `step_in` fp32 [STEP_IN], and the key of its noise to the device;
        `with_stats`: end_step returns statistics.
        """
        self.with_stats = with_stats
        previous = self._step
        self._step = next(self._steps)
        self._step.begin(previous, step_in, [step, seed & 0x7FFFFFFF, seed >> 31, 0])
        self.state.step_in.copy_(self._step.step_in, non_blocking=True)
        io = self.K.step_io
        self.state.step_out[io.STOPPING.value].copy_(
            self._step.step_in[io.STOP.value], non_blocking=True
        )
        self.state.step_key.copy_(self._step.step_key, non_blocking=True)

    def micro_step(self, packed: Tensor, first: bool, last: bool = True) -> None:
        """Run a packed micro-batch, int32 [Np]: the `first` replaces the gradients, others
        add, the `last` sends them.
        """
        self._micro = 0 if first else self._micro + 1
        self.copy_batch(packed, self._micro)
        # nothing is sent: the last micro-step uses the graph of the others
        single = self.dims["ranks"] == 1
        self._run(self.launch_forward_backward, not first, self.with_stats, last or single)

    def copy_batch(self, packed: Tensor, micro: int) -> None:
        """Copy a packed micro-batch to the device; with dropout, also its
        first row's index in the step.
        """
        self.state.batch.copy_(packed, non_blocking=True)
        if self.config.model.dropout:
            self.state.step_key[self.K.step_io.ROW.value].copy_(
                self._first_rows[micro], non_blocking=True
            )

    def end_step(self) -> InFlightStep:
        """Update the parameters; result() of the returned value waits for the step's
        loss, gradient norm and time.
        """
        self._run(self.launch_update, self.with_stats)
        self._step.step_out.copy_(self.state.step_out, non_blocking=True)
        self._step.z.copy_(self.state.z, non_blocking=True)
        if self.with_stats and self.stats_recorder:
            for host, buffer in zip(self._step.stats, self.stats_recorder.buffers, strict=True):
                host.copy_(buffer, non_blocking=True)
        self._step.ended.record()
        return self._step

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        if self.eager:
            function(*args)
        else:
            self._graphs(function, *args)

    def _observe(self, with_stats: bool, acc: bool) -> None:
        recorder = self.stats_recorder if with_stats else None
        self.train_view.observe = recorder.begin(acc) if recorder else Observer()

    def launch_forward_backward(self, acc: bool, with_stats: bool, last: bool) -> None:
        """Launch a micro-step, as a graph captures it: with `acc` it adds to the
        gradients, the `last` one sends them.
        """
        K = self.K
        view = self.train_view
        self._observe(with_stats, acc)
        view.comm.begin_micro_step(not acc, last)
        self.A.schedule.embed(K, view)
        schedule.block(K, self.A.schedule, view, acc)
        schedule.head(K, view, acc)
        self.A.schedule.block_bwd(K, view, acc)
        view.comm.end_micro_step()

    def launch_update(self, with_stats: bool) -> None:
        """Launch the update of the parameters."""
        self._observe(with_stats, False)
        schedule.update(self.K, self.train_view)

    def release_graphs(self) -> None:
        """Destroy the graphs, for which NCCL waits, and close other ranks' memory,
        before the process group ends.
        """
        self._graphs.reset()
        self.comm.close()  # CUDA reports an error if a rank ends while others have its memory open

    # ---- checkpoints ----

    def load(self, parts: Iterable[Part]) -> None:
        """Fill the buffers from parts of a checkpoint's tensors, of which this
        rank needs `saved.needs`.
        """
        fp8.clear(self.state.amax)
        fp8.clear(self.state.history)
        self.saved.load(parts)
        self.lacks_scales = self.has_fp8 and not self.state.history.cpu().numpy().any()
