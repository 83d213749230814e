"""Shared by all commands: parsing, exit codes, the choice of the device.

A user's mistake is one line on stderr and an exit code: 2 configuration or command line, 3
data, 4 checkpoint, 5 memory, 6 non-finite numbers, 1 failures between GPUs.  128 and a signal's
number: the signal stopped the run; 141: the reader of stdout left.  Any other exception is a
bug and keeps its traceback.

Commands import kernels inside their functions: TRITON_INTERPRET must be set before a kernel is
decorated.
"""

import ctypes
import errno
import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from cyclopts import (
    App,
    CycloptsError,
    Parameter,
    Token,
    UnknownOptionError,
    UnusedCliTokensError,
    convert,
)
from cyclopts.help import DefaultFormatter
from cyclopts.validators import Number

from gpt2_triton.config.other_projects import counterpart
from gpt2_triton.config.values import whole_number
from gpt2_triton.console import discard_unwritten, prepare_streams, print_line, printable
from gpt2_triton.errors import ConfigError, UserError
from gpt2_triton.files import FULL
from gpt2_triton.version import version_text

AT_LEAST_0 = Parameter(validator=Number(gte=0))
AT_LEAST_1 = Parameter(validator=Number(gte=1))
Checkpoint = Annotated[
    str,
    Parameter(
        help=(
            "A run, one of its step directories, RUN/best, "
            "or hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE."
        )
    ),
]
Special = Annotated[
    bool,
    Parameter(
        negative="--no-special",
        help="Take the tokenizer's special tokens in the text, and <|endoftext|>, as these tokens.",
    ),
]
# an empty path would be "."
PATHS = ("--run_dir", "--run-dir", "--data", "--source", "--out", "-o", "--json")
OPTION = re.compile(r"(?<=^--)[^= ]+(?==|$)")  # its name
PROMPTS = ("--prompt", "--sample.prompt")
# the beginning of a path before ~/, which a shell expands only at a word's beginning,
# unquoted; a prompt is no path
HOME = re.compile(r"^(?!--\S*prompt=)((?:--[^=]+=)?(?:(?:hf|llmc|nanogpt):)?)~(?=/)")
TO_CORRECT = dict.fromkeys((errno.EACCES, errno.EPERM), "correct its permissions")
TO_CORRECT |= dict.fromkeys(FULL, "make room")


def make_app(name: str, help: str | None = None) -> App:
    """Return an app with underscores in its options and no --no-... flags; without
    `help` it shows docstrings.
    """
    options = Parameter(
        name_transform=lambda n: n.strip("_"), negative=(), converter=_converted, json_list=False
    )
    return App(
        name=name,
        help=help,
        help_format="plaintext",
        help_formatter=_Filled(),
        version=version_text,
        default_parameter=options,
    )


class _Filled(DefaultFormatter):
    """Prints a help text whose lines end where the terminal's do, not a docstring's."""

    def __call__(self, console: Any, options: Any, panel: Any) -> None:
        for entry in panel.entries:
            text = entry.description.primary_renderable
            text.plain = " ".join(text.plain.split())
        super().__call__(console, options, panel)


def _converted(kind: Any, tokens: Sequence[Token]) -> Any:
    """Return an option's value; an int may be 10B or 1e9, not 1.5, which cyclopts would round."""
    if kind is not int:
        return convert(kind, tokens)
    number = whole_number(tokens[0].value)
    if number is None:
        raise ValueError(f"{tokens[0].value} is no whole number such as 1000, 1e9 or 10B")
    return number


def main(app: App, argv: list[str]) -> int:
    """Run a command and return its exit code.  With several ranks, a failed command
    ends the process instead.
    """
    prepare_streams()
    if os.getpid() == 1:  # of a container: Linux drops a signal to it that has no handler
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        words = _spelled_out(argv)
        if not words or words[0] in app.help_flags:
            for name in app:
                app[name]  # imports the command, for its summary in the list
        code = call(app, words)
        sys.stdout.flush()  # while errors are still caught
        return code
    except CycloptsError as error:
        return _fail(_wrong_call(error), 2, on_every_rank=True)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except UserError as error:
        return _fail(str(error), error.exit_code, error.on_every_rank)
    except BrokenPipeError:  # stdout's reader, such as head, has all that it wants
        discard_unwritten()
        return 141
    except Exception as error:
        fault = _fault_of_the_machine(error)
        if fault:
            return _fail(fault, ConfigError.exit_code)
        if not _is_distributed():
            raise
        traceback.print_exc()
        return _fail(f"{type(error).__name__}: {error}", 1)


def _fault_of_the_machine(error: Exception) -> str:
    """Return what a user can correct of a disk or its permissions, "" for any other error."""
    if "No usable temporary directory" in str(error):  # torch makes one when it is imported
        return "TMPDIR: no directory for temporary files can be written; set TMPDIR to one"
    if not isinstance(error, OSError) or not (error.filename or error.errno in TO_CORRECT):
        return ""
    file = str(error.filename or "standard output, or a file")
    todo = TO_CORRECT.get(error.errno or 0, "choose another place")
    if "/.triton" in file:
        todo = "set TRITON_CACHE_DIR to another place"
    return f"{file}: {error.strerror}; {todo}"


