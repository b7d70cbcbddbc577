"""The decoder modules: shapes, masks, storage, and prefill + decode against the full forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.errors import InvalidArgument
from moe_jax.models import attention
from moe_jax.models.attention import attend, rms_norm, visible
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import Decoder
from moe_jax.models.kv import KV, to_capacity, write
from tiny_models import FAMILIES, tiny_config, tiny_module


def tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 258, (rows, length)).astype(np.int32)


@nnx.jit
def forward(module, ids):
    return module(ids)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_split_hash_and_trace_without_arrays(family):
    config = tiny_config(family)
    abstract = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(abstract)
    again = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))[0]
    assert graphdef == again and hash(graphdef) == hash(again)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(state))
    logits = nnx.eval_shape(lambda module: module(tokens(1, 3)), abstract)
    assert logits.shape == (1, 3, 258) and logits.dtype == jnp.float32


def test_layout_of_parameters_is_the_documented_one():
    config = tiny_config("qwen3_moe")
    module = tiny_module(config)
    dense, moe = module.blocks
    assert dense.mlp.gate_up[...].shape == (96, 32) and dense.mlp.down[...].shape == (32, 48)
    assert moe.mlp.gate_up[...].shape == (6, 48, 32) and moe.mlp.down[...].shape == (6, 32, 24)
    assert moe.attention.qkv[...].shape == ((4 + 2 * 2) * 16, 32) and moe.attention.out[...].shape == (32, 64)
    assert moe.attention.q_norm[...].shape == (16,) and moe.attention.qkv_bias is None
    olmoe = tiny_module(tiny_config("olmoe")).blocks[0].attention
    assert olmoe.q_norm[...].shape == (32,) and olmoe.k_norm[...].shape == (32,)
    tied = tiny_module(tiny_config("qwen2_moe"))
    assert tied.head is None and tied.blocks[0].mlp.shared_gate[...].shape == (1, 32)


def test_bfloat16_stays_bfloat16_and_logits_are_float32():
    module = tiny_module(tiny_config("qwen3_moe", dtype="bfloat16"))
    assert {x.dtype.name for x in jax.tree.leaves(nnx.state(module, nnx.Param))} == {"bfloat16"}
    logits, past = jax.eval_shape(lambda: module.prefill(tokens(1, 4), jnp.asarray([4], jnp.int32), 8))
    assert past[0].keys.shape == (1, 8, 2, 16) and logits.shape == (1, 258)
    assert logits.dtype == jnp.float32 and past[0].keys.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_runs_on_the_cpu(dtype):
    config = tiny_config("qwen3_moe")
    ids = tokens(1, 4)
    wide = tiny_module(config)
    graph, state = nnx.split(wide)
    half = nnx.merge(graph, jax.tree.map(lambda x: x.astype(dtype), state))
    got, want = (np.asarray(jax.jit(lambda m=m: m(ids))()) for m in (half, wide))
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_window_is_the_query_and_the_tokens_just_before():
    mask = np.asarray(visible(jnp.asarray([[0, 1, 4]], jnp.int32), 6, 3))[0, 0]
    assert [list(np.flatnonzero(row)) for row in mask] == [[0], [0, 1], [2, 3, 4]]
    full = np.asarray(visible(jnp.asarray([[4]], jnp.int32), 6, None))[0, 0]
    assert list(np.flatnonzero(full[0])) == [0, 1, 2, 3, 4]


def test_windows_limit_what_a_token_can_see():
    config = tiny_config("mixtral")  # one layer of window 5: nothing older than 4 tokens can reach a logit
    module = tiny_module(config)
    ids = tokens(1, 20)
    other = ids.copy()
    other[0, :4] = (other[0, :4] + 1) % 258
    a, b = np.asarray(forward(module, ids)), np.asarray(forward(module, other))
    np.testing.assert_array_equal(a[0, 8:], b[0, 8:])
    assert np.abs(a[0, 7] - b[0, 7]).max() > 1e-6


@pytest.mark.parametrize("length", [32, 29, 17, 15])
def test_grouped_heads_and_blocks_of_queries_equal_a_plain_formula(length, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", 8)
    masks: list[tuple[int, ...]] = []

    def spy(positions: jax.Array, keys: int, window: int | None) -> jax.Array:
        masks.append((positions.shape[1], keys))
        return visible(positions, keys, window)

    monkeypatch.setattr(attention, "visible", spy)
    q, k, v = (np.random.default_rng(0).normal(size=(2, length, n, 8)).astype(np.float32) for n in (4, 2, 2))
    kv = KV(jnp.asarray(k), jnp.asarray(v))
    positions = jnp.asarray(np.broadcast_to(np.arange(length, dtype=np.int32), (2, length)))
    # A new function each time: what is traced depends on the block size set above.
    got = jax.jit(lambda *a: attend(*a, 6))(jnp.asarray(q), kv, positions)
    assert got.shape == q.shape
    # No mask of all queries by all keys for a length over two blocks, whether or not blocks divide it.
    assert set(masks) == {(8 if length > 16 else length, length)}
    q64, k64, v64 = (np.asarray(x, np.float64) for x in (q, *kv))
    scores = np.einsum("btnd,bsnd->bnts", q64, np.repeat(k64, 2, 2)) / np.sqrt(8)
    age = np.arange(length)[:, None] - np.arange(length)
    scores = np.where((age >= 0) & (age < 6), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got, np.einsum("bnts,bsnd->btnd", weights, np.repeat(v64, 2, 2)), atol=2e-6)


def test_storage_writes_each_row_at_its_own_place_and_blanks_padding():
    new = KV(jnp.full((2, 2, 1, 1), jnp.nan), jnp.ones((2, 2, 1, 1)))
    new = KV(new.keys.at[:, 0].set(5.0), new.values)
    stored = to_capacity(new, jnp.asarray([1, 1], jnp.int32), 4)
    assert np.asarray(stored.keys)[:, :, 0, 0].tolist() == [[5, 0, 0, 0]] * 2
    one = KV(jnp.full((2, 1, 1, 1), 7.0), jnp.full((2, 1, 1, 1), 7.0))
    stored = write(stored, one, jnp.asarray([[1], [3]], jnp.int32))
    assert np.asarray(stored.keys)[:, :, 0, 0].tolist() == [[5, 7, 0, 0], [5, 0, 0, 7]]
    beyond = write(stored, one, jnp.asarray([[4], [9]], jnp.int32))
    np.testing.assert_array_equal(beyond.keys, stored.keys)


def test_rms_norm_rounds_before_it_scales():
    x = jnp.asarray([[1.0, 2.0, 3.0]], jnp.bfloat16)
    scale = jnp.asarray([1.0, 0.5, 3.0], jnp.bfloat16)
    plain = np.asarray([[1.0, 2.0, 3.0]]) / np.sqrt(14 / 3 + 1e-6)
    want = scale * jnp.asarray(plain, jnp.bfloat16)
    np.testing.assert_array_equal(rms_norm(x, scale, 1e-6), want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_layers": (True, True)}, "moe_layers: got 2, wanted one for each of 1"),
        ({"windows": (0,)}, r"windows: got \(0,\)"),
        ({"heads": 3}, "heads: got 3, wanted a multiple of kv_heads=2"),
        ({"moe_layers": (False,)}, "dense_intermediate: got None"),
    ],
)
def test_configs_that_do_not_fit_together_are_refused(changes, message):
    config: ModelConfig = tiny_config("mixtral", **changes)
    with pytest.raises(InvalidArgument, match=message):
        Decoder(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda config: Decoder(None, rngs=nnx.Rngs(0)), "type of config: got NoneType, wanted ModelConfig"),
        (lambda config: Decoder(config, rngs=3), "type of rngs: got int, wanted Rngs"),
        (lambda config: Decoder(config, param_dtype="foo", rngs=nnx.Rngs(0)), "param_dtype: got 'foo', wanted"),
        (lambda config: Decoder(config, param_dtype=np.int8, rngs=nnx.Rngs(0)), "param_dtype: got int8, wanted"),
        (lambda config: tiny_module(config)(np.ones((1, 2))), "dtype of tokens: got float64, wanted integers"),
        (lambda config: tiny_module(config)(np.ones((1, 2), bool)), "dtype of tokens: got bool"),
    ],
)
def test_what_is_no_config_generator_dtype_or_tokens_is_refused(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(tiny_config("mixtral"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_float32_logits_equal_the_cpu(family):
    """No tf32 anywhere: its products would differ by 1e-3."""
    module = tiny_module(tiny_config(family))
    ids = tokens(2, 24)
    on_gpu = forward(module, ids)
    graphdef, state = nnx.split(module)
    on_cpu = forward(nnx.merge(graphdef, jax.device_put(state, jax.devices("cpu")[0])), ids)
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=0, atol=1e-4)
