"""The engine's kernels are cut as those that `grouped_moe` and the others launch inside jit, on the same device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from engines import MAIN, OPTIONS

from moe_jax.cache import SimulatedRuntime
from moe_jax.engine import Engine
from moe_jax.engine.step import Geometry, build
from moe_jax.engine.weights import module_places
from moe_jax.models.decoder import abstract_decoder
from moe_jax.pallas_kernels.attention.specs import decode_attention_specs
from moe_jax.pallas_kernels.experts.heuristics import tile_for
from moe_jax.pallas_kernels.grouped_moe import triton as grouped
from moe_jax.pallas_kernels.linear.specs import linear_spec
from moe_jax.pallas_kernels.spec import KernelSpec
from moe_jax.pallas_kernels.tuned import source_hash, tuned_tile_for
from moe_jax.pallas_kernels.tuned.store import write
from tiny_models import tiny_config, tiny_model

KIND, ROWS = "NVIDIA of the tests", (1, 2, 4)


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Data for one kind of device, which is no heuristic's."""
    config = tiny_config(MAIN)
    router, sizes = config.moe.router, (config.hidden_size, config.moe_intermediate)
    entries = []
    for rows in ROWS:
        base = tile_for(rows, router.top_k, router.experts, *sizes, "float32")
        tile = dataclasses.replace(base, block_m=64, block_k=16, block_n=8 * rows, programs=77 + rows)
        shape = [*sizes, router.experts, router.top_k]
        entries.append({"shape": shape, "dtype": "float32", "tokens": rows, "tile": dataclasses.asdict(tile), "us": 1})
    write(tmp_path, KIND, "expert_ffn", source_hash("expert_ffn"), "triton 3", "2026-01-01", entries)
    monkeypatch.setitem(tuned_tile_for.__kwdefaults__, "folder", tmp_path)
    grouped._specs.cache_clear()
    yield
    grouped._specs.cache_clear()


def of_kind(device_kind: str, capability: int = 80) -> SimulatedRuntime:
    runtime = SimulatedRuntime(1 << 25)
    runtime.device_kind, runtime.capability = device_kind, capability  # type: ignore[misc]
    return runtime


def specs(engine: Engine, rows: int, name: str) -> list[KernelSpec]:
    return [spec for spec in engine._steps.decode[rows].specs if spec.name == name]


def in_jit(rows: int, device_kind: str) -> tuple[KernelSpec | None, KernelSpec]:
    config = tiny_config(MAIN)
    router, sizes = config.moe.router, (config.hidden_size, config.moe_intermediate)
    shape = (rows, router.top_k, router.experts, *sizes)
    return grouped._specs(*shape, "float32", device_kind, 80, config.moe.activation, False, False, True)


@pytest.mark.parametrize("device_kind", [KIND, "NVIDIA of nobody"])
def test_experts_are_cut_as_inside_jit(engine_for, tuned, device_kind):
    engine = engine_for(tiny_model(MAIN), **OPTIONS, runtime=of_kind(device_kind))
    for rows in ROWS:
        plan, ffn = in_jit(rows, device_kind)
        assert [spec.key for spec in specs(engine, rows, "expert_ffn")] == [ffn.key]
        assert [spec.key for spec in specs(engine, rows, "plan")] == ([] if plan is None else [plan.key])
        assert (dict(ffn.constexprs)["BLOCK_K"] == 16) == (device_kind == KIND)


def test_a_simulated_device_is_of_its_own_kind(engine_for, tuned):
    engine = engine_for(tiny_model(MAIN), **OPTIONS)
    assert (engine._geometry.device_kind, engine._geometry.capability, engine._geometry.pdl) == ("host", 80, False)
    assert [spec.key for spec in specs(engine, 4, "expert_ffn")] == [in_jit(4, "cpu")[1].key]


def test_the_engine_asks_its_runtime(engine_for):
    engine = engine_for(tiny_model(MAIN), **OPTIONS, runtime=of_kind(KIND, 90))
    assert (engine._geometry.device_kind, engine._geometry.capability, engine._geometry.pdl) == (KIND, 90, True)


@pytest.mark.parametrize("capability", [80, 86, 90])
def test_matmuls_and_attention_are_cut_for_the_capability(capability):
    """Sizes at which capabilities differ: 32 rows of a wide projection, one row of short heads."""
    config = dataclasses.replace(tiny_config(MAIN), hidden_size=512, vocab_size=66000, heads=8, head_dim=64, kv_heads=8)
    places = module_places(abstract_decoder(config))
    shapes = {name: getattr(*place).shape for name, place in places.items()}
    weights = tuple((name, "bfloat16", shape) for name, shape in shapes.items())
    of_cache: dict[str, Any] = {"sequences": 32, "pages": 64, "page_size": 8, "max_pages": 2}
    geometry = Geometry(
        config=config, dtype="bfloat16", weights=weights, max_sequences=32, max_tokens=16, page_size=8, pages=64,
        rows=32, stops=1, capability=capability,
    )  # fmt: skip
    found = build(geometry, (1, 32), ()).decode
    for rows in (1, 32):
        options: dict[str, Any] = {"dtype": "bfloat16", "capability": capability}
        head = linear_spec(rows, 512, 66000, out_dtype="float32", norm_eps=config.norm_eps, **options)
        out = linear_spec(rows, 512, 512, residual=True, **options)
        of_append = {"positions": 16, "norm": config.qk_norm, "eps": config.norm_eps, "clip": config.clip_qkv}
        attend, combine = decode_attention_specs(rows, 8, 8, 64, **of_cache, **of_append, **options)
        assert {head.key, out.key, attend.key, combine.key} <= {spec.key for spec in found[rows].specs}
    assert (
        linear_spec(32, 512, 66000, dtype="bfloat16", capability=86).key
        != linear_spec(32, 512, 66000, dtype="bfloat16", capability=90).key
    )
