"""A stand-in for Triton's Gluon on NumPy: as much of it as `experts.row_gluon` uses, whose own text it runs.

It shows a program's structure, not its bits, and is strict where a GPU is not:

* An asynchronous copy lands when its group must have, and not before. From its start until then its place holds NaN,
  so a product that reads too early gives NaN. What a mask leaves out is NaN for ever.
* An asynchronous product reads its operands when it begins and again when it must be done: if they differ, it is NaN.
* Programs take turns in a random order at every atomic operation and volatile load; those that are not resident begin
  when others have ended. If all only look and nothing changes, that is an error.
* An access out of bounds, a product without a fence behind the last writes, and a copy nobody waited for are errors.
"""

from __future__ import annotations
import __future__

import ast
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from moe_jax.pallas_kernels.experts import heuristics
from moe_jax.pallas_kernels.spec import KernelSpec

FOLDER = Path(heuristics.__file__).parent
MOST_LOOKS = 5_000
"""Volatile loads in a row, of all programs, after which nothing is expected to change any more."""


def run_row(
    spec: KernelSpec,
    buffers: Mapping[str, np.ndarray],
    *,
    resident: int | None = None,
    seed: int = 0,
    text: str | None = None,
) -> None:
    """Run a launch of `experts.row_gluon` on arrays, in place.

    Args:
        buffers: a contiguous array for each argument name.
        resident: programs that run at the same time; None: all.
        seed: of the order in which they take turns.
        text: of the module, where it is not the one in the tree.

    Raises:
        AssertionError: one of the errors above.
    """
    device = _Device(spec.grid[0], resident or spec.grid[0], np.random.default_rng(seed))
    kernel = _kernel(device, row_text() if text is None else text)
    pointers = {a.name: Pointer(buffers[a.name].reshape(-1), np.int64(0)) for a in spec.arguments}
    assert all(np.shares_memory(pointers[name].array, buffers[name]) for name in pointers)
    device.launch(lambda: kernel(**pointers, **dict(spec.constexprs)))


def row_text() -> str:
    return (FOLDER / "row_gluon.py").read_text()


def _kernel(device: _Device, text: str) -> Callable[..., None]:
    """The kernel as a plain function: what the module imports is the stand-in's."""
    jit = SimpleNamespace(jit=lambda function: function)
    nodes = ast.parse((FOLDER / "triton.py").read_text()).body
    shared = ("_activate", "gate_lines")
    written_once = _executed(
        [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name in shared],
        {"tl": _triton_language(), "triton": jit},
    )
    names = {
        "gl": _gluon_language(device),
        "tl": _triton_language(),
        "gluon": jit,
        "heuristics": heuristics,
        **{name: SimpleNamespace(fn=written_once[name]) for name in shared},
        "async_copy": SimpleNamespace(
            async_load=device.copy, commit_group=device.commit_group, wait_group=device.wait_group
        ),
        "fence_async_shared": device.fence,
        "warpgroup_mma": device.multiply,
        "warpgroup_mma_wait": device.multiply_wait,
        "gdc_launch_dependents": lambda: None,
        "gdc_wait": lambda: None,
    }
    body = [node for node in ast.parse(text).body if not isinstance(node, ast.Import | ast.ImportFrom)]
    return _executed(body, names)["expert_ffn_row"]


def _executed(nodes: list[Any], names: dict[str, Any]) -> dict[str, Any]:
    flag = __future__.annotations.compiler_flag
    exec(compile(ast.Module(nodes, []), "stand-in", "exec", flag, dont_inherit=True), names)
    return names


