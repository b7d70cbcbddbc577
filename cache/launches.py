"""Launch lists: a step's launches as immutable content, without one address.

A list names the memory that it uses; a `ResourceTable` says where each name stands. So the same list serves every
engine, its key is equal in every process, and a step compares one string instead of 500 records.

    buffers = (dense("x", "bfloat16", (4, 2048)), dense("arena", "uint8", (1 << 20,)), …)
    launches = (Launch(spec, (Operand("x"), Operand("arena", 4096))), Copy(Operand("y"), Operand("x"), 16384), …)
    step = LaunchList(buffers, launches)     # checked and hashed once

A buffer of dtype ``"uint8"`` is raw memory, of which operands take any aligned part.

A kernel takes the elements of an argument to lie side by side. Of a buffer where they do not (experts with gaps between
them, say) an argument is all that is there, gaps included, as one axis: a kernel that has such an argument knows the
strides as constants. Any other argument is refused.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import ml_dtypes  # noqa: F401 (teaches NumPy the names of its dtypes)
import numpy as np

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.spec import Argument, KernelSpec

from .keys import program_key
from .names import one_of

ALIGNMENT = 16
RAW = "uint8"

_Take = Callable[[list[int]], tuple[int, ...]]


class HasAddress(Protocol):
    """What stands somewhere."""

    @property
    def address(self) -> int: ...


class Layout(NamedTuple):
    """How memory is read: NumPy name of the element type, shape, strides in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """From the first element to the end of the last one; 0 when there is none."""
        if 0 in self.shape:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return (last + 1) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Buffer:
    """What a launch list calls a piece of memory.

    Attributes:
        name: unique in its list.
        dtype: NumPy name of the element type; ``"uint8"`` for raw memory.
        shape: of the whole buffer.
        strides: in elements, one for each axis.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @functools.cached_property
    def layout(self) -> Layout:
        """Everything but the name."""
        return _layout(self.dtype, self.shape, self.strides)

    @functools.cached_property
    def contiguous(self) -> bool:
        """Whether the elements lie side by side in the order of the axes."""
        wanted = dense(self.name, self.dtype, self.shape).strides
        axes = zip(self.shape, self.strides, wanted, strict=True)
        return 0 in self.shape or all(size == 1 or got == right for size, got, right in axes)


@functools.lru_cache(maxsize=4096)
def _layout(*fields: Any) -> Layout:
    """One object for equal layouts: steps compare hundreds of them."""
    return Layout(*fields)


def dense(name: str, dtype: str, shape: tuple[int, ...]) -> Buffer:
    """A buffer whose last axis is contiguous and whose others follow without gaps."""
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return Buffer(name, dtype, tuple(shape), strides)


@dataclass(frozen=True)
class Operand:
    """A place in a buffer; ``offset`` in bytes, a multiple of 16."""

    buffer: str
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        spec: kernel, shapes, constants and grid.
        operands: one for each argument of the spec, in its order. An absent optional argument may name any memory.
        expert: it reads expert weights, so a plan covers the step only if a registered group owns what it reads.
    """

    spec: KernelSpec
    operands: tuple[Operand, ...]
    expert: bool = False


@dataclass(frozen=True)
class Copy:
    """A copy on the device, of bytes as they lie.

    Its extent is a launch property: outside the key, compared at every step.

    Attributes:
        target, source: places that do not overlap.
        bytes: extent.
    """

    target: Operand
    source: Operand
    bytes: int


