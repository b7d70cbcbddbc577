"""Sampling bound to shapes: three launches, over the logits, over those that may be kept, and over these with noise."""

from __future__ import annotations

from ..errors import InvalidArgument
from ..plan.specs import power_of_two
from ..spec import Argument, KernelSpec, Role
from .heuristics import MAX_ROWS, NUM_WARPS, Cut, cut_for
from .reference import sample as reference

DTYPES = ("float32", "bfloat16", "float16")
# Buffers of the kernels that hold f32; the others, but for the logits, hold int32.
FLOATS = frozenset(f"{name}_ptr" for name in ("temperature", "top_p", "mass", "top", "unit", "bound"))


def sample_specs(
    rows: int, vocabulary: int, *, dtype: str = "float32", cut: Cut | None = None, pdl: bool = False
) -> tuple[KernelSpec, KernelSpec, KernelSpec]:
    """One token for each row, as three launches.

    Inputs of the first: ``logits`` ``[T, V]``; ``position`` int32 ``[T]``, where the new token will stand, negative for
    a row that is not there; ``temperature`` f32 ``[T]``, 0 for the largest logit; ``top_k`` int32 ``[T]``, 0 for all;
    ``top_p`` f32 ``[T]``, 1 for all. Outputs: maxima of chunks and units, a bound of each row's kept logits, and where
    its token comes from.
    The second takes the logits and these. Outputs: length and tokens of each row's list.
    The third takes ``logits``, ``position``, ``sequence`` int32 ``[T]``, ``seed`` int32 ``[T, 2]``, high and low word,
    ``temperature``, ``top_k``, ``top_p``, and what the others gave. Output: ``token`` int32 ``[T]``, -1 for rows that
    are not there; its ``reference`` is that of all three. All parameters are device data, each row its own.

    What lies between the launches is written only where the next one reads it. All three have counters of rows as
    state.

    Args:
        dtype: of the logits, ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        cut: by default `cut_for`.
        pdl: launch while the kernel before still runs (sm_90).

    Raises:
        InvalidArgument: rows, dtype or vocabulary out of range.
    """
    where = "sample_specs"
    if not 1 <= rows <= MAX_ROWS:
        raise InvalidArgument("rows", where=where, got=rows, wanted=f"1 to {MAX_ROWS}")
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", where=where, got=dtype, wanted=", ".join(DTYPES))
    cut = cut or cut_for(rows, vocabulary)
    chunks, units, parts = (-(-vocabulary // size) for size in (cut.chunk, cut.unit, cut.part))
    if not 1 <= vocabulary <= 2**20:
        raise InvalidArgument("vocabulary", where=where, got=vocabulary, wanted=f"1 to {2**20}")
    from .triton import sample_draw, sample_gather, sample_scan

    sizes = {
        **{"seed_ptr": 2, "bound_ptr": 3, "way_ptr": 3, "list_ptr": cut.capacity, "unit_ptr": units},
        **{"top_ptr": chunks, "at_ptr": chunks, "mass_ptr": chunks, "noisy_ptr": cut.parts, "noisy_at_ptr": cut.parts},
    }

    def made(role: Role, *names: str) -> tuple[Argument, ...]:
        """Arguments of one element a row, or as many as `sizes` says."""
        found = []
        for name in (f"{name}_ptr" for name in names):
            shape = (rows, sizes[name]) if name in sizes else (rows,)
            found.append(Argument(name, "float32" if name in FLOATS else "int32", shape, role))
        return tuple(found)

    logits = Argument("logits_ptr", dtype, (rows, vocabulary), "in")
    parameters = made("in", "temperature", "top_k", "top_p")
    cuts = (
        ("UNIT_SIZE", cut.unit),
        ("UNITS", units),
        ("OF_PART", cut.part // cut.unit),
        ("PDL", pdl),
    )
    scan = KernelSpec(
        name="sample_scan",
        function=sample_scan,
        arguments=(
            logits,
            *(*made("in", "position"), *parameters, *made("state", "state")),
            *(*made("scratch", "at", "mass"), *made("out", "top", "unit", "bound", "way")),
        ),
        constexprs=(
            ("V", vocabulary),
            ("CHUNK", cut.chunk),
            ("CHUNKS", chunks),
            ("CHUNKS_POW2", power_of_two(chunks)),
            ("PARTS_POW2", power_of_two(parts)),
            *cuts,
        ),
        grid=(rows, chunks, 1),
        num_warps=cut.chunk_warps,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
    )
    gather = KernelSpec(
        name="sample_gather",
        function=sample_gather,
        arguments=(
            logits,
            *(*made("in", "unit", "bound", "way"), *made("state", "state"), *made("out", "found", "list")),
        ),
        constexprs=(("V", vocabulary), ("CAPACITY", cut.capacity), ("COUNT_BITS", vocabulary.bit_length()), *cuts),
        grid=(rows, parts, 1),
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
    )
    draw = KernelSpec(
        name="sample_draw",
        function=sample_draw,
        arguments=(
            logits,
            *(*made("in", "position", "sequence", "seed"), *parameters),
            *(*made("in", "top", "bound", "way", "found", "list"), *made("state", "state")),
            *(*made("scratch", "noisy", "noisy_at"), *made("out", "token")),
        ),
        constexprs=(
            ("V", vocabulary),
            ("CHUNK", cut.chunk),
            ("CHUNKS", chunks),
            ("CAPACITY", cut.capacity),
            ("PARTS", cut.parts),
            ("PARTS_POW2", power_of_two(cut.parts)),
            ("PDL", pdl),
        ),
        grid=(rows, cut.parts, 1),
        num_warps=NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        reference=lambda *given: reference(*given[:7]),
    )
    return scan, gather, draw
