"""Identity of a step: four nested checks, each a function of its own.

1. `check_program`: the same kernels, shapes, layouts, slots, top-k, compiler and device? Portable between processes.
2. `check_plan_key`: the same owner, row semantics, row bucket and manifest? Finds a graph in this process.
3. `check_properties`: the same copy extents, coverage and certificate?
4. `check_resources`: the same memory of the same owners?

Each returns None or the first `Mismatch`. They only compare: looking whether a graph would serve changes nothing.

Which experts are routed or resident, which row uses which adapter, and every other content of device memory are in none
of them: they are device data, and the kernels read them at each replay.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .keys import program_key
from .launches import Buffer, Launch, LaunchList
from .resources import Resource, ResourceTable, Witness

Semantics = Literal["independent", "sequential", "speculative"]
Phase = Literal["decode", "prompt"]
BankRole = Literal["gate_up", "gate", "up", "down"]

# Programs that a store remembers: a few for each of its launch lists.
MOST_PROGRAMS = 256


@dataclass(frozen=True, init=False)
class Certificate:
    """What a step declares about itself. Anything can be built; ``problem`` says whether it is well-formed.

    Attributes:
        namespace: owner of the step (main model, draft model, an adapter set).
        owner_generation: of that owner, from `Registry.owner_generation`.
        semantics: ``"independent"``: each row its own sequence; ``"sequential"``: rows of one sequence;
            ``"speculative"``: several rows for each of several sequences.
        rows: rows that live; the others of the bucket are masked on the device.
        bucket: rows of the launch list.
        sequences: that live.
        phase: prompt work has keys of its own and is never captured.
        required: the step runs grouped or fails.
        problem: why no step can be certified by this; None if one can.
        identity: what of it is part of a key. Independent rows: places for sequences, as which of them live is device
            data.
    """

    namespace: str
    owner_generation: int
    semantics: Semantics
    rows: int
    bucket: int
    sequences: int
    phase: Phase
    required: bool
    problem: str | None = field(init=False, compare=False, repr=False)
    identity: tuple[str, int, Semantics, Phase, int, int] = field(init=False, compare=False, repr=False)

    def __init__(
        self,
        *,
        namespace: str,
        owner_generation: int,
        semantics: Semantics,
        rows: int,
        bucket: int,
        sequences: int,
        phase: Phase = "decode",
        required: bool = False,
    ):
        # Not one by one, which takes a frozen class three times as long: a new owner's first step makes a new one.
        places = bucket if semantics == "independent" else sequences
        vars(self).update(
            namespace=namespace, owner_generation=owner_generation, semantics=semantics, rows=rows, bucket=bucket,
            sequences=sequences, phase=phase, required=required,
            problem=_problem(namespace, owner_generation, semantics, rows, bucket, sequences, phase),
            identity=(namespace, owner_generation, semantics, phase, bucket, places),
        )  # fmt: skip


def _problem(
    namespace: str, owner_generation: int, semantics: Semantics, rows: int, bucket: int, sequences: int, phase: Phase
) -> str | None:
    """See `Certificate`."""
    if not (type(owner_generation) is type(rows) is type(bucket) is type(sequences) is int):
        return "owner_generation, rows, bucket and sequences must be integers"
    if type(namespace) is not str or not namespace:
        return "no namespace"
    if semantics not in ("independent", "sequential", "speculative"):
        return f"row semantics {semantics!r}"
    if phase not in ("decode", "prompt"):
        return f"phase {phase!r}"
    if not 1 <= rows <= bucket:
        return f"{rows} rows in a bucket of {bucket}"
    if semantics == "independent":
        fits = sequences == rows
    elif semantics == "sequential":
        fits = sequences == 1
    else:
        fits = sequences >= 1 and rows % sequences == 0
    return None if fits else f"{sequences} sequences in {rows} {semantics} rows"


@dataclass(frozen=True)
class Bank:
    """One expert tensor of one layer, as declared.

    Attributes:
        role: its part in the expert's network.
        buffer: name and layout in launch lists; the first axis is the slot.
        riders: scales and biases, under the same slot index.
    """

    role: BankRole
    buffer: Buffer
    riders: tuple[Buffer, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Group:
    """The sibling banks of one layer, which share one routing and one slot index.

    Attributes:
        layer: unique in its manifest.
        banks: gate_up, or gate and up; and down.
        experts, top_k: of the layer's router.
        slots: places for experts in each bank; all of them for a layer whose experts are resident.
        staged: served by the host in waves; never captured.
    """

    layer: int
    banks: tuple[Bank, ...]
    experts: int
    top_k: int
    slots: int
    staged: bool = False

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        """All memory under the group's slot index."""
        return tuple(buffer for bank in self.banks for buffer in (bank.buffer, *bank.riders))


