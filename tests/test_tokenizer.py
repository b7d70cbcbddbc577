"""The tokenizer wrapper: encoding, streaming text, chat templates, folders."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast

from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.tokenizer import TextStream, Tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + message.role) }}{% endif %}\n"
    "<{{ message.role }}>{{ message.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Fast:
    """One token for each byte, in byte order; 256 is <s>, 257 is </s>."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    return fast


CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "model_max_length": 10}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer(), CONFIG, TEMPLATE)


def test_encode_and_decode(tokenizer):
    text = "héllo 🙂"
    ids = tokenizer.encode(text)
    assert ids[0] == 256 and ids[1:] == tokenizer.encode(text, add_special=False)
    assert len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=False) == "<s>" + text
    assert tokenizer.special == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.decode(np.asarray(ids, np.int32)) == text
    for rows in (np.asarray([ids], np.int32), "abc", [1.5], 3):
        with pytest.raises(InvalidArgument, match=r"Tokenizer\.decode: ids"):
            tokenizer.decode(rows)
    assert tokenizer.token_id("</s>") == 257 and tokenizer.token_id("nothing") is None


def test_stream_holds_back_incomplete_characters(tokenizer):
    text = "aé🙂b"
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode(text, add_special=False)]
    assert pieces == ["a", "", "é", "", "", "", "🙂", "b"]
    assert stream.flush() == ""
    cut = tokenizer.stream()
    assert [cut.push(i) for i in tokenizer.encode("x🙂", add_special=False)[:3]] == ["x", "", ""]
    assert cut.flush() == "\ufffd"
    assert cut.flush() == ""


def test_stream_pieces_add_up_with_special_and_invalid_tokens(tokenizer):
    byte = {b: tokenizer.encode(chr(b), add_special=False)[0] for b in b"ab"}
    lead = tokenizer.encode("é", add_special=False)[0]  # a first byte that the next one does not complete
    ids = [256, byte[97], lead, byte[98], 257, lead]
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    assert pieces == ["", "a", "", "\ufffdb", "", "", "\ufffd"]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_stream_keeps_the_spaces_that_the_first_token_loses():
    fast = Fast(models.BPE(vocab={"▁the": 0, "▁cat": 1, "s": 2}, merges=[]))
    fast.decoder = decoders.Metaspace()
    stream = Tokenizer(fast).stream()
    assert [stream.push(i) for i in (0, 1, 2, 0)] == ["the", " cat", "s", " the"]


def test_chat_goes_through_the_template(tokenizer):
    messages = [{"role": "user", "content": "hi <&>"}, {"role": "assistant", "content": "yo"}]
    text = "<s><user>hi <&></s><assistant>yo</s><assistant>"
    assert tokenizer.chat_text(messages) == text
    ids = tokenizer.chat(messages)
    assert ids.count(256) == 1 and ids.count(257) == 2 and tokenizer.decode(ids, skip_special=False) == text


