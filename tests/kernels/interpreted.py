"""Run by test_interpreter.py in a process of its own, where Triton interprets instead of compiling."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from cases import ACTIVATIONS, buffers, routing
from interpreting import run_early
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.errors import InterpreterError

from moe_jax.pallas_kernels.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.experts import Tile, expert_ffn_spec
from moe_jax.pallas_kernels.interpret import interpret
from moe_jax.pallas_kernels.plan import plan_spec
from moe_jax.pallas_kernels.plan.reference import plan_blocks
from moe_jax.pallas_kernels.spec import Argument, KernelSpec

SMALL = Tile(block_m=32, block_k=32, num_warps=4, block_n=8, num_stages=3, lag=2, programs=5, backoff=0, spread=3)


def run(spec, rng, ids, scale):
    made = buffers(spec, rng, ids, scale)
    interpret(spec, made)
    assert not made["state_ptr"].any()
    return made


def agrees(spec, made):
    wanted = spec.reference(*(jnp.asarray(made[a.name]) for a in spec.inputs))
    np.testing.assert_allclose(made["out_ptr"], np.asarray(wanted), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.name}-{a.layout}-{a.limit_after}")
def test_every_activation_with_biases_slots_and_residual(activation):
    rng = np.random.default_rng(1)
    ids, scale = routing(rng, 5, 6, 2)
    spec = expert_ffn_spec(
        5, 2, 6, 72, 40, dtype="float32", activation=activation, slots=9, gate_up_bias=True, down_bias=True,
        residual=True, tile=SMALL,
    )  # fmt: skip
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 3, 3), (3, 1, 1), (17, 2, 5)])
def test_row_counts_and_experts(tokens, k, experts, dtype):
    rng = np.random.default_rng(2)
    ids, scale = routing(rng, tokens, experts, k)
    spec = expert_ffn_spec(tokens, k, experts, 64, 72, dtype=dtype, activation=ACTIVATIONS[0], tile=SMALL)
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_every_lag_visits_every_tile(lag):
    rng = np.random.default_rng(3)
    ids, scale = routing(rng, 6, 5, 2)
    tile = dataclasses.replace(SMALL, lag=lag, programs=3)
    if lag == 0:
        with pytest.raises(InvalidArgument, match="lag"):
            expert_ffn_spec(6, 2, 5, 64, 40, dtype="float32", activation=ACTIVATIONS[0], tile=tile)
        return
    spec = expert_ffn_spec(6, 2, 5, 64, 40, dtype="float32", activation=ACTIVATIONS[0], tile=tile)
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.parametrize("residual", [False, True])
def test_C03_sentinels_add_exactly_zero(residual):
    rng = np.random.default_rng(4)
    ids = np.array([[-1, 5], [4, -1], [-1, 8], [6, 7]], np.int32)
    _, scale = routing(rng, 4, 8, 2)
    scale[0, 0] = np.nan
    spec = expert_ffn_spec(4, 2, 8, 64, 40, dtype="float32", activation=ACTIVATIONS[0], residual=residual, tile=SMALL)
    made = run(spec, rng, ids, scale)
    agrees(spec, made)
    np.testing.assert_array_equal(made["out_ptr"][2], made["residual_ptr"][2] if residual else 0)


def test_all_rows_absent_and_one_row_absent():
    rng = np.random.default_rng(5)
    for tokens in (1, 3):
        ids, scale = np.full((tokens, 2), -1, np.int32), np.ones((tokens, 2), np.float32)
        spec = expert_ffn_spec(tokens, 2, 4, 64, 40, dtype="float32", activation=ACTIVATIONS[0], tile=SMALL)
        assert not run(spec, rng, ids, scale)["out_ptr"].any()


def test_an_expert_twice_in_a_row_counts_twice():
    rng = np.random.default_rng(6)
    ids, scale = np.array([[2, 2, 1], [1, 2, 1]], np.int32), np.ones((2, 3), np.float32)
    for tokens in (1, 2):
        spec = expert_ffn_spec(tokens, 3, 4, 64, 40, dtype="float32", activation=ACTIVATIONS[0], tile=SMALL)
        agrees(spec, run(spec, rng, ids[:tokens], scale[:tokens]))


def test_more_rows_of_one_expert_than_a_block_holds():
    rng = np.random.default_rng(7)
    ids, scale = np.tile(np.array([[3, 1]], np.int32), (21, 1)), np.ones((21, 2), np.float32)
    spec = expert_ffn_spec(21, 2, 4, 64, 40, dtype="float32", activation=ACTIVATIONS[0], tile=SMALL)
    agrees(spec, run(spec, rng, ids, scale))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_a_rows_bits_do_not_depend_on_its_company(tokens):
    rng = np.random.default_rng(8)
    first = expert_ffn_spec(1, 2, 6, 64, 40, dtype="float32", activation=ACTIVATIONS[0], tile=SMALL)
    one_ids, one_scale = routing(rng, 1, 6, 2)
    alone = run(first, np.random.default_rng(9), one_ids, one_scale)
    for position in {0, tokens // 2, tokens - 1}:
        spec = expert_ffn_spec(tokens, 2, 6, 64, 40, dtype="float32", activation=ACTIVATIONS[0], tile=SMALL)
        ids, scale = routing(rng, tokens, 6, 2)
        ids[position], scale[position] = one_ids[0], one_scale[0]
        made = buffers(spec, rng, ids, scale)
        made |= {name: alone[name] for name in ("gate_up_ptr", "down_ptr")}
        made["x_ptr"][position] = alone["x_ptr"][0]
        interpret(spec, made)
        np.testing.assert_array_equal(made["out_ptr"][position], alone["out_ptr"][0])


@pytest.mark.parametrize(("tokens", "k", "experts", "block_n"), [(2, 4, 8, 8), (7, 3, 5, 8), (17, 4, 12, 16)])
@pytest.mark.parametrize("slots", [None, 70])
def test_plan(tokens, k, experts, block_n, slots):
    rng = np.random.default_rng(10)
    ids, _ = routing(rng, tokens, experts, min(k, experts))
    ids[rng.random(ids.shape) < 0.2] = -1
    ids[rng.random(ids.shape) < 0.1] = experts
    rows = rng.permutation(slots or 1)[:experts].astype(np.int32)
    spec = plan_spec(tokens, ids.shape[1], experts, block_n, slots=slots)
    made = {a.name: np.full(a.shape, -7, np.int32) for a in spec.arguments} | {"ids_ptr": ids, "weight_row_ptr": rows}
    interpret(spec, made)
    wanted = plan_blocks(ids, rows if slots else None, experts, block_n)
    for a, value in zip(spec.outputs, wanted, strict=True):
        np.testing.assert_array_equal(made[a.name], value)


def test_a_wide_expert_is_reduced_in_parts():
    rng = np.random.default_rng(11)
    ids, scale = routing(rng, 3, 3, 2)
    tile = Tile(
        block_m=64,
        block_k=512,
        num_warps=4,
        block_n=8,
        num_stages=3,
        lag=2,
        programs=5,
        backoff=0,
        spread=3,
    )
    spec = expert_ffn_spec(
        3, 2, 3, 64, 7200, dtype="float32", activation=ACTIVATIONS[6], down_bias=True, tile=tile
    )  # fmt: skip
    assert dict(spec.constexprs)["SPLIT"] == 2
    made = buffers(spec, rng, ids, scale)
    made["down_ptr"] *= 0.01
    interpret(spec, made)
    agrees(spec, made)


def test_bfloat16_is_refused():
    spec = expert_ffn_spec(1, 2, 4, 64, 40, dtype="bfloat16", activation=ACTIVATIONS[0])
    with pytest.raises(CannotServe, match="bfloat16"):
        interpret(spec, {})


@pytest.mark.parametrize("tokens", [1, 2, 16])
def test_nothing_is_read_early(tokens):
    """Of the experts' weights neither: their rows are not known before the wait."""
    rng = np.random.default_rng(12)
    ids, scale = routing(rng, tokens, 6, 2)
    spec = expert_ffn_spec(
        tokens, 2, 6, 64, 40, dtype="float32", activation=ACTIVATIONS[0], slots=9, gate_up_bias=True, residual=True,
        tile=SMALL, pdl=True,
    )  # fmt: skip
    assert not spec.early
    run_early(spec, rng, buffers(spec, rng, ids, scale))
    plan = plan_spec(tokens, 2, 6, 8, slots=9, pdl=True)
    assert not plan.early
    run_early(
        plan, rng, {"ids_ptr": ids, "weight_row_ptr": rng.permutation(9)[: plan.arguments[1].shape[0]].astype(np.int32)}
    )


