"""Fake device memory: addresses that are dereferenced, freed memory that is poisoned and handed out again."""

from __future__ import annotations

import bisect
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Generator

import numpy as np

from .runtime import StickyError

POISON = 0xFF
BASE = 0x7F00_0000_0000
GRAIN = 256


class AddressSpace:
    """Memory by fake address. First fit, lowest address first; a free block is merged with its neighbours.

    Args:
        capacity: bytes; taken from the host only where they are touched.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.sizes: dict[int, int] = {}
        self._memory = np.zeros(capacity, np.uint8)
        self._free = [(0, capacity)]
        # Blocks that were given up and are not free yet. The collector may give one up between any two lines, also of
        # these methods, whose lists are half changed then.
        self._given_up: deque[int] = deque()
        self._lock = threading.Lock()

    @property
    def bytes(self) -> int:
        """In use."""
        with self._changing():
            return sum(self.sizes.values())

    def allocate(self, size: int) -> int | None:
        """An address of poisoned memory; None when there is no room."""
        size = max(GRAIN, -(-size // GRAIN) * GRAIN)
        with self._changing():
            for index, (start, length) in enumerate(self._free):
                if length >= size:
                    self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                    self._memory[start : start + size] = POISON
                    self.sizes[BASE + start] = size
                    return BASE + start
        return None

    def free(self, address: int) -> None:
        """Poison a block and put it up for the next allocation: now, or when who changes the lists now is done."""
        self._given_up.append(address)
        self._work_off()

    @contextlib.contextmanager
    def _changing(self) -> Generator[None]:
        """The lists are this thread's alone, and up to date."""
        with self._lock:
            self._free_all()
            yield
        self._work_off()

    def _work_off(self) -> None:
        # Looked at again each time: what is given up while the lock is held is left to its holder.
        while self._given_up and self._lock.acquire(blocking=False):
            try:
                self._free_all()
            finally:
                self._lock.release()

    def _free_all(self) -> None:
        while self._given_up:
            address = self._given_up.popleft()
            start, size = address - BASE, self.sizes.pop(address)
            self._memory[start : start + size] = POISON
            index = bisect.bisect(self._free, (start, 0))
            if index < len(self._free) and self._free[index][0] == start + size:
                size += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == start:
                start, before = self._free[index - 1][0], self._free.pop(index - 1)[1]
                size, index = size + before, index - 1
            self._free.insert(index, (start, size))

    def view(self, address: int, size: int) -> np.ndarray:
        """Bytes behind an address, whoever they belong to now; an address outside the space is an illegal one."""
        start = address - BASE
        if start < 0 or start + size > self.capacity:
            raise StickyError(
                "illegal address",
                where="SimulatedRuntime",
                got=f"{hex(address)} (CUDA_ERROR_ILLEGAL_ADDRESS)",
                wanted="memory of the device",
            )
        return self._memory[start : start + size]


class Capsule:
    """Holds a block of memory as long as it is referenced."""

    def __init__(self, space: AddressSpace, address: int):
        weakref.finalize(self, space.free, address).atexit = False
