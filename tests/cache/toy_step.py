"""A decode step of a toy model whose kernels are NumPy functions, run two ways: through the store of graphs on a
simulated device, and uncached on plain arrays. On a CUDA device the kernels are those of `toy_kernels`.

Per layer: routing (device data), grouped experts found through a slot map, append to a KV store, a sum over it. Around
them: embedding with a row of an adapter table, head, greedy choice, a counter, and a copy whose extent is a property.
All numbers are integers and wrapped at 256, so that the results of every device have the same bits.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import toy_kernels

from moe_jax.cache.graphs import Graphs
from moe_jax.cache.identity import Bank, Certificate, Group, Manifest
from moe_jax.cache.launches import Buffer, Copy, Launch, LaunchList, Operand, argument_bytes, dense
from moe_jax.cache.outcome import Outcome
from moe_jax.cache.registry import Registry
from moe_jax.cache.resources import Resource, ResourceTable, next_serial
from moe_jax.cache.simulated import SimulatedRuntime
from moe_jax.pallas_kernels.spec import Argument, KernelSpec

TOKENS, HIDDEN, WIDTH, EXPERTS, TOP_K, LAYERS, SEQUENCES, POSITIONS, ADAPTERS = 32, 4, 4, 6, 2, 2, 8, 16, 3
ARENA = 2048
# Distance of experts that have gaps between them, in experts.
APART = 2
# As the kernels of the device know them.
CONSTANTS = {
    **{"TOKENS": TOKENS, "HIDDEN": HIDDEN, "WIDTH": WIDTH, "EXPERTS": EXPERTS, "TOP_K": TOP_K},
    **{"SEQUENCES": SEQUENCES, "POSITIONS": POSITIONS, "ADAPTERS": ADAPTERS},
}


class HostFunction:
    """What stands where a spec has a Triton function."""

    def __init__(self, fn: Callable[..., Any], arg_names: list[str]):
        self.fn, self.arg_names = fn, arg_names


def kernel(
    fn: Callable[..., Any],
    outs: dict[str, tuple],
    *,
    inout: tuple[str, ...] = (),
    scratch=(),
    device: Any = None,
    grid: int = 1,
    constants: tuple[tuple[str, int], ...] = (),
    **given,
) -> KernelSpec:
    """A spec of a NumPy function: its parameters are the inputs, by name and ``(dtype, *shape)``.

    Args:
        device: the Triton function, its programs in ``grid`` and its other parameters in ``constants``; None: there is
            none, the spec is for hosts only.
    """
    names = list(inspect.signature(fn).parameters)
    arguments = [Argument(n, given[n][0], tuple(given[n][1:]), "inout" if n in inout else "in") for n in names]
    arguments += [Argument(n, of[0], tuple(of[1:]), "out") for n, of in outs.items()]
    arguments += [Argument(n, of[0], tuple(of[1:]), "scratch") for n, of in dict(scratch).items()]
    return KernelSpec(
        name=fn.__name__,
        function=device or HostFunction(fn, [a.name for a in arguments]),
        arguments=tuple(arguments),
        constexprs=constants,
        grid=(grid, 1, 1),
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=False,
        pdl=False,
        reference=fn,
    )


def wrap(value):
    return value - 256 * np.floor(value / 256)


def embed(tokens, adapter, live, embedding, adapters):
    x = wrap(embedding[tokens % TOKENS] + adapters[adapter % ADAPTERS])
    return np.where(live[:, None] > 0, x, np.float32(0))


def route(x, router):
    logits = x @ router.T
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :TOP_K]
    return ids.astype(np.int32), 1 + wrap(np.take_along_axis(logits, ids, 1))


def experts(x, ids, scores, slot_of, gate_up, down):
    if down.ndim == 1:  # with gaps between its experts
        steps = np.array([APART * HIDDEN * WIDTH, WIDTH, 1]) * down.itemsize
        down = np.lib.stride_tricks.as_strided(down, (EXPERTS, HIDDEN, WIDTH), steps, writeable=False)
    slots = slot_of[ids % EXPERTS] % gate_up.shape[0]
    hidden = (gate_up[slots] @ x[:, None, :, None])[..., 0]
    hidden = wrap(wrap(hidden[..., :WIDTH]) * wrap(hidden[..., WIDTH:]))
    pairs = wrap((down[slots] @ hidden[..., None])[..., 0])
    return wrap(x + (scores[..., None] * pairs).sum(1))


def append(y, position, sequence, live, kv):
    rows = np.flatnonzero(live)
    kv[sequence[rows] % SEQUENCES, position[rows] % POSITIONS] = y[rows]
    return kv


def attend(y, position, sequence, kv):
    seen = np.arange(POSITIONS) <= position[:, None] % POSITIONS
    past = np.where(seen[..., None], kv[sequence % SEQUENCES], np.float32(0))
    return wrap(y + past.sum(1))


def head(x, out_weights):
    # Of a dead row every product is 0 or -0, and their sum is the one or the other.
    logits = x @ out_weights.T + np.float32(0)
    return logits, logits.argmax(1).astype(np.int32)


def count(live, counter):
    return (counter + live.sum()).astype(np.int32)


GROUPS = tuple(range(LAYERS))
INPUTS = ("tokens", "position", "sequence", "adapter", "live")


def weight_shapes(layers: int = LAYERS) -> dict[str, tuple[int, ...]]:
    """Weights by name."""
    shapes = {"embedding": (TOKENS, HIDDEN), "adapters": (ADAPTERS, HIDDEN), "out_weights": (TOKENS, HIDDEN)}
    for i in range(layers):
        shapes[f"router.{i}"] = EXPERTS, HIDDEN
        shapes[f"gate_up.{i}"] = EXPERTS, 2 * WIDTH, HIDDEN
        shapes[f"down.{i}"] = EXPERTS, HIDDEN, WIDTH
    return shapes


def state_shapes(layers: int = LAYERS) -> dict[str, tuple]:
    """What lasts from step to step, by name."""
    shapes: dict[str, tuple] = {"counter": ("int32", 1)}
    for i in range(layers):
        shapes[f"kv.{i}"] = "float32", SEQUENCES, POSITIONS, HIDDEN
        shapes[f"slot_of.{i}"] = "int32", EXPERTS
    return shapes


def per_bucket(rows: int) -> dict[str, tuple]:
    """Buffers of one row bucket, by the name that they have in it."""
    return {
        **{name: ("int32", rows) for name in INPUTS},
        "x": ("float32", rows, HIDDEN),
        "y": ("float32", rows, HIDDEN),
        "ids": ("int32", rows, TOP_K),
        "scores": ("float32", rows, TOP_K),
        "logits": ("float32", rows, TOKENS),
        "copied": ("float32", rows, TOKENS),
        "next": ("int32", rows),
        "arena": ("uint8", ARENA),
    }


@functools.cache
def weights(seed: int) -> dict[str, np.ndarray]:
    """Random ones, from -8 to 8 and never 0."""
    rng = np.random.default_rng(seed)
    shapes = weight_shapes()
    return {n: (rng.integers(1, 9, s) * rng.choice([-1, 1], s)).astype(np.float32) for n, s in shapes.items()}


@functools.cache
def random_inputs(rows: int, bucket: int, seed: int) -> dict[str, np.ndarray]:
    """Of one step."""
    rng = np.random.default_rng(seed)
    values = {
        "tokens": rng.integers(0, TOKENS, bucket),
        "position": rng.integers(0, POSITIONS, bucket),
        "sequence": rng.permutation(bucket) % SEQUENCES,
        "adapter": rng.integers(0, ADAPTERS, bucket),
        "live": np.arange(bucket) < rows,
    }
    return {name: value.astype(np.int32) for name, value in values.items()}


def buffers(rows: int, layers: int) -> tuple[Buffer, ...]:
    """All memory of a bucket's step."""
    own = [dense(f"{name}/{rows}", of[0], of[1:]) for name, of in per_bucket(rows).items()]
    shared = [dense(name, "float32", shape) for name, shape in weight_shapes(layers).items()]
    return (*own, *shared, *(dense(name, of[0], of[1:]) for name, of in state_shapes(layers).items()))


