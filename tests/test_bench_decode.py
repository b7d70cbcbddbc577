"""The decode bench without a GPU: geometries, weights and floors; the loop with made-up times; and the whole command on
a simulated device."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from backends import assert_close, quick
from bench_doubles import SLOW, FakeNow, FakeTimer
from moe_jax import cli
from moe_jax.bench import cases, decode, decode_cell, decode_engine, decode_jit, decode_model
from moe_jax.bench.cases import Ceilings
from moe_jax.bench.decode_cell import LEAST_STEPS, STEPS, WARM, Measured
from moe_jax.bench.timing import Clock
from moe_jax.cache import SimulatedRuntime, StickyError
from moe_jax.errors import CannotServe

ROOT = Path(__file__).parents[1]
QWEN, TINY = decode_model.config_of("qwen3-30b-a3b"), decode_model.config_of("tiny")
RATES = Ceilings(read_tbs=4.6, matmul_tflops=800.0)
# Of Qwen3-30B-A3B, by hand: matrices and gains of one layer without its experts, one expert, and one of the two tables.
ATTENTION = (32 + 4 + 4) * 128 * 2048 + 2048 * 32 * 128 + 2 * 2048 + 2 * 128
ROUTER, EXPERT, TABLE = 128 * 2048, 3 * 768 * 2048, 151_936 * 2048
CELL = {
    *("mode", "rows", "context", "step_us", "spread_us", "steps", "tokens_s", "floor_us", "ratio", "bytes"),
    *(
        "alone_us",
        "device_us",
        "host_us",
        "checks_us",
        "launch_us",
        "launches",
        "capture_ms",
        "build_s",
        "first_step_s",
    ),
    *("experts", "experts_from", "configuration", "configurations", "backend", "faults"),
}


# Geometries and floors.


def test_the_geometry_is_the_published_one():
    assert (QWEN.layers, QWEN.hidden_size, QWEN.heads, QWEN.kv_heads, QWEN.head_dim) == (48, 2048, 32, 4, 128)
    assert (QWEN.moe_intermediate, QWEN.moe.router.experts, QWEN.moe.router.top_k) == (768, 128, 8)
    assert (QWEN.vocab_size, QWEN.qk_norm, QWEN.tie_embeddings, QWEN.moe.router.renormalize) == (
        *(151_936, "head", False, True),
    )
    assert QWEN.dtype == "bfloat16"
    # 30.5 billion parameters, as its name and model card say.
    whole = 48 * (ATTENTION + ROUTER + 128 * EXPERT) + 2 * TABLE + 2048
    assert round(whole / 1e9, 1) == 30.5
    assert decode_model.weight_bytes(QWEN) == 2 * whole


@pytest.mark.parametrize("name", sorted(set(decode_model.GEOMETRIES) - {"tiny"}))
def test_experts_are_those_of_the_kernel_bench_and_no_token_ends_a_sequence(name):
    config = decode_model.config_of(name)
    router = config.moe.router
    assert (config.hidden_size, config.moe_intermediate, router.experts, router.top_k) == cases.NAMED[name]
    assert config.eos_token_ids == ()


def test_a_step_of_qwen_reads_six_gigabytes_by_hand():
    """At one row, eight experts of each layer: the 6.1 GB that the speed target's floor is made of."""
    active = 2 * (48 * (ATTENTION + ROUTER + 8 * EXPERT) + TABLE + 2048 + 2048)  # the last is the row's embedding
    assert decode_model.read_bytes(QWEN, 1, 0, 8.0) == active
    assert round(active / 1e9, 2) == 6.08
    kv = 48 * 2 * 4 * 128 * 2 * 1024
    assert kv == 100_663_296
    assert decode_model.read_bytes(QWEN, 1, 1024, 8.0) == active + kv
    assert decode_model.read_bytes(QWEN, 16, 1024, 8.0) == active + 16 * kv + 15 * 2 * 2048
    assert decode_model.read_bytes(QWEN, 1, 0, 9.0) - active == 48 * 2 * EXPERT
    cell = decode.record(Measured("c", "b", [2000.0, 2100.0, 2200.0], 1.0), 1, active, RATES)
    assert cell["floor_us"] == pytest.approx(active / 4.6e6) == pytest.approx(1322.55, abs=0.01)
    assert cell["ratio"] == pytest.approx(2100 / cell["floor_us"])
    assert cell["tokens_s"] == pytest.approx(1e6 / 2100)


