"""From an API's messages to the dicts that chat templates read, and to the rendered prompt.

Owns the one form in which every spelling of a conversation reaches a template: absent, null and
empty content are "", parts are joined, tool arguments are objects, `developer` is `system`. A
message keeps its place, because moving one would change the head of the prompt and lose its cache;
only when the template refuses a system message where it stands does it become a user's. It knows no
tokenizer beyond the texts of its control tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.prompt.chat_template import ChatMessage, ChatTemplate, TemplateRefused
from kvferry.gateway.prompt.messages import PART_KINDS, FunctionCall, Message, Part, ToolCall
from kvferry.gateway.tokenizer.control_text import ControlText, unused_marker

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """A validated conversation and how its prompt shall end."""

    messages: tuple[ChatMessage, ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatText:
    """A prompt's text; `marker`, if any, breaks the control texts in it that users wrote."""

    text: str
    marker: str | None


# -- reading ---------------------------------------------------------------------------------------


def read_conversation(
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    variables: dict[str, Any],
) -> Conversation:
    """A whole conversation in the one form.

    Raises
    ------
    BadRequest
        A message has no meaning, or the flags contradict each other or the messages.
    """
    if not messages:
        raise BadRequest("messages must not be empty.", param="messages")
    read = tuple(_read(message, f"messages[{at}]") for at, message in enumerate(messages))
    if continue_final_message:
        if add_generation_prompt:
            raise BadRequest(
                "add_generation_prompt and continue_final_message exclude each other.",
                param="continue_final_message",
            )
        if read[-1]["role"] != "assistant":
            raise BadRequest(
                "continue_final_message needs an assistant message at the end.",
                param="continue_final_message",
            )
        return Conversation(read, False, True, variables)
    return Conversation(read, add_generation_prompt is not False, False, variables)


def _read(message: Message, place: str) -> ChatMessage:
    role = _ROLES.get(message.role)
    if role is None:
        raise BadRequest(f"{place}.role must be one of {', '.join(_ROLES)}.", param=f"{place}.role")
    read: ChatMessage = {"role": role, "content": _content(message, place)}
    if message.name is not None:
        read["name"] = message.name
    if message.tool_call_id is not None:
        read["tool_call_id"] = message.tool_call_id
    if message.tool_calls or message.function_call is not None:
        read["tool_calls"] = _tool_calls(message)
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        read |= {"reasoning_content": reasoning, "thinking": reasoning}
    return read


def _content(message: Message, place: str) -> str:
    content = message.content
    if content is None:
        return message.refusal or ""
    if isinstance(content, str):
        return content
    return "\n".join(
        part if isinstance(part, str) else _part(part, f"{place}.content[{at}]")
        for at, part in enumerate(content)
    )


def _part(part: Part, place: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in PART_KINDS:
        raise BadRequest(
            f"{place}.type {part.type[:50]!r} is not supported: this model reads text.",
            param=f"{place}.type",
        )
    if text is None:
        raise BadRequest(f"{place} has no text.", param=f"{place}.text")
    return text


def _tool_calls(message: Message) -> list[dict[str, Any]]:
    calls = list(message.tool_calls or ())
    if message.function_call is not None:
        calls.append(ToolCall(function=message.function_call))
    read = []
    for call in calls:
        function = call.function or FunctionCall()
        entry: dict[str, Any] = {"type": call.type or "function"}
        if call.id is not None:
            entry["id"] = call.id
        entry["function"] = {"name": function.name, "arguments": _arguments(function)}
        read.append(entry)
    return read


def _arguments(function: FunctionCall) -> Any:
    # Clients send the same arguments in other spellings each turn; as an object they render alike.
    if not isinstance(function.arguments, str):
        return function.arguments or {}
    try:
        parsed = msgspec.json.decode(function.arguments)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return function.arguments
    return parsed if isinstance(parsed, dict) else function.arguments


# -- rendering -------------------------------------------------------------------------------------


def render(conversation: Conversation, template: ChatTemplate, control: ControlText) -> ChatText:
    """The prompt's text.

    Raises
    ------
    BadRequest
        The template refuses these messages in every form that keeps their order.
    """
    chat, marker = list(conversation.messages), None
    variables = conversation.variables
    if control.occurs_in([chat, variables]):
        marker = unused_marker([chat, variables])
        if marker is None:
            raise BadRequest("messages use too many Unicode noncharacters.", param="messages")
        chat, variables = control.mark([chat, variables], marker)
    refused: TemplateRefused | None = None
    for users_from in (None, 1, 0):
        try:
            text = template.render(
                chat if users_from is None else _users_from(chat, users_from),
                add_generation_prompt=conversation.add_generation_prompt,
                continue_final_message=conversation.continue_final_message,
                variables=variables,
            )
        except TemplateRefused as error:
            refused = refused or error
        else:
            return ChatText(text, marker)
    raise BadRequest(
        f"The model's chat template refuses these messages: {str(refused)[:300]}", param="messages"
    )


def _users_from(chat: Sequence[ChatMessage], start: int) -> list[ChatMessage]:
    """System messages from `start` on as the user's, joined with a neighbouring user message."""
    merged: list[ChatMessage] = []
    for at, message in enumerate(chat):
        changed = at >= start and message["role"] == "system"
        current = message | {"role": "user"} if changed else message
        before = merged[-1] if merged else None
        if before is not None and before["role"] == current["role"] == "user":
            joined = f"{before['content']}\n\n{current['content']}"
            merged[-1] = before | {"content": joined}
        else:
            merged.append(current)
    return merged
