"""The CUDA runtime over a fake driver: capture beside other threads, memory, kernels, the device, profiles."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

pytest.importorskip("cuda.core")

from cuda.bindings import driver as real_driver
from fake_driver import FakeDriver, doubling, fake_runtime, install, memory, placed, recorded
from test_simulated import served
from toy_step import World

from interrupts import interrupted, named, places
from moe_jax.cache import cuda_runtime
from moe_jax.cache.cuda_runtime import STICKY, CudaRuntime, CudaStream
from moe_jax.cache.runtime import StickyError, no_collection
from moe_jax.pallas_kernels import compiled
from moe_jax.pallas_kernels.embed import embed_spec
from moe_jax.pallas_kernels.errors import CannotServe, CudaError, InvalidArgument
from moe_jax.pallas_kernels.spec import KernelSpec

ROWS = 2
COMPILE = compiled.compile_spec


@pytest.fixture
def made(monkeypatch):
    return fake_runtime(monkeypatch)


def test_every_method_of_a_runtime_is_there_and_described():
    assert served(CudaRuntime)


# -- Capture and threads ----------------------------------------------------------------------------------------------


def test_the_capturing_thread_may_only_record_on_the_stream(made):
    runtime, fake = made
    stream = runtime.new_stream()
    (x, _x), (y, _y) = placed(runtime, stream, np.ones(4, np.float32), np.zeros(4, np.float32))
    loaded, executable = runtime.load(doubling()), runtime.instantiate(recorded(runtime, stream))
    with no_collection():
        capture = runtime.begin_capture(stream)
        for call in (
            lambda: runtime.launch(loaded, (x, y), stream),
            lambda: runtime.copy(y, x, 16, stream),
            lambda: runtime.write(x, np.zeros(4, np.float32), stream),
            lambda: runtime.read(x, "float32", (4,), stream),
            lambda: runtime.synchronize(stream),
            lambda: runtime.record_event(stream),
            lambda: runtime.launch_graph(executable, stream),
            lambda: runtime.upload(executable, stream),
            lambda: runtime.begin_capture(stream),
        ):
            with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"):
                call()
        runtime.launch(loaded, (x, y), capture)
        runtime.copy(x, y, 8, capture)
        graph = runtime.end_capture(capture)
    assert len(fake.graphs[graph.handle]) == 2
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"):
        runtime.launch(loaded, (x, y), capture)
    with pytest.raises(CudaError, match="CUDA_ERROR_STREAM_CAPTURE_UNMATCHED"):
        runtime.end_capture(capture)
    runtime.launch(loaded, (x, y), stream)
    assert runtime.read(y, "float32", (4,), stream).tolist() == [2, 2, 2, 2]


def test_another_threads_work_on_the_stream_waits_for_the_capture(made):
    runtime, fake = made
    stream, other = runtime.new_stream(), runtime.new_stream()
    (x, _x), (y, _y) = placed(runtime, stream, np.zeros(4, np.float32), np.zeros(4, np.float32))
    order = []

    def writes() -> None:
        runtime.write(y, np.ones(4, np.float32), other)
        order.append("other stream")
        runtime.write(x, np.ones(4, np.float32), stream)
        order.append("same stream")

    thread = threading.Thread(target=writes, daemon=True)
    with no_collection():
        capture = runtime.begin_capture(stream)
        thread.start()
        for _ in range(1000):
            if order:
                break
            thread.join(0.005)
        thread.join(0.02)
        order.append("end")
        runtime.end_capture(capture)
    thread.join(5)
    assert order == ["other stream", "end", "same stream"]
    assert fake.calls.count("cuMemcpyHtoDAsync") == 4 and runtime.read(x, "float32", (4,), stream).all()


@pytest.mark.parametrize("error", [None, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "CUDA_ERROR_ILLEGAL_ADDRESS"])
def test_a_capture_that_is_abandoned_leaves_a_stream_that_works(made, error):
    runtime, fake = made
    stream = runtime.new_stream()
    with no_collection():
        runtime.begin_capture(stream)
        if error:
            fake.fail("cuStreamEndCapture", error)
        with pytest.raises(StickyError) if error in STICKY else contextlib.nullcontext():
            runtime.abandon_capture(stream)
    runtime.abandon_capture(stream)  # there is nothing to abandon
    assert not fake.graphs and stream.capture is None
    if error not in STICKY:
        another_thread_may_use(runtime, stream)


def another_thread_may_use(runtime: CudaRuntime, stream: CudaStream) -> None:
    """No recording has kept it."""
    thread = threading.Thread(target=runtime.synchronize, args=(stream,), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "the stream is kept for ever"


RECORDING = (
    *(CudaRuntime.begin_capture, CudaRuntime.end_capture, CudaRuntime.abandon_capture, CudaRuntime._end),
    *(CudaRuntime._usable, CudaStream.end_recording),
)


@pytest.mark.parametrize("fails", ["nothing", "begin", "record", "end"])
@pytest.mark.parametrize(("function", "line"), places(*RECORDING), ids=named)
def test_a_recording_that_was_interrupted_keeps_its_stream_from_nobody(made, function, line, fails):
    """Whoever was interrupted abandons it; again, if that was interrupted."""
    runtime, fake = made
    stream = runtime.new_stream()
    calls = {"begin": "cuStreamBeginCapture", "record": "cuMemcpyDtoDAsync", "end": "cuStreamEndCapture"}
    if fails != "nothing":
        fake.fail(calls[fails])

    def record() -> None:
        with no_collection():
            try:
                capture = runtime.begin_capture(stream)
                runtime.copy(4096, 8192, 16, capture)
                runtime.end_capture(capture)
            except BaseException:
                runtime.abandon_capture(stream)
                raise

    with contextlib.suppress(CudaError):
        interrupted(function, line, record)
    fake.heal()
    with no_collection():
        runtime.abandon_capture(stream)
    assert stream.capture is None and fake.stream(stream.handle).nodes is None
    another_thread_may_use(runtime, stream)
    recorded(runtime, stream)


@pytest.mark.parametrize(("function", "line"), places(CudaRuntime._end, CudaStream.end_recording), ids=named)
def test_who_waits_for_a_recording_whose_end_was_interrupted_goes_on(made, function, line):
    runtime, _ = made
    stream = runtime.new_stream()
    with no_collection():
        capture = runtime.begin_capture(stream)
        thread = threading.Thread(target=runtime.synchronize, args=(stream,), daemon=True)
        thread.start()
        while not stream._ended._waiters:
            time.sleep(0.001)
        interrupted(function, line, lambda: runtime.end_capture(capture))
        runtime.abandon_capture(stream)
    thread.join(5)
    assert not thread.is_alive()


def test_an_abandoned_recording_is_ones_own(made):
    """Who was interrupted while it waited for another thread's has begun none."""
    runtime, fake = made
    stream, begun, go_on, ended = runtime.new_stream(), threading.Event(), threading.Event(), []

    def record() -> None:
        capture = runtime.begin_capture(stream)
        begun.set()
        assert go_on.wait(5)
        ended.append(runtime.end_capture(capture))

    thread = threading.Thread(target=record, daemon=True)
    with no_collection():
        thread.start()
        assert begun.wait(5)
        runtime.abandon_capture(stream)
        go_on.set()
        thread.join(5)
    assert len(ended) == len(fake.graphs) == 1