@dataclass(frozen=True)
class Manifest:
    """All groups of a namespace."""

    namespace: str
    groups: tuple[Group, ...]

    @functools.cached_property
    def key(self) -> str:
        """sha256 of the content."""
        return program_key("manifest", self)


class PlanKey(NamedTuple):
    """Finds a graph in this process."""

    program: str
    namespace: str
    owner_generation: int
    semantics: Semantics
    phase: Phase
    bucket: int
    sequences: int
    generation: int


class Coverage(NamedTuple):
    """Which launches read a group's banks, and why the group is not eligible (None: it is)."""

    layer: int
    launches: tuple[int, ...]
    reason: str | None


class Properties(NamedTuple):
    """What may change under one key: extents of copies, sha256 of the coverage, identity of the certificate."""

    extents: tuple[int, ...]
    coverage: str
    certificate: tuple[Any, ...]


@dataclass(frozen=True)
class Fingerprint:
    """Of an expert plan. ``program`` is portable between processes, ``resource`` belongs to this one."""

    program: str
    resource: tuple[tuple[str, Witness], ...]


class Program(NamedTuple):
    """What of a plan content alone determines: launch list, manifest, row bucket, compiler.

    Attributes:
        key: portable fingerprint.
        coverage: of each group, in the manifest's order.
        uncovered: expert launches that no registered group owns.
        refusal: the first reason why the step is not covered; None: every expert launch is bound to a registered group.
        routes: (row, rank) pairs of the bucket at most.
        staged: why it runs host-staged; None when it does not.
        covers: sha256 of the coverage.
    """

    key: str
    coverage: tuple[Coverage, ...]
    uncovered: tuple[int, ...]
    refusal: str | None
    routes: int
    staged: str | None
    covers: str


# By the keys of launch list and manifest, and the row bucket; of one compiler.
Programs = dict[tuple[str, str, int], Program]


class Plan(NamedTuple):
    """Immutable binding of a step's launches to the groups of a manifest.

    Attributes:
        key: finds the plan and its graph.
        launches, manifest: what is bound to what.
        program, properties: see `Program` and `Properties`.
    """

    key: PlanKey
    launches: LaunchList
    manifest: Manifest
    program: Program
    properties: Properties


def compile_plan(
    key: PlanKey,
    launches: LaunchList,
    certificate: Certificate,
    manifest: Manifest,
    compiler: str,
    programs: Programs,
) -> Plan:
    """Bind a step's expert launches to the groups whose banks they read.

    Args:
        compiler: compiler and device capability, from the runtime.
        programs: that are known: owner and generation change nothing of a program, so it is compiled once.
    """
    content = launches.key, manifest.key, certificate.bucket
    program = programs.get(content)
    if program is None:
        program = programs[content] = compile_program(launches, certificate.bucket, manifest, compiler)
        if len(programs) > MOST_PROGRAMS:
            del programs[next(iter(programs))]
    return Plan(key, launches, manifest, program, Properties(launches.extents, program.covers, certificate.identity))


def compile_program(launches: LaunchList, bucket: int, manifest: Manifest, compiler: str) -> Program:
    """See `compile_plan`."""
    owner = {buffer.name: group for group in manifest.groups for buffer in group.buffers}
    readers: dict[int, list[int]] = {group.layer: [] for group in manifest.groups}
    named: dict[int, set[str]] = {group.layer: set() for group in manifest.groups}
    mixed, uncovered = set(), []
    for index, launch in enumerate(launches.launches):
        if not isinstance(launch, Launch) or not launch.expert:
            continue
        names = {operand.buffer for operand in launch.operands}
        layers = {owner[name].layer for name in names if name in owner}
        if not layers:
            uncovered.append(index)
        if len(layers) > 1:
            mixed |= layers
        for layer in layers:
            readers[layer].append(index)
            named[layer] |= names
    coverage = tuple(
        Coverage(group.layer, tuple(readers[group.layer]), _reason(group, named[group.layer], launches, mixed))
        for group in manifest.groups
    )
    return Program(
        key=program_key("expert plan", launches.key, manifest.key, compiler),
        coverage=coverage,
        uncovered=tuple(uncovered),
        refusal=_refusal(coverage, uncovered, launches),
        routes=bucket * max((group.top_k for group in manifest.groups), default=0),
        staged=next(filter(None, (_staged(group, bucket) for group in manifest.groups)), None),
        covers=program_key(coverage, uncovered),
    )


