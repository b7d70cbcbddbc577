"""Shapes, routings and floors: what a cell of the bench must read and multiply at least. Touches no device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from moe_jax.errors import InvalidArgument

BYTES = 2  # of a bfloat16, the dtype of everything measured here


class Shape(NamedTuple):
    """Sizes of an expert layer: hidden H, intermediate I, experts E and experts per row k."""

    hidden: int
    inner: int
    experts: int
    top_k: int

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's gate, up and down matrices."""
        return 3 * self.hidden * self.inner * BYTES


class Ceilings(NamedTuple):
    """Rates measured on the device: streaming read in TB/s, bf16 matmul of 8192 cubed in TFLOP/s."""

    read_tbs: float
    matmul_tflops: float


# The last is what one of four devices holds of DeepSeek-V3's 256 experts.
NAMED = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "olmoe-1b-7b": Shape(2048, 1024, 64, 8),
    "deepseek-v3-ep4": Shape(7168, 2048, 64, 8),
}
ROWS = (1, 4, 16, 64, 256, 4096)
MORE_ROWS = {"deepseek-v3-ep4": (16384,)}
MOST_ROWS = 131072


def parse_shape(text: str) -> Shape:
    """A name of `NAMED`, or ``"H,I,E,K"``.

    Raises:
        InvalidArgument: neither.
    """
    if text in NAMED:
        return NAMED[text]
    wanted = f"{', '.join(NAMED)}, or four positive numbers H,I,E,K with K at most E"
    numbers = _numbers(text)
    if numbers is None or len(numbers) != 4 or numbers[3] > numbers[2]:
        raise InvalidArgument("shape", where="--shape", got=repr(text), wanted=wanted)
    return Shape(*numbers)


def parse_rows(text: str) -> tuple[int, ...]:
    """``"1,4,16"`` as numbers, ascending, each once.

    Raises:
        InvalidArgument: no such list, or more rows than `MOST_ROWS`.
    """
    numbers = _numbers(text)
    if numbers is None or max(numbers) > MOST_ROWS:
        raise InvalidArgument(
            "rows", where="--rows", got=repr(text), wanted=f"numbers from 1 to {MOST_ROWS} with commas between"
        )
    return tuple(sorted(set(numbers)))


def _numbers(text: str) -> list[int] | None:
    parts = [part.strip() for part in text.split(",")]
    numbers = [int(part) for part in parts if part.isascii() and part.isdigit()]
    return numbers if len(numbers) == len(parts) and all(n > 0 for n in numbers) else None


def name_of(shape: Shape) -> str:
    """The name of a shape, else its numbers."""
    return next((name for name, named in NAMED.items() if named == shape), ",".join(map(str, shape)))


def default_rows(shape: Shape) -> tuple[int, ...]:
    """Row counts that are measured when none are asked for."""
    return ROWS + MORE_ROWS.get(name_of(shape), ())


def routing(
    rng: np.random.Generator, tokens: int, shape: Shape
) -> tuple[Int32[np.ndarray, "T k"], Float32[np.ndarray, "T k"]]:
    """Ids and weights of rows that choose k distinct experts uniformly; a row's weights add up to 1."""
    ids = np.argsort(rng.random((tokens, shape.experts)), axis=1)[:, : shape.top_k].astype(np.int32)
    weights = rng.random((tokens, shape.top_k)).astype(np.float32) + np.float32(0.1)
    return ids, weights / weights.sum(1, keepdims=True)


def distinct(ids: Int32[np.ndarray, "T k"], experts: int) -> int:
    """Experts that a routing names; -1 and E name none."""
    return len(np.unique(ids[(ids >= 0) & (ids < experts)]))


def flops(shape: Shape, tokens: int) -> int:
    """Multiplications and additions of the three matmuls."""
    return 2 * 3 * tokens * shape.top_k * shape.hidden * shape.inner


def floor_us(shape: Shape, ids: Int32[np.ndarray, "T k"], ceilings: Ceilings) -> float:
    """Least microseconds of a layer: its distinct experts' bytes at the read rate, or its flops at the matmul's."""
    reading = distinct(ids, shape.experts) * shape.expert_bytes / (ceilings.read_tbs * 1e6)
    return max(reading, flops(shape, len(ids)) / (ceilings.matmul_tflops * 1e6))


def mean_floor_us(shape: Shape, routings: Iterable[Int32[np.ndarray, "T k"]], ceilings: Ceilings) -> float:
    """`floor_us` averaged over the routings of a chain."""
    return float(np.mean([floor_us(shape, ids, ceilings) for ids in routings]))
