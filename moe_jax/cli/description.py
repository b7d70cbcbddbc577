"""`moe-jax info`."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
from flax import nnx
from rich.console import Console

from moe_jax import checkpoint, doctor
from moe_jax.cli import device as devices
from moe_jax.cli import output
from moe_jax.loading import checkpoint_folder
from moe_jax.models.config import ModelConfig
from moe_jax.models.decoder import abstract_decoder


def run(path: str | None, *, as_json: bool) -> None:
    """Read config and headers of a checkpoint and print what it is."""
    report = checkpoint.inspect(checkpoint_folder(path))
    config = report.config
    router = config.moe.router
    expert_bytes, moe_layers = bytes_per_expert(config), sum(config.moe_layers)
    free, memory = devices.free_memory(doctor.start_devices()[0])
    slots = None
    if free is not None:
        slots = slots_that_fit(free, report.nbytes, expert_bytes, moe_layers, router.experts)
    facts = {
        "family": config.family,
        "parameters": parameters(config),
        "bytes": report.nbytes,
        "dtype": config.dtype,
        "layers": config.layers,
        "moe_layers": moe_layers,
        "experts": router.experts,
        "top_k": router.top_k,
        "bytes_per_expert": expert_bytes,
        "slots_that_fit": slots,
        "free_bytes": free,
        "memory": memory,
        "ignored_tensors": len(report.ignored),
    }
    if as_json:
        print(json.dumps(facts))
        return
    fit = "unknown" if slots is None else f"{slots} of {router.experts} experts in each layer"
    room = memory if free is None else f"{output.human_bytes(free)} {memory}"
    rows = [
        ("family", config.family),
        ("parameters", f"{facts['parameters']:,} ({output.human_bytes(report.nbytes)}, {config.dtype})"),
        ("layers", f"{config.layers}, {moe_layers} of them with experts"),
        ("experts", f"{router.experts} in a layer, top-{router.top_k} used"),
        ("bytes per expert", f"{expert_bytes:,} ({output.human_bytes(expert_bytes)})"),
        ("slots that would fit", f"{fit} ({room})"),
    ]
    if report.ignored:
        rows.append(("tensors not loaded", str(len(report.ignored))))
    output.table(path or "the shipped model", rows, Console(highlight=False))


def bytes_per_expert(config: ModelConfig) -> int:
    """Bytes of one expert's gate-up and down matrices in the checkpoint's dtype."""
    inner, hidden = config.moe_intermediate, config.hidden_size
    return (config.moe.activation.rows(inner) + inner) * hidden * jnp.dtype(config.dtype).itemsize


def slots_that_fit(free: int, total: int, expert: int, layers: int, experts: int) -> int:
    """Experts of each layer that fit beside everything that is no expert.

    Args:
        free: bytes of the memory.
        total: bytes of the checkpoint.
        expert: bytes of one expert.
        layers: layers with experts.
        experts: experts in a layer.
    """
    if layers == 0:
        return 0
    others = total - expert * experts * layers
    return max(0, min(experts, (free - others) // (expert * layers)))


def parameters(config: ModelConfig) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract_decoder(config), nnx.Param)))