def call(app: App, words: Iterable[str]) -> int:
    """Run a command and return its exit code; mistakes and interrupts are raised."""
    app.suppress_keyboard_interrupt = False
    return app([*words], exit_on_error=False, print_error=False, result_action="return_value") or 0


def _wrong_call(error: CycloptsError) -> str:
    """Return the message of cyclopts as one line that ends with what to do."""
    error.verbose = False
    if isinstance(error, UnusedCliTokensError):
        name = "--prompt" if "sample" in (error.command_chain or ()) else "its --name"
        wrong = (
            f"{' '.join(error.unused_tokens or [])}: unexpected; each value needs {name}, or quotes"
        )
    else:
        wrong = " ".join(str(error).split()).removesuffix(".")
    if isinstance(error, UnknownOptionError):
        option, _, guess = wrong.removeprefix("Unknown option: ").partition(". Did you mean ")
        wrong = f"{option}: unknown option"
        hint = counterpart(option.removeprefix("--"))
        if "use sample" in hint or "no counterpart" in hint:  # the other hints name train's options
            return wrong + hint
        wrong += f"; did you mean {guess}" if guess else ""
    return wrong if wrong.endswith("?") else f"{wrong}; see --help"


def _is_distributed() -> bool:
    return os.environ.get("WORLD_SIZE", "1") != "1"


def _fail(message: str, code: int, on_every_rank: bool = False) -> int:
    """Print the message, and a rank, once per host if `on_every_rank`; return the code, or exit."""
    rank = int(os.environ.get("RANK", "0"))
    if on_every_rank and int(os.environ.get("LOCAL_RANK", rank)) > 0:
        time.sleep(2)  # the rank that prints needs time before the launcher ends it
    else:
        name = f"rank {rank}: " if _is_distributed() and not (on_every_rank and rank == 0) else ""
        print_line(
            "\n".join(f"error: {name}{line}" for line in printable(message).splitlines()),
            error=True,
        )
        discard_unwritten()
    if _is_distributed():
        os._exit(code)  # without waiting for threads: the launcher then ends the other ranks
    return code


def _spelled_out(argv: Iterable[str]) -> list[str]:
    """Return the words with ~/ expanded, --run_dir for --run-dir, and a value for --resume."""
    home = rf"\1{os.path.expanduser('~')}"
    words = list[str]()
    before = "the command"
    for word in argv:
        is_path = not before.startswith("-") or before in PATHS
        if (not word and is_path) or word in [f"{path}=" for path in PATHS]:
            raise ConfigError(
                f"{word or f'after {before}'}: empty, perhaps from an unset variable; give a path"
            )
        if before in PROMPTS:
            words.append(word)
        elif word == "--resume":
            words.append("--resume=true")
        elif (before, word) == ("--resume", "must"):
            words[-1] = "--resume=must"
        else:
            with_underscores = OPTION.sub(lambda name: name[0].replace("-", "_"), word)
            words.append(HOME.sub(home, with_underscores))
        before = word
    return words


def select_device(silent: bool = False) -> None:
    """Without a GPU select Triton's interpreter, and say so unless `silent`.  Call it
    before a kernel is imported.
    """
    # torch and numpy read these at import.  Without a GPU more threads, which SLURM's
    # scripts ask for, change the order of sums, and a second thread makes the interpreter's
    # small arrays three times slower.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # c10d logs C++ stacks of errors that it also raises
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    threading.Thread(target=_open_gpu, daemon=True).start()
    gc.disable()  # torch makes 300,000 objects, none of them garbage; searching them takes 0.5 s
    import numpy  # noqa: F401, torch's C code would import it, and lose a Ctrl-C there

    from gpt2_triton import device

    gc.freeze()  # nor does a later search look at them
    gc.enable()

    if device.select_interpreter() and not silent:
        print_line(device.NO_GPU)
    # numpy warns of losses that are not finite; training reports them itself
    warnings.filterwarnings(
        "ignore", category=RuntimeWarning, module=r"(triton\.runtime|gpt2_triton)\.interpreter"
    )


def _open_gpu() -> None:
    """Make this rank's CUDA context, in half a second, while the main thread imports torch."""
    with suppress(OSError, AttributeError, ZeroDivisionError):  # no driver of NVIDIA's, or no GPU
        cuda = ctypes.CDLL("libcuda.so.1")
        gpus = ctypes.c_int()
        gpu = ctypes.c_int()
        context = ctypes.c_void_p()
        cuda.cuInit(0)
        cuda.cuDeviceGetCount(ctypes.byref(gpus))
        cuda.cuDeviceGet(ctypes.byref(gpu), int(os.environ.get("LOCAL_RANK", "0")) % gpus.value)
        cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu)  # torch takes the same context


def require_directory(option: str, file: Path | None) -> None:
    """Refuse a file that cannot be written: in a directory that is missing or read-only, or in
    place of a directory or a device, as /dev/stdout is.
    """
    if not file:
        return
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ConfigError(
            f"--{option}: {file.parent} is no directory that can be written; "
            "make it, or choose another"
        )
    if file.exists() and not file.is_file():
        raise ConfigError(f"--{option}: {file} is no file; name a new one, or one to replace")
