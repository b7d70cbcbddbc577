"""Flax NNX modules as flat arrays, split once and read again at each call.

`nnx.split` walks the whole module and takes milliseconds. A `Split` remembers what it found, and each later call asks
only whether the module still is what was split: the same attributes holding the same objects, the same metadata. The
values of variables may change freely, they are read anew each time.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import PyTreeDef

from moe_jax.cache.keys import Tokens, fields, program_key
from moe_jax.errors import InvalidArgument

_KEPT = 4

# The public method copies it, which would cost as much as all other checks together; a split compares the two once.
_metadata: Callable[[nnx.Variable], Any] = operator.attrgetter("_var_metadata")
_value = nnx.Variable.get_raw_value


class Split:
    """Modules that are split together, so that what they share stays shared.

    Attributes:
        structure: key of everything but the arrays; equal for modules that the same program serves.
        graphdef, tree: what rebuilds them: ``nnx.merge(graphdef, tree.unflatten(leaves))``.
    """

    def __init__(self, modules: Sequence[nnx.Pytree], tokens: Tokens, on_drop: Callable[[Any], None]):
        self.graphdef, state = nnx.split(tuple(modules), graph=True)
        self.tree: PyTreeDef = jax.tree.structure(state)
        # Variables are the modules' own, not copies; what else is there is an array held as an attribute.
        self._items = jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
        self._variables = [item for item in self._items if isinstance(item, nnx.Variable)]
        self._values: PyTreeDef = jax.tree.structure(self._raw())
        self._one_each = self._values == jax.tree.structure([0] * len(self._items))
        try:
            self.structure = program_key(self.graphdef, self.tree, self._values, tokens=tokens)
        except InvalidArgument as error:
            raise _named(error, modules, tokens) from error
        # Modules are held weakly, so that dropping one frees its arrays; all below them strongly, so that no other
        # object can come to be at a remembered address.
        self._roots = [weakref.ref(module, on_drop) for module in modules]
        self._objects, self._mappings, self._lists, self._checkable = _changeable(modules)
        dictionaries = self._dictionaries(modules)
        self._sizes = [len(each) for each in dictionaries]
        self._names = [name for each in dictionaries for name in each]
        self._inside = [item for each in dictionaries for item in each.values()]
        self._listed = [list(each) for each in self._lists]
        public = [variable.get_metadata() for variable in self._variables]
        try:
            self._checkable = self._checkable and list(map(_metadata, self._variables)) == public
        except AttributeError:  # another Flax: its modules are split at each call
            self._checkable = False
        self._public = public

    def of(self, modules: Sequence[nnx.Pytree]) -> bool:
        """Whether these very objects were split."""
        roots = self._roots
        return len(roots) == len(modules) and all(root() is each for root, each in zip(roots, modules, strict=True))

    def alive(self) -> bool:
        """Whether none of the modules has been dropped."""
        return all(root() is not None for root in self._roots)

    def holds(self, modules: Sequence[nnx.Pytree]) -> bool:
        """Whether nothing but values of variables has changed in the modules that were split."""
        if not self._checkable:
            return False
        dictionaries = self._dictionaries(modules)
        return (
            list(map(len, dictionaries)) == self._sizes
            and all(map(operator.is_, itertools.chain.from_iterable(map(dict.values, dictionaries)), self._inside))
            and list(itertools.chain.from_iterable(dictionaries)) == self._names
            and list(map(_metadata, self._variables)) == self._public
            and all(map(_same_items, self._lists, self._listed))
        )

    def leaves(self) -> list[Any] | None:
        """The arrays as they are now; None if a variable holds another structure than it did."""
        leaves, structure = jax.tree.flatten(self._raw())
        return leaves if structure == self._values else None

    def write(self, changed: Mapping[int, Any]) -> None:
        """Put arrays, by the number of their leaf, into the variables they belong to."""
        if self._one_each:
            for index, value in changed.items():
                self._items[index].set_raw_value(value)
            return
        leaves = jax.tree.leaves(self._raw())
        for index, value in changed.items():
            leaves[index] = value
        for item, value in zip(self._items, self._values.unflatten(leaves), strict=True):
            if isinstance(item, nnx.Variable):
                item.set_raw_value(value)

    def owners(self) -> list[Any]:
        """What holds each leaf: a variable, or the array itself where it is a module's attribute."""
        counts = (each.num_leaves for each in self._values.children())
        return [item for item, count in zip(self._items, counts, strict=True) for _ in range(count)]

    def _raw(self) -> list[Any]:
        if len(self._variables) == len(self._items):
            return list(map(_value, self._variables))
        return [_value(item) if isinstance(item, nnx.Variable) else item for item in self._items]

    def _dictionaries(self, modules: Sequence[nnx.Pytree]) -> list[dict[str, Any]]:
        return [*map(vars, modules), *map(vars, self._objects), *self._mappings]


