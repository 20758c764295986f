"""`/tokenize` and `/detokenize`: what they take, how it is read, and what they answer.

Owns the field names of both. How a text becomes ids is for others.
"""

from __future__ import annotations

from typing import Any

import orjson
from msgspec import Struct

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.prompt.conversation import read_conversation
from kvferry.gateway.prompt.messages import Message
from kvferry.gateway.protocols.common import Body, Count, ReadingContext, TokenId, decode

MAX_IDS = 1 << 20
"""Most ids that /tokenize answers and /detokenize takes."""


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


class Tokenize(Struct, frozen=True, tag="tokenize"):
    """Answer a body of `/tokenize`."""

    tenant: str
    max_model_len: int | None

    def read(self, body: Body, context: ReadingContext) -> bytes:
        """The answer's JSON; ApiError for what cannot be served."""
        asked, tokenizer = decode(body, TokenizeRequest), context.model.tokenizer
        context.model.check_name(asked.model)
        if asked.messages is not None:
            conversation = read_conversation(
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                variables=dict(asked.chat_template_kwargs or {}),
            )
            ids = context.prompts.chat_ids(conversation, self.tenant)
        elif asked.prompt is not None:
            add = asked.add_special_tokens is not False
            ids = tokenizer.encode(asked.prompt, add_special_tokens=add)
        else:
            raise BadRequest("Give a prompt or messages.", param="prompt")
        if len(ids) > MAX_IDS:
            text = f"These are {len(ids)} tokens; /tokenize answers at most {MAX_IDS}."
            raise BadRequest(text, param="prompt" if asked.messages is None else "messages")
        answer = {
            "count": len(ids),
            "max_model_len": self.max_model_len,
            "tokens": ids,
            "token_strs": list(map(tokenizer.name_of, ids)) if asked.return_token_strs else None,
        }
        return orjson.dumps(answer)


class Detokenize(Struct, frozen=True, tag="detokenize"):
    """Answer a body of `/detokenize`."""

    def read(self, body: Body, context: ReadingContext) -> bytes:
        """The answer's JSON; ApiError for what cannot be served."""
        asked, model = decode(body, DetokenizeRequest), context.model
        model.check_name(asked.model)
        size, tokens = model.vocabulary.size, asked.tokens
        if len(tokens) > MAX_IDS:
            raise BadRequest(f"tokens takes at most {MAX_IDS} ids.", param="tokens")
        if not all(0 <= token < size for token in tokens):
            raise BadRequest(f"tokens must be ids from 0 to {size - 1}.", param="tokens")
        return orjson.dumps({"prompt": model.tokenizer.decode(tokens, skip_special=False)})
