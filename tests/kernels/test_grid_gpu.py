"""Every back end of the expert block at a covering sample of shapes: against f64, in dirty memory, and repeated."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from arena import Surrounded
from cases import ACTIVATIONS
from jax import lax

import backends as bench
from backends import assert_same_bits, dirty_memory
from moe_jax.pallas_kernels import device
from moe_jax.pallas_kernels.grouped_moe import Activation, ExpertWeights, MoEConfig, activate, grouped_moe
from moe_jax.pallas_kernels.grouped_moe.api import GROUPED_MOE
from moe_jax.pallas_kernels.route import RouterConfig, Routing

NAMES = [b.name for b in GROUPED_MOE.backends]
# Arrays in every dtype and row count, so every back end has a turn; on the CPU the reference alone.
every_backend = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("reference", id="reference"),
        *(pytest.param(name, id=f"{name}-gpu", marks=pytest.mark.gpu) for name in NAMES),
    ],
)
# Matrix products of many shapes, each run once: choosing the fastest one of each would be most of the time.
QUICK = {"xla_gpu_autotune_level": 0}

FACTORS: dict[str, tuple[Any, ...]] = {
    "tokens": (1, 2, 3, 5, 8, 17, 64, 65, 257, 4096),
    "experts": (1, 3, 5, 8, 60, 64, 128, 160, 256, 384),
    "top_k": (1, 2, 6, 8, "E"),
    "hidden": (72, 192, 320, 704, 1001, 1408, 2880),
    "inner": (72, 192, 320, 704, 1001, 1408, 2880),
    "dtype": ("bfloat16", "float16", "float32"),
    "activation": ACTIVATIONS,
    "biases": (False, True),
    "load": ("spread", "sentinels", "few", "first", "last"),
}
MOST = 120


@dataclass(frozen=True, kw_only=True)
class Case:
    """A call; ``load`` says how rows choose experts.

    ``"spread"``: all alike; ``"sentinels"``: -1 and E among them; ``"few"``: nearly all experts are empty;
    ``"first"``, ``"last"``: every row has the same k experts at that end.
    """

    tokens: int
    experts: int
    top_k: int | str
    hidden: int
    inner: int
    dtype: str = "bfloat16"
    activation: Activation = ACTIVATIONS[0]
    biases: bool = False
    load: str = "spread"

    @property
    def ranks(self) -> int:
        return self.experts if self.top_k == "E" else int(self.top_k)

    @property
    def sizes(self) -> tuple[int, int]:
        return self.hidden, self.inner

    def __str__(self) -> str:
        shape = f"{self.tokens}x{self.top_k}of{self.experts}-{self.hidden}x{self.inner}"
        form = f"{self.activation.name}-{self.activation.layout}-{self.activation.limit_after}"
        return f"{shape}-{self.dtype}-{form}-{'biases-' if self.biases else ''}{self.load}"

    def fits(self) -> bool:
        """At most 2**28 elements of weights, and as many of all pairs' rows: half a gibibyte or one for each."""
        pairs = self.tokens * self.ranks
        return (
            self.ranks <= self.experts
            and self.experts * 3 * self.hidden * self.inner <= 1 << 28
            and pairs * (self.hidden + 2 * self.inner) <= 1 << 28
        )


def sample(seed: int = 0) -> list[Case]:
    """Cases in which every two values of two factors that fit together meet at least once."""
    rng, names = random.Random(seed), list(FACTORS)

    def pairs_of(values: dict[str, Any]) -> set[Any]:
        return {((a, values[a]), (b, values[b])) for a, b in itertools.combinations(names, 2)}

    def completed(values: dict[str, Any], wanted: set[Any]) -> dict[str, Any] | None:
        """The other factors at random, those first of which the choice brings most."""
        for _ in range(20):
            made = values | {name: rng.choice(FACTORS[name]) for name in names if name not in values}
            if not Case(**made).fits():
                continue
            for name in rng.sample(names, len(names)):
                if name not in values:
                    tried = [made | {name: value} for value in FACTORS[name]]
                    made = max((t for t in tried if Case(**t).fits()), key=lambda t: len(pairs_of(t) & wanted))
            return made
        return None

    wanted = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in FACTORS[a] for y in FACTORS[b]}
    order, found = sorted(wanted, key=repr), []
    rng.shuffle(order)
    for pair in order:
        if pair in wanted:
            made = completed(dict(pair), wanted)
            wanted.discard(pair)
            if made is not None:
                wanted -= pairs_of(made)
                found.append(Case(**made))
    return found


CASES = sample()


