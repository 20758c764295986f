"""From the bytes of a body to what the nodes need: parameters and prompts.

Owns the order of the checks, on whatever thread and in whatever process they run. Owns, too, by
what names clients call their sessions: a hint for routing and for `/render`, never a key to
anything, so a wrong or missing one costs time only. It knows neither paths nor nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

import orjson
from msgspec import Struct

from kvferry.gateway.errors import BadRequest
from kvferry.gateway.params import Params
from kvferry.gateway.prompt.conversation import Conversation, read_conversation
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.prompt.prompts import CompletionPrompt, Prompt, PromptMaker, Shape, parts_of
from kvferry.gateway.protocols.chat import Chat
from kvferry.gateway.protocols.common import Body, decode
from kvferry.gateway.protocols.completions import Completions
from kvferry.gateway.protocols.tokens import DetokenizeRequest, TokenizeRequest

MAX_IDS = 1 << 20
"""Most ids that /tokenize answers and /detokenize takes."""
SESSION_HEADERS = (
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "thread-id",
    "x-claude-code-session-id",
    "x-correlation-id",
)
"""As sent by aiperf, proxies, Codex and Claude Code; the first one that is there counts."""
MAX_SESSION_NAME = 1024
"""Characters of a name that count."""

TextApi = Chat | Completions
"""The APIs that generate text; which of them a body is for goes to the other process, too."""


class ReadPrompts(Struct, frozen=True, tag="prompts"):
    """Read a body as a request for text. It makes a `PreparedRequest`."""

    api: TextApi
    tenant: str
    shape: Shape
    session: str = ""
    """What the headers call the conversation; the body's name is better."""


class Tokenize(Struct, frozen=True, tag="tokenize"):
    """Answer a body of `/tokenize`. It makes the answer's JSON."""

    tenant: str
    max_model_len: int | None


class Detokenize(Struct, frozen=True, tag="detokenize"):
    """Answer a body of `/detokenize`. It makes the answer's JSON."""


ReadRequest = ReadPrompts | Tokenize | Detokenize


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request that has passed every check that needs no node."""

    params: Params
    prompts: list[Prompt]
    echoes: list[str]
    """Texts of the prompts, if the answer shall begin with them."""
    has_tools: bool
    session: bytes
    """Which conversation it belongs to, if it has a name."""


class Reader:
    """Reads bodies for one model. Safe to use from several threads."""

    def __init__(self, model: ServedModel, prompts: PromptMaker, *, test_hooks: bool) -> None:
        self._model = model
        self._prompts = prompts
        self._test_hooks = test_hooks

    def read(self, request: ReadRequest, body: Body) -> PreparedRequest | bytes:
        """What a body comes to; ApiError for what cannot be served."""
        match request:
            case ReadPrompts():
                return self._prepare(request, body)
            case Tokenize():
                return self._tokenize(request, body)
            case Detokenize():
                return self._detokenize(body)

    def _prepare(self, request: ReadPrompts, body: Body) -> PreparedRequest:
        parsed = request.api.parse(body, self._model, test_hooks=self._test_hooks)
        params, tenant, shape, echoes = parsed.params, request.tenant, request.shape, []
        if isinstance(parsed.prompt, Conversation):
            prompts = [self._prompts.chat(parsed.prompt, params, tenant, shape)]
        else:
            add = parsed.add_special_tokens
            prompts = self._prompts.completions(parsed.prompt, add, params, tenant, shape)
            if params.echo:
                echoes = self._echoes(parsed.prompt, params)
        session = session_of(tenant, parsed.session or request.session)
        return PreparedRequest(params, prompts, echoes, parsed.has_tools, session)

    def _tokenize(self, request: Tokenize, body: Body) -> bytes:
        asked = decode(body, TokenizeRequest)
        self._model.check_name(asked.model)
        if asked.messages is not None:
            conversation = read_conversation(
                asked.messages,
                add_generation_prompt=asked.add_generation_prompt,
                continue_final_message=asked.continue_final_message,
                variables=dict(asked.chat_template_kwargs or {}),
            )
            ids = self._prompts.chat_ids(conversation, request.tenant)
        elif asked.prompt is not None:
            add = asked.add_special_tokens is not False
            ids = self._model.tokenizer.encode(asked.prompt, add_special_tokens=add)
        else:
            raise BadRequest("Give a prompt or messages.", param="prompt")
        if len(ids) > MAX_IDS:
            text = f"These are {len(ids)} tokens; /tokenize answers at most {MAX_IDS}."
            raise BadRequest(text, param="prompt" if asked.messages is None else "messages")
        names = None
        if asked.return_token_strs:
            names = [self._model.tokenizer.name_of(token) for token in ids]
        return orjson.dumps(
            {
                "count": len(ids),
                "max_model_len": request.max_model_len,
                "tokens": ids,
                "token_strs": names,
            }
        )

    def _detokenize(self, body: Body) -> bytes:
        asked = decode(body, DetokenizeRequest)
        self._model.check_name(asked.model)
        size, tokens = self._model.vocabulary.size, asked.tokens
        if len(tokens) > MAX_IDS:
            raise BadRequest(f"tokens takes at most {MAX_IDS} ids.", param="tokens")
        if not all(0 <= token < size for token in tokens):
            raise BadRequest(f"tokens must be ids from 0 to {size - 1}.", param="tokens")
        return orjson.dumps({"prompt": self._model.tokenizer.decode(tokens, skip_special=False)})

    def _echoes(self, prompt: CompletionPrompt, params: Params) -> list[str]:
        skip, tokenizer = params.rules.skip_special, self._model.tokenizer
        return [
            part if isinstance(part, str) else tokenizer.decode(list(part), skip_special=skip)
            for part in parts_of(prompt)
        ]


# -- sessions --------------------------------------------------------------------------------------


def session_name(headers: Mapping[str, str]) -> str:
    """What the headers call the session; "" if they do not."""
    return next((headers[name] for name in SESSION_HEADERS if headers.get(name)), "")


def session_of(tenant: str, name: str) -> bytes:
    """16 bytes for the session that a tenant calls so, none without a name.

    They are hashed with the tenant, so that two tenants with one name are two sessions.
    """
    if not name:
        return b""
    text = f"{tenant}\0{name[:MAX_SESSION_NAME]}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