def step_launches(
    rows: int, *, layers: int = LAYERS, extent: int | None = None, restrided: str | None = None
) -> LaunchList:
    """The step of a bucket, built anew.

    Args:
        extent: bytes that the last copy takes; None: all.
        restrided: a bank of ``down`` whose experts have gaps between them, and an expert launch that knows it.
    """
    of = per_bucket(rows)
    shapes = {**of, **{n: ("float32", *s) for n, s in weight_shapes(layers).items()}, **state_shapes(layers)}
    sizes = CONSTANTS | {"ROWS": rows, "BLOCK": 8, "SLOTS": EXPERTS}
    declared = {buffer.name: buffer for buffer in buffers(rows, layers)}
    if restrided is not None:
        near = declared[restrided]
        far = declared[restrided] = replace(near, strides=(APART * near.strides[0], *near.strides[1:]))
        shapes[restrided] = "float32", far.layout.bytes // 4

    def launch(fn, outs, *, inout=(), scratch=None, expert=False, **names) -> Launch:
        given = {parameter: shapes[name] for parameter, name in names.items()}
        device = getattr(toy_kernels, fn.__name__)
        apart = {"APART": APART if restrided in names.values() else 1}
        constants = tuple((n, (sizes | apart)[n]) for n in device.arg_names if n in sizes | apart)
        programs = 1 if fn is count else rows
        results = {n: of[n] for n in outs}
        spec = kernel(
            fn,
            results,
            inout=inout,
            scratch=scratch or {},
            device=device,
            grid=programs,
            constants=constants,
            **given,
        )
        places = [names[p] for p in inspect.signature(fn).parameters] + list(outs)
        operands = [Operand(f"{n}/{rows}" if n in of else n) for n in places]
        operands += [Operand(f"arena/{rows}", 256) for _ in scratch or {}]
        return Launch(spec, tuple(operands), expert)

    launches: list[Launch | Copy] = [
        launch(
            embed, ["x"], tokens="tokens", adapter="adapter", live="live", embedding="embedding", adapters="adapters"
        )
    ]
    for i in range(layers):
        slots = {"slot_of": f"slot_of.{i}", "gate_up": f"gate_up.{i}", "down": f"down.{i}"}
        row = {"position": "position", "sequence": "sequence", "kv": f"kv.{i}"}
        hidden = {"hidden": ("float32", rows, TOP_K, WIDTH)}
        launches += [
            launch(route, ["ids", "scores"], x="x", router=f"router.{i}"),
            launch(experts, ["y"], scratch=hidden, expert=True, x="x", ids="ids", scores="scores", **slots),
            launch(append, [], inout=("kv",), y="y", live="live", **row),
            launch(attend, ["x"], y="y", **row),
        ]
    copied = 4 * TOKENS * rows if extent is None else extent
    launches += [
        launch(head, ["logits", "next"], x="x", out_weights="out_weights"),
        launch(count, [], inout=("counter",), live="live", counter="counter"),
        Copy(Operand(f"copied/{rows}"), Operand(f"logits/{rows}"), copied),
    ]
    return LaunchList(tuple(declared.values()), tuple(launches))