def _refusal(coverage: Sequence[Coverage], uncovered: Sequence[int], launches: LaunchList) -> str | None:
    if uncovered:
        launch = launches.launches[uncovered[0]]
        name = launch.spec.name if isinstance(launch, Launch) else "copy"
        return f"launch {uncovered[0]} ({name}) reads experts of no registered group"
    return next((f"group of layer {c.layer}: {c.reason}" for c in coverage if c.reason), None)


def _reason(group: Group, named: set[str], launches: LaunchList, mixed: set[int]) -> str | None:
    if group.layer in mixed:
        return "a launch reads banks of another group too"
    for buffer in group.buffers:
        if buffer.name not in named:
            return f"no expert launch reads {buffer.name}"
        used = launches.by_name[buffer.name]
        if used.layout != buffer.layout:
            return f"{buffer.name} is declared as {_text(buffer)} and used as {_text(used)}"
    return None


def _staged(group: Group, bucket: int) -> str | None:
    if group.staged:
        return f"group of layer {group.layer} is host-staged"
    distinct = min(bucket * group.top_k, group.experts)
    if distinct > group.slots:
        return f"{distinct} distinct experts possible in layer {group.layer}, {group.slots} slots"
    return None


def _text(buffer: Buffer) -> str:
    return f"{buffer.dtype}{list(buffer.shape)} with strides {list(buffer.strides)}"


# What is in place of a witness that is no more.
_GONE = (None,) * len(Witness._fields)


class Mismatch(NamedTuple):
    """The first difference a check met: which check, where in what it compares, and both values."""

    check: Literal["program", "plan key", "properties", "resources"]
    path: str
    was: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.check}: {self.path} was {self.was}, is {self.now}"


def check_program(recorded: str, present: str) -> Mismatch | None:
    """Portable fingerprints. Guards compiled kernels and executables, which hold no addresses."""
    return None if recorded == present else Mismatch("program", "program", recorded, present)


def check_plan_key(recorded: PlanKey, present: PlanKey) -> Mismatch | None:
    """Keys within one process; the first field that differs."""
    if recorded == present:
        return None
    field = next(f for f, was, now in zip(PlanKey._fields, recorded, present, strict=True) if was != now)
    return Mismatch("plan key", field, getattr(recorded, field), getattr(present, field))


def check_properties(recorded: Properties, present: Properties) -> Mismatch | None:
    """Launch properties and plan identity."""
    if recorded is present or recorded == present:
        return None
    field = next(f for f in ("certificate", "coverage", "extents") if getattr(recorded, f) != getattr(present, f))
    return Mismatch("properties", field, getattr(recorded, field), getattr(present, field))


class Held(NamedTuple):
    """The resources that a step runs or a graph was captured with, and a graph's claim on their memory.

    Attributes:
        table, version: the table and its version when they were last found to be the present ones.
        launches: whose buffers they are.
        witnesses: of all that the table had, by name; never changed, as copies of this share them.
        claim: capsules, which keep the memory while they are referenced; None where it is only remembered.
    """

    table: int
    version: int
    launches: LaunchList
    witnesses: Mapping[str, Witness]
    claim: tuple[Any, ...] | None = None

    def claiming(self, resources: Mapping[str, Resource]) -> Held:
        """The same with a claim on those of the table's resources that it names."""
        claim = tuple([resources[name].capsule for name in self.launches.order])
        return Held(self.table, self.version, self.launches, self.witnesses, claim)

    def at(self, version: int) -> Held:
        """The same, found again in a later version of the table."""
        return Held(self.table, version, self.launches, self.witnesses, self.claim)


def check_resources(recorded: Held, table: ResourceTable) -> Mismatch | None:
    """Fingerprint and witnesses. A table that did not move answers with two integers, and one that did is compared in
    what has moved since.
    """
    if recorded.version == table.version and recorded.table == table.serial:
        return None
    present = table.snapshot().witnesses
    for name in suspects(recorded, table):
        was, now = recorded.witnesses[name], present.get(name)
        if was == now:
            continue
        for part, before, after in zip(Witness._fields, was, now or _GONE, strict=True):
            if before != after:
                return Mismatch("resources", f"{name}.{part}", before, after)
    return None


def suspects(recorded: Held, table: ResourceTable) -> Sequence[str]:
    """Names of the buffers, in order, whose memory may be another by now: those that have moved since, or all where the
    table is another one. To be asked after the table was looked into, or what moves in between is missed.
    """
    order = recorded.launches.order
    if recorded.table != table.serial:
        return [*order]
    found = [name for name in table.moved(recorded.version) if name in order]
    if len(found) > 1:
        found.sort(key=order.__getitem__)
    return found
