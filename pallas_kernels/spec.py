"""One frozen description of a kernel launch; `in_jit`, `compiled` and `interpret` are built from it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from .errors import InvalidArgument

Role = Literal["in", "inout", "state", "out", "scratch"]
GIVEN: tuple[Role, ...] = ("in", "inout")
# CUDA's limits on the programs of a launch.
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32"}
FLOATS = ("bfloat16", "float16", "float32")


def check_float(where: str, dtype: str, name: str = "dtype") -> None:
    """Refuse a dtype that kernels do not compute with.

    Raises:
        InvalidArgument: naming ``name``.
    """
    if dtype not in FLOATS:
        raise InvalidArgument(name, where=where, got=dtype, wanted="bfloat16, float16 or float32")


@dataclass(frozen=True)
class Argument:
    """A pointer argument, in the kernel's own order.

    Attributes:
        name: parameter name in the Triton function.
        dtype: numpy name of the element type.
        shape: shape of the whole buffer.
        role: ``"in"`` is only read; ``"inout"`` is the caller's and is changed in place; ``"out"`` is written
            everywhere, or where the maker of the spec says; ``"scratch"`` holds nothing before or after; ``"state"``
            is zero before the first launch and left zero by every launch, so a caller may keep one buffer for ever or
            hand in fresh zeros.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """A Triton kernel bound to shapes and constants; equal content gives an equal `key` in every process.

    Attributes:
        name: name of the operation, for messages and tables.
        function: the ``triton.jit`` function.
        arguments: every pointer parameter, in order.
        constexprs: ``(name, value)`` of every other parameter.
        grid: programs of the launch, a function of the argument shapes alone (never of their contents).
        num_warps, num_stages: as Triton means them.
        enable_fp_fusion: contraction of multiply and add; stated because Triton's default is changing.
        pdl: launched with programmatic dependent launch; before it waits for the launch before, the function reads
            nothing but arguments that ``early`` names, and writes nothing.
        early: names of ``"in"`` arguments that may be read before the wait: nobody writes them from the begin of the
            launch list until the launch has ended (`LaunchList` checks that within a list).
        opens: with ``pdl`` the next launch begins only when the function has waited: then all before it has ended, for
            every launch behind it. The first launch of a list does that, so that ``early`` ends at the list's begin.
        max_registers: of a thread. None leaves it to the assembler, which spills a few rather than have fewer programs
            on a multiprocessor.
        reference: ``jax.numpy`` function of the `inputs` that returns the new contents of the ``"inout"`` arguments and
            then the ``"out"`` ones; a single one not in a tuple.
    """

    name: str
    function: Any
    arguments: tuple[Argument, ...]
    constexprs: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool
    pdl: bool
    early: tuple[str, ...] = ()
    opens: bool = False
    max_registers: int | None = None
    reference: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        wanted = list(self.function.arg_names)
        got = [a.name for a in self.arguments] + [name for name, _ in self.constexprs]
        if sorted(wanted) != sorted(got) or [n for n in wanted if n in {a.name for a in self.arguments}] != [
            a.name for a in self.arguments
        ]:
            raise InvalidArgument("parameters", where=f"KernelSpec({self.name!r})", got=got, wanted=wanted)
        roles = [a.role for a in self.arguments]
        given = [role in ("in", "inout", "state") for role in roles]
        if given != sorted(given, reverse=True):
            # Inside jit a kernel gets its operands first and its results after them, whatever its parameters' order.
            raise InvalidArgument(
                "order of arguments",
                where=f"KernelSpec({self.name!r})",
                got=roles,
                wanted="in, inout and state before out and scratch",
            )
        read = {a.name for a in self.arguments if a.role == "in"}
        if not read.issuperset(self.early) or (self.opens and self.early):
            wanted = "none, as it opens" if self.opens else f"some of {sorted(read)}"
            raise InvalidArgument("early", where=f"KernelSpec({self.name!r})", got=self.early, wanted=wanted)
        unknown = [a.dtype for a in self.arguments if a.dtype not in DTYPES]
        if unknown:
            raise InvalidArgument("dtype", where=f"KernelSpec({self.name!r})", got=unknown, wanted=", ".join(DTYPES))
        if not all(1 <= count <= most for count, most in zip(self.grid, MOST_PROGRAMS, strict=True)):
            wanted = f"1 to {MOST_PROGRAMS} in each dimension"
            raise InvalidArgument("grid", where=f"KernelSpec({self.name!r})", got=self.grid, wanted=wanted)

    @property
    def inputs(self) -> tuple[Argument, ...]:
        """Arguments the caller supplies the contents of: ``"in"`` and ``"inout"``."""
        return tuple(a for a in self.arguments if a.role in GIVEN)

    @property
    def outputs(self) -> tuple[Argument, ...]:
        """Arguments the caller reads afterwards."""
        return tuple(a for a in self.arguments if a.role == "out")

    @functools.cached_property
    def source_hash(self) -> str:
        """sha256 of the kernel's source, of every ``triton.jit`` function it calls and of the constants these read."""
        return hashlib.sha256("\n".join(_sources(self.function)).encode()).hexdigest()

    @functools.cached_property
    def key(self) -> str:
        """sha256 of the content: source, shapes, constants and compiler options; no address, no ``id()``."""
        content = [
            self.source_hash,
            [(a.name, a.dtype, a.shape, a.role) for a in self.arguments],
            self.constexprs,
            self.grid,
            (self.num_warps, self.num_stages, self.enable_fp_fusion, self.pdl, self.max_registers),
        ]
        return hashlib.sha256(repr(content).encode()).hexdigest()


def _sources(function: Any) -> list[str]:
    """What a Triton function is made of, sorted: its text, those of the project's Triton functions that it reaches, and
    the values of the module's constants (``tl.constexpr``) that any of them reads.
    """
    found: dict[str, str] = {}

    def visit(triton_function: Any) -> None:
        plain = triton_function.fn
        name = f"{plain.__module__}.{plain.__qualname__}"
        if name in found:
            return
        found[name] = inspect.getsource(plain)
        for used in plain.__code__.co_names:
            value = plain.__globals__.get(used)
            inner = getattr(value, "fn", None)
            if isinstance(inner, types.FunctionType) and not inner.__module__.startswith("triton."):
                visit(value)
            elif type(value).__name__ == "constexpr":  # Triton itself need not be imported here
                found[f"{plain.__module__}.{used}"] = repr(getattr(value, "value", None))

    visit(function)
    return [f"{name}\n{text}" for name, text in sorted(found.items())]
