"""The requests that are at one node, and what follows from them for the next one.

Owns which requests are open there, how many prompt tokens they still wait for, and which blocks the
node will have because of them. Pure: it sends nothing, and time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from kvferry.gateway.router.policy import KnownKeys
from kvferry.kvstore.wire.generation import Done, Rejected, Running, Started, Token

INQUIRE_SECONDS = 1.0
INQUIRE_AT_MOST_SECONDS = 4.0
"""Requests that wait for their first token are asked after ever less often, up to this."""
REPEAT_SECONDS = 1.0
"""How soon a message that must have been lost is sent again."""
FADE_SECONDS = 1.0
"""How long a node's next report may take to name the blocks of a request that has ended."""
MAX_STRAYS = 10_000


class Loss(Enum):
    """Why a request goes on elsewhere, or on the same node anew."""

    DEAD = "dead"
    STALLED = "stalled"
    HOLE = "hole"
    """Tokens were lost on their way."""
    FORGOTTEN = "forgotten"
    """The node does not know the request."""
    BROKEN = "broken"
    """What the node says of it makes no sense."""
    ENDED = "ended"
    """The node was told to end, and the request would have taken it too long."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node died, fell silent, or its link went, while it had the request."""

    loss: Loss


Event = Started | Token | Done | Rejected | Running | NodeLost
OnEvent = Callable[[Event], None]


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended."""

    on_event: OnEvent
    keys: bytes
    """Of its blocks that the node does not have yet."""
    missing: int
    """Prompt tokens that must be computed before its first token."""
    prefill: str
    """Where they are likely computed, until they are."""
    inquire_at: float
    interval: float = INQUIRE_SECONDS
    started: bool = False
    """The node has said where its prompt came from."""
    answered: bool = False
    allowance: int = 0
    """How many tokens of it may still come, repeated ones among them."""
    asked: bool = False
    """It was inquired about, and the node has not said how far it is."""
    stops: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Choices that were stopped: the tokens kept, and when the node was last told."""


class OpenRequests:
    """Requests by number."""

    def __init__(self, keys: KnownKeys) -> None:
        self.open: dict[int, OpenRequest] = {}
        self.pending = 0
        """Prompt tokens of requests that wait for their first token."""
        self._keys = keys
        self._fading: deque[tuple[float, bytes]] = deque()
        self._strays: dict[int, float] = {}
        self._highest = 0

    def add(self, number: int, request: OpenRequest) -> None:
        self.open[number] = request
        self._highest = max(self._highest, number)
        self.pending += request.missing
        self._keys.expect(request.keys)

    def remove(self, number: int, now: float) -> OpenRequest | None:
        """Forgets a request; its blocks are expected a little longer."""
        request = self.open.pop(number, None)
        if request is not None:
            self._note_answer(request)
            self._fading.append((now + FADE_SECONDS, request.keys))
        return request

    def clear(self) -> list[OpenRequest]:
        """The node is another one now: all requests, and none any more."""
        requests, self.open, self.pending = self.open, {}, 0
        self._fading.clear()
        self._strays.clear()
        self._keys.forget()
        return list(requests.values())

    def heard(self, request: OpenRequest, choice: int, now: float) -> int | None:
        """A token of a choice has come.

        If the choice was stopped and goes on, the node must be told again how many of its tokens
        count: so many.
        """
        self._note_answer(request)
        request.inquire_at, request.interval = now + INQUIRE_SECONDS, INQUIRE_SECONDS
        kept, told = request.stops.get(choice, (0, now))
        if now - told <= REPEAT_SECONDS:
            return None
        request.stops[choice] = (kept, now)
        return kept

    def take(self, message: Started | Running | Done | Rejected, now: float) -> OpenRequest | None:
        """The request that something is said of, if it is open and this is news to it."""
        request = self.open.get(message.request)
        if request is None:
            return None
        if isinstance(message, Started):
            news, request.started = not request.started, True
        elif isinstance(message, Running):
            news, request.asked = request.asked, False
        else:
            # A second copy of it is invalid, but the first one runs.
            invalid = isinstance(message, Rejected) and message.code == "invalid_request"
            news = not (invalid and request.answered)
            if news:
                self.remove(message.request, now)
        return request if news else None

    def _note_answer(self, request: OpenRequest) -> None:
        if not request.answered:
            request.answered, request.prefill = True, ""
            self.pending -= request.missing

    def due(self, now: float) -> list[int]:
        """Requests to inquire about now."""
        found = []
        for number, request in self.open.items():
            if now >= request.inquire_at:
                found.append(number)
                request.asked = True
                if not request.answered:
                    request.interval = min(2 * request.interval, INQUIRE_AT_MOST_SECONDS)
                request.inquire_at = now + request.interval
        return found

    def given(self, number: int) -> bool:
        """Whether the node may ever have heard of a request of this number."""
        return number <= self._highest

    def stray(self, number: int, now: float) -> bool:
        """A token of no open request has come, or one was ended: is the node to be told of it?"""
        if now - self._strays.get(number, 0.0) <= REPEAT_SECONDS:
            return False
        if len(self._strays) >= MAX_STRAYS:
            self._strays.clear()
        self._strays[number] = now
        return True

    def fade(self, now: float) -> None:
        """Expects no more what the node must have reported by now."""
        while self._fading and self._fading[0][0] <= now:
            self._keys.expected_no_more(self._fading.popleft()[1])

    def check(self) -> None:
        """Proves that what is counted of requests is what they are."""
        waiting = sum(one.missing for one in self.open.values() if not one.answered)
        assert self.pending == waiting, f"{self.pending} tokens pending, not {waiting}"
