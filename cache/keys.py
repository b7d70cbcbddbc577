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
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping, Set
from typing import Any

import jax
import numpy as np

from moe_jax.pallas_kernels.errors import InvalidArgument


class Tokens:
    """Names for values that have equality but no content: functions, classes, options of other libraries.

    A token is the value's qualified name and a number. Equal values get one token, unequal ones never the same: numbers
    are not given twice. A value is held here, so that nothing else can come to be at its address meanwhile; the least
    recently asked for is let go, and gets a new number if it comes back. The first value of a name has number 0, so
    where no two share a name tokens are equal in every process; but only in this one do they prove anything.
    """

    def __init__(self, most: int = 4096):
        self._most = most
        self._tokens: OrderedDict[tuple[type, Any], str] = OrderedDict()
        self._next: Counter[str] = Counter()
        self._lock = threading.Lock()

    def token(self, value: Any, path: str) -> str:
        """The token of ``value``; ``path`` says where it stands, for the error.

        Raises:
            InvalidArgument: a value that cannot be hashed.
        """
        try:
            hash(value)
        except TypeError as error:
            raise _without_content(value, path) from error
        named = value if hasattr(value, "__qualname__") else type(value)
        name = f"{named.__module__}.{named.__qualname__}"
        with self._lock:
            key = (type(value), value)  # by type too: 1, 1.0 and True are equal
            if key not in self._tokens:
                self._tokens[key] = f"{name} {self._next[name]}"
                self._next[name] += 1
            self._tokens.move_to_end(key)
            if len(self._tokens) > self._most:
                self._tokens.popitem(last=False)
            return self._tokens[key]

    def clear(self) -> None:
        """Let go of every value."""
        with self._lock:
            self._tokens.clear()


def program_key(*parts: Any, tokens: Tokens | None = None) -> str:
    """SHA-256 (hex) over a canonical encoding of ``parts``.

    Parts may be None, booleans, numbers, strings, bytes, enum members, tuples, lists, dicts and sets (in any
    order), frozen dataclasses (by their compared fields), dtypes, NumPy arrays, `jax.ShapeDtypeStruct` (with its
    sharding), devices, meshes' shardings and pytree structures, and any nesting of these. Types are told apart:
    1, 1.0, True and "1" give four keys.

    Args:
        parts: what the key is made of.
        tokens: with it, hashable values without content are told apart by equality, and the key holds in this
            process only.

    Raises:
        InvalidArgument: a part without content identity, with the path to it.
    """
    digest = hashlib.sha256()
    for index, part in enumerate(parts):
        digest.update(_encode(part, f"parts[{index}]", tokens))
    return digest.hexdigest()


def fields(value: Any, path: str = "") -> dict[str, str]:
    """What a value says, as text by path: ``{"router.top_k": "2", …}``. For people: only a key tells values apart.

    Takes every value, and keeps no reference to it, so that what a program was made for can be told when the value
    itself has changed or is gone.
    """
    match value:
        case tuple() if hasattr(value, "_fields"):
            parts = {f".{name}": item for name, item in zip(value._fields, value, strict=True)}
        case tuple() | list():
            parts = {f"[{index}]": item for index, item in enumerate(value)}
        case Mapping():
            parts = {f"[{key!r}]": item for key, item in value.items()}
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {f".{field.name}": getattr(value, field.name) for field in dataclasses.fields(value)}
        case _:
            parts = {}
    if not parts:
        return {path: _text(value)}
    texts = (fields(item, (path + name).removeprefix(".")) for name, item in parts.items())
    return {name: text for found in texts for name, text in found.items()}


