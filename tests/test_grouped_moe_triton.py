"""The Triton back end of the expert block as far as it goes without a GPU: refusals, programs lowered for CUDA."""

from __future__ import annotations

import dataclasses
import functools
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from backends import assert_close, layer, normal, random_ids, routing
from lowering import compiled_here, kernels, lowered, pretend_gpu, pretend_hopper
from moe_jax.pallas_kernels import as_operation, device, tuned
from moe_jax.pallas_kernels.errors import CannotServe, SlowPathWarning
from moe_jax.pallas_kernels.experts import tile_for
from moe_jax.pallas_kernels.grouped_moe import ExpertWeights, explain, grouped_moe, mosaic, triton
from moe_jax.pallas_kernels.prefill import mosaic as prefill_mosaic
from moe_jax.pallas_kernels.prefill import prefill_tile_for, specs
from moe_jax.pallas_kernels.prefill import triton as prefill_triton
from moe_jax.pallas_kernels.route import Routing, route
from moe_jax.pallas_kernels.tuned import store
from moe_jax.pallas_kernels.tuned.lookup import _content, _installed_builder

ROOT = Path(__file__).parents[1]
CONFIG, WEIGHTS = layer(4, 2, 16, 12, biases=True, shared=8)
X, LOGITS = normal(1, (5, 16)), normal(2, (5, 4))


