"""`linear`, `attention` and `kv_append` as users call them: checks, choice of back end, transformations."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_cases import append_oracle, attention_oracle, kv_case, linear_oracle, relative_error
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lowering import compiled_here, kernels, lowered, pretend_gpu, pretend_hopper
from moe_jax.pallas_kernels import as_operation as shared
from moe_jax.pallas_kernels import dispatch, xla_call
from moe_jax.pallas_kernels.attention import attention
from moe_jax.pallas_kernels.attention.api import ATTENTION
from moe_jax.pallas_kernels.errors import CannotServe, InvalidArgument, SlowPathWarning
from moe_jax.pallas_kernels.kv_append import kv_append
from moe_jax.pallas_kernels.kv_append.api import KV_APPEND
from moe_jax.pallas_kernels.linear import linear
from moe_jax.pallas_kernels.linear.api import LINEAR

ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)
PAGED = {"sequences": 3, "pages": 14, "page_size": 8, "max_pages": 4}
CASE = kv_case(RNG, rows=5, positions=32, **PAGED)
TABLE, POSITION, SEQUENCE = (jnp.asarray(CASE[f"{name}_ptr"]) for name in ("table", "position", "sequence"))


def normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


X, W, GAIN, BIAS, RESIDUAL = normal(5, 16), normal(24, 16), normal(16), normal(24), normal(5, 24)
Q, K_PAGES, V_PAGES, SINK = normal(5, 4, 16), normal(14, 2, 8, 16), normal(14, 2, 8, 16), normal(4)
QKV, COS, SIN, Q_GAIN, K_GAIN = normal(5, 128), normal(40, 8), normal(40, 8), normal(16), normal(16)


def project(x, w, residual, **options):
    return linear(x, w, gain=GAIN, bias=BIAS, residual=residual, **options)


def attend(q, k_pages, v_pages, position, **options):
    return attention(q, k_pages, v_pages, TABLE, position, SEQUENCE, sink=SINK, window=9, **options)


def append(qkv, k_pages, v_pages, position, **options):
    gains = {"norm": "head", "q_gain": Q_GAIN, "k_gain": K_GAIN}
    return kv_append(qkv, COS, SIN, k_pages, v_pages, TABLE, position, SEQUENCE, clip=1.0, **gains, **options)


CALLS: dict[str, tuple[Callable[..., Any], tuple[jax.Array, ...]]] = {
    "linear": (project, (X, W, RESIDUAL)),
    "attention": (attend, (Q, K_PAGES, V_PAGES, POSITION)),
    "kv_append": (append, (QKV, K_PAGES, V_PAGES, POSITION)),
}


def oracle(name: str) -> tuple[np.ndarray, ...]:
    paged = (K_PAGES, V_PAGES, *(np.asarray(a) for a in (TABLE, POSITION, SEQUENCE)))
    if name == "linear":
        return (linear_oracle(X, W, GAIN, BIAS, RESIDUAL),)
    if name == "attention":
        return (attention_oracle(Q, *paged, SINK, None, 9),)
    return append_oracle(QKV, np.float64(COS), np.float64(SIN), *paged, "head", Q_GAIN, K_GAIN, clip=1.0)


def same(got: Any, wanted: Any, bound: float = 1e-6) -> None:
    got, wanted = jax.tree.leaves(got), jax.tree.leaves(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(np.float64(a), np.float64(b), rtol=10 * bound, atol=bound)


# -- values and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_values_on_the_cpu(name):
    f, args = CALLS[name]
    for got, wanted in zip(jax.tree.leaves(f(*args)), oracle(name), strict=True):
        assert got.shape == wanted.shape and relative_error(got, wanted) < 1e-6


def test_options_one_by_one():
    assert relative_error(linear(X, W), linear_oracle(X, W)) < 1e-6
    assert linear(X.astype(jnp.bfloat16), W.astype(jnp.bfloat16), out_dtype=jnp.float32).dtype == jnp.float32
    arrays = [np.asarray(a) for a in (TABLE, POSITION, SEQUENCE)]
    got = attention(Q, K_PAGES, V_PAGES, TABLE, POSITION, SEQUENCE, scale=0.5)
    assert relative_error(got, attention_oracle(Q, K_PAGES, V_PAGES, *arrays, scale=0.5)) < 1e-6
    wide = {"q_gain": normal(64), "k_gain": normal(32), "norm": "projection"}
    got = kv_append(QKV, COS, SIN, K_PAGES, V_PAGES, TABLE, POSITION, SEQUENCE, **wide)
    exact = append_oracle(QKV, np.float64(COS), np.float64(SIN), K_PAGES, V_PAGES, *arrays, **wide)
    assert max(relative_error(a, b) for a, b in zip(got, exact, strict=True)) < 1e-6


def test_float64_and_no_rows():
    with jax.enable_x64(True):
        x, w = normal(3, 16, dtype=jnp.float64), normal(24, 16, dtype=jnp.float64)
        assert relative_error(linear(x, w), linear_oracle(x, w)) < 1e-14
    assert linear(X[:0], W).shape == (0, 24)
    nothing = POSITION[:0]
    assert attention(Q[:0], K_PAGES, V_PAGES, TABLE, nothing, nothing).shape == (0, 4, 16)
    q, k_pages, _ = kv_append(QKV[:0], COS, SIN, K_PAGES, V_PAGES, TABLE, nothing, nothing)
    assert q.shape == (0, 4, 16) and (k_pages == K_PAGES).all()


def test_many_rows_of_the_reference_go_piece_by_piece():
    q, position, sequence = (jnp.tile(a, (30, *(1,) * (a.ndim - 1))) for a in (Q, POSITION, SEQUENCE))
    got = attention(q, K_PAGES, V_PAGES, TABLE, position, sequence)
    same(got, jnp.tile(attention(Q, K_PAGES, V_PAGES, TABLE, POSITION, SEQUENCE), (30, 1, 1)))


def test_a_nan_that_no_row_sees_reaches_none():
    seen = np.zeros((14, 8), bool)
    for s, p in zip(SEQUENCE.tolist(), POSITION.tolist(), strict=True):
        for key in range(max(0, p - 8), p + 1):
            seen[TABLE[s, key // 8], key % 8] = True
    poisoned = [jnp.where(seen[:, None, :, None], pool, jnp.nan) for pool in (K_PAGES, V_PAGES)]
    same(attend(Q, *poisoned, POSITION), attend(Q, K_PAGES, V_PAGES, POSITION))
    grads = jax.grad(lambda *pools: jnp.sum(attend(Q, *pools, POSITION) ** 2), argnums=(0, 1))(*poisoned)
    assert all(jnp.isfinite(g).all() for g in grads)


PAGES = (K_PAGES, V_PAGES)
ROWS = (TABLE, POSITION, SEQUENCE)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear([[1.0]], W), "type of x: got list"),
        (lambda: linear(X, W.T), r"shape of w: got \[16, 24\], wanted \[N, 16\]"),
        (lambda: linear(X, W.astype(jnp.bfloat16)), "dtype of w: got bfloat16, wanted float32"),
        (lambda: linear(X, W, gain=BIAS), "shape of gain"),
        (lambda: linear(X, W, bias=GAIN), "shape of bias"),
        (lambda: linear(X, W, residual=X), "shape of residual"),
        (lambda: linear(X, W, residual=RESIDUAL, out_dtype=jnp.bfloat16), "dtype of residual: got float32"),
        (lambda: linear(X, W, out_dtype=jnp.int32), "out_dtype: got int32"),
        (lambda: linear(X, W, eps=0.0), "eps: got 0"),
        (lambda: linear(X, W, eps="1"), "eps: got '1', wanted a finite number over 0"),
        (lambda: linear(X, W, eps=True), "eps: got True"),
        (lambda: linear(X, W, eps=10**400), "eps: got an integer of 1329 bits"),
        (lambda: linear(X, W, eps=float("inf")), "eps: got inf"),
        (lambda: jax.jit(lambda eps: linear(X, W, eps=eps))(1e-6), "eps: got .*Tracer.*, wanted a finite number"),
        (lambda: linear(X, W, out_dtype="foo"), "out_dtype: got 'foo', wanted bfloat16 or float16 or float32"),
        (lambda: linear(X, W, out_dtype=3), "out_dtype: got 3"),
        (lambda: linear(X, W, backend="cutlass"), "'cutlass', wanted auto, triton, reference"),
        (lambda: attention(Q[0], *PAGES, *ROWS), "shape of q"),
        (lambda: attention(Q, K_PAGES, V_PAGES[:3], *ROWS), "shape of v_pages"),
        (lambda: attention(Q[:, :3], *PAGES, *ROWS), "heads a multiple of kv_heads"),
        (lambda: attention(Q, *PAGES, TABLE, POSITION[:2], SEQUENCE), "shape of position"),
        (lambda: attention(Q, *PAGES, TABLE.astype(jnp.int16), POSITION, SEQUENCE), "dtype of table"),
        (lambda: attention(Q, *PAGES, *ROWS, sink=SINK[:2]), "shape of sink"),
        (lambda: attention(Q, *PAGES, *ROWS, window=0), "window: got 0"),
        (lambda: attention(Q, *PAGES, *ROWS, window="3"), "window: got '3', wanted an integer from 1 to 2147483647"),
        (lambda: attention(Q, *PAGES, *ROWS, window=2.0), "window: got 2.0"),
        (lambda: attention(Q, *PAGES, *ROWS, window=True), "window: got True"),
        (lambda: attention(Q, *PAGES, *ROWS, window=1 << 31), "window: got 2147483648"),
        (lambda: attention(Q, *PAGES, *ROWS, scale="1"), "scale: got '1', wanted a finite number"),
        (lambda: attention(Q, *PAGES, *ROWS, scale=float("nan")), "scale: got nan"),
        (lambda: attention(Q, *PAGES, *ROWS, rows_of_sequence=None), "rows_of_sequence: got None, wanted an integer"),
        (lambda: attention(Q, *PAGES, *ROWS, rows_of_sequence=5.0), "rows_of_sequence: got 5.0"),
        (lambda: attention(Q, *PAGES, *ROWS, rows_of_sequence=2), "a divisor of rows=5"),
        (lambda: kv_append(QKV[:, :40], COS, SIN, *PAGES, *ROWS), "width of qkv: got 40"),
        (lambda: kv_append(QKV, COS[:, :4], SIN, *PAGES, *ROWS), "shape of cos"),
        (lambda: kv_append(QKV, COS, SIN[:4], *PAGES, *ROWS), "shape of sin"),
        (lambda: kv_append(QKV, COS, SIN, *PAGES, *ROWS, norm="row"), "norm: got 'row'"),
        (lambda: kv_append(QKV, COS, SIN, *PAGES, *ROWS, norm="head"), "no q_gain"),
        (lambda: kv_append(QKV, COS, SIN, *PAGES, *ROWS, k_gain=K_GAIN), "a k_gain"),
        (lambda: kv_append(QKV, COS, SIN, *PAGES, *ROWS, norm=["head"]), r"norm: got \['head'\]"),
        (lambda: kv_append(QKV, COS, SIN, *PAGES, *ROWS, clip=-1.0), "clip: got -1.0, wanted a number over 0"),
        (lambda: kv_append(QKV, COS, SIN, *PAGES, *ROWS, clip="1"), "clip: got '1'"),
        (lambda: kv_append(QKV, COS, SIN, *PAGES, *ROWS, eps=None), "eps: got None, wanted a finite number over 0"),
        (lambda: kv_append(QKV, COS, SIN, K_PAGES[..., :7], V_PAGES[..., :7], *ROWS), "an even D"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


@pytest.mark.parametrize("number", [float, np.float32, np.asarray, jnp.asarray])
def test_numbers_of_any_library_are_numbers(number):
    exact = linear(X, W, gain=GAIN, eps=0.25), attention(Q, *PAGES, *ROWS, scale=0.5, window=3)
    same((linear(X, W, gain=GAIN, eps=number(0.25)), attention(Q, *PAGES, *ROWS, scale=number(0.5), window=3)), exact)
    same(attention(Q, *PAGES, *ROWS, scale=0.5, window=np.int64(3), rows_of_sequence=np.int32(1)), exact[1])
    unclipped = kv_append(QKV, COS, SIN, *PAGES, *ROWS)
    same(kv_append(QKV, COS, SIN, *PAGES, *ROWS, clip=number(np.inf)), unclipped)


# -- choice of back end -----------------------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA machine, as far as the choice of a back end sees. Programs still compile for the CPU."""
    pytest.importorskip("triton")
    pretend_gpu(monkeypatch, shared)


