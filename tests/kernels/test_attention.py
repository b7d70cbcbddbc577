"""Decode attention: interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton")

from decode_cases import BUCKETS, check_compiled, kv_case, on_device, positions_of, run_interpreted, same_bits

from moe_jax.pallas_kernels.attention import Schedule, attention_reference, attention_specs
from moe_jax.pallas_kernels.errors import InvalidArgument

SIZES = {"sequences": 64, "pages": 64 * 24 + 1, "page_size": 64, "max_pages": 24}


def specs_for(rows: int, **more):
    return attention_specs(rows, 32, 4, 128, dtype="bfloat16", **SIZES, **more)


def test_interpreted():
    run_interpreted("attention or one_sequence")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("options", [{}, {"window": 1000, "sink": True}, {"rows_of_sequence": 4}], ids=str)
def test_compiles_without_spills(options, capability):
    for spec in specs_for(16, pdl=capability == 90, **options):
        check_compiled(spec, capability)


@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (4, 256), (64, 80)])
def test_other_heads_compile_without_spills(heads, dim):
    for spec in attention_specs(4, heads, 4, dim, dtype="bfloat16", pdl=True, **SIZES):
        check_compiled(spec, 90)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 65}, "got 65, wanted 1 to 64"),
        ({"rows_of_sequence": 3}, "a divisor of rows=4"),
        ({"heads": 5}, "5 and 4"),
        ({"window": 0}, "window"),
        ({"page_size": 48}, "got 48"),
    ],
)
def test_refusals(options, message):
    arguments = {"rows": 4, "heads": 8, "kv_heads": 4, "dim": 64, "dtype": "bfloat16"} | SIZES | options
    with pytest.raises(InvalidArgument, match=message):
        attention_specs(**arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"window": 700, "sink": True}], ids=str)
def test_on_a_gpu(options):
    rng = np.random.default_rng(0)
    pages = rng.standard_normal((2, SIZES["pages"], 4, 64, 128))
    pools = dict(zip(("k_pages_ptr", "v_pages_ptr"), (jnp.asarray(p, jnp.bfloat16) for p in pages), strict=True))
    function = attention_reference(32, 128, **({"scale": None, "window": None, "sink": False} | options))
    sink = jnp.asarray(rng.standard_normal(32 if "sink" in options else 1), jnp.bfloat16)

    def run(rows, given, **more):
        q = jnp.asarray(given["q_ptr"], jnp.bfloat16)
        arrays = {name: jnp.asarray(given[name]) for name in ("table_ptr", "position_ptr", "sequence_ptr")} | pools
        arrays |= {"q_ptr": q, "sink_ptr": sink}
        specs = specs_for(rows, **options, **more)
        out = on_device(specs, arrays)["out_ptr"]
        return out, np.asarray(function(*(arrays[a.name] for a in specs[0].inputs), sink)).astype(np.float32)

    def inputs(rows):
        return kv_case(rng, rows=rows, positions=1536, **SIZES) | {"q_ptr": rng.standard_normal((rows, 32 * 128))}

    alone = inputs(1)
    first = run(1, alone)[0][0]
    for fill in (0, 10**6):
        same_bits(run(1, alone, schedule=Schedule(fill=fill))[0][0], first)
    for rows in BUCKETS:
        for position in positions_of(rows):
            given = inputs(rows) | {"table_ptr": alone["table_ptr"]}
            for name in ("q_ptr", "position_ptr", "sequence_ptr"):
                given[name][position] = alone[name][0]
            out, wanted = run(rows, given)
            same_bits(out[position], first)
        assert np.linalg.norm(out.astype(np.float32) - wanted) <= 8e-3 * np.linalg.norm(wanted)
    given = inputs(8)
    given["sequence_ptr"][:] = 3
    given["position_ptr"][:] = np.arange(500, 508)
    same_bits(run(8, given, rows_of_sequence=8)[0], run(8, given)[0])