def test_the_context_is_current_in_every_thread_whatever_others_left_there(made):
    runtime, fake = made
    stream = runtime.new_stream()
    fake.current[threading.get_ident()] = 5
    runtime.synchronize(stream)
    errors = []

    def elsewhere() -> None:
        try:
            runtime.wait(runtime.record_event(runtime.new_stream()))
            runtime.load(doubling())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert errors == []


def test_two_engines_in_two_threads_share_a_runtime(made):
    runtime, fake = made
    errors = []

    def steps(rows: int) -> None:
        try:
            world = World(runtime=runtime, mode="on")
            world.warm(rows)
            for _ in range(5):
                assert world.step(rows).kind == "replay"
            world.graphs.close()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=steps, args=(rows,)) for rows in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and gc.isenabled()
    assert not fake.executables and not fake.graphs


# -- Memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, cuda_runtime.COMPILED_BYTES])
def test_memory_is_that_of_a_jax_array_and_its_capsule_keeps_it(made, size):
    runtime, _ = made
    address, capsule = runtime.allocate(size)
    assert address % 16 == 0 and type(capsule).__name__ == "PyCapsule"
    memory(address, max(size, 16))[:] = 7
    gc.collect()
    others = [runtime.allocate(size) for _ in range(8)]
    assert address not in [other for other, _ in others] and (memory(address, max(size, 16)) == 7).all()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    assert ctypes.c_void_p.from_address(pointer(capsule, b"dltensor")).value == address


