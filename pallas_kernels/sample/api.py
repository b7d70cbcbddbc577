"""Public sampling: checks the arguments and picks the back end."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt32

from ..as_operation import as_operation, copy_refusal, kernel_refusal
from ..checks import check_dtype, check_shape
from ..dispatch import Backend, Operation, sharding_refusal
from ..errors import InvalidArgument
from . import reference
from .heuristics import MAX_ROWS
from .specs import sample_specs


def sample(
    logits: Float[Array, "T V"],
    temperature: Float32[Array, " T"],
    top_k: Int32[Array, " T"],
    top_p: Float32[Array, " T"],
    seed: UInt32[Array, "T 2"],
    sequence: Int32[Array, " T"],
    position: Int32[Array, " T"],
    *,
    backend: str = "auto",
) -> Int32[Array, " T"]:
    """The next token of each row: the largest logit, or a draw among the tokens that top-k and top-p keep.

    All parameters are device data, each row its own: changing them compiles nothing. The noise of a row is a function
    of (seed, sequence, position) and of the token, as in `moe_jax.sampling`, so what is drawn for a row depends
    neither on its mates nor on its place.

    A token may be drawn when fewer than ``top_k`` tokens rank before it, by logit and equal ones by index, and those
    before it have less than ``top_p`` of all probability at the row's temperature (nucleus sampling, arXiv:1904.09751);
    the first may always.

    Works under ``jit``, ``vmap`` (batches become rows) and inside ``jax.shard_map``; gradients are zero.

    Args:
        logits: ``[T, V]``, f32, bf16 or f16; T may be 0. NaN counts as -inf. A row whose largest logit is infinite
            takes the first of these.
        temperature: divides the logits; 0 or less takes the largest, of equal ones the first.
        top_k: most probable tokens that are kept, 0 or less: all.
        top_p: share of probability that is kept, 1 or more: all.
        seed: high and low word, e.g. the same for all rows.
        sequence: number of each row's sequence.
        position: position the new token will stand at; negative for a row that is not there.
        backend: ``"auto"`` or a back end's name.

    Returns:
        int32 ``[T]``, -1 for rows that are not there.

    Raises:
        InvalidArgument: a wrong shape or dtype, an empty vocabulary, or an unknown back end.
        CannotServe: the back end asked for declined, or arguments are sharded outside ``shard_map``.
    """
    where = "sample"
    check_dtype(where, "logits", logits, (jnp.float32, jnp.bfloat16, jnp.float16))
    check_shape(where, "logits", logits, ("T", "V"))
    rows, vocabulary = logits.shape
    if vocabulary == 0:
        raise InvalidArgument("vocabulary", where=where, got=0, wanted="at least 1 token")
    parameters = {
        **{"temperature": (temperature, jnp.float32), "top_k": (top_k, jnp.int32), "top_p": (top_p, jnp.float32)},
        **{"sequence": (sequence, jnp.int32), "position": (position, jnp.int32)},
    }
    for name, (array, dtype) in parameters.items():
        check_dtype(where, name, array, (dtype,))
        check_shape(where, name, array, (rows,))
    check_dtype(where, "seed", seed, (jnp.uint32,))
    check_shape(where, "seed", seed, (rows, 2))
    sharding_refusal(where, {"logits": logits, "seed": seed} | {name: a for name, (a, _) in parameters.items()})
    return SAMPLE(logits, position, sequence, seed, temperature, top_k, top_p, backend=backend)


def _refusal(logits, *parameters) -> str | None:
    rows, vocabulary = logits.shape

    def specs():  # no rows are no launch, many are several
        return sample_specs(min(max(rows, 1), MAX_ROWS), vocabulary, dtype=logits.dtype.name)

    return kernel_refusal(logits, specs, "sample_specs") or copy_refusal(logits=logits)


def _launch(logits, position, sequence, seed, temperature, top_k, top_p) -> Int32[Array, " T"]:
    from ..in_jit import call

    rows, vocabulary = logits.shape
    given = {
        **{"logits_ptr": logits, "position_ptr": position, "sequence_ptr": sequence, "seed_ptr": seed},
        **{"temperature_ptr": temperature, "top_k_ptr": top_k, "top_p_ptr": top_p},
    }
    for spec in sample_specs(rows, vocabulary, dtype=logits.dtype.name):
        outputs = call(spec, [given[a.name] for a in spec.inputs])
        given |= {a.name: value for a, value in zip(spec.outputs, outputs, strict=True)}
    return given["token_ptr"]


# Every argument is by rows; a row that fills a launch up has no position.
_OPERATION = as_operation(_launch, reference.sample, rows=dict.fromkeys(range(7), 0) | {1: -1}, most=MAX_ROWS)


def _signed(seed: UInt32[Array, "T 2"]) -> Int32[Array, "T 2"]:
    return lax.bitcast_convert_type(seed, jnp.int32)


@jax.jit
def _triton(logits, position, sequence, seed, *parameters) -> Int32[Array, " T"]:
    return _OPERATION(logits, position, sequence, _signed(seed), *parameters)


@jax.jit
def _reference(logits, position, sequence, seed, *parameters) -> Int32[Array, " T"]:
    return reference.sample(logits, position, sequence, _signed(seed), *parameters)


# Best first. Triton itself is imported only when it serves a call.
SAMPLE = Operation("sample", (Backend("triton", _triton, _refusal), Backend("reference", _reference, lambda *_: None)))
