"""The bench without a GPU: its arithmetic, its loop with the test's own timer and clock, raw launches, search."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bench_doubles import SLOW, FakeNow, FakeTimer
from moe_jax.bench import cases, contenders, launches, peers_jax, peers_torch, search, timing
from moe_jax.bench.cases import Ceilings, Shape
from moe_jax.bench.contenders import Contender
from moe_jax.bench.layer import MOST_SETS, Layer
from moe_jax.bench.run import bench, steps_for
from moe_jax.bench.timing import LEAST_REPEATS, REPEATS, TIRING_US, Clock, repeats_for
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.errors import CudaError
from moe_jax.pallas_kernels.tuned.lookup import arithmetic_of

ROOT = Path(__file__).parents[1]
TOY = Shape(32, 16, 4, 2)
RATES = Ceilings(read_tbs=4.0, matmul_tflops=800.0)


# The floor, by hand.


def test_the_floor_is_bytes_of_distinct_experts_or_flops():
    qwen = cases.NAMED["qwen3-30b-a3b"]
    assert qwen.expert_bytes == 3 * 2048 * 768 * 2 == 9_437_184
    ids = np.array([[0, 1, 2, 3, 4, 5, 6, 7]], np.int32)
    assert cases.flops(qwen, 1) == 2 * 8 * 3 * 2048 * 768 == 75_497_472
    # 8 experts × 9.437184 MB at 4 TB/s; the flops would take 0.09 µs.
    assert cases.floor_us(qwen, ids, RATES) == pytest.approx(18.874368)
    # A second row with four of the same experts reads four more.
    both = np.concatenate([ids, ids + 4])
    assert cases.floor_us(qwen, both, RATES) == pytest.approx(12 * 9.437184 / 4)
    # 4096 rows: 309.2 GFLOP at 800 TFLOP/s are 386.5 µs, 128 experts' bytes 302.0.
    many = np.tile(np.arange(128, dtype=np.int32).reshape(16, 8), (256, 1))
    assert cases.floor_us(qwen, many, RATES) == pytest.approx(4096 * 75.497472e6 / 800e6, rel=1e-9)
    assert cases.floor_us(qwen, many, RATES) == pytest.approx(386.547, abs=1e-3)


def test_sentinels_read_nothing():
    assert cases.distinct(np.array([[-1, 4], [4, -1]], np.int32), 4) == 0
    assert cases.distinct(np.array([[3, 4], [-1, 3]], np.int32), 4) == 1
    assert cases.floor_us(TOY, np.full((1, 2), -1, np.int32), Ceilings(1.0, math.inf)) == 0


def test_the_floor_of_a_chain_is_the_mean():
    one, two = np.array([[0, 1]], np.int32), np.array([[2, 2]], np.int32)
    each = [cases.floor_us(TOY, ids, RATES) for ids in (one, two)]
    assert each[0] == pytest.approx(2 * each[1])
    assert cases.mean_floor_us(TOY, [one, two], RATES) == pytest.approx(1.5 * each[1])


def test_routings_are_distinct_experts_with_weights_of_sum_one():
    ids, weights = cases.routing(np.random.default_rng(0), 50, Shape(8, 8, 6, 3))
    assert ids.dtype == np.int32
    assert weights.dtype == np.float32
    assert all(len(set(row)) == 3 for row in ids.tolist())
    assert set(ids.ravel().tolist()) == set(range(6))
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    "text", ["", "qwen", "1,2,3", "1,2,3,4", "8,8,4,0", "8,8,4,2,1", "8,8,-4,2", "8,8,4,2.0", "8,8,4,٢"]
)
def test_shapes_that_are_none_are_refused(text):
    with pytest.raises(InvalidArgument, match="--shape"):
        cases.parse_shape(text)


def test_shapes_and_rows_are_read():
    assert cases.parse_shape("mixtral-8x7b") == (4096, 14336, 8, 2)
    assert cases.parse_shape(" 64, 32,8,2") == Shape(64, 32, 8, 2)
    assert cases.name_of(Shape(64, 32, 8, 2)) == "64,32,8,2"
    assert cases.parse_rows("16,1,4,4") == (1, 4, 16)
    assert cases.default_rows(cases.NAMED["deepseek-v3-ep4"])[-1] == 16384
    for text in ("", "0", "1,,2", "x", "131073"):
        with pytest.raises(InvalidArgument, match="--rows"):
            cases.parse_rows(text)


# The loop, with a timer and a clock given.


def run_bench(members, timer=None, cells=((TOY, (1, 3)),), clock=None, kept=None, said=None) -> dict:
    return bench(
        cells,
        members,
        timer or FakeTimer(),
        clock or Clock(1000.0, FakeNow()),
        device=jax.devices("cpu")[0],
        seed=3,
        progress=lambda *what: None if said is None else said.append(what),
        keep=lambda report: None if kept is None else kept.append(json.loads(json.dumps(report))),
    )


def test_the_whole_loop_at_toy_sizes():
    said, kept, timer = [], [], FakeTimer()
    members = [*peers_jax.contenders(), *contenders.back_ends()]
    report = run_bench(members, timer, kept=kept, said=said)
    assert (report["read_tbs"], report["matmul_tflops"]) == SLOW
    assert [(c["op"], c["shape"], c["tokens"]) for c in report["cells"]] == [
        ("ffn", list(TOY), 1),
        ("ffn", list(TOY), 3),
    ]
    for cell in report["cells"]:
        assert cell["cold_l2"]
        assert cell["steps"] == 2
        assert cell["backend"] == "jit: reference"
        assert cell["us"] == pytest.approx(100 / 2)
        assert cell["spread"] == pytest.approx((1.05 - 0.95) / 2 * 100 / 2)
        assert cell["ratio"] == pytest.approx(cell["us"] / cell["floor_us"])
        assert cell["tflops"] == pytest.approx(cases.flops(TOY, cell["tokens"]) / cell["us"] / 1e6)
        assert cell["peers"] == {"jax.lax.ragged_dot": pytest.approx(100 / 2)}
        assert cell["configurations"] == {"jit: reference": 1, "jax.lax.ragged_dot": 2}
        assert "no CUDA device" in cell["declined"]["jit: triton"]
        assert "wanted capability 9.0" in cell["declined"]["ragged_dot_mgpu"]
        assert all(m["error"] < 1e-2 and m["note"] == "a note" for m in cell["measured"])
    # Progress ends at its total, our own back ends come first, and the report was kept after each measurement.
    assert said[0] == (0, len(kept), "read 0.00 TB/s, matmul 800 TFLOP/s")
    assert said[-1][:2] == (len(kept), len(kept))
    assert len(kept) == 2 * len(members)
    assert kept[-1] == json.loads(json.dumps(report))
    assert [w.kind for w in timer.works] == ["jit"] * 6


def one_work(name: str, ours: bool, works) -> Contender:
    def prepare(layer, steps):
        yield from works(layer, steps)

    return Contender(name, ours, prepare)


def right(layer, steps, label="right"):
    """A work that gives the reference's result."""
    (work,) = [w for c in contenders.back_ends() if c.name == "jit: reference" for w in c.prepare(layer, steps)]
    return work._replace(configuration=label)


