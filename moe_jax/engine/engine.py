"""The engine as a user holds it: sequences that join and leave, one decode step for all of them, weights, counts."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
from flax import nnx

from moe_jax.cache import Graphs, Registry, Runtime, SimulatedRuntime, StickyError, row_buckets
from moe_jax.cache.decision import Mode
from moe_jax.cache.graphs import MODES
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.generation import gathered, parse_stop
from moe_jax.model import Model
from moe_jax.models.decoder import Decoder
from moe_jax.pallas_kernels.advance.specs import RUNNING
from moe_jax.pallas_kernels.checks import check_integer, check_switch
from moe_jax.pallas_kernels.linear.heuristics import MAX_ROWS
from moe_jax.sampling import Sampling, sampling

from .building import load_kernels
from .calls import Calls
from .ending import Owned, close_dropped
from .generating import columns
from .host import compiled_reference
from .memory import WEIGHTS, Memory, Weights, place_all
from .options import (
    PAGE_SIZE,
    check_bounds,
    check_packages,
    check_page_size,
    cuda_runtime,
    given_weights,
    simulated_runtime,
    token_limit,
)
from .prompts import LONG, Prompts
from .rows import row_block
from .sequences import Generation, Places, Sequence
from .step import Geometry, build, bytes_needed
from .stepping import Stepper
from .weights import check_config, check_update, module_weights


class Engine:
    """Decodes many sequences of one model, a step for all of them at a time.

        engine = moe_jax.Engine(model, max_sequences=8, max_tokens=512, graphs="simulate")
        engine.warmup()
        first, second = engine.prefill(["In the beginning", "And it came to pass"], max_new_tokens=20)
        engine.step()                      # {first: token, second: token}
        engine.release(first)
        engine.generate(prompts, max_new_tokens=64)

    Every step is one launch list of its row bucket, run through `moe_jax.cache.Graphs`: direct at the first call,
    captured at the second, replayed from the third on; `warmup` makes the first two. `docs/engine.md` has the rest.
    Thread-safe.

    Attributes:
        decode_buckets: row counts that decode steps are built for.
        chunk_buckets: row counts that prompt chunks are built for.
        registry, memory: the manifests, and device memory by name; for tests and tools.
    """

    def __init__(
        self,
        model: Model,
        *,
        max_sequences: int,
        max_tokens: int,
        page_size: int = PAGE_SIZE,
        pages: int | None = None,
        chunk: int = MAX_ROWS,
        long_prompts: int | None = LONG,
        weights: Weights = "held",
        graphs: Mode = "on",
        max_entries: int = 32,
        max_bytes: int = 1 << 30,
        runtime: Runtime | None = None,
    ):
        """Build the steps, take the weights, compile the kernels.

        Args:
            model: with a `moe_jax.models.decoder.Decoder`; later changes of it count after `update_weights` only.
            max_sequences: that have a place at a time, 1 to 64.
            max_tokens: of a sequence, prompt and new ones; at most ``config.max_positions``.
            page_size: tokens of a page of keys and values, a power of two.
            pages: of the pool; None: enough for all sequences at their longest.
            chunk: prompt tokens that are read at a time, 1 to 64.
            long_prompts: tokens of the shortest prompt that a compiled program reads at once; None: none is.
            weights: ``"held"``: the model's arrays where they stand, all on the runtime's device; ``"owned"``: copies.
            graphs: ``"on"``, ``"off"``, ``"strict"`` or ``"simulate"``, as in `moe_jax.cache.Graphs`.
            max_entries, max_bytes: of graphs that are kept, as in `moe_jax.cache.Graphs`; bytes are estimated. One
                graph for each decode bucket has to fit, but with ``"off"``.
            runtime: the device; None: a `SimulatedRuntime` for ``"simulate"``, else JAX's first CUDA device.

        Raises:
            InvalidArgument: an option out of range, a model that no kernel takes, or an array that cannot be held.
            CannotServe: no CUDA device, and not ``"simulate"``; or more pages than a simulated device can hold.
        """
        where = "Engine"
        if not isinstance(model, Model):
            raise InvalidArgument("model", where=where, got=type(model).__name__, wanted="a moe_jax.Model")
        if graphs not in MODES:
            raise InvalidArgument("graphs", where=where, got=repr(graphs), wanted=" or ".join(MODES))
        if weights not in WEIGHTS:
            raise InvalidArgument("weights", where=where, got=repr(weights), wanted=" or ".join(WEIGHTS))
        if runtime is not None and not hasattr(runtime, "simulated"):  # a protocol
            wanted = "a SimulatedRuntime, a CudaRuntime or None"
            raise InvalidArgument("runtime", where=where, got=type(runtime).__name__, wanted=wanted)
        config = model.config
        max_sequences = check_integer(where, "max_sequences", max_sequences, 1, MAX_ROWS)
        max_tokens = check_integer(where, "max_tokens", max_tokens, 1, config.max_positions)
        page_size = check_page_size(where, page_size)
        chunk = check_integer(where, "chunk", chunk, 1, MAX_ROWS)
        if long_prompts is not None:
            long_prompts = check_integer(where, "long_prompts", long_prompts, 1, 1 << 31)
        if pages is not None:
            pages = check_integer(where, "pages", pages, 1, 1 << 31)
        max_entries = check_integer(where, "max_entries", max_entries, 1, 1 << 31)
        max_bytes = check_integer(where, "max_bytes", max_bytes, 1, 1 << 62)
        if runtime is None and graphs != "simulate":
            runtime = cuda_runtime(where, graphs)
        check_packages(where)
        arrays = module_weights(where, model.module)
        self._model, self._stops = model, frozenset(config.eos_token_ids)
        self._stop_list = np.asarray(config.eos_token_ids or (-1,), np.int32)
        device = SimulatedRuntime if runtime is None else runtime
        self._geometry = Geometry.of(
            config, arrays, max_sequences=max_sequences, max_tokens=max_tokens, page_size=page_size, pages=pages,
            chunk=chunk, device_kind=device.device_kind, capability=device.capability,
        )  # fmt: skip
        self.decode_buckets, self.chunk_buckets = row_buckets(max_sequences), row_buckets(chunk)
        options = {"transform": compiled_reference} if device.simulated else {}
        self._steps = build(self._geometry, self.decode_buckets, self.chunk_buckets, **options)
        check_bounds(where, graphs, self._steps.decode, max_entries, max_bytes)
        close_dropped()
        # Room for the weights to move, and for what tests allocate beside it.
        room = 2 * bytes_needed(self._steps) + (64 << 20)
        self.runtime: Runtime = runtime or simulated_runtime(where, room, self._geometry.pages)
        self.registry = Registry()
        self.registry.accept(self._steps.manifest)
        self._calls = Calls(self._steps, self.registry)
        store = Graphs(self.runtime, self.registry, mode=graphs, max_entries=max_entries, max_bytes=max_bytes)
        self.memory = Memory(self.runtime, store.stream, weights)
        self._owned = owned = Owned(store, self.memory)
        self._lock, self._life, self._sequences = owned.lock, owned.life, owned.sequences
        self._places = Places(max_sequences, self._geometry.pages)
        # Remembered from step to step; None where sequences have come, gone or ended since.
        self._live: tuple[int, ...] | None = None
        self._numbers = itertools.count()
        try:
            owned.end_with(self)
            place_all(self.memory, self._geometry, self._steps, arrays, self._stop_list)
            owned.kernels = load_kernels(self.runtime, self._steps)
            device_state = self.memory, self.runtime, store.stream
            prompts = Prompts(self._geometry, model.module, *device_state, model.executables, long_prompts)
            self._prompts = owned.prompts = prompts
            stepper = Stepper(self._geometry, self.memory, store, self._calls, self._sequences, self._stops)
            self._stepper = owned.stepper = stepper
        except BaseException:
            # What has been queued writes to memory that goes when this is over.
            owned.drop()
            raise

    @property
    def graphs(self) -> Graphs:
        """The store of graphs that all steps run through; for tests and tools, which may put another one there."""
        return self._stepper.graphs

    @graphs.setter
    def graphs(self, store: Graphs) -> None:
        self._stepper.graphs = store

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def live(self) -> tuple[int, ...]:
        """Sequences that the next step gives a token to, in the order in which they joined."""
        with self._lock:
            live = self._live
            if live is None or not self._sequences:
                held = list(self._sequences.items())  # a stream that is collected meanwhile gives up its own
                live = self._live = tuple(n for n, one in held if not one.ended and one.owner is None)
            return live

    def warmup(self, prompts: Items[int] = ()) -> None:
        """Make every call that first steps and prompts would pay for: nothing is compiled, loaded, captured afterwards.

        Every decode bucket is run direct and captured, every chunk bucket is run once, all with dead rows: no sequence
        is touched, whether there are some or not.

        Args:
            prompts: lengths of long prompts that will come: their programs are compiled too. A long prompt of another
                bucket of lengths has its program compiled when it comes.

        Raises:
            InvalidArgument: a length that no prompt can have.
        """
        where = "Engine.warmup"
        if not isinstance(prompts, Iterable):
            raise InvalidArgument("prompts", where=where, got=repr(prompts), wanted="a list of lengths")
        for length in prompts:
            self._prompts.compile(check_integer(where, "prompts", length, 1, self._geometry.max_tokens))
        with self._lock, self._life.using(where):
            self._stepper.settle()
            self.memory.write("rows", row_block(self._geometry, ()))
            for bucket in self.decode_buckets:
                call = self._calls.decode(bucket)
                self.graphs.warm(call.launches, call.certificate, self.memory.table)
            for bucket in self.chunk_buckets:
                call = self._calls.prompt(bucket)
                self.graphs.step(call.launches, call.certificate, self.memory.table)
            self.graphs.drain()

    def prefill(
        self,
        prompts: Any,
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
    ) -> list[int]:
        """Give prompts places and pages, and read all their tokens but the last, which the next step reads.

        Prompts go in chunks of at most ``chunk`` rows, long ones through a compiled program. All are admitted or none.

        Args:
            prompts: as `Model.generate` takes them.
            max_new_tokens: a sequence ends with this many, or with an end token of the config; None: as many as
                ``max_tokens`` leaves. Pages for all of them are kept for the sequence.
            temperature, top_p, seed: as `Model.generate` takes them.
            top_k: draw from this many most probable tokens; 0: from all.

        Returns:
            a number for each prompt, that no sequence of this engine has had.

        Raises:
            InvalidArgument: a prompt or option that can never be served.
            CannotServe: no place or not enough pages at present.
        """
        where = "Engine.prefill"
        rows, parameters = self._model.token_rows(prompts, where), sampling(temperature, top_p, seed, where)
        top_k = check_integer(where, "top_k", top_k, 0, (1 << 31) - 1)
        return self._admit(where, rows, range(len(rows)), max_new_tokens, parameters, top_k=top_k)

    def step(self) -> dict[int, int]:
        """One token for every live sequence; sequences that end with theirs are not live any more.

        Returns:
            token by sequence; empty when none is live.

        Raises:
            CudaError: the step did not run; no sequence has changed, and the call may be made again.
            NotReplayed: ``graphs="strict"`` and no graph could be replayed.
            StoreUnusable: the engine is closed, or dead because the device context is lost.
        """
        with self._lock:
            # `Life.using` and `live`, written out: calls that take a tenth of the host's time of a step.
            self._life.refuse("Engine.step")
            try:
                live = self._live
                return self._step(self.live if live is None else live)
            except StickyError as error:
                self._life.lost(error)
                raise

    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Any = None,
        logprobs: bool = False,
        stream: bool = False,
    ) -> Any:
        """Continue prompts, as `Model.generate` does; more of them than there are places wait for one.

        Sequences from `prefill` stay as they are. Log-probabilities are computed from the engine's logits on the host.

        Returns:
            as `Model.generate`: int32 ``[B, N]`` of new tokens, a pair with f32 ``[B, N]``, or an iterator over steps.
            An iterator holds places and pages from its first step to its end, or until it is closed.

        Raises:
            InvalidArgument: a prompt or option that can never be served.
            CannotServe: no place or not enough pages at present, for any of the prompts.
        """
        where = "Engine.generate"
        logprobs, stream = (check_switch(where, *each) for each in (("logprobs", logprobs), ("stream", stream)))
        model = self._model
        rows, parameters = model.token_rows(prompts, where), sampling(temperature, top_p, seed, where)
        ends = parse_stop(stop, model.config.eos_token_ids, model.config.vocab_size, model.tokenizer, where)
        for row in rows:
            token_limit(where, self._geometry, len(row), max_new_tokens)
        shown = {"pad": model.pad_token_id, "tokenizer": model.tokenizer, "logprobs": logprobs}
        found = columns(self, where, rows, max_new_tokens, parameters, ends, **shown)
        return gathered(found, logprobs=logprobs, stream=stream)

    def release(self, sequence: int) -> None:
        """Give a sequence's place and pages to others.

        Raises:
            InvalidArgument: no such sequence, or one that was released.
        """
        where = "Engine.release"
        with self._lock, self._life.using(where):
            known = sorted(n for n, held in list(self._sequences.items()) if held.owner is None)
            if isinstance(sequence, bool) or not isinstance(sequence, (int, np.integer)) or sequence not in known:
                raise InvalidArgument("sequence", where=where, got=repr(sequence), wanted=f"one of {known}")
            self._forget(sequence)

    def update_weights(self, weights: Model | nnx.Module | Mapping[str, Any] | None = None) -> None:
        """Use new weights from the next step on: held ones in place of the old, owned ones in the old ones' storage.

        Owned, captured graphs stay; held, they are destroyed, and steps are direct, captured, then replayed again
        (`warmup` makes those calls). Keys and values of sequences that were read with the old weights stay.

        Args:
            weights: a model or module of the same config; or some arrays by name (``"embed"``, ``"0.qkv"``, …); None:
                the engine's own model as it is now.

        Raises:
            InvalidArgument: another config, a name, shape or dtype that the engine does not have, an array that was
                deleted or, where weights are held, is not on the device alone; nothing has changed.
            CudaError: owned weights may have been written in part, so call it again.
        """
        where = "Engine.update_weights"
        given = given_weights(where, self._model if weights is None else weights)
        arrays: Mapping[str, Any] = given if isinstance(given, Mapping) else module_weights(where, given)
        check_update(where, arrays, self._geometry.weights, whole=not isinstance(given, Mapping))
        if isinstance(given, Decoder):
            check_config(where, given.config, self._geometry.config)
        with self._lock, self._life.using(where):
            self._stepper.void()
            self.memory.update_weights(arrays)
            # Graphs that name the old arrays let go of them now, not at the next step of their bucket.
            self.graphs.sweep(self.memory.table)
            self.graphs.drain()

    def stats(self) -> dict[str, Any]:
        """Counts of `Graphs.stats`, and what the engine holds."""
        with self._lock:
            counts, held = self.graphs.stats(), self._held()
            places, pages = self._places.counts(held)
            return counts | {
                "state": self._life.over or counts["state"],
                "sequences": len(held),
                "free_sequences": places,
                "live": len(self.live),
                "max_sequences": self._geometry.max_sequences,
                "pages": self._geometry.pages,
                "free_pages": pages,
                "page_size": self._geometry.page_size,
                "decode_buckets": self.decode_buckets,
                "chunk_buckets": self.chunk_buckets,
            }

    def explain_last_step(self) -> str:
        """How the last decode step ran, in which bucket, and why if it was no replay."""
        with self._lock:
            last = self._stepper.last
            if isinstance(last, str):
                return last
            outcome, call = last
        why = "" if outcome.reason is None else f" ({'; '.join(filter(None, (outcome.reason, outcome.detail)))})"
        return f"{outcome.kind}{why}: {call.certificate.rows} rows in a bucket of {call.certificate.bucket}"

    def close(self) -> None:
        """Wait for everything, destroy the graphs and let go of all memory. A second call does nothing.

        An engine that is dropped, or left open until the process ends, is closed in the same way.

        Raises:
            CudaError: the device refused; call it again.
        """
        self._owned.close()

    # Inside; the lock is held, but where it says so.

    def _admit(
        self,
        where: str,
        rows: Items[Items[int]],
        draws: Items[int],
        max_new_tokens: int | None,
        parameters: Sampling,
        *,
        top_k: int = 0,
        owner: Generation | None = None,
    ) -> list[int]:
        """Take the lock and admit all prompts or none.

        Prompts are read into free pages first, and then admitted by one call, so an error or an interrupt before that
        has taken nothing.
        """
        limits = [token_limit(where, self._geometry, len(row), max_new_tokens) for row in rows]
        for row in rows:
            # Before the lock is taken: others go on meanwhile.
            self._prompts.compile(len(row))
        admitted: dict[int, Sequence] = {}
        try:
            with self._lock, self._life.using(where):
                pages = [self._geometry.pages_for(limit) for limit in limits]
                held = self._held()
                free = self._places.counts(held)
                if len(rows) > free[0] or sum(pages) > free[1]:
                    got, wanted = f"{len(rows)} and {sum(pages)}", f"at most {free[0]} and {free[1]}; release some"
                    raise CannotServe("sequences and pages", where=where, got=got, wanted=wanted)
                places, pool = self._places.free(held)
                for row, draw, limit, count in zip(rows, draws, limits, pages, strict=True):
                    prompt = [*map(operator.index, row)]
                    sequence = Sequence(
                        number=next(self._numbers), place=next(places), pages=tuple(itertools.islice(pool, count)),
                        length=len(prompt), newest=prompt[-1], limit=limit, sampling=parameters, top_k=top_k, draw=draw,
                        owner=None if owner is None else weakref.ref(owner),
                    )  # fmt: skip
                    self._read_prompt(sequence, prompt)
                    admitted[sequence.number] = sequence
                self._live = None
                self._sequences.update(admitted)
            return list(admitted)
        except BaseException:
            with self._lock:
                for number in admitted:
                    self._forget(number)
            raise

    def _read_prompt(self, sequence: Sequence, prompt: list[int]) -> None:
        entries = np.full(self._geometry.max_pages, -1, np.int32)
        entries[: len(sequence.pages)] = sequence.pages
        self.memory.write("table", entries, sequence.place * entries.nbytes)
        for name, value in (("limit", sequence.limit - 1), ("finished", RUNNING)):
            self.memory.write(name, np.asarray([value], np.int32), 4 * sequence.place)
        if self._prompts.takes(len(prompt)):
            self._prompts.read(prompt, sequence.pages)
            return
        last, size = len(prompt) - 1, self.chunk_buckets[-1]
        for start in range(0, last, size):
            chunk = prompt[start : min(start + size, last)]
            self._stepper.settle()
            self.memory.write("rows", row_block(self._geometry, [sequence] * len(chunk), chunk, start))
            call = self._calls.prompt(len(chunk))
            self.graphs.step(call.launches, call.certificate, self.memory.table)

    def _step(self, numbers: tuple[int, ...], *, more: bool = False) -> dict[int, int]:
        """As `Stepper.step`."""
        stepper = self._stepper
        try:
            found = stepper.step(numbers, more=more)
            if not stepper.holds(numbers):  # some may have ended
                self._live = None
            return found
        except BaseException:
            self._live = None
            raise

    def _held(self) -> list[Sequence]:
        """All sequences that have a place; those of generations that are gone have none any more."""
        for number, sequence in list(self._sequences.items()):
            if sequence.belongs_to(None):
                self._forget(number)
        return list(self._sequences.values())

    def _forget(self, number: int) -> None:
        """Give up a sequence, if it is still there, with its place and its pages.

        They are given to others at once: what reads them was queued before what will write them. The lock is not
        needed for a sequence that no step can be about.
        """
        self._live = None
        self._sequences.pop(number, None)  # this alone gives it up; the other lines may be interrupted
        self._stepper.forget(number)

    def _forget_all(self, generation: Generation) -> None:
        """Give up the sequences of a generation that is over.

        Takes no lock: a stream may be collected in any thread, also in one that has the lock of another engine, which
        another thread may wait for with the lock of this one.
        """
        for number, sequence in list(self._sequences.items()):
            if sequence.belongs_to(generation):
                self._forget(number)