@triton.jit
def weighted(x_ptr, index_ptr, w_ptr, count_ptr, out_ptr, FAULT: tl.constexpr, PDL: tl.constexpr):
    """Adds ``w * x`` of an index to what stands in ``out``, and counts its programs; with faults only under PDL."""
    program = tl.program_id(0)
    if PDL and FAULT == "waits first":
        gdc_wait()
    if PDL and FAULT != "never launches":
        gdc_launch_dependents()
    w = tl.load(w_ptr + program)
    if PDL and FAULT == "reads":
        x = tl.load(x_ptr + program)
    if PDL and FAULT == "reads an index":
        index = tl.load(index_ptr + program)
    if PDL and FAULT == "reads a result":
        out = tl.load(out_ptr + program)
    if PDL and FAULT == "writes":
        tl.store(out_ptr + program, w)
    if PDL and FAULT == "counts":
        tl.atomic_add(count_ptr, 1)
    if PDL and (FAULT != "one does not wait" or program != 1):
        gdc_wait()
    if FAULT != "reads" or not PDL:
        x = tl.load(x_ptr + program)
    if FAULT != "reads an index" or not PDL:
        index = tl.load(index_ptr + program)
    if FAULT != "reads a result" or not PDL:
        out = tl.load(out_ptr + program)
    if FAULT != "counts" or not PDL:
        tl.atomic_add(count_ptr, 1)
    tl.store(out_ptr + program, out + w * x + index)