def test_an_array_is_held_where_it_is(made):
    runtime, _ = made
    array = jnp.arange(12, dtype=jnp.bfloat16) * 2
    address, capsule = runtime.hold(array)
    wanted = np.asarray(array).tobytes()
    array.delete()
    assert memory(address, 24).tobytes() == wanted and capsule is not None


def test_an_array_that_cannot_be_held_is_refused_by_its_name(made, monkeypatch):
    runtime, _ = made
    first, second = jax.devices()[:2]
    array = jnp.zeros((4, 8))
    gone, mesh = jnp.copy(array), jax.sharding.Mesh(np.asarray([first, second]), ("x",))
    gone.delete()
    columns = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(first))
    for given, message in [
        (np.zeros(4, np.float32), "0.qkv: got ndarray, wanted a jax.Array"),
        (gone, "0.qkv: got a deleted array"),
        (jax.device_put(array, second), "device of 0.qkv: got cpu:1, wanted cpu:0 and no other"),
        (jax.device_put(array, jax.NamedSharding(mesh, jax.P("x"))), "device of 0.qkv: got cpu:0, cpu:1, wanted cpu:0"),
        (jax.device_put(array, columns), r"layout of 0.qkv: got axes in order \(1, 0\), wanted row-major"),
    ]:
        with pytest.raises(InvalidArgument, match=rf"CudaRuntime.hold: {message}"):
            runtime.hold(given, "0.qkv")
    with pytest.raises(InvalidArgument, match="device of the array: got cpu:1"):
        runtime.hold(jax.device_put(array, second))
    # XLA on the host takes no memory of others that begins anywhere.
    monkeypatch.setattr(cuda_runtime, "ALIGNMENT", 1 << 30)
    with pytest.raises(InvalidArgument, match=r"CudaRuntime.hold: address of 0.qkv: got 0x.*, wanted a multiple of"):
        runtime.hold(array, "0.qkv")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_values_may_change_after_a_write_and_what_is_read_never_does(made, dtype):
    runtime, _ = made
    stream = runtime.new_stream()
    values = np.arange(24).reshape(4, 6).astype(dtype).T
    wanted = values.copy()
    ((address, _capsule),) = placed(runtime, stream, values)
    values[:] = 0
    first = runtime.read(address, dtype, (6, 4), stream)
    np.testing.assert_array_equal(first, wanted)
    runtime.write(address, np.zeros((6, 4), dtype), stream)
    runtime.synchronize(stream)
    np.testing.assert_array_equal(first, wanted)
    assert runtime.read(address, dtype, (0, 4), stream).shape == (0, 4)