class Device(NamedTuple):
    platform: str
    device_kind: str
    compute_capability: str | None = None


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CUDA machine, as far as the choice of a back end sees. Programs still compile for the CPU."""
    pretend_gpu(monkeypatch, triton, mosaic, as_operation)


def reason(x: jax.Array, logits: jax.Array, weights: ExpertWeights) -> str:
    """Why the Triton kernels decline; the one who asked for them by name must read the same."""
    choice = explain(x, logits, weights, CONFIG)
    (first, other), (name, text) = choice.declined
    assert (choice.backend, first, name) == ("reference", "mosaic", "triton")
    assert str(choice) == f"grouped_moe: reference\n  mosaic declined: {other}\n  triton declined: {text}"
    with pytest.raises(CannotServe) as caught:
        grouped_moe(x, logits, weights, CONFIG, backend="triton")
    assert caught.value.declined == (("triton", text),)
    return text


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (Device("cpu", "cpu"), r"no CUDA device: the call runs on cpu \(cpu\)"),
        (Device("tpu", "TPU v5 lite"), r"no CUDA device: the call runs on tpu \(TPU v5 lite\)"),
        (Device("gpu", "AMD Instinct MI300X", "gfx942"), r"no CUDA device: the call runs on gpu \(AMD Instinct MI300X"),
        (Device("gpu", "Tesla T4", "7.5"), r"Tesla T4 has compute capability 7\.5, 8\.0 or newer is needed"),
    ],
)
def test_other_devices_are_refused_with_both_values(found: Any, wanted: str) -> None:
    assert re.match(wanted, device.triton_refusal(found) or "")


def test_capability_and_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.capability_of(np.ones(3)) == 80
    for found, wanted in (("8.9", 89), ("9.0", 90), ("12.0", 120)):
        monkeypatch.setattr(device, "device_of", lambda array, found=found: Device("gpu", "GPU", found))
        assert device.capability_of(np.ones(3)) == wanted
    sizes = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
    assert {capability: device.shared_memory(capability) for capability in sizes} == sizes


def test_newer_devices_are_taken_and_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    monkeypatch.setattr(device, "_missing_package", lambda: asked.append(None))
    device._refusal.cache_clear()
    for _ in range(3):
        assert device.triton_refusal(Device("gpu", "NVIDIA B200", "10.0")) is None  # pyrefly: ignore
    assert len(asked) == 1
    device._refusal.cache_clear()


def test_a_triton_that_is_missing_or_too_old_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    assert device._missing_package() is None
    remedy = r"3\.6 or newer is needed: pip install 'moe-jax\[cuda1[23]\]'"
    for version in ("3.5.1", "2.10.0+git1234"):
        monkeypatch.setattr(triton, "__version__", version)
        wanted = f"Triton {re.escape(version)} is installed, {remedy}"
        assert re.fullmatch(wanted, device._missing_package() or "")
    for version in ("3.6.0", "3.10.0", "4.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        assert device._missing_package() is None
    monkeypatch.setitem(sys.modules, "triton", None)
    assert re.fullmatch(rf"Triton cannot be imported \(.*triton.*\), {remedy}", device._missing_package() or "")


def test_C114_on_the_cpu_explain_says_that_there_is_no_cuda_device() -> None:
    assert reason(X, LOGITS, WEIGHTS) == "no CUDA device: the call runs on cpu (cpu)"
    chosen = []
    jax.jit(lambda *a: chosen.append(explain(*a, CONFIG)))(X, LOGITS, WEIGHTS)
    assert chosen[0].declined == tuple((n, "no CUDA device: the call runs on cpu (cpu)") for n in ("mosaic", "triton"))


def test_the_device_is_that_of_the_array_or_the_default_one() -> None:
    first, second = jax.devices()[:2] if jax.device_count() > 1 else jax.devices() * 2
    assert device.device_of(jax.device_put(1.0, second)) == second
    assert device.device_of(np.ones(3)) == first
    seen = []
    with jax.default_device(second):
        jax.jit(lambda x: seen.append(device.device_of(x)))(1.0)
    with jax.default_device("cpu"):
        seen.append(device.device_of(np.ones(3)))
    assert seen == [second, first]


@pytest.mark.usefixtures("on_gpu")
def test_nothing_goes_to_the_reference_without_a_warning() -> None:
    x, logits = jnp.zeros((0, 16)), jnp.zeros((0, 4))
    assert reason(x, logits, WEIGHTS).startswith("0 rows")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grouped_moe(x, logits, WEIGHTS, CONFIG).shape == (0, 16)


@pytest.mark.usefixtures("on_gpu")
def test_more_pairs_than_places_can_count_go_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(specs, "MAX_PAIRS", 9)
    assert reason(X, LOGITS, WEIGHTS).startswith("10 pairs of row and expert: the kernels take 9 at most")


@pytest.mark.usefixtures("on_gpu")
def test_hopper_takes_many_rows_by_mosaic_and_says_when_triton_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Device("gpu", "NVIDIA H200", "9.0")
    for module in (mosaic, prefill_mosaic):
        monkeypatch.setattr(module, "device_of", lambda array: found)
    config, weights = layer(4, 2, 64, 64, dtype="bfloat16")

    def choice(rows: int, weights: ExpertWeights = weights, dtype: str = "bfloat16") -> Any:
        return explain(jnp.zeros((rows, 64), dtype), jnp.zeros((rows, 4)), weights, config)

    untuned = "heuristic: no tuned data for prefill_mosaic on NVIDIA H200"
    assert str(choice(4096)) == f"grouped_moe: mosaic\n  tile: {untuned}"
    assert str(choice(100)).endswith("mosaic declined: 50 rows an expert on average: Triton is faster below 96")
    assert "mosaic declined: 64 rows" in str(choice(64))
    named = explain(jnp.zeros((100, 64), jnp.bfloat16), jnp.zeros((100, 4)), weights, config, backend="mosaic")
    assert (named.backend, named.declined) == ("mosaic", ())
    wide = layer(4, 2, 64, 64)[1]
    assert "mosaic declined: float32 rows" in str(choice(4096, wide, "float32"))
    # Weights in another order are no reason where none of the rows could be served.
    turned = jax.device_put(weights.down, Format(Layout((0, 2, 1)), weights.down.sharding))
    turned = ExpertWeights(gate_up=weights.gate_up, down=turned)
    assert dict(choice(64, turned).declined)["mosaic"].startswith("64 rows")
    assert dict(choice(4096, turned).declined)["mosaic"].startswith("weights.down lies")
    monkeypatch.setattr(mosaic, "device_of", lambda array: Device("gpu", "NVIDIA B200", "10.0"))
    assert "mosaic declined: NVIDIA B200 has compute capability 10.0" in str(choice(4096))


@pytest.fixture
def tuned_h200(on_gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """An H200, and a function that writes tuned data for it: operation, tokens, tile, for (H, I, E, k) as `SHAPE`."""
    pytest.importorskip("triton")
    found = Device("gpu", "NVIDIA H200", "9.0")
    for module in (triton, mosaic, prefill_triton, prefill_mosaic):
        monkeypatch.setattr(module, "device_of", lambda array: found)
    monkeypatch.setattr(prefill_triton, "capability_of", lambda array: 90)
    for module, name in (
        (tuned, "lookup"), (tuned, "tuned_tile_for"), (prefill_triton, "choose"), (prefill_mosaic, "choose")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), folder=tmp_path))
    caches = (triton._specs, mosaic._measured, prefill_triton.tuned_tile_for, prefill_mosaic._chosen)

    def clear() -> None:
        for cached in caches:
            cached.cache_clear()

    def write(op: str, tokens: int, tile: dict[str, Any]) -> None:
        entry = {"shape": list(SHAPE), "dtype": "bfloat16", "tokens": tokens, "tile": tile}
        store.write(tmp_path, found.device_kind, op, tuned.source_hash(op), _installed_builder(), "", [entry])
        _content.cache_clear()
        clear()

    clear()
    yield write
    clear()


SHAPE = (64, 128, 4, 2)


def tuned_case(rows: int) -> tuple[Any, ...]:
    config, weights = layer(4, 2, 64, 128, dtype="bfloat16")
    return jnp.zeros((rows, 64), jnp.bfloat16), routing(random_ids(2, rows, 2, 4)), weights, config


def test_tuned_tiles_are_what_the_launches_take(tuned_h200: Callable[..., None]) -> None:
    base = tile_for(16, 2, 4, 64, 128, "bfloat16")
    tuned_h200("expert_ffn", 16, dataclasses.asdict(dataclasses.replace(base, num_stages=6)))
    assert str(explain(*tuned_case(9))).startswith("grouped_moe: triton\n  tile: tuned data for NVIDIA H200, 16 rows\n")
    sizes, options = (9, 2, 4, 64, 128, "bfloat16"), (CONFIG.activation, False, False, False)
    assert triton._specs(*sizes, "NVIDIA H200", 90, *options)[1].num_stages == 6
    elsewhere = triton._specs(*sizes, "NVIDIA A100", 80, *options)[1]
    assert elsewhere.num_stages == base.num_stages != 6
    assert "tile: heuristic: tuned data for expert_ffn at (64, 128, 4, 2)" in str(explain(*tuned_case(17)))


def test_tuned_tiles_for_many_rows_are_what_the_launches_take(tuned_h200: Callable[..., None]) -> None:
    x, r, weights, _ = tuned_case(100)
    sizes = weights.down.shape
    base = prefill_tile_for(100, 2, *(sizes[i] for i in range(3)), "bfloat16")
    tile = dataclasses.replace(base, gate_up=dataclasses.replace(base.gate_up, group=5))
    assert prefill_triton.chosen_tile(x, r, sizes).tile == base
    tuned_h200("prefill_triton", 256, dataclasses.asdict(tile))
    assert prefill_triton.chosen_tile(x, r, sizes).tile == tile
    assert "triton\n  tile: tuned data for NVIDIA H200, 256 rows" in str(explain(*tuned_case(100)))
    other = prefill_mosaic.candidates(SHAPE, 1024)[2]
    tuned_h200("prefill_mosaic", 1024, dataclasses.asdict(other))
    x, r, weights, config = tuned_case(1000)
    assert prefill_mosaic.chosen_tile(x, r, sizes).tile == other
    assert str(explain(x, r, weights, config)) == "grouped_moe: mosaic\n  tile: tuned data for NVIDIA H200, 1024 rows"


def test_which_kernels_are_faster_for_many_rows_is_tuned_too(tuned_h200: Callable[..., None]) -> None:
    for rows, usual, other in ((100, "triton", "mosaic"), (1000, "mosaic", "triton")):
        assert explain(*tuned_case(rows)).backend == usual
        tuned_h200("prefill", rows, {"backend": other})
        assert explain(*tuned_case(rows)).backend == other
    assert explain(*tuned_case(2000)).backend == "mosaic"  # where data ends, the rule
    reasons = dict(explain(*tuned_case(1000)).declined)
    assert reasons == {"mosaic": "Triton is faster here: tuned data for NVIDIA H200, 1000 rows"}


@pytest.mark.usefixtures("on_gpu")
def test_float64_goes_to_the_reference_without_a_warning() -> None:
    with jax.enable_x64(True):
        config, weights = layer(4, 2, 16, 12, dtype="float64")
        x = normal(1, (5, 16), "float64")
        choice = explain(x, LOGITS, weights, config)
        assert dict(choice.declined)["triton"].startswith("float64 rows: the kernels take bfloat16, float16, float32")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert grouped_moe(x, LOGITS, weights, config).dtype == jnp.float64


@pytest.mark.usefixtures("on_gpu")
def test_weights_that_would_be_copied_at_every_call_are_refused_with_a_warning() -> None:
    down = jax.device_put(WEIGHTS.down, Format(Layout((0, 2, 1)), WEIGHTS.down.sharding))
    weights = ExpertWeights(gate_up=WEIGHTS.gate_up, down=down)
    assert re.match(
        r"weights\.down lies .* order of axes \(0, 2, 1\).*Layout\(\(0, 1, 2\)\)", reason(X, LOGITS, weights)
    )
    with pytest.warns(SlowPathWarning, match=r"weights\.down lies"):
        grouped_moe(X, LOGITS, weights, CONFIG)
    mended = jax.device_put(down, Format(Layout((0, 1, 2)), down.sharding))
    assert explain(X, LOGITS, ExpertWeights(gate_up=WEIGHTS.gate_up, down=mended), CONFIG).backend == "triton"


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_any_number_of_rows_goes_to_the_kernels(dtype: str) -> None:
    config, weights = layer(4, 2, 16, 12, dtype=dtype)
    for rows in (1, 2, 64, 65, 4096):
        choice = explain(jnp.zeros((rows, 16), dtype), jnp.zeros((rows, 4)), weights, config)
        assert (choice.backend, [name for name, _ in choice.declined]) == ("triton", ["mosaic"])


def test_calls_on_the_cpu_import_no_triton() -> None:
    code = (
        "import sys, jax.numpy as jnp; sys.path.insert(0, 'tests'); import backends as b\n"
        "from moe_jax import grouped_moe, explain\n"
        "config, weights = b.layer(4, 2, 16, 12)\n"
        "args = jnp.zeros((3, 16)), jnp.zeros((3, 4)), weights, config\n"
        "grouped_moe(*args); explain(*args)\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('triton', 'jax_triton')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_specs_are_made_once_for_equal_shapes() -> None:
    pytest.importorskip("triton")
    config, again = layer(4, 2, 16, 12)[0], layer(4, 2, 16, 12)[0]
    options = (False, False, True)
    first = triton._specs(5, 2, 4, 16, 12, "float32", "cpu", 80, config.activation, *options)
    assert first is triton._specs(5, 2, 4, 16, 12, "float32", "cpu", 80, again.activation, *options)
    assert triton._specs(1, 2, 4, 16, 12, "float32", "cpu", 80, config.activation, *options)[0] is None


@pytest.mark.parametrize(("rows", "few"), [(1, True), (64, True), (65, False)])
def test_decode_and_prefill_have_kernels_of_their_own(rows: int, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from moe_jax.pallas_kernels.prefill import triton as prefill

    monkeypatch.setattr(triton, "_few_rows", lambda *_: "few")
    monkeypatch.setattr(prefill, "ffn", lambda *_: "many")
    config, weights = layer(4, 2, 16, 12)
    r = routing(random_ids(2, rows, 2, 4))
    assert triton._ffn(normal(1, (rows, 16)), r, weights, config, None) == ("few" if few else "many")


def op(x: jax.Array, logits: jax.Array, weights: ExpertWeights, backend: str = "triton") -> jax.Array:
    """With the reference's routing, whose kernels have tests of their own."""
    return grouped_moe(x, route(logits, CONFIG.router, backend="reference"), weights, CONFIG, backend=backend)


