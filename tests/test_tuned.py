"""Tuned tiles: found by shape and row bucket, refused with the reason, and never another arithmetic for other rows."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.experts import Tile, expert_ffn_spec, heuristics, tile_for
from moe_jax.pallas_kernels.grouped_moe import Activation
from moe_jax.pallas_kernels.prefill import (
    PrefillTile,
    combine_spec,
    down_spec,
    gate_up_spec,
    plan_specs,
    prefill_tile_for,
)
from moe_jax.pallas_kernels.prefill.mosaic_kernel import MosaicTile
from moe_jax.pallas_kernels.spec import _sources
from moe_jax.pallas_kernels.stored import rebuild
from moe_jax.pallas_kernels.tuned import Found, Refused, choose, lookup, source_hash, tiles, tuned_tile_for
from moe_jax.pallas_kernels.tuned.lookup import DATA, arithmetic_of, file_name, load
from moe_jax.pallas_kernels.tuned.store import write
from moe_jax.pallas_kernels.tuned.tiles import _SOURCES

ROOT = Path(__file__).parents[1]
DEVICE = "NVIDIA H200"
SHAPE = (2048, 768, 128, 8)
SOURCE, BUILDER = "a" * 64, "triton 3.9.0"


def entry(tokens: int, shape: tuple[int, ...] = SHAPE, dtype: str = "bfloat16", **changes: int) -> dict:
    hidden, inner, experts, k = shape
    tile = dataclasses.asdict(tile_for(tokens, k, experts, hidden, inner, dtype))
    return {"shape": list(shape), "dtype": dtype, "tokens": tokens, "tile": tile | changes}


def put(folder: Path, *entries: dict, op: str = "expert_ffn", source: str = SOURCE, builder: str = BUILDER) -> Path:
    return write(folder, DEVICE, op, source, builder, "2026-01-01", entries)


def found(folder: Path, tokens: int, shape=SHAPE, *, dtype="bfloat16", device=DEVICE, source=SOURCE, op="expert_ffn"):
    return lookup(op, shape, tokens, dtype, device, source, builder=BUILDER, folder=folder)


def test_the_least_bucket_that_is_enough(tmp_path):
    put(tmp_path, entry(1, lag=1), entry(16, lag=16), entry(4, lag=4), entry(64, lag=32))
    lags = {}
    for tokens in (1, 2, 4, 5, 16, 17, 64):
        got = found(tmp_path, tokens)
        assert isinstance(got, Found)
        lags[tokens] = got.tile["lag"]
    assert lags == {1: 1, 2: 4, 4: 4, 5: 16, 16: 16, 17: 32, 64: 32}
    assert found(tmp_path, 5).note == "tuned data for NVIDIA H200, 16 rows"


def test_what_is_not_there_is_refused_with_its_reason(tmp_path):
    put(tmp_path, entry(1), entry(16))
    cases = {
        "no tuned data for NVIDIA A100": found(tmp_path, 1, device="NVIDIA A100"),
        "no tuned data for linear on NVIDIA H200": found(tmp_path, 1, op="linear"),
        "no tuned data for expert_ffn at (4096, 768, 128, 8) bfloat16": found(tmp_path, 1, (4096, 768, 128, 8)),
        "no tuned data for expert_ffn at (2048, 768, 128, 8) float16": found(tmp_path, 1, dtype="float16"),
        "ends at 16 rows, got 17": found(tmp_path, 17),
    }
    for text, got in cases.items():
        assert isinstance(got, Refused)
        assert text in got.reason


def test_data_of_another_source_is_refused_naming_both(tmp_path):
    put(tmp_path, entry(1))
    got = found(tmp_path, 1, source="b" * 64)
    assert isinstance(got, Refused)
    assert got.reason == "tuned data of another source: aaaaaaaaaaaa…, the kernel here is bbbbbbbbbbbb…"
    assert got.fixed == {}


def test_no_kernel_is_hashed_where_there_is_no_data(tmp_path):
    asked = []

    def found():
        source = lambda: asked.append(1) or SOURCE  # noqa: E731
        return lookup("expert_ffn", SHAPE, 1, "bfloat16", DEVICE, source, builder=BUILDER, folder=tmp_path)

    assert isinstance(found(), Refused)
    assert asked == []
    put(tmp_path, entry(1))
    assert isinstance(found(), Found)
    assert asked == [1]


def test_another_compiler_is_used_and_noted(tmp_path):
    put(tmp_path, entry(1), builder="triton 3.6.0")
    got = found(tmp_path, 1)
    assert isinstance(got, Found)
    assert got.note == "tuned data for NVIDIA H200, 1 rows, tuned with triton 3.6.0 where triton 3.9.0 runs"


def test_a_file_of_another_device_under_this_name_is_refused(tmp_path):
    path = put(tmp_path, entry(1))
    path.rename(tmp_path / file_name("NVIDIA H20"))
    got = found(tmp_path, 1, device="NVIDIA H20")
    assert isinstance(got, Refused)
    assert "was tuned on NVIDIA H200, this is NVIDIA H20" in got.reason


@pytest.mark.parametrize("name", ["block_m", "block_k", "num_warps"])
def test_row_counts_with_another_arithmetic_refuse_the_whole_file(tmp_path, name):
    path = put(tmp_path, entry(1), entry(16), entry(16, (4096, 14336, 8, 2)))
    content = json.loads(path.read_text())
    tile = content["operations"]["expert_ffn"]["entries"][1]["tile"]
    tile[name] *= 2
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match="fields that fix the arithmetic") as caught:
        load(path)
    assert caught.value.got[name] == tile[name]
    assert caught.value.wanted.startswith(str({"block_m": 64, "block_k": 128, "num_warps": 4}))
    # Nothing of the file counts, other shapes included; the call goes on with the heuristic and says why.
    for shape in (SHAPE, (4096, 14336, 8, 2)):
        got = found(tmp_path, 16, shape)
        assert isinstance(got, Refused)
        assert "fields that fix the arithmetic" in got.reason
    assert tuned_tile_for(16, 8, 128, 2048, 768, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path).tile == tile_for(
        16, 8, 128, 2048, 768, "bfloat16"
    )


def test_other_experts_and_row_counts_keep_the_tuned_arithmetic(tmp_path):
    """A row's bits are a function of (H, I, dtype): where data ends, the heuristic may not bring its own."""
    put(tmp_path, entry(1, block_m=128), entry(16, block_m=128))
    for tokens, top_k, experts in ((1, 8, 128), (9, 8, 128), (64, 8, 128), (1, 4, 32)):
        tile, source = tuned_tile_for(
            tokens, top_k, experts, 2048, 768, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path
        )
        assert (tile.block_m, tile.block_k, tile.num_warps) == (128, 128, 4)
        tuned = tokens <= 16 and experts == 128
        assert source.startswith("tuned data for NVIDIA H200" if tuned else "heuristic: ")
    other = tuned_tile_for(1, 8, 128, 2048, 1024, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path)
    assert other.tile.block_m == 64


