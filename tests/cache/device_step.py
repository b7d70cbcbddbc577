"""A small decode step of the real kernels, on any runtime: embedding, projection, routing, experts, head, advance.

Two of them with equal values, one run direct and one through graphs, must have equal bits after every step. Where
kernels have stand-ins tokens are given; on a GPU they are drawn, and a step needs nothing of the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_jax.cache.graphs import Graphs
from moe_jax.cache.identity import Bank, Certificate, Group, Manifest
from moe_jax.cache.launches import Buffer, Launch, LaunchList, Operand, dense
from moe_jax.cache.outcome import Outcome
from moe_jax.cache.registry import Registry
from moe_jax.cache.resources import Resource, ResourceTable, next_serial
from moe_jax.cache.runtime import Runtime
from moe_jax.pallas_kernels.advance import advance_spec
from moe_jax.pallas_kernels.embed import embed_spec
from moe_jax.pallas_kernels.experts import expert_ffn_spec, tile_for
from moe_jax.pallas_kernels.grouped_moe import Activation
from moe_jax.pallas_kernels.linear import linear_spec
from moe_jax.pallas_kernels.plan import plan_spec
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route.specs import route_spec
from moe_jax.pallas_kernels.sample import sample_specs
from moe_jax.pallas_kernels.spec import KernelSpec

VOCABULARY, HIDDEN, INNER, EXPERTS, TOP_K, SEQUENCES, TOKENS = 512, 256, 128, 8, 2, 64, 64
ROUTER = RouterConfig(experts=EXPERTS, top_k=TOP_K, renormalize=True)
SWIGLU = Activation(name="swiglu", layout="halves")
# Parameters that keep their place where they are absent.
OPTIONAL = frozenset(
    ("bias", "selection_bias", "gate_up_bias", "down_bias", "residual", "weight_row", "used", "block_row", "block_pair")
)


class Builder:
    """A launch list under construction: a parameter's memory is named after it, or as told."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self.launches: list[Launch] = []

    def add(self, spec: KernelSpec, *, expert: bool = False, **names: str) -> None:
        operands = []
        for a in spec.arguments:
            short = a.name.removesuffix("_ptr")
            name = names.get(short, f"nothing.{a.dtype}" if short in OPTIONAL and a.shape == (1,) else short)
            self.buffers.setdefault(name, dense(name, a.dtype, a.shape))
            operands.append(Operand(name))
        self.launches.append(Launch(spec, tuple(operands), expert))

    def build(self) -> LaunchList:
        return LaunchList(tuple(self.buffers.values()), tuple(self.launches))


def step_launches(rows: int, *, layers: int = 2, dtype: str = "bfloat16", draws: bool, pdl: bool) -> LaunchList:
    """The step of a row bucket."""
    made, sizes = Builder(), (rows, TOP_K, EXPERTS, HIDDEN, INNER)
    made.add(embed_spec(rows, VOCABULARY, HIDDEN, dtype=dtype, pdl=pdl), x="x.0")
    for i in range(layers):
        project = linear_spec(rows, HIDDEN, HIDDEN, dtype=dtype, norm_eps=1e-6, residual=True, pdl=pdl)
        own = {"gain": f"gain.{i}", "w": f"w.{i}", "state": f"arrivals.{i}"}
        parts = {"partial": f"partial.{i}", "square": f"square.{i}"}
        made.add(project, x=f"x.{i}", residual=f"x.{i}", out=f"y.{i}", **own, **parts)
        own = {"gain": f"moe_gain.{i}", "w": f"router.{i}", "state": f"route_state.{i}", "partial": f"logit_parts.{i}"}
        route = route_spec(rows, HIDDEN, ROUTER, dtype=dtype, norm_eps=1e-6, masked=True, pdl=pdl)
        made.add(route, x=f"y.{i}", position="position", scale=f"scale.{i}", ids=f"chosen.{i}", **own)
        given = {"used": "used", "block_row": "block_row", "block_pair": "block_pair"} if rows > 1 else {}
        if rows > 1:
            tile = tile_for(*sizes, dtype)
            made.add(plan_spec(rows, TOP_K, EXPERTS, tile.block_n, pdl=pdl), ids=f"chosen.{i}", **given)
        experts = expert_ffn_spec(*sizes, dtype=dtype, activation=SWIGLU, residual=True, pdl=pdl)
        own = {"gate_up": f"gate_up.{i}", "down": f"down.{i}", "state": "expert_state"}
        row = {"x": "normed", "ids": f"chosen.{i}", "scale": f"scale.{i}", "residual": f"y.{i}", "out": f"x.{i + 1}"}
        made.add(experts, expert=True, **given, **own, **row)
    head = linear_spec(rows, HIDDEN, VOCABULARY, dtype=dtype, out_dtype="float32", norm_eps=1e-6, pdl=pdl)
    made.add(head, x=f"x.{layers}", gain="gain", w="head", out="logits", state="head_state", partial="head_parts")
    if draws:
        for spec in sample_specs(rows, VOCABULARY, pdl=pdl):
            made.add(spec, position="following", state=f"{spec.name}_state")
    made.add(advance_spec(rows, SEQUENCES, 1, max_tokens=TOKENS, pdl=pdl))
    return made.build()