def ids_of(case: Case, rng: np.random.Generator) -> np.ndarray:
    """Distinct experts in each row, int32 ``[T, k]``."""
    tokens, experts, k = case.tokens, case.experts, case.ranks
    if case.load in ("first", "last"):
        row = np.arange(k) if case.load == "first" else experts - 1 - np.arange(k)
        return np.broadcast_to(row, (tokens, k)).astype(np.int32)
    if case.load == "few":
        some = rng.permutation(experts)[: max(k, min(experts, 3))]
        return some[np.argsort(rng.random((tokens, len(some))), axis=1)[:, :k]].astype(np.int32)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    if case.load == "sentinels":
        ids[rng.random(ids.shape) < 0.2] = -1
        ids[rng.random(ids.shape) < 0.1] = experts
        ids[tokens // 2] = -1
    return ids


def make(case: Case, seed: jax.Array) -> tuple[jax.Array, jax.Array, ExpertWeights]:
    """Rows, routing weights and a layer whose outputs are of the order of one, made on the device."""
    keys = iter(jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), 6))

    def uniform(*shape: int, dtype: str = case.dtype, scale: float = 3**0.5) -> jax.Array:
        return (jax.random.uniform(next(keys), shape, jnp.float32, -1, 1) * scale).astype(dtype)

    rows, (hidden, inner) = case.activation.rows(case.inner), case.sizes
    weights = ExpertWeights(
        gate_up=uniform(case.experts, rows, hidden, scale=(3 / hidden) ** 0.5),
        down=uniform(case.experts, hidden, inner, scale=(3 / inner) ** 0.5),
        gate_up_bias=uniform(case.experts, rows) if case.biases else None,
        down_bias=uniform(case.experts, hidden) if case.biases else None,
    )
    scale = jnp.abs(uniform(case.tokens, case.ranks, dtype="float32", scale=1.0)) + 0.1
    return uniform(case.tokens, hidden), scale, weights


random_layer = jax.jit(make, static_argnums=0, compiler_options=QUICK)


def call_of(case: Case, seed: int) -> tuple[jax.Array, Routing, ExpertWeights]:
    x, scale, weights = random_layer(case, jnp.uint32(seed))
    ids = ids_of(case, np.random.default_rng(seed))
    # What a slot without an expert weighs may be anything.
    scale = jnp.where((ids < 0) | (ids >= case.experts), jnp.nan, scale)
    return x, Routing(scale, jnp.asarray(ids)), weights


def config_of(case: Case) -> MoEConfig:
    return MoEConfig(router=RouterConfig(experts=case.experts, top_k=case.ranks), activation=case.activation)


def compiled(case: Case, backend: str, args: tuple[Any, ...]) -> Any:
    """The call as one program."""
    config = config_of(case)

    def call(x: jax.Array, r: Routing, w: ExpertWeights) -> jax.Array:
        return grouped_moe(x, r, w, config, backend=backend)

    return jax.jit(call).lower(*args).compile(QUICK)


def some_rows(case: Case) -> np.ndarray:
    """At most 128 rows, the first and the last among them."""
    return np.unique(np.linspace(0, case.tokens - 1, 128).astype(int))