def test_where_the_tile_comes_from_is_said(tmp_path):
    put(tmp_path, entry(4, lag=7))
    tile, source = tuned_tile_for(3, 8, 128, 2048, 768, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path)
    assert tile.lag == 7
    assert source.startswith("tuned data for NVIDIA H200, 4 rows")
    tile, source = tuned_tile_for(3, 8, 128, 2048, 768, "bfloat16", "NVIDIA A100", source=SOURCE, folder=tmp_path)
    assert (tile, source) == (
        tile_for(3, 8, 128, 2048, 768, "bfloat16"),
        "heuristic: no tuned data for NVIDIA A100",
    )


def test_a_tile_with_other_fields_is_not_used(tmp_path):
    put(tmp_path, entry(1, gone=3))
    tile, source = tuned_tile_for(1, 8, 128, 2048, 768, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path)
    assert tile == tile_for(1, 8, 128, 2048, 768, "bfloat16")
    assert source.startswith("heuristic: tuned Tile: fields")


BAD = [
    *(("block_n", value) for value in ("64", None, {"a": 1}, [8], True, 8.0, -8, 0, 24)),
    *((name, 0) for name in ("num_stages", "lag", "programs", "spread")),
    *(("backoff", -1), ("ring", 1.5), ("ahead", -1)),
]


