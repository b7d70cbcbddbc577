"""Users' own jitted steps under a plan: equal plans reuse a program, changed ones are refused and say what changed."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn

import jax
from jax.extend.core import get_opaque_trace_state
from jax.stages import Compiled

from moe_jax.cache.executables import Compilation, Executables, Program, differing, summary
from moe_jax.cache.explain import Difference
from moe_jax.cache.keys import Tokens, program_key
from moe_jax.errors import InvalidArgument, PlanChanged
from moe_jax.pallas_kernels.checks import check_choice, check_switch

from . import planned_call
from .planned_call import Call, Layout, Leaves, Remembered
from .splitting import Splits

# Programs tried by comparing with the last calls' arguments before a key is made.
_RECENT = 8
_PROGRAMS = 64


@dataclass(frozen=True, kw_only=True)
class PlannedStats:
    """Counts of one planned function since it was made or cleared.

    Attributes:
        plan_calls: calls that got a program: ``plan_compiles + plan_reuses``. `PlannedFunction.prepare` counts too.
        plan_compiles: those that compiled it.
        plan_reuses: those that found it.
        refused: calls that raised `PlanChanged`.
        traced: calls within another transformation, which go to the function itself.
        reasons: why a program that was there did not serve: the first field that differed, and how many times.
        programs: programs held now for this function.
        bytes: estimate of what they hold, as in `moe_jax.cache.ExecutableStats`.
        compile_seconds: tracing and compiling them.
    """

    plan_calls: int
    plan_compiles: int
    plan_reuses: int
    refused: int
    traced: int
    reasons: Mapping[str, int]
    programs: int
    bytes: int
    compile_seconds: float


@dataclass(frozen=True)
class Explanation:
    """What became of the last call, and why.

    Attributes:
        action: ``"reused"``, ``"compiled"``, ``"refused"`` (`PlanChanged` was raised), ``"traced"`` (within another
            transformation) or ``"none"`` (no call yet).
        reason: in one line.
        differences: fields that differ from the nearest program that was there; ``a`` is its value, ``b`` the call's.
    """

    action: Literal["reused", "compiled", "refused", "traced", "none"]
    reason: str
    differences: tuple[Difference, ...] = ()

    def __str__(self) -> str:
        return f"{self.action}: {self.reason}"


_REUSED = Explanation("reused", "the fingerprint is equal")
_TRACED = Explanation("traced", "within another transformation, or with jit disabled, the function itself is called")


class _Store:
    """What all planned functions of one Python function share."""

    def __init__(self) -> None:
        self.executables, self.tokens = Executables(_PROGRAMS), Tokens()


_stores: weakref.WeakKeyDictionary[types.FunctionType, _Store] = weakref.WeakKeyDictionary()
_stores_lock = threading.Lock()


class _Ready(NamedTuple):
    """A program and what a call must look like to be served by it."""

    head: tuple[Any, ...]
    leaves: Leaves
    program: Program


class PlannedFunction:
    """A function whose compiled programs are kept by plan; made by `planned_jit`.

    Calling it gives what the function gives under `jax.jit`. Safe to call from several threads.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        plan: Any,
        donate: Sequence[int | str],
        static: Sequence[int | str],
        on_change: Literal["recompile", "raise"],
        command_buffers: bool | None,
    ):
        functools.update_wrapper(self, fn)
        self._fn, self._donate, self._static = fn, tuple(donate), tuple(static)
        self._on_change, self._command_buffers = on_change, command_buffers
        self._where = f"planned_jit({getattr(fn, '__name__', type(fn).__name__)})"
        if isinstance(fn, types.FunctionType):
            with _stores_lock:
                self._store = _stores.setdefault(fn, _Store())
        else:
            self._store = _Store()
        self._plan_key = Remembered(None, self._where)
        self._derived = planned_call.is_derived(plan, self._where)
        # As it is now: changing a plan's dict afterwards would change what the programs are said to be.
        self._plan = plan if self._derived else copy.deepcopy(plan)
        self._fixed = None if self._derived else self._plan_key.key(plan, "plan")
        self._splits = Splits(self._store.tokens)
        self._outside = planned_call.outside_of_traces()
        self._layouts: dict[tuple[Any, ...], tuple[Layout, tuple[Remembered, ...]]] = {}
        self._lock = threading.Lock()
        self._forget()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if get_opaque_trace_state(convention="moe_jax") != self._outside:
            return self._within(args, kwargs)
        call = self._apart(args, kwargs)
        for ready in self._recent:
            if ready.head == call.head and ready.leaves.serve(call.leaves):
                program = ready.program.program
                if program is None:  # dropped by the store since
                    break
                try:
                    result = _run(program, call, self._where)
                except ValueError:
                    # JAX refuses another order of axes before anything runs; to ask for it here would cost too much.
                    if ready.leaves.lie_alike(call.leaves):
                        raise
                    break
                ready.program.touch()
                with self._lock:
                    self._reuses += 1
                    self._last = _REUSED
                return result
        if jax.config.jax_disable_jit or any(isinstance(leaf, jax.core.Tracer) for leaf in call.leaves):
            return self._within(args, kwargs)
        return _run(self._admit(call, running=True)[1], call, self._where)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def prepare(self, *args: Any, **kwargs: Any) -> str:
        """Compile the program for these arguments without running it; with ``on_change="raise"``, allow it.

        Args:
            args, kwargs: as for a call; `jax.ShapeDtypeStruct` may stand for arrays.

        Returns:
            The program key: SHA-256, equal in every process if the plan, the static values and the modules' attributes
            are made of content.
        """
        return self._admit(self._apart(args, kwargs), running=False)[0]

    def stats(self) -> PlannedStats:
        """A snapshot of the counts."""
        store = self._store.executables.stats()
        with self._lock:
            return PlannedStats(
                plan_calls=self._compiles + self._reuses,
                plan_compiles=self._compiles,
                plan_reuses=self._reuses,
                refused=self._refused,
                traced=self._traced,
                reasons=dict(self._reasons),
                programs=store.entries,
                bytes=store.bytes,
                compile_seconds=store.compile_seconds,
            )

    def compilations(self) -> tuple[Compilation, ...]:
        """The last compilations for this function with their reasons, oldest first."""
        return self._store.executables.compilations()

    def explain_last(self) -> Explanation:
        """What became of the last call, and why."""
        return self._last

    def clear(self) -> None:
        """Drop all programs of this function and all counts, and allow any program again."""
        self._store.executables.clear()
        self._store.tokens.clear()
        self._splits.clear()
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._recent: tuple[_Ready, ...] = ()
        # With on_change="raise": what determines the programs that may be used, as text, by key; and keys of calls that
        # are not over, by a name of each call's own, which count as allowed until the call fails.
        self._allowed: dict[str, dict[str, str]] = {}
        self._trying: dict[object, tuple[str, dict[str, str]]] = {}
        self._compiles = self._reuses = self._refused = self._traced = 0
        self._reasons: collections.Counter[str] = collections.Counter()
        self._last = Explanation("none", "no call yet")

    def _within(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            self._traced += 1
            self._last = _TRACED
        return self._fn(*args, **kwargs)

    def _apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        form = (len(args), *kwargs)
        layout, remembered = self._layouts.get(form) or self._new_layout(form)
        values = (*args, *kwargs.values())
        static = tuple(
            [
                each.key(values[index], layout.names[index])
                for index, each in zip(layout.static, remembered, strict=True)
            ]
        )
        dynamic = [values[index] for index in layout.dynamic]
        modules = tuple([planned_call.is_module(type(value)) for value in dynamic])
        split = structure = None
        if True in modules:
            pairs = list(zip(dynamic, modules, strict=True))
            leaves, tree = jax.tree.flatten([None if module else value for value, module in pairs])
            plain = len(leaves)
            split, inside = self._splits.of([value for value, module in pairs if module])
            structure = split.structure
            leaves += inside
        else:
            leaves, tree = jax.tree.flatten(dynamic)
            plain = len(leaves)
        plan = self._plan(*args, **kwargs) if self._derived else self._plan
        plan_key = self._fixed or self._plan_key.key(plan, "plan")
        head = (form, modules, tree, structure, static, plan_key, planned_call.environment())
        return Call(head, leaves, plain, layout, values, modules, tree, split, plan)

    def _new_layout(self, form: tuple[Any, ...]) -> tuple[Layout, tuple[Remembered, ...]]:
        layout = planned_call.layout(self._fn, form[0], form[1:], self._static, self._donate)
        tokens = self._store.tokens
        found = self._layouts[form] = layout, tuple(Remembered(tokens, self._where) for _ in layout.static)
        return found

    def _admit(self, call: Call, *, running: bool) -> tuple[str, Compiled]:
        """The key and the program of a call, compiled if need be."""
        places = planned_call.places(call, self._where, abstract=not running)
        options = (sorted(call.layout.donated), self._command_buffers, planned_call.VERSIONS)
        key = program_key(call.head, places, options, tokens=self._store.tokens)
        texts = functools.cache(lambda: planned_call.texts(call, places, self._command_buffers))
        with self._only_allowed(key, texts, running):
            entry, program, compilation = self._take(key, call, texts)
        with self._lock:
            if running:
                ready = _Ready(call.head, Leaves(call.leaves), entry)
                others = (each for each in self._recent if each.program is not entry)
                self._recent = (ready, *others)[:_RECENT]
            if compilation is None:
                self._reuses += 1
                self._last = _REUSED
            else:
                self._compiles += 1
                self._last = Explanation("compiled", compilation.reason, compilation.differences)
                self._reasons.update(each.path for each in compilation.differences[:1])
        return key, program

    def _take(
        self, key: str, call: Call, texts: Callable[[], dict[str, str]]
    ) -> tuple[Program, Compiled, Compilation | None]:
        """A program's place in the store, the program, and how it was compiled if this call did it."""
        while True:
            entry, compilation = self._store.executables.acquire(
                key,
                lambda: planned_call.recipe(self._fn, call, self._where),
                command_buffers=self._command_buffers,
                parts=texts,
            )
            program = entry.program
            if program is not None:  # else dropped by another thread before it could be taken
                return entry, program, compilation

    @contextlib.contextmanager
    def _only_allowed(self, key: str, texts: Callable[[], dict[str, str]], running: bool) -> Generator[None]:
        """Refuse a key that may not be used, and allow one whose program is there when the block ends without an error.

        Only the first call and `prepare` bring new ones. While they are not over, their keys count too: of two first
        calls at once the second is refused, unless it is of the same key.
        """
        if self._on_change != "raise" or key in self._allowed:
            yield
            return
        wanted, name = texts(), object()
        with self._lock:
            # Those of now: `clear` puts others in their place, and what a call allows that began before is no concern
            # of calls that come after.
            allowed, trying = self._allowed, self._trying
        try:
            with self._lock:
                known = dict([*allowed.items(), *trying.values()])
                refused = running and known and key not in known
                if not refused:
                    trying[name] = key, wanted
            if refused:
                self._refuse(known.values(), wanted)
            yield
            with self._lock:
                allowed[key] = wanted
        finally:
            with self._lock:
                trying.pop(name, None)

    def _refuse(self, known: Iterable[dict[str, str]], wanted: dict[str, str]) -> NoReturn:
        """Raise `PlanChanged` with what differs from the nearest of those that may be used."""
        differences = min((differing(each, wanted) for each in known), key=len)
        with self._lock:
            self._refused += 1
            self._reasons.update(each.path for each in differences[:1])
            self._last = Explanation("refused", summary(differences) or "another key", differences)
        path, allowed, got = differences[0] if differences else ("key", "the prepared one", "another")
        more = f" and {len(differences) - 1} more" if len(differences) > 1 else ""
        raise PlanChanged(
            f"program fingerprint changed in {path}{more}",
            where=self._where,
            got=got,
            wanted=allowed,
            differences=[(each.path, each.a, each.b) for each in differences],
        )


def _run(program: Compiled, call: Call, where: str) -> Any:
    try:
        result, changed = program(*call.leaves)
    except RuntimeError as error:
        # Only this text: arrays that are donated to this very call are deleted too if it fails later.
        if "Array has been deleted" not in str(error):
            raise
        gone = (isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in call.leaves)
        names = [name for name, deleted in zip(planned_call.leaf_names(call), gone, strict=True) if deleted]
        if not names:
            raise
        got = "a deleted array: it was donated, to an earlier call say"
        wanted = "one that still has its values, as the result of that call"
        raise InvalidArgument(", ".join(names), where=where, got=got, wanted=wanted) from error
    if call.split is not None:
        call.split.write(changed)
    return result


def planned_jit(
    fn: Callable[..., Any],
    *,
    plan: Any = None,
    donate: Sequence[int | str] = (),
    static: Sequence[int | str] = (),
    on_change: Literal["recompile", "raise"] = "recompile",
    command_buffers: bool | None = None,
) -> PlannedFunction:
    """`jax.jit` under a plan: programs are compiled ahead, kept by content, bounded in number, and every new one has a
    reason that can be read.

    A program's fingerprint is the plan, the static values, shapes, dtypes, layouts and devices of all arrays, the
    structure of containers and Flax modules with their static attributes, what is donated, and JAX's options. A call of
    equal fingerprint reuses the program, however its arguments and its plan were built; any other is refused that
    program and compiles its own, or raises.

        step = moe_jax.planned_jit(decode, plan={"slots": 48, "variant": "one-launch"}, donate=["cache"])
        y, cache = step(model, cache, tokens)
        print(step.explain_last())

    Flax NNX modules are passed as arguments of their own; they are split once, and changes that the function makes to
    their variables are put back, as `nnx.jit` does. Linen variables and other pytrees pass as they are. What the
    function reads from elsewhere (closures, globals) is a constant of the program, as for `jax.jit`.

    Within `jax.jit`, `jax.grad`, `jax.vmap` or another transformation, and under `jax.disable_jit`, the function itself
    is called and becomes part of the program around it.

    Args:
        fn: the function. Planned functions of one Python function share its programs, also when ``planned_jit`` is
            called again.
        plan: any content that `moe_jax.cache.program_key` takes (numbers, strings, dtypes, tuples, dicts, frozen
            dataclasses: dtype, layouts, variants, slots, top-k, capability…), or a function that makes it from the
            arguments, called at each call.
        donate: arguments, by name or number, whose arrays may be reused for results and must not be used again. Of a
            module it is only the variables that the function replaces.
        static: arguments, by name or number, that are Python values and part of the program.
        on_change: ``"recompile"``, or ``"raise"`` to refuse every fingerprint but that of the first call and those that
            were given to ``prepare``.
        command_buffers: True for decode-like steps, which XLA then launches as one; False for prompts; None leaves
            JAX's default. On GPUs only, and for these programs only.

    Returns:
        The planned function; it also has ``prepare``, ``stats``, ``explain_last``, ``compilations`` and ``clear``.

    Raises:
        InvalidArgument: here: an option that does not fit. When called: an argument that is neither array, number nor
            module, a plan or static value without content or equality, arrays bound to different devices, or one that
            was deleted, as by an earlier call that it was donated to.
        PlanChanged: when called with ``on_change="raise"``; nothing has run, and nothing is donated.
        CannotServe: when called: the function changes the structure of a module.
    """
    where = "planned_jit"
    if not callable(fn):
        raise InvalidArgument("fn", where=where, got=f"a {type(fn).__qualname__}", wanted="a function")
    check_choice(where, "on_change", on_change, ("recompile", "raise"))
    for option, items in (("donate", donate), ("static", static)):
        if isinstance(items, (str, bytes)) or not isinstance(items, Iterable):
            raise InvalidArgument(option, where=where, got=repr(items), wanted="a list of names or numbers")
    donate, static = tuple(donate), tuple(static)
    if command_buffers is not None:
        command_buffers = check_switch(where, "command_buffers", command_buffers)
    planned_call.check_names(fn, where, static, donate)
    return PlannedFunction(fn, plan, donate, static, on_change, command_buffers)
