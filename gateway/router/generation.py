"""One response's life between the API and the nodes: submit, follow, go on elsewhere, give up.

Owns the requests that one response is made of (one a prompt), the time they may take, and the duty
to end them: whoever leaves early, the nodes are told at once. A request that loses its node goes on
at another one, and the client notices nothing but time; with none left it ends in one error. It
yields pieces of text by choice index and, with the last one, the report of where tokens came from
and time went. It knows no JSON, no socket, and nothing of the API that asked.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from kvferry.gateway.errors import (
    ApiError,
    EngineFailure,
    deadline_exceeded,
    from_rejection,
    no_node,
)
from kvferry.gateway.output.choice import Choice, Piece, Reply
from kvferry.gateway.params import Params
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.prompt.prompts import Prompt
from kvferry.gateway.router.attempts import Arrival, Attempts
from kvferry.gateway.router.nodes import Nodes, NoNode
from kvferry.gateway.router.report import Report, Timeline, make_report
from kvferry.gateway.router.requests import Event, Loss, NodeLost
from kvferry.kvstore.wire.generation import Rejected, Token

NO_ROOM = ("server_overloaded", "shutting_down")
"""Refusals of one node that another one need not share."""
ROOM_RETRY_SECONDS = 0.25
FOREVER_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a response may take, in seconds; 0: for ever."""

    first_token: float = 0.0
    request: float = 0.0
    resume: float = 1.5
    """How long one that has lost its decode node waits for another."""


@dataclass(frozen=True, slots=True)
class Update:
    """The next piece of one choice; `report` comes with the last of all."""

    choice: int
    piece: Piece
    report: Report | None = None


class _Wait(Enum):
    """What comes to a request that waits for a decode node."""

    RETRY = "retry"
    """One may be there now."""
    OVER = "over"
    """None was there in time."""


_Arrived = tuple[Attempts, int, Event | _Wait]
"""An event, and for which attempt of which prompt it is."""