def plain(x: jax.Array, logits: jax.Array, weights: ExpertWeights) -> jax.Array:
    return op(x, logits, weights, "reference")


def transformed(f: Callable[..., jax.Array]) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], int]]:
    """Programs around the op, their arguments, and how many kernel calls stand in their text."""

    def loss(*args: Any) -> jax.Array:
        return jnp.sum(jnp.sin(f(*args)))

    def over_layers(x: jax.Array, layers: ExpertWeights) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda c, w: (c + f(c, LOGITS, w), None), x, layers)[0] ** 2)

    def twice(x: jax.Array, w: ExpertWeights) -> jax.Array:
        block = jax.checkpoint(lambda x: x + f(x, LOGITS, w))
        return jnp.sum(block(block(x)) ** 2)

    def batch(tree: Any, size: int) -> Any:
        return jax.tree.map(lambda a: jnp.stack([a * (i + 1) for i in range(size)]), tree)

    full = X, LOGITS, WEIGHTS
    shared = jax.vmap(f, in_axes=(0, 0, None))
    return {
        "plain": (f, full, 2),
        "one row": (f, (X[:1], LOGITS[:1], WEIGHTS), 1),
        "grad": (jax.grad(loss, argnums=(0, 1, 2)), full, 2),
        "second derivatives": (jax.jacrev(jax.jacrev(loss)), full, 2),
        "vmap into one launch": (shared, (batch(X, 3), batch(LOGITS, 3), WEIGHTS), 2),
        "vmap into many rows": (shared, (batch(X, 20), batch(LOGITS, 20), WEIGHTS), 4),
        "vmap over weights": (jax.vmap(f, in_axes=(None, None, 0)), (X, LOGITS, batch(WEIGHTS, 3)), 2),
        "grad of vmap": (
            jax.grad(lambda *a: jnp.sum(shared(*a) ** 2), argnums=(0, 2)),
            (batch(X, 3), batch(LOGITS, 3), WEIGHTS),
            2,
        ),
        "vmap of grad": (jax.vmap(jax.grad(loss), in_axes=(0, 0, None)), (batch(X, 3), batch(LOGITS, 3), WEIGHTS), 2),
        "grad of scan": (jax.grad(over_layers, argnums=(0, 1)), (X, batch(WEIGHTS, 3)), 2),
        "checkpoint": (jax.grad(twice, argnums=(0, 1)), (X, WEIGHTS), 2),
    }


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("name", ["grad", "vmap into many rows", "vmap over weights", "grad of scan"])
def test_a_program_compiled_for_the_cpu_beside_a_gpu_is_the_reference(name: str) -> None:
    """Only XLA sees for which device it compiles; the op was traced for the GPU."""
    f, args, _ = transformed(op)[name]
    wanted, _, _ = transformed(plain)[name]
    got, want = (compiled_here(g, *args) for g in (f, wanted))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, 1e-5)


