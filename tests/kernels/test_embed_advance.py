"""Embedding and the end of a step: reference, interpreted, compiled for two capabilities, and on a GPU."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import run_interpreted

pytest.importorskip("triton")

from decode_cases import BUCKETS, check_compiled, on_a_gpu, same_bits
from embed_advance_cases import advances_as_the_oracle, by_reference, decodes_without_the_host, embed_oracle

from moe_jax.pallas_kernels.advance import advance_spec
from moe_jax.pallas_kernels.compiled import compile_spec, disassembly
from moe_jax.pallas_kernels.embed import embed_spec
from moe_jax.pallas_kernels.errors import InvalidArgument


def test_interpreted():
    run_interpreted("interpreted_embed_advance.py")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_reference_of_embed(dtype):
    rng = np.random.default_rng(0)
    table = np.array(jnp.asarray(rng.standard_normal((19, 24)), dtype))
    table[-1], table[0] = np.nan, np.nan  # what a negative or clipped index would give
    ids = np.array([3, -1, 18, 19, 0, -19, 2**31 - 1, -(2**31)], np.int32)
    out = by_reference(embed_spec(8, 19, 24, dtype=dtype), {"ids_ptr": ids, "table_ptr": table})["x_ptr"]
    same_bits(out, embed_oracle(ids, table))


@pytest.mark.parametrize("max_tokens", [None, 8])
@pytest.mark.parametrize(("rows", "sequences", "stops"), [(1, 1, 1), (7, 5, 3), (64, 64, 8), (70, 9, 5)])
def test_the_reference_of_advance(rows, sequences, stops, max_tokens):
    advances_as_the_oracle(by_reference, rows, sequences, stops, max_tokens, 10)


def test_steps_follow_each_other_by_the_reference():
    decodes_without_the_host(by_reference)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("hidden", [2048, 100])
def test_embed_compiles_without_spills(hidden, capability):
    check_compiled(embed_spec(64, 151936, hidden, dtype="bfloat16", pdl=capability == 90), capability)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("rows", "stops", "max_tokens"), [(1, 1, None), (64, 64, 40960)])
def test_advance_compiles_without_spills(rows, stops, max_tokens, capability):
    check_compiled(advance_spec(rows, 64, stops, max_tokens=max_tokens, pdl=capability == 90), capability)


def test_embed_copies_16_bytes_at_a_time():
    code = disassembly(compile_spec(embed_spec(4, 151936, 2048, dtype="bfloat16"), 90))
    assert "LDG.E.128" in code and "STG.E.128" in code


@pytest.mark.parametrize(
    ("arguments", "dtype", "message"),
    [
        ((0, 5, 8), "float32", "rows: got 0"),
        ((1, 0, 8), "float32", "got 0 x 8"),
        ((1, 5, 0), "float32", "got 5 x 0"),
        ((1, 5, 8), "float64", "float64"),
    ],
)
def test_embed_refuses(arguments, dtype, message):
    with pytest.raises(InvalidArgument, match=message):
        embed_spec(*arguments, dtype=dtype)


@pytest.mark.parametrize(
    ("arguments", "max_tokens", "message"),
    [
        ((0, 4, 1), None, "rows: got 0"),
        ((1, 0, 1), None, "max_sequences: got 0"),
        ((1, 4, 0), None, "stops: got 0, wanted 1 to 64"),
        ((1, 4, 65), None, "got 65"),
        ((1, 4, 1), 0, "max_tokens: got 0"),
    ],
)
def test_advance_refuses(arguments, max_tokens, message):
    with pytest.raises(InvalidArgument, match=message):
        advance_spec(*arguments, max_tokens=max_tokens)


def run_on_a_gpu(spec, given):
    return on_a_gpu((spec,), {a.name: jnp.asarray(given[a.name]) for a in spec.inputs})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_embed_on_a_gpu(dtype):
    rng = np.random.default_rng(1)
    for rows in BUCKETS:
        for hidden in (2048, 100):
            table = np.asarray(jnp.asarray(rng.standard_normal((1000, hidden)), dtype))
            ids = rng.integers(-3, 1003, rows).astype(np.int32)
            out = run_on_a_gpu(embed_spec(rows, 1000, hidden, dtype=dtype), {"ids_ptr": ids, "table_ptr": table})
            same_bits(out["x_ptr"], embed_oracle(ids, table))


@pytest.mark.gpu
@pytest.mark.parametrize("max_tokens", [None, 8])
@pytest.mark.parametrize("rows", BUCKETS)
def test_advance_on_a_gpu(rows, max_tokens):
    advances_as_the_oracle(run_on_a_gpu, rows, 64, 8, max_tokens, 5)


@pytest.mark.gpu
def test_steps_follow_each_other_on_a_gpu():
    decodes_without_the_host(run_on_a_gpu)
