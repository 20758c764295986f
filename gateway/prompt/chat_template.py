"""A model's chat template: messages in, the prompt's text out, byte for byte as `transformers`.

Owns the sandboxed Jinja environment, which has the options, filters, globals and extensions that
templates are written against. It takes messages as plain dicts and knows neither the API they came
in nor a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.kvstore.errors import ConfigError, KvferryError

ChatMessage = dict[str, Any]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateRefused(KvferryError):
    """The template raised, or cannot render these messages."""


class ChatTemplate:
    """A compiled template and the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. With `continue_final_message` it ends inside the last message.

        Raises
        ------
        TemplateRefused
            The template raised an exception.
        """
        chat = list(messages)
        if continue_final_message:
            chat[-1] = chat[-1] | {"content": chat[-1]["content"] + _CONTINUE_TAG}
        context = self._special_tokens | dict(variables or {})
        context |= {
            "messages": chat,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(context)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise TemplateRefused(str(error)) from error
        except (AttributeError, RecursionError, MemoryError) as error:
            raise TemplateRefused(f"{type(error).__name__} in the chat template") from error
        return _cut_at_tag(text) if continue_final_message else text


def _cut_at_tag(text: str) -> str:
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise TemplateRefused("the chat template does not render the final message as it is")
    spaced = text[at:].startswith(_CONTINUE_TAG)
    return text[:at] if spaced else text[:at].rstrip()


# -- loading ---------------------------------------------------------------------------------------


def load_template(folder: Path, override: Path | None) -> ChatTemplate | None:
    """The template of a model folder, or the one in the file `override`; None if there is none."""
    config = _json_object(folder / "tokenizer_config.json")
    source = _read(override) if override is not None else _source(folder, config)
    if source is None:
        return None
    return ChatTemplate(source, _special_tokens(folder, config))


def _source(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return _read(folder / "chat_template.jinja")
    found = config.get("chat_template")
    if found is None:
        found = _json_object(folder / "chat_template.json").get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _special_tokens(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, by the names that templates use."""
    found = _json_object(folder / "special_tokens_map.json") | dict(config)
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        found |= extra
    tokens = {}
    for name, value in found.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


# -- the environment that templates are written against --------------------------------------------


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model wrote; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_unchanged")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _unchanged(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """`dict` without the attributes that lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace`, refusing names that reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=…)` works
        self, rest = cast(_Namespace, args[0]), args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
