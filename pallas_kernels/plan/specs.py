"""The grouping kernel bound to shapes."""

from __future__ import annotations

from ..spec import Argument, KernelSpec
from .reference import plan_blocks


def block_count(tokens: int, top_k: int, experts: int, block_n: int) -> int:
    """Blocks that any routing of ``tokens * top_k`` pairs fits in, when blocks hold ``block_n`` pairs of one expert."""
    pairs = tokens * top_k
    return min(pairs, pairs // block_n + min(experts, pairs))


def plan_spec(
    tokens: int, top_k: int, experts: int, block_n: int, *, slots: int | None = None, pdl: bool = False
) -> KernelSpec:
    """Blocks of ``block_n`` pairs with one expert, from routed ids.

    Inputs: ``ids`` int32 ``[T, k]`` (-1 or E: none); ``weight_row`` int32 ``[E]``, the slot of each expert in the
    weight stacks. Outputs: ``used`` int32 ``[1]``, blocks that hold something; ``block_row`` int32 ``[N]``, where a
    block's expert stands in the weight stacks (-1: unused); ``block_pair`` int32 ``[N, block_n]``, ``row * k + rank``
    (-1: padding). Blocks go by ascending expert, pairs keep their order.

    Args:
        slots: rows of the weight stacks when experts live in slots; None: expert e is row e, ``weight_row`` is absent.
        pdl: launch while the kernel before still runs (sm_90).
    """
    from .triton import plan_blocks as kernel

    pairs, blocks = tokens * top_k, block_count(tokens, top_k, experts, block_n)
    return KernelSpec(
        name="plan",
        function=kernel,
        arguments=(
            Argument("ids_ptr", "int32", (tokens, top_k), "in"),
            Argument("weight_row_ptr", "int32", (1,) if slots is None else (experts,), "in"),
            Argument("used_ptr", "int32", (1,), "out"),
            Argument("block_row_ptr", "int32", (blocks,), "out"),
            Argument("block_pair_ptr", "int32", (blocks, block_n), "out"),
        ),
        constexprs=(
            ("PAIRS", pairs),
            ("PAIRS_POW2", power_of_two(pairs)),
            ("EXPERTS", experts),
            ("EXPERTS_POW2", power_of_two(experts)),
            ("INDIRECT", slots is not None),
            ("BLOCK_N", block_n),
            ("PDL", pdl),
        ),
        grid=(blocks, 1, 1),
        num_warps=4,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=pdl,
        reference=lambda ids, weight_row: plan_blocks(ids, None if slots is None else weight_row, experts, block_n),
    )


def power_of_two(n: int) -> int:
    """The least power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