@pytest.mark.parametrize("name", CALLS)
def test_on_the_cpu_the_kernel_says_that_there_is_no_cuda_device(name):
    f, args = CALLS[name]
    with pytest.raises(CannotServe, match=r"no CUDA device: the call runs on cpu"):
        f(*args, backend="triton")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("operation", "call", "reason"),
    [
        (LINEAR, lambda b: linear(normal(65, 16), W, backend=b), "rows: got 65, the kernel takes 1 to 64"),
        (LINEAR, lambda b: linear(X[:0], W, backend=b), "rows: got 0, the kernel takes 1 to 64"),
        (ATTENTION, lambda b: attention(Q[:0], *PAGES, TABLE, *[POSITION[:0]] * 2, backend=b), "rows: got 0"),
        (
            ATTENTION,
            lambda b: attention(normal(5, 80, 16), *PAGES, *ROWS, backend=b),
            "heads: got 80 and 2, the kernel takes",
        ),
        (
            KV_APPEND,
            lambda b: kv_append(QKV, COS, SIN, K_PAGES[:, :, :6], V_PAGES[:, :, :6], *ROWS, backend=b),
            "page_size: got 6, the kernel takes a power of two",
        ),
    ],
)
def test_what_the_kernels_are_not_for_goes_to_the_reference_without_a_warning(operation, call, reason, monkeypatch):
    with pytest.raises(CannotServe, match=reason):
        call("triton")
    chosen = []
    monkeypatch.setattr(dispatch, "call_plain", lambda run, args: chosen.append(run) or run(*args))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call("auto")
    assert chosen == [operation.backends[1].run]


