"""The tokenizer of a Hugging Face folder: ``tokenizer.json`` with its special tokens and chat template."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

from moe_jax.errors import CheckpointError, InvalidArgument
from moe_jax.pallas_kernels.checks import check_integer, check_kind, check_path, check_switch

# What `Tokenizer.from_folder` reads.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_MAX_ID = (1 << 32) - 1  # of the tokenizers package
_REPLACEMENT = "\ufffd"  # what a decoder puts where bytes are no (or not yet a) character


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        chat_template: Jinja source, or None.
        special: special tokens by role, e.g. ``{"bos_token": "<s>", "eos_token": "</s>"}``.
    """

    def __init__(self, tokenizer: Any, config: Mapping[str, Any] | None = None, chat_template: str | None = None):
        """Wrap a `tokenizers.Tokenizer`.

        Args:
            tokenizer: the `tokenizers.Tokenizer`.
            config: contents of ``tokenizer_config.json``.
            chat_template: overrides the one in ``config``.

        Raises:
            InvalidArgument: an argument of another kind.
        """
        from tokenizers import Tokenizer as Fast

        where = "Tokenizer"
        check_kind(where, "tokenizer", tokenizer, Fast)
        if config is not None:
            check_kind(where, "config", config, Mapping)
        if chat_template is not None:
            check_kind(where, "chat_template", chat_template, str)
        self._tokenizer = tokenizer
        self._config = dict(config or {})
        self.special = {
            name: token if isinstance(token, str) else token["content"]
            for name, token in self._config.items()
            if name.endswith("_token") and (isinstance(token, str) or (isinstance(token, dict) and "content" in token))
        }
        self.chat_template = chat_template or _template_of(self._config.get("chat_template"))

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a checkpoint folder, or None when it has no ``tokenizer.json``.

        Raises:
            CheckpointError: a file that cannot be read as what it is.
            InvalidArgument: ``folder`` is no path.
        """
        from tokenizers import Tokenizer as Fast

        folder = check_path("Tokenizer.from_folder", folder)
        file = folder / "tokenizer.json"
        if not file.is_file():
            return None
        try:
            fast = Fast.from_file(str(file))
        except Exception as error:  # the tokenizers package raises bare Exception
            raise CheckpointError(
                "cannot read the tokenizer", where=str(file), got=str(error), wanted="a tokenizers file"
            ) from error
        # Files written for training carry padding and truncation; both would change prompts.
        fast.no_padding()
        fast.no_truncation()
        config_file, template_file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = {}
        if config_file.is_file():
            try:
                config = json.loads(config_file.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    "cannot read the tokenizer's config", where=str(config_file), got=str(error), wanted="JSON"
                ) from error
        template = None
        if template_file.is_file():
            try:
                template = template_file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(
                    "cannot read the chat template", where=str(template_file), got=str(error), wanted="UTF-8 text"
                ) from error
        return cls(fast, config, template)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` in the place of any tokenizer that was there.

        Raises:
            InvalidArgument: ``folder`` is no path.
        """
        folder = check_path("Tokenizer.save", folder)
        _remove(folder)
        self._tokenizer.save(str(folder / "tokenizer.json"))
        config = dict(self._config)
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        text = json.dumps(config, ensure_ascii=False, indent=2)
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; ``add_special`` lets the tokenizer add its own (such as bos).

        Raises:
            InvalidArgument: what is no text, or no Unicode, such as a command-line argument of other bytes.
        """
        text, add = check_text("encode", text), check_switch("encode", "add_special", add_special)
        return self._tokenizer.encode(text, add_special_tokens=add).ids

    def decode(self, ids: Iterable[SupportsIndex], skip_special: bool = True) -> str:
        """Text of token ids; bytes that are no character become U+FFFD.

        Raises:
            InvalidArgument: no row of ids.
        """
        try:
            return self._tokenizer.decode([operator.index(i) for i in ids], skip_special_tokens=skip_special)
        except (TypeError, OverflowError) as error:
            check_switch("Tokenizer.decode", "skip_special", skip_special)
            shape = getattr(ids, "shape", None)
            got = repr(ids)[:60] if shape is None else f"an array of shape {shape}"
            wanted = "ids of one row, such as tokens[0] of what `generate` gives"
            raise InvalidArgument("ids", where="Tokenizer.decode", got=got, wanted=wanted) from error

    def token_id(self, token: str) -> int | None:
        """Id of one token, or None.

        Raises:
            InvalidArgument: what is no text.
        """
        return self._tokenizer.token_to_id(check_text("token_id", token))

    def stream(self) -> TextStream:
        """A decoder that takes ids one by one."""
        return TextStream(self)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation through the chat template, ready for the assistant's turn.

        Args:
            messages: ``{"role": …, "content": …}`` each.

        Raises:
            InvalidArgument: no template, messages of another form, or the template refuses them.
        """
        return self.encode(self.chat_text(messages), add_special=False)

    def chat_text(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that `chat` encodes."""
        where = "chat"
        check_kind(where, "messages", messages, Sequence)
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
                raise InvalidArgument("message", where=where, got=repr(message), wanted='{"role": …, "content": …}')
        if self.chat_template is None:
            raise InvalidArgument(
                "the tokenizer has no chat template",
                where=where,
                got="chat messages",
                wanted="a string or tokens, or chat_template.jinja beside tokenizer.json",
            )
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        # As transformers renders templates; they come with the checkpoint, so they run in a sandbox.
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _refuse, "strftime_now": _now}
        try:
            return environment.from_string(self.chat_template, globals=functions).render(
                messages=messages, add_generation_prompt=True, **self.special
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InvalidArgument(
                "the chat template refused the messages",
                where=where,
                got=f"{type(error).__name__}: {error}",
                wanted="messages that the template takes",
            ) from error


class TextStream:
    """Text of a growing list of ids, in pieces that add up to the whole.

    A piece is held back while it ends in bytes that are not yet a character. Ids are decoded together with a few
    before them, because some tokenizers decode the first id of a list differently.
    """

    def __init__(self, tokenizer: Tokenizer):
        check_kind("TextStream", "tokenizer", tokenizer, Tokenizer)
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # where the ids decoded along begin
        self._shown = 0  # ids before this have had their text given out

    def push(self, token: int) -> str:
        """Text that this id completes, often empty.

        Raises:
            InvalidArgument: no id; the stream goes on as if it had not come.
        """
        self._ids.append(check_integer("TextStream.push", "token", token, 0, _MAX_ID))
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def flush(self) -> str:
        """What is still held back, with U+FFFD for incomplete characters."""
        text = self._new_text()
        self._context = self._shown = len(self._ids)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(before) :]


def check_text(where: str, text: Any) -> str:
    """Require text that has a form in UTF-8.

    Raises:
        InvalidArgument: it has none, or is something else.
    """
    check_kind(where, "text", text, str)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"{text[error.start]!r} at {error.start}"
        raise InvalidArgument("text", where=where, got=got, wanted="valid Unicode") from error
    return text


def _remove(folder: Path) -> None:
    """Delete a folder's tokenizer, if it has one."""
    for name in TOKENIZER_FILES:
        (folder / name).unlink(missing_ok=True)


def _template_of(entry: Any) -> str | None:
    """The config holds one template, or a list of named ones."""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        return named.get("default")
    return entry if isinstance(entry, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own filter escapes HTML characters.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)
