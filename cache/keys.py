"""Program keys: the identity of a program is the content of what determines it.

Equal content gives equal keys, in this process and in the next. What has no content (an object known only by
its address, a function, a device array) is refused, because a key made of it would change from run to run or,
worse, come back when an address is used again.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import struct
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

from moe_jax.pallas_kernels.errors import InvalidArgument


def program_key(*parts: Any) -> str:
    """SHA-256 (hex) over a canonical encoding of ``parts``.

    Parts may be None, booleans, numbers, strings, bytes, enum members, tuples, lists, dicts and sets (in any
    order), frozen dataclasses (by their compared fields), dtypes, NumPy arrays, `jax.ShapeDtypeStruct` (with its
    sharding), devices, meshes' shardings and pytree structures, and any nesting of these. Types are told apart:
    1, 1.0, True and "1" give four keys.

    Raises:
        InvalidArgument: a part without content identity, with the path to it.
    """
    digest = hashlib.sha256()
    for index, part in enumerate(parts):
        digest.update(_encode(part, f"parts[{index}]"))
    return digest.hexdigest()


def _tagged(tag: str, *chunks: bytes) -> bytes:
    """Lengths in front of everything, so that no two nestings give the same bytes."""
    name = tag.encode()
    head = struct.pack("<II", len(name), len(chunks)) + name
    return head + b"".join(struct.pack("<Q", len(chunk)) + chunk for chunk in chunks)


def _name(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


def _encode(value: Any, path: str) -> bytes:
    match value:
        case None:
            return _tagged("none")
        case enum.Enum():
            return _tagged("enum", _name(type(value)), value.name.encode())
        # Before the plain numbers: np.float64 is a float.
        case np.ndarray() | np.generic() if value.dtype != object:
            array = np.asarray(value)
            return _tagged("array", _dtype(array.dtype), str(array.shape).encode(), array.tobytes())
        case bool() | int():
            return _tagged(type(value).__name__, str(int(value)).encode())
        case float():
            return _tagged("float", value.hex().encode())
        case str():
            return _tagged("str", value.encode("utf-8", "surrogatepass"))
        case bytes():
            return _tagged("bytes", value)
        case np.dtype():
            return _tagged("dtype", _dtype(value))
        case tuple() | list():
            items = [_encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
            return _tagged(_sequence(value), *items)
        case Mapping():
            pairs = [(_encode(k, f"{path} key"), _encode(v, f"{path}[{k!r}]")) for k, v in value.items()]
            return _tagged("dict", *(chunk for pair in sorted(pairs) for chunk in pair))
        case Set():
            return _tagged("set", *sorted(_encode(item, f"{path} item") for item in value))
        case jax.ShapeDtypeStruct():
            parts = (tuple(value.shape), np.dtype(value.dtype), bool(value.weak_type), value.sharding)
            return _tagged("aval", *(_encode(part, path) for part in parts))
        case jax.Device():
            return _tagged("device", value.platform.encode(), value.device_kind.encode(), str(value.id).encode())
        case jax.sharding.SingleDeviceSharding():
            (device,) = value.device_set
            return _tagged("on", _encode(device, path), str(value.memory_kind).encode())
        case jax.sharding.NamedSharding():
            mesh = value.mesh
            parts = (tuple(mesh.shape.items()), tuple(str(kind) for kind in mesh.axis_types), mesh.devices.flat)
            encoded = (_encode(tuple(part), path) for part in parts)
            return _tagged("sharded", *encoded, str(value.spec).encode(), str(value.memory_kind).encode())
        case jax.tree_util.PyTreeDef():
            return _tree(value, path)
    # np.float32 and jnp.float32 both stand for the dtype.
    if isinstance(value, type) and (issubclass(value, np.generic) or isinstance(getattr(value, "dtype", 0), np.dtype)):
        return _tagged("dtype", _dtype(np.dtype(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:
        fields = [field for field in dataclasses.fields(value) if field.compare]
        items = [
            chunk
            for field in fields
            for chunk in (field.name.encode(), _encode(getattr(value, field.name), f"{path}.{field.name}"))
        ]
        return _tagged("dataclass", _name(type(value)), *items)
    raise InvalidArgument(
        "a part without content identity",
        where=f"program_key: {path}",
        got=f"a {type(value).__module__}.{type(value).__qualname__}",
        wanted="numbers, strings, enums, tuples, dicts, dtypes, shapes or frozen dataclasses of these",
    )


def _tree(tree: jax.tree_util.PyTreeDef, path: str) -> bytes:
    """Node by node: the text of a structure shortens long auxiliary data, so unequal ones can read the same."""
    node = tree.node_data()
    if node is None:
        return _tagged("leaf")
    kind, auxiliary = node
    children = [_encode(child, f"{path}.children[{i}]") for i, child in enumerate(tree.children())]
    return _tagged("node", _name(kind), _encode(auxiliary, f"{path}.auxiliary"), *children)


def _dtype(dtype: np.dtype) -> bytes:
    # By name: ml_dtypes such as bfloat16 all have the same type string "<V2".
    return (f"{dtype.name}{'>' if dtype.byteorder == '>' else ''}" if dtype.fields is None else str(dtype)).encode()


def _sequence(value: tuple | list) -> str:
    named = isinstance(value, tuple) and type(value) is not tuple
    return _name(type(value)).decode() if named else type(value).__name__