class Splits:
    """The last few splits, by the modules that were split.

    Without a lock, because a module may be dropped, and tell so, at any moment. Threads that meet here may lose a
    split; it is made again.
    """

    def __init__(self, tokens: Tokens):
        self._tokens = tokens
        self._kept: tuple[Split, ...] = ()

    def of(self, modules: Sequence[nnx.Pytree]) -> tuple[Split, list[Any]]:
        """The split of these modules as they are now, and their arrays.

        Raises:
            InvalidArgument: a static attribute that is neither content nor hashable.
        """
        for split in self._kept:
            if split.of(modules):
                leaves = split.leaves() if split.holds(modules) else None
                if leaves is not None:
                    return split, leaves
                break
        split = Split(modules, self._tokens, self._prune)
        others = [each for each in self._kept if each.alive() and not each.of(modules)]
        self._kept = (split, *others[: _KEPT - 1])
        leaves = split.leaves()
        assert leaves is not None, "variables hold what they held a moment ago"
        return split, leaves

    def clear(self) -> None:
        """Forget all of them."""
        self._kept = ()

    def _prune(self, _: Any) -> None:
        self._kept = tuple(split for split in self._kept if split.alive())


def describe(module: Any, path: str) -> tuple[dict[str, str], dict[int, str]]:
    """A module in words: text of every static attribute by path, and the path of every variable by its `id`."""
    texts: dict[str, str] = {}
    paths: dict[int, str] = {}
    for name, value in _attributes(module, path, set()):
        if isinstance(value, nnx.Variable):
            paths.setdefault(id(value), name)
            texts[f"{name} variable"] = type(value).__qualname__
            texts.update(fields(value.get_metadata(), f"{name} metadata "))
        else:
            texts.update(fields(value, name))
    return texts, paths


def _attributes(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Variables and static attributes below a module, by path."""
    if isinstance(value, nnx.Variable):
        yield path, value
        return
    inner = _children(value)
    if inner is None:
        if not isinstance(value, (jax.Array, np.ndarray)):
            yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    yield f"{path} type", type(value)
    for name, child in inner:
        yield from _attributes(child, path + name, seen)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """Named parts of what modules are made of; None for anything else."""
    match value:
        case nnx.Pytree():
            named = [(name, child) for name, child in vars(value).items() if not name.startswith("_pytree__")]
            # An nnx.List keeps its items under numbers.
            return [(f"[{name}]" if name.isdigit() else f".{name}", child) for name, child in named]
        case nnx.State():
            return [(f"[{name!r}]", child) for name, child in value.raw_mapping.items()]
        case dict():
            return [(f"[{name!r}]", child) for name, child in value.items()]
        case tuple() | list():
            return [(f"[{index}]", child) for index, child in enumerate(value)]
    return None


def _changeable(
    modules: Sequence[nnx.Pytree],
) -> tuple[list[nnx.Pytree], list[dict[Any, Any]], list[list[Any]], bool]:
    """What below modules can be changed in place: objects, mappings, lists, and whether that is all of it."""
    objects: list[nnx.Pytree] = []
    mappings: list[dict[Any, Any]] = []
    lists: list[list[Any]] = []
    seen: set[int] = set()
    complete = True
    stack = [child for module in modules for _, child in _children(module) or ()]
    while stack:
        value = stack.pop()
        if isinstance(value, (nnx.Variable, jax.Array)) or any(value is module for module in modules):
            continue
        inner = _children(value)
        if inner is None:
            complete = complete and _immutable(value)
        elif id(value) not in seen:
            seen.add(id(value))
            match value:
                case list():
                    lists.append(value)
                case nnx.Pytree():
                    objects.append(value)
                case nnx.State():
                    mappings.append(value.raw_mapping)
                case dict():
                    mappings.append(value)
            stack.extend(child for _, child in inner)
    return objects, mappings, lists, complete


def _named(error: InvalidArgument, modules: Sequence[nnx.Pytree], tokens: Tokens) -> InvalidArgument:
    """The error of a key, saying which attribute it was."""
    for module in modules:
        for path, value in _attributes(module, type(module).__qualname__, set()):
            try:
                program_key(value.get_metadata() if isinstance(value, nnx.Variable) else value, tokens=tokens)
            except InvalidArgument:
                return InvalidArgument(error.problem, where=f"attribute {path}", got=error.got, wanted=error.wanted)
    return error


def _immutable(value: Any) -> bool:
    """Whether an attribute stays what it is while its object stays. What can be hashed promises that to JAX too."""
    if value is not None and not jax.tree_util.all_leaves([value]):
        return False  # a container of a kind not known here
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _same_items(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(operator.is_, now, then))
