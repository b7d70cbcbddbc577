"""Generation end to end on tiny random models: equality, compile counts, stops, streams, prompts, errors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.errors import InvalidArgument
from moe_jax.generation import bucket, endings, parse_stop
from moe_jax.model import Model
from moe_jax.models import decoder
from moe_jax.models.config import RopeConfig
from moe_jax.tokenizer import Tokenizer
from test_tokenizer import CONFIG, TEMPLATE, byte_tokenizer
from tiny_models import FAMILIES, tiny_config, tiny_model, tiny_module

MAIN = "qwen3_moe"  # the family most tests use; all share its compiled programs
PROMPTS = [[5, 17, 3, 60, 2, 9, 9, 41, 8], [11], [80, 2, 2, 4]]
COMPILED = "/jax/core/compile/backend_compile_duration"


class Compiles:
    """Counts every compilation of the process, of whatever program."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, event: str, duration: float, **_: object) -> None:
        self.count += event == COMPILED


@pytest.fixture
def compiles() -> Iterator[Compiles]:
    counter = Compiles()
    jax.monitoring.register_event_duration_secs_listener(counter)
    yield counter
    jax.monitoring.unregister_event_duration_listener(counter)


@pytest.fixture
def text_model() -> Model:
    config = dataclasses.replace(tiny_config(MAIN), eos_token_ids=(257,))
    return Model(config, tiny_module(tiny_config(MAIN)), Tokenizer(byte_tokenizer(), CONFIG, TEMPLATE))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_decode_equal_the_full_forward(family):
    """Greedy tokens exactly, log-probabilities within 1e-5, in a batch of unequal lengths."""
    model = tiny_model(family)
    tokens, scores = model.generate(PROMPTS, max_new_tokens=20, logprobs=True)
    assert tokens.shape == scores.shape == (3, 20) and (tokens.dtype, scores.dtype) == (np.int32, np.float32)
    lengths = np.asarray([len(p) for p in PROMPTS])
    whole = np.zeros((3, 32), np.int32)
    for row, prompt, new in zip(whole, PROMPTS, tokens, strict=True):
        row[: len(prompt) + 20] = [*prompt, *new]
    logits = model(whole)
    assert logits.shape == (3, 32, 258) and logits.dtype == jnp.float32
    at = lengths[:, None] - 1 + np.arange(20)
    steps = np.take_along_axis(np.asarray(logits), at[:, :, None], axis=1)
    np.testing.assert_array_equal(tokens, steps.argmax(-1))
    shifted = steps - steps.max(-1, keepdims=True)
    full = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    np.testing.assert_allclose(scores, np.take_along_axis(full, tokens[:, :, None], -1)[..., 0], rtol=0, atol=1e-5)


def test_200_tokens_compile_two_programs(compiles):
    config = tiny_config("olmoe", layers=1, moe_layers=(True,), vocab_size=31)
    model = Model(config, tiny_module(config))
    prompt = np.asarray([[1, 2, 3]])
    compiles.count = 0
    out = model.generate(prompt, max_new_tokens=200)
    assert out.shape == (1, 200)
    assert compiles.count <= 2
    assert (model.executables.stats().misses, model.executables.stats().entries) == (2, 2)
    # Other options, and other lengths in the same buckets, compile nothing at all.
    compiles.count = 0
    for options in (
        {"temperature": 0.8},
        {"temperature": 1.3, "top_p": 0.7, "seed": 9},
        {"logprobs": True},
        {"stop": [3]},
    ):
        model.generate([[4, 5, 6, 7]], max_new_tokens=190, **options)
    assert list(model.generate([7] * 12, max_new_tokens=150, stream=True))
    assert compiles.count == 0


def test_a_row_equals_the_same_prompt_alone():
    model = tiny_model(MAIN)
    batch = model.generate(PROMPTS, max_new_tokens=20)
    for row, prompt in zip(batch, PROMPTS, strict=True):
        np.testing.assert_array_equal(model.generate(prompt, max_new_tokens=20)[0], row)


