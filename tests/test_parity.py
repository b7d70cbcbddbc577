"""Checkpoints written by Hugging Face transformers must give its logits and its greedy tokens.

The fixtures and what they exercise are made by ``tests/fixtures/make_fixtures.py``.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(folder.parent.name for folder in FIXTURES.glob("*/reference.npz"))
DECODED = 32


@functools.cache
def load(name: str) -> moe_jax.Model:
    return moe_jax.load(FIXTURES / name)


@functools.cache
def reference(name: str) -> dict[str, np.ndarray]:
    with np.load(FIXTURES / name / "reference.npz", allow_pickle=False) as file:
        return dict(file)


@functools.cache
def full_forward(name: str) -> np.ndarray:
    """Logits of one pass over prompt and greedy tokens, f32 ``[2, 24 + 64, V]``."""
    wanted = reference(name)
    logits = load(name)(np.concatenate([wanted["tokens"], wanted["greedy"]], axis=1))
    assert logits.dtype == jnp.float32
    return np.asarray(logits)


def check_logits(name: str) -> None:
    wanted, got = reference(name), full_forward(name)
    prompt = wanted["tokens"].shape[1]
    np.testing.assert_allclose(got[:, :prompt], wanted["logits"], rtol=0, atol=1e-4)
    np.testing.assert_array_equal(np.argmax(got[:, prompt - 1 : -1], axis=-1), wanted["greedy"])


def check_greedy(name: str) -> None:
    """Generation gives the tokens, and the log-probabilities of one pass over everything."""
    wanted, full = reference(name), full_forward(name)
    prompt, count = wanted["tokens"].shape[1], wanted["greedy"].shape[1]
    got, logprobs = load(name).generate(wanted["tokens"], max_new_tokens=count, logprobs=True)
    np.testing.assert_array_equal(got, wanted["greedy"])
    expected = np.max(jax.nn.log_softmax(full[:, prompt - 1 : -1]), axis=-1)
    np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)


def check_prefill_and_decode(name: str) -> None:
    """Rows of different lengths, read by prefill and then token by token, against one pass over everything."""
    wanted, full, model = reference(name), full_forward(name), load(name)
    tokens = np.concatenate([wanted["tokens"], wanted["greedy"]], axis=1)
    graph, state = nnx.split(model.module)
    capacity = tokens.shape[1]
    prefill = jax.jit(lambda state, *args: nnx.merge(graph, state).prefill(*args, capacity))
    decode = jax.jit(lambda state, *args: nnx.merge(graph, state).decode(*args))
    prompt = wanted["tokens"].shape[1]
    lengths = np.array([prompt, prompt - 7], np.int32)
    rows = np.arange(2)
    logits, past = prefill(state, wanted["tokens"], lengths)
    for _ in range(DECODED):
        np.testing.assert_allclose(logits, full[rows, lengths - 1], rtol=0, atol=1e-5)
        assert np.array_equal(np.argmax(logits, axis=-1), np.argmax(full[rows, lengths - 1], axis=-1))
        logits, past = decode(state, tokens[rows, lengths], lengths, past)
        lengths = lengths + np.int32(1)
    np.testing.assert_allclose(logits, full[rows, lengths - 1], rtol=0, atol=1e-5)


# Each check compiles programs of its own, so the last one, which sees the whole vocabulary, runs once per family.
CASES = [(check, name) for check in (check_logits, check_greedy) for name in NAMES]
ONE_OF_EACH = ("mixtral_window", "qwen3_moe", "olmoe_clip_llama3", "qwen2_moe_linear_window")
CASES += [(check_prefill_and_decode, name) for name in ONE_OF_EACH]
IDS = [f"{check.__name__.removeprefix('check_')}-{name}" for check, name in CASES]


def test_every_family_and_variant_has_a_fixture():
    families = {load(name).config.family for name in NAMES}
    assert families == {"mixtral", "qwen3_moe", "olmoe", "qwen2_moe"}
    assert len(NAMES) == 11


@pytest.mark.parametrize(("check", "name"), CASES, ids=IDS)
def test_parity(check, name):
    check(name)


@pytest.mark.gpu
@pytest.mark.parametrize(("check", "name"), CASES, ids=IDS)
def test_gpu_parity(check, name):
    check(name)


def test_per_expert_and_fused_names_load_the_same_model():
    split, fused = (load(f"qwen3_moe_{kind}").module for kind in ("per_expert", "fused"))
    (graph, state), (other_graph, other_state) = nnx.split(split), nnx.split(fused)
    assert graph == other_graph
    jax.tree.map(np.testing.assert_array_equal, state, other_state)


def test_fixtures_differ_where_they_should():
    """Each fixture exercises what its name says: the loaded configuration shows it."""
    config = {name: load(name).config for name in NAMES}
    assert config["mixtral"].rope.theta != config["mixtral_window"].rope.theta
    assert config["mixtral_window"].windows == (8, 8)
    assert config["mixtral_sharded"].tie_embeddings
    assert len(list((FIXTURES / "mixtral_sharded").glob("*.safetensors"))) > 1
    assert config["qwen3_moe"].moe_layers == (True, False, True)
    assert config["qwen3_moe"].head_dim * config["qwen3_moe"].heads != config["qwen3_moe"].hidden_size
    assert config["qwen3_moe_yarn_tied"].moe_layers == (False, True)
    assert config["qwen2_moe_linear_window"].windows == (8, None, None)
    assert config["olmoe_clip_llama3"].clip_qkv == 0.8
    assert config["qwen2_moe"].shared_intermediate == 40
    assert config["qwen2_moe"].qkv_bias
    assert {c.rope.kind for c in config.values()} == {"default", "yarn", "llama3", "linear"}
    for family in ("qwen3_moe", "olmoe", "qwen2_moe"):
        assert {c.moe.router.renormalize for c in config.values() if c.family == family} == {True, False}
