"""Decode attention: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import run_interpreted

pytest.importorskip("triton")

from decode_cases import (
    BUCKETS,
    check_compiled,
    kv_case,
    on_a_gpu,
    positions_of,
    relative_error,
    same_bits,
)
from interpreted_attention import edge_cases, extreme_cases, work_by_rule, work_case

from moe_jax.pallas_kernels.attention import Schedule, api, attention_specs, decode_attention_specs
from moe_jax.pallas_kernels.attention.reference import attention as reference
from moe_jax.pallas_kernels.compiled import compile_spec, disassembly
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.kv_append import kv_append_spec

SIZES = {"sequences": 64, "pages": 64 * 24 + 1, "page_size": 64, "max_pages": 24}
# The compiler drops loops that short tables never enter.
LONG = SIZES | {"pages": 64 * 512 + 1, "max_pages": 512}


def specs_for(rows: int, **more):
    return attention_specs(rows, 32, 4, 128, **({"dtype": "bfloat16"} | SIZES | more))


@pytest.mark.slow
def test_interpreted():
    run_interpreted("interpreted_decode.py", "attention")


@pytest.mark.slow
def test_interpreted_work():
    run_interpreted("interpreted_attention.py")


def test_there_is_a_slot_for_every_piece():
    """Whatever positions, windows and runs of rows are."""
    rng = np.random.default_rng(0)
    for given, position in (*edge_cases(), *extreme_cases(), *(work_case(rng) for _ in range(3000))):
        first, second = attention_specs(**given)
        constants, shape = dict(first.constexprs), first.arguments[-1].shape
        _, pieces = work_by_rule(constants, position)
        slots = shape[0] // constants["GROUP_ROWS"]
        assert sum(last - first + 1 for first, last in pieces) <= slots
        assert second.arguments[1].shape == shape


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (1, {}),
        (16, {}),
        (16, {"window": 1000, "sink": True}),
        (16, {"rows_of_sequence": 4}),
        (8, {"rows_of_sequence": 8}),
        (64, {}),
    ],
    ids=str,
)
def test_compiles_without_spills(rows, options, capability):
    for spec in specs_for(rows, pdl=capability == 90, capability=capability, **LONG, **options):
        check_compiled(spec, capability)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [(8, 64, "bfloat16"), (4, 256, "bfloat16"), (64, 80, "float16"), (32, 128, "float32")],
)
def test_other_heads_compile_without_spills(heads, dim, dtype, capability):
    for spec in attention_specs(4, heads, 4, dim, dtype=dtype, capability=capability, **LONG):
        check_compiled(spec, capability)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("rows", "norm", "options"),
    [
        (1, "head", {}),
        (4, None, {"window": 1000}),
        (16, "projection", {"clip": 8.0, "sink": True}),
        (64, "head", {"clip": 8.0}),
    ],
    ids=str,
)
def test_append_and_attention_in_one_compile_without_spills(rows, norm, options, capability):
    more = {"positions": 32768, "norm": norm, "capability": capability, "pdl": capability == 90}
    for spec in decode_attention_specs(rows, 32, 4, 128, dtype="bfloat16", **LONG, **more, **options):
        check_compiled(spec, capability)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "norm"),
    [
        (8, 4, 64, "bfloat16", "head"),
        (16, 4, 256, "bfloat16", "head"),
        (64, 4, 80, "float16", "projection"),
        (32, 4, 128, "float32", "head"),
        (16, 16, 128, "bfloat16", "projection"),
    ],
)
def test_append_and_attention_of_other_heads_compile_without_spills(heads, kv_heads, dim, dtype, norm, capability):
    more = {"positions": 32768, "norm": norm, "capability": capability, **LONG}
    check_compiled(decode_attention_specs(4, heads, kv_heads, dim, dtype=dtype, **more)[0], capability)


def test_the_new_key_is_written_before_keys_are_copied():
    fused, _ = decode_attention_specs(1, 32, 4, 128, dtype="bfloat16", **LONG, positions=32768, norm="head", pdl=True)
    code = disassembly(compile_spec(fused, 90))
    wait = code.index("ACQBULK")
    copied = code.index("LDGSTS")
    written = [wait + m.start() for m in re.finditer(r"\bSTG\b", code[wait:copied])]
    assert written and "BAR.SYNC" in code[max(written) : copied]


def test_what_programs_ask_for_before_they_wait():
    """Positions and sequences, the first pages' numbers and the row's own, four rows of gains and rotation tables each
    by one or two loads; the sum of splits has positions only.
    """
    first, second = decode_attention_specs(
        1, 32, 4, 128, dtype="bfloat16", **LONG, positions=32768, norm="head", pdl=True
    )
    codes = [disassembly(compile_spec(spec, 90)) for spec in (first, second)]
    loads = [len(re.findall(r"\bLDG\b", code[: code.index("ACQBULK")])) for code in codes]
    assert loads[0] >= 8 and loads[1] >= 1


def test_programs_without_work_stay_only_where_launches_overlap():
    """Beside a launch without pdl nothing comes into their place."""
    for schedule, pdl, wanted in ((None, True, 1200), (Schedule(linger=0), True, 0), (None, False, 0)):
        more = {"positions": 32768, "norm": "head", "schedule": schedule, "pdl": pdl}
        first, second = decode_attention_specs(1, 32, 4, 128, dtype="bfloat16", **LONG, **more)
        assert dict(first.constexprs)["LINGER"] == wanted and "LINGER" not in dict(second.constexprs)
        code = disassembly(compile_spec(first, 90))
        assert ("NANOSLEEP" in code) == (wanted > 0)
        if wanted:
            # Those with work never come to it, and it stands behind a wait.
            assert code.rindex("ACQBULK") < code.index("NANOSLEEP")


@pytest.mark.parametrize(("rows", "dim"), [(1, 128), (4, 256)])
def test_devices_with_little_shared_memory_get_a_schedule_that_fits(rows, dim, monkeypatch):
    given = {"dtype": "bfloat16", **LONG}
    small = attention_specs(rows, 16, 4, dim, capability=89, **given)
    assert compile_spec(small[0], 89).shared <= 99 * 1024
    full = attention_specs(rows, 16, 4, dim, **given)
    assert small[0].num_stages < full[0].num_stages
    # The same sums, by another number of programs at one row.
    programs = {"PROGRAMS": 0, "FILL": 0}
    assert [dict(spec.constexprs) | programs for spec in small] == [dict(spec.constexprs) | programs for spec in full]
    assert [spec.num_warps for spec in small] == [spec.num_warps for spec in full]
    q = jax.ShapeDtypeStruct((rows, 16 * dim), jnp.bfloat16)
    pages = jax.ShapeDtypeStruct((LONG["pages"], 4, LONG["page_size"], dim), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((LONG["sequences"], LONG["max_pages"]), jnp.int32)
    monkeypatch.setattr(api, "capability_of", lambda array: 89)
    made = api._specs(q, pages, pages, table, None, None, None, dim**-0.5, None, 1)
    assert [spec.key for spec in made] == [spec.key for spec in small]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 65}, "got 65, wanted 1 to 64"),
        ({"rows_of_sequence": 3}, "a divisor of rows=4"),
        ({"heads": 5}, "5 and 4"),
        ({"window": 0}, "window"),
        ({"page_size": 48}, "got 48"),
        ({"page_size": 4096, "max_pages": 11586}, "11586 of 4096 keys, wanted at most 47452160 keys"),
        ({"sequences": 2**21, "max_pages": 2**10}, "2097152 x 1024 pages, wanted fewer than"),
        ({"schedule": Schedule(fill=0)}, "fill=0.*wanted no number below 1"),
        ({"dtype": "float64"}, "float64"),
        ({"dim": 512}, "512 in bfloat16, wanted 1 to 256"),
    ],
)
def test_refusals(options, message):
    arguments = {"rows": 4, "heads": 8, "kv_heads": 4, "dim": 64, "dtype": "bfloat16"} | SIZES | options
    with pytest.raises(InvalidArgument, match=message):
        attention_specs(**arguments)
    if "rows_of_sequence" not in options:
        with pytest.raises(InvalidArgument, match=message):
            decode_attention_specs(positions=64, **arguments)


def test_append_and_attention_in_one_leave_room_for_the_new_key_and_value():
    arguments = {"kv_heads": 1, "dim": 64, "dtype": "bfloat16", **SIZES}
    attention_specs(1, 32, **arguments)
    decode_attention_specs(1, 30, positions=64, **arguments)
    with pytest.raises(InvalidArgument, match="31 and 1, wanted heads a multiple of kv_heads, up to 30 times"):
        decode_attention_specs(1, 31, positions=64, **arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 700, "sink": True}], ids=str)
def test_on_a_gpu(options):
    """New queries, tables and positions at every call; keys that no row sees are NaN in a page of their own."""
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((2, SIZES["pages"], 4, 64, 128))
    pages[:, 0] = np.nan
    pools = dict(zip(("k_pages_ptr", "v_pages_ptr"), (jnp.asarray(p, jnp.bfloat16) for p in pages), strict=True))
    function = jax.jit(functools.partial(reference, scale=128**-0.5, window=options.get("window")))
    sink = jnp.asarray(rng.standard_normal(32), jnp.bfloat16) if "sink" in options else None

    def run(rows, given, **more):
        arrays = {name: jnp.asarray(given[name]) for name in ("table_ptr", "position_ptr", "sequence_ptr")} | pools
        arrays["q_ptr"] = jnp.asarray(given["q_ptr"], jnp.bfloat16)
        specs = specs_for(rows, **options, **more)
        out = on_a_gpu(specs, arrays if sink is None else arrays | {"sink_ptr": sink})["out_ptr"]
        return out, np.asarray(function(*(arrays[a.name] for a in specs[0].inputs), sink)).astype(np.float64)

    def inputs(rows):
        return kv_case(rng, rows=rows, positions=1536, **SIZES) | {"q_ptr": rng.standard_normal((rows, 32 * 128))}

    alone = inputs(1)
    first = run(1, alone)[0][0]
    for fill in (1, 10**5):  # stretches, splits
        same_bits(run(1, alone, schedule=Schedule(fill=fill))[0][0], first)
    for rows in BUCKETS:
        for position in positions_of(rows):
            given = inputs(rows) | {"table_ptr": alone["table_ptr"]}
            for name in ("q_ptr", "position_ptr", "sequence_ptr"):
                given[name][position] = alone[name][0]
            out, wanted = run(rows, given)
            same_bits(out[position], first)
            assert relative_error(out, wanted) <= 8e-3
    given = inputs(8)
    given["sequence_ptr"][:] = 3
    given["position_ptr"][:] = np.arange(500, 508)
    same_bits(run(8, given, rows_of_sequence=8)[0], run(8, given)[0])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "dtype", "bound"),
    [
        (8, 4, 64, "float16", 2e-3),
        (4, 4, 256, "bfloat16", 1e-2),
        (64, 4, 80, "bfloat16", 1e-2),
        (8, 2, 128, "float32", 1e-5),
    ],
)
def test_other_heads_and_dtypes_on_a_gpu(heads, kv_heads, dim, dtype, bound):
    rng, sizes = np.random.default_rng(1), SIZES | {"sequences": 8, "pages": 8 * 24 + 1, "page_size": 16}
    for rows in (1, 6):
        specs = attention_specs(rows, heads, kv_heads, dim, dtype=dtype, **sizes)
        given = {k: jnp.asarray(v) for k, v in kv_case(rng, rows=rows, positions=384, **sizes).items()}
        for a in specs[0].inputs:
            if a.name not in given:
                given[a.name] = jnp.asarray(rng.standard_normal(a.shape), a.dtype)
        out = on_a_gpu(specs, given)["out_ptr"]
        wanted = reference(*(given[a.name] for a in specs[0].inputs), scale=dim**-0.5, window=None)
        assert relative_error(out, np.asarray(wanted).astype(np.float64)) <= bound


@pytest.mark.gpu
@pytest.mark.parametrize(("norm", "options"), [("head", {}), ("projection", {"clip": 2.0, "window": 700})], ids=str)
def test_append_and_attention_in_one_have_the_bits_of_both_on_a_gpu(norm, options):
    """Pages and output; the new key's place holds NaN before."""
    rng = np.random.default_rng(2)
    sizes, clip, window = SIZES | {"dtype": "bfloat16"}, options.get("clip"), options.get("window")
    pages = rng.standard_normal((2, SIZES["pages"], 4, 64, 128)).astype(np.float32)
    of_append = {"positions": 1536, "norm": norm, "clip": clip}
    for rows in (1, 4, 64):
        append = kv_append_spec(rows, 32, 4, 128, **sizes, **of_append)
        parts = append, *attention_specs(rows, 32, 4, 128, **sizes, window=window)
        fused = decode_attention_specs(rows, 32, 4, 128, **sizes, **of_append, window=window)
        given = kv_case(rng, rows=rows, positions=1536, **SIZES)
        given["sequence_ptr"] = rng.permutation(64)[:rows].astype(np.int32)
        given["position_ptr"][-1] = 1024
        mine, own = given["position_ptr"] >= 0, pages.copy()
        place, sequence = given["position_ptr"][mine], given["sequence_ptr"][mine]
        own[:, given["table_ptr"][sequence, place // 64], :, place % 64] = np.nan
        given |= {"k_pages_ptr": own[0], "v_pages_ptr": own[1]}
        for a in append.inputs:
            if a.name not in given:
                given[a.name] = rng.standard_normal(a.shape)
        arrays = {a.name: jnp.asarray(given[a.name], a.dtype) for a in append.inputs}
        got, wanted = on_a_gpu(fused, arrays), on_a_gpu(parts, arrays)
        assert got.keys() == wanted.keys() == {"k_pages_ptr", "v_pages_ptr", "out_ptr"}
        for name, value in wanted.items():
            assert not np.isnan(value.astype(np.float32)).any()
            same_bits(got[name], value)