class Generation:
    """Runs prompts x n choices to their end."""

    def __init__(
        self,
        nodes: Nodes,
        model: ServedModel,
        prompts: Sequence[Prompt],
        params: Params,
        timeouts: Timeouts,
        session: bytes = b"",
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.prompt_tokens = sum(prompt.size for prompt in prompts)
        self.choices = [
            Choice(model.tokenizer, params.rules) for _ in range(len(prompts) * params.n)
        ]
        self.timeline = Timeline()
        self.report: Report | None = None
        self.losses: Counter[str] = Counter()
        """How often a request went on elsewhere, by reason."""
        self._nodes = nodes
        self._timeouts = timeouts
        self._session = session
        eos_ids = () if params.ignore_eos else model.eos_ids
        self.attempts = [
            Attempts(
                prompt,
                self.choices[at * params.n : (at + 1) * params.n],
                at * params.n,
                params,
                eos_ids,
                model.vocabulary.size,
            )
            for at, prompt in enumerate(prompts)
        ]
        """One of each prompt."""
        self._events: asyncio.Queue[_Arrived | ApiError] = asyncio.Queue()
        """What has come; or the error that ends the response."""
        self._timers: list[asyncio.TimerHandle] = []
        self._streamed = False
        """The client has a part of its answer."""

    @property
    def completion_tokens(self) -> int:
        """Tokens that count so far, of all choices."""
        return sum(choice.kept for choice in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.finish.reason for choice in self.choices if choice.finish is not None]

    def reply(self, choice: int) -> tuple[Prompt, Reply]:
        """What one choice has shown so far, and to which prompt."""
        return self.prompts[choice // self.params.n], self.choices[choice].reply

    def fail(self, error: ApiError) -> None:
        """Ends the response with this error, from outside."""
        self._events.put_nowait(error)

    async def updates(self) -> AsyncGenerator[Update]:
        """Pieces as they come. Closing the generator aborts what has not ended.

        Raises
        ------
        ApiError
            A node refused or failed, none is left, time is up, or `fail` was called.
        """
        try:
            self._begin()
            held: Update | None = None
            while not all(attempts.over for attempts in self.attempts):
                arrived = await self._events.get()
                if isinstance(arrived, ApiError):
                    raise arrived
                attempts, number, event = arrived
                if number != attempts.number:
                    continue  # from a node that was given up
                update = self._take(attempts, event)
                if update is None:
                    continue
                if any(choice.finish is None for choice in self.choices):
                    self._streamed = self.params.stream
                    yield update
                else:
                    held = update  # the last one waits for the report
            done = [attempts.done for attempts in self.attempts if attempts.done is not None]
            vouched = all(attempts.vouched for attempts in self.attempts)
            self.report = make_report(done, self.prompt_tokens, vouched=vouched)
            assert held is not None
            yield Update(held.choice, held.piece, self.report)
        finally:
            for timer in self._timers:
                timer.cancel()
            for attempts in self.attempts:
                if not attempts.over:
                    _abort(attempts)

    # -- sending -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.timeline.submitted = time.monotonic()
        if self._timeouts.request:
            text = f"The answer was not complete in {self._timeouts.request:g} s."
            self._later(self._timeouts.request, self.fail, deadline_exceeded(text))
        if self._timeouts.first_token:
            self._later(self._timeouts.first_token, self._expect_first_token)
        for attempts in self.attempts:
            self._send(attempts)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call, *args))

    def _expect_first_token(self) -> None:
        if not self.timeline.first:
            seconds = self._timeouts.first_token
            self.fail(deadline_exceeded(f"No token came in {seconds:g} s."))

    def _send(self, attempts: Attempts) -> None:
        """Begins an attempt at the best decode node; without any, waits if there was one before."""
        now, deadline = time.monotonic(), 0.0
        if self._timeouts.request:
            left = self.timeline.submitted + self._timeouts.request - now
            deadline = min(max(0.001, left), FOREVER_SECONDS)
        number = attempts.begin(now)
        try:
            placement = self._nodes.submit(
                partial(self._post, attempts, number),
                attempts.prompt,
                partial(attempts.message, deadline),
                attempts.refused_by | attempts.broken_by,
                attempts.doubted,
                self._session,
            )
            attempts.sent(placement)
        except NoNode as error:
            if error.reason == "died":
                self._note_loss(attempts, Loss.DEAD)
            if attempts.lost_at is None:
                raise no_node(error.reason) from error
            self._wait(attempts, attempts.lost_at)

    def _wait(self, attempts: Attempts, lost_at: float) -> None:
        """For a decode node to be there again, or for one of those that are to have room."""
        post = partial(self._post, attempts, attempts.number)
        if attempts.refused_by or attempts.broken_by:
            self._later(ROOM_RETRY_SECONDS, post, _Wait.RETRY)
        else:
            self._nodes.park(partial(post, _Wait.RETRY))
        left = lost_at + self._timeouts.resume - time.monotonic()
        self._later(max(0.0, left), post, _Wait.OVER)

    def _post(self, attempts: Attempts, number: int, event: Event | _Wait) -> None:
        self._events.put_nowait((attempts, number, event))

    # -- events ------------------------------------------------------------------------------------

    def _take(self, attempts: Attempts, event: Event | _Wait) -> Update | None:
        if isinstance(event, NodeLost):
            self._lost(attempts, event.loss)
        elif isinstance(event, Rejected):
            self._rejected(attempts, event)
        elif event is _Wait.RETRY:
            attempts.refused_by = frozenset()
            self._send(attempts)
        elif event is _Wait.OVER:
            raise self._nobody()
        else:
            now = time.monotonic()
            arrival = attempts.take(event, now)
            if arrival is Arrival.NEXT and isinstance(event, Token):
                return self._token(attempts, event, now)
            if arrival is Arrival.HOLE:
                self._lost(attempts, Loss.HOLE)
            elif arrival is Arrival.WRONG:
                self._broken(attempts, f"{event} for {attempts.prompt.size} tokens")
        return None

    def _token(self, attempts: Attempts, token: Token, now: float) -> Update | None:
        at = attempts.first_choice + token.choice
        self.timeline.token(at, now)
        choice, placement = self.choices[at], attempts.placement
        piece = choice.push(token)
        if piece is None:
            return None
        if piece.finish is not None and not token.finish and placement is not None:
            placement.node.stop(placement.request, token.choice, choice.kept)
        return Update(at, piece)

    def _broken(self, attempts: Attempts, what: str) -> None:
        """Its node sent what cannot be: whatever else it says of the request is not believed."""
        placement = attempts.placement
        if placement is not None:
            placement.node.note_offence(f"request {placement.request}: {what[:200]}")
        self._lost(attempts, Loss.BROKEN)

    def _rejected(self, attempts: Attempts, rejected: Rejected) -> None:
        if rejected.code == "unknown_request":
            self._lost(attempts, Loss.FORGOTTEN)
        elif rejected.code == "shutting_down" and any(attempts.ids):
            self._lost(attempts, Loss.ENDED)  # it has waited as long as it may
        elif rejected.code in NO_ROOM:
            attempts.refused()
            try:
                self._send(attempts)
            except ApiError:
                raise from_rejection(rejected) from None
        else:
            raise from_rejection(rejected)

    def _lost(self, attempts: Attempts, loss: Loss) -> None:
        """The request goes on behind what has come, if there is anything left to do."""
        _abort(attempts)
        if attempts.unfinished:
            self._note_loss(attempts, loss)
            self._send(attempts)
        else:
            attempts.lost(loss, time.monotonic())
            attempts.settle()

    def _note_loss(self, attempts: Attempts, loss: Loss) -> None:
        self.losses[loss.value] += 1
        if not attempts.lost(loss, time.monotonic()):
            text = "Every decode node that took the request was lost."
            raise EngineFailure(text, code="engine_lost")

    def _nobody(self) -> ApiError:
        """No decode node is left: a broken stream says so, who has nothing yet may come again."""
        if self._streamed:
            return EngineFailure("The decode node was lost, and none is there.", code="engine_lost")
        return no_node("lost")


def _abort(attempts: Attempts) -> None:
    """Its node frees everything of the request, unless it has ended."""
    if attempts.placement is not None:
        attempts.placement.node.abort(attempts.placement.request)
