"""Standard streams that are closed, full or of another encoding: a run ends as it would, and a command too if stdout is
closed from the start, else with code 141.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMALL = """--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --train.batch_size 1 --train.seq_len 16
    --optim.warmup 0 --train.total_batch_tokens null --train.steps 2
    --eval.every 0 --sample.every 2 --sample.tokens 2""".split()

PRINT = "train.py configs/quickstart.yaml --print_config".split()
PERPLEXITY = "-m gpt2_triton perplexity tests/fixtures/run tests/fixtures/val.bin".split()


def environment(**variables):
    dropped = ("TRITON_INTERPRET", "PYTHONUTF8", "PYTHONIOENCODING")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONPATH": str(ROOT)} | variables


def shell(command, *args, **variables):
    """Run a shell's command, in which "$@" is Python with `args`; return its exit code, stdout and stderr."""
    words = ["sh", "-c", command, "sh", sys.executable, *args]
    done = subprocess.run(words, cwd=ROOT, env=environment(**variables), capture_output=True, timeout=250)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("streams", ["> /dev/full 2>&1", "<&- >&- 2>&-", "| true"])
def test_run_without_a_console_ends_with_0(tmp_path, streams):
    """A full disk, closed streams, and a pipe whose reader has left."""
    run = tmp_path / "run"
    words = ["train.py", "configs/quickstart.yaml", *SMALL, "--run_dir", str(run)]
    shell(f'("$@"; echo $? > {tmp_path}/code) {streams}', *words)
    assert (tmp_path / "code").read_text() == "0\n"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]
    assert (run / "checkpoints" / "step_00000002").is_dir()


@pytest.mark.slow
def test_run_with_names_that_are_not_utf_8_on_an_ascii_console(tmp_path):
    """The directory of the run and the prompt of a sample; the resumed run reads what the first one wrote."""
    run = os.fsencode(tmp_path) + b"/r\xff"
    words = ["train.py", "configs/quickstart.yaml", *SMALL, "--run_dir", run, "--sample.prompt", b"a\xff"]
    for options in ([], ["--resume"]):
        code, out, error = shell('exec "$@"', *words, *options, PYTHONIOENCODING="ascii", LC_ALL="C")
        assert code == 0, error
    assert rb"run directory " + os.fsencode(tmp_path) + rb"/r\udcff" in out


@pytest.mark.parametrize("words", [PRINT, PERPLEXITY])
@pytest.mark.parametrize("command", ['exec "$@" > /dev/full', '"$@" | true', 'exec "$@" >&-'])
def test_command_that_only_prints_ends_with_141_or_unheard(command, words):
    code, _, error = shell(command.replace("| true", "| (exec <&-)"), *words)
    expected = {'exec "$@" > /dev/full': 141}.get(command, 0)  # a pipe's code is its last command's
    assert code == expected and b"Traceback" not in error
    if expected:
        assert error == b"error: stdout was closed or full before all output was written\n"


def test_long_output_to_a_full_disk_ends_with_141():
    """More than a buffer: `print` itself fails."""
    code, _, error = shell('exec "$@" > /dev/full', "-m", "gpt2_triton", "config-table")
    assert code == 141 and error == b"error: stdout was closed or full before all output was written\n"


def test_closed_streams_do_not_give_their_numbers_to_files():
    program = """
import os, sys
from gpt2_triton.console import prepare_streams, print_line
prepare_streams()
print_line("a line"), print_line("an error", error=True), print("a line", flush=True)
assert os.open("/dev/null", os.O_RDONLY) > 2
assert all(os.readlink(f"/proc/self/fd/{number}") == "/dev/null" for number in range(3))
"""
    assert shell('exec "$@" <&- >&- 2>&-', "-c", program)[0] == 0
