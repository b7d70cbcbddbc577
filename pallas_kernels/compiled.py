"""Kernels compiled ahead of time, without a GPU: cubins that the launcher loads, folders of them, and PTX for XLA."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import re
import reprlib
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .device import MINIMUM_CAPABILITY
from .errors import CannotServe, InvalidArgument
from .spec import DTYPES, KernelSpec
from .stored import publish, rebuild

# The driver compiles PTX and refuses a version newer than its own; Triton writes that of its own assembler. So, for
# capabilities up to each: the first version that knows them, at least that of CUDA 12.0, the oldest supported.
PTX_VERSIONS = ((90, 80), (102, 87), (109, 88), (119, 90), (120, 87), (129, 88))


@dataclass(frozen=True, kw_only=True)
class CompiledKernel:
    """A cubin and what a launch of it needs.

    Attributes:
        key: the spec's key.
        source_hash: the spec's source hash.
        capability: 80, 90, … as compiled for.
        builder: ``"triton X.Y.Z"``.
        symbol: name of the function inside.
        threads, shared: threads of a program, dynamic shared memory in bytes.
        global_scratch, profile_scratch: bytes per program behind Triton's two trailing pointers.
    """

    key: str
    source_hash: str
    capability: int
    builder: str
    symbol: str
    threads: int
    shared: int
    global_scratch: int
    profile_scratch: int
    cubin: bytes


class Resources(NamedTuple):
    """What a cubin takes: registers of a thread; stack and local memory in bytes of a thread; static shared bytes."""

    registers: int
    stack: int
    local: int
    shared: int


class Ptx(NamedTuple):
    """A kernel as text that the driver compiles; what a launch needs is as in `CompiledKernel`."""

    text: str
    symbol: str
    threads: int
    shared: int
    global_scratch: int
    profile_scratch: int


def compile_spec(spec: KernelSpec, capability: int) -> CompiledKernel:
    """Compile for a capability such as 90. Needs Triton, no GPU.

    Raises:
        CannotServe: a capability below 80, or programmatic dependent launch below 90.
    """
    import triton

    built = _build(spec, capability, f"compile_spec({spec.name!r})")
    meta = built.metadata
    return CompiledKernel(
        key=spec.key,
        source_hash=spec.source_hash,
        capability=capability,
        builder=f"triton {triton.__version__}",
        symbol=meta.name,
        threads=meta.num_warps * 32,
        shared=meta.shared,
        global_scratch=meta.global_scratch_size,
        profile_scratch=meta.profile_scratch_size,
        cubin=built.asm["cubin"],
    )


def ptx_of(spec: KernelSpec, capability: int) -> Ptx:
    """PTX for a capability such as 90, compiled once in a process for equal specs. Needs Triton, no GPU.

    Raises:
        CannotServe: as `compile_spec`.
    """
    key = spec.key, capability
    if key not in _ptx:
        version = next((version for last, version in PTX_VERSIONS if capability <= last), None)
        built = _build(spec, capability, f"ptx_of({spec.name!r})", ptx_version=version)
        meta = built.metadata
        _ptx[key] = Ptx(
            text=without_debug_info(built.asm["ptx"]),
            symbol=meta.name,
            threads=meta.num_warps * 32,
            shared=meta.shared,
            global_scratch=meta.global_scratch_size,
            profile_scratch=meta.profile_scratch_size,
        )
    return _ptx[key]


_ptx: dict[tuple[str, int], Ptx] = {}


def without_debug_info(ptx: str) -> str:
    """PTX without line numbers: more than half of the text, and paths of the machine that compiled it."""
    ptx = re.sub(r"^[ \t]*\.section[ \t]+\.debug\w+\s*\{[^}]*\}\n", "", ptx, flags=re.MULTILINE)
    return re.sub(r"^[ \t]*(\.(loc|file)[ \t].*|//.*|\$L__tmp\d+:)\n", "", ptx, flags=re.MULTILINE)


def _build(spec: KernelSpec, capability: int, where: str, **more: Any) -> Any:
    """What ``triton.compile`` makes of a spec; ``more`` are options of Triton's."""
    import triton
    from triton.backends.compiler import GPUTarget

    needed = 90 if spec.pdl else MINIMUM_CAPABILITY
    if _is_gluon(spec.function) and not 90 <= capability < 100:
        # Triton ends the process where a device does not have the instructions that such a kernel names.
        raise CannotServe("compute capability", where=where, got=f"sm_{capability}", wanted="sm_90, a 9.x device")
    if capability < needed:
        raise CannotServe("compute capability", where=where, got=f"sm_{capability}", wanted=f"sm_{needed} or newer")
    types = {a.name: "*" + DTYPES[a.dtype] for a in spec.arguments}
    constants = dict(spec.constexprs)
    source = _source_of(spec.function)(
        fn=spec.function,
        signature={name: types.get(name, "constexpr") for name in spec.function.arg_names},
        constexprs=constants,
        # Every buffer begins at a multiple of 16 bytes: what makes 16-byte loads possible.
        attrs={(spec.function.arg_names.index(name),): [["tt.divisibility", 16]] for name in types},
    )
    options = {
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "enable_fp_fusion": spec.enable_fp_fusion,
        "launch_pdl": spec.pdl,
        "maxnreg": spec.max_registers,
    }
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options | more)