def test_tied_tables_are_read_whole_and_windows_end_what_is_seen():
    tied = dataclasses.replace(TINY, tie_embeddings=True)
    assert decode_model.read_bytes(tied, 1, 0, 2.0) == decode_model.read_bytes(TINY, 1, 0, 2.0) - 2 * 128
    window = dataclasses.replace(TINY, windows=(100, None))
    both = [decode_model.read_bytes(config, 3, 1000, 2.0) for config in (TINY, window)]
    assert both[0] - both[1] == 3 * 900 * 2 * TINY.kv_heads * TINY.head_dim * 2


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_expected_experts_are_those_of_uniform_routing(rows):
    shape, rng = cases.NAMED["qwen3-30b-a3b"], np.random.default_rng(0)
    drawn = [cases.distinct(cases.routing(rng, rows, shape)[0], shape.experts) for _ in range(300)]
    assert decode_model.expected_experts(rows, QWEN.moe.router) == pytest.approx(np.mean(drawn), rel=0.01)


def test_a_model_is_cut_to_what_fits():
    tokens = 64 * 2048
    assert decode_model.fitting(QWEN, tokens, 140 * 10**9) == QWEN
    need = decode_model.weight_bytes(decode_model.cut(QWEN, 10)) + decode_model.ROOM + 10 * tokens * 2048
    assert decode_model.fitting(QWEN, tokens, need) == decode_model.cut(QWEN, 10)
    assert decode_model.fitting(QWEN, tokens, need - 1).layers == 9
    with pytest.raises(CannotServe, match=r"device memory: got 5\.0 GB, wanted .* one layer at 131072 tokens"):
        decode_model.fitting(QWEN, tokens, 5 * 10**9)
    windowed = dataclasses.replace(TINY, windows=(4, None))
    assert decode_model.cut(windowed, 1).windows == (4,)


# Weights.


@pytest.fixture(scope="module")
def model():
    return decode_model.random_model(TINY, 5, jax.devices()[0])


def test_weights_are_random_distinct_and_scaled(model):
    _, state = nnx.split(model.module)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    assert sum(x.nbytes for _, x in leaves) == decode_model.weight_bytes(TINY)
    for path, array in leaves:
        values = np.asarray(array).astype(np.float32)
        assert array.dtype == jnp.bfloat16
        if values.ndim == 1:
            np.testing.assert_array_equal(values, 1)
            continue
        scale = 1.0 if "'embed'" in str(path) else values.shape[-1] ** -0.5
        assert np.isfinite(values).all()
        assert values.std() == pytest.approx(scale, rel=0.05)
        assert abs(values.mean()) < 0.05 * scale
    # No two experts of any layer are alike.
    banks = np.concatenate([np.asarray(b.mlp.gate_up[...]).astype(np.float32) for b in model.module.blocks])
    assert len(np.unique(banks.reshape(len(banks), -1), axis=0)) == TINY.layers * TINY.moe.router.experts


def test_logits_are_finite_and_rows_choose_different_experts(model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, TINY.vocab_size, (1, 64)), jnp.int32)
    logits = np.asarray(quick(model.module, tokens))
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3
    block = model.module.blocks[-1]
    ids = np.asarray(quick(lambda x: block.mlp.routing(x).ids, model.module.embed[...][tokens[0]]))
    assert np.bincount(ids.ravel(), minlength=8).min() > 0


def test_two_seeds_give_two_models(model):
    same, other = (decode_model.random_model(TINY, seed, jax.devices()[1]) for seed in (5, 6))
    first, again, third = (np.asarray(m.module.head[...]).astype(np.float32) for m in (model, same, other))
    np.testing.assert_array_equal(first, again)
    assert (first != third).mean() > 0.9
    assert same.module.head[...].devices() == {jax.devices()[1]}


# What runs inside jit.


