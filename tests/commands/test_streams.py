"""Standard streams that are closed or full: a run ends as it would, and a
command without a traceback.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpt2_triton.training.metrics import METRICS, read_metrics

ROOT = Path(__file__).parents[2]
SMALL = """--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --train.batch_size 1 \
--train.seq_len 16
    --optim.warmup 0 --train.total_batch_tokens null --train.steps 2
    --eval.every 0 --sample.every 2 --sample.tokens 2""".split()
PRINTS_MUCH = """
import sys
from gpt2_triton.commands.app import main, make_app
app = make_app("test", "")
app.default(lambda: print("x" * 20_000))
sys.exit(main(app, []))
"""


def environment(**variables):
    dropped = ("TRITON_INTERPRET", "PYTHONUTF8", "PYTHONIOENCODING")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONPATH": str(ROOT)} | variables


def shell(command, *args, **variables):
    """Run a shell's command, in which "$@" is Python with `args`; return its
    exit code, stdout and stderr.
    """
    words = ["sh", "-c", command, "sh", sys.executable, *args]
    done = subprocess.run(
        words, cwd=ROOT, env=environment(**variables), capture_output=True, timeout=250
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["> /dev/full 2>&1", "| true"])
def test_run_without_a_console_ends_with_0(tmp_path, streams):
    """A full disk, and a pipe whose reader has left."""
    run = tmp_path / "run"
    words = ["train.py", "configs/quickstart.yaml", *SMALL, "--run_dir", str(run)]
    shell(f'("$@"; echo $? > {tmp_path}/code) {streams}', *words)
    assert (tmp_path / "code").read_text() == "0\n"
    records = read_metrics(run / METRICS)
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert (run / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "expected", "message"),
    [
        ('{ "$@"; echo $? >&2; } | (exec <&-)', 141, b""),
        (
            '"$@" > /dev/full; echo $? >&2',
            2,
            b"error: standard output, or a file: No space left on device; make room\n",
        ),
        ('"$@" >&-; echo $? >&2', 0, b""),
    ],
)
@pytest.mark.parametrize(
    "words", ["train.py configs/quickstart.yaml --print_config".split(), ["-c", PRINTS_MUCH]]
)
def test_command_whose_output_is_not_taken_has_no_traceback(command, expected, message, words):
    """The second command prints more than a buffer: `print` itself fails."""
    assert shell(command, *words)[2] == message + b"%d\n" % expected
