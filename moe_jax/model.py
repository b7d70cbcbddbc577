"""The model as a user holds it: logits, generate, save."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int, Int32

from moe_jax.cache import Executables, program_key
from moe_jax.errors import InvalidArgument
from moe_jax.pallas_kernels.checks import check_integer, check_kind, check_path, check_switch, shown

from . import generation, serving
from .models.config import ModelConfig
from .sampling import Sampling, sampling
from .serving import GraphsMode
from .tokenizer import Tokenizer

Tokens = Int32[np.ndarray, "B N"]
Logprobs = Float32[np.ndarray, "B N"]
Prompts = Any  # Int[B, T] or Int[T], lists of ids, strings, chat messages: see Model.generate

# A structure holds classes and options that have no content key, so it guards its programs by equality.
_stores: dict[tuple[Any, ...], Executables] = {}
_stores_lock = threading.Lock()

StopSpec = int | str | Sequence[int | str | Sequence[int]] | np.ndarray | jax.Array | None


class Model:
    """A language model with its tokenizer.

    ``module`` is an ordinary NNX module: replace it, or any part or value of it, and the next call uses what is
    there then. It is split once at the start of each call, never for each step; programs are compiled anew only when
    its structure, shapes, dtypes or devices have changed. Models of equal structure share their programs.

    Raises `InvalidArgument` when it is made of something else.

    Attributes:
        config: what the model is.
        module: the NNX module, a `moe_jax.models.decoder.Decoder`.
        tokenizer: or None.
    """

    def __init__(self, config: ModelConfig, module: nnx.Module, tokenizer: Tokenizer | None = None):
        check_kind("Model", "config", config, ModelConfig)
        check_kind("Model", "module", module, nnx.Module)
        if tokenizer is not None:
            check_kind("Model", "tokenizer", tokenizer, Tokenizer)
        self.config, self.module, self.tokenizer = config, module, tokenizer
        self._programs: tuple[tuple[Any, ...], Executables, str] | None = None
        self._serving: serving.Serving | None = None
        self._served = "generate was not called"

    def __getstate__(self) -> dict[str, Any]:
        """Of copies and pickles: programs and the engine stay behind, and a copy makes its own when it needs them.

        ``copy.copy`` shares module and tokenizer, ``copy.deepcopy`` has arrays of its own.
        """
        return self.__dict__ | {"_programs": None, "_serving": None, "_served": "generate was not called"}

    @property
    def executables(self) -> Executables:
        """The compiled programs of the module's present structure."""
        return self._split("executables")[1]

    @property
    def pad_token_id(self) -> int:
        """What fills a row after its end: the config's pad token, else its first end token, else 0."""
        if self.config.pad_token_id is not None:
            return self.config.pad_token_id
        return self.config.eos_token_ids[0] if self.config.eos_token_ids else 0

    def __call__(self, tokens: Int[Array, "B T"]) -> Float32[Array, "B T V"]:
        """Next-token logits after every position.

        Compiled for each batch size and power of two of T (at least 16, at most ``config.max_positions``); shorter
        inputs are padded on the right and cut again, which on an accelerator compiles a small copy for each T. For
        gradients, or inside your own ``jit``, call ``model.module`` instead.

        Args:
            tokens: ``[B, T]``, at most ``config.max_positions`` of them in a row.

        Raises:
            InvalidArgument: another shape or dtype, a token out of the vocabulary, too many tokens, or a call from
                within a transformation.
        """
        where = "model(tokens)"
        _refuse_traced(where, tokens)
        ids = _array(where, tokens)
        if ids.ndim != 2 or 0 in ids.shape:
            raise InvalidArgument("shape of tokens", where=where, got=list(ids.shape), wanted="[B, T], neither 0")
        self._check_ids(where, ids)
        if ids.shape[1] > self.config.max_positions:
            raise InvalidArgument(
                "length", where=where, got=ids.shape[1], wanted=f"at most max_positions={self.config.max_positions}"
            )
        return generation.logits(ids.astype(np.int32), self.config.max_positions, *self._split(where))

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: StopSpec = ...,
        graphs: GraphsMode | None = ...,
        logprobs: Literal[False] = False,
        stream: Literal[False] = False,
    ) -> Tokens: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: StopSpec = ...,
        graphs: GraphsMode | None = ...,
        logprobs: Literal[True],
        stream: Literal[False] = False,
    ) -> tuple[Tokens, Logprobs]: ...

    @overload
    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = ...,
        temperature: float = ...,
        top_p: float = ...,
        seed: int = ...,
        stop: StopSpec = ...,
        graphs: GraphsMode | None = ...,
        logprobs: bool = ...,
        stream: Literal[True],
    ) -> Iterator[Any]: ...

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: StopSpec = None,
        graphs: GraphsMode | None = None,
        logprobs: bool = False,
        stream: bool = False,
    ) -> Any:
        """Continue prompts.

        On a CPU a jitted step does it: the first call for a batch size, a prompt bucket and a capacity (powers of two)
        compiles two programs; other values of the options compile nothing. On a CUDA device a `moe_jax.Engine` does
        it, which the model keeps for the next call: see ``graphs`` and `close`. What is drawn for a row depends on its
        prompt, its index in the batch, ``seed`` and the sampling options, not on the other rows.

        There is no ``top_k`` here, as the jitted step has none; `Engine.prefill` takes it.

        Args:
            prompts: token ids ``[B, T]`` or ``[T]`` (every id counts, there is no padding in them); a list of lists
                of ids, of any lengths; a string or a list of strings; chat messages (a list of ``{"role": …,
                "content": …}``) or a list of such lists, through the tokenizer's chat template.
            max_new_tokens: at most this many for each row.
            temperature: 0 takes the most probable token, of equals the one with the lowest id.
            top_p: draw from the smallest set of most probable tokens that reaches this probability.
            seed: of the random draws.
            stop: token ids, lists of ids, or strings, besides the config's end tokens. A row ends with the token
                that completes one, and contains it. Strings are looked for in the decoded new text.
            graphs: what runs the steps.

                * None: an engine on a CUDA device, as ``"on"``, if one can serve the model; else as ``"jit"``.
                  `explain_generate` says which, and why.
                * ``"on"``: an engine, which replays a step as a device graph from the third call on.
                * ``"off"``: an engine without graphs.
                * ``"strict"``: an engine that is warmed up when it is made; a step that is then no replay raises.
                * ``"simulate"``: an engine on the host, slow, to test the logic.
                * ``"jit"``: the jitted step, no engine.

                An engine and the jitted step add in another order, so where two tokens are as good as equal, they may
                take different ones.
            logprobs: also give each token's log-probability under the model itself (natural logarithm, before
                temperature and top-p); 0 after a row's end.
            stream: give an iterator over steps instead, one ``[B]`` array for each (pairs with ``logprobs``).

        Returns:
            int32 ``[B, N]`` of new tokens, N being the longest row. Shorter rows are filled with `pad_token_id`, which
            the tokenizer's ``decode`` leaves out only if it is a special token. With ``logprobs`` a pair with f32
            ``[B, N]``. With ``stream`` an iterator of N steps.

        Raises:
            InvalidArgument: a prompt or option that cannot be served, with what was got and wanted.
            CannotServe: ``graphs`` names what cannot be had: no CUDA device, several devices, a changed module.
            MoeJaxError: what `Engine.step` raises, see `moe_jax.errors`; the model can be used again, as far as the
                engine can.
        """
        where = "generate"
        parameters = sampling(temperature, top_p, seed)
        rows = self.token_rows(prompts)
        count = check_integer(where, "max_new_tokens", max_new_tokens, 1)
        logprobs, stream = (check_switch(where, *each) for each in (("logprobs", logprobs), ("stream", stream)))
        longest = max(len(row) for row in rows)
        if longest + count > self.config.max_positions:
            raise InvalidArgument(
                "prompt and max_new_tokens together",
                where=where,
                got=f"{longest} + {shown(count)} tokens",
                wanted=f"at most max_positions={self.config.max_positions}",
            )
        ends = generation.parse_stop(stop, self.config.eos_token_ids, self.config.vocab_size, self.tokenizer)
        weights = self._weights(where)
        found = self._on_engine(graphs, weights, rows, count, parameters, ends, logprobs=logprobs)
        if isinstance(found, str):
            self._served = f"jitted step: {found}"
            raw = generation.steps(
                rows, count, parameters, self.config.max_positions, weights, *self._compiled(weights)
            )
            found = generation.endings(raw, len(rows), ends, self.pad_token_id, self.tokenizer)
        return generation.gathered(found, logprobs=logprobs, stream=stream)

    def explain_generate(self) -> str:
        """What served the last call of `generate`: an engine, in which mode, or the jitted step, and why."""
        return self._served

    def engine_stats(self) -> dict[str, Any] | None:
        """`Engine.stats` of the engine that `generate` keeps, steps by kind and reason among them; or None."""
        return None if self._serving is None else self._serving.stats()

    def close(self) -> None:
        """Free the engine that `generate` keeps, if any: its graphs and its memory. The model stays usable.

        Calls that still run on it end first. It happens by itself when the model is gone, and at the next call after an
        array, the structure, the config or the mode has changed, or when more room is needed.
        """
        if self._serving is not None:
            self._serving.close()

    def save(self, path: str | Path) -> None:
        """Write a Hugging Face folder: config, weights, and the tokenizer's files if there is one.

        A checkpoint that was in the folder is replaced, its tokenizer and chat template too, or these are removed where
        this model has none. A save that fails leaves the old checkpoint or the new one, whole.

        Raises:
            InvalidArgument: ``path`` is no path, or the config does not describe the module.
            OSError: of the file system.
        """
        from moe_jax.checkpoint import save_module

        save_module(self.config, self.module, check_path("Model.save", path), tokenizer=self.tokenizer)

    def _on_engine(
        self,
        graphs: GraphsMode | None,
        weights: generation.Weights,
        rows: list[list[int]],
        count: int,
        parameters: Sampling,
        ends: generation.Stop,
        *,
        logprobs: bool,
    ) -> Iterator[Any] | str:
        """The steps of a generation on the engine, or why the jitted step makes them."""
        chosen = serving.choose(graphs, weights)
        if isinstance(chosen, str):
            return chosen
        from .engine.generating import columns

        with _stores_lock:
            if self._serving is None:
                self._serving = serving.Serving()
                weakref.finalize(self, self._serving.close).atexit = False
        need = serving.needed(len(rows), max(map(len, rows)) + count)
        shown = {"pad": self.pad_token_id, "tokenizer": self.tokenizer, "logprobs": logprobs}
        source = serving.Source(self.config, self.module, weights, *chosen)
        found = self._serving.run(
            source,
            need,
            lambda engine: columns(engine, "generate", rows, count, parameters, ends, **shown),
            automatic=graphs is None,
        )
        if not isinstance(found, str):
            self._served = f'engine: graphs "{source.mode}"'
        return found

    def _weights(self, where: str) -> generation.Weights:
        """The module as it is now, split."""
        weights = generation.split(self.module)
        _refuse_traced(where, *weights.arrays)
        return weights

    def _split(self, where: str) -> tuple[generation.Weights, Executables, str]:
        """The module as it is now, the programs of its structure, and the key of its arrays' shapes."""
        weights = self._weights(where)
        return weights, *self._compiled(weights)

    def _compiled(self, weights: generation.Weights) -> tuple[Executables, str]:
        """The programs of a structure, and the key of its arrays' shapes."""
        signature = weights.signature()
        # Comparing with the last one is much faster than hashing.
        last = self._programs
        if last is None or last[0] != signature:
            avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in weights.arrays]
            self._programs = last = signature, _executables(signature), program_key(avals)
        return last[1], last[2]

    def token_rows(self, prompts: Prompts, caller: str = "generate") -> list[list[int]]:
        """Token ids of each prompt, from any form that `generate` takes.

        Args:
            caller: whose prompts they are, for errors.

        Raises:
            InvalidArgument: no prompt, an empty one, another form, or ids out of the vocabulary.
        """
        where = f"{caller}(prompts)"
        rows = [self._row(where, item) for item in _separate(where, prompts)]
        if not rows:
            raise InvalidArgument("prompts", where=where, got="an empty list", wanted="at least one prompt")
        for index, row in enumerate(rows):
            if not row:
                raise InvalidArgument(
                    "empty prompt", where=where, got=f"no token in prompt {index}", wanted="at least one token"
                )
            ids = _array(f"{where}[{index}]", row)
            if not np.issubdtype(ids.dtype, np.integer) and all(_kind(item) == "id" for item in row):
                ids = np.asarray(row, object)  # no dtype of integers holds them all
            self._check_ids(f"{where}[{index}]", ids)
        return rows

    def _row(self, where: str, prompt: Any) -> list[int]:
        chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
        if not isinstance(prompt, str) and not chat:
            return list(prompt)
        if self.tokenizer is None:
            raise InvalidArgument(
                "text for a model without a tokenizer",
                where=where,
                got="chat messages" if chat else "a string",
                wanted="token ids, or a checkpoint folder with tokenizer.json",
            )
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else self.tokenizer.chat(prompt)

    def _check_ids(self, where: str, ids: np.ndarray) -> None:
        long = ids.dtype == object and all(_kind(item) == "id" for item in ids.flat)
        if not (long or np.issubdtype(ids.dtype, np.integer)):
            raise InvalidArgument("type of tokens", where=where, got=ids.dtype.name, wanted="integers")
        outside = ids[(ids < 0) | (ids >= self.config.vocab_size)]
        if outside.size:
            raise InvalidArgument(
                "token out of the vocabulary",
                where=where,
                got=shown(int(outside[0])),
                wanted=f"0 to {self.config.vocab_size - 1}",
            )