@pytest.mark.parametrize("by", ["jax.lax.ragged_dot", "gather"])
def test_a_stock_mixture_computes_what_ours_does(model, by):
    mixture = model.module.blocks[0].mlp
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 1, 128)), jnp.bfloat16)
    stock = decode_jit.StockMoE(mixture, by)
    assert_close(quick(stock, x), quick(mixture, x), 2e-2)


def test_the_stock_model_has_the_arrays_of_ours(monkeypatch, model):
    """Two copies of 61 GB would not fit."""
    seen = []
    monkeypatch.setattr(decode_jit.generation, "steps", lambda *given: seen.append(given) or iter(()))
    with pytest.raises(StopIteration):
        decode_jit.measure(model, [[1, 2]], Clock(100.0), 12, "gather")
    weights = seen[0][4]
    own = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(nnx.split(model.module)[1])}
    assert {x.unsafe_buffer_pointer() for x in weights.arrays} == own
    assert "StockMoE" in str(weights.structure[0])
    assert "StockMoE" not in str(nnx.split(model.module)[0])


def test_gathering_is_tried_where_it_copies_no_more_than_all_experts():
    router = QWEN.moe.router
    assert decode_jit.stock_ways(16, router) == ("jax.lax.ragged_dot", "gather")
    assert decode_jit.stock_ways(17, router) == ("jax.lax.ragged_dot",)


def test_keys_and_values_are_drawn_each_array_by_itself(model):
    begun = decode_jit.Begun(model.module)
    lengths = jnp.asarray([3, 3], jnp.int32)
    logits, cache = quick(lambda: begun.prefill(jnp.zeros((2, 4), jnp.int32), lengths, 16))
    assert logits.shape == (2, TINY.vocab_size)
    arrays = jax.tree.leaves(cache)
    assert {(x.shape, x.dtype.name) for x in arrays} == {((2, 16, 2, 32), "bfloat16")}
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays) == 2 * TINY.layers
    assert len({np.asarray(x).tobytes() for x in arrays}) == len(arrays)
    for array in arrays:
        values = np.asarray(array).astype(np.float32)
        assert np.isfinite(values).all()
        assert 0.8 < values.std() < 1.2


# The loop, with what modes give made up.


def found(us: float, **more) -> Measured:
    return Measured("c", "b", [us * f for f in (0.9, 1.0, 1.0, 1.0, 1.1)], 1.0, **more)


def run_bench(monkeypatch, ways, modes=decode.MODES, rows=(1, 3), clock=None, kept=None, said=None):
    """``ways(mode, rows)`` are the configurations of a mode."""
    monkeypatch.setattr(decode, "_configurations", lambda mode, _, prompts, *__: ways(mode, len(prompts)))
    return decode.bench(
        *(SimpleNamespace(config=TINY), rows, 9, modes, None, RATES, clock or Clock(100.0, FakeNow())),
        seed=3,
        progress=lambda *what: None if said is None else said.append(what),
        keep=lambda report: None if kept is None else kept.append(json.loads(json.dumps(report))),
    )


def test_every_cell_is_kept_as_soon_as_it_is_there(monkeypatch):
    kept, said = [], []

    def ways(mode, rows):
        counted = {"experts": {1: 2.0, 3: 4.5}[rows], "launches": 20, "capture_ms": 3.0} if mode == "engine" else {}
        yield lambda: found(100.0 * rows, **counted)

    report = run_bench(monkeypatch, ways, kept=kept, said=said)
    assert [len(r["cells"]) for r in kept] == list(range(1, 9))
    assert kept[-1] == json.loads(json.dumps(report))
    assert [(c["mode"], c["rows"]) for c in report["cells"]] == [(m, n) for m in decode.MODES for n in (1, 3)]
    assert all(set(c) == CELL for c in report["cells"])
    # One floor for all modes at a number of rows: what the engine's step read.
    assert {(c["rows"], c["experts"], c["experts_from"]) for c in report["cells"]} == {
        *((1, 2.0, "counted, mode engine"), (3, 4.5, "counted, mode engine")),
    }
    assert report["cells"][0]["bytes"] == decode_model.read_bytes(TINY, 1, 9, 2.0)
    assert report["launches"] == {"1": 20, "3": 20}
    assert report["capture_ms"] == {"1": 3.0, "3": 3.0}
    assert report["stopped"] is None
    assert said[1][:2] == (2, 8)
    assert said[1][2].startswith("engine, 3 rows: 300.0 µs ± ")
    assert said[1][2].endswith("10000 tokens/s")
    rows = decode.rows_of(report)
    assert [row[0] for row in rows[::2]] == list(decode.MODES)
    assert len(decode.markdown(report).splitlines()) == 2 + len(rows)


