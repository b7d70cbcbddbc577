"""Activations: tables of values, layouts, and the combinations that must be refused."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference_numpy as truth
from backends import assert_close, both_modes, normal, run
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.grouped_moe import Activation, activate

LAYOUTS = ("halves", "interleaved")


def every_activation() -> list[Activation]:
    gated = [
        {"name": "swiglu"},
        {"name": "swiglu", "limit": 1.5, "limit_after": False},
        {"name": "swiglu", "limit": 1.5, "limit_after": True},
        {"name": "gpt_oss_swiglu", "limit": 1.5, "alpha": 1.702},
        {"name": "geglu_tanh"},
        {"name": "geglu_erf"},
    ]
    return [Activation(layout=layout, **kind) for kind in gated for layout in LAYOUTS] + [
        Activation(name="relu2", layout=None)
    ]


def scalar(activation: Activation, gate: float, up: float, mode: str = "eager") -> float:
    """With one gate and one up both layouts read the same two numbers; four tell them apart."""
    row = [gate, gate, up, up] if activation.layout == "halves" else [gate, up, gate, up]
    out = run(mode, lambda h: activate(h, activation), jnp.asarray([row], jnp.float32))
    assert out.shape == (1, 2)
    assert out[0, 0] == out[0, 1]
    return float(out[0, 0])


@both_modes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C33_two_kinds_of_swiglu(layout: str, mode: str) -> None:
    usual = Activation(name="swiglu", layout=layout)
    gpt_oss = Activation(name="gpt_oss_swiglu", layout=layout, limit=7.0, alpha=1.702)
    assert scalar(usual, 2, 3, mode) == pytest.approx(5.2848, abs=1e-4)
    assert scalar(usual, 10, -9, mode) == pytest.approx(-89.996, abs=1e-3)
    assert scalar(gpt_oss, 2, 3, mode) == pytest.approx(7.7426, abs=1e-4)
    assert scalar(gpt_oss, 10, -9, mode) == pytest.approx(-41.9997, abs=1e-4)
    assert scalar(gpt_oss, -20, 3, mode) == pytest.approx(-20 / (1 + np.exp(1.702 * 20)) * 4, rel=1e-4)


def test_C33_no_default_is_shared_across_families() -> None:
    for name in ("swiglu", "gpt_oss_swiglu", "geglu_tanh", "geglu_erf", "relu2"):
        with pytest.raises(TypeError, match="layout"):
            Activation(name=name)  # pyrefly: ignore
    with pytest.raises(InvalidArgument, match="alpha"):
        Activation(name="gpt_oss_swiglu", layout="interleaved", limit=7.0)
    with pytest.raises(InvalidArgument, match="limit"):
        Activation(name="gpt_oss_swiglu", layout="interleaved", alpha=1.702)


@both_modes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_C34_clamp_before_and_after_silu(layout: str, mode: str) -> None:
    before = Activation(name="swiglu", layout=layout, limit=10.0, limit_after=False)
    after = Activation(name="swiglu", layout=layout, limit=10.0, limit_after=True)
    none = Activation(name="swiglu", layout=layout)
    assert scalar(before, 20, -15, mode) == pytest.approx(-99.9955, abs=1e-4)
    assert scalar(after, 20, -15, mode) == pytest.approx(-100, abs=1e-5)
    assert scalar(none, 20, -15, mode) == pytest.approx(-300, abs=1e-3)
    # The gate is clamped from above only.
    assert scalar(before, -20, -15, mode) == pytest.approx(4.12e-7, rel=1e-2)
    assert scalar(after, -20, -15, mode) == pytest.approx(4.12e-7, rel=1e-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"limit": "7"}, "limit: got '7', wanted a number over 0"),
        ({"limit": True}, "limit: got True"),
        ({"limit": float("nan")}, "limit: got nan"),
        ({"limit": 10**400}, "limit: got an integer of 1329 bits"),
        ({"alpha": "1"}, "alpha: got '1', wanted a finite number"),
        ({"alpha": float("nan")}, "alpha: got nan"),
        ({"alpha": 1j}, "alpha: got 1j"),
        ({"layout": 3}, "layout: got 3, wanted 'halves' or 'interleaved'"),
        ({"name": ["swiglu"]}, r"name: got \['swiglu'\], wanted 'swiglu' or "),
        ({"name": "swiglu", "alpha": None, "limit_after": "no"}, "limit_after: got 'no', wanted True or False"),
        ({"name": "swiglu", "alpha": None, "limit_after": 1}, "limit_after: got 1"),
    ],
)
def test_values_of_another_kind_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"name": "gpt_oss_swiglu", "layout": "halves", "limit": 7, "alpha": np.float32(1.702)}
    Activation(**good)
    Activation(**{**good, "limit": float("inf")})
    # Numbers become Python's: an activation is a key.
    equal = Activation(**{**good, "limit": np.array(7.0), "alpha": float(np.float32(1.702))})
    assert hash(equal) == hash(Activation(**good)) and equal == Activation(**good)
    with pytest.raises(InvalidArgument, match=message):
        Activation(**{**good, **change})


def test_C34_unsupported_combinations_raise() -> None:
    names = ("swiglu", "gpt_oss_swiglu", "geglu_tanh", "geglu_erf", "relu2", "silu")
    values = itertools.product(
        names, (*LAYOUTS, None, "rows"), (None, 7.0, 0.0, -1.0), (None, True, False), (None, 1.7)
    )
    accepted = 0
    for name, layout, limit, after, alpha in values:
        gated = name in names[:4]
        fits = {
            "swiglu": alpha is None and ((limit is None and after is None) or (limit == 7.0 and after is not None)),
            "gpt_oss_swiglu": limit == 7.0 and after is None and alpha is not None,
            "silu": False,
        }.get(name, limit is None and after is None and alpha is None)
        fits = fits and (layout in LAYOUTS if gated else layout is None)
        if fits:
            Activation(name=name, layout=layout, limit=limit, limit_after=after, alpha=alpha)
            accepted += 1
        else:
            with pytest.raises(InvalidArgument) as caught:
                Activation(name=name, layout=layout, limit=limit, limit_after=after, alpha=alpha)
            assert str(caught.value.got) in str(caught.value)
            assert str(caught.value.wanted) in str(caught.value)
            assert caught.value.got != caught.value.wanted
    assert accepted == 2 * (3 + 1 + 1 + 1) + 1


@pytest.mark.parametrize("activation", every_activation(), ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_activation_matches_numpy(activation: Activation, dtype: str) -> None:
    h = normal(1, (4, activation.rows(6)), dtype, scale=3.0)
    got = activate(h, activation)
    want = np.stack([truth.activate(row, activation) for row in truth.f64(h)])
    assert got.dtype == h.dtype
    assert got.shape == (4, 6)
    assert_close(got, want, 1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("name", ["swiglu", "geglu_tanh", "geglu_erf"])
def test_layouts_differ_only_in_the_order_of_rows(name: str) -> None:
    h = normal(2, (3, 10))
    halves = activate(h, Activation(name=name, layout="halves"))
    woven = jnp.stack(jnp.split(h, 2, axis=-1), axis=-1).reshape(3, 10)
    np.testing.assert_array_equal(activate(woven, Activation(name=name, layout="interleaved")), halves)
    assert not np.array_equal(activate(h, Activation(name=name, layout="interleaved")), halves)


@pytest.mark.parametrize("activation", every_activation(), ids=str)
def test_C37_zero_rows_stay_zero(activation: Activation) -> None:
    h = jnp.zeros((3, activation.rows(4)))
    np.testing.assert_array_equal(activate(h, activation), np.zeros((3, 4)))


@pytest.mark.parametrize("activation", every_activation(), ids=str)
def test_extreme_values_stay_finite(activation: Activation) -> None:
    values = jnp.asarray([-1e4, -30.0, 0.0, 30.0, 1e4])
    h = jnp.stack([jnp.repeat(values, 5), jnp.tile(values, 5)], axis=1)[:, : activation.rows(1)]
    out, pull = jax.vjp(lambda a: activate(a, activation), h)
    assert np.isfinite(out).all()
    assert np.isfinite(pull(jnp.ones_like(out))[0]).all()


def test_C63_equal_activations_are_one() -> None:
    for activation, again in zip(every_activation(), every_activation(), strict=True):
        assert activation == again
        assert hash(activation) == hash(again)
    assert len(set(every_activation())) == len(every_activation())
