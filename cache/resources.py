"""Where the named memory of a launch list stands, and who owns it.

A Python reference does not hold device memory: donation or deletion by someone else frees it under us, and the next
array may get the same address. So a resource carries a *capsule* (for a JAX array its DLPack capsule), which keeps the
memory until the capsule is dropped, and a *serial*, given once in a process and never again, which tells two owners of
one address apart.

**Ownership, in full.** A table holds the capsule of everything bound in it. A captured graph holds, besides, the
capsules of everything it was captured with, and a direct step those of all that the table had when it was launched,
each until the completion event of the last launch that names them. So memory leaves in this order: the table lets go,
the work in flight completes, the graph is destroyed, the capsule is dropped.

Mutation goes through the methods of `ResourceTable`; each moves ``version``. A step compares that integer.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from moe_jax.pallas_kernels.errors import InvalidArgument

from .launches import ALIGNMENT, Layout
from .names import one_of

Use = Literal["weights", "arena"]

_serials = itertools.count(1)


def next_serial() -> int:
    """A number that no owner of this process has had."""
    return next(_serials)


class Witness(NamedTuple):
    """A resource by value: enough to see that it is another one, and no claim on it. Fields as in `Resource`."""

    address: int
    serial: int
    layout: Layout
    use: Use
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Resource:
    """A piece of device memory.

    Attributes:
        address: a multiple of 16.
        bytes: its size.
        layout: dtype, shape and strides of what lies there.
        serial: of its owner, from `next_serial`; the same for the same storage.
        use: ``"weights"`` (or scales): moved when replaced. ``"arena"``: slots, pages, scratch, results: moved when
            grown, and then a required step fails once.
        capsule: keeps the memory while it is referenced; None for memory that lives as long as the process.
        witness: all of it but the capsule, made once: steps compare and remember hundreds of these.

    Raises:
        InvalidArgument: an address that is 0 or not aligned, or fewer bytes than the layout takes.
    """

    address: int
    bytes: int
    layout: Layout
    serial: int
    use: Use
    capsule: Any = field(default=None, compare=False, repr=False)
    witness: Witness = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        where = "Resource"
        if self.address % ALIGNMENT or self.address <= 0:
            raise InvalidArgument("address", where=where, got=hex(self.address), wanted=f"a multiple of {ALIGNMENT}")
        if self.layout.bytes > self.bytes:
            raise InvalidArgument("bytes", where=where, got=self.bytes, wanted=f"at least {self.layout.bytes}")
        witness = Witness(self.address, self.serial, self.layout, self.use, self.bytes)
        object.__setattr__(self, "witness", witness)


class Snapshot(NamedTuple):
    """A version of a table, and all that it goes with. Neither mapping is ever changed.

    Attributes:
        version: of the table.
        resources: by name; they hold their memory.
        witnesses: of the resources, by name; no claim on it, so a graph may remember all of them as one object.
    """

    version: int
    resources: Mapping[str, Resource]
    witnesses: Mapping[str, Witness]


class ResourceTable:
    """Resources by name; thread-safe.

    Attributes:
        serial: of the table itself: versions of two tables are never compared.
        version: moved by every mutation, and only by them.
    """

    def __init__(self) -> None:
        self.serial = next_serial()
        # As one value: no part of it is ever seen without the others, whatever interrupts a mutation, which works on
        # copies.
        self._state = Snapshot(0, {}, {})
        # Every name that was ever bound, by the version that its last mutation made; the latest last. Released names
        # stay: a graph that was captured with one must hear that it is gone, however late it asks. So this is bounded
        # by the names that the owner of the table uses at all, not by how often it binds them.
        self._moved: OrderedDict[str, int] = OrderedDict()
        # A version, the one of the table when it was asked what has moved since, and the answer: a step asks twice.
        self._asked: tuple[int, int, list[str]] = (0, 0, [])
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        return self._state.version

    def bind(self, name: str, resource: Resource) -> None:
        """Give a new name its memory.

        Raises:
            InvalidArgument: the name has some already.
        """
        with self._lock:
            if name in self._state.resources:
                raise InvalidArgument(
                    "name", where="ResourceTable.bind", got=f"{name!r} bound already", wanted="a new one"
                )
            self._set(name, resource)

    def replace(self, name: str, resource: Resource) -> Resource:
        """Give a bound name other memory; returns what it had.

        New contents in the same storage are no replacement: write them on the engine's stream and leave the table.

        Raises:
            InvalidArgument: the name is not bound.
        """
        return self._swap("ResourceTable.replace", name, resource)

    def grow(self, name: str, resource: Resource) -> Resource:
        """Give a bound arena larger memory; returns what it had. `Graphs.grow` waits and invalidates around this.

        Raises:
            InvalidArgument: the name is not bound, one of the two is no arena, or the new one is smaller.
        """
        where, old = "ResourceTable.grow", self.get(name)
        if old is not None and (old.use != "arena" or resource.use != "arena"):
            raise InvalidArgument(f"use of {name!r}", where=where, got=f"{old.use} → {resource.use}", wanted="arenas")
        if old is not None and resource.bytes < old.bytes:
            raise InvalidArgument(f"bytes of {name!r}", where=where, got=resource.bytes, wanted=f"at least {old.bytes}")
        return self._swap(where, name, resource)

    def release(self, name: str) -> Resource:
        """Forget a name; returns what it had. The memory goes when the last capsule does.

        Raises:
            InvalidArgument: the name is not bound.
        """
        with self._lock:
            resource = self._bound("ResourceTable.release", name)
            self._set(name, None)
            return resource

    def get(self, name: str) -> Resource | None:
        """What a name stands for now."""
        return self._state.resources.get(name)

    def snapshot(self) -> Snapshot:
        """As it is now: no later mutation changes it."""
        return self._state

    def moved(self, version: int) -> list[str]:
        """Names that were bound, replaced or released since a version of this table; not to be changed."""
        since, now, found = self._asked
        if since == version and now == self._state.version:
            return found
        found = []
        with self._lock:
            now = self._state.version
            for name, at in reversed(self._moved.items()):
                if at <= version:
                    break
                found.append(name)
        self._asked = version, now, found
        return found

    def _set(self, name: str, resource: Resource | None) -> None:
        # In this order, so that an interrupt may come between any two lines: what has moved is always among `moved`.
        before = self._state
        version, resources, witnesses = before.version + 1, dict(before.resources), dict(before.witnesses)
        if resource is None:
            del resources[name], witnesses[name]
        else:
            resources[name], witnesses[name] = resource, resource.witness
        self._moved[name] = version
        self._moved.move_to_end(name)
        self._state = Snapshot(version, resources, witnesses)

    def _swap(self, where: str, name: str, resource: Resource) -> Resource:
        with self._lock:
            old = self._bound(where, name)
            self._set(name, resource)
            return old

    def _bound(self, where: str, name: str) -> Resource:
        resources = self._state.resources
        resource = resources.get(name)
        if resource is None:
            raise InvalidArgument("name", where=where, got=repr(name), wanted=one_of(name, resources))
        return resource
