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


# top-k, experts, H, I that one row has its own kernel for.
ROW_SHAPES = [(8, 128, 2048, 768), (6, 64, 2048, 1408), (8, 64, 2048, 1024), (5, 40, 1536, 512), (8, 9, 2048, 64)]


def row_kernel(sizes, dtype, activation, **more):
    shape = dict(zip(QWEN3, sizes, strict=True))
    spec = ffn(1, shape=shape, dtype=dtype, activation=activation, pdl=True, **more)
    assert spec.name == "expert_ffn_row" and ffn(1, shape=shape, dtype=dtype, capability=80).name == "expert_ffn"
    return compiled.compile_spec(spec, 90)


@pytest.mark.parametrize("options", [{}, {"slots": 12, "gate_up_bias": True, "down_bias": True, "residual": True}])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [*ROW_SHAPES, (8, 128, 2048, 1536)], ids=str)
def test_the_kernel_for_one_row_leaves_room_for_the_next(sizes, dtype, options):
    """Nothing is spilled, and the program of a projection, which is launched while this one runs, fits beside it."""
    for activation in ACTIVATIONS if sizes == ROW_SHAPES[0] and options else ACTIVATIONS[:1]:
        kernel = row_kernel(sizes, dtype, activation, **options)
        use = compiled.resources(kernel)
        assert (use.stack, use.local) == (0, 0) and use.registers <= 128
        assert kernel.shared + use.shared <= 164 * 1024
        assert (kernel.global_scratch, kernel.profile_scratch) == (0, 0)


@pytest.mark.parametrize("sizes", ROW_SHAPES, ids=str)
def test_the_kernel_for_one_row_hands_over_by_words_and_never_fences_the_device(sizes):
    code = compiled.disassembly(row_kernel(sizes, "bfloat16", ACTIVATIONS[0], residual=True))
    # A fence would wait for the copies that are on their way; one of a program's own memory does not.
    assert set(re.findall(r"\bMEMBAR\S*", code)) == {"MEMBAR.ALL.CTA"}
    assert not re.search(r"\b(CCTL|ERRBAR|REDG?)\b", code)
    # Claims and counts are additions; a word that says whether it is there is exchanged, and read past the L1.
    assert set(re.findall(r"\bATOMG\.\S+", code)) == {"ATOMG.E.ADD.STRONG.GPU", "ATOMG.E.EXCH.STRONG.GPU"}
    steps = sizes[3] // 64
    assert re.findall(r"\bLDG\.E\S*STRONG\S*", code) == ["LDG.E.64.STRONG.SYS"] * steps
    # Nothing that is read once goes through registers: weights are copied, 16 bytes a thread.
    assert not re.search(r"\bLDG\.E\S*128", code) and set(re.findall(r"\bLDGSTS\S*", code)) == {"LDGSTS.E.BYPASS.128"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_kernel_for_one_row_multiplies_what_all_threads_have_copied(dtype):
    """Two warpgroups share what their threads copy: a barrier behind every wait, for copies and for products."""
    code = compiled.disassembly(row_kernel(ROW_SHAPES[0], dtype, ACTIVATIONS[0]))
    names = r"\b(?<!WARPGROUP\.)(DEPBAR\.LE SB0|WARPGROUP\.DEPBAR|BAR\.SYNC|FENCE\.VIEW\.ASYNC|HGMMA|LDGSTS)"
    order = re.findall(names, code)
    assert f"HGMMA.64x8x16.F32{'.BF16' if dtype == 'bfloat16' else ''} " in code
    for i, name in enumerate(order):
        if name == "DEPBAR.LE SB0":
            assert order[i + 1] == "BAR.SYNC"
        if name == "HGMMA" and order[i - 1] != "HGMMA":
            assert order[i - 1] == "FENCE.VIEW.ASYNC"
        if name == "WARPGROUP.DEPBAR" and "LDGSTS" in order[i:]:
            after = order[i:]
            assert after.index("BAR.SYNC") < after.index("LDGSTS")


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
        compiled.compile_spec(ffn(4), 75)
    for capability in (80, 100):  # where Triton itself would end the process
        with pytest.raises(CannotServe, match=rf"sm_{capability}.*sm_90"):
            compiled.compile_spec(ffn(1), capability)
    with pytest.raises(CannotServe, match=r"sm_80.*sm_90"):
        compiled.compile_spec(ffn(4, pdl=True), 80)


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
    from moe_jax.pallas_kernels.in_jit import call

    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in spec.inputs]
    out = jax.eval_shape(lambda *xs: call(spec, xs), *given)
    assert [(o.shape, o.dtype.name) for o in out] == [(a.shape, a.dtype) for a in spec.outputs]
    with pytest.raises(InvalidArgument, match="number of inputs"):
        call(spec, given[1:])
