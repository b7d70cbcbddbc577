"""What a spec's hash covers, and the roles of its arguments inside jit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from triton import language as tl

from moe_jax.pallas_kernels.attention import attention_specs, combine_triton
from moe_jax.pallas_kernels.attention import triton as attention_kernels
from moe_jax.pallas_kernels.errors import InvalidArgument
from moe_jax.pallas_kernels.kv_append import kv_append_spec
from moe_jax.pallas_kernels.linear import linear_spec

PAGED = {"sequences": 2, "pages": 9, "page_size": 8, "max_pages": 4}


def append_spec():
    return kv_append_spec(3, 4, 2, 16, dtype="float32", positions=32, **PAGED)


def test_a_constant_of_the_module_is_part_of_the_source(monkeypatch):
    def specs():
        return attention_specs(1, 4, 2, 16, dtype="bfloat16", **PAGED)

    before = [spec.source_hash for spec in specs()]
    assert before == [spec.source_hash for spec in specs()]
    monkeypatch.setattr(attention_kernels, "LOG2_E", tl.constexpr(1.5))
    assert [a != spec.source_hash for a, spec in zip(before, specs(), strict=True)] == [True, False]
    # The second launch has it by import.
    monkeypatch.setattr(combine_triton, "LOG2_E", tl.constexpr(1.5))
    assert [a != spec.source_hash for a, spec in zip(before, specs(), strict=True)] == [True, True]


def test_a_constant_that_a_called_function_reads_is_part_of_the_source(monkeypatch):
    (first, _), source = attention_specs(1, 4, 2, 16, dtype="bfloat16", **PAGED), attention_kernels.work_of.fn
    before = first.source_hash
    monkeypatch.setitem(source.__globals__, "power_of_nothing", tl.constexpr(3))
    assert dataclasses.replace(first).source_hash == before
    monkeypatch.setitem(source.__globals__, "cumsum", tl.constexpr(3))  # a name that the helper does use
    assert dataclasses.replace(first).source_hash != before


def test_equal_content_gives_equal_keys():
    a, b = (linear_spec(4, 64, 64, dtype="float16") for _ in range(2))
    assert a.key == b.key and dataclasses.replace(a, num_warps=8).key != b.key


def test_results_stand_after_everything_that_is_given():
    spec = append_spec()
    assert [a.role for a in spec.arguments] == ["in"] * 8 + ["inout"] * 2 + ["out"]
    assert [a.name for a in spec.inputs][-2:] == ["k_pages_ptr", "v_pages_ptr"]
    roles = dict.fromkeys(["k_pages_ptr", "v_pages_ptr"], "out")
    arguments = tuple(dataclasses.replace(a, role=roles.get(a.name, "inout")) for a in spec.arguments)
    with pytest.raises(InvalidArgument, match="in, inout and state before out and scratch"):
        dataclasses.replace(spec, arguments=arguments)


@pytest.mark.parametrize("name", ["k_pages_ptr", "q_ptr", "no_ptr"])
def test_only_what_is_read_and_not_written_may_be_read_early(name):
    spec = append_spec()
    assert "position_ptr" in spec.early
    with pytest.raises(
        InvalidArgument, match=rf"early: got \('position_ptr', '{name}'\), wanted some of \['cos_ptr', "
    ):
        dataclasses.replace(spec, early=("position_ptr", name))


def test_who_opens_a_step_reads_nothing_early():
    with pytest.raises(InvalidArgument, match=r"early: got \('cos_ptr', 'position_ptr'\), wanted none, as it opens"):
        dataclasses.replace(append_spec(), early=("cos_ptr", "position_ptr"), opens=True)


@pytest.mark.parametrize("grid", [(0, 1, 1), (1, 0, 1), (2**31, 1, 1), (1, 65536, 1), (1, 1, 65536)])
def test_a_grid_that_no_launch_may_have_is_refused(grid):
    with pytest.raises(InvalidArgument, match=r"grid: got \(.*wanted 1 to \(2147483647, 65535, 65535\)"):
        dataclasses.replace(append_spec(), grid=grid)
    dataclasses.replace(append_spec(), grid=(2**31 - 1, 65535, 65535))


def test_what_is_changed_in_place_comes_as_a_ref():
    from moe_jax.pallas_kernels.in_jit import call

    spec = append_spec()

    def run(*arrays, cast=lambda ref: ref):
        pools = [cast(jax.new_ref(a)) for a in arrays[-2:]]
        return call(spec, [*arrays[:-2], *pools])

    given = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in spec.inputs]
    (q,) = jax.eval_shape(run, *given)
    assert (q.shape, q.dtype.name) == ((3, 64), "float32")
    with pytest.raises(
        InvalidArgument, match=r"k_pages_ptr: got \w*Tracer, wanted a jax.Ref of float32\[9, 2, 8, 16\]"
    ):
        jax.eval_shape(lambda *arrays: run(*arrays, cast=jax.freeze), *given)
    with pytest.raises(InvalidArgument, match=r"got a jax.Ref of float32\[9, 2, 8, 8\], wanted .*16\]"):
        jax.eval_shape(run, *given[:-2], *[jax.ShapeDtypeStruct((9, 2, 8, 8), jnp.float32)] * 2)
    with pytest.raises(InvalidArgument, match="dtype of qkv_ptr"):
        jax.eval_shape(run, jax.ShapeDtypeStruct(given[0].shape, jnp.float16), *given[1:])