def test_the_fastest_configuration_counts_and_uniform_routing_where_nothing_was_counted(monkeypatch):
    def ways(mode, rows):
        yield lambda: found(300.0)
        yield lambda: found(50.0)._replace(configuration="fast")
        yield lambda: 1 / 0

    (cell,) = run_bench(monkeypatch, ways, modes=("jit-stock",), rows=(3,))["cells"]
    assert (cell["configuration"], cell["configurations"], cell["step_us"]) == ("fast", 2, 50.0)
    assert cell["faults"] == ["ZeroDivisionError: division by zero"]
    assert (cell["experts"], cell["experts_from"]) == (8 * (1 - 0.75**3), "uniform routing")


def test_the_time_limit_ends_the_run_with_what_is_there(monkeypatch):
    now = FakeNow()

    def ways(mode, rows):
        def measure():
            now.time += 40
            return found(100.0)

        yield measure

    kept = []
    report = run_bench(monkeypatch, ways, clock=Clock(100.0, now), kept=kept)
    assert [c["step_us"] for c in report["cells"]] == [100.0] * 3 + [None] * 5
    assert report["stopped"] == "the time limit of 100 s is over"
    assert [c["faults"] for c in report["cells"][3:]] == [["not measured: out of time"]] * 5
    assert all(set(c) == CELL for c in report["cells"])
    assert len(kept) == 8
    decode.markdown(report)
    # A run whose last cell ends late is complete.
    now.time = 0.0
    assert run_bench(monkeypatch, ways, modes=("jit",), rows=(1,), clock=Clock(30.0, now))["stopped"] is None


def test_a_lost_device_ends_the_run_and_what_was_measured_is_kept(monkeypatch):
    def ways(mode, rows):
        yield lambda: raise_sticky() if mode == "engine-nographs" else found(100.0)

    def raise_sticky():
        raise StickyError("call failed", where="here", got="CUDA_ERROR_ILLEGAL_ADDRESS", wanted="CUDA_SUCCESS")

    kept = []
    with pytest.raises(StickyError):
        run_bench(monkeypatch, ways, kept=kept)
    assert [c["step_us"] for c in kept[-1]["cells"]] == [100.0, 100.0, None]
    assert kept[-1]["stopped"] == "the device context is lost"
    assert "ILLEGAL_ADDRESS" in kept[-1]["cells"][2]["faults"][0]


def test_steps_end_with_the_time_once_there_are_enough():
    now = FakeNow()
    clock = Clock(10.0, now)
    assert decode_cell.goes_on("x", clock, [1.0] * 59, STEPS)
    assert not decode_cell.goes_on("x", clock, [1.0] * 60, STEPS)
    now.time = 10.0
    assert not decode_cell.goes_on("x", clock, [1.0] * LEAST_STEPS, STEPS)
    with pytest.raises(CannotServe, match=r"x: time: got 10 s, all spent, wanted a longer --time-limit"):
        decode_cell.goes_on("x", clock, [1.0] * (LEAST_STEPS - 1), STEPS)
    assert STEPS >= 50


def test_results_that_are_no_numbers_are_refused():
    with pytest.raises(CannotServe, match="got 2 that are not finite"):
        decode_cell.check_finite("x", np.asarray([1.0, np.nan, np.inf]))
    decode_cell.check_finite("x", np.zeros(3, np.float32))


# The engine on a simulated device.