@pytest.mark.parametrize(
    ("fault", "opens", "problem"),
    [
        ("", False, None),
        ("reads", False, "weighted: out_ptr"),
        ("reads an index", False, "weighted: out_ptr"),
        ("reads a result", False, "weighted: out_ptr"),
        ("reads weights", False, "weighted: out_ptr"),
        ("writes", False, "weighted writes out_ptr before it waits"),
        ("counts", False, "weighted writes count_ptr before it waits"),
        ("waits first", False, r"\['wait', 'launch', 'wait'\], not \['launch', 'wait'\]"),
        ("never launches", False, r"\['wait'\], not \['launch', 'wait'\]"),
        ("one does not wait", False, r"\['launch'\], not \['launch', 'wait'\]"),
        ("waits first", True, None),
        ("", True, r"\['launch', 'wait'\], not \['wait', 'launch'\]"),
    ],
)
def test_what_a_program_does_before_it_waits_shows(fault, opens, problem):
    arguments = (
        Argument("x_ptr", "float32", (3,), "in"), Argument("index_ptr", "int32", (3,), "in"),
        Argument("w_ptr", "float32", (3,), "in"), Argument("count_ptr", "int32", (1,), "inout"),
        Argument("out_ptr", "float32", (3,), "inout"),
    )  # fmt: skip
    spec = KernelSpec(
        name="weighted", function=weighted, arguments=arguments, constexprs=(("FAULT", fault), ("PDL", True)),
        grid=(3, 1, 1), num_warps=4, num_stages=1, enable_fp_fusion=False, pdl=True, opens=opens,
        early=() if fault == "reads weights" else ("w_ptr",),
    )  # fmt: skip
    given = {"index_ptr": np.array([4, 0, 2], np.int32), "count_ptr": np.array([5], np.int32)}
    if problem is None:
        assert run_early(spec, np.random.default_rng(13), given)["count_ptr"] == 8
    else:
        with pytest.raises((AssertionError, InterpreterError), match=problem):
            run_early(spec, np.random.default_rng(13), given)
