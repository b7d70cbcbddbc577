"""Run by test_decode_interpreter.py in a process of its own, where Triton interprets instead of compiling."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import kv_case, sample_case, small_linear_tile

from moe_jax.pallas_kernels.attention import Schedule, attention_reference, attention_specs
from moe_jax.pallas_kernels.attention import heuristics as attention_heuristics
from moe_jax.pallas_kernels.attention import specs as attention_module
from moe_jax.pallas_kernels.interpret import interpret
from moe_jax.pallas_kernels.kv_append import kv_append_spec
from moe_jax.pallas_kernels.linear import linear_spec
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route.specs import route_spec
from moe_jax.pallas_kernels.sample import sample_specs
from moe_jax.pallas_kernels.sample.reference import sample as sample_reference

# NumPy's own remarks on what the NaN tests do.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered")


def buffers(spec, rng, given):
    """Random inputs, zero state, outputs and scratch full of NaN (or a number no kernel writes)."""
    made = {}
    for a in spec.arguments:
        if a.name in given:
            made[a.name] = given[a.name]
        elif a.role == "state":
            made[a.name] = np.zeros(a.shape, a.dtype)
        elif a.role in ("out", "scratch"):
            made[a.name] = np.full(a.shape, -7 if a.dtype == "int32" else np.nan, a.dtype)
        else:
            made[a.name] = rng.standard_normal(a.shape).astype(a.dtype)
    return made


def run(spec, rng, given=None):
    made = buffers(spec, rng, given or {})
    interpret(spec, made)
    for a in spec.arguments:
        if a.role == "state":
            assert not made[a.name].any(), f"{a.name} is left with {made[a.name]}"
    return made


def referenced(spec, made):
    return spec.reference(*(jnp.asarray(made[a.name]) for a in spec.arguments if a.role in ("in", "inout")))


# -- linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 64), (3, 72, 40), (17, 192, 70)])
@pytest.mark.parametrize("options", [{}, {"norm_eps": 1e-6, "bias": True, "residual": True}], ids=["plain", "all"])
def test_linear(rows, inputs, outputs, split, options):
    rng = np.random.default_rng(1)
    tile = small_linear_tile(rows, split)
    spec = linear_spec(rows, inputs, outputs, dtype="float16", out_dtype="float32", tile=tile, **options)
    made = run(spec, rng)
    np.testing.assert_allclose(made["out_ptr"], referenced(spec, made), rtol=3e-3, atol=3e-2)


@pytest.mark.parametrize("rows", [2, 4, 8, 16])
def test_linear_rows_bits_do_not_depend_on_company(rows):
    rng = np.random.default_rng(2)

    def spec(rows):
        return linear_spec(rows, 96, 40, dtype="float32", norm_eps=1e-5, tile=small_linear_tile(rows, 3))

    alone = run(spec(1), rng)
    for position in {0, rows // 2, rows - 1}:
        x = rng.standard_normal((rows, 96)).astype(np.float32)
        x[position] = alone["x_ptr"][0]
        given = {"x_ptr": x, "w_ptr": alone["w_ptr"], "gain_ptr": alone["gain_ptr"]}
        made = run(spec(rows), rng, given)
        np.testing.assert_array_equal(made["out_ptr"][position], alone["out_ptr"][0])


# -- route ----------------------------------------------------------------------------------------------------------

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


def route_logits(config, logits, selection_bias=None):
    """The kernel on given logits: the weight is the identity."""
    rows, experts = logits.shape
    spec = route_spec(rows, experts, config, dtype="float32", selection_bias=selection_bias is not None)
    given = {"x_ptr": logits, "w_ptr": np.eye(experts, dtype=np.float32)}
    if selection_bias is not None:
        given["selection_bias_ptr"] = selection_bias
    return run(spec, np.random.default_rng(0), given)


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


@pytest.mark.parametrize("rows", [2, 8, 17])
def test_route_rows_bits_do_not_depend_on_company(rows):
    rng, config = np.random.default_rng(6), ROUTERS["qwen"]
    alone = run(route_spec(1, 72, config, dtype="float32", norm_eps=1e-6), rng)
    for position in {0, rows // 2, rows - 1}:
        x = rng.standard_normal((rows, 72)).astype(np.float32)
        x[position] = alone["x_ptr"][0]
        given = {"x_ptr": x, "w_ptr": alone["w_ptr"], "gain_ptr": alone["gain_ptr"]}
        made = run(route_spec(rows, 72, config, dtype="float32", norm_eps=1e-6), rng, given)
        for name in ("ids_ptr", "scale_ptr", "normed_ptr"):
            np.testing.assert_array_equal(made[name][position], alone[name][0])


# -- kv_append ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 16), (6, 3, 24), (4, 4, 8)])
@pytest.mark.parametrize(("norm", "clip"), [(None, None), ("head", None), ("projection", 1.5)])
def test_kv_append(heads, kv_heads, dim, norm, clip):
    rng = np.random.default_rng(7)
    given = kv_case(rng, rows=7, sequences=3, pages=10, page_size=8, max_pages=3, positions=24)
    spec = kv_append_spec(
        7, heads, kv_heads, dim, dtype="float32", sequences=3, pages=10, page_size=8, max_pages=3, positions=24,
        norm=norm, clip=clip,
    )  # fmt: skip
    given["position_ptr"][4] = 25
    made = buffers(spec, rng, given)
    k_pages, v_pages, q = referenced(spec, {name: value.copy() for name, value in made.items()})
    interpret(spec, made)
    for name, wanted in (("k_pages_ptr", k_pages), ("v_pages_ptr", v_pages), ("q_ptr", q)):
        np.testing.assert_allclose(made[name], wanted, rtol=1e-5, atol=1e-5)


# -- attention ------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 keys, splits of 2 tiles, so that short sequences have several of each."""
    for module in (attention_heuristics, attention_module):
        for name, value in (("TILE", 16), ("FAN", 2), ("CHUNK", 2)):
            monkeypatch.setattr(module, name, value)