@pytest.mark.parametrize("fixed", [64, 128])
@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_a_tile_with_a_value_that_none_has_is_not_used(tmp_path, name, value, fixed):
    """But what it shares with other row counts is: they run the tuned arithmetic, and so does the heuristic's tile."""
    put(tmp_path, entry(4, block_m=fixed), entry(16, block_m=fixed, **{name: value}))
    sizes = (8, 128, 2048, 768, "bfloat16")
    for rows in (5, 16, 17):
        tile, source = tuned_tile_for(rows, *sizes, DEVICE, source=SOURCE, folder=tmp_path)
        assert tile == dataclasses.replace(tile_for(rows, *sizes), block_m=fixed)
        assert source.startswith("heuristic: ") and (rows == 17 or f"Tile: {name}: got " in source)
        assert fixed == 64 or source.endswith("as tuned for other calls")
    assert tuned_tile_for(4, *sizes, DEVICE, source=SOURCE, folder=tmp_path).source.startswith("tuned data")


@pytest.mark.parametrize("value", ["64", None, -64, 0, 48, True])
@pytest.mark.parametrize("name", ["block_m", "block_k", "num_warps"])
def test_what_fixes_the_arithmetic_is_checked_with_the_file(tmp_path, name, value):
    path = put(tmp_path, entry(1))
    content = json.loads(path.read_text())
    content["operations"]["expert_ffn"]["entries"][0]["tile"][name] = value
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=r"fields that fix the arithmetic.*wanted powers of two"):
        load(path)
    chosen = tuned_tile_for(16, 8, 128, 2048, 768, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path)
    assert chosen.tile == tile_for(16, 8, 128, 2048, 768, "bfloat16")
    assert "wanted powers of two" in chosen.source


@dataclasses.dataclass(frozen=True)
class Inner:
    size: int


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    sizes: tuple[int, ...]


def test_nested_tiles_come_back_as_they_were(tmp_path):
    tile = Outer(Inner(3), (32, 64))
    made = {"shape": [4, 4], "dtype": "bfloat16", "tokens": 8, "tile": dataclasses.asdict(tile)}
    put(tmp_path, made, op="prefill_mosaic")
    base = Outer(Inner(1), (1,))
    got = choose("prefill_mosaic", base, (4, 4), 8, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path)
    assert got.tile == tile
    assert hash(got.tile) == hash(tile)
    assert rebuild(Outer, json.loads(json.dumps(dataclasses.asdict(tile))), "test") == tile


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), []),
        (("format",), 2),
        (("device",), None),
        (("operations",), []),
        (("operations", "expert_ffn", "source_hash"), 1),
        (("operations", "expert_ffn", "entries"), {}),
        (("operations", "expert_ffn", "entries", 0, "tokens"), 0),
        (("operations", "expert_ffn", "entries", 0, "tokens"), True),
        (("operations", "expert_ffn", "entries", 0, "shape"), [2048, -1, 2, 2]),
        (("operations", "expert_ffn", "entries", 0, "tile"), None),
        (("operations", "expert_ffn", "entries", 0, "tile"), {"block_m": 64}),
    ],
)
def test_malformed_files_are_refused(tmp_path, place, value):
    path = put(tmp_path, entry(1))
    content = json.loads(path.read_text())
    if place:
        inside = content
        for step in place[:-1]:
            inside = inside[step]
        inside[place[-1]] = value
    else:
        content = value
    path.write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=r"tuned data nvidia-h200\.json"):
        load(path)
    assert isinstance(found(tmp_path, 1), Refused)


