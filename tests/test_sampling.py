"""The sampler alone: exact at the edges, right on average, ignorant of its batch."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import sampling as sampling_file
from moe_jax.errors import InvalidArgument
from moe_jax.sampling import _noise, sample, sampling, token_logprobs

draw = jax.jit(sample)


def rows(logits, temperature=1.0, top_p=1.0, seed=0, sequences=None, positions=None):
    logits = np.asarray(logits, np.float32)
    count = logits.shape[0]
    sequences = np.arange(count, dtype=np.int32) if sequences is None else np.asarray(sequences, np.int32)
    positions = np.zeros(count, np.int32) if positions is None else np.asarray(positions, np.int32)
    return np.asarray(draw(logits, sequences, positions, sampling(temperature, top_p, seed)))


def test_greedy_ties_go_to_the_lower_index():
    assert rows([[0, 3, 3, 1], [5, 5, 5, 5]] * 1000, temperature=0.0).tolist() == [1, 0] * 1000


def test_tiny_top_p_and_tiny_temperature_are_greedy():
    logits = [[0, 3, 3, 1], [2, 1, 2, 2]] * 1000
    for options in ({"top_p": 1e-30}, {"top_p": 1e-60}, {"temperature": 1e-30, "top_p": 0.2}):
        assert rows(logits, **options).tolist() == [1, 0] * 1000
    assert rows([[0, 3, 2, -1000]] * 2000, temperature=1e-300).tolist() == [1] * 2000
    assert set(rows([[0, 3, 3, 1]] * 2000, temperature=1e-300).tolist()) == {1, 2}  # not 0, so not greedy
    assert set(rows([[0, 3, 2, -1000]] * 2000, temperature=1e300).tolist()) == {0, 1, 2, 3}


def test_frequencies_follow_the_scaled_softmax():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    for temperature in (0.5, 1.0, 2.0):
        want = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
        got = np.bincount(rows([logits] * 20000, temperature=temperature), minlength=4) / 20000
        np.testing.assert_allclose(got, want, atol=0.015)


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    for top_p, kept in (
        (0.3, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.69, {1, 3}),
        (0.71, {1, 2, 3}),
        (0.95, {0, 1, 2, 3}),
    ):
        got = rows([logits] * 4000, top_p=top_p)
        assert set(got.tolist()) == kept
        want = np.where(np.isin(np.arange(4), list(kept)), np.exp(logits), 0)
        np.testing.assert_allclose(np.bincount(got, minlength=4) / 4000, want / want.sum(), atol=0.03)


def test_top_p_reached_exactly_keeps_no_more_and_ties_go_to_the_lower_index():
    assert set(rows([[0, 0, 0, 0]] * 1000, top_p=0.5).tolist()) == {0, 1}
    assert set(rows([[0, 0, 0, 0]] * 1000, top_p=0.51).tolist()) == {0, 1, 2}


def test_top_p_one_keeps_every_token():
    logits = np.zeros(256)
    logits[0] = 10.0  # the others together have 0.0114
    got = rows([logits] * 10000)
    assert np.mean(got != 0) == pytest.approx(0.0114, rel=0.25)
    # Up to 0.99 the first token is enough, and after it nothing is left that would be drawn by rounding.
    assert (rows([logits] * 10000, top_p=0.98) == 0).all()


def test_noise_reaches_beyond_what_23_bits_give():
    """Gumbel noise of 23-bit uniforms ends at 16.7: rarer tokens would never be drawn."""
    noise = jax.jit(lambda position: _noise(1 << 16, jnp.zeros(1, jnp.int32), position[None], np.zeros(2, np.uint32)))
    assert max(float(noise(np.int32(i)).max()) for i in range(300)) > 16.7


@pytest.mark.parametrize("word", [0, 0xFFFFFFFF])
def test_noise_is_finite_for_every_word(monkeypatch, word):
    same = types.SimpleNamespace(bind=lambda *arrays: (jnp.full(arrays[-1].shape, word, jnp.uint32),) * 2)
    monkeypatch.setattr(sampling_file, "threefry2x32_p", same)
    assert np.isfinite(_noise(3, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32), np.zeros(2, np.uint32))).all()


def test_a_row_does_not_depend_on_its_batch():
    random = np.random.default_rng(0)
    logits = random.normal(size=(64, 50))
    for top_p in (1.0, 0.8):
        batch = rows(logits, top_p=top_p, positions=np.arange(64))
        alone = [rows(logits[i : i + 1], top_p=top_p, sequences=[i], positions=[i])[0] for i in range(0, 64, 7)]
        assert batch[::7].tolist() == alone
        moved = rows(logits[::-1], top_p=top_p, sequences=np.arange(64)[::-1], positions=np.arange(64)[::-1])
        assert moved[::-1].tolist() == batch.tolist()


def test_seed_sequence_and_position_each_change_the_draws():
    flat = np.zeros((200, 50))
    base = rows(flat)
    assert base.tolist() == rows(flat).tolist()
    others = [
        rows(flat, seed=1),
        rows(flat, seed=1 << 32),
        rows(flat, seed=2**64 - 1),
        rows(flat, sequences=np.arange(200) + 200),
        rows(flat, positions=np.ones(200)),
    ]
    everything = [base, *others]
    for i, a in enumerate(everything):
        for b in everything[i + 1 :]:
            assert np.mean(a == b) < 0.2


def test_draws_do_not_depend_on_the_process_wide_generator():
    flat = np.zeros((8, 50))
    base = rows(flat, seed=5)
    with jax.default_prng_impl("rbg"):
        again = np.asarray(
            sample(jnp.asarray(flat, jnp.float32), *([jnp.arange(8, dtype=jnp.int32)] * 2), sampling(1, 1, 5))
        )
    assert again.tolist() == rows(flat, seed=5, positions=np.arange(8)).tolist() != base.tolist()


def test_parameters_compile_nothing_new():
    fresh = jax.jit(lambda *a: sample(*a))
    index = np.zeros(1, np.int32)
    for temperature, top_p, seed in ((0.0, 1.0, 0), (0.7, 1.0, 1), (1.3, 0.5, 2**40), (0, 0.1, 3)):
        fresh(np.zeros((1, 9), np.float32), index, index, sampling(temperature, top_p, seed))
    assert fresh._cache_size() == 1


def test_logprobs_are_of_the_model_itself():
    logits = jnp.asarray([[1000.0, 1001.0, 999.0]], jnp.float32)
    got = token_logprobs(logits, jnp.asarray([1], jnp.int32))
    np.testing.assert_allclose(got, -np.log(1 + np.exp(-1.0) + np.exp(-2.0)), rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature: got -0.1, wanted a finite number, 0 or more"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"temperature": float("inf")}, "temperature: got inf"),
        ({"temperature": 10**400}, "temperature: got an integer of 1329 bits"),
        ({"temperature": "hot"}, "temperature: got 'hot'"),
        ({"top_p": 0}, "top_p: got 0, wanted a number over 0, at most 1"),
        ({"top_p": 1.5}, "top_p: got 1.5"),
        ({"seed": -1}, "seed: got -1, wanted an integer from 0"),
        ({"seed": 2**64}, "seed: got an integer of 65 bits"),
        ({"seed": 1.0}, "seed: got 1.0"),
        ({"seed": True}, "seed: got True"),
        ({"seed": None}, "seed: got None"),
        ({"temperature": True}, "temperature: got True"),
        ({"top_p": None}, "top_p: got None"),
    ],
)
def test_bad_parameters_are_refused_with_the_values(options, message):
    with pytest.raises(InvalidArgument, match=message):
        sampling(**options)
