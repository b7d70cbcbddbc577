"""Run by a test of attention in a process where Triton interprets: what the first launch does with which keys, without
the keys. Numbers of a launch are cheap to interpret, so these cases are many and their tables may be long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from interpreting import run

from moe_jax.pallas_kernels.attention import Schedule, attention_specs, reference
from moe_jax.pallas_kernels.attention.triton import item_of, items_of, work_of
from moe_jax.pallas_kernels.spec import Argument, KernelSpec


def work_case(rng: np.random.Generator) -> tuple[dict[str, Any], np.ndarray]:
    """Arguments of `attention_specs`, and positions. About half of them are near where the rule turns."""
    kv_heads, share = int(rng.choice([1, 2, 3, 4, 8, 64])), int(rng.choice([1, 2, 4, 8]))
    rows_of_sequence = int(rng.choice([1, 1, 2, 4, 5]))
    rows = rows_of_sequence * int(rng.integers(1, 64 // rows_of_sequence + 1) if rng.random() < 0.5 else 1)
    schedule = Schedule(
        split=int(rng.choice([1, 2, 3])), stretch=int(rng.choice([1, 2, 3, 8, 16])),
        fill=int(rng.choice([1, 3, 7, 40, 132, 264])), at_once=int(rng.choice([1, 8, 32])),
    )  # fmt: skip
    page_size = int(rng.choice([1, 8, 64, 128, 1024]))
    # As many keys as there may be splits of, or a few stretches.
    keys = 64 * schedule.split * schedule.stretch * (schedule.fill if rng.random() < 0.5 else 3)
    max_pages = max(1, int(rng.integers(1, 2 * keys)) // page_size)
    given = {
        "rows": rows, "heads": kv_heads * share, "kv_heads": kv_heads, "dim": 16, "dtype": "bfloat16",
        "sequences": rows, "pages": 3, "page_size": page_size, "max_pages": max_pages,
        "rows_of_sequence": rows_of_sequence, "schedule": schedule,
        "window": None if rng.random() < 0.4 else int(rng.integers(1, 2 * keys)),
    }  # fmt: skip
    longest = max_pages * page_size
    position = rng.integers(0, longest + 3, rows)
    kind = rng.integers(4)
    if kind == 0:
        # Rows of one length: the rule is then about their number.
        position[:] = longest - 1
    elif kind == 1:
        # Of about the number of tiles at which there is a stretch for each program.
        position[:] = 64 * schedule.split * schedule.stretch * schedule.fill * 8 // (9 * kv_heads * rows)
        position += rng.integers(-70, 70, rows)
    position[rng.random(rows) < 0.2] = -1
    return given, np.maximum(position, -1).astype(np.int32)


def edge_cases() -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """One tile, program or head before and behind where the rule turns, in tables of as many keys as are seen; and as
    many splits as may be.
    """
    given: dict[str, Any] = {"dim": 16, "dtype": "bfloat16", "sequences": 4, "pages": 3, "page_size": 1}
    for split, stretch, fill, tiles in ((3, 3, 10, 9), (3, 3, 10, 10), (1, 3, 9, 2), (1, 3, 10, 2), (1, 3, 10, 4)):
        more = {"schedule": Schedule(split=split, stretch=stretch, fill=fill), "heads": 8, "kv_heads": 8}
        for keys in (64 * tiles - 63, 64 * tiles):
            yield given | more | {"rows": 1, "max_pages": keys}, np.array([keys - 1], np.int32)
            rows = {"rows": 2, "rows_of_sequence": 2, "window": 5, "max_pages": keys}
            yield given | more | rows, np.array([keys - 1, 4], np.int32)
    # Keys of 249 tiles from the last one of a split on, and three times keys on both sides of a split's end.
    of_groups = [[193, 251 * 64], [256, 256], [512, 512], [768, 768]]
    schedule = Schedule(split=4, stretch=8, fill=9)
    more = {"rows": 8, "rows_of_sequence": 2, "heads": 1, "kv_heads": 1, "window": 2, "max_pages": 260 * 64}
    yield given | more | {"schedule": schedule}, np.array(of_groups, np.int32).reshape(-1)


def extreme_cases() -> Iterator[tuple[dict[str, Any], np.ndarray]]:
    """The longest table that is not refused, with 64 rows and key heads."""
    given = {
        "heads": 64, "kv_heads": 64, "dim": 16, "dtype": "bfloat16", "sequences": 64, "pages": 3, "page_size": 1024,
        "max_pages": 46340,
    }  # fmt: skip
    for rows, rows_of_sequence, window in ((64, 1, None), (64, 32, None), (64, 1, 40_000_000), (1, 1, None)):
        position = np.full(rows, 46340 * 1024 - 1, np.int32)
        yield {"rows": rows, "rows_of_sequence": rows_of_sequence, "window": window, **given}, position


def work_by_rule(constants: dict[str, Any], position: np.ndarray) -> tuple[int, list[tuple[int, int]]]:
    """Tiles of a piece, and the first and last piece of each group that has any; in whole numbers without an end."""
    of_group = [[p for p in group if p >= 0] for group in position.reshape(-1, constants["GROUP_ROWS"]).tolist()]
    last = [min(max(group), constants["LONGEST"] - 1) for group in of_group if group]
    first = [min(*group, constants["LONGEST"] - 1) for group in of_group if group]
    window, tile = constants["WINDOW"], constants["TILE"]
    first = [max(low - window + 1, 0) if window else 0 for low in first]
    tiles = [high // tile - low // tile + 1 for low, high in zip(first, last, strict=True)]
    stretch = constants["SPLIT"] * constants["STRETCH"]
    # A program's share and an eighth of it.
    enough = 9 * sum(tiles) * constants["KV_HEADS"] >= 8 * min(max(tiles, default=0), stretch) * constants["FILL"]
    chosen = stretch if enough else constants["SPLIT"]
    span = chosen * tile
    return chosen, [(low // span, high // span) for low, high in zip(first, last, strict=True)]


@triton.jit
def work(
    position_ptr, groups_ptr, tiles_ptr, items_ptr,
    ROWS: tl.constexpr, GROUP_ROWS: tl.constexpr, GROUPS: tl.constexpr, KV_HEADS: tl.constexpr, LONGEST: tl.constexpr,
    WINDOW: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr, STRETCH: tl.constexpr, FILL: tl.constexpr,
    AT_ONCE: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    last, lows, first, end, tiles = work_of(
        position_ptr, ROWS, GROUP_ROWS, GROUPS, KV_HEADS, LONGEST, WINDOW, TILE, SPLIT, STRETCH, FILL
    )
    group = tl.arange(0, GROUPS)
    tl.store(groups_ptr + group * 2, first)
    tl.store(groups_ptr + group * 2 + 1, end)
    ends = items_of(end, tiles, GROUPS, KV_HEADS, AT_ONCE, FILL)
    items = tl.max(ends, 0) * KV_HEADS
    tl.store(tiles_ptr, tiles)
    tl.store(tiles_ptr + 1, items)
    from_item = tl.maximum(items - MOST, 0)
    for item in range(from_item, items):
        slot, kv_head, mine, _, tile, stop, _, _ = item_of(
            item, last, lows, first, end, ends, group, tiles, GROUPS, KV_HEADS, GROUPS, TILE
        )
        at = items_ptr + (item - from_item) * 5
        tl.store(at, slot)
        tl.store(at + 1, kv_head)
        tl.store(at + 2, mine)
        tl.store(at + 3, tile)
        tl.store(at + 4, stop)


def worked(constants: dict[str, Any], position: np.ndarray, most: int) -> dict[str, np.ndarray]:
    names = tuple(work.arg_names[4:-1])
    spec = KernelSpec(
        name="work", function=work,
        arguments=(
            Argument("position_ptr", "int32", position.shape, "in"),
            Argument("groups_ptr", "int32", (constants["GROUPS"], 2), "out"),
            Argument("tiles_ptr", "int32", (2,), "out"),
            Argument("items_ptr", "int32", (max(most, 1), 5), "out"),
        ),
        constexprs=(*((name, constants[name]) for name in names), ("MOST", most)),
        grid=(1, 1, 1), num_warps=4, num_stages=1, enable_fp_fusion=False, pdl=False,
    )  # fmt: skip
    return run(spec, np.random.default_rng(0), {"position_ptr": position})


def check(given: dict[str, Any], position: np.ndarray, *, refer: bool = False, most: int = 0) -> None:
    """Kind of pieces and slots of a launch.

    Args:
        refer: ask the reference as well.
        most: items that are looked at, the last ones.
    """
    first, _ = attention_specs(**given)
    constants, slots = dict(first.constexprs), first.arguments[-1].shape[0]
    tiles, pieces = work_by_rule(constants, position)
    made = worked(constants, position, most)
    total = sum(last - first + 1 for first, last in pieces)
    assert made["groups_ptr"][:, 1].max() == total <= slots // constants["GROUP_ROWS"]
    if not pieces:
        assert made["tiles_ptr"][1] == 0
        return
    assert made["tiles_ptr"][0] == tiles
    if refer:
        cut = tuple(constants["TILE"] * n for n in (1, constants["SPLIT"], constants["SPLIT"] * constants["STRETCH"]))
        near = jnp.minimum(position, constants["LONGEST"] - 1)
        more = given["kv_heads"], slots, constants["GROUP_ROWS"], cut, constants["FILL"]
        assert reference._pieces(near, given.get("window"), *more)[2] == tiles * constants["TILE"]
    if most:
        check_items(constants, position, tiles, pieces, made["items_ptr"].tolist(), int(made["tiles_ptr"][1]))


def check_items(
    constants: dict[str, Any], position: np.ndarray, tiles: int, pieces: list[tuple[int, int]],
    items: list[list[int]], number: int,
) -> None:  # fmt: skip
    """Each goes on where the one before it of its group and head ended, and ends with a piece or with the keys.

    Args:
        items: the last ones of ``number``.
    """
    there = [g for g, group in enumerate(position.reshape(-1, constants["GROUP_ROWS"])) if (group >= 0).any()]
    begins, ends, slot = {}, {}, 0
    for g, (first, last) in zip(there, pieces, strict=True):
        begins[g] = slot, first * tiles
        last_key = min(position.reshape(-1, constants["GROUP_ROWS"])[g].max(), constants["LONGEST"] - 1)
        ends[g] = last_key // constants["TILE"] + 1
        slot += last - first + 1
    seen: dict[tuple[int, int], int] = {}
    page = constants["PAGE"] // constants["TILE"]
    for slot, head, g, tile, stop in items[:number]:
        of_group, at = begins[g]
        assert (tile - at) % tiles == 0 and slot == of_group + (tile - at) // tiles
        assert 0 < stop - tile <= max(constants["AT_ONCE"], tiles) and (stop % tiles == 0 or stop == ends[g])
        assert tile == seen.get((g, head), at if number <= len(items) else tile)
        seen[g, head] = stop
        assert not page or (stop - 1) // page - tile // page < constants["ITEM_PAGES"]
    if number <= len(items):
        assert len(seen) == len(there) * constants["KV_HEADS"] and all(at == ends[g] for (g, _), at in seen.items())
    assert seen[there[-1], constants["KV_HEADS"] - 1] == ends[there[-1]]


@pytest.mark.parametrize("seed", range(4))
def test_pieces_are_those_of_the_rule_and_each_has_a_slot(seed):
    rng = np.random.default_rng(seed)
    for _ in range(50):
        check(*work_case(rng))


@pytest.mark.parametrize("case", list(edge_cases()), ids=lambda case: str(case[0]["max_pages"]))
def test_the_rule_turns_where_it_is_meant_to(case):
    check(*case, refer=True, most=8)


def test_every_piece_is_in_one_item():
    rng = np.random.default_rng(4)
    for _ in range(25):
        check(*work_case(rng), most=24)


@pytest.mark.parametrize("case", list(extreme_cases()), ids=lambda case: str(case[0]["rows"]))
def test_work_of_the_longest_tables(case):
    check(*case, refer=True, most=64)