def test_the_fastest_right_configuration_counts_and_all_are_counted():
    times = {"slow": 300.0, "fast": 50.0, "middle": 100.0, "wrong": 1.0, "unwritten": 1.0}

    def works(layer, steps):
        for label in ("slow", "fast", "middle"):
            yield right(layer, steps, label)
        wrong = right(layer, steps, "wrong")
        yield wrong._replace(result=lambda: wrong.result() * 2)
        empty = right(layer, steps, "unwritten")
        yield empty._replace(result=lambda: empty.result() * jnp.nan)

    timer = FakeTimer(lambda work: times[work.configuration])
    (cell,) = run_bench([one_work("peer", False, works)], timer, cells=((TOY, (2,)),))["cells"]
    (measured,) = cell["measured"]
    assert (measured["configuration"], measured["tried"]) == ("fast", 3)
    assert [f.split(":")[0] for f in measured["faults"]] == ["wrong", "unwritten"]
    assert all("relative error" in fault for fault in measured["faults"])
    assert cell["us"] is None
    assert cell["peers"] == {"peer": pytest.approx(50 / 2)}


def test_a_peer_that_raises_is_recorded_and_the_rest_goes_on():
    def late(layer, steps):
        yield right(layer, steps)
        raise MemoryError("out of memory\nwith details")

    def early(layer, steps):
        raise CannotServe("rows", where="peer", got=3, wanted=4)
        yield

    def broken(layer, steps):
        work = right(layer, steps)
        yield work._replace(result=lambda: 1 / 0)

    members = [one_work("late", False, late), one_work("early", False, early), one_work("broken", True, broken)]
    report = run_bench(members, cells=((TOY, (2,)),))
    (cell,) = report["cells"]
    assert cell["peers"] == {"late": pytest.approx(100 / 2)}
    assert cell["measured"][0]["faults"] == ["MemoryError: out of memory"]
    assert cell["declined"] == {
        "early": "peer: rows: got 3, wanted 4",
        "broken": "right: ZeroDivisionError: division by zero",
    }