class Tensor(np.lib.mixins.NDArrayOperatorsMixin):
    """A block of values. Layouts are not kept."""

    type = SimpleNamespace(layout=None)

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, out: Any = None, **options: Any) -> Tensor:
        # `a += b` makes a new value, as in Triton.
        return Tensor(getattr(ufunc, method)(*(_array(value) for value in inputs), **options))

    def __bool__(self) -> bool:
        return bool(self.array)

    def __index__(self) -> int:
        return int(self.array)

    def __getitem__(self, key: Any) -> Tensor:
        return Tensor(self.array[key])

    def to(self, dtype: np.dtype, bitcast: bool = False) -> Tensor:
        return Tensor(self.array.view(dtype) if bitcast else self.array.astype(dtype))

    def reshape(self, shape: list[int]) -> Tensor:
        return Tensor(self.array.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> Tensor:
        return Tensor(np.ascontiguousarray(self.array.transpose(order)))

    def split(self) -> tuple[Tensor, Tensor]:
        assert self.array.shape[-1] == 2
        return Tensor(self.array[..., 0]), Tensor(self.array[..., 1])


def _array(value: Any) -> Any:
    return value.array if isinstance(value, Tensor) else value


class Pointer:
    """Places in a buffer."""

    def __init__(self, array: np.ndarray, at: Any) -> None:
        self.array, self.at = array, np.asarray(at)
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.array, self.at + _array(offset))

    def places(self, mask: Any) -> tuple[np.ndarray, np.ndarray]:
        """Places and which of them are accessed, of one shape."""
        at, live = np.broadcast_arrays(self.at, np.asarray(True if mask is None else _array(mask), bool))
        assert at.shape == self.at.shape, f"a mask of {live.shape} for {self.at.shape} places"
        inside = (at >= 0) & (at < self.array.size)
        assert inside[live].all(), f"{at[live & ~inside][:1]} of {self.array.size} elements"
        return at, live


def _unknown(dtype: np.dtype) -> Any:
    """What nobody may read."""
    return 0x5BAD5BAD if dtype.kind == "i" else np.nan


