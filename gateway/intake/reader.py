"""From the bytes of a body to what the nodes need: parameters and prompts.

Owns the order of the checks, on whatever thread and in whatever process they run. Owns, too, by
what names clients call their sessions: a hint for routing and for `/render`, never a key to
anything, so a wrong or missing one costs time only. It knows neither paths nor nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from msgspec import Struct

from kvferry.gateway.params import Params
from kvferry.gateway.prompt.conversation import Conversation
from kvferry.gateway.prompt.prompts import CompletionPrompt, Prompt, Shape, parts_of
from kvferry.gateway.protocols.chat import Chat
from kvferry.gateway.protocols.common import Body, ReadingContext
from kvferry.gateway.protocols.completions import Completions
from kvferry.gateway.protocols.tokens import Detokenize, Tokenize
from kvferry.gateway.tokenizer.tokenizer import Tokenizer

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


class ReadPrompts(Struct, frozen=True, tag="prompts"):
    """Read a body as a request for text."""

    api: TextApi
    tenant: str
    shape: Shape
    session: str = ""
    """What the headers call the conversation; the body's name is better."""

    def read(self, body: Body, context: ReadingContext) -> PreparedRequest:
        """What a body comes to; ApiError for what cannot be served."""
        parsed = self.api.parse(body, context)
        params, tenant, shape, echoes = parsed.params, self.tenant, self.shape, []
        if isinstance(parsed.prompt, Conversation):
            prompts = [context.prompts.chat(parsed.prompt, params, tenant, shape)]
        else:
            add = parsed.add_special_tokens
            prompts = context.prompts.completions(parsed.prompt, add, params, tenant, shape)
            if params.echo:
                echoes = _echoes(parsed.prompt, params, context.model.tokenizer)
        session = session_of(tenant, parsed.session or self.session)
        return PreparedRequest(params, prompts, echoes, parsed.has_tools, session)


ReadRequest = ReadPrompts | Tokenize | Detokenize
"""What a body can be read for. Each is a value that another process understands, too."""


def _echoes(prompt: CompletionPrompt, params: Params, tokenizer: Tokenizer) -> list[str]:
    skip = params.rules.skip_special
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
