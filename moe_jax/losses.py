"""Auxiliary loss that keeps a router's load even."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from moe_jax.pallas_kernels.checks import FLOATS, check_array, check_dtype, check_integer
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.route.reference import top_k_ids

WHERE = "load_balancing_loss"


def load_balancing_loss(
    router_logits: Float[Array, "*n E"] | Sequence[Float[Array, "*n E"]],
    top_k: int,
    *,
    mask: Bool[Array, "*m"] | Float[Array, "*m"] | None = None,
) -> Float32[Array, ""]:
    """Load balancing loss of Switch Transformer (arXiv:2101.03961, equations 4 to 6), as Hugging Face writes it.

    ``E * sum_e f_e * P_e`` over the rows of all layers together: ``f_e`` is the number of times expert e was among
    a row's ``top_k`` divided by the number of rows (so the ``f_e`` sum to ``top_k``, not 1, and an even load gives
    ``top_k``), ``P_e`` the mean softmax probability of e. Gradients flow through ``P_e`` only.

    Args:
        router_logits: logits before any selection bias, of one layer or a sequence with one array per layer.
        top_k: experts per row, 1 to E.
        mask: rows that count (True, 1) and padding (False, 0), one entry per row of every layer; its shape is free,
            so ``[B, T]`` goes with logits ``[B * T, E]``.

    Returns:
        f32 scalar; 0 when no row counts.

    Raises:
        InvalidArgument: no layer, what is no array, shapes that differ, or a wrong ``top_k``.
    """
    layers = list(router_logits) if isinstance(router_logits, Sequence) else [router_logits]
    if not layers:
        raise InvalidArgument("router_logits", where=WHERE, got="no layer", wanted="at least one array [..., E]")
    for logits in layers:
        check_dtype(WHERE, "router_logits", logits, FLOATS)
        if logits.ndim < 1:
            raise InvalidArgument("shape of router_logits", where=WHERE, got=[], wanted="[..., E]")
    experts = layers[0].shape[-1]
    top_k = check_integer(WHERE, "top_k", top_k, 1, experts)
    if mask is not None:
        check_array(WHERE, "mask", mask)
    counts = jnp.zeros(experts, jnp.float32)
    probabilities = jnp.zeros(experts, jnp.float32)
    rows = jnp.float32(0)
    for number, logits in enumerate(layers):
        if logits.shape[-1] != experts:
            raise InvalidArgument(
                f"experts of layer {number}", where=WHERE, got=logits.shape[-1], wanted=f"{experts}, as in layer 0"
            )
        flat = logits.astype(jnp.float32).reshape(-1, experts)
        weight = jnp.ones(flat.shape[0], jnp.float32)
        if mask is not None:
            if mask.size != flat.shape[0]:
                raise InvalidArgument("entries of mask", where=WHERE, got=mask.size, wanted=f"{flat.shape[0]} rows")
            weight = mask.astype(jnp.float32).reshape(-1)
        probability = jax.nn.softmax(flat, axis=-1)
        ids = top_k_ids(probability, top_k)
        counts = counts.at[ids].add(weight[:, None])
        probabilities = probabilities + jnp.sum(probability * weight[:, None], axis=0)
        rows = rows + jnp.sum(weight)
    rows = jnp.where(rows > 0, rows, 1)
    return experts * jnp.sum((counts / rows) * (probabilities / rows))