class Shared:
    """A block of shared memory."""

    def __init__(self, device: _Device, array: np.ndarray) -> None:
        self.device, self.array = device, array

    def index(self, place: Any) -> Shared:
        assert 0 <= int(place) < len(self.array)
        return Shared(self.device, self.array[int(place)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.device, self.array.transpose(order))

    def store(self, value: Tensor) -> None:
        self.array[...] = value.array
        self.device.now.fenced = False


class Product:
    """A sum that products are still being added to."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.float32) @ b.astype(np.float32)


class _Stopped(BaseException):
    """Another program has failed."""


class _Program:
    """A program in a thread of its own, which runs only between `step` and its next `pause`."""

    def __init__(self, number: int, run: Callable[[], None]) -> None:
        self.number, self.run = number, run
        self.copies: list[tuple[np.ndarray, Pointer, Any]] = []
        self.groups: list[list[tuple[np.ndarray, Pointer, Any]]] = []
        self.products: list[tuple[Product, np.ndarray, np.ndarray, np.ndarray]] = []
        self.fenced = True
        self.ended = self.stopped = False
        self.failure: BaseException | None = None
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.thread = threading.Thread(target=self._main)
        self.thread.start()

    def _main(self) -> None:
        self.go.acquire()
        try:
            if not self.stopped:
                with np.errstate(all="ignore"):
                    self.run()
                assert not self.copies and not any(self.groups), "a copy that nobody waited for"
                assert not self.products, "a product that nobody waited for"
        except _Stopped:
            pass
        except BaseException as failure:  # handed to the thread that launched
            self.failure = failure
        self.ended = True
        self.back.release()

    def step(self) -> None:
        self.go.release()
        self.back.acquire()

    def pause(self) -> None:
        self.back.release()
        self.go.acquire()
        if self.stopped:
            raise _Stopped


class _Device:
    """The programs of a launch, and what the running one does to memory."""

    def __init__(self, programs: int, resident: int, rng: np.random.Generator) -> None:
        self.programs, self.resident, self.rng = programs, resident, rng
        self.looks = 0
        self.now: _Program

    def launch(self, run: Callable[[], None]) -> None:
        waiting, running = list(range(self.programs)), []
        try:
            while waiting or running:
                while waiting and len(running) < self.resident:
                    running.append(_Program(waiting.pop(0), run))
                self.now = running[self.rng.integers(len(running))]
                self.now.step()
                if self.now.failure is not None:
                    raise self.now.failure
                if self.now.ended:
                    running.remove(self.now)
                    self.looks = 0
        finally:
            for program in running:
                if not program.ended:
                    program.stopped = True
                    program.step()
                program.thread.join()

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None, volatile: bool = False) -> Tensor:
        if volatile:
            self.now.pause()
            self.looks += 1
            assert self.looks < MOST_LOOKS, "all programs wait for one another"
        at, live = pointer.places(mask)
        left_out = _unknown(pointer.array.dtype) if other is None else other
        values = np.full(at.shape, left_out, pointer.array.dtype)
        values[live] = pointer.array[at[live]]
        return Tensor(values)

    def store(self, pointer: Pointer, value: Any, mask: Any = None) -> None:
        at, live = pointer.places(mask)
        pointer.array[at[live]] = np.broadcast_to(_array(value), at.shape)[live]
        self.looks = 0

    def atomic(self, change: Callable[[Any, Any], Any]) -> Callable[..., Tensor]:
        def run(pointer: Pointer, value: Tensor, mask: Any, sem: str) -> Tensor:
            self.now.pause()
            at, live = pointer.places(mask)
            before = np.full(at.shape, _unknown(pointer.array.dtype), pointer.array.dtype)
            before[live] = pointer.array[at[live]]
            assert len(set(at[live].tolist())) == live.sum(), "one place twice"
            self.store(pointer, change(before, value.array), mask)
            return Tensor(before)

        return run

    def copy(self, place: Shared, pointer: Pointer, mask: Any = None) -> None:
        place.array[...] = np.nan
        self.now.copies.append((place.array, pointer, mask))

    def commit_group(self) -> None:
        self.now.groups.append(self.now.copies)
        self.now.copies = []

    def wait_group(self, outstanding: int) -> None:
        assert outstanding >= 0
        while len(self.now.groups) > outstanding:
            for place, pointer, mask in self.now.groups.pop(0):
                place[...] = self.load(pointer, mask).array
                self.now.fenced = False

    def fence(self) -> None:
        self.now.fenced = True

    def multiply(self, a: Shared, b: Shared, total: Tensor | Product, is_async: bool) -> Product:
        assert is_async
        assert self.now.fenced, "a product may miss what was written to shared memory"
        total = total if isinstance(total, Product) else Product(total.array)
        self.now.products.append((total, a.array, b.array, _product(a.array, b.array)))
        return total

    def multiply_wait(self, num_outstanding: int, deps: list[Product]) -> Product | Tensor:
        products = self.now.products
        while len(products) > num_outstanding:
            total, a, b, begun = products.pop(0)
            total.array = total.array + np.where(_product(a, b) == begun, begun, np.nan)
        (total,) = deps
        return total if products else Tensor(total.array)


def _gluon_language(device: _Device) -> SimpleNamespace:
    def layout(*_: Any, **__: Any) -> None: ...

    def shared(dtype: np.dtype, shape: list[int], _: None) -> Shared:
        return Shared(device, np.full(shape, np.nan, dtype))

    return SimpleNamespace(
        constexpr=lambda value: value,
        int16=np.dtype("int16"),
        int32=np.dtype("int32"),
        int64=np.dtype("int64"),
        float32=np.dtype("float32"),
        BlockedLayout=layout,
        SliceLayout=layout,
        NVMMADistributedLayout=layout,
        NVMMASharedLayout=layout,
        allocate_shared_memory=shared,
        program_id=lambda axis: Tensor(np.int32(device.now.number)),
        static_range=range,
        load=device.load,
        store=device.store,
        atomic_add=device.atomic(lambda before, value: before + value),
        atomic_xchg=device.atomic(lambda before, value: value),
        arange=lambda start, stop, layout: Tensor(np.arange(start, stop, dtype=np.int32)),
        zeros=lambda shape, dtype, layout: Tensor(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, layout: Tensor(np.full(shape, value, dtype)),
        to_tensor=lambda value: Tensor(np.int32(value)),
        convert_layout=lambda value, layout: value,
        # The one use is a move.
        inline_asm_elementwise=lambda asm, constraints, args, dtype, is_pure, pack: args[0],
        where=lambda mask, a, b: Tensor(np.where(_array(mask), _array(a), _array(b))),
        maximum=lambda a, b: Tensor(np.maximum(_array(a), _array(b))),
        max=lambda value, axis: Tensor(value.array.max(axis)),
        sum=lambda value, axis: Tensor(value.array.sum(axis)),
    )


def _triton_language() -> SimpleNamespace:
    def erf(value: Tensor) -> Tensor:
        return Tensor(np.vectorize(math.erf, otypes=[np.float32])(value.array))

    return SimpleNamespace(
        constexpr=lambda value: value,
        minimum=lambda a, b: Tensor(np.minimum(_array(a), _array(b))),
        maximum=lambda a, b: Tensor(np.maximum(_array(a), _array(b))),
        sigmoid=lambda value: Tensor(1 / (1 + np.exp(-value.array))),
        erf=erf,
    )
