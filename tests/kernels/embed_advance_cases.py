"""Oracles and random steps shared by the tests of embed and advance."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from moe_jax.pallas_kernels.advance import LENGTH, RUNNING, STOPPED, advance_spec
from moe_jax.pallas_kernels.spec import KernelSpec

type Run = Callable[[KernelSpec, Mapping[str, np.ndarray]], dict[str, np.ndarray]]


def by_reference(spec: KernelSpec, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Results by name."""
    results = spec.reference(*(given[a.name] for a in spec.inputs))
    results = results if isinstance(results, tuple) else (results,)
    names = [a.name for a in spec.arguments if a.role == "inout"] + [a.name for a in spec.outputs]
    return {name: np.asarray(value) for name, value in zip(names, results, strict=True)}


def embed_oracle(ids: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Row by row."""
    zero = np.zeros(table.shape[1], table.dtype)
    return np.stack([table[i] if 0 <= i < len(table) else zero for i in ids.tolist()])


def advance_oracle(given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Row by row, over copies."""
    now = {name: value.copy() for name, value in given.items()}
    rows, (sequences,) = now["token_ptr"].shape, now["limit_ptr"].shape
    now["ids_ptr"], now["position_ptr"] = np.full(rows, -1, np.int32), np.full(rows, -1, np.int32)
    stop, tokens = set(now["stop_ptr"].tolist()) - {-1}, now["tokens_ptr"]
    for row in range(rows[0]):
        token, s, place = (int(now[f"{name}_ptr"][row]) for name in ("token", "sequence", "following"))
        now["following_ptr"][row] = -1
        if token < 0 or place < 0 or not 0 <= s < sequences or now["finished_ptr"][s] != RUNNING:
            continue
        now["reached_ptr"][s], now["newest_ptr"][s] = place, token
        if tokens.ndim == 2 and place < tokens.shape[1]:
            tokens[s, place] = token
        end = STOPPED if token in stop else LENGTH if place >= now["limit_ptr"][s] else RUNNING
        now["finished_ptr"][s] = end
        if end == RUNNING:
            now["ids_ptr"][row], now["position_ptr"][row], now["following_ptr"][row] = token, place, place + 1
    return now


def advance_case(rng: np.random.Generator, spec: KernelSpec) -> dict[str, np.ndarray]:
    """Rows in every state: dead, of a chunk, of a sequence that ended before or does not exist, and live ones."""
    sizes = {a.name: a.shape for a in spec.inputs}
    (rows,), (sequences,), (stops,) = (sizes[f"{n}_ptr"] for n in ("token", "limit", "stop"))
    sequence = rng.integers(0, sequences, rows)
    following = rng.integers(0, 12, rows)
    # Of the rows of one sequence only the last counts.
    for row in range(rows):
        if sequence[row] in sequence[row + 1 :]:
            following[row] = -1
    following[rng.random(rows) < 0.1] = -1
    sequence = np.where(rng.random(rows) < 0.1, rng.choice([-1, sequences, 2**31 - 1], rows), sequence)
    given = {
        "token_ptr": np.where(rng.random(rows) < 0.1, -1, rng.integers(0, 20, rows)),
        "sequence_ptr": sequence,
        "limit_ptr": rng.integers(0, 14, sequences),
        "stop_ptr": np.where(rng.random(stops) < 0.3, -1, rng.integers(0, 20, stops)),
        "following_ptr": following,
        "reached_ptr": rng.integers(-1, 50, sequences),
        "newest_ptr": rng.integers(-1, 50, sequences),
        "finished_ptr": np.where(rng.random(sequences) < 0.2, rng.choice([STOPPED, LENGTH, 7], sequences), RUNNING),
        "tokens_ptr": rng.integers(-9, -1, sizes["tokens_ptr"]),
    }
    return {name: np.asarray(value, np.int32) for name, value in given.items()}


def advances_as_the_oracle(run: Run, rows: int, sequences: int, stops: int, max_tokens: int | None, calls: int) -> None:
    """New rows at every call; nothing but what may change does."""
    rng = np.random.default_rng(rows)
    spec = advance_spec(rows, sequences, stops, max_tokens=max_tokens)
    for _ in range(calls):
        given = advance_case(rng, spec)
        wanted = advance_oracle(given)
        for name, value in run(spec, given).items():
            np.testing.assert_array_equal(value, wanted[name], name)


PROMPTS = {0: 3, 2: 1, 5: 6}  # prompt tokens by sequence
NEW = {0: 4, 2: 9, 5: 5}
STOP = 77


def decodes_without_the_host(run: Run) -> None:
    """From a prompt's last row on, every step takes what the step before left, until all sequences have ended.

    Token t at position p of sequence s is ``100 * s + p``, but for sequence 2, which stops at its third.
    """
    rows, sequences = 8, 6
    spec = advance_spec(rows, sequences, 2, max_tokens=12)
    state = {a.name: np.full(a.shape, -1, np.int32) for a in spec.arguments}
    state["stop_ptr"][0] = STOP
    state["finished_ptr"][:] = RUNNING
    for s, length in PROMPTS.items():
        state["limit_ptr"][s] = length + NEW[s] - 1
    # Rows 0 to 2: a chunk, the last three of sequence 5's prompt; row 4 is not there.
    state["sequence_ptr"][:] = [5, 5, 5, 0, 0, 2, 1, 1]
    state["position_ptr"][:] = [3, 4, 5, 2, -1, 0, -1, -1]
    state["following_ptr"][:] = [-1, -1, 6, 3, -1, 1, -1, -1]
    drawn: dict[int, list[int]] = {s: [] for s in PROMPTS}
    for _ in range(12):
        token = np.full(rows, -1, np.int32)
        for row in np.flatnonzero(state["position_ptr"] >= 0):
            s, place = int(state["sequence_ptr"][row]), int(state["position_ptr"][row]) + 1
            token[row] = STOP if s == 2 and place == 3 else 100 * s + place
            if state["following_ptr"][row] >= 0:
                assert state["following_ptr"][row] == place
                drawn[s].append(int(token[row]))
        state["token_ptr"] = token
        state |= run(spec, {a.name: state[a.name] for a in spec.inputs})
    wanted = {s: [100 * s + length + i for i in range(NEW[s])] for s, length in PROMPTS.items()}
    wanted[2] = [201, 202, STOP]
    assert drawn == wanted
    for s, length in PROMPTS.items():
        end = length + len(wanted[s])
        assert state["tokens_ptr"][s, length:end].tolist() == wanted[s]
        assert (state["reached_ptr"][s], state["newest_ptr"][s]) == (end - 1, wanted[s][-1])
        assert (state["tokens_ptr"][s, end:] == -1).all()
    assert state["finished_ptr"].tolist() == [LENGTH, RUNNING, STOPPED, RUNNING, RUNNING, LENGTH]
    assert all((state[f"{n}_ptr"] == -1).all() for n in ("ids", "position", "following"))