def _text(value: Any) -> str:
    match value:
        case np.ndarray() if value.dtype != object:
            return f"{value.dtype}{list(value.shape)} of content {hashlib.sha256(value.tobytes()).hexdigest()[:8]}"
        case jax.ShapeDtypeStruct():
            weak = ", weak" if value.weak_type else ""
            place = "" if value.sharding is None else f" on {_text(value.sharding)}"
            return f"{value.dtype}{list(value.shape)}{weak}{place}"
        case jax.sharding.SingleDeviceSharding():
            (device,) = value.device_set
            return f"{device} ({value.memory_kind})"
        case np.dtype():
            return value.name
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}… of content {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _tagged(tag: str, *chunks: bytes) -> bytes:
    """Lengths in front of everything, so that no two nestings give the same bytes."""
    name = tag.encode()
    head = struct.pack("<II", len(name), len(chunks)) + name
    return head + b"".join(struct.pack("<Q", len(chunk)) + chunk for chunk in chunks)


def _name(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


def _encode(value: Any, path: str, tokens: Tokens | None) -> bytes:
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
            items = [_encode(item, f"{path}[{i}]", tokens) for i, item in enumerate(value)]
            return _tagged(_sequence(value), *items)
        case Mapping():
            pairs = [
                (_encode(k, f"{path} key", tokens), _encode(v, f"{path}[{k!r}]", tokens)) for k, v in value.items()
            ]
            return _tagged("dict", *(chunk for pair in sorted(pairs) for chunk in pair))
        case Set():
            return _tagged("set", *sorted(_encode(item, f"{path} item", tokens) for item in value))
        case jax.ShapeDtypeStruct():
            # The dtype of random keys is not one of NumPy's.
            extended = jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended)
            dtype = str(value.dtype) if extended else np.dtype(value.dtype)
            parts = (tuple(value.shape), dtype, bool(value.weak_type), value.sharding)
            return _tagged("aval", *(_encode(part, path, tokens) for part in parts))
        case jax.Device():
            return _tagged("device", value.platform.encode(), value.device_kind.encode(), str(value.id).encode())
        case jax.sharding.SingleDeviceSharding():
            (device,) = value.device_set
            return _tagged("on", _encode(device, path, tokens), str(value.memory_kind).encode())
        case jax.sharding.NamedSharding():
            mesh = value.mesh
            parts = (tuple(mesh.shape.items()), tuple(str(kind) for kind in mesh.axis_types), mesh.devices.flat)
            encoded = (_encode(tuple(part), path, tokens) for part in parts)
            return _tagged("sharded", *encoded, str(value.spec).encode(), str(value.memory_kind).encode())
        case jax.tree_util.PyTreeDef():
            return _tree(value, path, tokens)
    # np.float32 and jnp.float32 both stand for the dtype.
    if isinstance(value, type) and (issubclass(value, np.generic) or isinstance(getattr(value, "dtype", 0), np.dtype)):
        return _tagged("dtype", _dtype(np.dtype(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:
        fields = [field for field in dataclasses.fields(value) if field.compare]
        items = [
            chunk
            for field in fields
            for chunk in (field.name.encode(), _encode(getattr(value, field.name), f"{path}.{field.name}", tokens))
        ]
        return _tagged("dataclass", _name(type(value)), *items)
    if tokens is not None:
        return _tagged("token", _name(type(value)), tokens.token(value, path).encode())
    raise _without_content(value, path)


def _without_content(value: Any, path: str) -> InvalidArgument:
    return InvalidArgument(
        "a part without content identity",
        where=f"program_key: {path}",
        got=f"a {type(value).__module__}.{type(value).__qualname__}",
        wanted="numbers, strings, enums, tuples, dicts, dtypes, shapes or frozen dataclasses of these",
    )


def _tree(tree: jax.tree_util.PyTreeDef, path: str, tokens: Tokens | None) -> bytes:
    """Node by node: the text of a structure shortens long auxiliary data, so unequal ones can read the same."""
    node = tree.node_data()
    if node is None:
        return _tagged("leaf")
    kind, auxiliary = node
    children = [_encode(child, f"{path}.children[{i}]", tokens) for i, child in enumerate(tree.children())]
    return _tagged("node", _name(kind), _encode(auxiliary, f"{path}.auxiliary", tokens), *children)


def _dtype(dtype: np.dtype) -> bytes:
    # By name: ml_dtypes such as bfloat16 all have the same type string "<V2".
    return (f"{dtype.name}{'>' if dtype.byteorder == '>' else ''}" if dtype.fields is None else str(dtype)).encode()


def _sequence(value: tuple | list) -> str:
    named = isinstance(value, tuple) and type(value) is not tuple
    return _name(type(value)).decode() if named else type(value).__name__
