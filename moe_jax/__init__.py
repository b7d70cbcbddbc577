"""Mixture-of-Experts inference for JAX on NVIDIA GPUs.

Where to start:

* `load` and `Model.generate`: a checkpoint, and text from it. `Engine`: many sequences, step by step.
* `grouped_moe`, `nnx.MoE` and `linen.MoE`: the expert layer for your own model. `explain` says what serves a call.
* `planned_jit`: your own step, compiled ahead of time, with a reason for each compilation.
* `errors`: what is raised, and when. The command ``moe-jax doctor`` says whether this machine is ready.

Names are loaded when first used: importing the package reads no model code, no Flax and no Triton,
and never touches a device.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from moe_jax import versions

try:
    versions.check(jax)
except versions.UnsupportedVersion as error:
    # The command, by either of its names, stops with one line and no traceback. Python puts "-m" there while it
    # looks for the module to run.
    command = Path(sys.argv[0]).name
    if command == "moe-jax" or (command == "-m" and "moe_jax" in sys.orig_argv):
        raise SystemExit(f"error: {error}") from error
    raise

__version__ = versions.VERSION

__all__ = [
    "Activation",
    "CannotServe",
    "CheckpointError",
    "Engine",
    "ExpertWeights",
    "InvalidArgument",
    "MoEConfig",
    "Model",
    "ModelConfig",
    "MoeJaxError",
    "PlanChanged",
    "RopeConfig",
    "RouterConfig",
    "Routing",
    "SharedExpert",
    "SlowPathWarning",
    "__version__",
    "errors",
    "explain",
    "grouped_moe",
    "hf_names",
    "linen",
    "load",
    "load_balancing_loss",
    "nnx",
    "pack_experts",
    "planned_jit",
    "route",
    "router_logits",
    "use_compilation_cache",
]

if TYPE_CHECKING:
    from moe_jax import errors, hf_names, linen, nnx
    from moe_jax.cache.executables import use_compilation_cache
    from moe_jax.engine import Engine
    from moe_jax.errors import (
        CannotServe,
        CheckpointError,
        InvalidArgument,
        MoeJaxError,
        PlanChanged,
        SlowPathWarning,
    )
    from moe_jax.loading import load
    from moe_jax.losses import load_balancing_loss
    from moe_jax.model import Model
    from moe_jax.models.config import ModelConfig, RopeConfig
    from moe_jax.pallas_kernels.grouped_moe import (
        Activation,
        ExpertWeights,
        MoEConfig,
        SharedExpert,
        explain,
        grouped_moe,
        pack_experts,
    )
    from moe_jax.pallas_kernels.route import RouterConfig, Routing, route, router_logits
    from moe_jax.planned import planned_jit

_GROUPED_MOE = "moe_jax.pallas_kernels.grouped_moe"
_ROUTE = "moe_jax.pallas_kernels.route"

# Public name -> module it lives in; a module that is itself the public name maps to itself.
_HOMES = {
    "Activation": _GROUPED_MOE,
    "CannotServe": "moe_jax.errors",
    "CheckpointError": "moe_jax.errors",
    "Engine": "moe_jax.engine",
    "ExpertWeights": _GROUPED_MOE,
    "InvalidArgument": "moe_jax.errors",
    "MoEConfig": _GROUPED_MOE,
    "MoeJaxError": "moe_jax.errors",
    "Model": "moe_jax.model",
    "ModelConfig": "moe_jax.models.config",
    "PlanChanged": "moe_jax.errors",
    "RopeConfig": "moe_jax.models.config",
    "RouterConfig": _ROUTE,
    "Routing": _ROUTE,
    "SharedExpert": _GROUPED_MOE,
    "SlowPathWarning": "moe_jax.errors",
    "errors": "moe_jax.errors",
    "explain": _GROUPED_MOE,
    "grouped_moe": _GROUPED_MOE,
    "hf_names": "moe_jax.hf_names",
    "linen": "moe_jax.linen",
    "load": "moe_jax.loading",
    "load_balancing_loss": "moe_jax.losses",
    "nnx": "moe_jax.nnx",
    "pack_experts": _GROUPED_MOE,
    "planned_jit": "moe_jax.planned",
    "route": _ROUTE,
    "router_logits": _ROUTE,
    "use_compilation_cache": "moe_jax.cache.executables",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(home)
    except (AttributeError, ImportError) as error:
        if versions.names_jax(error):
            raise versions.missing(str(error), jax.__version__) from error
        raise
    value = module if home == f"{__name__}.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
