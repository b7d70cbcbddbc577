"""Every shipped shape of kernel compiles without a GPU, and the machine code is what the specs promise."""

from __future__ import annotations

import re

import jax
import pytest
from cases import ACTIVATIONS

pytest.importorskip("triton")

from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.experts import expert_ffn_spec
from moe_jax.pallas_kernels.plan import plan_spec

QWEN3 = {"top_k": 8, "experts": 128, "hidden": 2048, "inner": 768}
MIXTRAL = {"top_k": 2, "experts": 8, "hidden": 4096, "inner": 14336}


def ffn(tokens=1, *, shape=QWEN3, dtype="bfloat16", activation=ACTIVATIONS[0], **options):
    return expert_ffn_spec(tokens, **shape, dtype=dtype, activation=activation, **options)


GRANITE = {"top_k": 8, "experts": 40, "hidden": 1536, "inner": 512}
CASES = {
    "one row of any device": ffn(1, capability=80),
    "64 rows": ffn(64),
    "few wide experts": ffn(16, shape=MIXTRAL, dtype="float16"),
    "biases, slots, residual": ffn(
        4, activation=ACTIVATIONS[3], slots=40, gate_up_bias=True, down_bias=True, residual=True
    ),
    "float32": ffn(8, dtype="float32", activation=ACTIVATIONS[6]),
    "plan": plan_spec(64, 8, 128, 16),
}


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name, capability):
    kernel = compiled.compile_spec(CASES[name], capability)
    use = compiled.resources(kernel)
    assert (use.stack, use.local) == (0, 0)
    assert kernel.shared <= (163 if capability == 80 else 227) * 1024
    assert (kernel.global_scratch, kernel.profile_scratch) == (0, 0)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.name}-{a.layout}-{a.limit_after}")
@pytest.mark.parametrize("shape", [QWEN3, GRANITE, QWEN3 | {"inner": 1536}], ids=lambda s: str(s["inner"]))
def test_the_kernel_for_one_row_compiles_without_spills(shape, activation):
    dtype = ("bfloat16", "float16")[ACTIVATIONS.index(activation) % 2]
    more = {} if activation is ACTIVATIONS[0] else {"slots": 12, "gate_up_bias": True, "down_bias": True}
    spec = ffn(1, shape=shape, dtype=dtype, activation=activation, residual=True, pdl=True, **more)
    assert spec.name == "expert_ffn_row" and ffn(1, shape=shape, dtype=dtype, capability=80).name == "expert_ffn"
    kernel = compiled.compile_spec(spec, 90)
    use = compiled.resources(kernel)
    assert (use.stack, use.local) == (0, 0)
    assert kernel.shared <= 227 * 1024


def test_the_kernel_for_one_row_asks_for_weights_before_it_waits_and_acquires_before_it_reads():
    code = compiled.disassembly(compiled.compile_spec(ffn(1, pdl=True), 90))
    names = r"\b(MEMBAR\.ALL\.GPU|REDG|LDG\.E\.EF\.128|LDG\.E\.STRONG\.GPU|CCTL\.IVALL|HGMMA)\b"
    order = re.findall(names, code)
    # Activations are released; weights of the down product are asked for, all of them before the look at the count.
    assert order.index("MEMBAR.ALL.GPU") < order.index("REDG") < order.index("LDG.E.EF.128")
    polls = [i for i, name in enumerate(order) if name == "LDG.E.STRONG.GPU"]
    assert all(order[i + 1] == "CCTL.IVALL" for i in polls)
    assert "LDG.E.EF.128" not in order[polls[0] :] and "HGMMA" in order[polls[-1] :]


@pytest.mark.parametrize(
    "spec",
    [ffn(4, pdl=True), ffn(1, pdl=True), plan_spec(4, 8, 128, 8, pdl=True)],
    ids=["experts", "experts of one row", "plan"],
)
def test_programmatic_launch_waits_before_any_access(spec):
    code = compiled.disassembly(compiled.compile_spec(spec, 90))
    wait = code.index("ACQBULK")
    first = re.search(r"\b(LDG|LDGSTS|STG|ATOMG|REDG|UBLKPF)\b", code)
    assert first is not None and wait < first.start()


@pytest.mark.parametrize("tokens", [1, 64])
def test_what_waits_for_a_tile_acquires_what_it_wrote(tokens):
    """Triton makes loads of additions of 0, and 3.6 dropped one whose value nobody used."""
    code = compiled.disassembly(compiled.compile_spec(ffn(tokens, capability=80), 90))
    order = re.findall(r"\b(LDG\.E\.STRONG\.GPU|CCTL\.IVALL|HGMMA)\b", code)
    polls = [i for i, name in enumerate(order) if name == "LDG.E.STRONG.GPU"]
    after = order[polls[-1] + 1 :]
    assert after[0] == "CCTL.IVALL" and "HGMMA" in after[1:]


def test_matrix_units_take_the_weights_as_m():
    assert "HGMMA.64x16x16.F32.BF16" in compiled.disassembly(compiled.compile_spec(ffn(64), 90))


def test_old_devices_are_refused_with_both_numbers():
    with pytest.raises(CannotServe, match=r"sm_75.*sm_80"):
        compiled.compile_spec(ffn(), 75)
    with pytest.raises(CannotServe, match=r"sm_80.*sm_90"):
        compiled.compile_spec(ffn(pdl=True), 80)


def test_a_folder_gives_back_what_was_saved_and_refuses_another_source(tmp_path):
    spec = CASES["plan"]
    kernel = compiled.compile_spec(spec, 90)
    compiled.save(tmp_path, [kernel])
    assert compiled.load(tmp_path, spec, 90) == kernel
    with pytest.raises(InvalidArgument, match="no cubin"):
        compiled.load(tmp_path, ffn(), 90)
    (path,) = tmp_path.glob("*.json")
    path.write_text(path.read_text().replace(kernel.source_hash, "0" * 64))
    with pytest.raises(InvalidArgument, match="source of cubin"):
        compiled.load(tmp_path, spec, 90)


def test_keys_follow_content():
    assert ffn(4).key == ffn(4).key
    others = (ffn(8), ffn(4, pdl=True), ffn(4, residual=True), plan_spec(4, 8, 128, 8))
    assert len({ffn(4).key, *(spec.key for spec in others)}) == 5


def test_what_fixes_the_arithmetic_does_not_look_at_the_rows():
    names = ("BLOCK_M", "BLOCK_K", "SPLIT")
    for shape in (QWEN3, MIXTRAL):
        specs = [ffn(tokens, shape=shape, capability=80) for tokens in range(1, 65)]
        seen = {(*(dict(spec.constexprs)[n] for n in names), spec.num_warps) for spec in specs}
        assert len(seen) == 1


@pytest.mark.parametrize("spec", [ffn(1), ffn(4), CASES["plan"]], ids=["one row", "four rows", "plan"])
def test_inside_jit_the_outputs_have_the_specs_shapes(spec):
    pytest.importorskip("jax_triton")
    from moe_jax.pallas_kernels.in_jit import call

    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in spec.inputs]
    out = jax.eval_shape(lambda *xs: call(spec, xs), *given)
    assert [(o.shape, o.dtype.name) for o in out] == [(a.shape, a.dtype) for a in spec.outputs]
    with pytest.raises(InvalidArgument, match="number of inputs"):
        call(spec, given[1:])