@pytest.mark.usefixtures("on_gpu")
def test_weights_that_would_be_copied_at_every_call_are_refused_with_a_warning():
    turned = jax.device_put(W, Format(Layout((1, 0)), W.sharding))
    with pytest.warns(SlowPathWarning, match=r"w lies in memory in the order of axes \(1, 0\).*Layout\(\(0, 1\)\)"):
        linear(X, turned)
    pool = jax.device_put(V_PAGES, Format(Layout((0, 2, 1, 3)), V_PAGES.sharding))
    with pytest.warns(SlowPathWarning, match="v_pages lies in memory"):
        attend(Q, K_PAGES, pool, POSITION)


@pytest.mark.usefixtures("on_gpu")
def test_a_fault_inside_a_spec_is_no_reason_to_decline(monkeypatch):
    from moe_jax.pallas_kernels.linear import api

    def broken(*args, **options):
        raise InvalidArgument("parameters", where="KernelSpec('linear')", got=1, wanted=2)

    monkeypatch.setattr(api, "linear_spec", broken)
    with pytest.raises(InvalidArgument, match="KernelSpec"):
        linear(X, W)


def test_calls_on_the_cpu_import_no_triton():
    code = (
        "import sys; sys.path[:0] = ['tests', 'tests/kernels']; import test_decode_api as t\n"
        "for f, args in t.CALLS.values(): f(*args)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('triton', 'jax_triton')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# -- transformations --------------------------------------------------------------------------------------------------


def stack(array: jax.Array, size: int) -> jax.Array:
    """Different elements; positions stay positions."""
    return jnp.stack([array if array.dtype == jnp.int32 else array * (1 + i / 4) for i in range(size)])


def transformed(name: str, backend: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, int]]:
    """Programs around the op, their arguments; how many kernel calls, and loops around them, stand in their text."""
    plain, args = CALLS[name]
    launches = 2 if name == "attention" else 1

    def f(*args):
        return plain(*args, backend=backend)

    def loss(*args):
        return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(f(*args)))

    floats = tuple(i for i, a in enumerate(args) if a.dtype == jnp.float32)
    rows = [i for i, a in enumerate(args) if a.shape[0] == 5]
    axes = tuple(0 if i in rows else None for i in range(len(args)))

    def batch(size):
        return tuple(stack(a, size) if i in rows else a for i, a in enumerate(args))

    # What changes pages in place is not launched on a batch of them.
    several, loop = (0, 0) if name == "kv_append" else (launches, 1)
    everything = tuple(stack(a, 3) for a in args)
    return {
        "plain": (f, args, launches, 0),
        "grad": (jax.grad(loss, argnums=floats), args, launches, 0),
        "second derivatives": (
            jax.grad(lambda *a: sum(jnp.sum(g**2) for g in jax.grad(loss, argnums=floats)(*a)), argnums=floats),
            args,
            launches,
            0,
        ),
        "vmap into rows": (jax.vmap(f, in_axes=axes), batch(3), several, 0),
        "vmap into a loop of launches": (jax.vmap(f, in_axes=axes), batch(20), several, loop),
        "vmap over everything": (jax.vmap(f), everything, several, loop),
        "grad of vmap": (
            jax.grad(lambda *a: sum(jnp.sum(y**2) for y in jax.tree.leaves(jax.vmap(f, in_axes=axes)(*a))), floats),
            batch(3),
            several,
            0,
        ),
        "vmap of grad": (jax.vmap(jax.grad(loss, argnums=floats), in_axes=axes), batch(3), several, 0),
    }