@pytest.fixture
def for_hopper(on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_hopper(monkeypatch)


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize("name", transformed(op))
def test_lowers_for_cuda(name: str) -> None:
    f, args, count = transformed(op)[name]
    assert kernels(lowered(f, *args)) == count


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize(("size", "loops"), [(1, False), (2, True)])
def test_a_batch_of_more_pairs_than_places_can_count_goes_in_several(
    size: int, loops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specs, "MAX_PAIRS", 20)
    args = normal(1, (size, 7, 16)), normal(2, (size, 7, 4)), WEIGHTS  # 14 pairs each, a shape of this test alone
    text = lowered(jax.vmap(op, in_axes=(0, 0, None)), *args)
    assert (kernels(text), "stablehlo.while" in text) == (2, loops)


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_kernels_get_the_weights_as_they_are_given(dtype: str) -> None:
    config, weights = layer(4, 2, 64, 48, dtype=dtype, biases=True)
    r = routing(random_ids(2, 5, 2, 4))
    f = jax.jit(lambda x, r, w: grouped_moe(x, r, w, config, backend="triton"))
    text = lowered(f, normal(1, (5, 64), dtype), r, weights)
    shapes = {"x".join(map(str, w.shape)) for w in jax.tree.leaves(weights)}
    made = re.findall(r"= \"?stablehlo\.(\w+).*-> tensor<(\d+x\d+x?\d*)x", text)
    assert not [(name, shape) for name, shape in made if shape in shapes]
    # Counters are written in place, and nothing else is.
    assert text.count("#stablehlo.output_operand_alias") == 1


@pytest.mark.usefixtures("for_hopper")
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices (conftest.py sets XLA_FLAGS)")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=lambda kind: kind.name)
def test_inside_shard_map(kind: AxisType, check_vma: bool) -> None:
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,))
    specs = (P("x"), P("x"), P())
    x, logits = normal(1, (8, 16)), normal(2, (8, 4))
    args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, logits, WEIGHTS), specs, strict=True)]
    sharded = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check_vma)
    grad = jax.grad(lambda *a: jnp.sum(sharded(*a) ** 2), argnums=(0, 1, 2))
    assert kernels(lowered(sharded, *args)) == kernels(lowered(grad, *args)) == 2
    with pytest.raises(CannotServe, match=r"jax\.shard_map"):
        op(*args)
    if not check_vma:
        return  # the values, once for each kind of axis
    assert_close(jax.jit(sharded)(*args), plain(x, logits, WEIGHTS), 1e-6)
    wanted = jax.grad(lambda *a: jnp.sum(plain(*a) ** 2), argnums=(0, 1, 2))(x, logits, WEIGHTS)
    for a, b in zip(jax.tree.leaves(jax.jit(grad)(*args)), jax.tree.leaves(wanted), strict=True):
        assert_close(a, b, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_rows_bits_do_not_depend_on_its_company(dtype: str) -> None:
    config, weights = layer(16, 4, 192, 72, dtype=dtype, biases=True)
    x, r = normal(1, (64, 192), dtype), routing(random_ids(2, 64, 4, 16))

    def run(rows: slice) -> np.ndarray:
        r_part = Routing(r.weights[rows], r.ids[rows])
        return np.asarray(grouped_moe(x[rows], r_part, weights, config, backend="triton"))

    whole = run(slice(0, 64))
    for count in (1, 2, 3, 4, 8, 16, 32):
        for start in {0, 64 - count}:
            assert run(slice(start, start + count)).tobytes() == whole[start : start + count].tobytes()
