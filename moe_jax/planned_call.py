"""Calls of a planned function taken apart: what of them determines a program, in keys and in words."""

from __future__ import annotations

import enum
import functools
import inspect
import operator
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from typing import Any, NamedTuple

import jax
import jaxlib
import numpy as np
from flax import nnx
from jax.extend.core import get_opaque_trace_state

from moe_jax import versions
from moe_jax.cache.executables import Recipe
from moe_jax.cache.keys import Tokens, fields, program_key
from moe_jax.errors import CannotServe, InvalidArgument

from .splitting import Split, describe

VERSIONS = f"moe_jax {versions.VERSION}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"

# JAX's options that change what a program computes; read for the calling thread, so `with` blocks count.
OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_default_device",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_allow_f16_reductions",
    "jax_disable_jit",
)
_read_options = operator.attrgetter(*OPTIONS)
_aval, _sharding, _committed = map(operator.attrgetter, ("aval", "sharding", "committed"))


class Layout(NamedTuple):
    """How the arguments of a call are used, by their place among positional and then keyword arguments.

    Attributes:
        names: of all of them.
        static: those that are part of the program.
        dynamic: those that hold arrays.
        donated: those of ``dynamic`` whose arrays are given away.
    """

    names: tuple[str, ...]
    static: tuple[int, ...]
    dynamic: tuple[int, ...]
    donated: frozenset[int]


class Call(NamedTuple):
    """One call, taken apart.

    Attributes:
        head: everything that determines the program but the leaves: how the function was called, which arguments are
            modules, the structure of the others, keys of the modules' structure, the static values and the plan, and
            JAX's options. Equal heads and leaves of equal kind are served by one program.
        leaves: arrays and numbers, those of modules last.
        plain: how many of them are not of modules.
        values: positional and keyword arguments as given.
        modules: which of ``layout.dynamic`` are Flax modules.
        tree: structure of those that are not.
        split: of those that are.
        plan: the plan's value.
    """

    head: tuple[Any, ...]
    leaves: list[Any]
    plain: int
    layout: Layout
    values: tuple[Any, ...]
    modules: tuple[bool, ...]
    tree: jax.tree_util.PyTreeDef
    split: Split | None
    plan: Any


@dataclass(frozen=True)
class Place:
    """Where and how a leaf lies.

    Attributes:
        aval: shape, dtype and weak type; with a sharding if it counts that the array is bound to its devices.
        device: of an array that is not bound to it, or of which that does not count.
        order: axes from major to minor, where that is not the usual order.
    """

    aval: jax.ShapeDtypeStruct
    device: jax.Device | None
    order: tuple[int, ...] | None


class Leaves:
    """What leaves must look like to be served by one program, compared by identity where JAX gives one object for equal
    ones.
    """

    def __init__(self, leaves: Sequence[Any]):
        self._types = list(map(type, leaves))
        self._arrays = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        self._others = [index for index, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)]
        arrays = self._only(leaves)
        self._avals, self._shardings = list(map(_aval, arrays)), list(map(_sharding, arrays))
        self._committed = list(map(_committed, arrays)) if _binding_counts(leaves) else None
        self._other_avals = [jax.typeof(leaves[index]) for index in self._others]
        self._orders = list(map(_order, arrays))

    def serve(self, leaves: Sequence[Any]) -> bool:
        """Whether other leaves are of the same kind."""
        if list(map(type, leaves)) != self._types:
            return False
        arrays = self._only(leaves)
        shardings = list(map(_sharding, arrays))
        if (
            list(map(_aval, arrays)) != self._avals
            or shardings != self._shardings
            or (self._committed is not None and list(map(_committed, arrays)) != self._committed)
            or [jax.typeof(leaves[index]) for index in self._others] != self._other_avals
        ):
            return False
        self._shardings = shardings  # the same objects are likely to come again
        return True

    def lie_alike(self, leaves: Sequence[Any]) -> bool:
        """Whether the arrays' axes have the same order in memory, which `serve` does not look at."""
        return list(map(_order, self._only(leaves))) == self._orders

    def _only(self, leaves: Sequence[Any]) -> Sequence[Any]:
        return [leaves[index] for index in self._arrays] if self._others else leaves


