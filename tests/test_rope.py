"""RoPE against values written by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.errors import InvalidArgument
from moe_jax.models.config import RopeConfig
from moe_jax.models.rope import frequencies, rotate, rotation

FIXTURE = json.loads((Path(__file__).parent / "fixtures" / "rope.json").read_text())


@pytest.mark.parametrize("case", FIXTURE["cases"], ids=lambda case: case["name"])
def test_frequencies_and_rotation_equal_transformers(case):
    config = RopeConfig(**case["config"])
    per_token, scale = frequencies(config, case["head_dim"])
    assert per_token.dtype == np.float32
    # One unit in the last place: the two libraries' powers round differently in a few places.
    np.testing.assert_allclose(per_token, np.asarray(case["inv_freq"], np.float32), rtol=2.5e-7, atol=0)
    assert scale == pytest.approx(case["scale"], rel=1e-12)
    positions = jnp.asarray([case["positions"]], jnp.int32)
    got = rotation(config, case["head_dim"], positions)
    angles = np.asarray(case["positions"], np.float32)[:, None] * per_token
    near = np.asarray(case["positions"]) <= 17
    assert near.sum() == 4 and angles.max() > 1000
    for ours, function, theirs in ((got.cos, np.cos, case["cos"]), (got.sin, np.sin, case["sin"])):
        # At every position against the exact function of the f32 angle.
        np.testing.assert_allclose(ours[0], scale * function(angles.astype(np.float64)), rtol=0, atol=1e-6)
        # Against theirs where the position does not magnify the last place of a frequency.
        np.testing.assert_allclose(ours[0, near], np.asarray(theirs, np.float32)[near], rtol=0, atol=5e-6)


def test_rotate_equals_transformers():
    case = FIXTURE["rotate"]
    by = rotation(RopeConfig(theta=case["theta"]), 8, jnp.asarray([case["positions"]], jnp.int32))
    out = rotate(jnp.asarray(case["x"], jnp.float32), by)
    np.testing.assert_allclose(out, np.asarray(case["y"], np.float32), rtol=0, atol=2e-6)
    low = rotate(jnp.asarray(case["x"], jnp.bfloat16), by)
    assert low.dtype == jnp.bfloat16


def test_bad_rope_is_refused_with_the_values():
    with pytest.raises(InvalidArgument, match="got 7, wanted"):
        frequencies(RopeConfig(), 7)
    with pytest.raises(InvalidArgument, match="original_max_positions: got None"):
        frequencies(RopeConfig(kind="yarn", factor=2.0), 8)
