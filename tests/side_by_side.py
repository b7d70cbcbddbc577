"""Threads that work at once, for tests."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable, Sequence


def side_by_side(workers: Sequence[Callable[[], None]], disturb: Callable[[int], None]) -> None:
    """Run the workers at once, beside ``disturb(1)``, ``disturb(2)``, … until they have ended. None may fail."""
    errors: list[BaseException] = []
    stop = threading.Event()

    def guarded(function: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                function()
            except BaseException as error:
                errors.append(error)

        return threading.Thread(target=run)

    def disturb_on() -> None:
        for number in itertools.count(1):
            if stop.is_set():
                return
            disturb(number)

    threads = [guarded(worker) for worker in workers]
    other = guarded(disturb_on)
    for thread in (*threads, other):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    other.join()
    assert errors == [] and gc.isenabled()
