"""Several ranks on this machine: forked, so that torch and Triton are imported
once, and connected through gloo.

Nothing here waits for a fixed time: a result is awaited as long as the rank that owes it
lives, up to pytest's limit.
"""

import contextlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _rank(
    rank: int,
    ranks: int,
    port: int,
    errors: str,
    function: Callable[..., Any],
    args: tuple,
    result: Connection,
) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(
        zip(names, map(str, (rank, ranks, rank, ranks, "127.0.0.1", port)), strict=True)
    )
    with open(errors, "a", buffering=1) as sys.stderr:
        try:
            result.send(function(*args))
        except BaseException:
            traceback.print_exc()
            os._exit(1)


@contextlib.contextmanager
def started(
    ranks: int, errors: Any, function: Callable[..., Any], *args: Any
) -> Iterator[list[tuple[Any, Connection]]]:
    """Start processes that run function(*args) as the ranks of one job, with
    stderr in the file `errors`.

    Yields each rank's process and the connection that carries its result.  Leaving the
    block kills what still runs.
    """
    context, port, jobs = multiprocessing.get_context("fork"), free_port(), []
    try:
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            args_of_rank = (rank, ranks, port, str(errors), function, args, sender)
            process = context.Process(target=_rank, args=args_of_rank, daemon=True)
            process.start()
            # the rank has the only one, so that its end is seen here as the end of the pipe
            sender.close()
            jobs.append((process, receiver))
        yield jobs
    finally:
        for process, receiver in jobs:
            process.kill()
            process.join()
            receiver.close()


def run(ranks: int, errors: Any, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Return the results by rank; raise AssertionError with the ranks'
    stderr once one of them fails.
    """
    with started(ranks, errors, function, *args) as jobs:
        rank_of, results = (
            {receiver: rank for rank, (_, receiver) in enumerate(jobs)},
            dict[int, Any](),
        )
        while rank_of:
            for receiver in wait(list(rank_of)):
                try:
                    results[rank_of.pop(receiver)] = receiver.recv()
                except EOFError:
                    raise AssertionError(open(errors).read()) from None
        for process, _ in jobs:
            process.join()
    return [results[rank] for rank in range(ranks)]


def exit_codes(ranks: int, errors: Any, function: Callable[..., Any], *args: Any) -> list[int]:
    """Return the exit codes by rank, once all have ended."""
    with started(ranks, errors, function, *args) as jobs:
        for process, _ in jobs:
            process.join()
        return [process.exitcode for process, _ in jobs]
