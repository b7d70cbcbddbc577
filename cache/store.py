"""Captured graphs by plan key: what each holds, their bounds, and the order in which they go.

A graph is destroyed only after the completion event of its last launch, never while a capture is open, and the capsules
of its memory are dropped after it. Whatever was made on the device or is queued there stands in a book from first to
last, so that an interrupt between two lines, here or of a caller, loses none of it; `UNRECORDED` stands for an event
that is not there yet: the end of the stream is waited for in its place. (What a call has made and not returned yet is
out of reach.)

To destroy the graph of a step takes the host about a tenth of a direct step, so a step that refuses one only *retires*
it: nothing launches it any more, and it waits in the book of loose graphs. It is destroyed when another graph has been
queued, as the host then waits for the device anyway, one for each (`GraphStore.destroy_one`); where steps go on direct,
one in `PATIENCE` of them; and at once where room is made, where everything is waited for or closed, and where the owner
sweeps (`GraphStore.destroy_loose`). Until then it counts against both bounds, and goes before a live one does.

Device memory of a graph is an estimate (CUDA does not tell): `estimated_bytes`.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from moe_jax.pallas_kernels.errors import CudaError, InvalidArgument

from .binding import Binding, Bindings
from .events import Event
from .identity import Fingerprint, Held, Mismatch, Plan, PlanKey, Programs
from .launches import LaunchList
from .outcome import Counters, Outcome
from .runtime import Runtime, StickyError, Stream

GRAPH_BYTES = 64 << 10
NODE_BYTES = 2 << 10
# Plans without a graph (prompts, first calls) are small; so many of them are kept for each graph.
PLANS_PER_GRAPH = 4
# Direct steps in a row after which one of the graphs that wait to be destroyed is, though the host has no time for it.
PATIENCE = 32
# In place of the event of work that may have been queued, and has none yet.
UNRECORDED: Any = object()


def estimated_bytes(launches: LaunchList) -> int:
    """What an executable is assumed to take on the device: an allowance, and so much for each node."""
    return GRAPH_BYTES + NODE_BYTES * len(launches.launches)


class Entry:
    """A plan and, once captured, its executable.

    Attributes:
        plan, binding: what a direct step launched, or the executable holds. Swapped together, after a launch succeeded.
        executable: None before capture.
        event: of the executable's last launch; `UNRECORDED` from before a launch until its event is there.
        lost: what destroyed the executable between two calls, and the difference, until the next call has heard of it.
        replayed: the outcome of every replay.
    """

    __slots__ = ("binding", "event", "executable", "lost", "plan", "replayed")

    def __init__(self, plan: Plan):
        self.plan = plan
        self.binding: Binding | None = None
        self.executable: Any = None
        self.event: Any = None
        self.lost: tuple[Event, Mismatch] | None = None
        self.replayed: Outcome | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """Of what was captured, or launched last."""
        held = None if self.binding is None else self.binding.held
        resource = () if held is None else tuple([(name, held.witnesses[name]) for name in held.launches.order])
        return Fingerprint(self.plan.program.key, resource)

    @property
    def bytes(self) -> int:
        """Estimated, on the device."""
        return 0 if self.executable is None else estimated_bytes(self.plan.launches)


class Loose(NamedTuple):
    """What is known of a graph that is no entry's.

    Attributes:
        event: to be waited for before it is destroyed.
        holds: memory that it was made with.
        bytes: estimated, on the device; 0 for what was recorded and is no executable.
        retired: it waits until the host has time. False: it is being made, or CUDA did not take it back.
    """

    event: Any = None
    holds: object = None
    bytes: int = 0
    retired: bool = False


class Flight:
    """What a direct step uses until its event is done; None: it is."""

    __slots__ = ("event", "holds")

    def __init__(self, event: Any, holds: object):
        self.event, self.holds = event, holds


class GraphStore:
    """Entries, the least recently used first, within bounds. Not thread-safe: its owner locks.

    Args:
        stream: on which everything is launched.
        max_entries: executables at most.
        max_bytes: estimated, of all executables.

    Attributes:
        bindings: of the launch lists that were run last. They hold no memory.
        programs: that plans were made of.
    """

    def __init__(self, runtime: Runtime, stream: Stream, counters: Counters, max_entries: int, max_bytes: int):
        where = "Graphs"
        if max_entries < 1:
            raise InvalidArgument("max_entries", where=where, got=max_entries, wanted="at least 1")
        if max_bytes < 1:
            raise InvalidArgument("max_bytes", where=where, got=max_bytes, wanted="at least 1")
        self.max_entries, self.max_bytes = max_entries, max_bytes
        self.entries: OrderedDict[PlanKey, Entry] = OrderedDict()
        self.bindings = Bindings(runtime, PLANS_PER_GRAPH * max_entries)
        self.programs: Programs = {}
        self._newest: Entry | None = None
        self._runtime, self._stream, self._counters = runtime, stream, counters
        self._direct: deque[Flight] = deque()
        # Graphs that are no entry's, the first to be destroyed first. One that passes to an entry or from it is in both
        # books for a moment, and is the entry's.
        self._loose: dict[Any, Loose] = {}
        # Direct steps since a graph was retired, or one destroyed because of them.
        self._put_off = 0

    @property
    def captured(self) -> list[Entry]:
        """Entries with an executable."""
        return [entry for entry in self.entries.values() if entry.executable is not None]

    @property
    def bytes(self) -> int:
        """Estimated, of all executables."""
        return sum(entry.bytes for entry in self.captured)

    @property
    def retired(self) -> int:
        """Executables that are launched no more and wait to be destroyed."""
        return sum(loose.retired for loose in self._loose.values())

    @property
    def undestroyed(self) -> int:
        """Graphs that CUDA did not take back yet."""
        return len(self._loose) - self.retired

    def add(self, plan: Plan) -> Entry:
        """A new entry, the most recently used; where there are too many, the oldest go that have no graph.

        A graph has bounds of its own, and may be live where a later plan is out of date: that is looked at after the
        step.
        """
        entry = self._newest = self.entries[plan.key] = Entry(plan)
        while len(self.entries) > PLANS_PER_GRAPH * self.max_entries:
            self.forget(next(key for key, kept in self.entries.items() if kept.executable is None))
        return entry

    def use(self, entry: Entry) -> None:
        """Make a kept entry the most recently used; nothing is to be done where it is already."""
        if entry is not self._newest:
            self.entries.move_to_end(entry.plan.key)
            self._newest = entry

    def make_room(self, plan: Plan) -> None:
        """Destroy until an executable of this plan fits too: those that wait for it, then the least recently used.
        Called before capture begins.

        What CUDA does not take back goes on waiting, and no live graph goes in its place: live ones go until they are
        within the bounds themselves. So what exceeds the bounds is what CUDA does not take back, and nothing else.
        """
        size = estimated_bytes(plan.launches)
        for graph in [graph for graph in self._unowned() if self._loose[graph].bytes]:
            if not self._full(size, (*self.entries.values(), *self._loose.values())):
                return
            self.destroy(graph)
        while (live := self.captured) and self._full(size, live):
            graph = live[0].executable
            self._counters.evictions += 1
            self.forget(live[0].plan.key)
            self.destroy(graph)

    def forget(self, key: PlanKey) -> None:
        """Drop an entry and retire its executable."""
        entry = self.entries.get(key)
        if entry is None:
            return
        self.retire(entry)
        if entry is self._newest:
            self._newest = None
        self.entries.pop(key, None)

    def sweep(self, current: Mapping[str, tuple[int, int]], stays: PlanKey | None = None) -> None:
        """Drop entries whose generation is over.

        Args:
            current: generations by namespace (`Registry.current`).
            stays: the key of one that is kept whatever its generation.
        """
        # By position, as there may be many: namespace, owner generation, candidate generation.
        for key in [key for key in self.entries if current.get(key[1]) != (key[2], key[7]) and key != stays]:
            self._counters.swept += 1
            self.forget(key)

    def retire(self, entry: Entry) -> None:
        """Take an entry's executable from it, if it has one, for good; it waits to be destroyed, with its memory."""
        if entry.executable is not None:
            self._put_off = 0
            size = estimated_bytes(entry.plan.launches)
            self._loose[entry.executable] = Loose(entry.event, entry.binding, size, retired=True)
        entry.executable = entry.event = entry.binding = entry.replayed = None

    def own(self, make: Callable[[], Any], loose: Loose = Loose()) -> Any:  # noqa: B008 (immutable)
        """Make a graph and put it in the books, until `destroy` or `keep`; returns it."""
        # In one line: before it there is no graph to lose, and after it the graph is in the book.
        self._loose[graph := make()] = loose
        return graph

    def take(self, entry: Entry, holds: object) -> Any:
        """Take from an entry the executable that is about to be changed, until `keep`; returns it. If the change does
        not come to its end, nothing is left that replays it.
        """
        # The launch before may be in flight, of memory that the table has let go since.
        self.in_flight(entry.binding, entry.event)
        executable = entry.executable
        self._loose[executable] = Loose(UNRECORDED, (entry.binding, holds), entry.bytes)
        entry.executable = entry.event = entry.binding = entry.replayed = None
        return executable

    def keep(self, entry: Entry, plan: Plan, binding: Binding, executable: Any) -> None:
        """Give an entry the executable that was launched, whose event is still to come."""
        entry.event, entry.replayed = UNRECORDED, None
        entry.plan, entry.binding, entry.executable = plan, binding, executable
        del self._loose[executable]

    def destroy(self, graph: Any, *, wait: bool = True) -> bool:
        """Give a loose graph back when its launches are done. One that is not taken is kept, with all it holds, for the
        next try; errors other than those of CUDA pass.

        Args:
            wait: False: only if its launches are known to be done.

        Returns:
            whether it was tried.
        """
        loose = self._loose[graph]
        try:
            if not self._done(loose.event):
                if not wait:
                    return False
                self._runtime.wait(loose.event)
            loose = loose._replace(event=None)  # once waited for
            del self._loose[graph]
            self._runtime.destroy(graph)
        except StickyError:
            self._loose.pop(graph, None)
            raise
        except CudaError:
            self._loose[graph] = loose._replace(retired=False)
            self._counters.destroy_errors += 1
        except BaseException:
            # The device may have taken it back: then the next try does nothing.
            self._loose[graph] = loose
            raise
        return True

    def destroy_one(self) -> None:
        """Give back one graph whose launches are done, if one waits for that. Called when a graph has been queued: the
        device is busy with it, and the host has time.
        """
        if self._loose:
            for graph in self._unowned():
                if self.destroy(graph, wait=False) and graph not in self._loose:
                    return

    def put_off(self) -> None:
        """A direct step was queued, and the host has no time to destroy what waits for it. For so many, and no more:
        a graph that is not destroyed keeps memory.
        """
        if self._loose:
            self._put_off += 1
            if self._put_off >= PATIENCE:
                self._put_off = 0
                self.destroy_one()

    def destroy_loose(self) -> None:
        """Give back every graph that is no entry's, each when its launches are done. An error that is not of CUDA keeps
        no other graph from its turn, and the first is raised.

        A lost context takes nothing back, so a sticky error is raised at once.
        """
        graphs = self._unowned()
        for number, graph in enumerate(graphs, 1):
            try:
                self.destroy(graph)
            except StickyError:
                raise
            except Exception:
                for other in graphs[number:]:
                    with contextlib.suppress(Exception):
                        self.destroy(other)
                raise

    def in_flight(self, holds: object, event: Any = UNRECORDED) -> Flight:
        """Keep what a direct step uses until its event is done. Called before its first launch, and with the event."""
        flight = Flight(event, holds)
        self._direct.append(flight)
        return flight

    def collect(self) -> None:
        """Let go of what finished direct steps used."""
        try:
            while self._direct and self._done(self._direct[0].event):
                self._direct.popleft()
        except StickyError:
            raise
        except CudaError:
            pass  # not known to be done: asked again at the next step

    def drain(self) -> None:
        """Wait for everything in flight, and destroy what waits for that."""
        for flight in self._direct:
            if not self._done(flight.event):
                self._runtime.wait(flight.event)
        self._direct.clear()
        for entry in self.entries.values():
            if not self._done(entry.event):
                self._runtime.wait(entry.event)
        self.destroy_loose()

    def clear(self) -> None:
        """Destroy everything, each when it is done; errors as those of `destroy_loose`."""
        for key in list(self.entries):
            self.forget(key)
        self.destroy_loose()
        self.drain()

    def abandon(self) -> None:
        """Forget everything and ask the device nothing: a lost context takes nothing back."""
        self.entries.clear()
        self._direct.clear()
        self._loose = {graph: Loose() for graph, loose in self._loose.items() if not loose.retired}
        self.bindings.clear()
        self.programs.clear()
        self._newest = None

    def _unowned(self) -> list[Any]:
        """Graphs that are no entry's; what is one's leaves the book."""
        kept = {entry.executable for entry in self.entries.values()}
        for graph in [graph for graph in self._loose if graph in kept]:
            del self._loose[graph]
        return list(self._loose)

    def _full(self, size: int, there: Iterable[Entry | Loose]) -> bool:
        """Whether an executable of so many bytes is too much beside these."""
        sizes = [each.bytes for each in there if each.bytes]
        return len(sizes) >= self.max_entries or sum(sizes) + size > self.max_bytes

    def _done(self, event: Any) -> bool:
        """Whether an event is done. There is nothing to ask of one that is not there: then the stream is waited for."""
        if event is UNRECORDED:
            self._runtime.synchronize(self._stream)
            return True
        return event is None or self._runtime.event_done(event)


def moved(held: Held, mismatch: Mismatch) -> Event:
    """What it is called that a resource was found elsewhere."""
    name = mismatch.path.rpartition(".")[0]
    return Event.REALLOCATED if held.witnesses[name].use == "arena" else Event.WEIGHTS_MOVED
