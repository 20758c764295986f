"""Messages between a gateway and a decode node about requests: what to run, what came of it.

A `Generate` is answered by tokens in `StepOutput`, one message a step for all requests of one
gateway, and ends with one `Done` or `Rejected`. This module does not know how KV blocks travel.

    gateway → D       Generate  Stop  Abort  Inquire
    D → gateway       Started  StepOutput  Done  Rejected  Running
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kvferry.kvstore.keys import KEY_BYTES
from kvferry.kvstore.wire.message import (
    MAX_CHOICES,
    Alternatives,
    Choice,
    Count,
    Finish,
    Integer,
    Key,
    LogProb,
    Message,
    Milliseconds,
    Name,
    Raw,
    Real,
    Seconds,
    Text,
    TokenId,
    TokenIds,
)


class Sampling(Struct, frozen=True, array_like=True):
    """How one request's tokens are drawn; the defaults change nothing."""

    temperature: Real = 1.0
    top_p: Real = 1.0
    top_k: Integer = 0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0
    frequency_penalty: Real = 0.0
    presence_penalty: Real = 0.0
    logit_bias: Annotated[tuple[tuple[TokenId, Real], ...], Meta(max_length=1 << 20)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """None: none wanted; else how many alternatives beside the drawn token."""


class Generate(Message, frozen=True, array_like=True, tag=10):
    """Run a prompt to its end on this decode node."""

    request: Count
    """Chosen by the gateway, unique on its connection."""
    prompt: Raw
    """Token ids, int32."""
    root: Key
    """Root key of the tenant: generated blocks are chained from it too."""
    keys: Raw
    """Keys of the prompt's whole blocks, concatenated."""
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 53)]
    min_tokens: Count
    eos_ids: TokenIds
    """Ids that end a choice; empty under ignore_eos."""
    stop_token_ids: TokenIds
    sampling: Sampling
    seed: Integer
    choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
    outputs: Annotated[tuple[Raw, ...], Meta(max_length=MAX_CHOICES)] = ()
    """Token ids already streamed, per choice: the request resumes behind them."""
    finished: Annotated[tuple[Choice, ...], Meta(max_length=MAX_CHOICES)] = ()
    """Choices that had ended already when the request resumed."""
    prefill_nodes: Annotated[tuple[Text, ...], Meta(max_length=1024)] = ()
    """Addresses of prefill nodes, the best one first; the next is asked when one fails."""
    priority: Integer = 0
    deadline_s: Seconds = 0.0
    """Seconds from arrival until the whole request is given up; 0: never."""
    tenant: Key = bytes(KEY_BYTES)
    """Whose blocks they are, for a store: `keys.tenant_key`."""
    forced: Raw = b""
    """Ids to emit in place of drawn ones (test hook); int32."""


class Stop(Message, frozen=True, array_like=True, tag=11):
    """The gateway ended one choice (a stop string): `kept` tokens count, the rest is overrun."""

    request: Count
    choice: Choice
    kept: Count


class Abort(Message, frozen=True, array_like=True, tag=12):
    """The client is gone: free everything of this request."""

    request: Count


class Inquire(Message, frozen=True, array_like=True, tag=13):
    """Nothing has come for this request for a while: `Running`, or `Rejected` if it is unknown."""

    request: Count


class Running(Message, frozen=True, array_like=True, tag=14):
    """The request is alive, and so many tokens of each choice have been sent."""

    request: Count
    sent: Annotated[tuple[Count, ...], Meta(max_length=MAX_CHOICES)]


class Token(Struct, frozen=True, array_like=True):
    """One generated token of one choice."""

    request: Count
    choice: Choice
    index: Count
    """How many tokens of this choice came before."""
    token: TokenId
    finish: Finish = ""
    """Empty, or why this was the last token: `stop`, `length`, `stop:<token id>`."""
    logprob: LogProb = 0.0
    top: Alternatives = ()


class StepOutput(Message, frozen=True, array_like=True, tag=20):
    """All tokens that one step made for one gateway."""

    tokens: Annotated[tuple[Token, ...], Meta(max_length=1 << 16)]


class PromptSources(Struct, frozen=True, array_like=True):
    """Where a prompt's tokens came from; the sum is the prompt's length."""

    device: Count = 0
    host: Count = 0
    disk: Count = 0
    remote: Count = 0
    prefill: Count = 0
    """Computed on the prefill node."""
    decode: Count = 0
    """Computed on the decode node."""

    @property
    def hits(self) -> int:
        """Tokens that were there already: nobody had to compute them."""
        return self.device + self.host + self.disk + self.remote


SOURCES = PromptSources.__struct_fields__


class Started(Message, frozen=True, array_like=True, tag=17):
    """A request that nobody has begun before gets its first token: its prompt came from here.

    It comes before that token, so that hits are known even if the node dies before `Done`.
    """

    request: Count
    sources: PromptSources


class Stages(Struct, frozen=True, array_like=True):
    """Time to first token by stage: disjoint intervals on the decode node's clock, milliseconds."""

    queue: Milliseconds = 0.0
    lookup: Milliseconds = 0.0
    load: Milliseconds = 0.0
    prefill: Milliseconds = 0.0
    transfer: Milliseconds = 0.0
    first_step: Milliseconds = 0.0


STAGES = Stages.__struct_fields__


class Done(Message, frozen=True, array_like=True, tag=21):
    """All choices of a request have ended; nothing more comes for it."""

    request: Count
    sources: PromptSources
    stages: Stages
    handoff_ms: Milliseconds
    """From the end of the prefill node's last chunk to the start of the first step, or 0."""
    predicted_n: Count
    predicted_ms: Milliseconds
    """From the first token to the last, all choices."""
    bytes_shipped: Count
    preemptions: Count


class Rejected(Message, frozen=True, array_like=True, tag=22):
    """The request ended without running to its end; nothing is held for it any more.

    `code` is one of `server_overloaded`, `context_length_exceeded`, `shutting_down`,
    `deadline_exceeded`, `invalid_request`, `engine_error`, `unknown_request`.
    """

    request: Count
    code: Name
    message: Text


GenerationMessage = (
    Generate | Stop | Abort | Inquire | Started | StepOutput | Done | Rejected | Running
)