def manifest(layers: int = 2, dtype: str = "bfloat16") -> Manifest:
    def group(i: int) -> Group:
        banks = (
            Bank("gate_up", dense(f"gate_up.{i}", dtype, (EXPERTS, 2 * INNER, HIDDEN))),
            Bank("down", dense(f"down.{i}", dtype, (EXPERTS, HIDDEN, INNER))),
        )
        return Group(layer=i, banks=banks, experts=EXPERTS, top_k=TOP_K, slots=EXPERTS, staged=False)

    return Manifest("main", tuple(group(i) for i in range(layers)))


class DeviceWorld:
    """One step's memory on a runtime, and a store of graphs over it.

    Args:
        seed: of weights and inputs; equal ones give equal values.
        options: of `Graphs`.
    """

    def __init__(
        self, runtime: Runtime, rows: int, *, draws: bool, pdl: bool, seed: int = 0, layers: int = 2, **options: Any
    ):
        self.runtime, self.rows, self.draws = runtime, rows, draws
        self.launches = step_launches(rows, layers=layers, draws=draws, pdl=pdl)
        self.registry, self.table = Registry(), ResourceTable()
        self.registry.accept(manifest(layers))
        self.graphs = Graphs(runtime, self.registry, **options)
        self.rng = np.random.default_rng(seed)
        self.written = {
            o.buffer
            for launch in self.launches.launches
            for a, o in zip(launch.spec.arguments, launch.operands, strict=True)
            if a.role not in ("in", "state")
        }
        for buffer in self.launches.buffers:
            self.place(buffer, zero="state" in buffer.name or "arrivals" in buffer.name)
        self.join()

    def place(self, buffer: Buffer, zero: bool) -> None:
        """New memory: weights at random, state 0, what a kernel must write first NaN or -7."""
        shape, dtype = buffer.shape, np.dtype(buffer.dtype)
        if zero or buffer.name.startswith("nothing"):
            values = np.zeros(shape, dtype)
        elif buffer.dtype == "int32":
            values = np.full(shape, -7, dtype)
        elif buffer.name in self.written:
            values = np.full(shape, np.nan, dtype)
        else:
            values = (self.rng.standard_normal(shape) * shape[-1] ** -0.5).astype(dtype)
        address, capsule = self.runtime.allocate(values.nbytes)
        self.runtime.write(address, values, self.graphs.stream)
        use = "weights" if buffer.dtype == "bfloat16" and buffer.name not in self.written else "arena"
        resource = Resource(
            address=address, bytes=values.nbytes, layout=buffer.layout, serial=next_serial(), use=use, capsule=capsule
        )
        self.table.bind(buffer.name, resource)

    def write(self, name: str, values: Any) -> None:
        resource = self.table.get(name)
        assert resource is not None
        array = np.asarray(values, resource.layout.dtype).reshape(resource.layout.shape)
        self.runtime.write(resource.address, array, self.graphs.stream)

    def read(self, name: str) -> np.ndarray:
        resource = self.table.get(name)
        assert resource is not None
        return self.runtime.read(resource.address, resource.layout.dtype, resource.layout.shape, self.graphs.stream)

    def join(self) -> None:
        """New sequences, one for each row but a dead one, at positions of their own."""
        rows, rng = self.rows, self.rng
        position = rng.integers(0, 9, rows)
        position[1:2] = -1
        self.write("position", position)
        self.write("following", np.where(position < 0, -1, position + 1))
        self.write("ids", np.where(position < 0, -1, rng.integers(0, VOCABULARY, rows)))
        self.write("sequence", rng.permutation(SEQUENCES)[:rows])
        self.write("limit", rng.integers(20, 40, SEQUENCES))
        self.write("stop", [-1])
        for name in ("finished", "reached", "newest", "tokens"):
            self.write(name, np.zeros(self.table.get(name).layout.shape))
        if self.draws:
            self.write("seed", rng.integers(0, 2**31, (rows, 2)))
            self.write("temperature", rng.random(rows))
            self.write("top_k", rng.integers(0, 50, rows))
            self.write("top_p", rng.random(rows) + 0.1)

    def step(self) -> Outcome:
        """One step; with given tokens where none are drawn."""
        if not self.draws:
            self.write("token", self.rng.integers(0, VOCABULARY, self.rows))
        certificate = Certificate(
            namespace="main",
            owner_generation=self.registry.owner_generation("main"),
            semantics="independent",
            rows=self.rows,
            bucket=self.rows,
            sequences=self.rows,
        )
        return self.graphs.step(self.launches, certificate, self.table)

    def bits(self) -> dict[str, bytes]:
        """Everything that a step writes for others."""
        names = ("logits", "token", "ids", "position", "following", "tokens", "finished", "x.1", "y.0")
        return {name: self.read(name).tobytes() for name in names}


def same_at_every_step(direct: DeviceWorld, replayed: DeviceWorld, steps: int) -> list[str]:
    """Equal bits after each step, half-way with new sequences; the kinds of the second one's steps."""
    kinds = []
    for number in range(steps):
        if number == steps // 2:
            direct.join()
            replayed.join()
        assert direct.step().kind == "direct"
        kinds.append(replayed.step().kind)
        wanted, got = direct.bits(), replayed.bits()
        assert [name for name in wanted if wanted[name] != got[name]] == [], f"step {number}"
        # A NaN is what nobody wrote.
        assert np.isfinite(replayed.read("logits")).all()
    return kinds
