"""Kernels inside jit through XLA's own call: what XLA is told, on the CPU; the bits of both ways, on a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS, buffers, routing
from decode_cases import kv_case, same_bits
from jax.interpreters import mlir
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

pytest.importorskip("triton")

from triton import knobs

from lowering import lowered
from moe_jax.pallas_kernels import compiled, device, in_jit, jax_triton_call, xla_call
from moe_jax.pallas_kernels.advance import advance_spec
from moe_jax.pallas_kernels.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.experts import expert_ffn_spec
from moe_jax.pallas_kernels.kv_append import kv_append_spec
from moe_jax.pallas_kernels.plan import plan_spec
from moe_jax.pallas_kernels.route import RouterConfig
from moe_jax.pallas_kernels.route.specs import route_spec
from moe_jax.pallas_kernels.spec import KernelSpec

QWEN3 = {"top_k": 8, "experts": 128, "hidden": 2048, "inner": 768, "dtype": "bfloat16"}
PAGED = {"sequences": 4, "pages": 33, "page_size": 8, "max_pages": 8, "positions": 64}
Inputs = dict[str, np.ndarray]


def experts_case(rng: np.random.Generator, spec: KernelSpec) -> Inputs:
    rows = spec.arguments[0].shape[0]
    return buffers(spec, rng, *routing(rng, rows, QWEN3["experts"], QWEN3["top_k"]))


def random_case(rng: np.random.Generator, spec: KernelSpec, **given: np.ndarray) -> Inputs:
    """Normal floats, zeros for integers."""
    made = {
        a.name: np.zeros(a.shape, a.dtype) if a.dtype == "int32" else rng.standard_normal(a.shape).astype(a.dtype)
        for a in spec.inputs
    }
    return made | given


def plan_case(rng: np.random.Generator, spec: KernelSpec) -> Inputs:
    ids, _ = routing(rng, 64, 128, 8)
    ids[1], ids[2, 0] = -1, 128
    return random_case(rng, spec, ids_ptr=ids)


def append_case(rng: np.random.Generator, spec: KernelSpec) -> Inputs:
    return random_case(rng, spec, **kv_case(rng, rows=4, **PAGED))


def advance_case(rng: np.random.Generator, spec: KernelSpec) -> Inputs:
    sequence, token = rng.permutation(8)[:4].astype(np.int32), rng.integers(0, 4, 4).astype(np.int32)
    return random_case(rng, spec, sequence_ptr=sequence, token_ptr=token)


# Each with its random inputs by argument name. The experts' kernel of one row is another one.
CASES: dict[str, tuple[KernelSpec, Callable[[np.random.Generator, KernelSpec], Inputs]]] = {
    "plan": (plan_spec(64, 8, 128, 16), plan_case),
    "experts, 1 row": (expert_ffn_spec(1, **QWEN3, activation=ACTIVATIONS[0], capability=90), experts_case),
    "experts, 4 rows": (expert_ffn_spec(4, **QWEN3, activation=ACTIVATIONS[0], capability=90), experts_case),
    "route": (
        route_spec(4, 2048, RouterConfig(experts=128, top_k=8), dtype="bfloat16", norm_eps=1e-6),
        random_case,
    ),
    "kv_append": (kv_append_spec(4, 8, 2, 64, dtype="bfloat16", norm="head", **PAGED), append_case),
    # More arguments that are changed in place than Triton adds pointers.
    "advance": (advance_spec(4, 8, 2), advance_case),
}


def program(spec: KernelSpec, call: Callable[..., Any] = in_jit.call) -> Callable[..., Any]:
    """Outputs, and new contents of what is changed in place, of the spec's inputs."""

    def run(*arrays):
        given = [jax.new_ref(x) if a.role == "inout" else x for a, x in zip(spec.inputs, arrays, strict=True)]
        out = call(spec, given)
        return *out, *(jax.freeze(x) for a, x in zip(spec.inputs, given, strict=True) if a.role == "inout")

    return run


def shapes(spec: KernelSpec) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in spec.inputs]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xla_call, "capability_of", lambda array: 90)