@functools.cache
def equal_list(rows: int) -> LaunchList:
    """The step of a bucket, built once; for tests that do not ask for a new one."""
    return step_launches(rows)


def manifest(*, layers: int = LAYERS, slots: int = EXPERTS, namespace: str = "main", staged: bool = False) -> Manifest:
    """The toy's groups, built anew."""

    shapes = weight_shapes(layers)

    def bank(role, name):
        return Bank(role, dense(name, "float32", (slots, *shapes[name][1:])))

    groups = (
        Group(
            layer=i,
            banks=(bank("gate_up", f"gate_up.{i}"), bank("down", f"down.{i}")),
            experts=EXPERTS,
            top_k=TOP_K,
            slots=slots,
            staged=staged,
        )
        for i in range(layers)
    )
    return Manifest(namespace, tuple(groups))


class Oracle:
    """The same launches, uncached, on plain arrays by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, np.ndarray] = {}

    def run(self, launches: LaunchList, count: int | None = None) -> None:
        """Run the first ``count`` launches; None: all."""
        for launch in launches.launches[:count]:
            if isinstance(launch, Copy):
                source = self.arrays[launch.source.buffer].reshape(-1).view(np.uint8)
                self.arrays[launch.target.buffer].reshape(-1).view(np.uint8)[: launch.bytes] = source[: launch.bytes]
                continue
            places = [(a.role, o.buffer) for a, o in zip(launch.spec.arguments, launch.operands, strict=True)]
            inputs = [self.arrays[name].copy() for role, name in places if role in ("in", "inout")]
            results = launch.spec.reference(*inputs)
            results = results if isinstance(results, tuple) else (results,)
            targets = [name for role, name in places if role == "inout"]
            targets += [name for role, name in places if role == "out"]
            for name, result in zip(targets, results, strict=True):
                self.arrays[name][...] = result


class WrongTokens(AssertionError):
    """The device does not hold what the oracle does."""


class World:
    """A toy model on a device, with its oracle.

    Args:
        runtime: the device; None: a simulated one.
        accept: a manifest at once.
        layers: of the model.
        options: of `Graphs`.
    """

    def __init__(
        self,
        *,
        mode="simulate",
        accept: bool = True,
        layers: int = LAYERS,
        runtime: Any = None,
        **options,
    ):
        self.runtime = runtime or SimulatedRuntime(1 << 23)
        self.registry, self.table, self.oracle = Registry(), ResourceTable(), Oracle()
        self.layers = layers
        if accept:
            self.registry.accept(manifest(layers=layers))
        self.graphs = Graphs(self.runtime, self.registry, mode=mode, **options)
        self.clock = itertools.count(1)
        self.buckets: set[int] = set()
        for name in weight_shapes(layers):
            self.place(name, weights(0)[name], "weights")
        for name, of in state_shapes(layers).items():
            order = np.arange(EXPERTS, dtype=np.int32)
            self.place(name, order if name.startswith("slot_of") else np.zeros(of[1:], of[0]), "arena")

    # Memory.

    def resource(self, values: np.ndarray, use) -> Resource:
        """New memory with these values."""
        address, capsule = self.runtime.allocate(values.nbytes)
        self.runtime.write(address, values, self.graphs.stream)
        layout = dense("", values.dtype.name, values.shape).layout
        return Resource(
            address=address, bytes=values.nbytes, layout=layout, serial=next_serial(), use=use, capsule=capsule
        )

    def place(self, name: str, values: np.ndarray, use) -> None:
        """Bind a name to new memory, or replace what it has."""
        resource = self.resource(values, use)
        (self.table.replace if self.table.get(name) else self.table.bind)(name, resource)
        self.oracle.arrays[name] = values.copy()

    def write(self, name: str, values: np.ndarray) -> None:
        """New contents in the same storage, in the order of the stream."""
        self.runtime.write(self.table.get(name).address, values, self.graphs.stream)
        self.oracle.arrays[name][...] = values

    def grow(self, name: str) -> None:
        """Move an arena to new memory with its contents."""

        def make() -> Resource:
            values = self.read(name)
            return self.resource(values, "arena")

        self.graphs.grow(self.table, name, make)

    def read(self, name: str) -> np.ndarray:
        resource = self.table.get(name)
        return self.runtime.read(resource.address, resource.layout.dtype, resource.layout.shape, self.graphs.stream)

    def add_bucket(self, rows: int) -> None:
        """Memory of a row bucket."""
        if rows not in self.buckets:
            self.buckets.add(rows)
            for name, of in per_bucket(rows).items():
                self.place(f"{name}/{rows}", np.zeros(of[1:], of[0]), "arena")

    # Steps.

    def certificate(self, rows: int, bucket: int, **changes: Any) -> Certificate:
        owner = self.registry.owner_generation("main") if self.registry.manifest("main")[0] else 1
        values = {
            "namespace": "main",
            "owner_generation": owner,
            "semantics": "independent",
            "rows": rows,
            "bucket": bucket,
            "sequences": rows,
        }
        return Certificate(**(values | changes))

    def inputs(self, rows: int, bucket: int, seed: int | None = None, **given: Any) -> None:
        """New tokens, positions, sequences and adapters for ``rows`` rows; the rest of the bucket is dead."""
        self.add_bucket(bucket)
        values = random_inputs(rows, bucket, next(self.clock) % 512 if seed is None else seed)
        for name, value in (values | given).items():
            self.write(f"{name}/{bucket}", np.asarray(value, np.int32))

    def staged(self, launches: LaunchList) -> Callable[[Any], None]:
        """A host-staged path: the same launches, queued by hand."""

        def queue(stream: Any) -> None:
            # They live until the work is done.
            self.staging = {spec.key: self.runtime.load(spec) for spec in launches.specs}
            for launch in launches.launches:
                if isinstance(launch, Copy):
                    target, source = (self.table.get(o.buffer).address for o in (launch.target, launch.source))
                    self.runtime.copy(target, source, launch.bytes, stream)
                    continue
                addresses = [self.table.get(o.buffer).address + o.offset for o in launch.operands]
                self.runtime.launch(self.staging[launch.spec.key], addresses, stream)

        return queue

    def step(
        self, rows: int = 2, bucket: int | None = None, *, launches: LaunchList | None = None, **changes
    ) -> Outcome:
        """One step with new inputs, checked against the oracle. ``changes`` are the certificate's."""
        bucket = bucket or rows
        given = {name: changes.pop(name) for name in [*INPUTS, "seed"] if name in changes}
        self.inputs(rows, bucket, **given)
        launches = launches or equal_list(bucket)
        certificate = self.certificate(rows, bucket, **changes)
        outcome = self.graphs.step(launches, certificate, self.table, staged=self.staged(launches))
        self.oracle.run(launches)
        self.check(bucket)
        return outcome

    def kinds(self, count: int, *args: Any, **changes: Any) -> tuple[str, ...]:
        """Kinds of the next steps."""
        return tuple(self.step(*args, **changes).kind for _ in range(count))

    def warm(self, *args: Any, **changes: Any) -> None:
        """Up to and with the first replay."""
        assert self.kinds(3, *args, **changes) == ("direct", "capture", "replay")

    def check(self, *buckets: int) -> None:
        """All state and the results of some buckets, bit for bit."""
        names = [
            *state_shapes(self.layers),
            *(f"{name}/{rows}" for rows in buckets for name in ("next", "logits", "copied")),
        ]
        for name in names:
            got, wanted = self.read(name), self.oracle.arrays[name]
            if got.tobytes() != wanted.tobytes():
                raise WrongTokens(f"{name}: {got.tolist()} in place of {wanted.tolist()}")

    def counts_add_up(self) -> dict[str, Any]:
        """The sums that always hold; returns the counts."""
        stats = self.graphs.stats()
        assert stats["plan_calls"] == stats["plan_compiles"] + stats["plan_reuses"]
        assert stats["steps"] == sum(stats[kind] for kind in ("direct", "captures", "updates", "replays"))
        assert stats["direct"] == sum(stats["declines"].values())
        assert stats["graphs"] <= stats["max_entries"] and stats["estimated_bytes"] <= stats["max_bytes"]
        return stats

    def nothing_leaked(self) -> None:
        """The device has the executables that the store counts, and no other graph; of those that wait to be destroyed,
        none when everything has been waited for.
        """
        stats = self.graphs.stats()
        assert len(self.runtime.executables) == stats["graphs"] + stats["retired"] and not self.runtime.graphs
        self.graphs.drain()
        assert len(self.runtime.executables) == stats["graphs"] and self.graphs.stats()["retired"] == 0


def scratch_fits() -> bool:
    """The arena holds every scratch argument of the largest bucket used in tests."""
    sizes = [argument_bytes(a) for s in step_launches(8).specs for a in s.arguments if a.role == "scratch"]
    return 256 + max(sizes) <= ARENA