def test_a_call_inside_another_is_not_timed_again():
    """On CUDA `read` waits by `synchronize`: what is summed up must not hold that twice."""

    class Nested:
        def synchronize(self):
            return 1

        def read(self):
            return self.synchronize() + 1

        launch = launch_graph = wait = begin_capture = instantiate = synchronize

    runtime = Nested()
    with decode_engine.watched(runtime) as spent:
        assert runtime.read() == 2
        assert set(spent) == {"read"}
        assert runtime.synchronize() == 1
        assert set(spent) == {"read", "synchronize"}


def test_calls_of_a_runtime_are_timed_and_left_as_they_were():
    runtime = SimulatedRuntime(1 << 12)
    stream = runtime.new_stream()
    address, capsule = runtime.allocate(16)
    with decode_engine.watched(runtime) as spent:
        runtime.read(address, "uint8", (16,), stream)
        capture = runtime.begin_capture(stream)
        runtime.instantiate(runtime.end_capture(capture))
    assert 0 < spent["capture"] < 1
    assert spent["read"] > 0
    assert spent["launch"] == 0
    assert not {"read", "instantiate", "launch_graph"} & set(vars(runtime))
    del capsule


def test_steps_that_are_no_replays_are_refused(model, monkeypatch):
    """An engine that runs direct in silence must not be taken for one with graphs."""
    runtime = SimulatedRuntime(1 << 28)
    runtime.fail("instantiate", times=None)
    prompts = [list(range(9))] * 5  # as many as below, so that references are compiled once
    with pytest.raises(
        CannotServe,
        match=rf"replays: got 0 of {STEPS + decode_engine.ALONE + decode_engine.WATCHED} steps; direct \(.*instantiate",
    ):
        decode_engine.measure(model, prompts, "on", runtime, Clock(1000.0), STEPS)


# The command.


@pytest.fixture
def command(capfd, monkeypatch):
    """Runs the command in this process; gives exit code, stdout and stderr."""
    monkeypatch.setattr("warnings.showwarning", None)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main(["bench", "decode", *map(str, arguments)])
        out, err = capfd.readouterr()
        return stopped.value.code or 0, out, err

    return run


def machine(*devices, driver=None):
    from moe_jax import doctor

    packages = dict.fromkeys(doctor.PACKAGES, "1") | {"jax": "0.11.2", "jaxlib": "0.11.2", "jax-cuda12-plugin": None}
    facts = {"python": "3.12.0", "packages": packages, "driver": driver, "variables": {}, "devices": devices}
    return doctor.Machine(**facts, complaint=None, libraries={})


def test_without_a_gpu_the_command_stops_with_what_was_found_and_wanted(command, monkeypatch):
    from moe_jax import doctor

    cpu = doctor.Device(kind="cpu", platform="cpu", capability=None)
    monkeypatch.setattr("moe_jax.doctor.examine", lambda: machine(cpu))
    code, out, err = command("--shape", "tiny")
    assert (code, out) == (1, "")
    assert err == (
        "error: moe-jax bench decode: no CUDA GPU: got no NVIDIA driver, JAX sees cpu (cpu), wanted an NVIDIA GPU of "
        "compute capability 8.0 or newer that JAX can use\n"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--shape", "deepseek"), "--shape: shape: got 'deepseek', wanted qwen3-30b-a3b, mixtral-8x7b, olmoe-1b-7b"),
        (("--rows", "0"), "--rows: rows: got '0'"),
        (("--rows", "1,65"), "--rows: rows: got 65, wanted at most 64"),
        (("--modes", "engine,graph"), "--modes: modes: got 'engine,graph', wanted some of engine,engine-nographs,jit"),
        (("--modes", ""), "--modes: modes: got ''"),
        (("--context", "2000", "--shape", "tiny"), "--context: context: got 2000, wanted at most 1"),
        (("--json", "/nowhere/x.json"), "--json: folder: got /nowhere/x.json"),
    ],
)
def test_wrong_options_stop_before_anything_is_measured(command, monkeypatch, options, text):
    monkeypatch.setattr("moe_jax.doctor.examine", lambda: pytest.fail("looked at the machine"))
    code, _, err = command(*options)
    assert code == 2
    assert err.startswith(f"error: {text}")


