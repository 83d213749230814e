"""What every command shares: the call, exit codes, the choice of the device.  The commands are in commands/.

A user's mistake is a line on stderr and an exit code: 2 configuration or command line, 3 data, 4 checkpoint, 5 memory,
6 not finite, 1 trouble among several GPUs; 0 is done, 129, 130 and 143 are a run stopped by a signal, 141 is output
whose reader is gone.  Anything else is our bug and keeps its traceback.
Kernels are imported inside the commands: TRITON_INTERPRET must be set before one is decorated.
"""

import os
import re
import sys
import time
import traceback
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError

from gpt2_triton import __version__
from gpt2_triton.console import print_line
from gpt2_triton.errors import ConfigError, UserError


def make_app(name: str, help: str) -> App:
    plain_names = Parameter(name_transform=lambda name: name.strip("_"), negative=())  # underscores; no --no-flag twins
    return App(name=name, help=help, help_format="plaintext", version=__version__, default_parameter=plain_names)


def main(app: App, argv: list[str]) -> int:
    """Run a command and return its exit code."""
    try:
        app.suppress_keyboard_interrupt = False
        if not argv or argv[0] in app.help_flags:
            for name in app:
                app[name]  # imported here, the command has its summary in the list of commands
        code = app(_underscores(argv), exit_on_error=False, print_error=False, result_action="return_value") or 0
        _flush()
        return code
    except CycloptsError as error:
        return _fail(_wrong_call(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python's end fails on what is left to flush
        return _leave(_fail("nobody reads the output any more", 141))
    except UserError as error:
        return _leave(_fail(str(error), error.exit_code))
    except Exception as error:
        if not _several_ranks():
            raise
        traceback.print_exc()
        return _leave(_fail(f"{type(error).__name__}: {error}", 1))


def _flush() -> None:
    """Here, where it is caught that nobody reads any more: of a terminal that was closed another error says so."""
    try:
        sys.stdout.flush()
    except OSError as error:
        raise BrokenPipeError from error


def _wrong_call(error: CycloptsError) -> str:
    """What cyclopts says, in one line that says what to do."""
    error.verbose = False
    if isinstance(error, UnusedCliTokensError):
        wrong = f"{' '.join(error.unused_tokens or [])}: unexpected; options are --name value"
    else:
        wrong = " ".join(str(error).split()).removesuffix(".")
    return wrong if wrong.endswith("?") else f"{wrong}; see --help"


def _several_ranks() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _leave(code: int) -> int:
    """Of several ranks one that fails ends at once, whatever its threads wait for: so the launcher ends the others."""
    if _several_ranks():
        sys.stdout.flush()
        os._exit(code)
    return code


def _fail(message: str, code: int) -> int:
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    repeats = code == 2 and rank.isdecimal() and size.isdecimal() and 0 < int(rank) < int(size)
    if repeats:  # every rank sees the same mistake: rank 0 speaks, before the launcher ends it
        time.sleep(2)
        return code
    name = f"rank {rank}: " if _several_ranks() and code != 2 else ""
    print_line("\n".join(f"error: {name}{line}" for line in message.splitlines()), error=True)
    return code


def _underscores(argv: Iterable[str]) -> list[str]:
    """--run-dir is --run_dir."""
    return [re.sub(r"^--[^=]+", lambda name: "--" + name[0][2:].replace("-", "_"), word) for word in argv]


def select_device() -> None:
    """With no GPU, have the kernels run in Triton's interpreter, and say so.  Call it before any kernel is imported."""
    # read when torch and numpy load: the interpreter's arrays are small, and a quickstart step took 4.4 s on two
    # threads, 1.5 s on one
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # what c10d logs, with C++ stacks, is raised besides
    from gpt2_triton import device

    if device.present():
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


def require_at_least(**options: tuple[float, float]) -> None:
    """Refuse every option=(value, least) whose value is smaller, one line for each."""
    wrong = [
        f"--{name}: must be at least {least}, got {value}"
        for name, (value, least) in options.items()
        if not value >= least
    ]
    if wrong:
        raise ConfigError("\n".join(wrong))
