"""The device memory of an engine, by name: allocated once, written and read on the engine's stream only.

All of it belongs to the engine. Weights are copied into it when it is made, so no array of the user is ever under a
graph, and new weights are written into the same storage, which keeps every captured graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Int32

from moe_jax.cache import Buffer, Resource, ResourceTable, Runtime, dense, next_serial
from moe_jax.cache.resources import Use

from .rows import row_block
from .step import OF_SEQUENCES, Geometry, Steps
from .weights import rotation_tables


class Memory:
    """Named memory of a runtime.

    Attributes:
        table: what launch lists are resolved by.
    """

    def __init__(self, runtime: Runtime, stream: Any):
        self.table = ResourceTable()
        self._runtime, self._stream = runtime, stream
        self._names: list[str] = []

    def place(self, buffer: Buffer, use: Use, values: np.ndarray | None = None) -> None:
        """Bind a buffer to new memory, holding ``values``, or nothing in particular."""
        resource = self._new(buffer, use)
        if values is not None:
            self._runtime.write(resource.address, values, self._stream)
        self.table.bind(buffer.name, resource)
        self._names.append(buffer.name)

    def move(self, name: str, values: np.ndarray) -> None:
        """Give a buffer new memory of the same layout: graphs that name the old one are destroyed, not replayed."""
        old = self._resource(name)
        resource = self._new(Buffer(name, *old.layout), old.use)
        self._runtime.write(resource.address, values, self._stream)
        self.table.replace(name, resource)

    def write(self, name: str, values: np.ndarray, offset: int = 0) -> None:
        """New contents in the same storage, after what was queued and before what will be; ``offset`` in bytes."""
        self._runtime.write(self._resource(name).address + offset, values, self._stream)

    def read(self, name: str) -> np.ndarray:
        """A copy, which no later step changes; waits for what was queued."""
        resource = self._resource(name)
        return self._runtime.read(resource.address, resource.layout.dtype, resource.layout.shape, self._stream)

    def release(self) -> None:
        """Let go of everything."""
        while self._names:
            self.table.release(self._names.pop())

    def _resource(self, name: str) -> Resource:
        resource = self.table.get(name)
        assert resource is not None
        return resource

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
    for name, array in weights.items():
        memory.place(dense(name, array.dtype.name, tuple(array.shape)), "weights", np.asarray(array))
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