def test_sampling_is_reproducible_and_ignores_batch_mates():
    model = tiny_model(MAIN)
    options = {"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.95, "seed": 4}
    first = model.generate(PROMPTS, **options)
    np.testing.assert_array_equal(first, model.generate(PROMPTS, **options))
    assert (first != model.generate(PROMPTS, **{**options, "seed": 5})).any()
    others = model.generate([[1, 2], PROMPTS[1], [70] * 9], **options)
    np.testing.assert_array_equal(others[1], first[1])
    same = model.generate([PROMPTS[0]] * 3, **options)
    assert not (same[0] == same[1]).all()
    np.testing.assert_array_equal(same[0], first[0])


def test_logprobs_are_before_temperature_and_top_p():
    model = tiny_model(MAIN)
    options = {"max_new_tokens": 20, "logprobs": True}
    greedy, score = model.generate(PROMPTS, **options)
    cold, cold_score = model.generate(PROMPTS, temperature=1e-6, top_p=0.5, **options)
    np.testing.assert_array_equal(greedy, cold)
    np.testing.assert_array_equal(score, cold_score)
    assert (score < 0).all()


def test_stream_equals_the_whole():
    model = tiny_model(MAIN)
    whole, scores = model.generate(PROMPTS, max_new_tokens=20, logprobs=True)
    stop = int(whole[0, 4])
    whole, scores = model.generate(PROMPTS, max_new_tokens=20, logprobs=True, stop=stop)
    steps = list(model.generate(PROMPTS, max_new_tokens=20, stop=stop, stream=True))
    assert len(steps) == whole.shape[1] and all(step.shape == (3,) and step.dtype == np.int32 for step in steps)
    np.testing.assert_array_equal(np.stack(steps, 1), whole)
    pairs = list(model.generate(PROMPTS, max_new_tokens=20, stop=stop, stream=True, logprobs=True))
    np.testing.assert_array_equal(np.stack([score for _, score in pairs], 1), scores)
    half = model.generate(PROMPTS, max_new_tokens=20, stream=True)
    next(half)
    half.close()


def test_rows_end_with_the_token_that_completes_a_stop():
    model = tiny_model(MAIN)
    free = model.generate(PROMPTS, max_new_tokens=20)
    row = free[0].tolist()
    pair = row[3:5]
    first = next(i for i in range(19) if row[i : i + 2] == pair) + 2
    for stop in ([pair], [257, pair]):
        got, scores = model.generate(PROMPTS[:1], max_new_tokens=20, stop=stop, logprobs=True)
        assert got.tolist() == [row[:first]] and scores.shape == (1, first)
    once = model.generate(PROMPTS, max_new_tokens=20, stop=row[3], logprobs=True)
    for ended, score, whole in zip(*once, free.tolist(), strict=True):
        length = whole.index(row[3]) + 1 if row[3] in whole else once[0].shape[1]
        assert ended[:length].tolist() == whole[:length]
        assert (ended[length:] == 0).all() and (score[length:] == 0).all()


def test_end_tokens_and_padding_come_from_the_config():
    config = tiny_config(MAIN)
    free = tiny_model(MAIN).generate(PROMPTS, max_new_tokens=20)
    end = int(free[0, 2])
    length = free[0].tolist().index(end) + 1
    for pad, want in ((None, end), (7, 7)):
        ending = dataclasses.replace(config, eos_token_ids=(257, end) if pad else (end,), pad_token_id=pad)
        model = Model(ending, tiny_module(config))
        assert model.pad_token_id == want
        got = model.generate(PROMPTS, max_new_tokens=20)
        assert got[0, :length].tolist() == free[0, :length].tolist()
        assert (got[0, length:] == want).all()
    assert tiny_model(MAIN).pad_token_id == 0


def fake_steps(*rows: str | list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """What the device would give: the bytes of texts, or ids."""
    tokenizer = Tokenizer(byte_tokenizer())
    ids = [tokenizer.encode(row, add_special=False) if isinstance(row, str) else row for row in rows]
    for column in zip(*ids, strict=True):
        yield np.asarray(column, np.int32), np.full(len(ids), -1, np.float32)


HELLO, NO_STOP = "hello world!  ", "no stop héré"  # of equal length in bytes


@pytest.mark.parametrize(
    ("stop", "ends"),
    [
        ("o w", ("hello w", NO_STOP)),
        (["é", "zzz"], (HELLO, "no stop hé")),
        ("h", ("h", "no stop h")),
        ("hé", (HELLO, "no stop hé")),
        ("d!", ("hello world!", NO_STOP)),
        ("\n", (HELLO, NO_STOP)),
    ],
)
def test_stop_strings_are_found_in_decoded_text(stop, ends):
    tokenizer = Tokenizer(byte_tokenizer())
    texts = (HELLO, NO_STOP)
    steps = list(endings(fake_steps(*texts), 2, parse_stop(stop, (), 258, tokenizer), 257, tokenizer))
    tokens, scores = (np.stack(part, 1) for part in zip(*steps, strict=True))
    for row, score, text, end in zip(tokens, scores, texts, ends, strict=True):
        length = len(end.encode()) if end != text else len(row)
        assert tokenizer.decode(row[:length]) == end
        assert (row[length:] == 257).all()
        assert (score[:length] == -1).all()
        assert (score[length:] == 0).all()


def test_stop_sequences_are_found_at_any_place():
    stop = parse_stop([[1, 1, 2], [3, 4]], (), 10, None)
    steps = list(endings(fake_steps([1, 1, 1, 2, 5], [3, 3, 4, 0, 0], [4, 3, 1, 2, 1]), 3, stop, 9, None))
    assert np.stack([t for t, _ in steps], 1).tolist() == [[1, 1, 1, 2, 9], [3, 3, 4, 9, 9], [4, 3, 1, 2, 1]]


def test_prompts_come_in_every_form(text_model):
    ids = text_model.tokenizer.encode("hello")
    array = np.asarray(ids)
    for form in (
        ids,
        array,
        array[None],
        jnp.asarray(ids),
        "hello",
        ["hello"],
        [array],
        [jnp.asarray(ids)],
        (tuple(ids),),
    ):
        assert text_model.token_rows(form) == [ids]
    chat = [{"role": "user", "content": "hi"}]
    assert text_model.token_rows(chat) == text_model.token_rows([chat]) == [text_model.tokenizer.chat(chat)]
    assert text_model.token_rows(["hello", "a"]) == [ids, text_model.tokenizer.encode("a")]
    assert text_model.token_rows(np.asarray([[1, 2], [3, 4]], np.uint8)) == [[1, 2], [3, 4]]
    assert text_model.generate("hello", max_new_tokens=20, stop="zzz").shape[0] == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts: got an empty list"),
        ([[]], "empty prompt: got no token in prompt 0, wanted at least one token"),
        ([[1], []], "no token in prompt 1"),
        (np.zeros((2, 0), np.int32), "empty prompt"),
        ([[3, 258]], r"generate\(prompts\)\[0\]: token out of the vocabulary: got 258, wanted 0 to 257"),
        ([[-1]], "got -1, wanted 0 to 257"),
        ([[1, 1 << 40]], "token out of the vocabulary: got 1099511627776, wanted 0 to 257"),
        ([[1 << 63, -1]], "token out of the vocabulary: got 9223372036854775808, wanted 0 to 257"),
        ([[1, 10**5000]], "token out of the vocabulary: got an integer of 16610 bits, wanted 0 to 257"),
        ([[1, None, 1 << 80]], "type of tokens: got object, wanted integers"),
        (np.zeros((1, 2), np.float32), r"array of prompts: got float32 \[1, 2\], wanted integers"),
        (5, "type of prompts: got int"),
        ([1, "a"], "prompts: got a list of int, str"),
        ([[1.5]], "type of tokens: got float64"),
        ([[1, [2]]], r"generate\(prompts\)\[0\]: tokens: got a list of uneven parts, wanted integers"),
        ("text", "without a tokenizer: got a string, wanted token ids"),
        ([{"role": "user", "content": "x"}], "without a tokenizer: got chat messages"),
        ({"role": "user", "content": "x"}, "one chat message: got a dict, wanted a list"),
        ({"input_ids": [[1]]}, "type of prompts: got dict, wanted integers"),
    ],
)
def test_bad_prompts_are_refused_with_the_values(prompts, message):
    with pytest.raises(InvalidArgument, match=message):
        tiny_model(MAIN).generate(prompts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, wanted an integer, 1 or more"),
        ({"max_new_tokens": 512}, r"got 1 \+ 512 tokens, wanted at most max_positions=512"),
        ({"max_new_tokens": 10**5000}, r"got 1 \+ an integer of 16610 bits tokens, wanted at most max_positions=512"),
        ({"max_new_tokens": 2.0}, "max_new_tokens: got 2.0"),
        ({"max_new_tokens": None}, "max_new_tokens: got None, wanted an integer, 1 or more"),
        *(
            ({name: value}, f"^generate: {name}: got .*, wanted True or False")
            for name in ("logprobs", "stream")
            for value in (None, 1, 3, "yes")
        ),
        ({"temperature": -1}, "temperature: got -1"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"stop": "x"}, "stop string needs a tokenizer: got 'x'"),
        ({"stop": [258]}, "stop item: got 258, wanted a string, an id under 258"),
        ({"stop": [[]]}, r"stop item: got \[\]"),
        ({"stop": [1.5]}, "stop item: got 1.5"),
        ({"stop": 1.5}, "type of stop: got 1.5, wanted an id, a string, or a list, tuple or array"),
        ({"stop": {"x": 1}}, r"type of stop: got \{'x': 1\}"),
        ({"stop": {7}}, r"type of stop: got \{7\}"),
        ({"stop": np.asarray(1.5)}, "type of stop: got 1.5"),
        ({"stop": [np.asarray([[1]])]}, r"stop item: got \[\[1\]\]"),
        ({"stop": jnp.asarray(1.5)}, "type of stop: got 1.5"),
        ({"stop": jnp.asarray([3, 258])}, "stop item: got 258"),
        ({"stop": [jnp.asarray([[1]])]}, r"stop item: got \[\[1\]\]"),
        ({"stop": jax.random.key(0)}, "type of stop: got Array"),
        ({"stop": [jax.random.key(0)]}, "stop item: got Array"),
    ],
)
def test_bad_options_are_refused_before_anything_runs(options, message):
    with pytest.raises(InvalidArgument, match=message):
        tiny_model(MAIN).generate([1], **{"stream": True, **options})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *((lambda model, v=v: (v, model.module), "type of config: got .*, wanted ModelConfig") for v in (None, 3)),
        *((lambda model, v=v: (model.config, v), "type of module: got .*, wanted Module") for v in (None, 3)),
        *(
            (lambda model, v=v: (model.config, model.module, v), "type of tokenizer: got .*, wanted Tokenizer")
            for v in (3, "x")
        ),
        (
            lambda model: (model.config, model.module, byte_tokenizer()),
            "type of tokenizer: got tokenizers.Tokenizer, wanted moe_jax.tokenizer.Tokenizer",
        ),
    ],
)
def test_a_model_is_made_of_what_it_says(arguments, message):
    with pytest.raises(InvalidArgument, match=f"^Model: {message}"):
        Model(*arguments(tiny_model(MAIN)))