def test_an_entry_that_stands_twice_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="twice"):
        put(tmp_path, entry(4, lag=1), entry(4, lag=2))
    assert list(tmp_path.iterdir()) == []


def test_writing_keeps_other_shapes_of_the_same_source_only(tmp_path):
    other = (4096, 14336, 8, 2)
    put(tmp_path, entry(1), entry(4))
    put(tmp_path, entry(1, lag=3))
    path = put(tmp_path, entry(1, other))
    kept = [(e["shape"], e["tokens"]) for e in load(path)["operations"]["expert_ffn"]["entries"]]
    assert kept == [(list(SHAPE), 1), (list(other), 1)]
    put(tmp_path, entry(4), source="c" * 64)
    put(tmp_path, {"shape": [1, 1], "dtype": "bfloat16", "tokens": 1, "tile": {}}, op="prefill")
    operations = load(path)["operations"]
    assert [e["tokens"] for e in operations["expert_ffn"]["entries"]] == [4]
    assert set(operations) == {"expert_ffn", "prefill"}


def test_shipped_data_is_valid_and_filed_under_its_device():
    kinds = {"expert_ffn": Tile, "prefill_triton": PrefillTile, "prefill_mosaic": MosaicTile}
    for path in DATA.glob("*"):
        assert path.name == file_name(load(path)["device"])
        for op, operation in load(path)["operations"].items():
            assert operation["entries"], op
            for e in operation["entries"]:
                assert rebuild(kinds[op], e["tile"], op) if op in kinds else set(e["tile"]) == {"backend"}


def test_the_source_of_an_operation():
    pytest.importorskip("triton")
    assert len(source_hash("expert_ffn")) == len(source_hash("prefill")) == 64
    assert len({source_hash(op) for op in ("expert_ffn", "prefill_triton", "prefill_mosaic", "prefill")}) == 4
    with pytest.raises(InvalidArgument, match="linear"):
        source_hash("linear")


def test_every_file_that_a_prefill_kernel_reaches_makes_data_stale():
    pytest.importorskip("triton")
    shape, tile = (300, 2, 4, 64, 128), prefill_tile_for(300, 2, 4, 64, 128, "bfloat16")
    activation = Activation(name="swiglu", layout="halves")
    places = down_spec(*shape, dtype="bfloat16", tile=tile).outputs[0].shape[0]
    kernels = (
        *plan_specs(300, 2, 4, tile.block),
        gate_up_spec(*shape, dtype="bfloat16", activation=activation, tile=tile),
        down_spec(*shape, dtype="bfloat16", tile=tile),
        combine_spec(300, 2, places, 64, dtype="bfloat16"),
    )
    names = {text.split("\n")[0].rsplit(".", 1)[0] for spec in kernels for text in _sources(spec.function)}
    files = {f"{name.split('pallas_kernels.')[1].replace('.', '/')}.py" for name in names}
    assert files and files <= set(_SOURCES["prefill_triton"])


def test_C68_the_same_tile_in_another_process_and_hash_seed(tmp_path):
    put(tmp_path, entry(1, lag=1), entry(16, lag=16), entry(64, lag=32))
    code = (
        "from pathlib import Path\n"
        "from moe_jax.pallas_kernels.tuned import tuned_tile_for\n"
        f"print([tuned_tile_for(t, 8, 128, 2048, 768, 'bfloat16', {DEVICE!r}, source={SOURCE!r}, "
        f"folder=Path({str(tmp_path)!r})) for t in (1, 3, 16, 40)])"
    )
    outs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outs) == 1
    assert "lag=32" in outs.pop()