@pytest.mark.slow
def test_the_whole_command_on_a_simulated_device(command, monkeypatch, tmp_path):
    """What runs on a GPU, but for ceilings and runtime: every mode, at a row count that is no power of two."""
    from moe_jax import doctor

    gpu = doctor.Device(kind="NVIDIA H200", platform="gpu", capability="9.0")
    monkeypatch.setattr("moe_jax.doctor.examine", lambda: machine(gpu, driver="580.1"))
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr("jax.devices", lambda *_: [cpu])
    monkeypatch.setattr("moe_jax.bench.timing.CudaTimer", lambda *_: FakeTimer())
    runtime = SimulatedRuntime(1 << 28)
    double = SimpleNamespace(CudaRuntime=lambda device, cubins: runtime)
    monkeypatch.setitem(sys.modules, "moe_jax.cache.cuda_runtime", double)
    path = tmp_path / "report.json"
    code, out, err = command("--shape", "tiny", "--rows", "5", "--context", "9", "--json", path, "--time-limit", "900")
    assert code == 0, err
    report = json.loads(path.read_text())
    assert {"device", "versions", "date", "read_tbs", "matmul_tflops", "launches", "capture_ms"} <= set(report)
    assert (report["shape"], report["layers"], report["layers_published"]) == ("tiny", 2, 2)
    assert (report["context"], report["stopped"]) == (9, None)
    cells = {cell["mode"]: cell for cell in report["cells"]}
    assert list(cells) == list(decode.MODES)
    experts = cells["engine"]["experts"]
    assert 2 < experts <= 8
    for cell in cells.values():
        assert set(cell) == CELL
        assert cell["faults"] == []
        assert cell["steps"] == STEPS
        assert cell["step_us"] > 0
        assert cell["tokens_s"] == pytest.approx(5e6 / cell["step_us"])
        assert cell["floor_us"] == pytest.approx(decode_model.read_bytes(TINY, 5, 9, experts) / (SLOW.read_tbs * 1e6))
        assert cell["ratio"] == pytest.approx(cell["step_us"] / cell["floor_us"])
        assert cell["experts"] == experts
        assert cell["first_step_s"] > 0
    for mode in ("engine", "engine-nographs"):
        cell = cells[mode]
        assert cell["launches"] == report["launches"]["5"] > 10
        assert 0 < cell["checks_us"] < cell["host_us"] < cell["step_us"]
        assert 0 < cell["launch_us"] < cell["step_us"]
        assert cell["device_us"] > 0
        assert cell["alone_us"] > 0
        assert cell["build_s"] > 0
    assert 0 < report["capture_ms"]["5"] == cells["engine"]["capture_ms"] < 1e3 * cells["engine"]["first_step_s"]
    assert cells["engine-nographs"]["capture_ms"] is None
    assert cells["jit"]["backend"] == "grouped_moe: reference"
    assert (cells["jit-stock"]["backend"], cells["jit-stock"]["configurations"]) == ("jax.lax.ragged_dot", 1)
    # Engines are closed: nothing of theirs is left on the device.
    assert (runtime.space.bytes, len(runtime.executables), len(runtime.graphs)) == (0, 0, 0)
    assert out.startswith(decode.markdown(report))
    lines = err.splitlines()
    assert lines[1].startswith("[0/4] tiny: 2 of 2 layers, 0.0 GB")
    assert [line[:5] for line in lines[2:]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert not list(tmp_path.glob("*.part")) and not list(tmp_path.glob("*.tmp"))
    assert decode.positions() == WARM + 2 * STEPS + decode_engine.ALONE + decode_engine.WATCHED + 3


@pytest.mark.gpu
def test_the_command_on_a_gpu(tmp_path):
    path = tmp_path / "report.json"
    options = ["--shape", "tiny", "--rows", "1,5", "--context", "300", "--time-limit", "400", "--json", path]
    command = [sys.executable, "-m", "moe_jax", "bench", "decode", *map(str, options)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    assert [(c["mode"], c["rows"]) for c in report["cells"]] == [(m, n) for m in decode.MODES for n in (1, 5)]
    assert [c["faults"] for c in report["cells"]] == [[]] * 8
    assert all(c["steps"] >= LEAST_STEPS for c in report["cells"])
    assert 1 < report["cells"][0]["step_us"] < 1e5