def in_f64(case: Case, rows: np.ndarray, x: jax.Array, r: Routing, weights: ExpertWeights) -> np.ndarray:
    """The op on some rows by every expert, unchosen ones times 0: nothing is sorted, nothing gathered."""
    with jax.enable_x64(True):
        at = jnp.asarray(rows)
        return np.asarray(_in_f64(case.activation, x[at], r.weights[at], r.ids[at], weights))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _in_f64(
    activation: Activation, x: jax.Array, scale: jax.Array, ids: jax.Array, weights: ExpertWeights
) -> jax.Array:
    experts, wide = weights.down.shape[0], jnp.float64
    there = (ids >= 0) & (ids < experts)
    token = jnp.arange(x.shape[0])[:, None]
    shares = jnp.zeros((x.shape[0], experts), wide)
    shares = shares.at[token, jnp.where(there, ids, experts)].add(jnp.where(there, scale, 0).astype(wide), mode="drop")
    x = x.astype(wide)

    def product(v: jax.Array, w: jax.Array, bias: jax.Array | None) -> jax.Array:
        out = lax.dot_general(v, w, (((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST)
        return out if bias is None else out + bias

    def add(e: jax.Array, total: jax.Array) -> jax.Array:
        w = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, e, keepdims=False).astype(wide), weights)
        y = product(activate(product(x, w.gate_up, w.gate_up_bias), activation), w.down, w.down_bias)
        return total + shares[:, e, None] * y

    return lax.fori_loop(0, experts, add, jnp.zeros(x.shape, wide))


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Norm of the difference relative to the norm of what is wanted; if that is 0, 0 or infinity."""
    norm, error = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(error / norm) if norm else float("inf") if error else 0.0


def check(case: Case, seed: int, names: list[str]) -> None:
    """Back ends at one case: error at most twice the reference's, in every row."""
    args, rows = call_of(case, seed), some_rows(case)
    want = in_f64(case, rows, *args)
    outputs = {}
    for name in names:
        with bench.served(name, case.tokens, case.dtype, case.sizes):
            program = compiled(case, name, args)
            dirty_memory()
            outputs[name] = np.asarray(program(*args)).astype(np.float64)
    plain = outputs["reference"]
    # With what adding up so many products in order costs in f32: a library may have added them in parts.
    most = 2 * distance(plain[rows], want) + 2**-24 * (max(case.sizes) / 6) ** 0.5
    assert most < {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}[case.dtype]
    size = np.linalg.norm(plain, axis=1)
    for name, got in outputs.items():
        assert np.isfinite(got).all(), name
        error = distance(got[rows], want)
        assert error <= most, f"{name}: error {error:.3g}, twice the reference's is {most:.3g}"
        # The rows that were not compared with f64: nearer to the reference than a lost pair would leave them.
        apart = np.linalg.norm(got - plain, axis=1)
        assert (apart <= 6 * most * np.maximum(size, 1e-3 * size.max(initial=0))).all(), f"{name}: {apart.argmax()}"
        assert not got[size == 0].any(), name


def test_the_sample_is_small_and_every_pair_of_values_that_fits_is_in_it() -> None:
    assert len(CASES) <= MOST
    least = {name: values[0] for name, values in FACTORS.items()}
    sizes = itertools.product(FACTORS["experts"], FACTORS["top_k"])
    starts = [least | {"experts": experts, "top_k": k} for experts, k in sizes]
    missing = []
    for a, b in itertools.combinations(FACTORS, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in CASES}
        pairs = [pair for pair in itertools.product(FACTORS[a], FACTORS[b]) if pair not in met]
        missing += [{a: x, b: y} for x, y in pairs if any(Case(**(s | {a: x, b: y})).fits() for s in starts)]
    assert not missing
    assert sample() == CASES


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_C23_every_back_end_at_a_covering_sample_of_shapes(case: Case) -> None:
    check(case, CASES.index(case), NAMES)


SMALL = Case(tokens=65, experts=5, top_k="E", hidden=72, inner=192, dtype="float16", load="sentinels", biases=True)


def test_the_reference_at_a_small_case() -> None:
    check(SMALL, 3, ["reference"])


def test_the_comparison_sees_one_lost_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is not among the ones compared with f64 loses one of its pairs."""
    case = Case(tokens=257, experts=3, top_k=2, hidden=72, inner=72, dtype="float32")
    lost = next(t for t in range(case.tokens) if t not in some_rows(case))
    plain = compiled

    def without_one_pair(case: Case, backend: str, args: tuple[Any, ...]) -> Any:
        program = plain(case, "reference", args)
        if backend == "reference":
            return program
        return lambda x, r, w: program(x, Routing(r.weights, r.ids.at[lost, 1].set(-1)), w)

    monkeypatch.setitem(globals(), "compiled", without_one_pair)
    monkeypatch.setitem(bench.MADE_FOR, "broken", bench.MADE_FOR["reference"])
    with pytest.raises(AssertionError, match=f"broken: {lost}"):
        check(case, 3, ["reference", "broken"])


@every_backend
@pytest.mark.parametrize("dtype", FACTORS["dtype"])
def test_C06_no_rows_in_every_dtype(dtype: str, backend: str) -> None:
    case = Case(tokens=0, experts=3, top_k=2, hidden=72, inner=192, dtype=dtype, biases=True)
    x, scale, weights = random_layer(case, jnp.uint32(0))
    args = x, Routing(scale, jnp.zeros((0, 2), jnp.int32)), weights
    with bench.served(backend, 0, dtype, case.sizes):
        out = compiled(case, backend, args)(*args)
        assert (out.shape, out.dtype.name) == ((0, 72), dtype)


REPEATED = [
    Case(tokens=1, experts=128, top_k=8, hidden=2048, inner=768),
    Case(tokens=17, experts=60, top_k=6, hidden=1001, inner=320, dtype="float32", load="sentinels"),
    Case(tokens=64, experts=160, top_k=8, hidden=320, inner=192),
    Case(tokens=257, experts=60, top_k=6, hidden=704, inner=1408, dtype="float16", load="sentinels", biases=True),
    Case(tokens=4096, experts=128, top_k=8, hidden=1408, inner=320),
]


@pytest.mark.gpu
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_ten_runs_between_other_inputs_are_bit_equal(case: Case, backend: str) -> None:
    args = call_of(case, 0)
    with bench.served(backend, case.tokens, case.dtype, case.sizes):
        program = compiled(case, backend, args)
        first = np.asarray(program(*args))
        for i in range(1, 10):
            other = call_of(case, i)
            assert np.isfinite(np.asarray(program(*other[:2], args[2])).astype(np.float32)).all()
            dirty_memory()
            assert_same_bits(program(*args), first)


WITH_NAN_AROUND = [
    Case(tokens=t, experts=3, top_k=2, hidden=h, inner=i, dtype=dtype, biases=True, load="sentinels")
    for t, h, i, dtype in (
        (3, 72, 1001, "float32"),
        (1, 1001, 72, "bfloat16"),
        (17, 2880, 704, "float16"),
        (65, 192, 72, "bfloat16"),
        (257, 1408, 1001, "float32"),
        (257, 704, 2880, "bfloat16"),
        (300, 320, 1408, "float16"),
    )
]


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *(pytest.param(case, "reference", id=f"{case}-reference") for case in WITH_NAN_AROUND[:2]),
        *(
            pytest.param(case, name, id=f"{case}-{name}-gpu", marks=pytest.mark.gpu)
            for case in WITH_NAN_AROUND
            for name in NAMES
        ),
    ],
)
def test_C29_nan_around_every_array_changes_no_bit(case: Case, backend: str) -> None:
    """Rows, routing and weights stand in one allocation, with NaN before and after each."""
    args = call_of(case, 5)
    held = Surrounded(args)
    with bench.served(backend, case.tokens, case.dtype, case.sizes):
        program = compiled(case, backend, args)
        want = np.asarray(program(*args))
        assert np.isfinite(want.astype(np.float32)).all()
        assert_same_bits(program(*held.tree), want)
    jax.block_until_ready(held.tree)


def test_surrounded_arrays_share_one_allocation() -> None:
    tree = {"a": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "b": jnp.arange(3, dtype=jnp.int32)}
    held = Surrounded(tree)
    assert_same_bits(held.tree, tree)
    start, size = held.memory.unsafe_buffer_pointer(), held.memory.nbytes
    assert all(start < leaf.unsafe_buffer_pointer() < start + size for leaf in jax.tree.leaves(held.tree))
    after = held.tree["a"].unsafe_buffer_pointer() - start + tree["a"].nbytes
    assert np.isnan(np.asarray(held.memory)[after : after + 32].view(jnp.bfloat16).astype(np.float32)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("backend", NAMES)
@pytest.mark.parametrize("tokens", [64, 16384])
def test_C26_every_row_on_the_first_or_the_last_experts(tokens: int, backend: str) -> None:
    """One program, its memory planned before the routing is known, serves an even load and both ends."""
    case = Case(tokens=tokens, experts=128, top_k=8, hidden=2048, inner=768)
    with bench.served(backend, tokens, case.dtype, case.sizes):
        args, rows = call_of(case, 1), some_rows(case)
        program, plain = compiled(case, backend, args), compiled(case, "reference", args)
        places = tokens * 8 + 128 * 512  # blocks with their padding
        assert program.memory_analysis().temp_size_in_bytes <= 4 * 4 * places * 2048
        for load in ("spread", "first", "last"):
            skewed = Case(tokens=tokens, experts=128, top_k=8, hidden=2048, inner=768, load=load)
            r = Routing(args[1].weights, jnp.asarray(ids_of(skewed, np.random.default_rng(7))))
            want = in_f64(case, rows, args[0], r, args[2])
            dirty_memory()
            got, beside = (np.asarray(p(args[0], r, args[2])).astype(np.float64) for p in (program, plain))
            assert distance(got[rows], want) <= 2 * distance(beside[rows], want)
            assert distance(got, beside) <= 1e-2


@pytest.mark.parametrize("backend", NAMES)
def test_what_back_ends_are_made_for_is_what_they_serve(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table that the suites go by, against the back ends' own refusals on a machine that has all they need."""
    monkeypatch.setattr(device, "_refusal", lambda *_: None)
    refusal = next(b.refusal for b in GROUPED_MOE.backends if b.name == backend)
    capability = bench.MADE_FOR[backend].capability
    for tokens, dtype, hidden in itertools.product((0, 1, 64, 65, 4096), FACTORS["dtype"], (72, 1001)):
        case = Case(tokens=tokens, experts=3, top_k=2, hidden=hidden, inner=72, dtype=dtype)
        x, scale, weights = jax.eval_shape(functools.partial(make, case), jnp.uint32(0))
        r = Routing(scale, jax.ShapeDtypeStruct(scale.shape, jnp.int32))
        outside = bench.outside(backend, tokens, dtype, case.sizes)
        # No CPU is a Hopper: only what lies outside for another reason too can be told there.
        if capability and jax.default_backend() == "cpu" and len(outside) == 1:
            continue
        assert bool(refusal(x, r, weights, config_of(case))) == bool(outside), case