def test_large_values_are_waited_for_instead_of_copied(made):
    runtime, fake = made
    stream = runtime.new_stream()
    address, _capsule = runtime.allocate(cuda_runtime.WAITED_BYTES)
    fake.calls.clear()
    runtime.write(address, np.ones(cuda_runtime.WAITED_BYTES - 1, np.uint8), stream)
    assert fake.calls == ["cuMemcpyHtoDAsync"]
    runtime.write(address, np.ones(cuda_runtime.WAITED_BYTES, np.uint8), stream)
    assert fake.calls[1:] == ["cuMemcpyHtoDAsync", "cuStreamSynchronize"]


# -- Kernels, device and profiles -------------------------------------------------------------------------------------


def test_a_kernel_is_loaded_once_for_all_threads_and_goes_with_its_last_owner(made):
    runtime, fake = made
    loaded = []
    threads = [threading.Thread(target=lambda: loaded.append(runtime.load(doubling()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(loaded) == 4 and len({id(kernel) for kernel in loaded}) == 1
    assert fake.calls.count("cuKernelGetFunction") == 1
    loaded.clear()
    gc.collect()
    runtime.load(doubling())
    assert fake.calls.count("cuKernelGetFunction") == 2


def test_a_kernel_that_takes_scratch_of_triton_is_refused(made, monkeypatch):
    runtime, fake = made
    monkeypatch.setattr(compiled, "compile_spec", lambda spec, capability: fake.compile(spec, capability, scratch=8))
    with pytest.raises(CannotServe, match=r"load\('_double'\): kernel: got \(8, 0\) bytes"):
        runtime.load(doubling())


def test_a_kernel_that_does_not_load_says_why(made):
    runtime, fake = made
    fake.fail("cuFuncSetAttribute", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(CudaError, match=r"CudaRuntime.load: .*CUDA_ERROR_OUT_OF_MEMORY"):
        runtime.load(doubling())
    runtime.load(doubling())


def kernels(count: int) -> list[KernelSpec]:
    return [embed_spec(rows, 10, 8, dtype="float32") for rows in range(1, count + 1)]


def test_kernels_are_compiled_several_at_a_time_each_once_and_loaded_without_a_compiler(made, monkeypatch):
    runtime, fake = made
    compiled_keys, together = [], threading.Barrier(4, timeout=60)

    def compile_spec(spec, capability):
        together.wait()  # four are at it, or this fails
        compiled_keys.append((spec.key, capability))
        return fake.compile(spec, capability)

    monkeypatch.setattr(cuda_runtime, "_cpus", lambda: 4)
    monkeypatch.setattr(compiled, "compile_spec", compile_spec)
    reports, specs = [], kernels(8)
    runtime.prepare([*specs, *kernels(8)], lambda *counts: reports.append((*counts, threading.current_thread())))
    assert sorted(compiled_keys) == sorted((spec.key, 90) for spec in specs)
    assert reports == [(done, 8, threading.current_thread()) for done in range(9)]
    monkeypatch.setattr(compiled, "compile_spec", None)
    assert [runtime.load(spec).spec for spec in specs] == specs
    runtime.prepare(kernels(8), lambda *counts: reports.append(counts))
    assert len(reports) == 9


def test_a_kernel_that_does_not_compile_ends_the_others(made, monkeypatch):
    runtime, fake = made
    seen, specs = [], kernels(40)

    def compile_spec(spec, capability):
        seen.append(spec.key)
        time.sleep(0.01)
        if spec.key == specs[1].key:
            raise CannotServe("kernel", where="test", got="one", wanted="another")
        return fake.compile(spec, capability)

    monkeypatch.setattr(cuda_runtime, "_cpus", lambda: 1)
    monkeypatch.setattr(compiled, "compile_spec", compile_spec)
    with pytest.raises(CannotServe, match="test: kernel: got one"):
        runtime.prepare(specs)
    assert len(seen) < 40 and not any("moe_jax" in thread.name for thread in threading.enumerate())
    monkeypatch.setattr(compiled, "compile_spec", fake.compile)
    runtime.prepare(specs)
    assert len(runtime._compiled) == 40


def test_tritons_compiler_gives_the_same_kernels_to_threads(made, monkeypatch, tmp_path):
    pytest.importorskip("triton")
    monkeypatch.setattr(compiled, "compile_spec", COMPILE)
    monkeypatch.setattr(cuda_runtime, "_cpus", lambda: 4)
    found = []
    for name, runtime in (("one by one", CudaRuntime()), ("together", CudaRuntime())):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name))
        if name == "together":
            runtime.prepare(kernels(6))
            assert set(runtime._compiled) == {spec.key for spec in kernels(6)}
        found.append([runtime._cubin(spec).cubin for spec in kernels(6)])
        # Triton's own cache has them too.
        assert len(list((tmp_path / name).rglob("*.cubin"))) >= len(set(found[-1]))
    assert found[0] == found[1]


def test_kernels_may_come_from_a_folder_alone(monkeypatch, tmp_path):
    fake = install(monkeypatch)
    small, other = embed_spec(2, 10, 8, dtype="float32"), embed_spec(3, 10, 8, dtype="float32")
    built = fake.compile(small, 90)
    compiled.save(tmp_path, [type(built)(**{**vars(built), "source_hash": small.source_hash, "builder": "triton 9"})])
    monkeypatch.setattr(compiled, "compile_spec", None)
    runtime = CudaRuntime(cubins=tmp_path)
    assert runtime.compiler == "triton 9, sm_90"
    assert runtime.load(small).spec is small
    with pytest.raises(InvalidArgument, match=r"no cubin.*embed for sm_90"):
        runtime.load(other)


def test_the_compiler_is_part_of_the_runtime(made):
    import triton

    assert made[0].compiler == f"triton {triton.__version__}, sm_90" and not made[0].simulated


def test_devices_that_cannot_serve_are_refused(monkeypatch):
    with pytest.raises(CannotServe, match=r"CudaRuntime: device: .*cpu.*a CUDA device"):
        CudaRuntime(jax.devices()[0])
    if jax.default_backend() == "cpu":
        with pytest.raises(CannotServe, match=r"CudaRuntime: device: .*cpu.*a CUDA device"):
            CudaRuntime()
    monkeypatch.setattr(FakeDriver, "capability", (7, 5))
    install(monkeypatch)
    with pytest.raises(CannotServe, match=r"sm_75, wanted sm_80 or newer"):
        CudaRuntime()


def test_ranges_are_nvtx_where_it_is_installed(monkeypatch):
    seen = []

    @contextlib.contextmanager
    def entered(name, domain):
        seen.append((domain, name))
        yield

    class Annotate:
        def __init__(self, name, domain):
            self.label = domain, name

        def __enter__(self):
            seen.append(self.label)

        def __exit__(self, *_):
            seen.append("end")

    module = types.ModuleType("nvtx")
    module.annotate = Annotate
    monkeypatch.setitem(sys.modules, "nvtx", module)
    module.__spec__ = types.SimpleNamespace()
    world = World(runtime=fake_runtime(monkeypatch)[0], mode="on")
    world.warm(ROWS)
    names = ("direct", "capture", "replay")
    ranges = [f"moe_jax: {range_}" for name in names for range_ in ("plan", name)]
    assert seen == [entry for name in ranges for entry in (("moe_jax", name), "end")]


def test_ranges_cost_nothing_without_nvtx(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setattr(cuda_runtime.importlib.util, "find_spec", lambda name: None)
    runtime, _ = fake_runtime(monkeypatch)
    with runtime.range("a"), runtime.range("a"):
        assert runtime.range("a") is runtime.range("b")


def test_every_sticky_name_is_one_of_the_drivers():
    known = set(real_driver.CUresult.__members__)
    assert {"CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED"} <= STICKY & known
    # Names that bindings older than these do not have.
    assert STICKY - known <= {"CUDA_ERROR_CONTAINED", "CUDA_ERROR_TENSOR_MEMORY_LEAK"}
