"""Run by the tests of linear, attention and kv_append in a process where Triton interprets instead of compiling."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
import triton
import triton.language as tl
from decode_cases import append_oracle, attention_oracle, kv_case, linear_oracle, small_linear_tile
from interpreting import buffers, run, run_early

from moe_jax.pallas_kernels.attention import Schedule, attention_specs, decode_attention_specs
from moe_jax.pallas_kernels.attention import heuristics as attention_heuristics
from moe_jax.pallas_kernels.attention import specs as attention_module
from moe_jax.pallas_kernels.interpret import interpret
from moe_jax.pallas_kernels.kv_append import kv_append_spec
from moe_jax.pallas_kernels.linear import Tile, linear_spec
from moe_jax.pallas_kernels.spec import Argument, KernelSpec
from moe_jax.pallas_kernels.sums import sum_by_pairs

# NumPy's own remarks on what the NaN tests do.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value encountered")


def referenced(spec, made):
    return jax.jit(spec.reference)(*(made[a.name] for a in spec.inputs))


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
    names = ("gain", "bias", "residual") if options else ()
    wanted = linear_oracle(made["x_ptr"], made["w_ptr"], **{name: made[f"{name}_ptr"] for name in names})
    np.testing.assert_allclose(made["out_ptr"], wanted, rtol=3e-3, atol=3e-2)


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


@pytest.mark.parametrize("block_k", [128, 256, 512])
def test_linear_early_with_several_steps_in_one_product(block_k):
    rng = np.random.default_rng(4)
    tile = Tile(block_k=block_k, split=2, block_m=16, num_warps=4, block_n=8, num_stages=2, early=True)
    spec = linear_spec(2, 1024, 32, dtype="float16", out_dtype="float32", norm_eps=1e-5, tile=tile)
    made = run(spec, rng)
    wanted = linear_oracle(made["x_ptr"], made["w_ptr"], made["gain_ptr"], eps=1e-5)
    np.testing.assert_allclose(made["out_ptr"], wanted, rtol=3e-3, atol=6e-2)


def test_linear_nan_in_one_row_stays_there():
    rng = np.random.default_rng(3)
    spec = linear_spec(3, 96, 40, dtype="float32", norm_eps=1e-5, tile=small_linear_tile(3, 3))
    clean = run(spec, rng)
    x = clean["x_ptr"].copy()
    x[1, 5] = np.nan
    made = run(spec, rng, {"x_ptr": x, "w_ptr": clean["w_ptr"], "gain_ptr": clean["gain_ptr"]})
    assert np.isnan(made["out_ptr"][1]).all()
    np.testing.assert_array_equal(made["out_ptr"][[0, 2]], clean["out_ptr"][[0, 2]])


# -- kv_append ------------------------------------------------------------------------------------------------------

APPEND = {"sequences": 3, "pages": 10, "page_size": 8, "max_pages": 3, "positions": 24}


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 16), (6, 3, 24), (4, 4, 8)])
@pytest.mark.parametrize(("norm", "clip"), [(None, None), ("head", None), ("projection", 1.5)])
def test_kv_append(heads, kv_heads, dim, norm, clip):
    rng = np.random.default_rng(7)
    given = kv_case(rng, rows=7, **APPEND)
    spec = kv_append_spec(7, heads, kv_heads, dim, dtype="float32", **APPEND, norm=norm, clip=clip)
    given["position_ptr"][4] = 25
    made = buffers(spec, rng, given)
    k_pages, v_pages, q = referenced(spec, {name: value.copy() for name, value in made.items()})
    arguments = {name.removesuffix("_ptr"): value.copy() for name, value in made.items() if name != "q_ptr"}
    oracle = append_oracle(norm=norm, clip=clip, **arguments)
    interpret(spec, made)
    for name, wanted, exact in zip(("q_ptr", "k_pages_ptr", "v_pages_ptr"), (q, k_pages, v_pages), oracle, strict=True):
        np.testing.assert_allclose(made[name], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(made[name].reshape(exact.shape), exact, rtol=1e-4, atol=1e-4)


def test_kv_append_writes_nothing_outside_the_pages():
    rng = np.random.default_rng(8)
    given = kv_case(rng, rows=6, **APPEND)
    given["position_ptr"][:] = (3, -1, 24, 5, 6, 7)
    given["sequence_ptr"][:] = (0, 0, 1, 3, -1, 2)
    given["table_ptr"][0, 0], given["table_ptr"][2, 0] = -1, 10
    spec = kv_append_spec(6, 4, 2, 8, dtype="float32", **APPEND)
    made = buffers(spec, rng, given)
    # One page more than the spec knows of, whose contents must stay.
    whole = {
        name: np.concatenate([made[name], np.full_like(made[name][:1], 7)]) for name in ("k_pages_ptr", "v_pages_ptr")
    }
    before = {name: value.copy() for name, value in whole.items()}
    made |= {name: value[:-1] for name, value in whole.items()}
    k_pages, v_pages, q = referenced(spec, {name: value.copy() for name, value in made.items()})
    interpret(spec, made)
    for name, wanted in (("k_pages_ptr", k_pages), ("v_pages_ptr", v_pages)):
        np.testing.assert_array_equal(whole[name], before[name])
        np.testing.assert_array_equal(whole[name][:-1], wanted)
    np.testing.assert_allclose(made["q_ptr"], q, rtol=1e-6, atol=1e-6)
    assert not made["q_ptr"][1:3].any() and made["q_ptr"][3:].any(axis=1).all()


def test_kv_append_rows_bits_do_not_depend_on_company():
    rng = np.random.default_rng(9)
    alone = run(kv_append_spec(1, 4, 2, 8, dtype="float32", **APPEND, norm="head"), rng, kv_case(rng, rows=1, **APPEND))
    for rows, place in ((2, 1), (5, 0), (5, 3)):
        given = kv_case(rng, rows=rows, **APPEND) | {name: alone[name] for name in ("q_gain_ptr", "cos_ptr", "sin_ptr")}
        given["qkv_ptr"] = rng.standard_normal((rows, 64)).astype(np.float32)
        for name in ("qkv_ptr", "position_ptr", "sequence_ptr"):
            given[name][place] = alone[name][0]
        made = run(kv_append_spec(rows, 4, 2, 8, dtype="float32", **APPEND, norm="head"), rng, given)
        np.testing.assert_array_equal(made["q_ptr"][place], alone["q_ptr"][0])


@triton.jit
def sum_rows(x_ptr, out_ptr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.arange(0, ROWS)
    tl.store(out_ptr + row, sum_by_pairs(tl.load(x_ptr + row[:, None] * SIZE + tl.arange(0, SIZE)[None, :])))


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (4, 8), (2, 128), (1, 1024)])
def test_kv_append_sums_neighbours_then_neighbours_among_those(rows, size):
    arguments = (Argument("x_ptr", "float32", (rows, size), "in"), Argument("out_ptr", "float32", (rows,), "out"))
    spec = KernelSpec(
        name="sum_rows", function=sum_rows, arguments=arguments, constexprs=(("ROWS", rows), ("SIZE", size)),
        grid=(1, 1, 1), num_warps=4, num_stages=1, enable_fp_fusion=False, pdl=False,
    )  # fmt: skip
    made = run(spec, np.random.default_rng(12))
    x = made["x_ptr"]
    while x.shape[1] > 1:
        x = x[:, ::2] + x[:, 1::2]
    np.testing.assert_array_equal(made["out_ptr"], x[:, 0])


# -- attention ------------------------------------------------------------------------------------------------------

PAGED = {"sequences": 4, "pages": 49, "page_size": 8, "max_pages": 12}


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 keys (of float32), so that short sequences have several; few pieces at once, which take long here."""
    monkeypatch.setattr(attention_heuristics, "TILE", 32)
    whole = lambda stretch, *_: (stretch, stretch)  # noqa: E731
    monkeypatch.setattr(attention_module, "pieces_at_once", whole)


