"""Run by test_prefill{,_mosaic}.py in a process of its own, where Triton interprets instead of compiling."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from arena import interpreted
from cases import ACTIVATIONS
from prefill_cases import ids_of, layer_in_f64, random_layer, relative, run_layer, run_plan, small_tile

from moe_jax.pallas_kernels.prefill import combine_spec, specs
from moe_jax.pallas_kernels.prefill.mosaic import blocks_spec
from moe_jax.pallas_kernels.prefill.mosaic_kernel import STEP, MosaicTile
from moe_jax.pallas_kernels.prefill.reference import plan_pairs
from moe_jax.pallas_kernels.route import Routing

BOUND = {"float16": 2e-3, "float32": 1e-5}


@pytest.mark.parametrize("alone", [True, False], ids=["one launch", "three launches"])
@pytest.mark.parametrize("experts", [1, 3, 5, 8, 60, 64, 128, 160, 256, 384])
def test_plan(experts, alone, monkeypatch):
    monkeypatch.setattr(specs, "_ALONE", 1 << 40 if alone else 0)
    rng = np.random.default_rng(experts)
    tokens, top_k, block = ((97, 3, 8), (300, 2, 40), (130, 4, 64))[experts % 3]
    slots = experts + 7
    ids, rows = ids_of(rng, tokens, top_k, experts), rng.permutation(slots)[:experts].astype(np.int32)
    wanted = plan_pairs(ids, rows if experts % 2 else None, experts, block)
    got = run_plan(interpreted, ids, experts, block, rows if experts % 2 else None, slots)
    assert len(specs.plan_specs(tokens, top_k, experts, block)) == (1 if alone else 3)
    for name, a, b in zip(wanted._fields, got, wanted, strict=True):
        np.testing.assert_array_equal(a, b, name)


@pytest.mark.parametrize("alone", [True, False], ids=["one launch", "three launches"])
@pytest.mark.parametrize("kind", ["one", "none"])
def test_plan_of_one_expert_and_of_none(kind, alone, monkeypatch):
    monkeypatch.setattr(specs, "_ALONE", 1 << 40 if alone else 0)
    check_plan(ids_of(np.random.default_rng(1), 333, 2, 6, kind), 6, 32)


@pytest.mark.parametrize("alone", [True, False], ids=["one launch", "three launches"])
@pytest.mark.parametrize("kind", ["random", "one", "none"])
def test_plan_in_several_steps(kind, alone, monkeypatch):
    """More pairs than a program counts at once, more chunks than the scan takes at once, more experts than parts of 32
    pairs are made for."""
    monkeypatch.setattr(specs, "_ALONE", 1 << 40 if alone else 0)
    monkeypatch.setattr(specs, "_COUNT", 256)
    monkeypatch.setattr(specs, "_SCAN", 2)
    rng = np.random.default_rng(2)
    for tokens, top_k, experts, block in ((433, 3, 5, 8), (181, 7, 520, 16)):
        check_plan(ids_of(rng, tokens, top_k, experts, kind), experts, block)


def check_plan(ids, experts, block):
    wanted = plan_pairs(ids, None, experts, block)
    for name, a, b in zip(wanted._fields, run_plan(interpreted, ids, experts, block), wanted, strict=True):
        np.testing.assert_array_equal(a, b, name)


@pytest.mark.parametrize("kind", ["random", "one", "none"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "share"), [(67, 3, 9, False), (67, 3, 9, True), (41, 17, 40, True), (5, 1, 1, False)]
)
@pytest.mark.parametrize("at_once", [8, 32, 128])
def test_table_of_blocks(tokens, top_k, experts, share, kind, at_once):
    rng, tile = np.random.default_rng(10), MosaicTile(rows=16, sizes=(16,), share=share)
    plan = plan_pairs(ids_of(rng, tokens, top_k, experts, kind), None, experts, STEP)
    spec = blocks_spec(tokens * top_k, experts, tile)
    (lines, _) = spec.outputs[0].shape
    constexprs = dict(spec.constexprs) | {"AT_ONCE": at_once}
    spec = dataclasses.replace(spec, constexprs=tuple(constexprs.items()), grid=(-(-lines // at_once), 1, 1))
    after = interpreted(
        spec, {"units_ptr": plan.blocks} | {a.name: np.full(a.shape, -7, a.dtype) for a in spec.outputs}
    )
    assert spec.reference is not None
    blocks, used = spec.reference(plan.blocks)
    count = int(used[0])
    assert after["used_ptr"][0] == count
    assert (count > 0) == (kind != "none")
    np.testing.assert_array_equal(after["blocks_ptr"][:count], np.asarray(blocks)[:count])
    assert (after["blocks_ptr"][count:] == -7).all(), "a line of no block was written"


def layer(seed, tokens, top_k, experts, hidden, inner, tile, *, dtype="float32", activation=0, **options):
    """Run a layer and compare it with f64; returns what `run_layer` does."""
    rng = np.random.default_rng(seed)
    act, kind = ACTIVATIONS[activation], options.pop("kind", "random")
    slots = options.pop("slots", None)
    x, routing, weights = random_layer(
        rng, tokens, top_k, slots or experts, hidden, inner, dtype, act, bias=options.pop("bias", False), kind=kind
    )
    rest = {}
    if slots is not None:
        routing = Routing(routing.weights, ids_of(rng, tokens, top_k, experts, kind))
        rest["weight_row"] = rng.permutation(slots)[:experts].astype(np.int32)
    if options.pop("residual", False):
        rest["residual"] = rng.standard_normal(x.shape, np.float32).astype(x.dtype)
    assert not options
    found = run_layer(interpreted, x, routing, weights, act, tile, **rest)
    exact = layer_in_f64(x, routing, weights, act, **rest)
    assert relative(found[0], exact) < BOUND[dtype]
    return found, routing


@pytest.mark.parametrize("activation", range(len(ACTIVATIONS)))
def test_every_activation_with_biases_slots_and_residual(activation):
    layer(activation, 65, 2, 5, 72, 40, small_tile(), activation=activation, bias=True, slots=7, residual=True)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "hidden", "inner"), [(65, 3, 8, 192, 72), (129, 2, 3, 72, 320), (257, 1, 2, 320, 72)]
)
def test_sizes_that_no_tile_divides(tokens, top_k, experts, hidden, inner, dtype):
    layer(tokens, tokens, top_k, experts, hidden, inner, small_tile(32, block_m=128), dtype=dtype)


@pytest.mark.parametrize(("main", "tail", "extend"), [(32, 16, True), (32, 16, False), (16, 16, True)])
@pytest.mark.parametrize("programs", [0, 3])
def test_blocks_of_every_filling(main, tail, extend, programs):
    """Experts with 0 to 49 pairs: tail alone, main alone, main and tail, several blocks."""
    tile = small_tile(main, tail, extend, programs=programs)
    counts = [0, 1, 15, 16, 17, 31, 32, 33, 47, 48, 49]
    ids = np.concatenate([np.full(n, e, np.int32) for e, n in enumerate(counts)])[:, None]
    rng = np.random.default_rng(3)
    ids = rng.permutation(ids)
    x, routing, weights = random_layer(rng, len(ids), 1, len(counts), 64, 72, "float32", ACTIVATIONS[0])
    routing = Routing(routing.weights, ids)
    out, _, plan = run_layer(interpreted, x, routing, weights, ACTIVATIONS[0], tile)
    assert plan.block_pair.shape[1] == (main + tail if extend else main)
    assert relative(out, layer_in_f64(x, routing, weights, ACTIVATIONS[0])) < BOUND["float32"]


def test_all_rows_on_one_expert():
    layer(4, 65, 2, 4, 72, 40, small_tile(), kind="one", residual=True)


def test_C03_rows_without_any_expert_are_exactly_zero():
    rng = np.random.default_rng(5)
    x, routing, weights = random_layer(rng, 65, 2, 4, 72, 40, "float32", ACTIVATIONS[0], kind="none")
    unread = Routing(np.full_like(routing.weights, np.nan), routing.ids)
    out, _, plan = run_layer(interpreted, x, unread, weights, ACTIVATIONS[0], small_tile())
    assert int(plan.used[0]) == 0
    assert not out.any()


def test_a_pair_does_not_depend_on_the_other_experts_of_a_launch():
    """Two waves of experts, and half of the rows, give each pair the bits of the whole launch."""
    rng, tile, act = np.random.default_rng(6), small_tile(), ACTIVATIONS[0]
    x, routing, weights = random_layer(rng, 70, 2, 6, 72, 40, "float32", act)
    _, whole, _ = run_layer(interpreted, x, routing, weights, act, tile)
    for wave in (routing.ids < 3, routing.ids >= 3):
        part = Routing(routing.weights, np.where(wave, routing.ids, -1).astype(np.int32))
        _, vectors, plan = run_layer(interpreted, x, part, weights, act, tile)
        np.testing.assert_array_equal(vectors[plan.place >= 0], whole[plan.place >= 0])
    half = Routing(routing.weights[35:], routing.ids[35:])
    _, vectors, _ = run_layer(interpreted, x[35:], half, weights, act, tile)
    np.testing.assert_array_equal(vectors, whole[35:])


@pytest.mark.parametrize("top_k", [3, 17])
def test_ranks_are_added_in_order_and_weights_of_absent_pairs_are_not_read(top_k):
    rng = np.random.default_rng(7)
    places = 8 * top_k
    spec = combine_spec(5, top_k, places, 72, dtype="float32", residual=True)
    place = rng.permutation(places)[: 5 * top_k].reshape(5, top_k).astype(np.int32)
    place[1], place[2, 1] = -1, -1
    given = {
        "pair_ptr": (rng.standard_normal((places, 72)) * 10.0 ** rng.integers(-4, 5, (places, 1))).astype(np.float32),
        "place_ptr": place,
        "scale_ptr": np.where(place < 0, np.nan, rng.random(place.shape)).astype(np.float32),
        "residual_ptr": rng.standard_normal((5, 72)).astype(np.float32),
    }
    out = interpreted(spec, given)["out_ptr"]
    total = np.zeros((5, 72), np.float32)
    for rank in range(top_k):
        there = place[:, rank] >= 0
        total[there] += given["scale_ptr"][there, rank, None] * given["pair_ptr"][place[there, rank]]
    np.testing.assert_array_equal(out, total + given["residual_ptr"])


def test_each_launch_agrees_with_its_reference():
    """Gate-up, down and the sum against the `reference` of their specs, on the kernels' own inputs."""
    seen = []

    def compared(spec, given):
        after = interpreted(spec, given)
        wanted = spec.reference(*(after[a.name] for a in spec.inputs))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for a, value in zip(spec.outputs, wanted, strict=True):
            got, value = after[a.name], np.asarray(value)
            written = np.ones(got.shape, bool) if got.dtype == np.int32 else ~np.isnan(got)
            np.testing.assert_allclose(got[written], value[written], rtol=1e-4, atol=1e-4, err_msg=spec.name)
        seen.append(spec.name)
        return after

    rng = np.random.default_rng(8)
    x, routing, weights = random_layer(rng, 66, 2, 5, 72, 40, "float32", ACTIVATIONS[3], bias=True)
    run_layer(compared, x, routing, weights, ACTIVATIONS[3], small_tile(), residual=x)
    assert seen == ["prefill_plan", "prefill_gate_up", "prefill_down", "prefill_combine"]


def test_the_order_of_programs_does_not_matter():
    rng, act = np.random.default_rng(9), ACTIVATIONS[0]
    x, routing, weights = random_layer(rng, 65, 2, 5, 72, 40, "float32", act)
    tile = small_tile()
    outs = [
        run_layer(interpreted, x, routing, weights, act, dataclasses.replace(tile, gate_up=part, down=part))[1]
        for part in (
            tile.gate_up,
            dataclasses.replace(tile.gate_up, group=1),
            dataclasses.replace(tile.gate_up, programs=2),
        )
    ]
    for other in outs[1:]:
        np.testing.assert_array_equal(other, outs[0])
