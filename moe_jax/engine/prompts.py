"""Long prompts: one compiled JAX program reads all of a prompt, and its keys and values are copied into pages.

Launch lists read a prompt at most 64 rows at a time, and for each time nearly all weights; the program reads the
weights once. It is the model's own prefill, which stores rotated keys as `kv_append` does, and gives them laid out as
pages. There is one for each bucket of lengths, kept with the model's other programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array, Int32

from moe_jax.cache import Executables, Runtime, program_key
from moe_jax.generation import bucket
from moe_jax.models.kv import KV
from moe_jax.pallas_kernels.linear.heuristics import MAX_ROWS

from .memory import Memory
from .step import Geometry
from .weights import module_places

# Tokens of the shortest prompt that goes this way unless the user says otherwise: more is read of it than a chunk has
# rows. The last token is not read.
LONG = MAX_ROWS + 2


class Prompts:
    """Reads long prompts for one engine. Of its methods only `compile` may be called without the engine's lock.

    Args:
        geometry: of the engine.
        module: a decoder, whose structure is compiled; its arrays are not kept.
        memory: where the weights come from, each time, and the pages are.
        runtime, stream: the engine's.
        executables: where programs are kept.
        least: tokens of the shortest prompt that is a long one; None: none is.
    """

    def __init__(
        self,
        geometry: Geometry,
        module: nnx.Module,
        memory: Memory,
        runtime: Runtime,
        stream: Any,
        executables: Executables,
        least: int | None,
    ):
        self._geometry, self._memory, self._runtime, self._stream = geometry, memory, runtime, stream
        self._executables, self._least = executables, least
        self._structure = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), nnx.split(module))
        device = runtime.device
        on = None if device is None else SingleDeviceSharding(device)
        self._arrays = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=on) for name, dtype, shape in geometry.weights
        }
        self._key = program_key("engine prompt", jax.__version__, device, geometry.weights, geometry.page_size)
        # Capsules of results whose copies are not known to be done.
        self._kept: list[Any] = []

    def takes(self, length: int) -> bool:
        """Whether a prompt of so many tokens is read here."""
        return self._least is not None and length > 1 and length >= self._least

    def compile(self, length: int) -> None:
        """Have the program for prompts of so many tokens compiled, if they are read here and it is not there yet."""
        if self.takes(length):
            self._program(length - 1)

    def read(self, tokens: Items[int], pages: Items[int]) -> None:
        """Store keys and values of all tokens but the last in a sequence's first pages; waits until they are there.

        What the last of these pages holds behind the tokens becomes zeros.

        Raises:
            CudaError: the runtime refused; pages may hold anything.
        """
        count, runtime = len(tokens) - 1, self._runtime
        ids = np.zeros((1, self._bucket(count)), np.int32)
        ids[0, :count] = tokens[:-1]
        layers = self._program(count)(self._memory.weights(), ids, np.asarray([count], np.int32))
        used = pages[: -(-count // self._geometry.page_size)]
        for layer, kv in enumerate(layers):
            for name, values in zip(("k_pages", "v_pages"), kv, strict=True):
                resource = self._memory.table.get(f"{layer}.{name}")
                assert resource is not None
                # Computed when its address is there; kept until the stream has read it, whatever fails meanwhile.
                source, capsule = runtime.hold(values)
                self._kept.append(capsule)
                size = resource.layout.bytes // self._geometry.pages
                for first, number in _runs(used):
                    target = resource.address + used[first] * size
                    runtime.copy(target, source + first * size, number * size, self._stream)
        runtime.wait(runtime.record_event(self._stream))
        self._kept.clear()

    def release(self) -> None:
        """Let go of everything; the stream's work is done."""
        self._kept.clear()

    def _bucket(self, count: int) -> int:
        return bucket(count, self._geometry.max_tokens)

    def _program(self, count: int) -> Any:
        size, length = self._geometry.page_size, self._bucket(count)

        def run(
            arrays: Mapping[str, Array], tokens: Int32[Array, "1 T"], lengths: Int32[Array, " 1"]
        ) -> list[tuple[Array, Array]]:
            module = nnx.merge(*self._structure)
            for name, place in module_places(module).items():
                setattr(*place, arrays[name])
            _, cache = module.prefill(tokens, lengths, -(-length // size) * size)
            return [_paged(kv, size) for kv in cache]

        key = program_key(self._key, length)
        given = (self._arrays, np.zeros((1, length), np.int32), np.zeros(1, np.int32))
        parts = {"program": "engine prompt", "tokens": str(length), "page_size": str(size)}
        return self._executables.get_or_compile(key, run, given, command_buffers=False, parts=parts)


def _paged(kv: KV, page_size: int) -> tuple[Array, Array]:
    """The only row of a layer's storage as pages, ``[pages, kv_heads, page_size, D]`` both."""
    keys, values = (jnp.swapaxes(x.reshape(-1, page_size, *x.shape[2:]), 1, 2) for x in kv)
    return keys, values


def _runs(pages: Items[int]) -> Iterator[tuple[int, int]]:
    """Pages that follow each other in the pool: index of the first and how many, for each run."""
    start = 0
    for index in range(1, len(pages) + 1):
        if index == len(pages) or pages[index] != pages[index - 1] + 1:
            yield start, index - start
            start = index
