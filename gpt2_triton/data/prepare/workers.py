"""A `map` over several processes."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from gpt2_triton.errors import DataError

PairedMap = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[tuple[Any, Any]]]


@contextmanager
def paired_map(processes: int) -> Iterator[PairedMap]:
    """Yield a `map` that yields (task, result) in the order of the tasks, and
    takes a few of them ahead.
    """
    if processes <= 1:
        yield lambda function, tasks: ((task, function(task)) for task in tasks)
        return
    # spawn, not fork: a fork copies the locks of this process's threads
    # (tiktoken's, torch's), perhaps held
    pool = ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=_begin_worker
    )

    def parallel_map(
        function: Callable[[Any], Any], tasks: Iterable[Any]
    ) -> Iterator[tuple[Any, Any]]:
        waiting: deque[tuple[Any, Future[Any]]] = deque()
        for task in tasks:
            # a worker, which this may start, inherits that Ctrl-C is left to the parent
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                waiting.append((task, pool.submit(function, task)))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            if len(waiting) > 2 * processes:
                task, future = waiting.popleft()
                yield task, future.result()
        yield from ((task, future.result()) for task, future in waiting)

    try:
        yield parallel_map
    except BrokenProcessPool:
        raise DataError(
            f"prepare: one of {processes} workers died, perhaps for lack of memory; "
            "try again with fewer --workers"
        ) from None
    finally:
        # a second Ctrl-C would leave both sides waiting
        on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGINT, on_interrupt)


def _begin_worker() -> None:
    """End with the parent: a killed one closes no queue."""

    def follow_parent() -> None:
        parent: Any = multiprocessing.parent_process()
        parent.join()
        os._exit(1)

    threading.Thread(target=follow_parent, name="follow parent", daemon=True).start()
