"""What every command shares: the call, exit codes, the choice of the device.  The commands are in commands/.

A user's mistake is a line on stderr and an exit code: 2 configuration or command line, 3 data, 4 checkpoint, 5 memory,
6 not finite; 0 is done, 130 and 143 are a run stopped by a signal.  Anything else is our bug and keeps its traceback.
Kernels are imported inside the commands: TRITON_INTERPRET must be set before one is decorated.
"""

import os
import re
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, CycloptsError, Parameter

from gpt2_triton import __version__
from gpt2_triton.config import ConfigError

# by name, so that no command imports the kernels for the sake of an exception
EXIT_CODES = {"ConfigError": 2, "DataError": 3, "CheckpointError": 4, "OutOfMemory": 5, "NonFinite": 6, "TableError": 2}


def make_app(name: str, help: str) -> App:
    plain_names = Parameter(name_transform=lambda name: name.strip("_"), negative=())  # underscores; no --no-flag twins
    return App(name=name, help=help, help_format="plaintext", version=__version__, default_parameter=plain_names)


def main(app: App, argv: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        app.suppress_keyboard_interrupt = False
        return app(_underscores(argv), exit_on_error=False, print_error=False, result_action="return_value") or 0
    except CycloptsError as error:
        error.verbose = False
        return _fail(" ".join(str(error).split()), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Exception as error:
        code = next((EXIT_CODES[c.__name__] for c in type(error).__mro__ if c.__name__ in EXIT_CODES), None)
        if code is None:
            raise
        return _fail(str(error), code)


def _fail(message: str, code: int) -> int:
    if code != 2 or os.environ.get("RANK", "0") == "0":  # under torchrun every rank sees the same mistake
        print("\n".join(f"error: {line}" for line in message.splitlines()), file=sys.stderr, flush=True)
    return code


def _underscores(argv: Iterable[str]) -> list[str]:
    """--run-dir is --run_dir."""
    return [re.sub(r"^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in argv]


def choose_device() -> None:
    """With no GPU, have the kernels run in Triton's interpreter, and say so.  Call it before any kernel is imported."""
    # read when torch and numpy load: the interpreter's arrays are small, and a quickstart step took 4.4 s on two
    # threads, 1.5 s on one
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from gpt2_triton import gpus

    if gpus.present():
        return
    if _release("triton") < (3, 7) and _release("numpy") >= (2, 4):
        found = f"triton {version('triton')} with numpy {version('numpy')}"
        raise ConfigError(
            f'no GPU, and {found}: the interpreter of triton before 3.7 needs an older numpy; pip install "numpy<2.4"'
        )
    os.environ["TRITON_INTERPRET"] = "1"
    print("no CUDA GPU found: the kernels run in Triton's interpreter on the CPU", flush=True)


def _release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


def require_directory(option: str, file: Path | None) -> None:
    if file and not file.parent.is_dir():
        raise ConfigError(f"--{option}: {file.parent} is not a directory; make it, or choose another")


def require_least(**options: tuple[float, float]) -> None:
    """Refuse every option=(value, least) whose value is smaller, one line for each."""
    wrong = [
        f"--{name}: must be at least {least}, got {value}"
        for name, (value, least) in options.items()
        if not value >= least
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
