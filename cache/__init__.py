"""Reuse that is safe or refused: program keys, compiled programs, plans, device graphs.

`executables` keeps compiled JAX programs under program keys. `graphs` runs a step's launch list direct, captures it and
replays it while four nested checks (`identity`) find nothing changed; `docs/graph-reuse.md` says what does what.

Names are loaded when first used; nothing here touches a device when imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .buckets import bucket_for, row_buckets
    from .cuda_runtime import CudaRuntime
    from .decision import Decision
    from .events import EFFECTS, Effect, Event
    from .executables import Compilation, Executables, ExecutableStats, use_compilation_cache
    from .explain import Difference
    from .graphs import Graphs
    from .identity import Bank, Certificate, Fingerprint, Group, Manifest, Mismatch, Plan, PlanKey
    from .keys import program_key
    from .launches import Buffer, Copy, Launch, LaunchList, Layout, Operand, dense
    from .outcome import NotReplayed, Outcome, Reason, RequiredStepFailed, StoreUnusable
    from .registry import Registry
    from .resources import Resource, ResourceTable, next_serial
    from .runtime import Runtime, StickyError
    from .simulated import SimulatedRuntime

# Module -> public names that live in it.
_HOMES = {
    "buckets": ("bucket_for", "row_buckets"),
    "cuda_runtime": ("CudaRuntime",),
    "decision": ("Decision",),
    "events": ("EFFECTS", "Effect", "Event"),
    "executables": ("Compilation", "ExecutableStats", "Executables", "use_compilation_cache"),
    "explain": ("Difference",),  # and `explain`, which as a name here would hide the module
    "graphs": ("Graphs",),
    "identity": ("Bank", "Certificate", "Fingerprint", "Group", "Manifest", "Mismatch", "Plan", "PlanKey"),
    "keys": ("program_key",),
    "launches": ("Buffer", "Copy", "Launch", "LaunchList", "Layout", "Operand", "dense"),
    "outcome": ("NotReplayed", "Outcome", "Reason", "RequiredStepFailed", "StoreUnusable"),
    "registry": ("Registry",),
    "resources": ("Resource", "ResourceTable", "next_serial"),
    "runtime": ("Runtime", "StickyError"),
    "simulated": ("SimulatedRuntime",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "EFFECTS",
    "Bank",
    "Buffer",
    "Certificate",
    "Compilation",
    "Copy",
    "CudaRuntime",
    "Decision",
    "Difference",
    "Effect",
    "Event",
    "ExecutableStats",
    "Executables",
    "Fingerprint",
    "Graphs",
    "Group",
    "Launch",
    "LaunchList",
    "Layout",
    "Manifest",
    "Mismatch",
    "NotReplayed",
    "Operand",
    "Outcome",
    "Plan",
    "PlanKey",
    "Reason",
    "Registry",
    "RequiredStepFailed",
    "Resource",
    "ResourceTable",
    "Runtime",
    "SimulatedRuntime",
    "StickyError",
    "StoreUnusable",
    "bucket_for",
    "dense",
    "next_serial",
    "program_key",
    "row_buckets",
    "use_compilation_cache",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *_HOME_OF]
