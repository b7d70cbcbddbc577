"""The launch lists of a decode step and of a prompt chunk, built from kernel specs; and the manifest of their experts.

A step, per layer: norm and projection, append and attention in two launches, output projection with residual; norm and
routing, grouping, experts with residual. Around them: embedding; final norm and head, sampling in three launches,
bookkeeping. A prompt chunk is the same without what comes after the layers: it only leaves keys and values. One of two
rows or more appends in a launch of its own, before attention, as do more than 30 query heads of one key head.

Memory: *weights* by name; *state* (`state_buffers`), which lasts; and ``scratch``, one piece of raw memory for
everything between the launches of a step. A place in scratch lasts from the launch that writes it to the next launch
that writes it, in every list the same place. Kernels' counters lie in ``counters``: zero before and after every launch,
so all launches share them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_jax.cache import Bank, Buffer, Group, Launch, LaunchList, Manifest, Operand, dense
from moe_jax.cache.launches import ALIGNMENT, argument_bytes
from moe_jax.models.config import ModelConfig
from moe_jax.pallas_kernels.advance.specs import advance_spec
from moe_jax.pallas_kernels.attention.heuristics import MAX_BLOCK_M
from moe_jax.pallas_kernels.attention.specs import attention_specs, decode_attention_specs
from moe_jax.pallas_kernels.device import MINIMUM_CAPABILITY
from moe_jax.pallas_kernels.embed.specs import embed_spec
from moe_jax.pallas_kernels.experts.specs import expert_ffn_spec
from moe_jax.pallas_kernels.kv_append.specs import kv_append_spec
from moe_jax.pallas_kernels.linear.specs import linear_spec
from moe_jax.pallas_kernels.plan.specs import plan_spec
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route.specs import route_spec
from moe_jax.pallas_kernels.sample.specs import sample_specs
from moe_jax.pallas_kernels.spec import KernelSpec
from moe_jax.pallas_kernels.tuned import tuned_tile_for

NAMESPACE = "main"
# Pieces of scratch begin on cache lines of their own.
LINE = 128
# What a row of a launch is about, in the memory that is called "rows": name and 32-bit words of each row.
FIELDS = {
    **{"ids": 1, "position": 1, "following": 1, "sequence": 1, "draw": 1, "seed": 2},
    **{"temperature": 1, "top_k": 1, "top_p": 1},
}
# What `advance_spec` keeps of each sequence.
OF_SEQUENCES = ("limit", "reached", "newest", "finished")
# One expert that every row passes with weight 1, or with a sigmoid: how dense and shared blocks are routed.
_ALWAYS = RouterConfig(experts=1, top_k=1)
_GATED = RouterConfig(experts=1, top_k=1, score="sigmoid")


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """Everything that the launch lists of an engine depend on.

    Attributes:
        config: of the model.
        dtype: of weights and activations.
        weights: name, dtype and shape of each array that the model has.
        max_sequences: rows of the block table.
        max_tokens: of a sequence, prompt included.
        page_size: tokens of a page.
        pages: of the pool, each in every layer.
        rows: most rows of a launch.
        stops: tokens that end a sequence.
        device_kind: whose tuned tiles are taken, as JAX names it.
        capability: of the device, such as 90.
        pdl: kernels are launched while the ones before still run (sm_90).
    """

    config: ModelConfig
    dtype: str
    weights: tuple[tuple[str, str, tuple[int, ...]], ...]
    max_sequences: int
    max_tokens: int
    page_size: int
    pages: int
    rows: int
    stops: int
    device_kind: str = "host"
    capability: int = MINIMUM_CAPABILITY
    pdl: bool = False

    @classmethod
    def of(
        cls, config: ModelConfig, arrays: Mapping[str, Any], *, max_sequences: int, max_tokens: int, page_size: int,
        pages: int | None, chunk: int, device_kind: str, capability: int,
    ) -> Geometry:  # fmt: skip
        """Of an engine with these options, which are `Engine`'s.

        Args:
            arrays: of the model, or what has their shapes and dtypes.
        """
        return cls(
            config=config,
            dtype=arrays["embed"].dtype.name,
            weights=tuple((name, array.dtype.name, tuple(array.shape)) for name, array in arrays.items()),
            max_sequences=max_sequences,
            max_tokens=max_tokens,
            page_size=page_size,
            pages=max_sequences * -(-max_tokens // page_size) if pages is None else pages,
            rows=max(max_sequences, chunk),
            stops=max(1, len(config.eos_token_ids)),
            device_kind=device_kind,
            capability=capability,
            pdl=capability >= 90,
        )

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_tokens // self.page_size)

    def pages_for(self, tokens: int) -> int:
        """Pages of a sequence that comes to so many tokens, the last of which is not read and so has no key."""
        return -(-max(1, tokens - 1) // self.page_size)

    @property
    def stride(self) -> int:
        """Bytes between two words of the rows' memory."""
        return -(-4 * self.rows // ALIGNMENT) * ALIGNMENT

    @functools.cached_property
    def present(self) -> frozenset[str]:
        """Names of the model's arrays."""
        return frozenset(name for name, _, _ in self.weights)

    @functools.cached_property
    def offsets(self) -> dict[str, int]:
        """Where each field of the rows begins, in bytes."""
        ends = np.cumsum([0, *FIELDS.values()]) * self.stride
        return dict(zip(FIELDS, ends.tolist(), strict=False))


class Steps(NamedTuple):
    """Launch lists by row bucket, and the memory they need besides weights.

    Attributes:
        decode: each row a sequence of its own.
        prompt: all rows of one sequence.
        manifest: of the mixtures of experts.
        state: buffers that last.
        scratch: bytes of scratch.
    """

    decode: dict[int, LaunchList]
    prompt: dict[int, LaunchList]
    manifest: Manifest
    state: tuple[Buffer, ...]
    scratch: int


class Call(NamedTuple):
    """A launch before its memory is placed: parameter names without ``_ptr``, and what stands there.

    A place is the name of a buffer, ``"rows.…"`` for a field of the rows, ``"@…"`` for a piece of scratch, or None for
    an optional argument that is absent. Results and scratch without a place lie in scratch under their own name.
    """

    spec: KernelSpec
    places: Mapping[str, str | None]
    expert: bool = False


def build(
    geometry: Geometry,
    decode: Sequence[int],
    prompt: Sequence[int],
    transform: Callable[[KernelSpec], KernelSpec] = lambda spec: spec,
) -> Steps:
    """Launch lists for the given row buckets.

    Args:
        transform: of every spec.

    Raises:
        InvalidArgument: shapes that a kernel does not take.
    """
    calls = {("decode", rows): tuple(_decode(geometry, rows)) for rows in decode}
    calls |= {("prompt", rows): tuple(_prompt(geometry, rows)) for rows in prompt}
    sizes: dict[str, int] = {"": ALIGNMENT}
    counters = ALIGNMENT
    for call in (call for many in calls.values() for call in many):
        for argument in call.spec.arguments:
            place = _place(call, argument.name, argument.role)
            if place == "counters":
                counters = max(counters, argument_bytes(argument))
            elif place.startswith("@"):
                sizes[place[1:]] = max(sizes.get(place[1:], 0), argument_bytes(argument))
    ends = np.cumsum([0, *(-(-size // LINE) * LINE for size in sizes.values())]).tolist()
    scratch = dict(zip(sizes, ends, strict=False))
    state = state_buffers(geometry, counters)
    known = [dense(name, dtype, shape) for name, dtype, shape in geometry.weights]
    half = geometry.config.head_dim // 2
    known += [dense(name, "float32", (geometry.max_tokens, half)) for name in ("cos", "sin")]
    known += [dense("zeros", geometry.dtype, (geometry.config.hidden_size,)), *state]
    by_name = {buffer.name: buffer for buffer in [*known, dense("scratch", "uint8", (ends[-1],))]}

    def operand(place: str) -> Operand:
        if place.startswith("@"):
            return Operand("scratch", scratch[place[1:]])
        buffer, _, field = place.partition("rows.")
        return Operand("rows", geometry.offsets[field]) if field else Operand(buffer)

    def placed(many: tuple[Call, ...]) -> LaunchList:
        launches = tuple(
            Launch(
                transform(call.spec),
                tuple(operand(_place(call, a.name, a.role)) for a in call.spec.arguments),
                call.expert,
            )
            for call in many
        )
        used = dict.fromkeys(operand.buffer for launch in launches for operand in launch.operands)
        return LaunchList(tuple(by_name[name] for name in used), launches)

    lists = {key: placed(many) for key, many in calls.items()}
    return Steps(
        decode={rows: lists["decode", rows] for rows in decode},
        prompt={rows: lists["prompt", rows] for rows in prompt},
        manifest=manifest(geometry),
        state=state,
        scratch=ends[-1],
    )


def state_buffers(geometry: Geometry, counters: int) -> tuple[Buffer, ...]:
    """What lasts from step to step."""
    g, c = geometry, geometry.config
    pages = (g.pages, c.kv_heads, g.page_size, c.head_dim)
    return (
        dense("rows", "uint8", (g.stride * sum(FIELDS.values()),)),
        dense("table", "int32", (g.max_sequences, g.max_pages)),
        dense("stop", "int32", (g.stops,)),
        *(dense(name, "int32", (g.max_sequences,)) for name in OF_SEQUENCES),
        dense("tokens", "int32", (g.max_sequences, g.max_tokens)),
        dense("token", "int32", (g.rows,)),
        dense("logits", "float32", (g.rows, c.vocab_size)),
        dense("counters", "int32", (-(-counters // 4),)),
        *(dense(f"{i}.{name}", g.dtype, pages) for i in range(c.layers) for name in ("k_pages", "v_pages")),
    )


def manifest(geometry: Geometry) -> Manifest:
    """The experts of every mixture, all resident: a slot for each."""
    c = geometry.config
    router = c.moe.router
    shapes = {name: (dtype, shape) for name, dtype, shape in geometry.weights}

    def buffer(name: str) -> Buffer:
        return dense(name, *shapes[name])

    def riders(name: str) -> tuple[Buffer, ...]:
        return (buffer(name),) if name in shapes else ()

    groups = tuple(
        Group(
            layer=i,
            banks=(
                Bank("gate_up", buffer(f"{i}.gate_up"), riders(f"{i}.gate_up_bias")),
                Bank("down", buffer(f"{i}.down"), riders(f"{i}.down_bias")),
            ),
            experts=router.experts,
            top_k=router.top_k,
            slots=router.experts,
        )
        for i, mixture in enumerate(c.moe_layers)
        if mixture
    )
    return Manifest(NAMESPACE, groups)


def _place(call: Call, argument: str, role: str) -> str:
    name = argument.removesuffix("_ptr")
    if role == "state":
        return "counters"
    if role in ("in", "inout") or name in call.places:
        place = call.places[name]
        return "@" if place is None else place
    return f"@{name}"


def _spec(g: Geometry, make: Callable[..., Any], *sizes: Any, **options: Any) -> Any:
    return _made(make, *sizes, pdl=g.pdl, **options)


@functools.lru_cache(maxsize=1024)
def _made(make: Callable[..., Any], *sizes: Any, **options: Any) -> Any:
    """One spec for all layers of equal shape: hashing a kernel's sources takes milliseconds."""
    return make(*sizes, **options)


def _decode(g: Geometry, rows: int) -> Iterator[Call]:
    c = g.config
    yield from _layers(g, rows, 1)
    head = "head" if "head" in g.present else "embed"
    yield Call(
        _spec(
            g, linear_spec, rows, c.hidden_size, c.vocab_size, dtype=g.dtype, out_dtype="float32", norm_eps=c.norm_eps,
            capability=g.capability,
        ),
        {"x": "@x", "gain": "norm", "w": head, "bias": None, "residual": None, "out": "logits"},
    )  # fmt: skip
    between = {name: f"@{name}" for name in ("top", "unit", "bound", "way", "found", "list")}
    fields = {name: f"rows.{name}" for name in ("seed", "temperature", "top_k", "top_p")}
    given = {"logits": "logits", "position": "rows.following", "sequence": "rows.draw", **fields, **between}
    scan, gather, draw = _spec(g, sample_specs, rows, c.vocab_size)
    yield Call(scan, given)
    yield Call(gather, given)
    yield Call(draw, {**given, "token": "token"})
    yield Call(
        _spec(g, advance_spec, rows, g.max_sequences, g.stops, max_tokens=g.max_tokens),
        {
            **{name: f"rows.{name}" for name in ("ids", "position", "following", "sequence")},
            **{name: name for name in ("token", "stop", "tokens", *OF_SEQUENCES)},
        },
    )


def _prompt(g: Geometry, rows: int) -> Iterator[Call]:
    # What follows the last append is computed for nothing, as a plan covers every group of the manifest.
    yield from _layers(g, rows, rows)


def _layers(g: Geometry, rows: int, rows_of_sequence: int) -> Iterator[Call]:
    c = g.config
    yield Call(
        _spec(g, embed_spec, rows, c.vocab_size, c.hidden_size, dtype=g.dtype),
        {"ids": "rows.ids", "table": "embed", "x": "@x"},
    )
    for i in range(c.layers):
        yield from _attention(g, rows, rows_of_sequence, i)
        if c.moe_layers[i]:
            yield from _mixture(g, rows, i)
        else:
            yield from _always(g, rows, i, _ALWAYS, "zeros", (f"{i}.gate_up", f"{i}.down"), "@h", "@x")


def _attention(g: Geometry, rows: int, rows_of_sequence: int, i: int) -> Iterator[Call]:
    c = g.config
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    weight = _names(g, i)
    cache = {"sequences": g.max_sequences, "pages": g.pages, "page_size": g.page_size, "max_pages": g.max_pages}
    sizes = (rows, c.heads, c.kv_heads, c.head_dim)
    state = {"table": "table", "position": "rows.position", "sequence": "rows.sequence"}
    pages = {"k_pages": f"{i}.k_pages", "v_pages": f"{i}.v_pages"}
    window = c.windows[i] if c.windows else None
    yield Call(
        _spec(
            g, linear_spec, rows, c.hidden_size, q + 2 * kv, dtype=g.dtype, norm_eps=c.norm_eps,
            bias=weight("qkv_bias") is not None, capability=g.capability,
        ),
        {
            **{"x": "@x", "gain": weight("attention_norm"), "w": weight("qkv"), "bias": weight("qkv_bias")},
            **{"residual": None, "out": "@qkv"},
        },
    )  # fmt: skip
    of_append = {"positions": g.max_tokens, "norm": c.qk_norm, "eps": c.norm_eps, "clip": c.clip_qkv}
    of_attention = {"window": window, "capability": g.capability}
    given = {"qkv": "@qkv", "q_gain": weight("q_norm"), "k_gain": weight("k_norm"), "cos": "cos", "sin": "sin"}
    given |= {**state, **pages}
    # A program of the launch that does both has the new key and value beside its queries.
    if rows_of_sequence == 1 and c.heads <= (MAX_BLOCK_M - 2) * c.kv_heads:
        attend, combine = _spec(g, decode_attention_specs, *sizes, dtype=g.dtype, **cache, **of_append, **of_attention)
        yield Call(attend, given)
    else:
        yield Call(_spec(g, kv_append_spec, *sizes, dtype=g.dtype, **cache, **of_append), given)
        attend, combine = _spec(
            g, attention_specs, *sizes, dtype=g.dtype, **cache, rows_of_sequence=rows_of_sequence, **of_attention
        )  # fmt: skip
        yield Call(attend, {"q": "@q", **state, **pages})
    pieces = {"vector": "@vector", "weight": "@weight", "position": "rows.position"}
    yield Call(combine, {**pieces, "sink": None, "out": "@mixed"})
    yield Call(
        _spec(
            g, linear_spec, rows, q, c.hidden_size, dtype=g.dtype, bias=weight("out_bias") is not None, residual=True,
            capability=g.capability,
        ),
        {
            **{"x": "@mixed", "gain": None, "w": weight("out"), "bias": weight("out_bias"), "residual": "@x"},
            **{"out": "@h"},
        },
    )  # fmt: skip


def _mixture(g: Geometry, rows: int, i: int) -> Iterator[Call]:
    c = g.config
    weight = _names(g, i)
    shared = weight("shared_down")
    route = _spec(
        g, route_spec, rows, c.hidden_size, c.moe.router, dtype=g.dtype, norm_eps=c.norm_eps,
        bias=None if weight("router_bias") is None else g.dtype, selection_bias=weight("selection_bias") is not None,
        masked=True,
    )  # fmt: skip
    yield Call(
        route,
        {
            **{"x": "@h", "gain": weight("mlp_norm"), "w": weight("router"), "bias": weight("router_bias")},
            **{"selection_bias": weight("selection_bias"), "position": "rows.position"},
            **{"scale": "@scale", "ids": "@chosen", "normed": "@normed"},
        },
    )
    banks = [weight(name) for name in ("gate_up", "gate_up_bias", "down", "down_bias")]
    yield from _experts(g, rows, c.moe.router, c.moe_intermediate, banks, "@h", "@x" if shared is None else "@y", True)
    if shared is not None:
        gate = weight("shared_gate")
        router = _ALWAYS if gate is None else _GATED
        yield from _always(g, rows, i, router, gate or "zeros", (weight("shared_gate_up"), shared), "@y", "@x")


def _always(
    g: Geometry, rows: int, i: int, router: RouterConfig, gate: str, banks: tuple[str | None, str], residual: str,
    out: str,
) -> Iterator[Call]:  # fmt: skip
    """A feed-forward block that every row passes, as a mixture of one expert; the input is the layer's ``@h``."""
    c = g.config
    up, down = banks
    inner = next(shape for name, _, shape in g.weights if name == down)[1]
    yield Call(
        _spec(g, route_spec, rows, c.hidden_size, router, dtype=g.dtype, norm_eps=c.norm_eps, masked=True),
        {
            **{"x": "@h", "gain": f"{i}.mlp_norm", "w": gate, "bias": None, "selection_bias": None},
            **{"position": "rows.position", "scale": "@scale", "ids": "@chosen", "normed": "@normed"},
        },
    )
    yield from _experts(g, rows, router, inner, [up, None, down, None], residual, out, False)


def _experts(
    g: Geometry, rows: int, router: RouterConfig, inner: int, banks: list[str | None], residual: str, out: str,
    expert: bool,
) -> Iterator[Call]:  # fmt: skip
    """Grouping, and the experts chosen in ``@chosen`` on ``@normed``."""
    c = g.config
    k, experts = router.top_k, router.experts
    block = {"used": None, "block_row": None, "block_pair": None}
    # As `grouped_moe` chooses inside jit, so that both sum in one order.
    sizes = (rows, k, experts, c.hidden_size, inner)
    tile = tuned_tile_for(*sizes, g.dtype, g.device_kind, capability=g.capability).tile
    if rows > 1:
        yield Call(_spec(g, plan_spec, rows, k, experts, tile.block_n), {"ids": "@chosen", "weight_row": None})
        block = {name: f"@{name}" for name in block}
    up, up_bias, down, down_bias = banks
    spec = _spec(
        g, expert_ffn_spec, *sizes, dtype=g.dtype, activation=c.moe.activation,
        gate_up_bias=up_bias is not None, down_bias=down_bias is not None, residual=True, tile=tile,
    )  # fmt: skip
    yield Call(
        spec,
        {
            **{"x": "@normed", "ids": "@chosen", "scale": "@scale", "weight_row": None, **block},
            **{"gate_up": up, "gate_up_bias": up_bias, "down": down, "down_bias": down_bias},
            **{"residual": residual, "out": out},
        },
        expert,
    )


def _names(g: Geometry, i: int) -> Callable[[str], str | None]:
    """Of a layer's array: the buffer's name, or None where the model has no such array."""

    def name(of: str) -> str | None:
        full = f"{i}.{of}"
        return full if full in g.present else None

    return name


def bytes_needed(steps: Steps) -> int:
    """All memory of an engine: what a simulated device must have."""
    names = {b.name: b for b in steps.state}
    for launches in (*steps.decode.values(), *steps.prompt.values()):
        names |= launches.by_name
    return sum(math.ceil(buffer.layout.bytes / 256) * 256 for buffer in names.values())
