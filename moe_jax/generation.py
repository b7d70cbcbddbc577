"""The decode loop: two compiled programs, chained on the device, read one step behind.

The module is split into flat arrays once for each generation; every step is one call of a compiled program on
those arrays. The host reads step i while the device runs step i + 1, so when all rows end early one step has
been computed for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool, Float32, Int32

from moe_jax.cache import Executables, program_key
from moe_jax.errors import CannotServe, InvalidArgument
from moe_jax.pallas_kernels.checks import plain

from .models.kv import Cache
from .sampling import Sampling, sample, token_logprobs
from .tokenizer import Tokenizer, check_text

# Tokens of a step, and their log-probabilities.
Column = tuple[Int32[np.ndarray, " B"], Float32[np.ndarray, " B"]]

_SMALLEST_BUCKET = 16


class Weights(NamedTuple):
    """A module, split: its structure, and its arrays as one flat list.

    Attributes:
        structure: what `nnx.split` and `jax.tree.flatten` took away from the arrays.
        arrays: all variables' arrays.
    """

    structure: tuple[nnx.GraphDef, jax.tree_util.PyTreeDef]
    arrays: list[Array]

    def signature(self) -> tuple[Any, ...]:
        """Equal for two splits that the same compiled programs serve."""
        return (*self.structure, *((x.shape, x.dtype, x.sharding) for x in self.arrays))


class Step(NamedTuple):
    """Device arrays after a step. ``lengths`` and ``cache`` are given away to the next one.

    Attributes:
        tokens: int32 ``[B]``, chosen but not yet read by the model.
        logprobs: f32 ``[B]`` of these tokens.
        lengths: int32 ``[B]``, tokens read: the position where ``tokens`` will stand.
        cache: keys and values of the tokens read.
    """

    tokens: Int32[Array, " B"]
    logprobs: Float32[Array, " B"]
    lengths: Int32[Array, " B"]
    cache: Cache


class Stop(NamedTuple):
    """What ends a row: a token, the last tokens, or a string in the row's decoded text."""

    tokens: frozenset[int]
    sequences: tuple[tuple[int, ...], ...]
    strings: tuple[str, ...]


def split(module: nnx.Module) -> Weights:
    """Split a module for `steps` and `logits`."""
    graphdef, state = nnx.split(module)
    arrays, tree = jax.tree.flatten(state)
    return Weights((graphdef, tree), arrays)


def bucket(length: int, most: int) -> int:
    """What a length is padded to: the power of two, at least 16, but no more than ``most``, the model's positions."""
    return min(max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length()), most)


def logits(
    tokens: Int32[np.ndarray, "B T"], max_positions: int, weights: Weights, executables: Executables, weights_key: str
) -> Float32[Array, "B T V"]:
    """Logits at every position, computed at the length's bucket (later positions cannot reach earlier ones).

    Raises:
        CannotServe: the arrays lie where the model's operations do not take them.
    """
    _home(weights.arrays, "model(tokens)")
    length = tokens.shape[1]
    padded = np.pad(tokens, ((0, 0), (0, bucket(length, max_positions) - length)))

    def run(arrays, tokens):
        return _merge(weights, arrays)(tokens)

    key = program_key("logits", jax.__version__, weights_key, padded.shape)
    parts = {"program": "logits", "tokens": str(padded.shape)}
    given = (weights.arrays, padded)
    found = executables.get_or_compile(key, run, given, command_buffers=False, parts=parts)(*given)
    return found if length == padded.shape[1] else _first(found, length)


