"""One prompt's way over the decode nodes, however many it takes to end it.

Owns what has been received of each choice, and from it the judgement of everything that comes: the
next token, one that was there before, one too far; a node that says it has sent more than came; a
request that was given up too often. Sampling is a pure function of the ids, so a node that gets
those received so far goes on exactly where another one stopped. Pure: it sends nothing, and time is
an argument.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from msgspec.structs import replace

from kvferry.gateway.output.choice import Choice
from kvferry.gateway.prompt.prompts import Prompt
from kvferry.gateway.router.nodes import Run
from kvferry.kvstore.wire.generation import Done, PromptSources, Stages, Token

MAX_DEATHS = 3
"""Nodes that a request may lose without a new token: it may be what kills them."""
MAX_HOLES = 3
"""Legs that one node may end by losing tokens, before others are preferred to it."""
MAX_LEGS = 10
"""Legs without a new token, for whatever reason."""


class Arrival(Enum):
    """What a token is to those before it."""

    NEXT = "next"
    KNOWN = "known"
    """It was there before, or its choice has ended."""
    HOLE = "hole"
    """One before it never came."""
    WRONG = "wrong"
    """No node that works would send it."""


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
class Bounds:
    """What a node that does what it was asked for can send."""

    vocabulary: int
    eos_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]
    alternatives: int
    """Beside each token, at most."""


class Course:
    """One prompt and its choices. A leg is its stay on one node; `leg` tells them apart."""

    def __init__(self, prompt: Prompt, choices: Sequence[Choice], bounds: Bounds) -> None:
        self.prompt = prompt
        self.choices = choices
        self.bounds = bounds
        self.leg = 0
        self.run: Run | None = None
        """Where it is; None: nowhere, until a decode node is there."""
        self.refused_by: frozenset[str] = frozenset()
        """Nodes that had no room, since it last lost one."""
        self.broken_by: frozenset[str] = frozenset()
        """Nodes that sent nonsense for it."""
        self._holes: Counter[str] = Counter()
        self.lost_at: float | None = None
        """When it last lost its node; None: it never did."""
        self._ids = [array("i") for _ in choices]
        self._known = 0
        self._submitted = self._began = self._first = self._last = 0.0
        self._first_leg = 0
        self._deaths = self._fruitless = 0
        self._missing: tuple[int, ...] | None = None
        """What had come when a node first said that it had sent more."""
        self._sources: PromptSources | None = None
        """Where its prompt came from when it first ran."""
        self._done: Done | None = None
        self.vouched = True
        """Its account is a node's."""

    # -- how far it is -----------------------------------------------------------------------------

    @property
    def unfinished(self) -> bool:
        return any(choice.finish is None for choice in self.choices)

    @property
    def over(self) -> bool:
        """Every choice has ended, and so has the request."""
        return self._done is not None and not self.unfinished

    @property
    def doubted(self) -> frozenset[str]:
        """Nodes on their way to which, or back, too much of it was lost."""
        return frozenset(it for it, count in self._holes.items() if count >= MAX_HOLES)

    @property
    def done(self) -> Done:
        assert self._done is not None
        return self._done

    @property
    def outputs(self) -> tuple[bytes, ...]:
        """Ids received, per choice; empty as long as there are none."""
        return tuple(ids.tobytes() for ids in self._ids) if any(self._ids) else ()

    @property
    def finished(self) -> tuple[int, ...]:
        return tuple(at for at, it in enumerate(self.choices) if it.finish is not None)

    # -- what comes --------------------------------------------------------------------------------

    def arrived(self, token: Token, now: float) -> Arrival:
        """Notes a token. Only the next one is to be acted on."""
        if token.choice >= len(self.choices):
            return Arrival.WRONG
        ids = self._ids[token.choice]
        if self.choices[token.choice].finish is not None or token.index < len(ids):
            return Arrival.KNOWN
        if token.index > len(ids):
            return Arrival.HOLE
        if not self._plausible(token):
            return Arrival.WRONG
        ids.append(token.token)
        self._deaths = self._fruitless = 0
        self._missing = None
        if not self._first:
            self._first, self._first_leg = now, self.leg
        self._last = now
        return Arrival.NEXT

    def _plausible(self, token: Token) -> bool:
        """Whether the next token of a choice can be this one, and end it if it does."""
        bounds, last = self.bounds, token.index + 1 >= self.prompt.max_tokens
        ids = (token.token, *(it for it, _ in token.top))
        if len(ids) > 1 + bounds.alternatives or max(ids) >= bounds.vocabulary:
            return False
        reason, _, matched = token.finish.partition(":")
        if matched:
            return int(matched) == token.token and token.token in bounds.stop_token_ids
        if reason == "stop":
            return token.token in bounds.eos_ids
        return last if reason else not last

    def credible(self, it: PromptSources) -> bool:
        """Whether an account is one of this prompt: every token came from somewhere, once."""
        return it.hits + it.prefill + it.decode == self.prompt.size

    def started(self, sources: PromptSources) -> None:
        """Notes where the prompt came from when it first ran; the first account stays."""
        if self._sources is None:
            self._sources = self._found(sources)

    def _found(self, sources: PromptSources) -> PromptSources:
        """What earlier requests had left, of what a node has found.

        If it was not the first node, that may be what this very request had computed before: hits
        count only as far as they were known of when the request came.
        """
        return sources if self.lost_at is None else _without_own(sources, self._known)

    def behind(self, sent: Sequence[int]) -> bool:
        """True if a node has sent tokens that have not come since it last said so."""
        held = tuple(map(len, self._ids))
        ahead = any(
            choice.finish is None and count > have
            for choice, count, have in zip(self.choices, sent, held, strict=False)
        )
        lost = ahead and self._missing == held
        self._missing = held if ahead else None
        return lost

    def reported(self, done: Done) -> bool:
        """Notes a node's account; the first one stays. False if tokens before it never came."""
        if self._done is None:
            self._done = done if self.lost_at is None else self._honest(done)
        return not self.unfinished

    # -- going on elsewhere ------------------------------------------------------------------------

    def begin(self, now: float) -> int:
        """The next leg, which is about to be sent somewhere."""
        self._submitted = self._submitted or now
        self._began = now
        self.leg += 1
        return self.leg

    def sent(self, run: Run) -> None:
        """The leg has begun there."""
        self.run = run
        if self.lost_at is None:
            self._known = run.known

    def refused(self) -> None:
        """The node has no room for it."""
        if self.run is not None:
            self.refused_by |= {self.run.node.address}
        self.run = None

    def lost(self, loss: Loss, now: float) -> bool:
        """Ends the leg. False: it was tried often enough."""
        if self.run is not None:
            address = self.run.node.address
            self._holes[address] += loss in (Loss.HOLE, Loss.FORGOTTEN)
            self.broken_by |= {address} if loss is Loss.BROKEN else frozenset()
            self.run.abort()
        self.run, self._missing, self.refused_by = None, None, frozenset()
        self.leg += 1
        self.lost_at = now
        self._fruitless += 1
        self._deaths += loss in (Loss.DEAD, Loss.STALLED, Loss.BROKEN)
        return self._deaths <= MAX_DEATHS and self._fruitless <= MAX_LEGS

    def settle(self) -> None:
        """All choices have ended, but the account of it is lost: what is known is put in its place.

        If no node has said how many prompt tokens were cached, nobody can any more.
        """
        if self._done is None:
            self.vouched = self._sources is not None
            sources = self._sources or PromptSources(decode=self.prompt.size)
            self._done = Done(0, sources, self._measured(), 0.0, 0, self._predicted_ms(), 0, 0)

    def _honest(self, done: Done) -> Done:
        """The account of a node that was not the first: what counts is what the first one found.

        Times are the request's, not the node's.
        """
        sources = self._sources or self._found(done.sources)
        if self._first_leg == self.leg:
            before = 1e3 * (self._began - self._submitted)
            stages = replace(done.stages, queue=done.stages.queue + before)
            return replace(done, sources=sources, stages=stages)
        stages, predicted = self._measured(), self._predicted_ms()
        return replace(done, sources=sources, stages=stages, predicted_ms=predicted, handoff_ms=0.0)

    def _measured(self) -> Stages:
        """Which stage took how long only the lost node knew: all of it counts as the last one."""
        return Stages(first_step=1e3 * max(0.0, self._first - self._submitted))

    def _predicted_ms(self) -> float:
        return 1e3 * (self._last - self._first)


def _without_own(sources: PromptSources, known: int) -> PromptSources:
    """The same sum with at most `known` hits: the others were computed for this request."""
    device = min(sources.device, known)
    host = min(sources.host, known - device)
    disk = min(sources.disk, known - device - host)
    remote = min(sources.remote, known - device - host - disk)
    own = sources.hits - (device + host + disk + remote)
    return PromptSources(device, host, disk, remote, sources.prefill, sources.decode + own)
