"""Manifests by namespace, and who owns each: what may be certified now.

A manifest is accepted whole or rejected with one reason, and a rejected one changes nothing. Every accepted manifest,
also one equal to the last, advances the *candidate generation*, and every change of ownership the *owner generation* of
its namespace. Both only grow, so what was made under an old one can be swept without asking whether it might return.

    registry = Registry()
    registry.accept(manifest)
    certificate = Certificate(namespace=…, owner_generation=registry.owner_generation("main"), …)
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from moe_jax.pallas_kernels.errors import InvalidArgument

from .identity import BankRole, Certificate, Group, Manifest
from .launches import ALIGNMENT, Buffer
from .names import one_of

SIBLINGS: tuple[frozenset[BankRole], ...] = (frozenset({"gate_up", "down"}), frozenset({"gate", "up", "down"}))

Refusal = Literal["no grouped context", "stale owner generation", "admission closed"]


class Problem(NamedTuple):
    """Why a manifest is rejected."""

    problem: str
    got: object
    wanted: object


def manifest_problems(manifest: Manifest) -> Iterator[Problem]:
    """Everything wrong with a manifest, in the order of its groups; the first is the reason of a rejection."""
    if not manifest.namespace:
        yield Problem("namespace", manifest.namespace, "a name")
    if not manifest.groups:
        yield Problem("groups", "none", "at least one")
    layers: set[int] = set()
    names: set[str] = set()
    for group in manifest.groups:
        if group.layer in layers:
            yield Problem("layer", f"{group.layer} twice", "every layer once")
        layers.add(group.layer)
        for buffer in group.buffers:
            if buffer.name in names:
                yield Problem("buffer", f"{buffer.name} twice", "every bank and rider its own")
            names.add(buffer.name)
        yield from _group_problems(group)


def _group_problems(group: Group) -> Iterator[Problem]:
    of = f"of layer {group.layer}"
    roles = [bank.role for bank in group.banks]
    if len(set(roles)) != len(roles) or frozenset(roles) not in SIBLINGS:
        yield Problem(f"banks {of}", roles, "gate_up and down, or gate, up and down")
    if not 1 <= group.top_k <= group.experts:
        yield Problem(f"top_k {of}", group.top_k, f"1 to {group.experts}, the number of experts")
    if not group.top_k <= group.slots <= group.experts:
        yield Problem(f"slots {of}", group.slots, f"{group.top_k} (top_k) to {group.experts} (experts)")
    for buffer in group.buffers:
        if not buffer.shape or buffer.shape[0] != group.slots:
            yield Problem(f"shape of {buffer.name}", list(buffer.shape), f"{group.slots} slots first")
        elif not _aligned(buffer):
            wanted = f"a multiple of {ALIGNMENT} bytes between experts, the last axis contiguous"
            yield Problem(f"strides of {buffer.name}", list(buffer.strides), wanted)
    yield from _sibling_problems(group, of)


def _aligned(bank: Buffer) -> bool:
    """An expert begins where 16-byte loads may, and its elements lie side by side. Riders may be as small as one."""
    if len(bank.shape) < 3:
        return True
    step = bank.strides[0] * np.dtype(bank.dtype).itemsize
    return step % ALIGNMENT == 0 and bank.strides[-1] == 1


def _sibling_problems(group: Group, of: str) -> Iterator[Problem]:
    banks = {bank.role: bank.buffer for bank in group.banks}
    flat = [f"{buffer.name}{list(buffer.shape)}" for buffer in banks.values() if len(buffer.shape) != 3]
    if flat:
        yield Problem(f"banks {of}", flat, "[slots, out, in]")
    if flat or frozenset(banks) not in SIBLINGS:
        return
    down = banks.pop("down")
    _, hidden, width = down.shape
    for role, buffer in banks.items():
        wanted = (group.slots, 2 * width if role == "gate_up" else width, hidden)
        if buffer.shape != wanted:
            yield Problem(f"shape of {buffer.name}", list(buffer.shape), f"{list(wanted)}, beside {down.name}")
        if buffer.dtype != down.dtype:
            yield Problem(f"dtype of {buffer.name}", buffer.dtype, f"{down.dtype}, as {down.name}")


@dataclass
class _Namespace:
    """What is known of one. Read without a lock, each field once in a call: no two of them belong together.

    Attributes:
        accepted: the manifest and its candidate generation, as one value; None: there is none.
        owner_generation: of the present owner.
        closed: why no step is admitted; None: steps are.
    """

    accepted: tuple[Manifest, int] | None = None
    owner_generation: int = 1
    closed: str | None = None


class Registry:
    """Manifests and generations of every namespace; thread-safe.

    Attributes:
        version: moved by every change, so that a step compares one integer.
    """

    def __init__(self) -> None:
        self.version = 0
        self._generation = 0
        self._namespaces: dict[str, _Namespace] = {}
        self._lock = threading.Lock()

    def accept(self, manifest: Manifest) -> int:
        """Make a manifest its namespace's own; returns the new candidate generation.

        Raises:
            InvalidArgument: the manifest is rejected, with the first reason; the one before stays.
        """
        for problem in manifest_problems(manifest):
            where = f"Registry.accept({manifest.namespace!r})"
            raise InvalidArgument(problem.problem, where=where, got=problem.got, wanted=problem.wanted)
        manifest.key  # noqa: B018 (hashed now, once, and not in the first step of a plan)
        with self._lock:
            space = self._namespaces.setdefault(manifest.namespace, _Namespace())
            self._generation += 1
            space.accepted = manifest, self._generation
            self.version += 1
            return self._generation

    def retire(self, namespace: str) -> None:
        """Forget a namespace's manifest: its steps have no grouped context until another is accepted.

        Raises:
            InvalidArgument: no manifest of the namespace was ever accepted.
        """
        self._change(namespace, "retire", accepted=None)

    def advance_owner(self, namespace: str) -> int:
        """Ownership changed (an adapter loaded, unloaded or replaced, another model): returns the new generation.

        Raises:
            InvalidArgument: no manifest of the namespace was ever accepted.
        """
        with self._lock:
            space = self._space(namespace, "advance_owner")
            space.owner_generation += 1
            self.version += 1
            return space.owner_generation

    def close_admission(self, namespace: str, reason: str) -> None:
        """Admit no step of a namespace until `open_admission`; ordinary ones run direct and say ``reason``.

        Raises:
            InvalidArgument: no manifest of the namespace was ever accepted.
        """
        self._change(namespace, "close_admission", closed=reason)

    def open_admission(self, namespace: str) -> None:
        """Admit steps again.

        Raises:
            InvalidArgument: no manifest of the namespace was ever accepted.
        """
        self._change(namespace, "open_admission", closed=None)

    def owner_generation(self, namespace: str) -> int:
        """What a certificate of the present owner carries.

        Raises:
            InvalidArgument: no manifest of the namespace was ever accepted.
        """
        return (self._namespaces.get(namespace) or self._space(namespace, "owner_generation")).owner_generation

    def manifest(self, namespace: str) -> tuple[Manifest | None, int]:
        """The accepted manifest and its candidate generation; (None, 0) where there is none."""
        space = self._namespaces.get(namespace)
        return (None, 0) if space is None else space.accepted or (None, 0)

    def admit(self, certificate: Certificate) -> tuple[Refusal, str] | None:
        """Why a well-formed certificate is not admitted now, and the particulars; None: it is."""
        space = self._namespaces.get(certificate.namespace)
        if space is None or space.accepted is None:
            return "no grouped context", f"no manifest of namespace {certificate.namespace!r}"
        owner, closed = space.owner_generation, space.closed
        if certificate.owner_generation != owner:
            return "stale owner generation", f"owner generation {certificate.owner_generation}, now {owner}"
        return None if closed is None else ("admission closed", closed)

    def current(self) -> dict[str, tuple[int, int]]:
        """Owner generation and candidate generation of every namespace that has a manifest: what was made under others
        may be used no more.
        """
        spaces = [*self._namespaces.items()]  # as they are now, whatever another thread adds
        return {
            name: (space.owner_generation, accepted[1])
            for name, space in spaces
            if (accepted := space.accepted) is not None
        }

    def _change(self, namespace: str, method: str, **fields: Any) -> None:
        with self._lock:
            space = self._space(namespace, method)
            for name, value in fields.items():
                setattr(space, name, value)
            self.version += 1  # last: who sees it sees the change

    def _space(self, namespace: str, method: str) -> _Namespace:
        space = self._namespaces.get(namespace)
        if space is None:
            wanted = one_of(namespace, self._namespaces)
            raise InvalidArgument("namespace", where=f"Registry.{method}", got=namespace, wanted=wanted)
        return space
