"""Activations of an expert, each under a name that means one formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..checks import check_choice, check_number, check_switch
from ..errors import InvalidArgument

Name = Literal["swiglu", "gpt_oss_swiglu", "geglu_tanh", "geglu_erf", "relu2"]


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What happens between the two matmuls of an expert.

    With gate g and up u (f32):

    =================  =======================================================================
    ``swiglu``         ``silu(g) * u`` (arXiv:2002.05202)
    ``gpt_oss_swiglu`` ``g' * sigmoid(alpha * g') * (u' + 1)``, ``g' = min(g, limit)``,
                       ``u' = clip(u, -limit, limit)`` (the gpt-oss reference model)
    ``geglu_tanh``     ``gelu(g) * u`` with the tanh approximation
    ``geglu_erf``      ``gelu(g) * u`` with erf
    ``relu2``          ``relu(u)**2``, no gate (arXiv:2109.08668)
    =================  =======================================================================

    Attributes:
        name: one of the above.
        layout: where gate and up stand in the first weight's 2I rows: ``"halves"`` (gate rows, then up
            rows) or ``"interleaved"`` (gate in even rows, up in odd rows). No default: families differ,
            and the wrong one is finite and wrong. None for ``relu2``, which has no gate.
        limit: clamp. Required by ``gpt_oss_swiglu``; optional for ``swiglu``; refused elsewhere.
        limit_after: only for ``swiglu`` with a limit. False: ``silu(min(g, limit)) * clip(u, ±limit)``.
            True: ``min(silu(g), limit) * clip(u, ±limit)``. Families differ, so there is no default.
        alpha: only, and required, for ``gpt_oss_swiglu`` (gpt-oss uses 1.702).
    """

    name: Name
    layout: Literal["halves", "interleaved"] | None
    limit: float | None = None
    limit_after: bool | None = None
    alpha: float | None = None

    def __post_init__(self) -> None:
        where = f"Activation(name={self.name!r})"

        def check(ok: bool, problem: str, got: object, wanted: object) -> None:
            if not ok:
                raise InvalidArgument(problem, where=where, got=got, wanted=wanted)

        check_choice(where, "name", self.name, get_args(Name))
        check_choice(where, "layout", self.layout, ("halves", "interleaved") if self.gated else (None,))
        oss, clamped = self.name == "gpt_oss_swiglu", self.name == "swiglu" and self.limit is not None
        check(self.limit is None or oss or clamped, "limit", self.limit, "None")
        if self.limit is not None:
            object.__setattr__(self, "limit", check_number(where, "limit", self.limit, over=0, infinite=True))
        check(not oss or self.limit is not None, "limit", self.limit, "a positive number (gpt-oss uses 7.0)")
        check((self.alpha is not None) == oss, "alpha", self.alpha, "a number (gpt-oss uses 1.702)" if oss else "None")
        check(
            (self.limit_after is not None) == clamped,
            "limit_after",
            self.limit_after,
            "True or False" if clamped else "None",
        )
        if clamped:
            object.__setattr__(self, "limit_after", check_switch(where, "limit_after", self.limit_after))
        if oss:
            object.__setattr__(self, "alpha", check_number(where, "alpha", self.alpha))

    @property
    def gated(self) -> bool:
        """Whether the first weight has 2I rows (gate and up) rather than I."""
        return self.name != "relu2"

    def rows(self, intermediate: int) -> int:
        """Rows of the first weight for an intermediate size."""
        return 2 * intermediate if self.gated else intermediate


def activate(h: Float[Array, "*n rows"], activation: Activation) -> Float[Array, "*n I"]:
    """Apply an activation to the first matmul's output, in the dtype it comes in (f32 in the kernels)."""
    if activation.name == "relu2":
        return jnp.square(jax.nn.relu(h))
    if activation.layout == "interleaved":
        # Not h[..., 0::2]: XLA's GPU compiler aborts on the gradient of such slices (JAX 0.11.2).
        pairs = h.reshape(*h.shape[:-1], h.shape[-1] // 2, 2)
        gate, up = pairs[..., 0], pairs[..., 1]
    else:
        gate, up = jnp.split(h, 2, axis=-1)
    limit, alpha = activation.limit, activation.alpha
    if activation.name == "gpt_oss_swiglu":
        assert limit is not None
        assert alpha is not None
        gate = jnp.minimum(gate, limit)
        return gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(up, -limit, limit) + 1)
    if activation.name == "geglu_tanh":
        return jax.nn.gelu(gate, approximate=True) * up
    if activation.name == "geglu_erf":
        return jax.nn.gelu(gate, approximate=False) * up
    if limit is None:
        return jax.nn.silu(gate) * up
    up = jnp.clip(up, -limit, limit)
    if activation.limit_after:
        return jnp.minimum(jax.nn.silu(gate), limit) * up
    return jax.nn.silu(jnp.minimum(gate, limit)) * up
