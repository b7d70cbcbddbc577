"""Launch lists bound to kernels and memory: what a direct step launches and a graph is captured from.

A binding is remembered for each launch list that was run, whoever owned the step, and is used again while its table has
not moved: then a step only takes its claim on the memory. After a table has moved, what did so is resolved anew.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.spec import KernelSpec

from .identity import Held, hold
from .launches import Copy, LaunchList
from .resources import ResourceTable
from .runtime import Kernel, Runtime

# A launch with addresses in place of names, or (without a kernel) a copy of so many bytes.
Call = tuple[Kernel | None, tuple[int, ...], int]


@dataclass(frozen=True)
class Binding:
    """A plan's launches with kernels and addresses, and the memory behind them.

    Attributes:
        calls: of each launch, in order.
        held: what the addresses are of, with or without a claim on it.
    """

    calls: tuple[Call, ...]
    held: Held

    def without_claim(self) -> Binding:
        """The same without capsules: what is only remembered must not keep memory that its table has let go."""
        return Binding(self.calls, replace(self.held, claim=None))

    def narrowed(self) -> Binding:
        """The same with a claim on no more than it needs, to be kept with a graph."""
        return Binding(self.calls, self.held.narrowed())

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
    where: str, launches: LaunchList, table: ResourceTable, known: Held | None = None
) -> tuple[Held, Sequence[int]]:
    """What a table has for each buffer, claimed for one step; and the buffers that may have another than was known.

    Raises:
        InvalidArgument: a buffer is not bound, or bound to memory of another layout.
    """
    held, moved, missing = hold(table, launches, known)
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

    def bound(self, where: str, launches: LaunchList, table: ResourceTable) -> Binding:
        """Kernels and addresses as they are now, with a claim on the memory.

        Raises:
            InvalidArgument: a buffer is not bound, or bound to memory of another layout.
            CudaError: a kernel does not load.
        """
        known = self._known.get(launches)
        if known is not None:
            held = known.held.claimed(table)
            if held is not None:
                self._known.move_to_end(launches)
                return Binding(known.calls, held)
        held, moved = memory(where, launches, table, None if known is None else known.held)
        calls = self._loaded(launches) if known is None else [*known.calls]
        stale = {launch for index in moved for launch in launches.users[index]}
        addresses = launches.addresses([witness.address for witness in held.witnesses], stale)
        for index, each in zip(stale, addresses, strict=True):
            kernel, _, size = calls[index]
            calls[index] = kernel, each, size
        binding = Binding(tuple(calls), held)
        self._known[launches] = binding.without_claim()
        self._known.move_to_end(launches)
        if len(self._known) > self._most:
            self._known.popitem(last=False)
        return binding

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
