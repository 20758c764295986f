"""The messages of a conversation, as clients send them.

Owns their types only. What they mean together is for `conversation`; that a body has this shape is
checked by whoever decodes it.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_KINDS = ("text", "input_text", "output_text", "refusal")

# What the OpenAPI document says of them; they are checked elsewhere, with better words.
Role = Annotated[str, Meta(extra_json_schema={"enum": list(ROLES)})]
PartKind = Annotated[str, Meta(extra_json_schema={"enum": list(PART_KINDS)})]


class Part(Struct, frozen=True):
    type: PartKind
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct, frozen=True):
    name: str = ""
    arguments: str | dict[str, Any] | None = None


class ToolCall(Struct, frozen=True):
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class Message(Struct, frozen=True):
    role: Role
    content: str | list[str | Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
