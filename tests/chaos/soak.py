"""`python -m tests.chaos.soak CONFIG [KEYS]`: train for some minutes
and see whether anything grows.

Once a second: the resident memory, descriptors and threads of each rank, and the memory of
each GPU.  After the first minute each is fitted by a line.  A slope counts as growth if it
is more than three standard errors above zero and comes to more than 1% of the value in an
hour.  Since neighbouring samples are not independent, the standard error is taken from the
means of blocks of 15 samples.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
from cyclopts import App, Parameter

BLOCK = 15  # samples
Sample = dict[str, float]  # by name, "seconds" among them
app = App(name="python -m tests.chaos.soak", help=__doc__, help_format="plaintext")


def of_process(pid: int) -> dict[str, float]:
    """Return resident MiB, descriptors and threads of a process; KeyError
    or OSError if it has ended.
    """
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return {
        "RSS, MiB": int(status["VmRSS"].split()[0]) / 1024,
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def gpu_memory() -> list[float]:
    """Return the MiB in use of each GPU in CUDA_VISIBLE_DEVICES, else of all; an
    empty list without nvidia-smi.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = ["--id", visible] if visible else []
    command = ["nvidia-smi", *chosen, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(FileNotFoundError, subprocess.CalledProcessError):
        return [float(line) for line in subprocess.check_output(command, text=True).split()]
    return []


def slope(seconds: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Return the slope per hour of a line through the means of blocks, and its standard error."""
    blocks = len(values) // BLOCK
    x = seconds[: blocks * BLOCK].reshape(blocks, BLOCK).mean(1) / 3600
    y = values[: blocks * BLOCK].reshape(blocks, BLOCK).mean(1)
    x -= x.mean()
    fitted = (x * y).sum() / (x * x).sum()
    residual = y - y.mean() - fitted * x
    return float(fitted), float(np.sqrt((residual**2).sum() / max(1, blocks - 2) / (x * x).sum()))


def grows(value: float, fitted: float, error: float) -> bool:
    return fitted > 3 * error and fitted > 0.01 * value


def take_samples(process: subprocess.Popen[bytes], metrics: Path, minutes: float) -> list[Sample]:
    """Return a sample of each second from the first finished step on, for `minutes`
    or until the process ends.
    """
    while process.poll() is None and not (metrics.exists() and b'"loss"' in metrics.read_bytes()):
        time.sleep(0.5)
    began, samples = time.monotonic(), []
    while process.poll() is None and time.monotonic() - began < 60 * minutes:
        try:
            row = of_process(process.pid) | {
                f"GPU {i}, MiB": used for i, used in enumerate(gpu_memory())
            }
        except (KeyError, OSError):  # it ended after the poll
            break
        samples.append({"seconds": time.monotonic() - began} | row)
        time.sleep(1)
    return samples


def print_slopes(samples: list[Sample]) -> int:
    """Print the slope of each value with its standard error; return the
    number of those that grow.
    """
    seconds, growing = np.array([row["seconds"] for row in samples]), 0
    print(f"{'':16}{'first':>12}{'last':>12}{'per hour':>14}{'+-':>10}")
    for name in [name for name in samples[0] if name != "seconds"]:
        values = np.array([row[name] for row in samples])
        fitted, error = slope(seconds, values)
        bad = grows(float(values.mean()), fitted, error)
        growing += bad
        print(
            f"{name:16}{values[0]:12.1f}{values[-1]:12.1f}"
            f"{fitted:14.2f}{error:10.2f}{'  GROWS' if bad else ''}"
        )
    return growing


@app.default
def soak(
    config: Path,
    /,
    *keys: Annotated[str, Parameter(allow_leading_hyphen=True)],
    minutes: float = 8.0,
    settle: float = 60.0,
    run_dir: Path = Path("runs/soak"),
    out: Path | None = None,
) -> int:
    """Train, take samples of the memory, and print a slope with its standard error for each.

    Parameters
    ----------
    config: Path
        Configuration of the run; give enough train.steps: the run is stopped by SIGTERM at the end.
    keys: str
        Keys of the configuration, as train.py takes them.
    minutes: float
        Length of the run.
    settle: float
        Seconds from the first finished step that are left out.
    run_dir: Path
        Directory of the run.
    out: Path
        File for the samples, as JSON.
    """
    command = [sys.executable, "train.py", str(config), "--run_dir", str(run_dir), *keys]
    process = subprocess.Popen(command)
    samples = take_samples(process, run_dir / "metrics.jsonl", minutes)
    ended_early = process.poll() is not None
    process.terminate()
    code = process.wait()
    if out:
        out.write_text(json.dumps(samples) + "\n")
    if ended_early or code != 143:
        print(
            f"the run ended with exit code {code}; expected 143, "
            f"by SIGTERM after {minutes:g} minutes"
        )
        return 1
    late = [row for row in samples if row["seconds"] >= settle]
    if len(late) < 3 * BLOCK:
        print(f"{len(late)} samples after {settle:g} s are too few for a line; raise --minutes")
        return 2
    growing = print_slopes(late)
    start = json.loads((run_dir / "run.json").read_text())["starts"][-1]
    print(f"arena by the memory plan: {start['plan']['arena_bytes'] / 2**20:.1f} MiB")
    return int(growing > 0)


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