def illegal_address():
    raise CudaError("call failed", where="CUDA driver", got="CUDA_ERROR_ILLEGAL_ADDRESS", wanted="CUDA_SUCCESS")


@pytest.mark.parametrize("when", ["preparing", "running"])
def test_a_broken_device_stops_the_bench_and_what_was_measured_is_kept(when):
    def dead(layer, steps):
        if when == "preparing":
            illegal_address()
        yield right(layer, steps)._replace(result=illegal_address)

    kept = []
    good = one_work("good", True, lambda layer, steps: iter([right(layer, steps)]))
    with pytest.raises(CudaError):
        run_bench([good, one_work("dead", False, dead)], cells=((TOY, (2,)),), kept=kept)
    assert kept[-1]["cells"][0]["backend"] == "good"


def test_the_time_is_shared_among_shapes_and_ours_come_first():
    now = FakeNow()

    def us(work):
        now.time += 10.0
        return 100.0

    members = [
        one_work(name, ours, lambda layer, steps: iter([right(layer, steps)]))
        for name, ours in (("peer", False), ("ours", True))
    ]
    other = Shape(32, 16, 8, 2)
    report = run_bench(members, FakeTimer(us), ((TOY, (1, 2)), (other, (1, 2))), Clock(55.0, now))
    measured = [[m["name"] for m in cell["measured"]] for cell in report["cells"]]
    # 27.5 s each: three measurements begin for the first shape; 25 s are left for the second.
    assert measured == [["ours", "peer"], ["ours"], ["ours", "peer"], ["ours"]]
    assert report["cells"][1]["declined"] == {"peer": "not measured: out of time"}
    assert report["stopped"] == "the time limit of 55 s"


def test_chains_are_long_enough_and_take_each_weight_set():
    sets = [None] * 3

    def steps(shape, tokens):
        return steps_for(SimpleNamespace(shape=shape, sets=sets), tokens, RATES)

    mixtral = cases.NAMED["mixtral-8x7b"]
    assert steps(TOY, 1) == 16
    # Two experts of 352 MB at 4 TB/s: 176 µs.
    assert [steps(mixtral, tokens) for tokens in (1, 4, 4096)] == [16, math.ceil(4000 / (8 * 88.08)), 3]


def test_repeats_follow_the_length_of_a_chain():
    assert repeats_for(400) == REPEATS
    assert repeats_for(30_000) == 10
    assert repeats_for(1e9) == LEAST_REPEATS


@pytest.mark.parametrize("us", [50.0, 3000.0])
def test_waiting_for_the_device_is_little_of_a_chains_time(us: float, monkeypatch: pytest.MonkeyPatch):
    found, _ = times_of_calls(us, monkeypatch)
    assert found.us == pytest.approx([us] * len(found.us))


