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

from .identity import Held, suspects
from .launches import Copy, LaunchList
from .resources import Resource, ResourceTable, Snapshot
from .runtime import Kernel, Runtime

# So many are resolved one by one: that takes less than to look at every buffer.
FEW_OPERANDS = 64

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
) -> tuple[Held, Sequence[str]]:
    """What a table has for the buffers of a list, and which of them may have another memory than was known. It is no
    claim: the snapshot is, on all that the table has.

    Args:
        snapshot: of the table, just taken.
        known: of the same list, at an earlier time or of another table.

    Raises:
        InvalidArgument: a buffer is not bound, or bound to memory of another layout.
    """
    moved = launches.order if known is None else suspects(known, table)
    for name in moved:
        witness, layout = snapshot.witnesses.get(name), launches.by_name[name].layout
        if witness is None:
            wanted = "bound in the ResourceTable"
            raise InvalidArgument(f"memory of {name!r}", where=where, got="none", wanted=wanted)
        if witness.layout != layout:
            got, wanted = tuple(witness.layout), tuple(layout)
            raise InvalidArgument(f"layout of {name!r}", where=where, got=got, wanted=wanted)
    return Held(table.serial, snapshot.version, launches, snapshot.witnesses), tuple(moved)


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
        if known is not None and known.held.version == snapshot.version and known.held.table == table.serial:
            self._known.move_to_end(launches)
            return known, snapshot.resources
        held, moved = memory(where, launches, table, snapshot, None if known is None else known.held)
        calls = self._loaded(launches) if known is None else [*known.calls]
        uses = [(name, use) for name in moved for use in launches.uses[name]]
        if known is None or len(uses) > FEW_OPERANDS:
            addresses = launches.addresses(held.witnesses)
            calls = [(kernel, each, size) for (kernel, _, size), each in zip(calls, addresses, strict=True)]
        else:
            for name, (index, place, offset) in uses:
                kernel, before, size = calls[index]
                address = held.witnesses[name].address + offset
                calls[index] = kernel, (*before[:place], address, *before[place + 1 :]), size
        binding = self._known[launches] = Binding(calls, held)
        self._known.move_to_end(launches)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return binding, snapshot.resources

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