def _array(where: str, ids: Any) -> np.ndarray:
    try:
        return np.asarray(ids)
    except ValueError as error:
        raise InvalidArgument("tokens", where=where, got="a list of uneven parts", wanted="integers") from error


def _refuse_traced(where: str, *values: Any) -> None:
    for value in values:
        if isinstance(value, jax.core.Tracer):
            raise InvalidArgument(
                "call from within jit, grad or another transformation",
                where=where,
                got=f"a tracer of {value.aval.str_short()}",
                wanted="arrays with values; there, call model.module instead",
            )


def _executables(signature: tuple[Any, ...]) -> Executables:
    """The programs of one module structure, compared by value; the least recently used of 16 structures is dropped."""
    with _stores_lock:
        store = _stores.pop(signature, None) or Executables(max_entries=64)
        _stores[signature] = store
        if len(_stores) > 16:
            del _stores[next(iter(_stores))]
        return store


def _separate(where: str, prompts: Prompts) -> list[Any]:
    """One item for each prompt, whatever form they come in."""
    wanted = "integers [B, T] or [T], lists of ids, strings, or chat messages"
    _refuse_traced(where, prompts)
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) and "role" in prompts:
        raise InvalidArgument("one chat message", where=where, got="a dict", wanted="a list of messages")
    if isinstance(prompts, (jax.Array, np.ndarray)):
        ids = np.asarray(prompts)
        if ids.ndim not in (1, 2) or not np.issubdtype(ids.dtype, np.integer):
            raise InvalidArgument(
                "array of prompts", where=where, got=f"{ids.dtype.name} {list(ids.shape)}", wanted=wanted
            )
        return np.atleast_2d(ids).tolist()
    if not isinstance(prompts, (list, tuple)):
        raise InvalidArgument("type of prompts", where=where, got=type(prompts).__name__, wanted=wanted)
    kinds = {_kind(item) for item in prompts}
    if len(kinds) > 1 or "other" in kinds:
        names = sorted({type(item).__name__ for item in prompts})
        raise InvalidArgument("prompts", where=where, got=f"a list of {', '.join(names)}", wanted=wanted)
    if kinds & {"id", "message"}:
        return [prompts]
    return [item.tolist() if isinstance(item, (jax.Array, np.ndarray)) else item for item in prompts]


def _kind(item: Any) -> str:
    if isinstance(item, str):
        return "text"
    if isinstance(item, Mapping):
        return "message"
    if isinstance(item, (int, np.integer)) and not isinstance(item, bool):
        return "id"
    listed = isinstance(item, (list, tuple)) or (isinstance(item, (jax.Array, np.ndarray)) and item.ndim == 1)
    return "list" if listed else "other"