PIECES = {"stretches": 1, "splits": 10**5}  # and how many programs are to be kept busy for it


def attend(rng, rows, heads, kv_heads, dim, given, *, pieces="splits", cut=(2, 2), **options):
    """Both specs and their buffers after the launches."""
    schedule = Schedule(programs=5, split=cut[0], stretch=cut[1], fill=PIECES[pieces])
    first, second = attention_specs(rows, heads, kv_heads, dim, dtype="float32", **PAGED, schedule=schedule, **options)
    one = run(first, rng, given)
    two = run(second, rng, {name: one[name] for name in ("vector_ptr", "weight_ptr", "position_ptr")} | given)
    return (first, one), (second, two)


def each_launch_agrees_with_its_reference(first, one, second, two):
    vector, weight = (np.asarray(a) for a in referenced(first, one))
    for name, wanted in (("vector_ptr", vector), ("weight_ptr", weight)):
        written = ~np.isnan(one[name])
        np.testing.assert_allclose(one[name][written], wanted[written], rtol=2e-5, atol=2e-5)
    # Nothing that the second launch reads is left out.
    assert not ((weight[..., 1] > 0) & np.isnan(one["weight_ptr"][..., 1])).any()
    np.testing.assert_allclose(two["out_ptr"], referenced(second, two), rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("pieces", "cut"), [("stretches", (2, 2)), ("splits", (2, 2)), ("splits", (1, 3))], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "options"),
    [
        (8, 2, 16, {}),
        (8, 2, 16, {"window": 20}),
        (3, 1, 24, {"sink": True, "scale": 0.3}),
        (8, 2, 16, {"rows_of_sequence": 2}),
    ],
    ids=str,
)
def test_attention(heads, kv_heads, dim, options, pieces, cut):
    rng = np.random.default_rng(8)
    given = kv_case(rng, rows=6, positions=96, **PAGED)
    if "window" in options:
        # Two pieces, on both sides of where those that are asked for at once end.
        given["position_ptr"][0] = 70
    if "rows_of_sequence" in options:
        given["sequence_ptr"] = np.array([2, 2, 0, 0, 3, 3], np.int32)
        given["position_ptr"] = np.array([40, 41, 15, 16, -1, 70], np.int32)
    pools = rng.standard_normal((2, 49, kv_heads, 8, dim)).astype(np.float32)
    given |= {"k_pages_ptr": pools[0], "v_pages_ptr": pools[1]}
    # Places that no row sees hold NaN.
    unseen = np.ones((49, 8), bool)
    for s, p in zip(given["sequence_ptr"], given["position_ptr"], strict=True):
        for key in range(max(0, p + 1 - options.get("window", p + 1)), p + 1):
            unseen[given["table_ptr"][s, key // 8], key % 8] = False
    for stack in pools:
        stack.transpose(0, 2, 1, 3)[unseen] = np.nan
    (first, one), (second, two) = attend(rng, 6, heads, kv_heads, dim, given, pieces=pieces, cut=cut, **options)
    each_launch_agrees_with_its_reference(first, one, second, two)
    arguments = [one[f"{name}_ptr"] for name in ("k_pages", "v_pages", "table", "position", "sequence")]
    q, sink = one["q_ptr"].reshape(6, heads, dim), two["sink_ptr"] if "sink" in options else None
    wanted = attention_oracle(q, *arguments, sink, options.get("scale"), options.get("window"))
    np.testing.assert_allclose(two["out_ptr"].reshape(wanted.shape), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small_tiles")
def test_attention_takes_numbers_out_of_range_as_the_nearest():
    rng = np.random.default_rng(11)
    given = kv_case(rng, rows=4, positions=96, **PAGED)
    given["table_ptr"][3, 5], given["table_ptr"][2, 0] = -1, 49
    wild = {name: value.copy() for name, value in given.items()}
    wild["position_ptr"][:], wild["sequence_ptr"][:] = (96, -5, 200, 80), (-1, 0, 2, 9)
    given["position_ptr"][:], given["sequence_ptr"][:] = (95, -1, 95, 80), (0, 0, 2, 3)
    given["table_ptr"] = np.clip(given["table_ptr"], 0, 48)
    (_, one), (_, wanted) = attend(rng, 4, 4, 2, 16, given)
    wild |= {name: one[name] for name in ("q_ptr", "k_pages_ptr", "v_pages_ptr")}
    _, (_, got) = attend(rng, 4, 4, 2, 16, wild)
    np.testing.assert_array_equal(got["out_ptr"], wanted["out_ptr"])
    near = [one[f"{name}_ptr"] for name in ("k_pages", "v_pages", "table", "position", "sequence")]
    exact = attention_oracle(one["q_ptr"].reshape(4, 4, 16), *near)
    np.testing.assert_allclose(got["out_ptr"].reshape(exact.shape), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small_tiles")
def test_attention_rows_bits_do_not_depend_on_company_or_schedule():
    rng = np.random.default_rng(9)
    given = kv_case(rng, rows=1, positions=96, **PAGED)
    given["position_ptr"][0] = 77
    (_, alone), (_, out) = attend(rng, 1, 4, 2, 16, given)
    for rows, pieces in ((1, "stretches"), (4, "splits"), (9, "stretches")):
        more = kv_case(rng, rows=rows, positions=96, **PAGED)
        more |= {name: alone[name] for name in ("k_pages_ptr", "v_pages_ptr", "table_ptr")}
        more["q_ptr"] = rng.standard_normal((rows, 64)).astype(np.float32)
        for name in ("position_ptr", "sequence_ptr", "q_ptr"):
            more[name][rows // 2] = alone[name][0]
        _, (_, company) = attend(rng, rows, 4, 2, 16, more, pieces=pieces)
        np.testing.assert_array_equal(company["out_ptr"][rows // 2], out["out_ptr"][0])


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("options", [{}, {"window": 333}], ids=str)
def test_attention_of_many_splits_has_the_same_bits_however_they_are_shared_out(options, monkeypatch):
    """48 tiles of 16 keys in both kinds of pieces, several of them at a time or one after the other."""
    rng = np.random.default_rng(19)
    paged = PAGED | {"pages": 4 * 96 + 1, "max_pages": 96}
    given = kv_case(rng, rows=3, positions=768, **paged)
    given["sequence_ptr"][:], given["position_ptr"][:] = (2, 0, 3), (765, 5, 400)

    def launch(cut, pieces, **schedule):
        schedule = Schedule(split=cut[0], stretch=cut[1], fill=PIECES[pieces], **schedule)
        first, second = attention_specs(3, 4, 2, 16, dtype="float32", **paged, schedule=schedule, **options)
        one = run(first, rng, given)
        given.update({name: one[name] for name in ("q_ptr", "k_pages_ptr", "v_pages_ptr")})
        two = run(second, rng, {name: one[name] for name in ("vector_ptr", "weight_ptr", "position_ptr")})
        return one, two["out_ptr"]

    for cut in ((1, 4), (2, 3)):
        one, out = launch(cut, "splits", programs=3, at_once=1)
        arguments = [one[f"{name}_ptr"] for name in ("k_pages", "v_pages", "table", "position", "sequence")]
        wanted = attention_oracle(one["q_ptr"].reshape(3, 4, 16), *arguments, None, None, options.get("window"))
        np.testing.assert_allclose(out.reshape(wanted.shape), wanted, rtol=2e-5, atol=2e-5)
        for pieces, programs, at_once, trips in (
            ("splits", 1, 64, 1), ("splits", 7, 6, 2), ("stretches", 30, 1, 2), ("stretches", 1, 24, 1),
        ):  # fmt: skip
            few, many = cut[1], cut[1] * trips
            with monkeypatch.context() as patch:
                patch.setattr(attention_module, "pieces_at_once", lambda *_, few=few, many=many: (few, many))
                np.testing.assert_array_equal(launch(cut, pieces, programs=programs, at_once=at_once)[1], out)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("page_size", [1, 8, 32, 64, 128, 256, 1024])
def test_attention_of_pages_that_an_item_begins_in_the_middle_of(page_size, pieces):
    """Splits of 32 keys, up to four of them an item: it may begin and end within a page."""
    rng = np.random.default_rng(23)
    paged = {"sequences": 1, "pages": 1024 // page_size + 1, "page_size": page_size, "max_pages": 1024 // page_size}
    given = kv_case(rng, rows=1, positions=1024, **paged)
    given["position_ptr"][:] = 860
    pages = rng.standard_normal((2, paged["pages"], 2, page_size, 16)).astype(np.float32)
    given |= {"k_pages_ptr": pages[0], "v_pages_ptr": pages[1]}
    schedule = Schedule(split=2, stretch=2, fill=PIECES[pieces], programs=1, at_once=8)
    first, second = attention_specs(1, 4, 2, 16, dtype="float32", **paged, schedule=schedule)
    one = run(first, rng, given)
    two = run(second, rng, {name: one[name] for name in ("vector_ptr", "weight_ptr", "position_ptr")})
    arguments = [one[f"{name}_ptr"] for name in ("k_pages", "v_pages", "table", "position", "sequence")]
    wanted = attention_oracle(one["q_ptr"].reshape(1, 4, 16), *arguments)
    np.testing.assert_allclose(two["out_ptr"].reshape(wanted.shape), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small_tiles")
def test_attention_rows_of_one_sequence_have_the_bits_of_rows_alone():
    rng = np.random.default_rng(10)
    given = kv_case(rng, rows=4, positions=96, **PAGED)
    given["sequence_ptr"][:] = 1
    given["position_ptr"][:] = (30, 31, 31, 33)
    # In a tile that only the last row sees.
    given["v_pages_ptr"] = rng.standard_normal((49, 2, 8, 16)).astype(np.float32)
    given["v_pages_ptr"][given["table_ptr"][1, 33 // 8], :, 33 % 8] = np.nan
    (_, alone), (_, out) = attend(rng, 4, 4, 2, 16, given)
    given |= {name: alone[name] for name in ("k_pages_ptr", "v_pages_ptr", "q_ptr")}
    _, (_, together) = attend(rng, 4, 4, 2, 16, given, pieces="stretches", rows_of_sequence=4)
    np.testing.assert_array_equal(together["out_ptr"], out["out_ptr"])
    np.testing.assert_array_equal(np.isnan(out["out_ptr"]).all(1), (False, False, False, True))


# -- append and attention in one ------------------------------------------------------------------------------------


def two_and_three_launches(
    rng, heads, kv_heads, dim, given, *, paged, norm, clip=None, window=None, pieces="splits", last=96
):
    """Pages, pieces and output of append and attention in one launch, and of one after the other; each row has a
    sequence of its own, and positions up to ``last`` are in the tables.
    """
    rows = given["position_ptr"].shape[0]
    of_both = {"dtype": "float32", **paged}
    of_append = {"positions": last, "norm": norm, "clip": clip}
    of_attention = {"window": window, "schedule": Schedule(programs=5, split=2, stretch=2, fill=PIECES[pieces])}
    append = kv_append_spec(rows, heads, kv_heads, dim, **of_both, **of_append)
    parts = append, *attention_specs(rows, heads, kv_heads, dim, **of_both, **of_attention)
    fused = decode_attention_specs(rows, heads, kv_heads, dim, **of_both, **of_append, **of_attention)
    start = buffers(append, rng, given)
    place, size = given["position_ptr"], paged["page_size"]
    writes = (place >= 0) & (place < min(last, 96)) & (given["sequence_ptr"] >= 0)
    writes[writes] = given["sequence_ptr"][writes] < paged["sequences"]
    target = given["table_ptr"][given["sequence_ptr"][writes], place[writes] // size]
    there = (target >= 0) & (target < paged["pages"])
    for name in ("k_pages_ptr", "v_pages_ptr"):
        # What stands where a row writes is nothing that a row may see.
        start[name][target[there], :, place[writes][there] % size] = np.nan
    results = []
    for specs in (fused, parts):
        made = {name: value.copy() for name, value in start.items() if name != "q_ptr"}
        for spec in specs:
            made |= run(spec, rng, made)
        results.append({name: made[f"{name}_ptr"] for name in ("k_pages", "v_pages", "vector", "weight", "out")})
    wanted = referenced(fused[0], start)
    for name, value in zip(("k_pages", "v_pages", "vector", "weight"), wanted, strict=True):
        written = ~np.isnan(results[0][name])
        assert written.any()
        np.testing.assert_allclose(results[0][name][written], np.asarray(value)[written], rtol=1e-4, atol=1e-4)
    return results


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("positions", [(0, 7, 16, 31, -1), (8, 63, 64, 95, 32)], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page_size", "options"),
    [
        (8, 2, 16, 8, {"norm": "head"}),
        (8, 2, 16, 16, {"norm": None, "window": 20}),
        (6, 3, 24, 32, {"norm": "head", "clip": 0.7, "pieces": "stretches"}),
        (16, 1, 16, 4, {"norm": "projection", "clip": 1.5, "window": 9}),
        (4, 4, 8, 1, {"norm": "projection", "clip": None, "pieces": "stretches"}),
    ],
    ids=str,
)
def test_decode_attention_has_the_bits_of_append_and_attention(heads, kv_heads, dim, page_size, options, positions):
    rng = np.random.default_rng(13)
    paged = {"sequences": 6, "pages": 6 * 96 // page_size + 1, "page_size": page_size, "max_pages": 96 // page_size}
    given = kv_case(rng, rows=5, positions=96, **paged)
    given["sequence_ptr"] = np.array([4, 0, 5, 2, 3], np.int32)
    given["position_ptr"] = np.array(positions, np.int32)
    fused, parts = two_and_three_launches(rng, heads, kv_heads, dim, given, paged=paged, **options)
    for name, value in parts.items():
        np.testing.assert_array_equal(fused[name], value, err_msg=name)
    assert not np.isnan(fused["out"]).any() and not fused["out"][np.array(positions) < 0].any()


@pytest.mark.usefixtures("small_tiles")
def test_decode_attention_of_numbers_out_of_range_has_the_bits_of_append_and_attention():
    """No page, a page past the pool, a position past the rotation tables and past the table, sequences that are not."""
    rng = np.random.default_rng(14)
    paged = {"sequences": 8, "pages": 98, "page_size": 8, "max_pages": 12}
    given = kv_case(rng, rows=7, positions=96, **paged)
    # The first and last sequence and page are read for what is not there, and nothing is written into them.
    given["table_ptr"] = np.arange(1, 97, dtype=np.int32).reshape(8, 12)
    given["sequence_ptr"] = np.array([1, 2, 3, 4, -1, 9, 5], np.int32)
    given["position_ptr"] = np.array([20, 70, 90, 200, 33, 40, 17], np.int32)
    given["table_ptr"][1, 2], given["table_ptr"][2, 8] = -1, 98
    fused, parts = two_and_three_launches(rng, 8, 2, 16, given, paged=paged, norm="head", last=88)
    for name, value in parts.items():
        np.testing.assert_array_equal(fused[name], value, err_msg=name)
    assert not np.isnan(fused["k_pages"]).any() and not np.isnan(fused["out"]).any()


@pytest.mark.usefixtures("small_tiles")
def test_decode_attention_rows_bits_do_not_depend_on_company_or_schedule():
    rng = np.random.default_rng(15)
    paged = {"sequences": 9, "pages": 109, "page_size": 8, "max_pages": 12}
    options = {"dtype": "float32", **paged, "positions": 96, "norm": "head"}

    def launch(rows, given, pieces):
        schedule = Schedule(programs=5, split=2, stretch=2, fill=PIECES[pieces])
        first, second = decode_attention_specs(rows, 4, 2, 16, **options, schedule=schedule)
        one = run(first, rng, {name: value.copy() for name, value in given.items()})
        return run(second, rng, {name: one[name] for name in ("vector_ptr", "weight_ptr", "position_ptr")})["out_ptr"]

    alone = buffers(decode_attention_specs(1, 4, 2, 16, **options)[0], rng, kv_case(rng, rows=1, positions=96, **paged))
    alone["position_ptr"][0] = 77
    shared = ("k_pages_ptr", "v_pages_ptr", "table_ptr", "cos_ptr", "sin_ptr", "q_gain_ptr", "k_gain_ptr")
    names = (*shared, "qkv_ptr", "position_ptr", "sequence_ptr")
    wanted = launch(1, {name: alone[name] for name in names}, "splits")[0]
    for rows, pieces in ((1, "stretches"), (4, "splits"), (9, "stretches")):
        more = {name: alone[name] for name in shared}
        more["qkv_ptr"] = rng.standard_normal((rows, 128)).astype(np.float32)
        more["position_ptr"] = rng.integers(0, 96, rows).astype(np.int32)
        more["sequence_ptr"] = ((np.arange(rows) - rows // 2 + alone["sequence_ptr"][0]) % 9).astype(np.int32)
        for name in ("qkv_ptr", "position_ptr"):
            more[name][rows // 2] = alone[name][0]
        np.testing.assert_array_equal(launch(rows, more, pieces)[rows // 2], wanted)


# -- what is read early -----------------------------------------------------------------------------------------------

EARLY = Tile(block_k=128, split=2, block_m=16, num_warps=4, block_n=8, num_stages=2, early=True)


@pytest.mark.parametrize("tile", [EARLY, small_linear_tile(3, 3)], ids=["early", "late"])
@pytest.mark.parametrize("options", [{}, {"norm_eps": 1e-5, "bias": True, "residual": True}], ids=["plain", "all"])
def test_linear_reads_weights_early(options, tile):
    spec = linear_spec(3, 512, 32, dtype="float16", tile=tile, pdl=True, **options)
    assert spec.early == (("w_ptr", "gain_ptr") if tile.early else ())
    run_early(spec, np.random.default_rng(16))


@pytest.mark.parametrize("norm", [None, "head", "projection"])
def test_kv_append_reads_early_what_does_not_change_within_a_step(norm):
    rng = np.random.default_rng(17)
    run_early(
        kv_append_spec(7, 8, 2, 16, dtype="float32", **APPEND, norm=norm, pdl=True), rng, kv_case(rng, rows=7, **APPEND)
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("pieces", "programs"), [("stretches", 3), ("splits", 3), ("splits", 40)], ids=str)
@pytest.mark.parametrize(
    ("page_size", "options"),
    [
        (8, {}),
        (16, {"window": 20, "sink": True}),
        (16, {"rows_of_sequence": 2}),
        (8, {"norm": None}),
        (16, {"norm": "head", "window": 20}),
    ],
    ids=str,
)
def test_attention_reads_early_what_does_not_change_within_a_step(page_size, options, pieces, programs):
    """Fewer programs than pieces and more; pages smaller than a tile and as large."""
    rng, rows = np.random.default_rng(18), 4
    paged = {"sequences": 4, "pages": 4 * 96 // page_size + 1, "page_size": page_size, "max_pages": 96 // page_size}
    given = kv_case(rng, rows=rows, positions=96, **paged)
    given["position_ptr"] = np.array([40, -1, 95, 7], np.int32)
    given["sequence_ptr"] = np.array([2, 2, 0, 0] if "rows_of_sequence" in options else [2, 1, 3, 0], np.int32)
    make = functools.partial(decode_attention_specs, positions=96) if "norm" in options else attention_specs
    schedule = Schedule(programs=programs, split=2, stretch=2, fill=PIECES[pieces], linger=0)
    made = dict(given)
    for spec in make(rows, 4, 2, 16, dtype="float32", **paged, schedule=schedule, pdl=True, **options):
        made |= run_early(spec, rng, made)
    assert not np.isnan(made["out_ptr"]).any() and made["out_ptr"][[0, 2, 3]].all()
