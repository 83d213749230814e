"""A run compiles all its kernels before the first step, those of validation and
HellaSwag in every shape included.

    python -m tests.model.test_precompile rows.jsonl DIRECTORY

builds trainers in which a launch only records what Triton would compile: the kernel, its
constants, and which integers and addresses are multiples of 16.  It prints what evaluation
launches and `compile` has not compiled.
"""

import sys
from pathlib import Path

import pytest

from tests.support.elsewhere import compiled_elsewhere

# HellaSwag's batches are multiples of 32 tokens long, those of training here are not.  Hopper's
# products take multiples of 32 rows only: those of the second shape, except for the last batch of
# validation, which is a single sequence
SHAPES = [dict(seq_len=100, batch_size=2), dict(seq_len=48, batch_size=2)]


def note_late_kernels(rows: str, directory: Path) -> None:
    from triton import JITFunction

    from gpt2_triton import device
    from gpt2_triton.kernels.absent_gpu import standing_in

    stand_in = standing_in(device.GPUS["h200"])
    stand_in.__enter__()
    device.device_name = lambda: "cpu"  # where the memory is
    from gpt2_triton.training.setup import compile_kernels
    from tests.support.loop import make_trainer
    from tests.support.tiny import tiny_config

    seen: set[tuple[str, str]] = set()

    def note(self: JITFunction, *args, grid, warmup, **keywords) -> None:
        _, specialisation, options = self.device_caches[0][4](*args, debug=False, **keywords)
        seen.add((self.__name__, f"{specialisation} {options}"))

    JITFunction.run = note
    for i, shape in enumerate(SHAPES):
        asked = dict(every=1, tokens=5 * shape["seq_len"], hellaswag_every=1, hellaswag_data=rows)
        train = dict(steps=2, dtype="bf16") | shape
        config = tiny_config(model=dict(block_size=192), train=train, eval=asked)
        trainer = make_trainer(config, directory / str(i))
        seen.clear()
        compile_kernels(trainer.model, trainer.data)
        ahead = frozenset(seen)
        seen.clear()
        trainer._between_steps(1)
        late = sorted(name for name, _ in seen - ahead)
        print(f"evaluation needs {len(seen)} kernels, of which late: {', '.join(late) or 'none'}")
        trainer.close()


@pytest.mark.slow
def test_compile_covers_all_kernels_of_evaluation(tmp_path):
    """In a subprocess, as the kernels of this process may be the interpreter's."""
    # not in that process, before it has its driver
    from tests.inference.test_hellaswag import row, write

    rows = write(tmp_path / "rows.jsonl", [row(i) for i in range(10)])
    printed = compiled_elsewhere("-m", "tests.model.test_precompile", str(rows), str(tmp_path))
    lines = [line for line in printed.splitlines() if line.startswith("evaluation needs")]
    assert len(lines) == len(SHAPES) and all(line.endswith("late: none") for line in lines), lines


if __name__ == "__main__":
    note_late_kernels(sys.argv[1], Path(sys.argv[2]))