def test_chat_refusals_say_what_is_wrong(tokenizer):
    with pytest.raises(InvalidArgument, match="no chat template: got chat messages, wanted a string or tokens"):
        Tokenizer(byte_tokenizer(), CONFIG).chat([{"role": "user", "content": "x"}])
    with pytest.raises(InvalidArgument, match="refused the messages: got TemplateError: role tool"):
        tokenizer.chat([{"role": "tool", "content": "x"}])
    with pytest.raises(InvalidArgument, match=r"message: got \{'role': 'user'\}"):
        tokenizer.chat([{"role": "user"}])
    sandboxed = Tokenizer(byte_tokenizer(), {}, "{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidArgument, match="SecurityError"):
        sandboxed.chat([{"role": "user", "content": "x"}])


def test_templates_may_use_what_transformers_gives_them():
    template = "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}"
    tokenizer = Tokenizer(byte_tokenizer(), {"chat_template": [{"name": "default", "template": template}]})
    assert tokenizer.chat_text([{"role": "user", "content": "é<"}] * 2) == '{"role": "user", "content": "é<"}4'


def test_folders_round_trip(tmp_path, tokenizer):
    assert Tokenizer.from_folder(tmp_path) is None
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again is not None and again.chat_template == TEMPLATE and again.special == tokenizer.special
    assert again.encode("abc") == tokenizer.encode("abc")
    (tmp_path / "chat_template.jinja").write_text("own {{ messages[0].content }}")
    own = Tokenizer.from_folder(tmp_path)
    assert own is not None and own.chat_text([{"role": "user", "content": "x"}]) == "own x"
    # A template of the folder's last tokenizer does not outlive it.
    tokenizer.save(tmp_path)
    again = Tokenizer.from_folder(tmp_path)
    assert again is not None and again.chat_template == TEMPLATE


def test_stored_truncation_and_padding_are_off(tmp_path):
    fast = byte_tokenizer()
    fast.enable_truncation(3)
    fast.enable_padding(length=20)
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer is not None and len(tokenizer.encode("abcdef")) == 7


def test_broken_files_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot read the tokenizer: got"):
        Tokenizer.from_folder(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({})[:1])
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


def test_text_that_is_no_unicode_is_refused(tokenizer):
    with pytest.raises(InvalidArgument, match=r"text: got .* at 1, wanted valid Unicode"):
        tokenizer.encode("a\udcff")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *(
            (lambda t, v=v: Tokenizer(v), "^Tokenizer: type of tokenizer: got .*, wanted Tokenizer")
            for v in (None, 3, "x")
        ),
        *(
            (lambda t, v=v: Tokenizer(byte_tokenizer(), v), "type of config: got .*, wanted Mapping")
            for v in (3, "x", ["a"])
        ),
        (lambda t: Tokenizer(byte_tokenizer(), None, 3), "type of chat_template: got int, wanted str"),
        *((lambda t, v=v: t.encode(v), "^encode: type of text: got .*, wanted str") for v in (None, 3, b"x", ["a"])),
        *((lambda t, v=v: t.encode("a", v), "add_special: got .*, wanted True or False") for v in (None, 3)),
        *((lambda t, v=v: t.decode([1], v), "skip_special: got .*, wanted True or False") for v in (None, "yes")),
        *((lambda t, v=v: t.decode(v), r"^Tokenizer\.decode: ids: got") for v in ([-1], [1 << 40], [1.0], ["a"])),
        *((lambda t, v=v: t.token_id(v), "^token_id: type of text: got") for v in (None, 3, b"x")),
        (lambda t: t.token_id("\ud800"), "token_id: text: got .* wanted valid Unicode"),
        *(
            (lambda t, v=v: t.chat(v), "^chat: type of messages: got .*, wanted Sequence")
            for v in (None, 3, {}, iter([]))
        ),
        (lambda t: TextStream(None), "type of tokenizer: got NoneType, wanted Tokenizer"),
    ],
)
def test_arguments_of_another_kind_are_refused(tokenizer, call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(tokenizer)


@pytest.mark.parametrize("token", [None, "3", 3.0, True, -1, 1 << 40, [3], np.array([3])])
def test_a_stream_goes_on_after_what_is_no_token(tokenizer, token):
    stream = tokenizer.stream()
    first, second = tokenizer.encode("ab", add_special=False)
    assert stream.push(first) == "a"
    with pytest.raises(
        InvalidArgument, match=r"^TextStream\.push: token: got .*, wanted an integer from 0 to 4294967295"
    ):
        stream.push(token)
    assert stream.push(np.int64(second)) == "b"


@pytest.mark.parametrize("path", [None, 3, b"x", [], "", "a\0b"])
def test_what_is_no_path_is_refused(tokenizer, path):
    for call, where in ((tokenizer.save, "Tokenizer.save"), (Tokenizer.from_folder, "Tokenizer.from_folder")):
        with pytest.raises(InvalidArgument, match=f"^{where}: path: got .*, wanted the path of a folder"):
            call(path)