def test_C69_writers_at_once_leave_a_whole_file(tmp_path):
    """Eight processes publish into one empty folder, five times each, read by this one all the while."""
    entries = [[entry(n, lag=lag) for n in range(1, 65)] for lag in range(1, 9) for _ in range(5)]
    calls = [(tmp_path, DEVICE, "expert_ffn", SOURCE, BUILDER, "2026-01-01", each) for each in entries]
    context = multiprocessing.get_context("forkserver")  # which imports JAX once for all
    context.set_forkserver_preload(["moe_jax.pallas_kernels.tuned"])
    with context.Pool(8) as pool:
        done = pool.starmap_async(write, calls, chunksize=5)
        while not done.ready():
            for path in tmp_path.glob("*.json"):
                load(path)
            done.wait(0.01)
        done.get()
    (path,) = tmp_path.iterdir()
    (lag,) = {e["tile"]["lag"] for e in load(path)["operations"]["expert_ffn"]["entries"]}
    assert lag in range(1, 9)


@pytest.mark.parametrize("how", ["cut off", "deep"])
def test_C69_a_file_that_cannot_be_parsed_is_no_crash(tmp_path, how):
    path = put(tmp_path, entry(1))
    path.write_text(path.read_text()[:100] if how == "cut off" else "[" * 200_000)
    tile, source = tuned_tile_for(1, 8, 128, 2048, 768, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path)
    assert tile == tile_for(1, 8, 128, 2048, 768, "bfloat16")
    assert source.startswith("heuristic: tuned data nvidia-h200.json: content")


def test_tiles_of_as_many_rows_a_warp_are_of_one_arithmetic(tmp_path: Path) -> None:
    """One row of long reductions has tiles of twice the rows by twice the warps: beside data of others, and in it."""
    one, many = (tile_for(rows, 2, 8, 4096, 14336, "bfloat16") for rows in (1, 64))
    assert (one.block_m, one.num_warps) == (2 * many.block_m, 2 * many.num_warps)
    common = {"shape": [4096, 14336, 8, 2], "dtype": "bfloat16"}
    entries = [common | {"tokens": n, "tile": dataclasses.asdict(t)} for n, t in ((1, one), (64, many))]
    others = [{**entries[1], "shape": [4096, 14336, 16, 2]}]
    for name, written, source in (("in", entries, "tuned data"), ("beside", others, "heuristic: ")):
        write(tmp_path / name, DEVICE, "expert_ffn", SOURCE, BUILDER, "2026-01-01", written)
        chosen = tuned_tile_for(1, 2, 8, 4096, 14336, "bfloat16", DEVICE, source=SOURCE, folder=tmp_path / name)
        assert chosen.tile == one and chosen.source.startswith(source)


@pytest.mark.parametrize(
    ("tile", "other", "same"),
    [
        ((64, 128, 4), (64, 128, 4), True),
        ((64, 128, 4), (128, 128, 8), True),
        ((64, 128, 4), (128, 64, 8), False),
        ((64, 128, 4), (128, 128, 4), False),
        ((32, 128, 4), (32, 128, 4), True),
        # As many rows a warp, but not those that a GPU has shown.
        ((32, 128, 4), (64, 128, 8), False),
        ((128, 64, 4), (256, 64, 8), False),
    ],
    ids=str,
)
def test_which_tiles_are_of_one_arithmetic(tile: tuple[int, ...], other: tuple[int, ...], same: bool) -> None:
    one, two = (dict(zip(("block_m", "block_k", "num_warps"), each, strict=True)) for each in (tile, other))
    assert (arithmetic_of("expert_ffn", one) == arithmetic_of("expert_ffn", two)) is same
    assert arithmetic_of("prefill", one) == arithmetic_of("prefill", two) == ()