PROGRAMS = [(name, program) for name in CALLS for program in transformed(name, "auto")]


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("name", "program"), PROGRAMS)
def test_a_program_compiled_for_the_cpu_beside_a_gpu_is_the_reference(name, program):
    """Only XLA sees for which device it compiles; the op was traced for the GPU."""
    f, args, _, _ = transformed(name, "triton")[program]
    wanted, _, _, _ = transformed(name, "reference")[program]
    got, want = (compiled_here(g, *args) for g in (f, wanted))
    same(got, want, 2e-5)


@pytest.fixture
def for_hopper(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hopper(monkeypatch)


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize(("name", "program"), [p for p in PROGRAMS if p[1] != "second derivatives"])
def test_lowers_for_cuda(name, program):
    f, args, count, loops = transformed(name, "triton")[program]
    text = lowered(f, *args)
    assert kernels(text) == count
    if "grad" not in program:
        assert text.count("stablehlo.while") == loops


@pytest.mark.usefixtures("for_hopper")
def test_pages_are_written_in_place():
    def step(k_pages, v_pages, qkv):
        q, k_pages, v_pages = append(qkv, k_pages, v_pages, POSITION, backend="triton")
        return k_pages, v_pages, attend(q, k_pages, v_pages, POSITION, backend="triton")

    text = lowered(step, K_PAGES, V_PAGES, QKV, donate_argnums=(0, 1))
    assert kernels(text) == 3 and text.count("tf.aliasing_output") == 2
    assert text.count("#stablehlo.output_operand_alias") == 2
    # Nothing but the kernel makes an array of the pages' shape.
    made = [line for line in text.splitlines() if "-> tensor<14x2x8x16xf32>" in line and "stablehlo" in line]
    assert made == []


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices (conftest.py sets XLA_FLAGS)")
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
@pytest.mark.parametrize(
    ("name", "check_vma"), [("linear", True), ("attention", True), ("kv_append", True), ("kv_append", False)]
)
def test_inside_shard_map(name, check_vma, kind):
    """Rows, or pages, on four devices; each has its own part."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    plain, args = CALLS[name]
    own = [0] if name == "linear" else range(len(args))
    given = [jnp.concatenate([stack(a, 4)[i] for i in range(4)]) if j in own else a for j, a in enumerate(args)]
    if name == "linear":
        given = [jnp.concatenate([X] * 4), W, jnp.concatenate([RESIDUAL] * 4)]
        specs = (P("x"), P(), P("x"))
    else:
        specs = (P("x"),) * len(given)
    given = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(given, specs, strict=True)]
    out_specs = jax.tree.map(lambda _: P("x"), jax.eval_shape(plain, *args))

    def sharded(backend):
        f = lambda *a: plain(*a, backend=backend)  # noqa: E731
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)

    grad = jax.grad(lambda *a: sum(jnp.sum(y**2) for y in jax.tree.leaves(sharded("triton")(*a))))
    launches = 2 if name == "attention" else 1
    assert kernels(lowered(sharded("triton"), *given)) == kernels(lowered(grad, *given)) == launches
    same(jax.jit(sharded("triton"))(*given), jax.jit(sharded("reference"))(*given), 1e-6)
    if name == "linear":
        with pytest.raises(CannotServe, match=r"jax\.shard_map"):
            plain(*given)


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices (conftest.py sets XLA_FLAGS)")
def test_in_place_under_check_vma_by_jax_triton_is_the_references(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(xla_call, "known", lambda: False)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    given = [jax.device_put(jnp.concatenate([a] * 4), NamedSharding(mesh, P("x"))) for a in CALLS["kv_append"][1]]

    def sharded(backend):
        specs = {"in_specs": (P("x"),) * 4, "out_specs": (P("x"),) * 3}
        return jax.shard_map(lambda *a: append(*a, backend=backend), mesh=mesh, **specs)

    with pytest.raises(CannotServe, match=r"arrays vary over \['x'\].*check_vma=False"):
        jax.eval_shape(sharded("triton"), *given)
    with pytest.warns(SlowPathWarning, match="check_vma=False"):
        same(jax.jit(sharded("auto"))(*given), [jnp.concatenate([a] * 4) for a in append(*CALLS["kv_append"][1])])


@pytest.mark.parametrize("total", [0, 1, 6, 8, 9, 20])
def test_more_rows_than_a_launch_takes_go_in_several(total):
    launched = []

    def launch(x, w, at):
        launched.append(x.shape[0])
        return x @ w, jnp.broadcast_to(jnp.sum(at >= 0), at.shape)

    x, w, at = normal(total, 16), W.T, jnp.zeros(total, jnp.int32)
    reference = lambda x, w, at: (x @ w, at)  # noqa: E731
    out, there = shared._on_cuda(launch, reference, {0: 0, 2: -1}, 8, x, w, at)
    same(out, x @ w)
    assert launched == ([] if total == 0 else [min(total, 8)])
    # Rows that only fill a launch up are not there.
    assert there.tolist() == [8] * (total // 8 * 8) + [total % 8] * (total % 8)
    same(shared.as_operation(launch, reference, rows={0: 0, 2: -1}, most=8)(x, w, at)[0], x @ w)


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_values_of_the_kernels(name):
    f, args = CALLS[name]
    for run in (f, jax.jit(f, static_argnames="backend")):
        for got, wanted in zip(jax.tree.leaves(run(*args, backend="triton")), oracle(name), strict=True):
            assert relative_error(got, wanted) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "program"), PROGRAMS)
def test_transformations_of_the_kernels(name, program):
    f, args, _, _ = transformed(name, "triton")[program]
    wanted, _, _, _ = transformed(name, "reference")[program]
    with jax.default_matmul_precision("highest"):
        same(jax.jit(f)(*args), jax.jit(wanted)(*args), 1e-4)


@pytest.mark.gpu
def test_donated_pages_keep_their_address():
    rng = np.random.default_rng(1)
    step = jax.jit(lambda k, v, qkv: append(qkv, k, v, POSITION, backend="triton"), donate_argnums=(0, 1))
    k_pages, v_pages = jnp.copy(K_PAGES), jnp.copy(V_PAGES)
    addresses = k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()
    for _ in range(3):
        qkv = jnp.asarray(rng.standard_normal(QKV.shape), jnp.float32)
        wanted = append(qkv, k_pages, v_pages, POSITION, backend="reference")
        q, k_pages, v_pages = step(k_pages, v_pages, qkv)
        same((q, k_pages, v_pages), wanted, 1e-5)
        assert (k_pages.unsafe_buffer_pointer(), v_pages.unsafe_buffer_pointer()) == addresses


@pytest.mark.gpu
def test_pages_that_are_not_donated_stay_as_they_were():
    before = np.asarray(K_PAGES).copy()
    _, k_pages, _ = append(QKV, K_PAGES, V_PAGES, POSITION, backend="triton")
    np.testing.assert_array_equal(np.asarray(jnp.copy(K_PAGES)), before)
    assert (np.asarray(k_pages) != before).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_of_a_batch_have_the_bits_of_rows_alone(dtype):
    x, w = normal(120, 16, dtype=dtype), W.astype(dtype)
    batched = jax.vmap(lambda x: linear(x, w, gain=GAIN.astype(dtype), backend="triton"))(x.reshape(15, 8, 16))
    alone = [linear(x[i : i + 1], w, gain=GAIN.astype(dtype), backend="triton") for i in range(0, 120, 13)]
    for i, row in zip(range(0, 120, 13), alone, strict=True):
        assert np.asarray(batched.reshape(120, 24)[i]).tobytes() == np.asarray(row[0]).tobytes()