class Remembered:
    """Program keys of a value that is likely to come again: made once while the same frozen object comes."""

    def __init__(self, tokens: Tokens | None, where: str):
        self._tokens, self._where = tokens, where
        self._last: tuple[Any, str] | None = None

    def key(self, value: Any, name: str) -> str:
        """Its program key.

        Raises:
            InvalidArgument: a value without content, and without equality where that would do.
        """
        last = self._last
        if last is not None and last[0] is value:
            return last[1]
        if self._tokens is not None:
            _check_static(value, name, self._where)
        try:
            key = program_key(value, tokens=self._tokens)
        except InvalidArgument as error:
            where = f"{self._where}: {name}{error.where.removeprefix('program_key: parts[0]')}"
            raise InvalidArgument(error.problem, where=where, got=error.got, wanted=error.wanted) from error
        self._last = (value, key) if _frozen(value) else None
        return key


def layout(
    fn: Callable[..., Any],
    positional: int,
    keywords: tuple[str, ...],
    static: Sequence[int | str],
    donate: Sequence[int | str],
) -> Layout:
    """How a call with so many positional and these keyword arguments uses them."""
    parameters = _parameters(fn)
    ordered = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    rest = next((each.name for each in parameters if each.kind == each.VAR_POSITIONAL), "args")
    extra = [f"{rest}[{index}]" for index in range(positional - len(ordered))]
    names = (*[*ordered, *extra][:positional], *keywords)

    numbered = dict(enumerate([*ordered, *extra]))

    def chosen(items: Sequence[int | str]) -> set[int]:
        wanted = {item if isinstance(item, str) else numbered.get(item) for item in items}
        return {index for index, each in enumerate(names) if each in wanted}

    fixed = chosen(static)
    dynamic = tuple(index for index in range(len(names)) if index not in fixed)
    return Layout(names, tuple(sorted(fixed)), dynamic, frozenset(chosen(donate)))