def _is_gluon(function: Any) -> bool:
    return getattr(function, "is_gluon", bool)()


def _source_of(function: Any) -> Any:
    """Triton's class for the source of a function, which Gluon has its own of."""
    from triton.compiler import ASTSource

    if not _is_gluon(function):
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def save(folder: Path | str, kernels: Iterable[CompiledKernel]) -> None:
    """Add kernels to a folder: ``KEY-smNN.json``, which holds the cubin in base64, its SHA-256 and all the rest.

    One file, which appears whole: whoever else writes the same kernel, a reader gets what one builder has made.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in kernels:
        stored = {"cubin": base64.b64encode(kernel.cubin).decode(), "sha256": _digest(kernel.cubin)}
        path = folder / _file_name(kernel.key, kernel.capability)
        publish(path, json.dumps(asdict(kernel) | stored, indent=1).encode())


def _file_name(key: str, capability: int) -> str:
    return f"{key[:32]}-sm{capability}.json"


def load(folder: Path | str, spec: KernelSpec, capability: int) -> CompiledKernel:
    """The kernel of a spec from a folder, whichever Triton built it.

    Raises:
        InvalidArgument: not there, cut off, of an earlier form, or built from another source.
    """
    where, name = f"load({str(folder)!r})", _file_name(spec.key, capability)
    try:
        meta = _fields((Path(folder) / name).read_bytes())
    except OSError as error:
        got = f"no {name}" if isinstance(error, FileNotFoundError) else error
        raise InvalidArgument("no cubin", where=where, got=got, wanted=f"{spec.name} for sm_{capability}") from error
    inside = f"{where}: {name}"
    if meta is None:
        raise InvalidArgument("content", where=inside, got="no JSON object", wanted="what save writes")
    text: Any = meta.get("cubin")
    digest = meta.pop("sha256", None)
    try:
        cubin = base64.b64decode(text, validate=True)
    except (TypeError, ValueError) as error:
        got = reprlib.repr(text)
        raise InvalidArgument("content of cubin", where=inside, got=got, wanted="base64, as save writes it") from error
    kernel = rebuild(CompiledKernel, meta | {"cubin": cubin}, inside)
    wanted = {"source_hash": spec.source_hash, "key": spec.key, "capability": capability}
    for name, value in wanted.items():
        if getattr(kernel, name) != value:
            problem = f"{name.removesuffix('_hash')} of cubin"
            raise InvalidArgument(problem, where=where, got=getattr(kernel, name), wanted=value)
    if digest != _digest(cubin):
        raise InvalidArgument("content of cubin", where=where, got=f"SHA-256 {_digest(cubin)}", wanted=digest)
    return kernel


def builders(folder: Path | str) -> list[str]:
    """What built the kernels of a folder, each once, in order. Files that are no kernel's do not count."""
    found = set()
    for path in Path(folder).glob("*-sm*.json"):
        with contextlib.suppress(OSError):
            builder = (_fields(path.read_bytes()) or {}).get("builder")
            found |= {builder} if isinstance(builder, str) else set()
    return sorted(found)


def _fields(content: bytes) -> dict[str, Any] | None:
    """The JSON object that a file holds; None: it holds none."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def resources(kernel: CompiledKernel) -> Resources:
    """Registers, stack, local and shared memory as the assembler reports them (Triton's own ``cuobjdump``)."""
    text = _cuobjdump(kernel.cubin, "-res-usage")
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return Resources(found["REG"], found["STACK"], found["LOCAL"], found["SHARED"])


def disassembly(kernel: CompiledKernel) -> str:
    """Machine code as text."""
    return _cuobjdump(kernel.cubin, "-sass")


def _cuobjdump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([_tool(), option, file.name], check=True, capture_output=True, text=True).stdout


@functools.cache
def _tool() -> str:
    from triton import knobs

    return knobs.nvidia.cuobjdump.path