def test_one_row_keeps_to_the_arithmetic_that_was_tuned_for_other_rows(tmp_path: Path) -> None:
    """Its own kernel runs the instruction of 16 rows a warp; where others were tuned with another, it is not taken."""
    sizes = (8, 128, 2048, 768, "bfloat16", DEVICE)
    assert tuned_tile_for(1, *sizes, folder=tmp_path).tile.ring
    assert not tuned_tile_for(1, *sizes, capability=80, folder=tmp_path).tile.ring
    narrow = dataclasses.replace(tile_for(4, 4, 64, 2048, 768, "bfloat16"), block_m=32)
    others = {"shape": [2048, 768, 64, 4], "dtype": "bfloat16", "tokens": 4, "tile": dataclasses.asdict(narrow)}
    write(tmp_path, DEVICE, "expert_ffn", SOURCE, BUILDER, "2026-01-01", [others])
    tile = tuned_tile_for(1, *sizes, source=SOURCE, folder=tmp_path).tile
    assert (tile.block_m, tile.num_warps, tile.ring, tile.ahead) == (32, 4, 0, 0)
    swiglu = Activation(name="swiglu", layout="halves")
    assert expert_ffn_spec(1, *sizes[:4], dtype="bfloat16", activation=swiglu, tile=tile).name == "expert_ffn"


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        ("NVIDIA H200", True),
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA H100 PCIe", False),
        ("NVIDIA H800 PCIe", False),
        ("NVIDIA H20", False),
        ("NVIDIA H200 MIG 3g.71gb", False),
    ],
)
def test_a_device_with_fewer_multiprocessors_keeps_the_kernel_of_any_number_of_rows(
    kind: str, takes: bool, tmp_path: Path
) -> None:
    chosen = tuned_tile_for(1, 8, 128, 2048, 768, "bfloat16", kind, folder=tmp_path).tile
    assert bool(chosen.ring) == takes
    assert dataclasses.replace(chosen, ring=0, ahead=0) == tile_for(1, 8, 128, 2048, 768, "bfloat16", capability=80)


@pytest.mark.parametrize("name", ["_text", "PAIRS", "ROW_DEPTH", "ROW_OUTPUTS"])
def test_a_change_of_the_kernel_for_one_row_makes_tuned_data_stale(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    source_hash.cache_clear()
    before = source_hash("expert_ffn")
    read = tiles._text
    monkeypatch.setattr(tiles, name, (lambda file: read(file) + "\n# changed") if name == "_text" else 4)
    source_hash.cache_clear()
    assert source_hash("expert_ffn") != before
    source_hash.cache_clear()


def test_what_the_kernel_for_one_row_reaches_makes_data_stale() -> None:
    """Its own file, functions that the other kernel has too, and constants of its file."""
    pytest.importorskip("triton")
    swiglu = Activation(name="swiglu", layout="halves")
    one, rows = (
        {text.split("\n")[0] for text in _sources(spec.function)}
        for spec in (
            expert_ffn_spec(n, 8, 128, 2048, 768, dtype="bfloat16", activation=swiglu, capability=90) for n in (1, 4)
        )
    )
    own = {name for name in one if ".row_gluon." in name}
    assert one - own and one - own <= rows and len(own) > 1


def test_data_of_other_row_counts_needs_no_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    source_hash.cache_clear()
    before = source_hash("expert_ffn")
    monkeypatch.delitem(sys.modules, "moe_jax.pallas_kernels.experts.row_gluon", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    source_hash.cache_clear()
    assert source_hash("expert_ffn") == before
    source_hash.cache_clear()


@pytest.mark.parametrize("lacks", ["gluon", "capability"])
def test_tuned_data_brings_no_kernel_for_one_row_where_it_cannot_run(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    sizes = (1, 8, 128, 2048, 768, "bfloat16", DEVICE)
    one = dataclasses.replace(tile_for(*sizes[:-1]), ring=7, ahead=5)
    written = {"shape": list(SHAPE), "dtype": "bfloat16", "tokens": 1, "tile": dataclasses.asdict(one)}
    write(tmp_path, DEVICE, "expert_ffn", SOURCE, BUILDER, "2026-01-01", [written])
    assert tuned_tile_for(*sizes, source=SOURCE, folder=tmp_path).tile == one
    if lacks == "gluon":
        monkeypatch.setattr(heuristics, "_has_gluon", lambda: False)
    capability = 80 if lacks == "capability" else 90
    chosen = tuned_tile_for(*sizes, capability=capability, source=SOURCE, folder=tmp_path)
    assert chosen.tile == dataclasses.replace(one, ring=0, ahead=0)
    assert chosen.source.startswith("tuned data")