def steps(
    prompts: Sequence[Sequence[int]],
    count: int,
    parameters: Sampling,
    max_positions: int,
    weights: Weights,
    executables: Executables,
    weights_key: str,
) -> Iterator[Column]:
    """Tokens and log-probabilities, step by step, ``count`` times; the caller stops when all rows have ended.

    At most two programs are compiled, whatever ``count`` is: one reads the prompts, one makes a step. Prompt
    lengths and prompt plus ``count`` are rounded up to buckets, so that few different programs exist.

    Raises:
        CannotServe: at the first step: the arrays lie where the model's operations do not take them.
    """
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), bucket(int(lengths.max()), max_positions)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    capacity = bucket(int(lengths.max()) + count, max_positions)
    arrays = weights.arrays
    parameters = jax.device_put(parameters, _home(arrays, "generate"))

    def prefill(arrays, tokens, lengths, parameters) -> Step:
        found, cache = _merge(weights, arrays).prefill(tokens, lengths, capacity)
        return _chosen(found, lengths, parameters, cache)

    def step(arrays, tokens, lengths, cache, parameters) -> Step:
        found, cache = _merge(weights, arrays).decode(tokens, lengths, cache)
        return _chosen(found, lengths + 1, parameters, cache)

    common = (jax.__version__, weights_key, len(prompts), capacity)
    first = (arrays, tokens, lengths, parameters)
    key = program_key("prefill", tokens.shape[1], *common)
    parts = {"program": "prefill", "tokens": str(tokens.shape), "capacity": str(capacity)}
    now = executables.get_or_compile(key, prefill, first, command_buffers=False, parts=parts)(*first)
    run = None
    for index in range(count):
        following = None
        if index + 1 < count:
            given = (arrays, now.tokens, now.lengths, now.cache, parameters)
            run = run or executables.get_or_compile(
                program_key("step", *common),
                step,
                given,
                donate_argnums=(2, 3),
                command_buffers=True,
                parts={"program": "step", "rows": str(len(prompts)), "capacity": str(capacity)},
            )
            following = run(*given)
        yield np.asarray(now.tokens), np.asarray(now.logprobs)
        if following is not None:
            now = following


def endings(
    raw: Iterator[Column],
    rows: int,
    stop: Stop,
    pad: int,
    tokenizer: Tokenizer | None,
) -> Iterator[Column]:
    """The same steps with ended rows padded (log-probability 0), up to the one that ends the last row."""
    checks = [row_check(stop, tokenizer) for _ in range(rows)]
    live = np.ones(rows, bool)
    for tokens, logprobs in raw:
        yield np.where(live, tokens, np.int32(pad)), np.where(live, logprobs, np.float32(0))
        live = _still_live(live, tokens, checks)
        if not live.any():
            return


class _TokensOf(Iterator[Int32[np.ndarray, " B"]]):
    """The tokens of the steps. Closing it closes the steps, also where none was read."""

    def __init__(self, steps: Iterator[Column]):
        self._steps = steps

    def __next__(self) -> Int32[np.ndarray, " B"]:
        return next(self._steps)[0]

    def close(self) -> None:
        close = getattr(self._steps, "close", None)
        if close is not None:
            close()


def gathered(steps: Iterator[Column], *, logprobs: bool, stream: bool) -> Any:
    """What `Model.generate` gives of the steps: see there."""
    if stream:
        return steps if logprobs else _TokensOf(steps)
    tokens, scores = (np.stack(parts, axis=1) for parts in zip(*steps, strict=True))
    return (tokens, scores) if logprobs else tokens


def parse_stop(
    stop: Any, end_tokens: Sequence[int], vocabulary: int, tokenizer: Tokenizer | None, caller: str = "generate"
) -> Stop:
    """Stop conditions of a user, with the model's own end-of-sequence tokens.

    Args:
        stop: None, a token id, a string, or a list, tuple or array whose items are ids, strings, or lists of ids (a
            sequence).
        caller: whose option it is, for errors.

    Raises:
        InvalidArgument: another type or an item of another kind, an id out of the vocabulary, or a string without a
            tokenizer.
    """
    where = f"{caller}(stop=…)"
    stop = plain(stop)
    stop = [] if stop is None else [stop] if isinstance(stop, (int, np.integer, str)) else stop
    if not isinstance(stop, (list, tuple)):
        raise InvalidArgument(
            "type of stop", where=where, got=repr(stop), wanted="an id, a string, or a list, tuple or array of them"
        )
    items = [plain(item) for item in stop]
    tokens, sequences, strings = set(end_tokens), [], []
    for item in items:
        if isinstance(item, str):
            if tokenizer is None:
                raise InvalidArgument(
                    "a stop string needs a tokenizer", where=where, got=repr(item), wanted="token ids for this model"
                )
            if not item:
                raise InvalidArgument("stop string", where=where, got="''", wanted="at least one character")
            strings.append(item)
            # Text leaves special tokens out, so a stop that names one is looked for as a token too.
            token = tokenizer.token_id(check_text(where, item))
            tokens |= set() if token is None else {token}
            continue
        ids = [item] if isinstance(item, (int, np.integer)) else item
        listed = isinstance(ids, (list, tuple)) and len(ids) > 0
        if not listed or not all(_is_token(i, vocabulary) for i in ids):
            raise InvalidArgument(
                "stop item", where=where, got=repr(item), wanted=f"a string, an id under {vocabulary}, or a list of ids"
            )
        if len(ids) == 1:
            tokens.add(int(ids[0]))
        else:
            sequences.append(tuple(int(i) for i in ids))
    return Stop(frozenset(tokens), tuple(sequences), tuple(strings))


