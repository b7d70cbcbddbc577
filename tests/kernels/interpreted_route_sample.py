"""Run by test_route_kernel.py and test_sample.py in a process of its own, where Triton interprets, not compiles."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import BUCKETS, positions_of
from interpreting import run, run_early
from route_sample_cases import KINDS, SMALL_CUT, sample_case
from triton.runtime import interpreter

from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route.specs import route_logits_spec, route_spec
from moe_jax.pallas_kernels.sample import sample_specs
from moe_jax.pallas_kernels.sample.reference import sample as sample_reference

# NumPy's own remarks on what the NaN tests do.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered")


@pytest.fixture(autouse=True)
def quick_calls(monkeypatch):
    """Triton's interpreter looks through its whole language at each call of a function by a kernel; once will do."""
    seen = set()

    def call(function, *args, **kwargs):
        module = id(function.fn.__globals__)
        if module not in seen:
            seen.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)


def referenced(spec, made):
    return spec.reference(*(jnp.asarray(made[a.name]) for a in spec.inputs))


ROUTERS = {
    "qwen": RouterConfig(experts=60, top_k=4, renormalize=True),
    "olmoe": RouterConfig(experts=64, top_k=8),
    "mixtral": RouterConfig(experts=8, top_k=2, renormalize=True, scaling_factor=2.5),
    "gpt_oss": RouterConfig(experts=5, top_k=4, score="topk_softmax"),
    "one": RouterConfig(experts=1, top_k=1),
    "all": RouterConfig(experts=3, top_k=3),
    "deepseek": RouterConfig(
        experts=32, top_k=4, score="sigmoid", renormalize=True, scaling_factor=2.5, groups=4, groups_kept=2
    ),
    "deepseek-odd": RouterConfig(experts=15, top_k=3, score="sigmoid", groups=5, groups_kept=3),
    "singles": RouterConfig(experts=6, top_k=2, score="sigmoid", groups=6, groups_kept=3),
}


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("name", ROUTERS)
def test_route(name, rows):
    rng, config = np.random.default_rng(3), ROUTERS[name]
    spec = route_spec(
        rows, 72, config, dtype="float32", norm_eps=1e-6, bias="float32",
        selection_bias=config.score == "sigmoid", masked=True,
    )  # fmt: skip
    position = rng.integers(0, 9, rows).astype(np.int32)
    position[rows // 2] = -1 if rows > 1 else 0
    made = run(spec, rng, {"position_ptr": position})
    scale, ids, normed = referenced(spec, made)
    np.testing.assert_array_equal(made["ids_ptr"], ids)
    np.testing.assert_allclose(made["scale_ptr"], scale, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(made["normed_ptr"], normed, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{}, {"norm_eps": 1e-6}, {"masked": True}, {"norm_eps": 1e-6, "masked": True}], ids=str
)
def test_route_reads_early_what_does_not_change_within_a_step(options):
    rng, config = np.random.default_rng(8), ROUTERS["deepseek"]
    spec = route_spec(9, 2100, config, dtype="float16", bias="float32", selection_bias=True, pdl=True, **options)
    assert spec.grid[2] > 1
    given = {"w_ptr": (rng.standard_normal((32, 2100)) / 50).astype(np.float16)}
    if "masked" in options:
        given["position_ptr"] = np.array([3, -1, *range(7)], np.int32)
    run_early(spec, rng, given)
    run_early(route_logits_spec(9, config, selection_bias=True, pdl=True), rng)


def route_logits(config, logits, selection_bias=None):
    """The kernel on finished logits."""
    spec = route_logits_spec(len(logits), config, selection_bias=selection_bias is not None)
    given = {"logits_ptr": logits}
    if selection_bias is not None:
        given["selection_bias_ptr"] = selection_bias
    return run(spec, np.random.default_rng(0), given)


@pytest.mark.parametrize("name", ROUTERS)
def test_route_logits(name):
    rng, config = np.random.default_rng(3), ROUTERS[name]
    spec = route_logits_spec(11, config, selection_bias=config.score == "sigmoid")
    made = run(spec, rng)
    scale, ids = referenced(spec, made)
    np.testing.assert_array_equal(made["ids_ptr"], ids)
    np.testing.assert_allclose(made["scale_ptr"], scale, rtol=2e-5, atol=1e-6)


def test_C01_rows_of_nan_get_distinct_ids_and_leave_others_alone():
    rng = np.random.default_rng(4)
    config = RouterConfig(experts=128, top_k=8, renormalize=True)
    logits = rng.standard_normal((8, 128)).astype(np.float32)
    clean = route_logits(config, logits[:5])
    logits[5:] = np.nan
    made = route_logits(config, logits)
    np.testing.assert_array_equal(made["ids_ptr"][:5], clean["ids_ptr"])
    np.testing.assert_array_equal(made["scale_ptr"][:5], clean["scale_ptr"])
    np.testing.assert_array_equal(made["ids_ptr"][5:], np.tile(np.arange(8), (3, 1)))


def test_an_expert_without_a_score_loses_to_those_that_have_one():
    rng = np.random.default_rng(7)
    logits = rng.standard_normal((6, 16)).astype(np.float32)
    logits[np.arange(6), rng.integers(0, 16, 6)] = np.nan
    for score in ("sigmoid", "topk_softmax"):
        config = RouterConfig(experts=16, top_k=3, score=score, groups=4, groups_kept=2)
        made, plain = route_logits(config, logits), np.where(np.isnan(logits), -np.inf, logits)
        np.testing.assert_array_equal(made["ids_ptr"], route_logits(config, plain)["ids_ptr"])


def test_ties_go_to_the_lower_id():
    config = RouterConfig(experts=16, top_k=5, score="sigmoid")
    logits = np.zeros((1, 16), np.float32)
    logits[0, [3, 9]] = -0.0, 1.0
    np.testing.assert_array_equal(route_logits(config, logits)["ids_ptr"], [[9, 0, 1, 2, 3]])


def test_C12_dropped_groups_do_not_win_over_negative_scores():
    scores = np.array([[0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.55, 0.45]], np.float32)
    logits = np.log(scores / (1 - scores)).astype(np.float32)
    config = RouterConfig(experts=8, top_k=2, score="sigmoid", groups=4, groups_kept=1)
    made = route_logits(config, logits, np.full(8, -1, np.float32))
    np.testing.assert_array_equal(made["ids_ptr"], [[0, 1]])
    np.testing.assert_allclose(made["scale_ptr"], [[0.6, 0.5]], rtol=1e-5)


def test_C13_small_scores_keep_their_weight():
    rng = np.random.default_rng(5)
    config = RouterConfig(experts=256, top_k=8, score="sigmoid", renormalize=True)
    logits = rng.uniform(-18, -15, (2, 256)).astype(np.float32)
    made = route_logits(config, logits, rng.uniform(11, 13, 256).astype(np.float32))
    exact = 1 / (1 + np.exp(-logits.astype(np.float64)))
    wanted = np.take_along_axis(exact, made["ids_ptr"].astype(np.int64), 1)
    np.testing.assert_allclose(made["scale_ptr"], wanted / wanted.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("rows", BUCKETS[1:])
def test_route_rows_bits_do_not_depend_on_company(rows):
    rng, config = np.random.default_rng(6), ROUTERS["mixtral"]
    alone = run(route_spec(1, 72, config, dtype="float32", norm_eps=1e-6), rng)
    spec = route_spec(rows, 72, config, dtype="float32", norm_eps=1e-6)
    for position in positions_of(rows) if rows < 16 else {rows // 2}:
        x = rng.standard_normal((rows, 72)).astype(np.float32)
        x[position] = alone["x_ptr"][0]
        made = run(spec, rng, {"x_ptr": x, "w_ptr": alone["w_ptr"], "gain_ptr": alone["gain_ptr"]})
        for name in ("ids_ptr", "scale_ptr", "normed_ptr"):
            np.testing.assert_array_equal(made[name][position], alone[name][0])


# -- sample ---------------------------------------------------------------------------------------------------------


def draw(rng, given, cut=SMALL_CUT):
    """Tokens, and everything else that the three launches leave."""
    rows, vocabulary = given["logits_ptr"].shape
    made = dict(given)
    for spec in sample_specs(rows, vocabulary, cut=cut):
        made |= run(spec, rng, {name: made[name] for name in (a.name for a in spec.inputs)})
    return made["token_ptr"], made


def wanted(given):
    return np.asarray(sample_reference(**{name.removesuffix("_ptr"): jnp.asarray(a) for name, a in given.items()}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [5, 700])
def test_sample(kind, vocabulary):
    rng = np.random.default_rng(11)
    given = sample_case(rng, 4, vocabulary, kind)
    tokens, made = draw(rng, given)
    np.testing.assert_array_equal(tokens, wanted(given))
    if vocabulary == 700:
        ways = {"greedy": 0, "plain": 2}.get(kind, 1)
        assert (made["way_ptr"][given["position_ptr"] >= 0, 0] == ways).all()


@pytest.mark.parametrize("kind", ["top_k", "top_p", "both"])
def test_sample_from_lists_longer_than_a_tile_and_than_their_capacity(kind):
    """Flat logits and wide limits, where the bound holds back little."""
    rng = np.random.default_rng(12)
    given = sample_case(rng, 3, 400, kind)
    given["logits_ptr"] /= 30
    given["top_k_ptr"][:] = np.where(given["top_k_ptr"] > 0, [100, 17, 40], 0)
    given["position_ptr"][:] = np.arange(3)
    results = {}
    for capacity in (16, 1024):
        tokens, made = draw(rng, given, dataclasses.replace(SMALL_CUT, capacity=capacity))
        np.testing.assert_array_equal(tokens, wanted(given))
        listed = made["way_ptr"][:, 0] == 1
        results[capacity] = (made["found_ptr"][listed] > capacity).any()
    assert results == {16: True, 1024: False}


@pytest.mark.parametrize("kind", KINDS)
def test_sample_reads_nothing_early(kind):
    rng = np.random.default_rng(17)
    made = sample_case(rng, 4, 300, kind)
    for spec in sample_specs(4, 300, cut=SMALL_CUT, pdl=True):
        assert not spec.early
        made |= run_early(spec, rng, made)
    np.testing.assert_array_equal(made["token_ptr"], draw(rng, {a: made[a] for a in sample_case(rng, 4, 300, kind)})[0])


@pytest.mark.parametrize("kind", ["top_k", "top_p"])
def test_sample_bounds_and_lists_hold_every_token_that_may_be_kept(kind):
    rng = np.random.default_rng(13)
    rows, vocabulary = 12, 700
    given = sample_case(rng, rows, vocabulary, kind)
    given["position_ptr"][:] = 3
    given["logits_ptr"] *= np.linspace(0.1, 1.5, rows, dtype=np.float32)[:, None]
    if kind == "top_k":
        given["top_k_ptr"][:] = [1, 2, 3, 5, 10, 20, 30, 40, 50, 60, 70, 80]
    else:
        given["top_p_ptr"][:] = 1 - np.geomspace(0.9, 1e-4, rows)
    scan, gather, _ = sample_specs(rows, vocabulary, cut=SMALL_CUT)
    made = given | run(scan, rng, {name: given[name] for name in given if name in {a.name for a in scan.inputs}})
    made |= run(gather, rng, {a.name: made[a.name] for a in gather.inputs})
    tight = 0
    for row, logits in enumerate(given["logits_ptr"].astype(np.float64)):
        ranked = -np.sort(-logits)
        weight = np.exp((ranked - ranked[0]) / given["temperature_ptr"][row])
        before = np.cumsum(weight) - weight
        keep = given["top_k_ptr"][row] or vocabulary
        kept = (before < given["top_p_ptr"][row] * weight.sum()) & (np.arange(vocabulary) < keep)
        if made["way_ptr"][row, 0] == 1:
            least = made["bound_ptr"][row, 1]
            assert ranked[kept].min() >= least
            over = np.flatnonzero(given["logits_ptr"][row] >= least)
            np.testing.assert_array_equal(np.sort(made["list_ptr"][row, : made["found_ptr"][row]]), over)
            tight += len(over) < vocabulary // 2
    assert tight >= rows // 2


def test_sample_searches_on_when_the_best_is_outside():
    """A few tokens of many alike are kept, so nearly every row's first best is not."""
    rng = np.random.default_rng(14)
    rows, vocabulary = 16, 60
    given = sample_case(rng, rows, vocabulary, "both")
    given["logits_ptr"] /= 100
    given["position_ptr"][:] = np.arange(rows)
    given["top_k_ptr"][:] = [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 59, 60, 61, 0, 0, 0]
    given["top_p_ptr"][:] = [0.99, 1, 0.5, 0.99, 1, 1, 1, 1, 1, 1, 1e-30, 1e-6, 0.9, 0.03, 0.04, 0.05]
    np.testing.assert_array_equal(draw(rng, given)[0], wanted(given))


def test_sample_ties_nan_infinities_and_odd_parameters():
    rng = np.random.default_rng(15)
    given = sample_case(rng, 12, 300, "greedy")
    given["position_ptr"][:] = 7
    logits = given["logits_ptr"]
    logits[0] = 1.0
    logits[1, 3] = np.nan
    logits[2] = -np.inf
    logits[3] = np.nan
    logits[4, [70, 290]] = np.inf
    logits[5] = np.where(np.arange(300) % 2, -0.0, 0.0)
    # Masked vocabularies, draws among equal logits, limits out of range.
    logits[6, :250] = -np.inf
    logits[7] = 2.0
    logits[8, 4:] = -np.inf
    logits[9, ::3] = np.nan
    given["temperature_ptr"][6:] = [0.8, 1.0, 1e-30, 1.5, 1.0, 1e30]
    given["top_k_ptr"][6:] = [20, 33, 0, 7, -4, 5]
    given["top_p_ptr"][6:] = [0.9, 0.25, 0.5, 1.0, -1.0, 2.0]
    tokens = draw(rng, given)[0]
    assert tokens[[0, 2, 3, 4, 5]].tolist() == [0, 0, 0, 70, 0]
    np.testing.assert_array_equal(tokens, wanted(given))


@pytest.mark.parametrize("kind", ["plain", "top_k", "top_p"])
def test_sample_does_not_know_its_batch(kind):
    rng = np.random.default_rng(16)
    alone = sample_case(rng, 1, 200, kind)
    token = draw(rng, alone)[0]
    for rows in BUCKETS[1:]:
        for position in positions_of(rows) if rows == 4 else {rows - 1}:
            given = sample_case(rng, rows, 200, "both")
            # Most mates of a large batch are not there: the interpreter is slow.
            given["position_ptr"][3:] = -1
            for name in given:
                given[name][position] = alone[name][0]
            cut = dataclasses.replace(SMALL_CUT, parts=max(1, 4 // rows))
            assert draw(rng, given, cut)[0][position] == token[0]
