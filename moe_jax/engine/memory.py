"""The device memory of an engine, by name: written and read on the engine's stream only.

All of it but the weights belongs to the engine and is allocated once. Weights are *held*: JAX arrays where they stand,
kept by their capsules whatever happens to the arrays; new ones take their places, and graphs that name the old ones are
destroyed. Or they are *owned*: copies, made on the device, which new values are written into, and graphs stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Int32

from moe_jax.cache import Buffer, Resource, ResourceTable, Runtime, dense, next_serial
from moe_jax.cache.resources import Use
from moe_jax.cache.runtime import Reading
from moe_jax.errors import InvalidArgument

from .rows import row_block
from .step import OF_SEQUENCES, Geometry, Steps
from .weights import rotation_tables

Weights = Literal["held", "owned"]
WEIGHTS: tuple[Weights, ...] = ("held", "owned")


class Memory:
    """Named memory of a runtime.

    Args:
        weights: ``"held"`` or ``"owned"``, as the module says.

    Attributes:
        table: what launch lists are resolved by.
    """

    def __init__(self, runtime: Runtime, stream: Any, weights: Weights = "held"):
        self.table = ResourceTable()
        self._runtime, self._stream, self._owned = runtime, stream, weights == "owned"
        self._arrays: dict[str, Array] = {}
        # Capsules of arrays whose copies are not known to be done.
        self._copied: list[Any] = []

    def place(self, buffer: Buffer, use: Use, values: np.ndarray | None = None) -> None:
        """Bind a buffer to new memory, holding ``values``, or nothing in particular."""
        resource = self._new(buffer, use)
        self.table.bind(buffer.name, resource)  # first: it stays until nothing that is queued writes there
        if values is not None:
            self._runtime.write(resource.address, values, self._stream)

    def bind_weights(self, arrays: Mapping[str, Array]) -> None:
        """Bind names to arrays, or to copies of them, in place of what they had; all or, on an error, none.

        Raises:
            InvalidArgument: an array that cannot be held, by its name.
        """
        if self._owned:
            device = self._runtime.device or jax.local_devices()[0]
            arrays = {name: jax.device_put(array, device, may_alias=False) for name, array in arrays.items()}
        held = {name: self._held(name, array) for name, array in arrays.items()}
        # Of the engine's own, on the same memory: an array that the user has deleted serves no program any more.
        self._arrays |= {name: jax.dlpack.from_dlpack(array) for name, array in arrays.items()}
        for name, resource in held.items():
            if self.table.get(name) is None:
                self.table.bind(name, resource)
            else:
                self.table.replace(name, resource)

    def update_weights(self, arrays: Mapping[str, Any]) -> None:
        """New weights of the same shapes, for the steps that are queued from now on; waits for copies.

        Raises:
            InvalidArgument: an array that cannot be held, by its name; nothing has changed.
            CudaError: owned ones may have been written in part.
        """
        if not self._owned:
            self.bind_weights(arrays)
            return
        sources = {name: self._source(name, array) for name, array in arrays.items()}
        for name, source in sources.items():
            if isinstance(source, Resource):
                self._copied.append(source.capsule)
                self._runtime.copy(self._resource(name).address, source.address, source.layout.bytes, self._stream)
            else:
                self.write(name, source)
        self._runtime.synchronize(self._stream)
        self._copied.clear()

    def weights(self) -> dict[str, Array | np.ndarray]:
        """What steps read at present, by name, for compiled programs: without a copy, but for a simulated device.

        Not to be read on the host: JAX remembers what it read there, and owned weights change in place.
        """
        return {name: self.read(name) if self._runtime.simulated else array for name, array in self._arrays.items()}

    def write(self, name: str, values: np.ndarray, offset: int = 0) -> None:
        """New contents in the same storage, after what was queued and before what will be; ``offset`` in bytes."""
        self._runtime.write(self._resource(name).address + offset, values, self._stream)

    def read(self, name: str, rows: int | None = None) -> np.ndarray:
        """A copy, which no later step changes, of all or of the first ``rows``; waits for what was queued."""
        resource = self._resource(name)
        shape = resource.layout.shape if rows is None else (rows, *resource.layout.shape[1:])
        return self._runtime.read(resource.address, resource.layout.dtype, shape, self._stream)

    def queue_read(self, name: str, rows: int, reading: Reading | None = None) -> Reading:
        """Ask for the first ``rows`` as they are when what was queued until now is done; see `Runtime.queue_read`."""
        resource = self._resource(name)
        shape = (rows, *resource.layout.shape[1:])
        return self._runtime.queue_read(resource.address, resource.layout.dtype, shape, self._stream, reading)

    def finish_read(self, reading: Reading) -> np.ndarray:
        """What was asked for, when it is there; what was queued behind is not waited for."""
        return self._runtime.finish_read(reading)

    def release(self) -> None:
        """Let go of everything; the stream's work is done."""
        self._copied.clear()
        self._arrays.clear()
        for name in list(self.table.snapshot()[1]):
            self.table.release(name)

    def _resource(self, name: str) -> Resource:
        resource = self.table.get(name)
        assert resource is not None
        return resource

    def _held(self, name: str, array: Array) -> Resource:
        address, capsule = self._runtime.hold(array, name)
        layout = dense(name, array.dtype.name, tuple(array.shape)).layout
        return Resource(
            address=address, bytes=layout.bytes, layout=layout, serial=next_serial(), use="weights", capsule=capsule
        )

    def _source(self, name: str, array: Any) -> Resource | np.ndarray:
        """Where the device can copy from; or values on the host, of an array that is not on this device alone."""
        try:
            return self._held(name, array)
        except InvalidArgument:
            return np.asarray(array)

    def _new(self, buffer: Buffer, use: Use) -> Resource:
        size = max(buffer.layout.bytes, 1)
        address, capsule = self._runtime.allocate(size)
        return Resource(
            address=address, bytes=size, layout=buffer.layout, serial=next_serial(), use=use, capsule=capsule
        )


def place_all(
    memory: Memory, geometry: Geometry, steps: Steps, weights: Mapping[str, Any], stop: Int32[np.ndarray, " stops"]
) -> None:
    """Bind all memory of an engine. What a step reads before it writes it begins as it must; the rest is left unset."""
    g = geometry
    memory.bind_weights(weights)
    for name, values in zip(("cos", "sin"), rotation_tables(g.config, g.max_tokens), strict=True):
        memory.place(dense(name, "float32", values.shape), "weights", values)
    zeros = dense("zeros", g.dtype, (g.config.hidden_size,))
    memory.place(zeros, "weights", np.zeros(zeros.shape, zeros.dtype))
    contents = {"table": np.full((g.max_sequences, g.max_pages), -1, np.int32), "stop": stop, "rows": row_block(g, [])}
    for buffer in steps.state:
        if buffer.name in ("counters", "tokens", *OF_SEQUENCES):
            contents[buffer.name] = np.zeros(buffer.shape, buffer.dtype)
        memory.place(buffer, "arena", contents.get(buffer.name))
    memory.place(dense("scratch", "uint8", (steps.scratch,)), "arena")