def _is_token(value: Any, vocabulary: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < vocabulary)


def row_check(stop: Stop, tokenizer: Tokenizer | None) -> Callable[[int], bool]:
    """A function that takes a row's tokens one by one and says whether the row ends with this one."""
    last: list[int] = []
    longest = max((len(s) for s in stop.sequences), default=0)
    stream = tokenizer.stream() if tokenizer is not None and stop.strings else None
    keep = max(0, max((len(s) for s in stop.strings), default=0) - 1)
    tail = ""

    def ends(token: int) -> bool:
        nonlocal tail
        if token in stop.tokens:
            return True
        if longest:
            last.append(token)
            del last[:-longest]
            if any(tuple(last[-len(s) :]) == s for s in stop.sequences):
                return True
        if stream is not None:
            # Enough of the past for a string that began before this token, never the whole text again.
            tail = (tail[-keep:] if keep else "") + stream.push(token)
            return any(s in tail for s in stop.strings)
        return False

    return ends


def _still_live(
    live: Bool[np.ndarray, " B"], tokens: Int32[np.ndarray, " B"], checks: Sequence[Callable[[int], bool]]
) -> Bool[np.ndarray, " B"]:
    on = [bool(alive) and not check(int(token)) for alive, token, check in zip(live, tokens, checks, strict=True)]
    return np.asarray(on)


def _first(found: Float32[Array, "B T V"], length: int) -> Float32[Array, "B length V"]:
    """The first ``length`` positions.

    An array of one CPU device is cut by NumPy, which reads its memory in place: JAX would compile one more program for
    every length. On other devices JAX does that, because the way through the host would cost a transfer each call.
    As with JAX's own cut, the result is bound to its device only if ``found`` is.
    """
    devices = found.sharding.device_set
    if len(devices) > 1 or next(iter(devices)).platform != "cpu":
        return found[:, :length]
    return jax.device_put(np.asarray(found)[:, :length], found.sharding if found.committed else None)


def _home(arrays: Sequence[Array], where: str) -> Sharding:
    """Where small arrays lie that go with a module's: whole on each of the devices that these are bound to.

    Raises:
        CannotServe: these are bound to different devices.
    """
    bound = [array.sharding for array in arrays if array.committed] or [arrays[0].sharding]
    home = bound[0]
    other = next((each for each in bound if each.device_set != home.device_set), None)
    if other is not None:
        names = (", ".join(sorted(map(str, each.device_set))) for each in (home, other))
        got = f"arrays on {' and '.join(names)}"
        raise CannotServe("devices", where=where, got=got, wanted="all of a model on the same")
    if isinstance(home, NamedSharding):
        return NamedSharding(home.mesh, PartitionSpec(), memory_kind=home.memory_kind)
    return home


def _merge(weights: Weights, arrays: list[Array]) -> Any:
    graphdef, tree = weights.structure
    return nnx.merge(graphdef, tree.unflatten(arrays))


def _chosen(found: Float32[Array, "B V"], lengths: Int32[Array, " B"], parameters: Sampling, cache: Cache) -> Step:
    sequences = jnp.arange(found.shape[0], dtype=jnp.int32)
    tokens = sample(found, sequences, lengths, parameters)
    return Step(tokens, token_logprobs(found, tokens), lengths, cache)
