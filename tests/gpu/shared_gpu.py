"""Compares a training step with the same step under other conditions,
launch by launch and bit by bit:

    python -m tests.gpu.shared_gpu [bf16|fp8 ...]

alone        again, alone on the GPU
dirty        with NaN, before the step, in every buffer whose contents do not outlive a step
shared       while another process multiplies with PyTorch on the same GPU, PASSES times

The model has two layers of GPT-2 1558M's shape and micro-batch, whose kernels take 0.1 to 4 ms.
Each condition is tried in two ways: launch by launch, each followed by sums of its outputs' bytes,
which names the first launch that differs and counts those after it; and as the graphs of a run, of
which the gradients and the step's results are compared.  A product of PyTorch's on constant
operands, as long as the head's, shows whether kernels that are not ours are disturbed too.  The
exit code is 1 if anything of ours differs.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import gpt2_triton.kernels as kernels
from gpt2_triton.kernels import contract
from gpt2_triton.model import state_io
from gpt2_triton.model.model import Model
from gpt2_triton.training.lr_schedule import step_inputs
from tests.support.launchers import WrappedKernels
from tests.support.models import calibrate, packed
from tests.support.tiny import tiny_config

PASSES = 30
# beside the checkpoint's
KEPT = ("window", "scale", "history", "amax", "step_out", "step_in", "step_key", "batch")

Sums = list[tuple[str, list[int]]]  # of each launch: its launcher, and a sum of each output's bytes


class Checksums(WrappedKernels):
    """The kernels, each launch followed by sums of its outputs on the
    device while `sums` is true.
    """

    def __init__(self) -> None:
        self.sums, self.launches = True, list[tuple[str, list[Tensor]]]()

    def _launch(self, name: str, *args: Any, **keywords: Any) -> None:
        getattr(kernels, name)(*args, **keywords)
        if self.sums:
            written = contract.LAUNCHERS[name].contract.outputs(args)
            results = [t for output, t in written.items() if output not in contract.WORKSPACE]
            self.launches.append(
                (name, [sum_of_bytes(t) for result in results for t in tensors_of(name, result)])
            )

    def take(self) -> Sums:
        """Return the sums since the last call."""
        found, self.launches = self.launches, []
        return [(name, [int(t) for t in sums]) for name, sums in found]


def tensors_of(launcher: str, output: Any) -> list[Tensor]:
    """Return the tensors that a launch writes: of an fp8 operand its forms,
    without what is not written.
    """
    if not isinstance(output, kernels.Fp8):
        return [output]
    # attention_bwd: att.T
    columns = output.columns if output.transposed and launcher != "attention_fwd" else None
    return [t for t in (output.rows, columns, output.value, output.amax) if t is not None]


def sum_of_bytes(t: Tensor) -> Tensor:
    """Return an int64 that nearly every change of the tensor's bytes changes; sums
    of integers have no order.
    """
    flat = t.reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 4 * 4].view(torch.int32)
    place = torch.arange(len(words), device=t.device) % 1021 + 1  # moved words count too
    return (words * place).sum() + flat[len(words) * 4 :].sum()


def one_pass(model: Model, arena: Tensor) -> Sums:
    """Run a step launch by launch from the arena's contents `arena`; return
    the sums of its launches.
    """
    model.arena.copy_(arena)
    model.K.sums = model.eager = True
    run_step(model)
    return model.K.take()


def one_replay(model: Model, arena: Tensor) -> Sums:
    """Run a step as graphs, on a CPU without; return the sums of its gradients and results."""
    model.arena.copy_(arena)
    model.K.sums, model.eager = False, model.arena.device.type == "cpu"
    run_step(model)
    return [("a graph", [int(sum_of_bytes(t)) for t in (model.state.grads, model.state.step_out)])]


def run_step(model: Model) -> None:
    """Run a step of one micro-batch on the batch and the inputs that the arena holds."""
    model._run(model.launch_forward_backward, False, False, True)
    model._run(model.launch_update, False)


def dirty(model: Model, pristine: Tensor) -> Tensor:
    """Return `pristine` with bytes of 0xFF, which are NaN, in all buffers
    that do not outlive a step.
    """
    kept = torch.zeros_like(pristine, dtype=torch.bool)
    state = {
        **state_io.state_buffers(model.state),
        **{name: getattr(model.state, name) for name in KEPT},
    }
    for tensor in state.values():
        if tensor is not None and tensor.numel():
            first = tensor.data_ptr() - model.arena.data_ptr()
            kept[first : first + tensor.nbytes] = True
    return torch.where(kept, pristine, 0xFF)


def differing(found: Sums, want: Sums) -> str:
    """Return the first launch that differs, as "layernorm_bwd (launch 12, output 0; 3
    later ones differ)", or "".
    """
    assert [name for name, _ in found] == [name for name, _ in want]
    wrong = [i for i, ((_, ours), (_, theirs)) in enumerate(zip(found, want)) if ours != theirs]
    if not wrong:
        return ""
    (name, ours), (_, theirs) = found[wrong[0]], want[wrong[0]]
    output = next(j for j, (a, b) in enumerate(zip(ours, theirs)) if a != b)
    return f"{name} (launch {wrong[0]}, output {output}; {len(wrong) - 1} later ones differ)"


def prepare(precision: str, **sections: Any) -> tuple[Model, Tensor]:
    """Return a model with the sections of a configuration, and the contents
    of its arena before a step.
    """
    sections["train"] |= dict(precision=precision)
    config = tiny_config(log=dict(stats_every=0), sample=dict(every=0), **sections)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(config, Checksums(), device)
    model.eager = True
    model.arena.zero_()
    model.initialise(seed=1)
    if model.has_fp8:
        calibrate(model)
    model.state.batch.copy_(packed(config, 1)[0])
    model.state.step_in.copy_(torch.from_numpy(step_inputs(0, config)))
    model.state.step_key.zero_()
    model.K.take()
    return model, model.arena.clone()


@contextlib.contextmanager
def another_process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Let a process run from its first line, "running", to the end of the block;
    RuntimeError if it ends before.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not process.stdout or process.stdout.readline() != "running\n":
                raise RuntimeError(f"{' '.join(command)}: did not begin")
            yield process
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)}: ended with code {process.returncode}")
        finally:
            process.kill()


def load() -> None:
    """Multiply with PyTorch until the process is killed; print a line after the first product."""
    control = Control()
    control.sum()
    print("running", flush=True)
    while True:
        control.sum()


class Control:
    """A product of PyTorch's of constant operands, bf16 [16384, 1600] and [1600, 50304]."""

    def __init__(self) -> None:
        self._a, self._b = (
            torch.randn(s, device="cuda", dtype=torch.bfloat16)
            for s in ((16384, 1600), (1600, 50304))
        )

    def sum(self) -> int:
        return int(sum_of_bytes(self._a @ self._b))


