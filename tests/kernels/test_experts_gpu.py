"""The expert kernel on a GPU: inside jit and launched raw, against the reference and bit for bit against itself."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import ACTIVATIONS, buffers, routing

pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA GPU"),
]

QWEN3 = {"top_k": 8, "experts": 128, "hidden": 2048, "inner": 768}
ODD = {"top_k": 3, "experts": 5, "hidden": 192, "inner": 72}


def inputs_of(spec, rng, tokens, experts, k, given=None):
    ids, scale = routing(rng, tokens, experts, k)
    if tokens > 2:
        ids[1], ids[2, 0] = -1, experts
    return {name: jnp.asarray(value) for name, value in buffers(spec, rng, ids, scale, given).items()}


def error(out, wanted):
    out, wanted = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(out - wanted) / np.linalg.norm(wanted)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: f"{a.name}-{a.layout}-{a.limit_after}")
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 8e-3), ("float16", 1e-3), ("float32", 1e-5)])
def test_inside_jit(activation, dtype, bound):
    from moe_jax.pallas_kernels.experts import expert_ffn_spec
    from moe_jax.pallas_kernels.in_jit import call

    rng = np.random.default_rng(0)
    for tokens in (1, 5):
        spec = expert_ffn_spec(
            tokens, **ODD, dtype=dtype, activation=activation, slots=7, gate_up_bias=True, down_bias=True, residual=True
        )
        made = inputs_of(spec, rng, tokens, ODD["experts"], ODD["top_k"])
        given = [made[a.name] for a in spec.inputs]
        (out,) = jax.jit(lambda *xs, spec=spec: call(spec, xs))(*given)
        assert error(out, spec.reference(*given)) < bound


@pytest.mark.parametrize("pdl", [False, True])
def test_raw_launch_in_a_graph_equals_jit(pdl):
    from cuda.core import Device

    from moe_jax.pallas_kernels.compiled import compile_spec
    from moe_jax.pallas_kernels.experts import expert_ffn_spec
    from moe_jax.pallas_kernels.in_jit import call
    from moe_jax.pallas_kernels.launcher import capture, load_kernel

    rng = np.random.default_rng(1)
    options = QWEN3 | {"dtype": "bfloat16", "activation": ACTIVATIONS[0]}
    spec = expert_ffn_spec(4, **options, pdl=pdl)
    made = inputs_of(spec, rng, 4, 128, 8)
    plain = expert_ffn_spec(4, **options)
    (wanted,) = jax.jit(lambda *xs: call(plain, xs))(*(made[a.name] for a in plain.inputs))
    jax.block_until_ready([wanted, made])
    device = Device(0)
    device.set_current()
    if device.compute_capability != (9, 0):
        pytest.skip("cubin for sm_90")
    kernel, stream = load_kernel(spec, compile_spec(spec, 90)), device.create_stream()
    addresses = [made[a.name].unsafe_buffer_pointer() for a in spec.arguments]
    graph = capture(stream, lambda builder: kernel.launch(builder, addresses))
    for _ in range(3):
        graph.launch(stream)
        stream.sync()
        np.testing.assert_array_equal(np.asarray(made["out_ptr"].copy()), np.asarray(wanted))
    assert not np.asarray(made["state_ptr"].copy()).any()


# top-k, experts, H, I that one row has its own tile for, of twice the rows by twice the warps.
TALL_SHAPES = [(2, 8, 1024, 4096), (2, 3, 512, 14336)]
# And those that it has its own kernel for.
ROW_SHAPES = [(8, 128, 2048, 768), (6, 64, 2048, 1408), (8, 64, 2048, 1024), (5, 40, 1536, 512), (8, 9, 2048, 64)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", ROW_SHAPES + TALL_SHAPES, ids=str)
def test_one_row_has_the_bits_of_four(sizes, dtype):
    """One row has a kernel or a tile of its own at these sizes."""
    from moe_jax.pallas_kernels.experts import expert_ffn_spec
    from moe_jax.pallas_kernels.in_jit import call

    k, experts = sizes[:2]
    rng = np.random.default_rng(3)
    one, four = (
        expert_ffn_spec(rows, *sizes, dtype=dtype, activation=ACTIVATIONS[0], residual=True) for rows in (1, 4)
    )
    assert (one.name, four.name) == ("expert_ffn" if sizes in TALL_SHAPES else "expert_ffn_row", "expert_ffn")
    assert (one.num_warps, four.num_warps) == (8, 4)
    run_one, run_four = (jax.jit(lambda *xs, spec=spec: call(spec, xs)[0]) for spec in (one, four))
    made = inputs_of(four, rng, 4, experts, k)
    weights = {name: made[name] for name in ("gate_up_ptr", "down_ptr")}
    for _ in range(5):
        fresh = inputs_of(one, rng, 1, experts, k, weights)
        ids, scale = routing(rng, 4, experts, k)
        ids[1, 0], ids[2, -1] = -1, experts
        again = buffers(four, rng, ids, scale, weights)
        whole = np.asarray(run_four(*(jnp.asarray(again[a.name]) for a in four.inputs)))
        for row in range(4):
            for name in ("x_ptr", "ids_ptr", "scale_ptr", "residual_ptr"):
                fresh[name] = jnp.asarray(again[name][row : row + 1])
            alone = np.asarray(run_one(*(fresh[a.name] for a in one.inputs)))
            assert alone.tobytes() == whole[row : row + 1].tobytes()


class Rows:
    """Many rows, each for a launch of its own by addresses, and what the kernel of four rows makes of them."""

    def __init__(self, sizes, dtype, count, pdl):
        from cuda.core import Device

        from moe_jax.pallas_kernels.compiled import compile_spec
        from moe_jax.pallas_kernels.experts import expert_ffn_spec
        from moe_jax.pallas_kernels.in_jit import call
        from moe_jax.pallas_kernels.launcher import load_kernel

        self.device = Device(0)
        self.device.set_current()
        if self.device.compute_capability != (9, 0):
            pytest.skip("cubin for sm_90")
        k, experts = sizes[:2]
        options = {"dtype": dtype, "activation": ACTIVATIONS[0], "residual": True}
        four = expert_ffn_spec(4, *sizes, **options)
        self.spec = expert_ffn_spec(1, *sizes, **options, pdl=pdl)
        assert self.spec.name == "expert_ffn_row"
        rng = np.random.default_rng(5)
        many = {name: [] for name in ("x_ptr", "ids_ptr", "scale_ptr", "residual_ptr")}
        run, wanted, made, weights = jax.jit(lambda *xs: call(four, xs)[0]), [], {}, {}
        for _ in range(count // 4):
            ids, scale = routing(rng, 4, experts, k)
            ids[1, 0], ids[2, -1] = -1, experts
            fresh = buffers(four, rng, ids, scale, weights)
            made = {name: jnp.asarray(value) for name, value in fresh.items()}
            weights = {name: made[name] for name in ("gate_up_ptr", "down_ptr")}
            wanted.append(np.asarray(run(*(made[a.name] for a in four.inputs))))
            for name, values in many.items():
                values.append(fresh[name])
        self.wanted = np.concatenate(wanted)
        # An address is a multiple of 16 bytes, so a row of ids or scales is padded to eight.
        padded = {name: np.concatenate(values) for name, values in many.items()}
        for name in ("ids_ptr", "scale_ptr"):
            padded[name] = np.pad(padded[name], ((0, 0), (0, 8 - k)))
        self.many = {name: jnp.asarray(value) for name, value in padded.items()}
        self.many["out_ptr"] = jnp.full((count, sizes[2]), jnp.nan, dtype)
        (state,) = (a for a in self.spec.arguments if a.role == "state")
        self.one = made | {"state_ptr": jnp.zeros(state.shape, state.dtype)}
        jax.block_until_ready((self.many, self.one))
        self.kernel, self.stream = load_kernel(self.spec, compile_spec(self.spec, 90)), self.device.create_stream()

    def launch(self, row, out):
        """Queue a launch of a row, into the outputs of another."""
        addresses = []
        for a in self.spec.arguments:
            array, index = self.many.get(a.name), out if a.name == "out_ptr" else row
            base = self.one[a.name] if array is None else array
            addresses.append(
                base.unsafe_buffer_pointer() + (0 if array is None else index * array.nbytes // len(array))
            )
        self.kernel.launch(self.stream, addresses)

    def check(self, rows):
        """The outputs are those of these rows, to the bit, and the state is as it was."""
        self.stream.sync()
        out = np.asarray(self.many["out_ptr"].copy())
        wrong = [i for i, row in enumerate(rows) if out[i].tobytes() != self.wanted[row].tobytes()]
        assert not wrong
        assert not np.asarray(self.one["state_ptr"].copy()).any()


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("sizes", ROW_SHAPES, ids=str)
def test_300_launches_in_a_row_leave_nothing_to_reset(sizes, pdl):
    """Queued at once on one state, with new rows; one of them comes again and again between the others."""
    made = Rows(sizes, "bfloat16", 300, pdl)
    rows = [0 if i % 30 == 0 else i for i in range(300)]
    for i, row in enumerate(rows):
        made.launch(row, i)
    made.check(rows)


@triton.jit
def occupy(out_ptr, NANOSECONDS: tl.constexpr):
    """A program that takes that long."""
    begin = globaltimer()
    now = begin
    while now - begin < NANOSECONDS:
        now = globaltimer()
    tl.store(out_ptr + tl.program_id(0), 1)


@pytest.mark.parametrize("pdl", [False, True])
def test_one_row_ends_where_most_multiprocessors_are_anothers(pdl):
    """Few of its programs run at a time then, so whoever waited for one that does not would wait for ever."""
    from moe_jax.pallas_kernels.compiled import compile_spec
    from moe_jax.pallas_kernels.launcher import load_kernel
    from moe_jax.pallas_kernels.spec import Argument, KernelSpec

    made = Rows(ROW_SHAPES[0], "bfloat16", 40, pdl)
    taken = made.device.properties.multiprocessor_count - 32
    spec = KernelSpec(
        name="occupy", function=occupy, arguments=(Argument("out_ptr", "int32", (taken,), "out"),),
        constexprs=(("NANOSECONDS", 100_000_000),), grid=(taken, 1, 1), num_warps=4, num_stages=1,
        enable_fp_fusion=False, pdl=False,
    )  # fmt: skip
    # So much shared memory that nothing else of ours fits beside it.
    other = load_kernel(spec, dataclasses.replace(compile_spec(spec, 90), shared=200 * 1024))
    out, stream = jnp.zeros(taken, jnp.int32), made.device.create_stream()
    jax.block_until_ready(out)
    made.launch(0, 0)
    made.stream.sync()
    other.launch(stream, [out.unsafe_buffer_pointer()])
    ended = stream.record()
    time.sleep(0.01)
    for i in range(40):
        made.launch(i, i)
    made.stream.sync()
    assert not ended.is_done, "it took as long as the other one: nothing was shown"
    made.check(range(40))
    stream.sync()
    assert np.asarray(out.copy()).all()


SIZES = [  # rows, top-k, experts, H, I, dtype; many small blocks make tiles meet
    (33, 8, 160, 8, 6, "float32"),
    (64, 8, 160, 8, 6, "float32"),
    (48, 6, 72, 8, 6, "bfloat16"),
    (64, 8, 128, 128, 72, "bfloat16"),
    (64, 8, 128, 2048, 768, "bfloat16"),
    (1, 8, 128, 2048, 768, "bfloat16"),
    (1, 8, 40, 1536, 512, "float16"),
]


@pytest.mark.parametrize(("rows", "k", "experts", "hidden", "inner", "dtype"), SIZES)
def test_new_rows_at_every_call_are_right_every_time(rows, k, experts, hidden, inner, dtype):
    """With new rows, what an earlier call left in memory is never the right answer. One input repeated hid a race."""
    from moe_jax.pallas_kernels.experts import expert_ffn_spec
    from moe_jax.pallas_kernels.experts.heuristics import tile_for
    from moe_jax.pallas_kernels.in_jit import call
    from moe_jax.pallas_kernels.plan.specs import plan_spec

    rng = np.random.default_rng(0)
    ffn = expert_ffn_spec(rows, k, experts, hidden, inner, dtype=dtype, activation=ACTIVATIONS[0])
    plan = plan_spec(rows, k, experts, tile_for(rows, k, experts, hidden, inner, dtype).block_n)
    made = {a.name: jnp.zeros(a.shape, a.dtype) for a in ffn.inputs}
    for name in ("gate_up_ptr", "down_ptr"):
        shape = made[name].shape
        made[name] = jax.random.normal(jax.random.key(1), shape, jnp.dtype(dtype)) / np.asarray(shape[-1] ** 0.5, dtype)

    def inputs(x, ids, scale):
        named = made | {"x_ptr": x, "ids_ptr": ids, "scale_ptr": scale}
        if rows > 1:
            groups = call(plan, (ids, jnp.zeros(1, jnp.int32)))
            named |= dict(zip(("used_ptr", "block_row_ptr", "block_pair_ptr"), groups, strict=True))
        return [named[a.name] for a in ffn.inputs]

    run = jax.jit(lambda *given: call(ffn, inputs(*given))[0])
    reference = jax.jit(lambda *given: ffn.reference(*inputs(*given)))
    for _ in range(100 if hidden < 1000 else 20):
        ids, scale = routing(rng, rows, experts, k)
        given = jnp.asarray(rng.normal(size=(rows, hidden)), dtype), jnp.asarray(ids), jnp.asarray(scale)
        assert error(run(*given), reference(*given)) < (1e-5 if dtype == "float32" else 1e-2)
