"""One response's life between the API and the nodes: submit, follow, account, give up.

Owns the requests that one response is made of (one a prompt), their choices, and the duty to end
them: whoever leaves early, the nodes are told at once. It yields pieces of text by choice index
and, with the last one, the report of where tokens came from and time went. It knows no JSON, no
socket, and nothing of the API that asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry.gateway.errors import (
    ApiError,
    EngineFailure,
    Unavailable,
    from_rejection,
    shutting_down,
)
from kvferry.gateway.model import ServedModel
from kvferry.gateway.nodes import EngineLost, Event, Nodes, NoNode, Run
from kvferry.gateway.output import Choice, Piece
from kvferry.gateway.parameters import Params
from kvferry.gateway.prompts import Prompt
from kvferry.kvstore.keys import pack_tokens
from kvferry.kvstore.wire import Done, Generate, PromptSources, Rejected, Stages, Token


@dataclass(frozen=True, slots=True)
class Report:
    """What the nodes say of a whole response."""

    sources: PromptSources
    stages: Stages
    """Of the prompt that waited longest."""
    handoff_ms: float
    predicted_ms: float
    cached_tokens: int
    """Prompt tokens not recomputed thanks to earlier requests."""


@dataclass(frozen=True, slots=True)
class Update:
    """The next piece of one choice; `report` comes with the last of all."""

    choice: int
    piece: Piece
    report: Report | None = None


@dataclass(slots=True)
class Timeline:
    """When tokens reached the gateway, on the monotonic clock."""

    submitted: float = 0.0
    first: float = 0.0
    last: float = 0.0
    gaps: list[float] = field(default_factory=list)
    """Seconds between a choice's successive tokens, not yet taken by the metrics."""

    @property
    def ttft(self) -> float | None:
        return self.first - self.submitted if self.first else None


class Generation:
    """Runs prompts x n choices to their end."""

    def __init__(
        self, nodes: Nodes, model: ServedModel, prompts: Sequence[Prompt], params: Params
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.timeline = Timeline()
        self.report: Report | None = None
        self._nodes = nodes
        self._eos_ids = () if params.ignore_eos else model.eos_ids
        count = len(prompts) * params.n
        self._choices = [Choice(model.tokenizer, params.rules) for _ in range(count)]
        self._last_token = [0.0] * count
        self._unfinished = count
        self._done: dict[int, Done] = {}
        self._events: asyncio.Queue[tuple[int, Event | ApiError]] = asyncio.Queue()
        self._runs: list[Run] = []

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.size for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Tokens that count so far, of all choices."""
        return sum(choice.kept for choice in self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.finish.reason for choice in self._choices if choice.finish is not None]

    def fail(self, error: ApiError) -> None:
        """Ends the response with this error, from outside."""
        self._events.put_nowait((0, error))

    async def updates(self) -> AsyncGenerator[Update]:
        """Pieces as they come. Closing the generator aborts what has not ended.

        Raises
        ------
        ApiError
            A node refused, failed or was lost, or `fail` was called.
        """
        try:
            self._submit()
            held: Update | None = None
            while self._unfinished or len(self._done) < len(self.prompts):
                at, event = await self._events.get()
                update = self._take(at, event)
                if update is not None and self._unfinished:
                    yield update
                elif update is not None:
                    held = update  # the last one waits for the report
            self.report = _report(list(self._done.values()), self.prompt_tokens)
            assert held is not None
            yield Update(held.choice, held.piece, self.report)
        finally:
            for run in self._runs:
                run.abort()

    def _submit(self) -> None:
        self.timeline.submitted = time.monotonic()
        try:
            for at, prompt in enumerate(self.prompts):
                sink = partial(self._arrived, at)
                self._runs.append(self._nodes.submit(sink, partial(self._message, prompt)))
        except NoNode as error:
            raise no_node(error) from error

    def _arrived(self, at: int, event: Event) -> None:
        self._events.put_nowait((at, event))

    def _message(self, prompt: Prompt, request: int, prefill: str) -> Generate:
        params = self.params
        return Generate(
            request=request,
            prompt=prompt.packed,
            root=prompt.root,
            keys=prompt.keys,
            max_tokens=prompt.max_tokens,
            min_tokens=min(params.rules.min_tokens, prompt.max_tokens),
            eos_ids=self._eos_ids,
            stop_token_ids=params.stop_token_ids,
            sampling=params.sampling,
            seed=params.seed,
            choices=params.n,
            prefill_node=prefill,
            priority=params.priority,
            forced=pack_tokens(params.forced),
        )

    # -- events ------------------------------------------------------------------------------------

    def _take(self, at: int, event: Event | ApiError) -> Update | None:
        if isinstance(event, Token):
            return self._token(at, event)
        if isinstance(event, Done):
            self._done[at] = event
            first = at * self.params.n
            mine = self._choices[first : first + self.params.n]
            if any(choice.finish is None for choice in mine):
                raise EngineFailure("The decode node ended the request before its answer.")
            return None
        if isinstance(event, Rejected):
            raise from_rejection(event)
        if isinstance(event, EngineLost):
            raise EngineFailure("The decode node was lost.", code="engine_lost")
        raise event

    def _token(self, at: int, token: Token) -> Update | None:
        if not 0 <= token.choice < self.params.n:
            raise EngineFailure("The decode node sent a token for no choice of this request.")
        index = at * self.params.n + token.choice
        choice = self._choices[index]
        if choice.finish is not None:
            return None  # overrun behind a stop string
        if token.index != choice.kept:
            raise EngineFailure("The decode node's tokens have a hole.")
        self._stamp(index)
        piece = choice.push(token)
        if piece is None:
            return None
        if piece.finish is not None:
            self._unfinished -= 1
            if not token.finish:
                self._runs[at].stop(token.choice, choice.kept)
        return Update(index, piece)

    def _stamp(self, index: int) -> None:
        now = time.monotonic()
        timeline = self.timeline
        timeline.first = timeline.first or now
        timeline.last = now
        if self._last_token[index]:
            timeline.gaps.append(now - self._last_token[index])
        self._last_token[index] = now


def no_node(error: NoNode) -> ApiError:
    """What it means to a client that no decode node can take its request."""
    if error.reason == "draining":
        return shutting_down()
    if error.reason == "loading":
        return Unavailable("The model is loading.", code="model_loading", retry_after=5)
    return Unavailable(
        "No decode node is reachable; one is expected back soon.",
        code="engine_unavailable",
        retry_after=2,
    )


def _report(done: Sequence[Done], prompt_tokens: int) -> Report:
    def total(name: str) -> int:
        return sum(getattr(item.sources, name) for item in done)

    sources = PromptSources(
        device=total("device"),
        host=total("host"),
        disk=total("disk"),
        remote=total("remote"),
        prefill=total("prefill"),
        decode=total("decode"),
    )
    hits = sources.device + sources.host + sources.disk + sources.remote
    return Report(
        sources=sources,
        stages=max((item.stages for item in done), key=_waited),
        handoff_ms=max(item.handoff_ms for item in done),
        predicted_ms=max(item.predicted_ms for item in done),
        cached_tokens=max(0, min(hits, prompt_tokens - len(done))),
    )


def _waited(stages: Stages) -> float:
    return (
        stages.queue
        + stages.lookup
        + stages.load
        + stages.prefill
        + stages.transfer
        + stages.first_step
    )