def test_stop_parsing():
    assert parse_stop(None, (3,), 10, None) == (frozenset({3}), (), ())
    assert parse_stop([1, [2], (4, np.int32(5))], (3,), 10, None) == (frozenset({1, 2, 3}), ((4, 5),), ())
    for make in (np.asarray, jnp.asarray):
        arrays = (make(1), make([1]), (make(1),), [make([1])], make([[1]], np.uint8))
        assert all(parse_stop(stop, (), 10, None) == (frozenset({1}), (), ()) for stop in arrays)
        assert parse_stop([make([4, 5])], (), 10, None).sequences == ((4, 5),)
    with pytest.raises(InvalidArgument, match=r"type of stop: got .*Tracer.* wanted an id, a string, or a list"):
        jax.jit(lambda stop: parse_stop(stop, (), 10, None))(jnp.asarray([1]))
    tokenizer = Tokenizer(byte_tokenizer(), CONFIG)
    with pytest.raises(InvalidArgument, match="stop string: got ''"):
        parse_stop("", (), 10, tokenizer)
    with pytest.raises(InvalidArgument, match=r"generate\(stop=…\): text: got '\\ud800' at 0, wanted valid Unicode"):
        parse_stop("\ud800", (), 10, tokenizer)
    assert parse_stop("</s>", (), 258, tokenizer).tokens == {257}  # decoded text never shows a special token