def check_names(fn: Callable[..., Any], where: str, static: Sequence[int | str], donate: Sequence[int | str]) -> None:
    """Refuse names and numbers of arguments that the function does not have, or that are given twice."""
    parameters = _parameters(fn)
    known = {each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    any_number = not parameters or any(each.kind == each.VAR_POSITIONAL for each in parameters)
    any_name = not parameters or any(each.kind == each.VAR_KEYWORD for each in parameters)
    for option, items in (("static", static), ("donate", donate)):
        for item in items:
            number = isinstance(item, int) and not isinstance(item, bool) and item >= 0
            number = number and (any_number or item < len(parameters))
            if not (number or (isinstance(item, str) and (any_name or item in known))):
                raise InvalidArgument(
                    option,
                    where=where,
                    got=repr(item),
                    wanted=f"names or numbers of arguments ({', '.join(sorted(known))})",
                )
    ordered = [each.name for each in parameters]
    named = [
        {ordered[item] if isinstance(item, int) and item < len(ordered) else item for item in items}
        for items in (static, donate)
    ]
    if both := named[0] & named[1]:
        raise InvalidArgument(
            "arguments both static and donated", where=where, got=sorted(map(str, both)), wanted="one of the two"
        )


def is_derived(plan: Any, where: str) -> bool:
    """Whether a plan is a function of the arguments, and not a value.

    Raises:
        InvalidArgument: it is neither.
    """
    try:
        program_key(plan)
    except InvalidArgument as error:
        if callable(plan):
            return True
        inside = error.where.removeprefix("program_key: parts[0]")
        raise InvalidArgument(f"plan{inside}", where=where, got=error.got, wanted=error.wanted) from error
    return False


def environment() -> tuple[Any, ...]:
    """JAX's options and mesh, as they hold for the calling thread."""
    mesh = jax.sharding.get_abstract_mesh()
    return (*_read_options(jax.config), None if mesh.empty else mesh)


@functools.cache
def outside_of_traces() -> Any:
    """The trace state in which nothing is traced. It is that of a new thread; this one may be tracing just now."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(get_opaque_trace_state(convention="moe_jax")))
    thread.start()
    thread.join()
    return found[0]


@functools.lru_cache(maxsize=1024)
def is_module(kind: type) -> bool:
    """Whether values of a type are Flax NNX modules, or other objects of NNX that hold variables."""
    return issubclass(kind, nnx.Pytree)


def _check_static(value: Any, name: str, where: str) -> None:
    """Refuse a static value that equals nothing but itself: built anew for each call, it would compile each time."""
    identity = type(value).__hash__ is object.__hash__ and not callable(value)
    if identity and not isinstance(value, (enum.Enum, np.dtype)) and not is_dataclass(value):
        raise InvalidArgument(
            "a static value without equality",
            where=f"{where}: {name}",
            got=f"a {type(value).__module__}.{type(value).__qualname__}",
            wanted="numbers, strings, tuples, frozen dataclasses, functions, or types with __eq__ and __hash__",
        )


def places(call: Call, where: str, *, abstract: bool) -> list[Place]:
    """Where each leaf lies.

    Args:
        abstract: `jax.ShapeDtypeStruct` may stand for arrays.

    Raises:
        InvalidArgument: something that is neither array nor number, or arrays bound to different devices.
    """
    found, binding = [], _binding_counts(call.leaves)
    for index, leaf in enumerate(call.leaves):
        place = _place(leaf, abstract=abstract, binding=binding)
        if place is None:
            raise InvalidArgument(
                "argument",
                where=f"{where}: {leaf_names(call)[index]}",
                got=f"a {type(leaf).__module__}.{type(leaf).__qualname__}",
                wanted="arrays, numbers or Flax NNX modules; name other values in static=",
            )
        found.append(place)
    bound = [(index, place.aval.sharding.device_set) for index, place in enumerate(found) if place.aval.sharding]
    for index, devices in bound:
        if devices != bound[0][1]:
            names = leaf_names(call)
            (first, first_devices), second = bound[0], names[index]
            raise InvalidArgument(
                "arguments on different devices",
                where=where,
                got=f"{names[first]} on {_device_names(first_devices)}, {second} on {_device_names(devices)}",
                wanted="all on the same",
            )
    return found


def _place(leaf: Any, *, abstract: bool, binding: bool) -> Place | None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if not abstract:
            return None
        aval, sharding, bound = leaf, leaf.sharding, True
    elif isinstance(leaf, jax.Array):
        aval, sharding, bound = jax.typeof(leaf), leaf.sharding, leaf.committed
    elif isinstance(leaf, (bool, int, float, complex, np.ndarray, np.generic)):
        aval, sharding, bound = jax.typeof(leaf), None, False
    else:
        return None
    device = None
    if sharding is None:
        device = _default_device()
    elif len(sharding.device_set) == 1 and not (bound and binding):
        (device,), sharding = sharding.device_set, None
    struct = jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
    return Place(struct, device, _order(leaf))


def _binding_counts(leaves: Sequence[Any]) -> bool:
    """Whether it matters that an array is bound to its device: everywhere but where all lie on the only one there is.

    That is the default one too then; the host of a single GPU is another.
    """
    devices = jax.devices()
    if len(devices) > 1 or _default_device() != devices[0]:
        return True
    only = jax.sharding.SingleDeviceSharding(devices[0])
    return any(getattr(leaf, "sharding", None) not in (None, only) for leaf in leaves)


def _order(array: Any) -> tuple[int, ...] | None:
    """Axes of an array, or of what stands for one, from major to minor; None: the usual order."""
    laid = getattr(getattr(array, "format", None), "layout", None)  # random keys have none
    order = () if laid is None else tuple(laid.major_to_minor)
    return None if order == tuple(range(len(order))) else order


def _default_device() -> jax.Device:
    device = jax.config.jax_default_device
    if isinstance(device, jax.Device):
        return device
    return jax.local_devices(backend=device)[0]


def _device_names(devices: set[jax.Device]) -> str:
    return ", ".join(sorted(map(str, devices)))


def leaf_names(call: Call) -> list[str]:
    """A path for each leaf: ``cache['k'][0]``, ``model.moe.gate_up``."""
    dynamic = [call.layout.names[index] for index in call.layout.dynamic]
    numbered = call.tree.unflatten(range(call.plain))
    names = [
        dynamic[path[0].idx] + jax.tree_util.keystr(path[1:])
        for path, _ in jax.tree_util.tree_leaves_with_path(numbered)
    ]
    if call.split is not None:
        _, paths = _describe_modules(call)
        names += [paths.get(id(owner), "an array of a module") for owner in call.split.owners()]
    return names


def texts(call: Call, found: Sequence[Place], command_buffers: bool | None) -> dict[str, str]:
    """Everything that determines the program, as text by path; for people."""
    result = fields(call.plan, "plan")
    for index in call.layout.static:
        result |= fields(call.values[index], call.layout.names[index])
    if call.split is not None:
        result |= _describe_modules(call)[0]
    unbound = ", not committed" if _binding_counts(call.leaves) else ""
    for name, place in zip(leaf_names(call), found, strict=True):
        aval, sharding = place.aval, place.aval.sharding
        result[name] = f"{aval.dtype}{list(aval.shape)}{', weak type' if aval.weak_type else ''}"
        result[f"{name} device"] = f"{place.device}{unbound}" if sharding is None else fields(sharding)[""]
        if place.order is not None:
            result[f"{name} order of axes"] = str(list(place.order))
    result |= fields(dict(zip(OPTIONS, call.head[-1], strict=False)), "jax.config")
    dynamic = (call.layout.names[index] for index in call.layout.dynamic if index in call.layout.donated)
    result["donate"] = ", ".join(sorted(dynamic)) or "nothing"
    result["command_buffers"] = repr(command_buffers)
    result["structure of the arguments"] = str(call.tree)
    return result


def _describe_modules(call: Call) -> tuple[dict[str, str], dict[int, str]]:
    words: dict[str, str] = {}
    paths: dict[int, str] = {}
    for index, module in zip(call.layout.dynamic, call.modules, strict=True):
        if module:
            said, named = describe(call.values[index], call.layout.names[index])
            words |= said
            paths = named | paths
    return words, paths


def recipe(fn: Callable[..., Any], call: Call, where: str) -> Recipe:
    """What to compile for a call: a function of its leaves, which gives the result and the modules' changed arrays."""
    split, positional = call.split, len(call.values) - len(call.head[0][1:])
    keywords = call.head[0][1:]

    def flat(*leaves: Any) -> tuple[Any, dict[int, Any]]:
        plain = iter(call.tree.unflatten(leaves[: call.plain]))
        inside = leaves[call.plain :]
        merged = () if split is None else nnx.merge(split.graphdef, split.tree.unflatten(inside))
        modules = iter(merged)
        values = list(call.values)
        for index, module in zip(call.layout.dynamic, call.modules, strict=True):
            placeholder = next(plain)
            values[index] = next(modules) if module else placeholder
        result = fn(*values[:positional], **dict(zip(keywords, values[positional:], strict=True)))
        _check_result(result, where)
        return result, {} if split is None else _changed(split, merged, inside, where)

    flat.__name__ = flat.__qualname__ = getattr(fn, "__name__", "planned")
    return Recipe(flat, call.leaves, _donated(flat, call))


def _check_result(result: Any, where: str) -> None:
    for leaf in jax.tree.leaves(result, is_leaf=lambda value: isinstance(value, nnx.Pytree)):
        if isinstance(leaf, nnx.Pytree):
            raise InvalidArgument(
                "a module in the result",
                where=where,
                got=type(leaf).__qualname__,
                wanted="arrays; changes of variables reach the module that was passed in",
            )


def _changed(split: Split, merged: tuple[Any, ...], before: Sequence[Any], where: str) -> dict[int, Any]:
    """Arrays that the function put into variables, by the number of their leaf among those of modules."""
    graphdef, state = nnx.split(merged, graph=True)
    after, tree = jax.tree.flatten(state)
    if graphdef != split.graphdef or tree != split.tree:
        raise CannotServe(
            "the function changed the structure of a module",
            where=where,
            got="other variables or attributes after the call than before",
            wanted="values of variables changed only; make what is missing before the first call",
        )
    changed = {index: new for index, (old, new) in enumerate(zip(before, after, strict=True)) if new is not old}
    owners = split.owners()
    for index in changed:
        if not isinstance(owners[index], nnx.Variable):
            raise CannotServe(
                "the function replaced an array that is a module's attribute",
                where=where,
                got=f"an array of shape {list(owners[index].shape)}",
                wanted="a variable: wrap it in nnx.Variable",
            )
    return changed


def _donated(flat: Callable[..., Any], call: Call) -> tuple[int, ...]:
    """Leaves given away: all of an argument that holds arrays, of a module those that the function replaces."""
    counts = [child.num_leaves for child in call.tree.children()]
    starts = np.cumsum([0, *counts])
    given: list[int] = []
    inside: set[int] = set()
    for place, (index, module) in enumerate(zip(call.layout.dynamic, call.modules, strict=True)):
        if index not in call.layout.donated:
            continue
        if module:
            state = nnx.state(call.values[index], graph=True)
            inside |= {id(each) for each in jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))}
        given += range(starts[place], starts[place + 1])
    if inside and call.split is not None:
        owners = call.split.owners()
        changed = jax.eval_shape(flat, *call.leaves)[1]
        given += [call.plain + index for index in changed if id(owners[index]) in inside]
    return tuple(given)


def _parameters(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # built in, without a signature
        return []


def _frozen(value: Any) -> bool:
    """Whether a value is the same as long as its object is."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_frozen, value))
    if is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen
        return frozen and all(_frozen(getattr(value, field.name)) for field in fields_of(value))
    plain = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, np.generic, type, types.FunctionType)
    return value is None or isinstance(value, (*plain, types.BuiltinFunctionType))