def test_a_long_chain_runs_alone_after_a_pause(monkeypatch: pytest.MonkeyPatch):
    """A second one in a row would find a chip at its power limit, which no replay of a graph does."""
    found, rows = times_of_calls(34000.0, monkeypatch)
    assert set(rows) == {1}
    assert found.us == pytest.approx([34000.0 + 400.0 + 30.0] * len(found.us))


def times_of_calls(us: float, monkeypatch: pytest.MonkeyPatch) -> tuple[timing.Timing, list[int]]:
    """Times, and calls of each row, on a device that takes ``us`` for a call and starts 400 µs after the first of a
    row; the host needs 20 µs a call, and 30 after the last."""
    clock, rows = {"host": 0.0, "device": 0.0}, []

    def run():
        if clock["device"] <= clock["host"]:
            clock["device"] = clock["host"] + 400.0
            rows.append(0)
        rows[-1] += 1
        clock["host"] += 20.0
        clock["device"] += us

    def wait(_):
        clock["host"] = max(clock["host"], clock["device"]) + 30.0

    monkeypatch.setattr(timing.jax, "block_until_ready", wait)
    monkeypatch.setattr(timing.time, "sleep", lambda _: None)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock["host"] * 1e-6)
    found = timing.time_calls(contenders.Work("", "jit", run, run))
    assert found.note is None and len(found.us) >= LEAST_REPEATS
    return found, rows


def test_long_chains_pause_as_long_as_they_run(monkeypatch: pytest.MonkeyPatch):
    pauses = []
    monkeypatch.setattr(timing.time, "sleep", pauses.append)
    for us in (100.0, TIRING_US - 1, TIRING_US, 36_000.0):
        timing.rest(us)
    assert pauses == [TIRING_US / 1e6, 0.036]


def test_weight_sets_leave_the_cache_before_they_come_again():
    layer = Layer(TOY, np.random.default_rng(0), jax.devices("cpu")[0], l2_bytes=10_000)
    used = TOY.top_k * TOY.expert_bytes
    assert layer.cold
    assert (len(layer.sets) - 1) * used >= 4 * 10_000 > (len(layer.sets) - 2) * used
    first, second = (np.asarray(layer.sets[i].down, np.float32) for i in (0, 1))
    assert not np.array_equal(first, second)
    tiny = Layer(TOY, np.random.default_rng(0), jax.devices("cpu")[0], l2_bytes=10**6)
    assert (len(tiny.sets), tiny.cold) == (MOST_SETS, False)
    steps = layer.steps(np.random.default_rng(1), 3, 2)
    assert not np.array_equal(np.asarray(steps[0].x, np.float32), np.asarray(steps[1].x, np.float32))


# Raw launches, with kernels that compute the reference in the memory they are given.


class FakeKernel:
    """Stands for a loaded kernel: reads and writes host memory at the addresses of a launch."""

    def __init__(self, spec, compiled):
        self.spec, self.compiled = spec, compiled

    def launch(self, stream, addresses):
        stream.launched += 1
        arrays = [_at(address, a) for address, a in zip(addresses, self.spec.arguments, strict=True)]
        given = [array for array, a in zip(arrays, self.spec.arguments, strict=True) if a.role == "in"]
        outs = self.spec.reference(*[jnp.array(array, copy=True) for array in given])
        written = [array for array, a in zip(arrays, self.spec.arguments, strict=True) if a.role == "out"]
        for array, out in zip(written, outs if isinstance(outs, tuple) else (outs,), strict=True):
            array[...] = np.asarray(out)


def _at(address: int, argument) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, argument.dtype, argument.dtype))
    size = math.prod(argument.shape) * dtype.itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype).reshape(argument.shape)


