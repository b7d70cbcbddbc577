"""Which JAX arrays a runtime can take where they stand."""

from __future__ import annotations

from typing import Any

import jax

from moe_jax.pallas_kernels.errors import InvalidArgument


def check_array(where: str, array: Any, name: str, device: jax.Device | None) -> None:
    """Refuse what is no whole array in the memory of one device, in row-major order.

    Args:
        name: of the array, for the message.
        device: that it must be on; None: any.

    Raises:
        InvalidArgument: what the array is instead.
    """
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        raise InvalidArgument(name, where=where, got=type(array).__name__, wanted="a jax.Array that has its values")
    if array.is_deleted():
        raise InvalidArgument(name, where=where, got="a deleted array", wanted="one that has its values")
    devices = array.devices()
    if len(devices) != 1 or (device is not None and devices != {device}):
        got = ", ".join(sorted(map(str, devices)))
        wanted = "one device" if device is None else f"{device} and no other"
        raise InvalidArgument(f"device of {name}", where=where, got=got, wanted=wanted)
    (on,) = devices
    kind, usual = array.sharding.memory_kind, on.default_memory().kind
    if kind not in (None, usual):
        raise InvalidArgument(f"memory of {name}", where=where, got=kind, wanted=usual)
    order = array.format.layout.major_to_minor  # pyrefly: ignore[missing-attribute]
    if order != tuple(range(array.ndim)):
        raise InvalidArgument(f"layout of {name}", where=where, got=f"axes in order {order}", wanted="row-major")
