"""Several ranks on this machine: forked, so that torch and Triton are imported once, and talking through gloo."""

import contextlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int, ranks: int, port: int, errors: str, function: Callable[..., Any], args: tuple, results: Any
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, ranks, rank, ranks, "127.0.0.1", port)), strict=True))
    with open(errors, "a", buffering=1) as sys.stderr:
        try:
            results.put((rank, function(*args)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)


def start(ranks: int, errors: Any, function: Callable[..., Any], *args: Any) -> tuple[list[Any], Any]:
    """Processes that run function(*args) as ranks of one job, what they print on stderr going to the file `errors`,
    and the queue of their (rank, result).
    """
    context, port = multiprocessing.get_context("fork"), free_port()
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, port, str(errors), function, args, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes, results


def run(ranks: int, errors: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """The results by rank; AssertionError with what was printed if a rank fails or takes too long."""
    processes, results = start(ranks, errors, function, *args)
    try:
        found = dict(results.get(timeout=SECONDS) for _ in processes)
    except Exception as error:
        with contextlib.suppress(OSError):
            raise AssertionError(open(errors).read()) from error
        raise
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return [found[rank] for rank in range(ranks)]