def custom_call(spec: KernelSpec) -> Any:
    """The kernel's operation in the module that is lowered for CUDA."""
    in_place = tuple(i for i, a in enumerate(spec.inputs) if a.role == "inout")
    traced = jax.jit(program(spec), donate_argnums=in_place).trace(*shapes(spec))
    module = traced.lower(lowering_platforms=("cuda",)).compiler_ir()
    (main,) = (f for f in module.body.operations if f.name.value == "main")
    (found,) = (op for op in main.entry_block.operations if op.name == "stablehlo.custom_call")
    return module, found


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", CASES)
def test_what_xla_is_told(name: str) -> None:
    spec, _ = CASES[name]
    module, found = custom_call(spec)  # the module owns the operation
    attributes = found.attributes
    assert attributes["call_target_name"].value == xla_call.TARGET
    ir = mlir.ir
    with module.context:  # XLA reads the text of the attribute
        config = ir.DictAttr(ir.Attribute.parse(str(attributes["mhlo.backend_config"])))
    ptx = compiled.ptx_of(spec, 90)
    numbers = [config[name] for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z")]
    assert [ir.IntegerAttr(n).value for n in numbers] == [*spec.grid, ptx.threads, 1, 1]
    assert ir.IntegerAttr(config["shared_mem_bytes"]).value == ptx.shared
    assert [ir.StringAttr(config[name]).value for name in ("name", "kernel_type")] == [ptx.symbol, "ptx"]
    text = ir.StringAttr(config["kernel_data"]).value
    assert "\n.version 8.0\n.target sm_90a\n" in text

    # Operands are the arguments with contents; results the other ones, and then the changed contents once more.
    before = [a for a in spec.arguments if a.role not in ("out", "scratch")]
    changed = [a for a in before if a.role in ("inout", "state")]
    results = [a for a in spec.arguments if a not in before] + changed
    names = {"float32": "f32", "int32": "i32", "bfloat16": "bf16"}
    for values, arguments in ((found.operands, before), (found.results, results)):
        wanted = [(list(a.shape), names[a.dtype]) for a in arguments]
        assert [(v.type.shape, str(v.type.element_type)) for v in values] == wanted
    pointers = len(before) + len(results)
    assert text[text.index(".entry") :].partition("{")[0].count(".param .u64") == pointers
    places = ir.ArrayAttr(config["output_indices"])
    assert [ir.IntegerAttr(place).value for place in places] == list(range(len(before), pointers))

    pairs = {before.index(a): len(results) - len(changed) + i for i, a in enumerate(changed)}
    aliases = re.findall(r"output_tuple_indices = \[(\d*)\], operand_index = (\d+)", str(found))
    assert {int(operand): int(result or 0) for result, operand in aliases} == pairs


def assembled(ptx: str, *options: str) -> str:
    """Machine code of a text, by Triton's assembler."""
    (target,) = re.findall(r"\.target (\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(ptx)
        tool = knobs.nvidia.ptxas.path
        subprocess.run([tool, f"--gpu-name={target}", *options, "-o", cubin, source], check=True, capture_output=True)
        return compiled._cuobjdump(cubin.read_bytes(), "-sass")


@pytest.mark.parametrize("name", CASES)
def test_the_text_alone_fixes_the_arithmetic(name: str) -> None:
    """The driver's compiler contracts multiply and add where the text lets it, and is given no options."""
    spec, _ = CASES[name]
    text = compiled.ptx_of(spec, 90).text
    assert not re.search(r"\.(loc|file|section)\b", text) and "/" not in re.sub("//.*", "", text)
    changed = sum(a.role in ("inout", "state") for a in spec.arguments)
    text = xla_call.with_parameters(text, len(spec.arguments) + changed)
    assert assembled(text) == assembled(text, "--fmad=false")


@pytest.mark.parametrize(("capability", "version", "target"), [(80, "8.0", "sm_80"), (89, "8.0", "sm_89")])
def test_the_version_of_ptx_is_one_that_old_drivers_know(capability: int, version: str, target: str) -> None:
    text = compiled.ptx_of(CASES["plan"][0], capability).text
    assert re.findall(r"\.(?:version|target) (\S+)", text) == [version, target]


def test_newer_devices_get_the_first_version_that_knows_them() -> None:
    for capability, version in ((100, "8.7"), (103, "8.8"), (110, "9.0"), (120, "8.7"), (121, "8.8")):
        text = compiled.ptx_of(CASES["plan"][0], capability).text
        assert re.findall(r"\.(?:version|target) (\S+)", text) == [version, f"sm_{capability}a"]


def test_equal_specs_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled.ptx_of(plan_spec(64, 8, 128, 16), 80)
    monkeypatch.setattr(compiled, "_build", None)
    assert compiled.ptx_of(plan_spec(64, 8, 128, 16), 80) is first
    monkeypatch.undo()
    with pytest.raises(CannotServe, match=r"ptx_of\('plan'\).*sm_80.*sm_90"):
        compiled.ptx_of(plan_spec(64, 8, 128, 16, pdl=True), 80)


PTX = """
.visible .entry f(
\t.param .u64 .ptr .global .align 1 f_param_0,
\t.param .u64 f_param_1
)
.reqntid 32
{ ( ) }
"""


def test_parameters_are_taken_away_and_put_to() -> None:
    one, two = PTX.replace(",\n\t.param .u64 f_param_1", ""), PTX
    four = PTX.replace("f_param_1", "f_param_1,\n\t.param .u64 unread_2,\n\t.param .u64 unread_3")
    assert [xla_call.with_parameters(PTX, count) for count in (1, 2, 4)] == [one, two, four]
    assert xla_call.with_parameters(four, 2) == two


@pytest.mark.usefixtures("hopper")
def test_scratch_of_tritons_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = CASES["plan"]
    ptx = compiled.ptx_of(spec, 90)._replace(global_scratch=128)
    monkeypatch.setattr(compiled, "ptx_of", lambda spec, capability: ptx)
    with pytest.raises(CannotServe, match=r"call\('plan'\).*128 and 0 bytes a program for sm_90"):
        lowered(program(spec), *shapes(spec))


@pytest.mark.parametrize("name", CASES)
def test_shapes_are_known_without_triton_compiling(name: str) -> None:
    spec, _ = CASES[name]
    out = jax.eval_shape(program(spec), *shapes(spec))
    wanted = [*spec.outputs, *(a for a in spec.arguments if a.role == "inout")]
    assert [(o.shape, o.dtype.name) for o in out] == [(a.shape, a.dtype) for a in wanted]


def test_wrong_inputs_are_refused() -> None:
    spec, _ = CASES["plan"]
    ids, rows = shapes(spec)
    with pytest.raises(InvalidArgument, match="number of inputs: got 1, wanted 2"):
        in_jit.call(spec, [ids])
    with pytest.raises(InvalidArgument, match="dtype of ids_ptr"):
        jax.eval_shape(program(spec), ids.update(dtype=jnp.float32), rows)
    with pytest.raises(InvalidArgument, match="shape of ids_ptr"):
        jax.eval_shape(program(spec), ids.update(shape=(64, 7)), rows)


def test_vmap_and_gradients_are_left_to_the_caller() -> None:
    spec, _ = CASES["route"]
    x, *others = (jnp.zeros(a.shape, a.dtype) for a in spec.inputs)
    with pytest.raises(NotImplementedError, match="kernel_call"):
        jax.eval_shape(jax.vmap(lambda x: program(spec)(x, *others)), jnp.stack([x, x]))
    with pytest.raises(NotImplementedError, match="kernel_call"):
        jax.eval_shape(jax.grad(lambda x: program(spec)(x, *others)[0].sum()), x)


@pytest.mark.usefixtures("hopper")
@pytest.mark.skipif(jax.device_count() < 4, reason="needs four devices (conftest.py sets XLA_FLAGS)")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("own", ["all", "x_ptr"])
def test_under_shard_map_results_vary_over_what_any_operand_does(own: str, check_vma: bool) -> None:
    """Each device has its own rows, and with "all" its own gains and weights."""
    spec, _ = CASES["route"]
    mesh, seen = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), []

    def run(*arrays):
        out = program(spec)(*arrays)
        seen.extend(jax.typeof(o).manual_axis_type.varying for o in out)
        return out

    split = [own in ("all", a.name) for a in spec.inputs]
    given = [
        jax.ShapeDtypeStruct((2 * a.shape[0], *a.shape[1:]) if cut else a.shape, a.dtype)
        for a, cut in zip(spec.inputs, split, strict=True)
    ]
    specs = tuple(P("x") if cut else P() for cut in split)
    text = lowered(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=check_vma), *given)
    assert seen == [frozenset({"x"} if check_vma else ())] * len(spec.outputs)
    assert text.count(f"@{xla_call.TARGET}(") == 1