@dataclass(frozen=True, eq=False)
class LaunchList:
    """The launches of one step, in order, and the memory they name.

    Equal when the keys and the extents of copies are. ``key``, ``extents`` and ``specs`` are computed once.

    Raises:
        InvalidArgument: a name given twice or not at all, an operand past the end of its buffer, not aligned, of
            another dtype or with elements that do not lie as the kernel takes them, or another number of operands than
            the kernel's; a copy onto its own source; memory that a launch reads early (`KernelSpec.early`) and it or
            one before it writes; early reads where the first launch does not open.
    """

    buffers: tuple[Buffer, ...]
    launches: tuple[Launch | Copy, ...]

    def __post_init__(self) -> None:
        where, names = "LaunchList", [buffer.name for buffer in self.buffers]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise InvalidArgument("buffers", where=where, got=f"{twice} twice", wanted="every name once")
        for index, launch in enumerate(self.launches):
            if isinstance(launch, Copy):
                self._check_copy(f"{where}[{index}] (copy)", launch)
                continue
            arguments, where_launch = launch.spec.arguments, f"{where}[{index}] ({launch.spec.name})"
            if len(launch.operands) != len(arguments):
                got, wanted = len(launch.operands), len(arguments)
                raise InvalidArgument("operands", where=where_launch, got=got, wanted=wanted)
            for argument, place in zip(arguments, launch.operands, strict=True):
                self._check(f"{where_launch}: {argument.name}", place, argument_bytes(argument), argument)
        self._check_early(where)

    def _check_early(self, where: str) -> None:
        first = self.launches[0] if self.launches else None
        opened = not isinstance(first, Launch) or first.spec.opens or not first.spec.pdl
        written: dict[str, list[tuple[int, int, int]]] = {}
        for index, launch in enumerate(self.launches):
            for place, size in _written(launch):
                written.setdefault(place.buffer, []).append((place.offset, place.offset + size, index))
            for name, place, size in _read_early(launch):
                where_launch = f"{where}[{index}] ({self._name(index)}): {name}"
                if not opened:
                    wanted = "a list whose first launch opens the step, as this is read before a wait"
                    raise InvalidArgument("early read", where=where_launch, got=self._name(0), wanted=wanted)
                for begin, end, writer in written.get(place.buffer, ()):
                    if begin < place.offset + size and place.offset < end:
                        got = f"{place.buffer}, which launch {writer} ({self._name(writer)}) writes"
                        wanted = "memory that neither it nor a launch before writes"
                        raise InvalidArgument("early read", where=where_launch, got=got, wanted=wanted)

    def _name(self, index: int) -> str:
        launch = self.launches[index]
        return "copy" if isinstance(launch, Copy) else launch.spec.name

    def _check_copy(self, where: str, copy: Copy) -> None:
        target, source, size = copy.target, copy.source, copy.bytes
        for place in (target, source):
            self._check(where, place, size, None)
        if target.buffer == source.buffer and size > abs(target.offset - source.offset):
            got = f"{target.buffer}, bytes {target.offset} to {target.offset + size}"
            wanted = f"none of {source.offset} to {source.offset + size}, its source"
            raise InvalidArgument("target", where=where, got=got, wanted=wanted)

    def _check(self, where: str, place: Operand, size: int, argument: Argument | None) -> None:
        buffer = self.by_name.get(place.buffer)
        if buffer is None:
            raise InvalidArgument("buffer", where=where, got=place.buffer, wanted=one_of(place.buffer, self.by_name))
        if argument is not None and buffer.dtype not in (argument.dtype, RAW):
            raise InvalidArgument(f"dtype of {buffer.name}", where=where, got=buffer.dtype, wanted=argument.dtype)
        if place.offset < 0 or place.offset % ALIGNMENT:
            raise InvalidArgument("offset", where=where, got=place.offset, wanted=f"a multiple of {ALIGNMENT}")
        if size < 0 or place.offset + size > buffer.layout.bytes:
            got = f"bytes {place.offset} to {place.offset + size}"
            raise InvalidArgument("extent", where=where, got=got, wanted=f"within {buffer.layout.bytes}")
        if argument is not None and not buffer.contiguous:
            everything = buffer.layout.bytes // np.dtype(argument.dtype).itemsize
            if argument.shape != (everything,):
                got, side_by_side = list(buffer.strides), list(dense("", buffer.dtype, buffer.shape).strides)
                wanted = f"{side_by_side}, or an argument of one axis with all {everything}, gaps included"
                raise InvalidArgument(f"strides of {buffer.name}", where=where, got=got, wanted=wanted)

    @functools.cached_property
    def by_name(self) -> dict[str, Buffer]:
        """Buffers by name."""
        return {buffer.name: buffer for buffer in self.buffers}

    @functools.cached_property
    def order(self) -> dict[str, int]:
        """Places of the buffers, by name, in their order."""
        return {buffer.name: index for index, buffer in enumerate(self.buffers)}

    @functools.cached_property
    def key(self) -> str:
        """sha256 of buffers and launches; no address, no extent of a copy."""
        buffers = [(b.name, b.dtype, [*map(int, b.shape)], [*map(int, b.strides)]) for b in self.buffers]
        launches = [
            ("copy", _place(launch.target), _place(launch.source))
            if isinstance(launch, Copy)
            else (launch.spec.key, launch.expert, [_place(operand) for operand in launch.operands])
            for launch in self.launches
        ]
        # As one text: 500 launches are encoded in a tenth of the time, and repr of these types is unambiguous.
        return program_key("launch list", repr((buffers, launches)))

    @functools.cached_property
    def extents(self) -> tuple[int, ...]:
        """Bytes of each copy, in order."""
        return tuple(launch.bytes for launch in self.launches if isinstance(launch, Copy))

    def addresses(self, memory: Mapping[str, HasAddress]) -> list[tuple[int, ...]]:
        """Of every launch's operands, of a copy's target and source. ``memory``: what the buffers are bound to."""
        inside, takes = self._takes
        flat = [memory[name].address for name in self.order]
        flat += [flat[index] + offset for index, offset in inside]
        return [take(flat) for take in takes]

    @functools.cached_property
    def uses(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """Of each buffer, the operands that lie in it: launch, place among its operands, and offset."""
        found: dict[str, list[tuple[int, int, int]]] = {name: [] for name in self.order}
        for index, places in enumerate(self._places):
            for place, (name, offset) in enumerate(places):
                found[name].append((index, place, offset))
        return found

    @functools.cached_property
    def _places(self) -> tuple[tuple[tuple[str, int], ...], ...]:
        """Of each launch's operands, the buffer and the offset there."""
        return tuple(tuple([_place(operand) for operand in _operands(launch)]) for launch in self.launches)

    @functools.cached_property
    def _takes(self) -> tuple[tuple[tuple[int, int], ...], tuple[_Take, ...]]:
        """Each place inside a buffer once, as its index and an offset; and what takes a launch's addresses from those
        of the buffers followed by those of these places. Worked out once: a step may resolve thousands of operands.
        """
        at = {(name, 0): index for name, index in self.order.items()}
        takes = tuple([_take([at.setdefault(place, len(at)) for place in places]) for places in self._places])
        return tuple((self.order[name], offset) for name, offset in at if offset), takes

    @functools.cached_property
    def specs(self) -> tuple[KernelSpec, ...]:
        """Every kernel once, by key, in order of first use."""
        kernels = (launch.spec for launch in self.launches if isinstance(launch, Launch))
        return tuple({spec.key: spec for spec in kernels}.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LaunchList) and (self.key, self.extents) == (other.key, other.extents)

    def __hash__(self) -> int:
        return hash(self.key)


def argument_bytes(argument: Argument) -> int:
    """Bytes of a kernel's argument."""
    return math.prod(argument.shape) * np.dtype(argument.dtype).itemsize


def _read_early(launch: Launch | Copy) -> list[tuple[str, Operand, int]]:
    """What a launch may read before it waits for the one before: argument, place and bytes."""
    if isinstance(launch, Copy) or not launch.spec.pdl:
        return []
    arguments = zip(launch.spec.arguments, launch.operands, strict=True)
    return [(a.name, place, argument_bytes(a)) for a, place in arguments if a.name in launch.spec.early]


def _written(launch: Launch | Copy) -> list[tuple[Operand, int]]:
    """What a launch writes: places and bytes."""
    if isinstance(launch, Copy):
        return [(launch.target, launch.bytes)]
    arguments = zip(launch.spec.arguments, launch.operands, strict=True)
    return [(place, argument_bytes(a)) for a, place in arguments if a.role != "in"]


def _operands(launch: Launch | Copy) -> tuple[Operand, ...]:
    return (launch.target, launch.source) if isinstance(launch, Copy) else launch.operands


def _take(indices: list[int]) -> _Take:
    """What takes several entries of a list at once."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)


def _place(operand: Operand) -> tuple[str, int]:
    return operand.buffer, operator.index(operand.offset)