@pytest.mark.parametrize(("tokens", "kernels", "configurations"), [(1, 1, 2), (3, 2, 2), (65, 4, 1), (20_000, 6, 1)])
def test_raw_launches_give_the_layers_result_from_the_addresses_they_get(monkeypatch, tokens, kernels, configurations):
    pytest.importorskip("triton")
    stream = SimpleNamespace(launched=0, sync=lambda: None)
    monkeypatch.setattr("cuda.core.Device", lambda: SimpleNamespace(create_stream=lambda: stream))
    monkeypatch.setattr("moe_jax.pallas_kernels.launcher.load_kernel", FakeKernel)
    monkeypatch.setattr(launches, "kernel_of", lambda *_: SimpleNamespace(builder="triton 9"))
    (cell,) = run_bench([launches.contender(None, 90)], cells=((TOY, (tokens,)),))["cells"]
    assert not cell["declined"]
    assert (cell["backend"], cell["builder"]) == ("device graph", "triton 9")
    assert cell["configurations"] == {"device graph": configurations}
    assert cell["measured"][0]["error"] < 1e-2
    assert "heuristic: no tuned data for cpu" in cell["measured"][0]["configuration"]
    # Each configuration runs for its result, and once more by this test's timer.
    assert stream.launched == configurations * 2 * cell["steps"] * kernels


def test_cubins_of_another_source_are_refused(tmp_path):
    pytest.importorskip("triton")
    tile, _ = launches.shipped_tile(TOY, 1, "cpu", 90)
    (launch,) = launches.layer_launches(TOY, 1, tile)
    with pytest.raises(InvalidArgument, match="no cubin"):
        launches.kernel_of(launch.spec, tmp_path, 90)


def test_blocks_of_the_two_launch_peer_hold_each_pair_once():
    ids, _ = cases.routing(np.random.default_rng(2), 37, Shape(8, 8, 11, 3))
    expert, pair = peers_torch.blocks(ids, 11, 16)
    flat = ids.ravel()
    assert sorted(pair[pair < len(flat)].tolist()) == list(range(len(flat)))
    for owner, pairs in zip(expert, pair, strict=True):
        real = pairs[pairs < len(flat)]
        assert len(real)
        assert (flat[real] == owner).all()
        assert (np.diff(real) > 0).all()


# Search.


def test_a_candidate_must_win_by_more_than_the_spread():
    times = {"base": (10.0, 0.5), "noise": (9.2, 0.5), "better": (8.0, 0.5), "best": (6.0, 0.5), "broken": None}

    def measure(name):
        if times[name] is None:
            raise CannotServe("shared memory", where="x", got=1, wanted=2)
        return times[name]

    outcome = search.search(["base", "noise"], measure, Clock(9.0, FakeNow()))
    assert outcome.best == search.Trial("base", 10.0, 0.5)
    outcome = search.search(times, measure, Clock(9.0, FakeNow()))
    assert outcome.best == search.Trial("best", 6.0, 0.5)
    assert outcome.faults == [("broken", "x: shared memory: got 1, wanted 2")]
    assert outcome.complete


def test_C66_a_key_gets_the_same_tile_whatever_was_tuned_before():
    tables = {"A": {1: 5.0, 2: 3.0}, "B": {1: 2.0, 2: 9.0}}

    def tuned(order):
        return {
            key: search.search([1, 2], lambda c, key=key: (tables[key][c], 0.1), Clock(9.0, FakeNow())).best
            for key in order
        }

    assert tuned("AB") == tuned("BA")
    assert (tuned("AB")["A"].candidate, tuned("AB")["B"].candidate) == (2, 1)


def test_search_stops_with_the_time():
    outcome = search.search(range(100), lambda c: (10.0 - c, 0.1), Clock(5.5, FakeNow(1.0)))
    assert len(outcome.trials) == 5
    assert not outcome.complete
    assert search.search([1], lambda c: (1.0, 0.1), Clock(0.0, FakeNow(1.0))).best is None


def test_one_arithmetic_is_chosen_for_all_row_counts():
    def trials(*us):
        return {rows: search.Trial(None, value, 0.1) for rows, value in zip((1, 16), us, strict=False)}

    floors = {1: 10.0, 16: 100.0}
    found = {"a": trials(15.0, 110.0), "b": trials(12.0, 125.0), "partly": trials(10.0)}
    assert search.best_common(found, floors) == "b"  # 1.2 + 1.25 against 1.5 + 1.1, though a saves more µs
    assert search.best_common({"partly": trials(10.0)}, floors) is None


