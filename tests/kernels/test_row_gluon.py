"""The kernel for one row: its text run on NumPy (see `gluon_numpy` for what that shows), and which rows go to it."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS, buffers, routing

pytest.importorskip("triton")

from gluon_numpy import row_text, run_row

from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.experts import Tile, expert_ffn_spec, tile_for
from moe_jax.pallas_kernels.experts.heuristics import row_refusal


def tile(ring, ahead):
    return Tile(
        block_m=64, block_k=128, num_warps=4, block_n=8, num_stages=3, lag=2, programs=5, backoff=0, spread=3,
        ring=ring, ahead=ahead,
    )  # fmt: skip


def run(spec, rng, ids, scale, **options):
    made = buffers(spec, rng, ids, scale)
    run_row(spec, made, **options)
    assert not made["state_ptr"].any()
    return made


def agrees(spec, made):
    assert spec.name == "expert_ffn_row"
    wanted = np.asarray(spec.reference(*(jnp.asarray(made[a.name]) for a in spec.inputs)), np.float32)
    bound = (2e-2 if spec.outputs[0].dtype == "bfloat16" else 3e-3) * np.abs(wanted).max()
    np.testing.assert_allclose(made["out_ptr"].astype(np.float32), wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.name}-{a.layout}-{a.limit_after}")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_activation_with_biases_slots_and_residual(activation, dtype):
    rng = np.random.default_rng(1)
    ids, scale = routing(rng, 1, 6, 5)
    spec = expert_ffn_spec(
        1, 5, 6, 192, 192, dtype=dtype, activation=activation, slots=9, gate_up_bias=True, down_bias=True,
        residual=True, tile=tile(3, 1),
    )  # fmt: skip
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.parametrize(
    ("k", "inner"),
    [(5, 64), (6, 192), *(pytest.param(*size, marks=pytest.mark.slow) for size in ((7, 768), (8, 1536))), (8, 768)],
)
def test_sizes_that_it_is_for(k, inner):
    rng = np.random.default_rng(2)
    ids, scale = routing(rng, 1, 9, k)
    spec = expert_ffn_spec(1, k, 9, 1536, inner, dtype="float16", activation=ACTIVATIONS[0])
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.slow
@pytest.mark.parametrize("inner", [64, 192, 640])
@pytest.mark.parametrize("ring", range(2, 10))
def test_every_ring(ring, inner):
    """Fewer steps of the down product than places, or than are asked for ahead; and more."""
    rng = np.random.default_rng(3)
    ids, scale = routing(rng, 1, 7, 5)
    hidden = 64 * (ring + inner // 64 % 2)
    for ahead in range(ring) if inner < 640 else {0, ring // 2, ring - 1}:
        spec = expert_ffn_spec(
            1, 5, 7, hidden, inner, dtype="float16", activation=ACTIVATIONS[0], tile=tile(ring, ahead)
        )
        agrees(spec, run(spec, rng, ids, scale, seed=ahead))


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("activation", [ACTIVATIONS[1], ACTIVATIONS[6]], ids=lambda a: a.name)
def test_more_tiles_than_programs(k, activation):
    rng = np.random.default_rng(4)
    ids, scale = routing(rng, 1, 9, k)
    spec = expert_ffn_spec(1, k, 9, 128, 448, dtype="float16", activation=activation, tile=tile(2, 1))
    lines = dict(spec.constexprs)["GATE_LINES"]
    assert k == 1 or k * -(-activation.rows(448) // lines) > spec.grid[0]
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.parametrize("slots", [None, 11])
@pytest.mark.parametrize("ids", [[-1, 3, 8, 0, 7], [7, 2, -5, 1, 8], [3, -1, -1, -1, -1], [-1, -1, -5, 8, 9]], ids=str)
def test_without_some_of_its_experts(ids, slots):
    rng = np.random.default_rng(5)
    _, scale = routing(rng, 1, 8, 5)
    scale[0, [i not in range(8) for i in ids]] = np.nan
    spec = expert_ffn_spec(
        1, 5, 8, 192, 128, dtype="float16", activation=ACTIVATIONS[0], slots=slots, gate_up_bias=True, down_bias=True,
        residual=True, tile=tile(3, 2),
    )  # fmt: skip
    for resident in (1, 12):
        made = run(spec, rng, np.array([ids], np.int32), scale, resident=resident)
        agrees(spec, made)
    if not set(ids) & set(range(8)):
        np.testing.assert_array_equal(made["out_ptr"], made["residual_ptr"])


def test_an_expert_twice_in_a_row_counts_twice():
    rng = np.random.default_rng(6)
    ids, scale = np.array([[2, 2, 1, 2, 1]], np.int32), np.ones((1, 5), np.float32)
    spec = expert_ffn_spec(1, 5, 4, 128, 128, dtype="float16", activation=ACTIVATIONS[0], tile=tile(2, 1))
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.parametrize("resident", [1, 2, 5, 12])
def test_whoever_runs_when_the_bits_are_the_same_launch_after_launch(resident):
    """Programs that are not resident hold no tile that others wait for; no launch needs its state reset."""
    rng = np.random.default_rng(7)
    spec = expert_ffn_spec(1, 6, 9, 192, 256, dtype="float16", activation=ACTIVATIONS[0], tile=tile(3, 2))
    made = buffers(spec, rng, *routing(rng, 1, 9, 6))
    for seed in range(4):
        made["x_ptr"][:] = rng.standard_normal(made["x_ptr"].shape)
        made["ids_ptr"], made["scale_ptr"] = routing(rng, 1, 9, 6)
        made["out_ptr"][:] = np.nan
        run_row(spec, made, resident=resident, seed=seed)
        assert not made["state_ptr"].any()
        agrees(spec, made)
        alone = made | {"state_ptr": np.zeros_like(made["state_ptr"]), "out_ptr": np.zeros_like(made["out_ptr"])}
        run_row(spec, alone, resident=1)
        np.testing.assert_array_equal(made["out_ptr"], alone["out_ptr"])


def faulty(text, ids, resident):
    """A launch of a changed text."""
    rng = np.random.default_rng(8)
    spec = expert_ffn_spec(
        1, 5, 9, 320, 320, dtype="float16", activation=ACTIVATIONS[0], residual=True, tile=tile(4, 2)
    )
    agrees(spec, run(spec, rng, np.array([ids], np.int32), routing(rng, 1, 9, 5)[1], resident=resident, text=text))


ROUTES = (([4, 2, 0, 8, 7], 20), ([3, -1, 5, 1, 9], 20), ([4, 2, 0, 8, 7], 3))
FAULTS = {
    "a gate-up step too early": ("wait_group(FLYING - 1)\n                t", "wait_group(FLYING)\n                t"),
    "a down step asked for ahead too early": ("2 * FLYING - 1 - EARLY", "2 * FLYING - EARLY"),
    "a later down step too early": ("wait_group(FLYING - 1)\n        t", "wait_group(FLYING)\n        t"),
    "a copy into the place of the running step": ("(first + step + FLYING) % RING", "(first + step) % RING"),
    "a gate-up copy into the place of the running step": ("following % RING", "step % RING"),
    "the down product begins at another place": ("first = GATE_STEPS % RING", "first = 0"),
    "two products outstanding": ("num_outstanding=1", "num_outstanding=2"),
    "no fence": ("    fence_async_shared()\n", ""),
    "an end that is not waited for": ("num_outstanding=0", "num_outstanding=1"),
    "no look whether words are there": ("missing = gl.max(", "missing = 0 * gl.max("),
    "words of an absent expert left out": ("thread * 0 + THERE", "thread * 0"),
    "words not put back": ("thread) == PROGRAMS - 1", "thread) == PROGRAMS"),
    "words put back by the first": ("thread) == PROGRAMS - 1", "thread) == 0"),
    "claims not put back": ("item == TILES + PROGRAMS - 1", "item == TILES + PROGRAMS"),
    "claims put back too early": ("item == TILES + PROGRAMS - 1", "item == TILES + PROGRAMS - 2"),
    "another pair's column": ("own[:, None] == rank[None, :]", "own[:, None] <= rank[None, :]"),
    "an absent expert's lines": ("(own_row >= 0)[:, None] & (own", "(own >= 0)[:, None] & (own"),
    "tiles by the program's number": ("item = _before(added, thread)\n    w", "item = gl.program_id(0) + 0\n    w"),
}


@pytest.mark.parametrize(("ids", "resident"), ROUTES)
def test_without_a_fault_nothing_is_seen(ids, resident):
    faulty(row_text(), ids, resident)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_text_is_seen(fault):
    old, new = FAULTS[fault]
    text = row_text()
    assert old in text
    errors = []
    for ids, resident in ROUTES:
        try:
            faulty(text.replace(old, new), ids, resident)
        except (AssertionError, AttributeError) as error:
            errors.append(str(error))
    kinds = r"Not equal|all programs wait|nobody waited|a product may miss|'Product' object|^assert not"
    assert errors and all(re.search(kinds, error) for error in errors), errors


@pytest.mark.parametrize(
    ("change", "sizes", "dtype", "wanted"),
    [
        ({}, (2, 5, 9, 128, 64), "float16", "got 2 rows, wanted 0, or one row"),
        ({}, (1, 9, 12, 128, 64), "float16", "got 9 experts a row, wanted 0, or at most 8"),
        ({}, (1, 5, 9, 128, 64), "float32", "got float32, I=64, wanted 0, or 16 bits and I up to 1536"),
        ({}, (1, 5, 9, 128, 1600), "bfloat16", "got bfloat16, I=1600, wanted 0, or 16 bits and I up to 1536"),
        ({}, (1, 5, 9, 160, 64), "float16", "got H=160, I=64, wanted 0, or H and I multiples of 64"),
        ({}, (1, 5, 9, 128, 96), "float16", "got H=128, I=96, wanted 0, or H and I multiples of 64"),
        ({"block_m": 32}, (1, 5, 9, 128, 64), "float16", "got 32 rows by 4 warps, wanted 0, or 16 rows a warp"),
        ({"num_warps": 8}, (1, 5, 9, 128, 64), "float16", "got 64 rows by 8 warps, wanted 0, or 16 rows a warp"),
        ({"ring": 1, "ahead": 0}, (1, 5, 9, 128, 64), "float16", "got 1, wanted 0, or 2 to 2, the steps of H"),
        ({"ring": -2}, (1, 5, 9, 128, 64), "float16", "got -2, wanted 0, or 2 to 2, the steps of H"),
        ({"ring": 4}, (1, 5, 9, 192, 64), "float16", "got 4, wanted 0, or 2 to 3, the steps of H"),
        ({"ahead": 2}, (1, 5, 9, 128, 64), "float16", "got ring=2, ahead=2, wanted ahead of less than ring"),
        ({"ahead": -1}, (1, 5, 9, 128, 64), "float16", "got ring=2, ahead=-1, wanted ahead of less than ring"),
    ],
)
def test_what_it_does_not_take_is_refused(change, sizes, dtype, wanted):
    given = dataclasses.replace(tile(2, 1), **change)
    with pytest.raises(InvalidArgument, match=re.escape(wanted)) as caught:
        expert_ffn_spec(*sizes, dtype=dtype, activation=ACTIVATIONS[0], tile=given)
    assert "tile.ring" in str(caught.value)


@pytest.mark.parametrize("hidden", [1536, 2048, 2112])
@pytest.mark.parametrize("inner", [64, 768, 1536])
@pytest.mark.parametrize("k", [5, 8])
def test_a_row_goes_to_it_on_a_device_of_capability_9(k, hidden, inner):
    assert row_refusal(k, hidden, inner) is None
    sizes = k, 16, hidden, inner
    chosen = {c: tile_for(1, *sizes, "bfloat16", capability=c) for c in (80, 89, 90, 100, 120)}
    assert [c for c, one in chosen.items() if one.ring] == [90]
    assert dataclasses.replace(chosen[90], ring=0, ahead=0) == chosen[80]
    assert not tile_for(2, *sizes, "bfloat16").ring and not tile_for(1, *sizes, "float32").ring
    assert expert_ffn_spec(1, *sizes, dtype="bfloat16", activation=ACTIVATIONS[0]).name == "expert_ffn_row"


@pytest.mark.parametrize(
    ("k", "hidden", "inner", "why"),
    [
        (4, 2048, 768, "4 experts a row: it has a warp for each of 8"),
        (9, 2048, 768, "9 experts a row: it has a warp for each of 8"),
        (8, 2000, 768, "H=2000 and I=768: it takes multiples of 64"),
        (8, 2048, 760, "H=2048 and I=760: it takes multiples of 64"),
        (8, 1472, 768, "H=1472: 92 programs, a 9.0 has 132 multiprocessors"),
        (8, 2176, 768, "H=2176: 136 programs, a 9.0 has 132 multiprocessors"),
        (8, 2048, 1600, "I=1600: activations of at most 1536 fit beside the weights"),
    ],
)
def test_why_a_row_does_not_go_to_it(k, hidden, inner, why):
    assert row_refusal(k, hidden, inner) == why
    assert not tile_for(1, k, 16, hidden, inner, "bfloat16").ring
    assert expert_ffn_spec(1, k, 16, hidden, inner, dtype="bfloat16", activation=ACTIVATIONS[0]).name == "expert_ffn"
