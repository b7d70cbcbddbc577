"""Run by test_embed_advance.py where Triton interprets instead of compiling."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from arena import interpreted
from embed_advance_cases import advance_case, advances_as_the_oracle, decodes_without_the_host, embed_oracle
from interpreting import run_early

from moe_jax.pallas_kernels.advance import advance_spec
from moe_jax.pallas_kernels.embed import embed_spec
from moe_jax.pallas_kernels.interpret import interpret


def run(spec, given):
    """Between guards, which show an access beside an array."""
    after = interpreted(spec, given)
    return {a.name: after[a.name] for a in spec.arguments if a.role in ("inout", "out")}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(("rows", "vocabulary", "hidden"), [(1, 1, 1), (5, 37, 72), (3, 9, 1030)])
def test_embed(rows, vocabulary, hidden, dtype):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((vocabulary, hidden)).astype(dtype)
    for _ in range(3):
        ids = rng.integers(0, vocabulary, rows).astype(np.int32)
        ids[rows // 2] = rng.choice([-1, vocabulary, 2**31 - 1, -(2**31)])
        x = run(embed_spec(rows, vocabulary, hidden, dtype=dtype), {"ids_ptr": ids, "table_ptr": table})["x_ptr"]
        np.testing.assert_array_equal(x, embed_oracle(ids, table))


def unwritten(shape, dtype):
    """An array that takes memory only where it is written; elsewhere it is 0."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    no_reserve = 0x4000  # MAP_NORESERVE of Linux, which Python 3.12 has no name for
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    return np.frombuffer(memory, dtype).reshape(shape)


def test_embed_reads_tables_of_more_than_2_to_the_31_elements():
    vocabulary, hidden = 2**20 + 5, 2050
    spec = embed_spec(4, vocabulary, hidden, dtype="float16")
    ids = np.array([vocabulary - 1, 2**31 // hidden + 1, 7, 2**31 // hidden], np.int32)
    table = unwritten((vocabulary, hidden), "float16")
    for value, i in enumerate(ids.tolist(), 1):
        table[i] = value
    x = np.full((4, hidden), np.nan, np.float16)
    interpret(spec, {"ids_ptr": ids, "table_ptr": table, "x_ptr": x})
    np.testing.assert_array_equal(x, np.broadcast_to(np.arange(1, 5, dtype=np.float16)[:, None], x.shape))


@pytest.mark.parametrize("max_tokens", [None, 8])
@pytest.mark.parametrize(("rows", "sequences", "stops"), [(1, 1, 1), (7, 5, 3), (16, 64, 8), (70, 9, 5)])
def test_advance(rows, sequences, stops, max_tokens):
    advances_as_the_oracle(run, rows, sequences, stops, max_tokens, 4)


def test_advance_records_past_2_to_the_31_elements():
    sequences, positions = 2**16 + 8, 2**15 + 3
    spec = advance_spec(2, sequences, 1, max_tokens=positions)
    made = {a.name: np.zeros(a.shape, np.int32) for a in spec.arguments if a.name != "tokens_ptr"}
    made["tokens_ptr"] = unwritten((sequences, positions), "int32")
    made["token_ptr"][:], made["sequence_ptr"][:] = [11, 12], [sequences - 1, 3]
    made["following_ptr"][:], made["limit_ptr"][:] = positions - 1, positions
    interpret(spec, made)
    assert made["tokens_ptr"][[sequences - 1, 3], positions - 1].tolist() == [11, 12]


def test_steps_follow_each_other():
    decodes_without_the_host(run)


def test_nothing_is_read_early():
    """And the embedding lets the next launch start when it has waited, so that others may read early."""
    rng = np.random.default_rng(1)
    embed = embed_spec(5, 37, 1030, dtype="float16", pdl=True)
    assert embed.opens and not embed.early
    run_early(embed, rng, {"ids_ptr": np.array([3, -1, 36, 0, 37], np.int32)})
    for max_tokens in (None, 8):
        advance = advance_spec(7, 5, 3, max_tokens=max_tokens, pdl=True)
        assert not advance.opens and not advance.early
        run_early(advance, rng, advance_case(rng, advance))