def attend(rng, rows, heads, kv_heads, dim, given, *, fill, max_pages=12, page_size=8, **options):
    schedule = Schedule(programs=5, fill=fill)
    first, second = attention_specs(
        rows, heads, kv_heads, dim, dtype="float32", sequences=4, pages=49, page_size=page_size, max_pages=max_pages,
        schedule=schedule, **options,
    )  # fmt: skip
    one = run(first, rng, given)
    two = run(second, rng, one | given)
    options.pop("rows_of_sequence", None)
    options = {"scale": None, "window": None, "sink": False} | options
    function = attention_reference(heads, dim, **options)
    names = [a.name for a in first.inputs]
    wanted = function(*(jnp.asarray(one[name]) for name in names), jnp.asarray(two["sink_ptr"]))
    return one, two["out_ptr"], np.asarray(wanted), two


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("fill", [0, 24, 10**6], ids=["splits", "runs", "tiles"])
@pytest.mark.parametrize(
    "options", [{}, {"window": 20}, {"sink": True, "scale": 0.3}, {"rows_of_sequence": 2}], ids=str
)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 16), (3, 1, 24)])
def test_attention(heads, kv_heads, dim, options, fill):
    rng = np.random.default_rng(8)
    given = kv_case(rng, rows=6, sequences=4, pages=49, page_size=8, max_pages=12, positions=96)
    if "rows_of_sequence" in options:
        given["sequence_ptr"] = np.array([2, 2, 0, 0, 3, 3], np.int32)
        given["position_ptr"] = np.array([40, 41, 15, 16, -1, 70], np.int32)
    pages = rng.standard_normal((2, 49, kv_heads, 8, dim)).astype(np.float32)
    given |= {"k_pages_ptr": pages[0], "v_pages_ptr": pages[1]}
    # Places that no row sees hold NaN.
    unseen = np.ones((49, 8), bool)
    for s, p in zip(given["sequence_ptr"], given["position_ptr"], strict=True):
        for key in range(p + 1):
            unseen[given["table_ptr"][s, key // 8], key % 8] = False
    for stack in pages:
        stack.transpose(0, 2, 1, 3)[unseen] = np.nan
    _, out, wanted, _ = attend(rng, 6, heads, kv_heads, dim, given, fill=fill, **options)
    np.testing.assert_allclose(out, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small_tiles")
def test_attention_rows_bits_do_not_depend_on_company_or_schedule():
    rng = np.random.default_rng(9)
    given = kv_case(rng, rows=1, sequences=4, pages=49, page_size=8, max_pages=12, positions=96)
    given["position_ptr"][0] = 77
    alone, out, _, _ = attend(rng, 1, 4, 2, 16, given, fill=0)
    for rows, fill in ((1, 4), (1, 10**6), (4, 0), (4, 8), (4, 10**6), (9, 0), (9, 24)):
        more = kv_case(rng, rows=rows, sequences=4, pages=49, page_size=8, max_pages=12, positions=96)
        more |= {name: alone[name] for name in ("k_pages_ptr", "v_pages_ptr", "table_ptr")}
        more["q_ptr"] = rng.standard_normal((rows, 64)).astype(np.float32)
        for name in ("position_ptr", "sequence_ptr", "q_ptr"):
            more[name][rows // 2] = alone[name][0]
        _, company, _, _ = attend(rng, rows, 4, 2, 16, more, fill=fill)
        np.testing.assert_array_equal(company[rows // 2], out[0])


@pytest.mark.usefixtures("small_tiles")
def test_rows_of_one_sequence_have_the_bits_of_rows_alone():
    rng = np.random.default_rng(10)
    given = kv_case(rng, rows=4, sequences=4, pages=49, page_size=8, max_pages=12, positions=96)
    given["sequence_ptr"][:] = 1
    given["position_ptr"][:] = (30, 31, 32, 33)
    alone, out, _, _ = attend(rng, 4, 4, 2, 16, given, fill=0)
    given |= {name: alone[name] for name in ("k_pages_ptr", "v_pages_ptr", "q_ptr")}
    _, together, _, _ = attend(rng, 4, 4, 2, 16, given, fill=0, rows_of_sequence=4)
    np.testing.assert_array_equal(together, out)


# -- sample ---------------------------------------------------------------------------------------------------------


def draw(rng, given, rows, vocabulary):
    first, second = sample_specs(rows, vocabulary, chunk=256)
    one = run(first, rng, given)
    return run(second, rng, given | {name: one[name] for name in ("top_ptr", "at_ptr")})["token_ptr"]


@pytest.mark.parametrize(
    ("vocabulary", "kind"), [(5, "both"), (512, "top_p"), (700, "greedy"), (700, "plain"), (700, "both")]
)
def test_sample(kind, vocabulary):
    rng = np.random.default_rng(11)
    given = sample_case(rng, 4, vocabulary, kind)
    wanted = sample_reference(*given.values())
    np.testing.assert_array_equal(draw(rng, given, 4, vocabulary), wanted)


def test_sample_ties_nan_and_infinities():
    rng = np.random.default_rng(12)
    given = sample_case(rng, 5, 300, "greedy")
    given["position_ptr"][:] = 7
    logits = given["logits_ptr"]
    logits[0] = 1.0
    logits[1, 3] = np.nan
    logits[2] = -np.inf
    logits[3] = np.nan
    logits[4, [70, 290]] = np.inf
    wanted = np.asarray(sample_reference(*given.values()))
    assert wanted[0] == wanted[2] == wanted[3] == 0 and wanted[4] == 70
    np.testing.assert_array_equal(draw(rng, given, 5, 300), wanted)


def test_sample_does_not_know_its_batch():
    rng = np.random.default_rng(13)
    alone = sample_case(rng, 1, 300, "both")
    token = draw(rng, alone, 1, 300)
    for rows, position in ((2, 1), (4, 0)):
        given = sample_case(rng, rows, 300, "both")
        for name in given:
            given[name][position] = alone[name][0]
        assert draw(rng, given, rows, 300)[position] == token[0]


def test_frozen_specs_are_equal_by_content():
    a, b = (linear_spec(4, 64, 64, dtype="float16") for _ in range(2))
    assert a.key == b.key and dataclasses.replace(a, num_warps=8).key != b.key
    assert jax.default_backend() == "cpu"