def test_another_jax_or_a_driver_that_may_not_compile_takes_the_way_of_jax_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("jax_triton")
    spec, _ = CASES["kv_append"]

    def kinds() -> tuple[bool, bool]:
        text = str(jax.make_jaxpr(program(spec))(*shapes(spec)))
        return " kernel_call[" in text, "triton_kernel_call[" in text

    assert xla_call.known() and kinds() == (True, False)
    with monkeypatch.context() as without:
        without.setenv("CUDA_DISABLE_PTX_JIT", "1")
        assert not xla_call.known() and kinds() == (False, True)
    for version in ((0, 11, 1), (0, 12, 0)):
        monkeypatch.setattr(jax, "__version_info__", version)
        assert not xla_call.known() and kinds() == (False, True)


def test_a_program_for_a_gpu_is_compiled_for_it_although_the_default_is_another_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    found = {"cuda": [gpu]}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: found[backend] if backend else [cpu])
    cpu = SimpleNamespace(platform="cpu")
    assert xla_call._capability() == 90
    other = SimpleNamespace(platform="gpu", compute_capability="8.6")
    monkeypatch.setattr(xla_call, "device_of", lambda array: other)
    monkeypatch.setattr(device, "device_of", lambda array: other)
    assert xla_call._capability() == 86


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", CASES)
def test_both_ways_have_the_same_bits(name: str) -> None:
    """With fresh inputs each time: what an earlier call left in memory is never the right answer."""
    pytest.importorskip("jax_triton")
    spec, make = CASES[name]
    rng = np.random.default_rng(0)
    ways = [jax.jit(program(spec, way.call)) for way in (xla_call, jax_triton_call)]
    for _ in range(3):
        made = make(rng, spec)
        given = [jnp.asarray(made[a.name]) for a in spec.inputs]
        for ours, wanted in zip(*(way(*given) for way in ways), strict=True):
            same_bits(np.asarray(ours), np.asarray(wanted))
