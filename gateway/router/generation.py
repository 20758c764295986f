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
from dataclasses import dataclass, field
from functools import partial

from kvferry.gateway.errors import (
    ApiError,
    EngineFailure,
    Unavailable,
    deadline_exceeded,
    from_rejection,
    shutting_down,
)
from kvferry.gateway.output.choice import Choice, Piece, Reply
from kvferry.gateway.params import Params
from kvferry.gateway.prompt.model import ServedModel
from kvferry.gateway.prompt.prompts import Prompt
from kvferry.gateway.router.attempts import Arrival, Bounds, Course, Loss
from kvferry.gateway.router.nodes import Nodes, NoNode, Run
from kvferry.gateway.router.report import Report, make_report
from kvferry.gateway.router.requests import EngineLost, Event
from kvferry.kvstore.keys import pack_tokens
from kvferry.kvstore.wire.generation import (
    Done,
    Generate,
    PromptSources,
    Rejected,
    Running,
    Started,
    Token,
)

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


@dataclass(frozen=True, slots=True)
class _Retry:
    """Another decode node may be there now."""


@dataclass(frozen=True, slots=True)
class _GiveUp:
    """None was there in time."""


_AnyEvent = Event | ApiError | _Retry | _GiveUp


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
        self.timeline = Timeline()
        self.report: Report | None = None
        self.losses: Counter[str] = Counter()
        """How often a request went on elsewhere, by reason."""
        self._nodes = nodes
        self._timeouts = timeouts
        self._session = session
        self._eos_ids = () if params.ignore_eos else model.eos_ids
        count = len(prompts) * params.n
        self._choices = [Choice(model.tokenizer, params.rules) for _ in range(count)]
        self._last_token = [0.0] * count
        bounds = Bounds(
            model.vocabulary.size,
            self._eos_ids,
            params.stop_token_ids,
            params.sampling.logprobs or 0,
        )
        self._courses = [
            Course(prompt, self._choices[at * params.n : (at + 1) * params.n], bounds)
            for at, prompt in enumerate(prompts)
        ]
        self._events: asyncio.Queue[tuple[int, int, _AnyEvent]] = asyncio.Queue()
        self._timers: list[asyncio.TimerHandle] = []
        self._streamed = False
        """The client has a part of its answer."""

    @property
    def prompt_tokens(self) -> int:
        return sum(prompt.size for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Tokens that count so far, of all choices."""
        return sum(choice.kept for choice in self._choices)

    @property
    def choices(self) -> int:
        return len(self._choices)

    @property
    def runs(self) -> list[Run]:
        """Where its requests are."""
        return [course.run for course in self._courses if course.run is not None]

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.finish.reason for choice in self._choices if choice.finish is not None]

    @property
    def unfinished(self) -> list[int]:
        """Choices without an end."""
        return [at for at, choice in enumerate(self._choices) if choice.finish is None]

    def said(self, choice: int) -> tuple[Prompt, Reply]:
        """What one choice has shown so far, and to which prompt."""
        return self.prompts[choice // self.params.n], self._choices[choice].reply

    def fail(self, error: ApiError) -> None:
        """Ends the response with this error, from outside."""
        self._events.put_nowait((0, 0, error))

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
            while not all(course.over for course in self._courses):
                at, leg, event = await self._events.get()
                update = self._take(at, leg, event)
                if update is None:
                    continue
                if any(course.unfinished for course in self._courses):
                    self._streamed = self.params.stream
                    yield update
                else:
                    held = update  # the last one waits for the report
            done = [course.done for course in self._courses]
            vouched = all(course.vouched for course in self._courses)
            self.report = make_report(done, self.prompt_tokens, vouched=vouched)
            assert held is not None
            yield Update(held.choice, held.piece, self.report)
        finally:
            for timer in self._timers:
                timer.cancel()
            for run in self.runs:
                run.abort()

    # -- sending -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.timeline.submitted = time.monotonic()
        if self._timeouts.request:
            text = f"The answer was not complete in {self._timeouts.request:g} s."
            self._later(self._timeouts.request, self.fail, deadline_exceeded(text))
        if self._timeouts.first_token:
            self._later(self._timeouts.first_token, self._expect_first_token)
        for at in range(len(self._courses)):
            self._send(at)

    def _later(self, seconds: float, call: Callable[..., None], *args: object) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, call, *args))

    def _expect_first_token(self) -> None:
        if not self.timeline.first:
            seconds = self._timeouts.first_token
            self.fail(deadline_exceeded(f"No token came in {seconds:g} s."))

    def _send(self, at: int) -> None:
        """Starts a leg at the best decode node; without any, waits if there was one before."""
        course = self._courses[at]
        leg = course.begin(time.monotonic())
        on_event = partial(self._arrived, at, leg)
        make = partial(self._message, course)
        try:
            avoid = course.refused_by | course.broken_by
            run = self._nodes.submit(
                on_event, course.prompt, make, avoid, course.doubted, self._session
            )
            course.sent(run)
        except NoNode as error:
            if error.reason == "died":
                self._note_loss(course, Loss.DEAD)
            if course.lost_at is None:
                raise no_node(error) from error
            self._wait(at, course)

    def _wait(self, at: int, course: Course) -> None:
        """For a decode node to be there again, or for one of those that are to have room."""
        assert course.lost_at is not None
        wake = partial(self._arrived, at, course.leg, _Retry())
        if course.refused_by or course.broken_by:
            self._later(ROOM_RETRY_SECONDS, wake)
        else:
            self._nodes.park(wake)
        left = course.lost_at + self._timeouts.resume - time.monotonic()
        self._later(max(0.0, left), self._arrived, at, course.leg, _GiveUp())

    def _arrived(self, at: int, leg: int, event: _AnyEvent) -> None:
        self._events.put_nowait((at, leg, event))

    def _message(self, course: Course, request: int, prefill: tuple[str, ...]) -> Generate:
        params, prompt = self.params, course.prompt
        return Generate(
            request=request,
            prompt=prompt.packed,
            root=prompt.root,
            tenant=prompt.tenant,
            keys=prompt.keys,
            max_tokens=prompt.max_tokens,
            min_tokens=min(params.rules.min_tokens, prompt.max_tokens),
            eos_ids=self._eos_ids,
            stop_token_ids=params.stop_token_ids,
            sampling=params.sampling,
            seed=params.seed,
            choices=params.n,
            outputs=course.outputs,
            finished=course.finished,
            prefill_nodes=prefill,
            priority=params.priority,
            deadline_s=self._time_left(),
            forced=pack_tokens(params.forced),
        )

    def _time_left(self) -> float:
        if not self._timeouts.request:
            return 0.0
        left = self.timeline.submitted + self._timeouts.request - time.monotonic()
        return min(max(0.001, left), FOREVER_SECONDS)

    # -- events ------------------------------------------------------------------------------------

    def _take(self, at: int, leg: int, event: _AnyEvent) -> Update | None:
        if isinstance(event, ApiError):
            raise event
        course = self._courses[at]
        if leg != course.leg:
            return None  # from a node that was given up
        if isinstance(event, Token):
            return self._token(at, event)
        if isinstance(event, Done):
            self._reported(at, event)
        elif isinstance(event, Started):
            if self._credible(at, event.sources):
                course.started(event.sources)
        elif isinstance(event, Running):
            if course.behind(event.sent):
                self._lost(at, Loss.HOLE)
        elif isinstance(event, EngineLost):
            self._lost(at, _loss_of(event))
        elif isinstance(event, Rejected):
            self._rejected(at, event)
        elif isinstance(event, _Retry):
            course.refused_by = frozenset()
            self._send(at)
        else:
            raise self._nobody()
        return None

    def _token(self, at: int, token: Token) -> Update | None:
        course, now = self._courses[at], time.monotonic()
        arrival = course.arrived(token, now)
        if arrival is Arrival.HOLE:
            self._lost(at, Loss.HOLE)
        elif arrival is Arrival.WRONG:
            self._broken(at, f"{token}"[:200])
        if arrival is not Arrival.NEXT:
            return None
        index = at * self.params.n + token.choice
        choice = self._choices[index]
        self._stamp(index, now)
        piece = choice.push(token)
        if piece is None:
            return None
        if piece.finish is not None and not token.finish and course.run is not None:
            course.run.stop(token.choice, choice.kept)
        return Update(index, piece)

    def _stamp(self, index: int, now: float) -> None:
        timeline = self.timeline
        timeline.first = timeline.first or now
        timeline.last = now
        if self._last_token[index]:
            timeline.gaps.append(now - self._last_token[index])
        self._last_token[index] = now

    def _reported(self, at: int, done: Done) -> None:
        if self._credible(at, done.sources) and not self._courses[at].reported(done):
            self._lost(at, Loss.HOLE)

    def _credible(self, at: int, sources: PromptSources) -> bool:
        """Whether this can be where its prompt came from; else its node is broken."""
        course = self._courses[at]
        if course.credible(sources):
            return True
        self._broken(at, f"{sources} for {course.prompt.size} tokens")
        return False

    def _broken(self, at: int, what: str) -> None:
        """Its node sent what cannot be: whatever else it says of the request is not believed."""
        run = self._courses[at].run
        if run is not None:
            run.complain(what)
        self._lost(at, Loss.BROKEN)

    def _rejected(self, at: int, rejected: Rejected) -> None:
        course = self._courses[at]
        if rejected.code == "unknown_request":
            self._lost(at, Loss.FORGOTTEN)
        elif rejected.code == "shutting_down" and any(course.outputs):
            self._lost(at, Loss.ENDED)  # it has waited as long as it may
        elif rejected.code in NO_ROOM:
            course.refused()
            try:
                self._send(at)
            except ApiError:
                raise from_rejection(rejected) from None
        else:
            raise from_rejection(rejected)

    def _lost(self, at: int, loss: Loss) -> None:
        """The request goes on behind what has come, if there is anything left to do."""
        course = self._courses[at]
        if course.unfinished:
            self._note_loss(course, loss)
            self._send(at)
        else:
            course.lost(loss, time.monotonic())
            course.settle()

    def _note_loss(self, course: Course, loss: Loss) -> None:
        self.losses[loss.value] += 1
        if not course.lost(loss, time.monotonic()):
            text = "Every decode node that took the request was lost."
            raise EngineFailure(text, code="engine_lost")

    def _nobody(self) -> ApiError:
        """No decode node is left: a broken stream says so, who has nothing yet may come again."""
        if self._streamed:
            return EngineFailure("The decode node was lost, and none is there.", code="engine_lost")
        return no_node(NoNode("lost"))


def _loss_of(event: EngineLost) -> Loss:
    return Loss.BROKEN if event.broken else Loss.STALLED if event.stalled else Loss.DEAD


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