def passes_of(
    model: Model, arena: Tensor, control: Control, passes: int
) -> tuple[list[Sums], list[Sums], list[int]]:
    """Return the sums of so many passes launch by launch and as graphs,
    and of PyTorch's product.
    """
    launched = [one_pass(model, arena) for _ in range(passes)]
    replayed = [one_replay(model, arena) for _ in range(passes)]
    return launched, replayed, [control.sum() for _ in range(passes)]


def compare(precision: str) -> int:
    """Print a line for each condition and way; return how many passes differ."""
    model, pristine = prepare(
        precision,
        model=dict(n_layer=2, n_head=25, n_embd=1600, vocab_size=50257, block_size=1024),
        train=dict(batch_size=16, seq_len=1024, total_batch_tokens=16384, dtype="bf16"),
        memory=dict(recompute="gelu+ln"),
    )
    control, wrong = Control(), 0
    [want], [want_replayed], [want_control] = passes_of(model, pristine, control, 1)
    found = {"alone": passes_of(model, pristine, control, 1)}
    found["dirty"] = passes_of(model, dirty(model, pristine), control, 1)
    with another_process([sys.executable, "-m", "tests.gpu.shared_gpu", "--load"]):
        found["shared"] = passes_of(model, pristine, control, PASSES)
    for condition, (launched, replayed, controls) in found.items():
        for way, passes, expected in (
            ("launches", launched, want),
            ("graphs", replayed, want_replayed),
        ):
            first = [line for line in (differing(sums, expected) for sums in passes) if line]
            wrong += len(first)
            lines = "".join(f"\n  {first.count(line)} x {line}" for line in dict.fromkeys(first))
            print(
                f"{precision}, {condition}, {way}: {len(passes) - len(first)} "
                f"of {len(passes)} equal{lines}",
                flush=True,
            )
        if disturbed := sum(value != want_control for value in controls):
            print(f"  PyTorch's product differs in {disturbed} of {len(controls)}", flush=True)
    return wrong


def main() -> int:
    if not torch.cuda.is_available():
        print("tests.gpu.shared_gpu: needs a GPU", file=sys.stderr)
        return 2
    words = sys.argv[1:] or ["bf16", "fp8"]
    if words[0] == "--load":
        load()
    return int(sum(map(compare, words)) > 0)


if __name__ == "__main__":
    sys.exit(main())
