"""`/tokenize` and `/detokenize`: what they take, and what they answer.

Owns the field names of both. How a text becomes ids is for others.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from kvferry.gateway.prompt.messages import Message
from kvferry.gateway.protocols.common import Count, TokenId


class TokenizeRequest(Struct, frozen=True, kw_only=True):
    """Of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class Tokenized(Struct):
    count: Count
    max_model_len: int | None
    tokens: list[Count]
    token_strs: list[str] | None


class Detokenized(Struct):
    prompt: str
