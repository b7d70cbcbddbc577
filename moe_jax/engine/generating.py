"""Whole generations on an engine, column by column: prompts join while there is room, and leave as they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float32, Int32

from moe_jax.errors import CannotServe
from moe_jax.generation import Column, Stop, row_check
from moe_jax.sampling import Sampling
from moe_jax.tokenizer import Tokenizer

from .sequences import Generation

if TYPE_CHECKING:
    from .engine import Engine


def columns(
    engine: Engine,
    where: str,
    rows: Items[Items[int]],
    max_new_tokens: int,
    parameters: Sampling,
    ends: Stop,
    *,
    pad: int,
    tokenizer: Tokenizer | None,
    logprobs: bool,
) -> Generator[Column]:
    """The steps of `moe_jax.generation.endings`: each is given as soon as every row has come so far, or has ended.

    More rows than places take turns, so then a step is given when the last of them is there. What the caller does not
    read is not computed, and places and pages are given back when the generator is closed or gone, however that comes.

    Args:
        engine: nobody else steps the sequences of this generation.
        rows: token ids of each prompt.
        logprobs: the log-probabilities are computed, which reads the logits of every step; else they are zeros.
    """
    mine = Generation()
    checks = [row_check(ends, tokenizer) for _ in rows]
    waiting, running = deque(range(len(rows))), dict[int, int]()
    tokens: list[list[int]] = [[] for _ in rows]
    scores: list[list[float]] = [[] for _ in rows]
    given = 0
    try:
        while waiting or running:
            while waiting:
                index = waiting[0]
                try:
                    (number,) = engine._admit(where, [rows[index]], [index], max_new_tokens, parameters, owner=mine)
                except CannotServe:
                    if not running:
                        raise
                    break
                running[number] = waiting.popleft()
            with engine._lock, engine._life.using(where):
                # Who waits joins when one has ended: then rows are laid out anew.
                found = engine._step(tuple(running), more=not waiting and not logprobs)
                drawn = np.asarray(list(found.values()))
                score = token_logprobs(engine.memory.read("logits", len(drawn)), drawn) if logprobs else 0.0 * drawn
                for (number, token), value in zip(found.items(), score.tolist(), strict=True):
                    index = running[number]
                    tokens[index].append(token)
                    scores[index].append(value)
                    if checks[index](token) or engine._sequences[number].ended:
                        del running[number]
                        engine._forget(number)
            unfinished = [*waiting, *running.values()]
            ready = min((len(tokens[i]) for i in unfinished), default=max(map(len, tokens)))
            for step in range(given, ready):
                yield (
                    np.asarray([row[step] if step < len(row) else pad for row in tokens], np.int32),
                    np.asarray([row[step] if step < len(row) else 0.0 for row in scores], np.float32),
                )
            given = max(given, ready)
    finally:
        engine._forget_all(mine)


def token_logprobs(logits: Float32[np.ndarray, "B V"], tokens: Int32[np.ndarray, " B"]) -> Float32[np.ndarray, " B"]:
    """`moe_jax.sampling.token_logprobs` on the host, where it compiles nothing; sums in f64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, dtype=np.float64)
    return (np.take_along_axis(shifted, tokens[:, None], axis=-1)[:, 0] - np.log(total)).astype(np.float32)
