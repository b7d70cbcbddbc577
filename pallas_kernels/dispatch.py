"""One dispatcher for every operation: the first back end that can serve a call gets it.

A back end is a record of two functions with the operation's own signature: ``refusal`` says
in one sentence why it cannot serve these arguments (or None), ``run`` serves them. Which back
end was chosen, and why the better ones declined, is a printable value (`Choice`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from .errors import CannotServe, InvalidArgument, SlowPathWarning
from .mesh_axes import call_plain


class OutOfScope(str):
    """A reason to decline that lies in what a back end is made for, such as its number of rows.

    `Choice` tells it like any other. No warning does: nothing about the machine or the call is to be put right.
    """


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation. All functions take the same arguments.

    Attributes:
        run: serves a call.
        refusal: why it cannot, or None.
        slower: why a later one serves a call better, or None; asked only when nobody named a back end.
        detail: how it would serve a call, e.g. where its tile comes from; asked by `Operation.explain` alone.
    """

    name: str
    run: Callable[..., Any]
    refusal: Callable[..., str | None]
    slower: Callable[..., str | None] | None = None
    detail: Callable[..., str] | None = None


@dataclass(frozen=True)
class Choice:
    """Which back end serves a call, the reason of each better one that declined, and how the call would be served."""

    operation: str
    backend: str
    declined: tuple[tuple[str, str], ...] = ()
    detail: str | None = None

    def __str__(self) -> str:
        lines = [f"{self.operation}: {self.backend}"]
        lines += [] if self.detail is None else [f"  {self.detail}"]
        lines += [f"  {name} declined: {reason}" for name, reason in self.declined]
        return "\n".join(lines)


@dataclass(frozen=True)
class Operation:
    """An operation and its back ends, best first."""

    name: str
    backends: tuple[Backend, ...]

    def choose(self, *args: Any, backend: str = "auto") -> tuple[Backend, Choice]:
        """The back end for these arguments.

        Args:
            backend: ``"auto"`` takes the first that can serve; a name insists on that one.

        Raises:
            InvalidArgument: no back end has that name.
            CannotServe: the one named, or all of them, declined; carries each reason.
        """
        candidates = self.backends
        if backend != "auto":
            candidates = tuple(b for b in self.backends if b.name == backend)
            if not candidates:
                known = ", ".join(["auto", *(b.name for b in self.backends)])
                raise InvalidArgument(
                    "unknown back end", where=f"{self.name}(backend=…)", got=repr(backend), wanted=known
                )
        declined: list[tuple[str, str]] = []
        for candidate in candidates:
            reason = candidate.refusal(*args)
            if reason is None and backend == "auto" and candidate.slower is not None:
                reason = candidate.slower(*args)
            if reason is None:
                return candidate, Choice(self.name, candidate.name, tuple(declined))
            declined.append((candidate.name, reason))
        reasons = "; ".join(f"{name}: {reason}" for name, reason in declined)
        raise CannotServe(
            "cannot serve",
            where=self.name,
            got=reasons,
            wanted="arguments that one of these back ends takes",
            declined=declined,
        )

    def explain(self, *args: Any, backend: str = "auto") -> Choice:
        """What `choose` chooses, with the back end's own word on it. Runs nothing; raises what `choose` raises."""
        chosen, choice = self.choose(*args, backend=backend)
        return choice if chosen.detail is None else replace(choice, detail=chosen.detail(*args))

    def __call__(self, *args: Any, backend: str = "auto") -> Any:
        """Choose and run. On a GPU a declined kernel is reported once per reason, unless that is `OutOfScope`."""
        chosen, choice = self.choose(*args, backend=backend)
        to_mend = any(not isinstance(reason, OutOfScope) for _, reason in choice.declined)
        if to_mend and jax.default_backend() == "gpu":
            _report_slow_path(choice)
        return call_plain(chosen.run, args)


_reported: set[Choice] = set()


def _report_slow_path(choice: Choice) -> None:
    if choice not in _reported:
        _reported.add(choice)
        # 4: the caller of the public function, past this one, `Operation.__call__` and the function itself.
        warnings.warn(str(choice), SlowPathWarning, stacklevel=4)


def sharding_refusal(where: str, tree: Any) -> None:
    """Refuse sharded arrays outside ``shard_map``, where XLA would gather them without a word.

    Inside ``shard_map`` every mesh axis is manual and the arrays are local. Outside it a sharding
    is known for concrete arrays and for explicit mesh axes. For automatic axes it is decided only
    when XLA compiles, so it is refused as well.

    Raises:
        CannotServe: naming the leaf and its sharding.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        reason = _sharded(leaf)
        if reason:
            raise CannotServe(
                "sharded argument",
                where=f"{where}: {jax.tree_util.keystr(path)}",
                got=reason,
                wanted="an array on one device, a replicated one, or this call inside jax.shard_map",
            )


def _sharded(leaf: Any) -> str | None:
    if not isinstance(leaf, jax.Array):
        return None
    if not isinstance(leaf, jax.core.Tracer):
        return None if leaf.sharding.is_fully_replicated else str(leaf.sharding)
    sharding = jax.typeof(leaf).sharding
    mesh = sharding.mesh
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    wide = {name: kind for name, size, kind in axes if size > 1}
    if any(kind == jax.sharding.AxisType.Auto for kind in wide.values()):
        return f"a mesh with automatic axes {mesh}"
    parts = [part if isinstance(part, tuple) else (part,) for part in sharding.spec]
    return str(sharding.spec) if any(name in wide for part in parts for name in part) else None
