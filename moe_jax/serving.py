"""What `Model.generate` runs on: the jitted step, or an engine that the model keeps.

Importing this loads no engine: a model on a CPU never does, unless `generate` is told to.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
from flax import nnx

from moe_jax.cache import StickyError
from moe_jax.cache.decision import Mode

from .errors import CannotServe, InvalidArgument
from .generation import Column, Weights
from .models.config import NOT_COMPUTED, ModelConfig
from .models.decoder import Decoder, abstract_decoder
from .pallas_kernels.errors import CudaError
from .pallas_kernels.linear.heuristics import MAX_ROWS

if TYPE_CHECKING:
    from .engine import Engine

GraphsMode = Literal[Mode, "jit"]

# Tokens of a page, and of the smallest engine.
PAGE = 64
_WHERE = "generate(graphs=…)"


def on_gpu(device: jax.Device) -> bool:
    """Whether `generate` takes an engine without being told to."""
    return device.platform == "gpu"


def choose(graphs: GraphsMode | None, weights: Weights) -> tuple[Mode, jax.Device] | str:
    """Mode and device of the engine that a call wants, or why the jitted step serves it.

    Raises:
        InvalidArgument: no such mode.
        CannotServe: a mode was named that no engine can have for these weights.
    """
    modes = get_args(GraphsMode)
    if graphs is not None and graphs not in modes:
        wanted = f"None or {' or '.join(modes)}"
        raise InvalidArgument("graphs", where="generate", got=repr(graphs), wanted=wanted)
    if graphs == "jit":
        return "it was asked for"
    devices = sorted({str(d): d for x in weights.arrays for d in x.sharding.device_set}.items())
    (_, device), *others = devices
    if others:
        if graphs is None:
            return "the model is on several devices"
        got = f"graphs={graphs!r} and a model on {', '.join(name for name, _ in devices)}"
        raise CannotServe("devices", where="generate", got=got, wanted="a model on one device, or graphs=None")
    if graphs == "simulate" or on_gpu(device):
        return graphs or "on", device
    if graphs is None:
        return f"the model is on a {device.platform}"
    got, wanted = f"graphs={graphs!r} and a model on {device}", 'a model on a CUDA device, graphs="simulate", or None'
    raise CannotServe("device", where="generate", got=got, wanted=wanted)


class Source(NamedTuple):
    """What an engine is made for.

    Attributes:
        config: of the model.
        module: of the model.
        weights: the module, split.
        mode, device: from `choose`.
    """

    config: ModelConfig
    module: nnx.Module
    weights: Weights
    mode: Mode
    device: jax.Device


class _Mark:
    """Recognises a source without keeping its arrays: the very arrays, none deleted, in the same structure."""

    def __init__(self, source: Source):
        self._parts = self._of(source)
        self._arrays = [weakref.ref(array) for array in source.weights.arrays]

    def fits(self, source: Source) -> bool:
        """Whether what was made for the one serves the other."""
        arrays = source.weights.arrays
        return (
            len(arrays) == len(self._arrays)
            and all(mine() is array for mine, array in zip(self._arrays, arrays, strict=True))
            and not any(array.is_deleted() for array in arrays)
            and self._parts == self._of(source)
        )

    @staticmethod
    def _of(source: Source) -> tuple[Any, ...]:
        return source.mode, source.device, source.config, *source.weights.structure


class Size(NamedTuple):
    """What an engine has, or a call needs: places, tokens of the longest sequence, pages of all."""

    places: int
    tokens: int
    pages: int

    def covers(self, other: Size) -> bool:
        """Whether nothing of ``other`` is larger."""
        return all(mine >= its for mine, its in zip(self, other, strict=True))


class _Claim:
    """The room of one call, from when an engine knows of it until it is over or nobody has it any more.

    Attributes:
        need: how much.
        over: the call has ended.
    """

    def __init__(self, need: Size):
        self.need, self.over = need, False


@dataclass(eq=False)
class _Kept:
    """An engine, and the calls that run on it.

    Attributes:
        refused: it was to be closed, and could not be.
    """

    engine: Engine
    mark: _Mark
    size: Size
    refused: bool = False
    # Weakly, so that whatever interrupts a call, its room is free when all is gone that the call had.
    _claims: set[weakref.ref[_Claim]] = field(default_factory=set)

    def take(self, claim: _Claim) -> None:
        """Give a call its room; there is enough."""
        self._claims.add(weakref.ref(claim, self._claims.discard))

    @property
    def claims(self) -> list[_Claim]:
        """Those of calls that run."""
        found = [reference() for reference in list(self._claims)]
        return [claim for claim in found if claim is not None and not claim.over]

    @property
    def used(self) -> Size:
        """Places and pages that running calls have."""
        needs = [claim.need for claim in self.claims]
        return Size(sum(need.places for need in needs), 0, sum(need.pages for need in needs))


class Serving:
    """The engine that a model keeps, at most one, and the calls that run on it. Thread-safe.

    A call has places and pages of its own for as long as it runs, so no call waits for another. Where too few are free,
    a larger engine is made (powers of two), and the one before closes when the last call on it has ended.

    One engine is made at a time, which may take minutes: two threads that need one must not fill the device with two,
    and what the first makes often serves the second. So those that need an engine wait for each other, and so does
    `close`; calls that the engine there is can serve begin and end meanwhile.
    """

    # True at the end of the process, when all engines have been closed. Found by the class: names of modules may be
    # gone then.
    _ending = staticmethod(sys.is_finalizing)

    # `_making` is held while an engine is made, `_lock` for moments, by whoever gives a call its room or changes which
    # engine is kept. Where both are, `_making` is taken first. Neither is held by a call that ends, which may be
    # collected in any thread, nor `_lock` while an engine is closed.
    def __init__(self) -> None:
        self._making = threading.RLock()
        self._kept: _Kept | None = None
        # Engines that are kept no more and not closed yet. No call begins on one.
        self._left: dict[_Kept, None] = {}
        self._failed: tuple[_Mark, Size, str] | None = None
        self._lock = threading.RLock()

    def run(
        self, source: Source, need: Size, columns: Callable[[Engine], Iterator[Column]], *, automatic: bool
    ) -> Iterator[Column] | str:
        """Start a call: its steps, or why no engine runs it.

        Args:
            columns: makes the steps on an engine. It takes no more than ``need``: the places of a call with more rows
                are all there are.
            automatic: an engine that cannot be made is a reason, remembered until `close`, and not an error.

        Raises:
            MoeJaxError: an engine that was named cannot be made.
        """
        claim = _Claim(need)
        try:
            found = self._taken(source, claim, automatic)
            if isinstance(found, Size):
                with self._making:
                    # Another thread may have made what serves this one too.
                    found = self._taken(source, claim, automatic)
                    if isinstance(found, Size):
                        found = self._made(source, found, claim, automatic)
            if isinstance(found, str):
                return found
            steps = self._steps(found, claim, columns)
            # Begun here, so that an iterator that is dropped unread gives its places back as well.
            next(steps)
            return steps
        except BaseException:
            claim.over = True
            raise

    def stats(self) -> dict[str, Any] | None:
        """`Engine.stats`; None where no engine is kept."""
        kept = self._kept
        return None if kept is None else kept.engine.stats()

    def close(self) -> None:
        """Keep no engine. Calls that run on it go on, and the last of them closes it.

        Raises:
            CudaError: or another, the first of an engine that could not be closed; the next call tries again.
        """
        with self._making:
            with self._lock:
                self._failed = None
                self._keep(None)
            idle = [kept for kept in list(self._left) if self._idle(kept)]
            for number, kept in enumerate(idle, 1):
                try:
                    self._close(kept)
                except Exception:
                    for other in idle[number:]:
                        with contextlib.suppress(Exception):
                            self._close(other)
                    raise

    # Inside.

    def _taken(self, source: Source, claim: _Claim, automatic: bool) -> _Kept | Size | str:
        """The engine there is, room for a call taken; or the size of one to be made; or why none is."""
        with self._lock:
            found = self._found(source, claim, automatic)
        self._close_idle()
        return found

    def _found(self, source: Source, claim: _Claim, automatic: bool) -> _Kept | Size | str:
        """As `_taken`; the lock is held."""
        size, kept = self._size(source, claim.need)
        if kept is not None:
            if not automatic:
                self._failed = None
            kept.take(claim)
            return kept
        if automatic and self._failed is not None:
            mark, least, why = self._failed
            if size.covers(least) and mark.fits(source):
                return why
        return size

    def _keep(self, kept: _Kept | None) -> None:
        """Keep an engine or none in place of the one before. The lock is held; `_close_idle` comes when it is not."""
        if self._kept is not None:
            self._left[self._kept] = None  # first: one that is in both places is the one that is kept
        self._kept = kept

    def _idle(self, kept: _Kept) -> bool:
        """Whether an engine is kept no more and no call runs on it: for good, then."""
        return kept is not self._kept and not kept.claims

    def _unclosed(self) -> list[_Kept]:
        """What is idle and was not tried in vain: that is for `close`."""
        return [kept for kept in list(self._left) if self._idle(kept) and not kept.refused]

    def _close_idle(self) -> None:
        """Close what is idle. An engine that cannot be closed is no reason for a call to lose its tokens: `close` tries
        again.
        """
        for kept in self._unclosed():
            with contextlib.suppress(CudaError):
                self._close(kept)

    def _close(self, kept: _Kept) -> None:
        try:
            kept.engine.close()
        except Exception:
            kept.refused = True
            raise
        self._left.pop(kept, None)

    def _steps(self, kept: _Kept, claim: _Claim, columns: Callable[[Engine], Iterator[Column]]) -> Generator[Any]:
        left = True
        try:
            yield None
            yield from columns(kept.engine)
            left = False
        finally:
            claim.over = True
            if not left:
                self._close_idle()
            elif not self._ending() and self._unclosed():
                # It may have been collected anywhere: inside a trace of JAX, or where the lock of an engine is held.
                from .engine.ending import apart

                apart(self._close_idle)

    def _size(self, source: Source, need: Size) -> tuple[Size, _Kept | None]:
        """Of the engine that serves a call beside those that run, and that engine where it is the one kept.

        The lock is held.
        """
        kept = self._kept
        if kept is not None and not kept.mark.fits(source):
            self._keep(None)
            kept = None
        had, used = (Size(1, PAGE, 1), Size(0, 0, 0))
        if kept is not None:
            had, used = kept.size, kept.used
        want = Size(used.places + need.places, need.tokens, used.pages + need.pages)
        if kept is not None and had.covers(want):
            return had, kept
        places, tokens, pages = (max(old, 1 << (new - 1).bit_length()) for old, new in zip(had, want, strict=True))
        places, tokens = min(places, MAX_ROWS), min(tokens, source.config.max_positions)
        return Size(places, tokens, min(pages, places * -(-tokens // PAGE))), None

    def _made(self, source: Source, size: Size, claim: _Claim, automatic: bool) -> _Kept | str:
        """A new engine, kept from now on, room for a call taken; or why there is none."""
        with self._lock:
            if self._kept is not None and not self._kept.claims:
                self._keep(None)
        self._close_idle()  # first: there may be no room for two
        try:
            made = _Kept(_engine(source, size), _Mark(source), size)
        except (CannotServe, InvalidArgument, CudaError) as error:
            if not automatic or isinstance(error, StickyError):
                raise
            with self._lock:
                if self._kept is None:  # else there may be room for it when the calls that run now have ended
                    self._failed = _Mark(source), size, str(error)
            return str(error)
        made.take(claim)
        with self._lock:
            self._keep(made)
            if not automatic:
                self._failed = None
        self._close_idle()
        return made


def needed(rows: int, tokens: int) -> Size:
    """Of a call with so many prompts, the longest of which comes to ``tokens``: more than 64 prompts take turns."""
    places = min(rows, MAX_ROWS)
    return Size(places, tokens, places * -(-tokens // PAGE))


def _engine(source: Source, size: Size) -> Engine:
    """An engine for the module as it is.

    Raises:
        CannotServe: the module is not what its config says, or there is no usable CUDA device.
        InvalidArgument: no kernel takes the model.
        CudaError: out of memory, for one.
    """
    from .engine import Engine
    from .engine.options import cuda_runtime
    from .model import Model

    module = source.module
    if type(module) is not Decoder or _structure(module.config) != source.weights.structure:
        got = f"a {type(module).__name__} whose parts are not what its config says"
        raise CannotServe("module", where=_WHERE, got=got, wanted="a Decoder as it was made, or graphs=None")
    # The jitted step computes what the module says, and the model's own config says where it ends.
    config = replace(module.config, **{name: getattr(source.config, name) for name in NOT_COMPUTED})
    runtime = None if source.mode == "simulate" else cuda_runtime(_WHERE, source.mode, source.device)
    engine = Engine(
        Model(config, module), max_sequences=size.places, max_tokens=size.tokens, page_size=PAGE, pages=size.pages,
        graphs=source.mode, runtime=runtime,
    )  # fmt: skip
    if source.mode == "strict":
        try:
            engine.warmup()
        except BaseException:
            engine.close()
            raise
    return engine


def _structure(config: ModelConfig) -> tuple[Any, ...]:
    """Of a module as the config makes it."""
    graphdef, state = nnx.split(abstract_decoder(config))
    return graphdef, jax.tree.structure(state)