def test_calling_the_model_checks_tokens():
    model = tiny_model(MAIN)
    for bad, message in (
        (np.zeros(3, np.int32), r"shape of tokens: got \[3\]"),
        (np.zeros((1, 0), np.int32), r"got \[1, 0\]"),
        (np.full((1, 3), 258), "got 258, wanted 0 to 257"),
        ([[1], [1, 2]], "tokens: got a list of uneven parts, wanted integers"),
        (np.full((1, 3), 1 << 80, object), "got an integer of 81 bits, wanted 0 to 257"),
        (np.zeros((1, 3)), "type of tokens: got float64"),
        (np.zeros((1, 513), np.int32), "length: got 513, wanted at most max_positions=512"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            model(bad)
    with pytest.raises(InvalidArgument, match=r"got a tracer of int32\[1,3\], wanted .* call model.module"):
        jax.jit(model)(jnp.zeros((1, 3), jnp.int32))

    def loss(module: nnx.Module):
        return Model(model.config, module)(np.zeros((1, 3), np.int32)).sum()

    with pytest.raises(
        InvalidArgument, match=r"model\(tokens\): call from within jit, grad .* got a tracer of float32"
    ):
        nnx.grad(loss)(model.module)
    with pytest.raises(InvalidArgument, match=r"generate\(prompts\): call from within jit"):
        jax.jit(model.generate)(jnp.zeros((1, 3), jnp.int32))


def test_all_lengths_of_a_bucket_share_one_program(compiles):
    config = tiny_config("olmoe", vocab_size=29)
    model = Model(config, tiny_module(config))
    tokens = np.random.default_rng(0).integers(0, 29, (2, 16))
    compiles.count = 0
    found = {length: model(tokens[:, :length]) for length in (16, 1, 5, 11, 15)}
    assert compiles.count == 1
    for length, logits in found.items():
        assert isinstance(logits, jax.Array) and logits.shape == (2, length, 29) and not logits.committed
        np.testing.assert_array_equal(logits, found[16][:, :length])
    graphdef, state = nnx.split(model.module)
    other = jax.devices()[1]
    there = Model(config, nnx.merge(graphdef, jax.device_put(state, other)))(tokens[:, :3])
    assert there.committed and there.sharding.device_set == {other}
    np.testing.assert_array_equal(there, found[16][:, :3])


def test_buckets_stay_within_the_positions_of_the_model(monkeypatch):
    assert [bucket(n, 2048) for n in (1, 16, 17, 32, 33, 1000)] == [16, 16, 32, 32, 64, 1024]
    assert [bucket(n, 24) for n in (1, 16, 17, 24)] == [16, 16, 24, 24] and bucket(3, 8) == 8
    config = tiny_config("olmoe", vocab_size=29, max_positions=24)
    model = Model(config, tiny_module(config))
    widths: list[int] = []
    rotation = decoder.rotation

    def spy(rope: RopeConfig, head_dim: int, positions: jax.Array):
        widths.append(positions.shape[1])
        return rotation(rope, head_dim, positions)

    monkeypatch.setattr(decoder, "rotation", spy)
    assert model(np.ones((1, 20), np.int32)).shape == (1, 20, 29)
    # The number of new tokens may be any integer type; the last position is used.
    steps = model.generate([[1] * 20], max_new_tokens=np.int64(4), stream=True)
    next(steps)
    assert [x for x in jax.live_arrays() if x.shape == (1, 24, 4, 8)]
    assert len(list(steps)) == 3
    assert widths == [24, 24, 1]


def test_C43_changes_of_the_module_count_at_once(compiles):
    config = tiny_config(MAIN)
    graphdef, state = nnx.split(tiny_module(config))
    model = Model(config, nnx.merge(graphdef, jax.tree.map(jnp.copy, state)))
    before = model.generate([1, 2], max_new_tokens=20)
    np.testing.assert_array_equal(before, model.generate([1, 2], max_new_tokens=20))
    flipped = jnp.asarray(np.asarray(model.module.head[...])[::-1])
    model.module.head[...] = flipped  # a value
    compiles.count = 0
    mutated = model.generate([1, 2], max_new_tokens=20)
    assert mutated[0, 0] == 257 - before[0, 0]
    model.module = tiny_module(config)  # the whole module
    np.testing.assert_array_equal(before, model.generate([1, 2], max_new_tokens=20))
    assert compiles.count == 0
    model.module = nnx.merge(graphdef, state)
    model.module.blocks[0].attention.window = 1  # its structure: programs are compiled again
    tokens = np.asarray([[1, 2, 3]])
    model_logits = Model(config, tiny_module(config))(tokens)
    assert (np.asarray(model(tokens)) != np.asarray(model_logits)).any()


def test_generation_reads_one_step_behind(monkeypatch):
    """Step i + 1 is on its way before step i is read, so the device never waits for the host."""
    model = tiny_model(MAIN)
    model.generate([1, 2], max_new_tokens=20)
    events: list[str] = []
    store = model.executables
    get_or_compile = store.get_or_compile

    def spy(*args, **options):
        program = get_or_compile(*args, **options)
        return lambda *arrays: events.append("run") or program(*arrays)

    monkeypatch.setattr(store, "get_or_compile", spy)
    for _ in model.generate([1, 2], max_new_tokens=20, stream=True):
        events.append("read")
    assert events == ["run", *["run", "read"] * 19, "read"]


def test_decode_state_is_donated():
    model = tiny_model(MAIN)
    for _ in model.generate([1, 2], max_new_tokens=20, stream=True):
        stored = [x for x in jax.live_arrays() if x.shape == (1, 32, 2, 16)]
        assert len(stored) == 2 * model.config.layers


@pytest.mark.gpu
def test_gpu_greedy_equals_the_full_forward_and_compiles_two_programs(compiles):
    config = tiny_config(MAIN)
    model = Model(config, tiny_module(config))
    model.generate([1], max_new_tokens=1, graphs="jit")
    compiles.count = 0
    tokens = model.generate(PROMPTS, max_new_tokens=200, graphs="jit")
    assert compiles.count <= 2
    whole = np.asarray([[*PROMPTS[0], *tokens[0]]], np.int32)
    logits = np.asarray(model(whole))[0, len(PROMPTS[0]) - 1 : -1]
    np.testing.assert_array_equal(tokens[0], logits.argmax(-1))
