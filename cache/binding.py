"""Launch lists bound to kernels and memory: what a direct step launches and a graph is captured from.

A binding is remembered for each launch list that was run, whoever owned the step, and is used again while its table has
not moved: then a step only takes its claim on the memory. After a table has moved, what did so is resolved anew.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.spec import KernelSpec

from .identity import Held, hold
from .launches import Copy, LaunchList
from .resources import Resource, ResourceTable, Snapshot
from .runtime import Kernel, Runtime

# A launch with addresses in place of names, or (without a kernel) a copy of so many bytes.
Call = tuple[Kernel | None, tuple[int, ...], int]


class Binding(NamedTuple):
    """A plan's launches with kernels and addresses, and the memory behind them. Nothing in it is ever changed: copies
    share it, as to copy it takes a step longer than to bind what has moved.

    Attributes:
        calls: of each launch, in order.
        held: what the addresses are of; with a claim on it in the binding of a graph alone.
    """

    calls: Sequence[Call]
    held: Held

    def claiming(self, resources: Mapping[str, Resource]) -> Binding:
        """The same with a claim on the memory that it needs and no other, to be kept with a graph.

        Without one it may be remembered: it keeps no memory that its table has let go.
        """
        return Binding(self.calls, self.held.claiming(resources))

    def at(self, version: int) -> Binding:
        """The same, found again in a later version of the table."""
        return Binding(self.calls, self.held.at(version))

    def run(self, runtime: Runtime, on: Any) -> None:
        """Queue or record every call."""
        launch = runtime.launch
        for kernel, addresses, size in self.calls:
            if kernel is None:
                target, source = addresses
                runtime.copy(target, source, size, on)
            else:
                launch(kernel, addresses, on)


def memory(
    where: str, launches: LaunchList, table: ResourceTable, snapshot: Snapshot, known: Held | None = None
) -> tuple[Held, Sequence[int]]:
    """What a table has for each buffer, and the buffers that may have another than was known; arguments as of `hold`.

    Raises:
        InvalidArgument: a buffer is not bound, or bound to memory of another layout.
    """
    held, moved, missing = hold(table, snapshot, launches, known)
    if held is None:
        wanted = "bound in the ResourceTable"
        raise InvalidArgument(f"memory of {missing!r}", where=where, got="none", wanted=wanted)
    for index in moved:
        got, buffer = held.witnesses[index].layout, launches.buffers[index]
        if got != buffer.layout:
            got, wanted = tuple(got), tuple(buffer.layout)
            raise InvalidArgument(f"layout of {buffer.name!r}", where=where, got=got, wanted=wanted)
    return held, moved


class Bindings:
    """Binds launch lists, and remembers how. Not thread-safe: its owner locks.

    Args:
        most: launch lists that are remembered; the least recently run goes first.
    """

    def __init__(self, runtime: Runtime, most: int):
        self._runtime, self._most = runtime, most
        # By content: a list that was built anew is the same.
        self._known: OrderedDict[LaunchList, Binding] = OrderedDict()
        # A kernel lives as long as a binding uses it.
        self._kernels: weakref.WeakValueDictionary[str, Kernel] = weakref.WeakValueDictionary()

    def bound(self, where: str, launches: LaunchList, table: ResourceTable) -> tuple[Binding, Mapping[str, Resource]]:
        """Kernels and addresses as they are now; and a claim on the memory for one step, which is all that the table
        has, as that is taken at once.

        Raises:
            InvalidArgument: a buffer is not bound, or bound to memory of another layout.
            CudaError: a kernel does not load.
        """
        known, snapshot = self._known.get(launches), table.snapshot()
        version, resources = snapshot
        if known is not None and known.held.version == version and known.held.table == table.serial:
            self._known.move_to_end(launches)
            return known, resources
        held, moved = memory(where, launches, table, snapshot, None if known is None else known.held)
        calls = self._loaded(launches) if known is None else [*known.calls]
        stale = {launch for index in moved for launch in launches.users[index]}
        for index, each in zip(stale, launches.addresses(held.witnesses, stale), strict=True):
            kernel, _, size = calls[index]
            calls[index] = kernel, each, size
        binding = self._known[launches] = Binding(calls, held)
        self._known.move_to_end(launches)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return binding, resources

    def refresh(self, table: ResourceTable) -> None:
        """Resolve now what the next step of each list that is remembered would resolve. One that cannot run any more is
        forgotten; its next step says why.
        """
        for launches, known in list(self._known.items()):
            if known.held.table == table.serial:
                try:
                    self.bound("Bindings", launches, table)
                except InvalidArgument:
                    del self._known[launches]

    def clear(self) -> None:
        """Let go of all kernels."""
        self._known.clear()

    def _loaded(self, launches: LaunchList) -> list[Call]:
        """Calls that have no addresses yet."""
        loaded = {spec.key: self._kernel(spec) for spec in launches.specs}
        return [
            (None, (), each.bytes) if isinstance(each, Copy) else (loaded[each.spec.key], (), 0)
            for each in launches.launches
        ]

    def _kernel(self, spec: KernelSpec) -> Kernel:
        kernel = self._kernels.get(spec.key)
        if kernel is None:
            kernel = self._kernels[spec.key] = self._runtime.load(spec)
        return kernel