@pytest.fixture
def tune(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import tune

    return tune


def test_tuning_gives_entries_that_the_loader_takes(tune, tmp_path):
    """At toy sizes, with the reference in place of the kernel and times that prefer one arithmetic."""
    from moe_jax.pallas_kernels.tuned import tuned_tile_for
    from moe_jax.pallas_kernels.tuned.store import write

    def us(work):
        tile = work.configuration
        return (50.0 if tile.block_m == 128 and tile.num_warps == 4 else 100.0) + tile.lag

    chains = {}

    def work(layer, steps, launch):
        if launch.tokens not in chains:  # one program for all tiles
            chains[launch.tokens] = right(layer, steps)
        return chains[launch.tokens]._replace(configuration=launch.tile)

    made = tune.Bench(FakeTimer(us), jax.devices("cpu")[0], seed=0)
    entries = tune.tune_experts(made, TOY, (1, 4), Clock(1e6, FakeNow()), work)
    assert [(e["tokens"], e["tile"]["block_m"]) for e in entries] == [(1, 128), (4, 128)]
    assert len(made.trials) > 40
    write(tmp_path, "NVIDIA H200", "expert_ffn", "a" * 64, "triton 3.9.0", "2026-01-01", entries)
    hidden, inner, experts, k = TOY
    tile, source = tuned_tile_for(
        3, k, experts, hidden, inner, "bfloat16", "NVIDIA H200", source="a" * 64, folder=tmp_path
    )
    assert source.startswith("tuned data for NVIDIA H200, 4 rows")
    assert (tile.block_m, tile.num_warps, tile.lag) == (
        128,
        4,
        min(t["tile"]["lag"] for t in made.trials if t["tokens"] == 4),
    )


def test_tuning_of_prefill_also_says_which_back_end_is_faster(tune):
    from dataclasses import dataclass

    from moe_jax.pallas_kernels.grouped_moe import reference

    @dataclass(frozen=True)
    class AnyTile:
        size: int

    def ffn(x, routing, weights, config, *, tile):
        return reference.grouped_moe(x, routing, weights, config)

    module = SimpleNamespace(ffn=ffn)
    seen = {}

    def us(work):
        size = int(work.configuration.split("=")[1].rstrip(")"))
        return seen.setdefault(size, 100.0 - size)

    made = tune.Bench(FakeTimer(us), jax.devices("cpu")[0], seed=0)
    modules = {
        "prefill_triton": (module, lambda shape, tokens: [AnyTile(1), AnyTile(30)]),
        "prefill_mosaic": (module, lambda shape, tokens: [AnyTile(2), AnyTile(60)]),
    }
    found = tune.tune_prefill(made, TOY, (5,), Clock(1e6, FakeNow()), modules)
    assert {op: entries[0]["tile"] for op, entries in found.items()} == {
        "prefill_triton": {"size": 30},
        "prefill_mosaic": {"size": 60},
        "prefill": {"backend": "mosaic"},
    }


def test_candidates_start_with_the_heuristic_and_fit_their_arithmetic(tune):
    import experts_cases as listed

    for shape in listed.default_shapes():
        for tokens in listed.BUCKETS:
            for number, value in enumerate(listed.arithmetics(shape)):
                tiles = listed.tiles(shape, tokens, value)
                assert len(tiles) == len(set(tiles)) > 4
                wanted = arithmetic_of("expert_ffn", value._asdict())
                assert all(arithmetic_of("expert_ffn", dataclasses.asdict(tile)) == wanted for tile in tiles)
                if number == 0:
                    assert tiles[0] == listed.heuristic(shape, tokens)
            for launch in (listed.searched(shape, tokens)[-1], *listed.shipped(shape, tokens, "NVIDIA H200", 90)):
                assert len(launch.specs()) == (1 if tokens == 1 else 2)
