"""One prompt's way over the decode nodes, in as many attempts as it takes to end it.

Owns what has been received of each choice, and from it what a node is sent, and the judgement of
everything that comes: the next token, one that was there before, one too far; a node that says it
has sent more than came; a request that was given up too often. Sampling is a pure function of the
ids, so a node that gets those received so far goes on exactly where another one stopped. Pure: it
sends nothing, and time is an argument.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from enum import Enum

from msgspec.structs import replace

from kvferry.gateway.output.choice import Choice
from kvferry.gateway.params import Params
from kvferry.gateway.prompt.prompts import Prompt
from kvferry.gateway.router.nodes import Placement
from kvferry.gateway.router.report import without_own
from kvferry.gateway.router.requests import Loss
from kvferry.kvstore.keys import pack_tokens
from kvferry.kvstore.wire.generation import (
    Done,
    Generate,
    PromptSources,
    Running,
    Stages,
    Started,
    Token,
)

MAX_DEATHS = 3
"""Nodes that a request may lose without a new token: it may be what kills them."""
MAX_HOLES = 3
"""Attempts that one node may end by losing tokens, before others are preferred to it."""
MAX_ATTEMPTS = 10
"""Attempts without a new token, for whatever reason."""


class Arrival(Enum):
    """What a message is to those before it."""

    NEXT = "next"
    """The next token: it is to be acted on."""
    NOTED = "noted"
    """An account; or a token that was there before, or whose choice has ended."""
    HOLE = "hole"
    """A token before it never came."""
    WRONG = "wrong"
    """No node that works would send it."""


class Attempts:
    """One prompt and its choices. An attempt is its stay on one node; `number` tells them apart."""

    def __init__(
        self,
        prompt: Prompt,
        choices: Sequence[Choice],
        first_choice: int,
        params: Params,
        eos_ids: tuple[int, ...],
        vocabulary_size: int,
    ) -> None:
        self.prompt = prompt
        self.choices = choices
        self.first_choice = first_choice
        """The number in the whole response of its choice 0."""
        self.number = 0
        self.placement: Placement | None = None
        """Where it is; None: nowhere, until a decode node is there."""
        self.refused_by: frozenset[str] = frozenset()
        """Nodes that had no room, since it last lost one."""
        self.broken_by: frozenset[str] = frozenset()
        """Nodes that sent nonsense for it."""
        self.doubted: frozenset[str] = frozenset()
        """Nodes on their way to which, or back, too much of it was lost."""
        self.lost_at: float | None = None
        """When it last lost its node; None: it never did."""
        self.ids = [array("i") for _ in choices]
        """Received so far, by choice."""
        self.done: Done | None = None
        """The account of it, once the request has ended."""
        self.vouched = True
        """Its account is a node's."""
        self._params = params
        self._eos_ids = eos_ids
        self._vocabulary_size = vocabulary_size
        self._known = 0
        self._submitted = self._began = self._first = self._last = 0.0
        self._first_number = 0
        """Of the attempt that got the first token."""
        self._holes: Counter[str] = Counter()
        self._deaths = self._fruitless = 0
        self._missing: tuple[int, ...] | None = None
        """What had come when a node first said that it had sent more."""
        self._sources: PromptSources | None = None
        """Where its prompt came from when it first ran."""

    @property
    def unfinished(self) -> bool:
        return any(choice.finish is None for choice in self.choices)

    @property
    def over(self) -> bool:
        """Every choice has ended, and so has the request."""
        return self.done is not None and not self.unfinished

    # -- one attempt -------------------------------------------------------------------------------

    def begin(self, now: float) -> int:
        """The number of the next attempt, which is about to be sent somewhere."""
        self._submitted = self._submitted or now
        self._began = now
        self.number += 1
        return self.number

    def message(self, deadline_s: float, request: int, prefill_nodes: tuple[str, ...]) -> Generate:
        """What a decode node is sent: the prompt, and what has come of each choice so far."""
        prompt, params = self.prompt, self._params
        ended = (at for at, choice in enumerate(self.choices) if choice.finish is not None)
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
            outputs=tuple(ids.tobytes() for ids in self.ids) if any(self.ids) else (),
            finished=tuple(ended),
            prefill_nodes=prefill_nodes,
            priority=params.priority,
            deadline_s=deadline_s,
            forced=pack_tokens(params.forced),
        )

    def sent(self, placement: Placement) -> None:
        """The attempt has begun there."""
        self.placement = placement
        if self.lost_at is None:
            self._known = placement.known

    def take(self, message: Token | Started | Running | Done, now: float) -> Arrival:
        """Notes what the node says of this attempt."""
        if isinstance(message, Token):
            return self._token(message, now)
        if isinstance(message, Running):
            return Arrival.HOLE if self._behind(message.sent) else Arrival.NOTED
        found = message.sources
        if found.hits + found.prefill + found.decode != self.prompt.size:
            return Arrival.WRONG  # every token came from somewhere, once
        if isinstance(message, Started):
            if self._sources is None:  # the first account stays
                self._sources = found if self.lost_at is None else without_own(found, self._known)
            return Arrival.NOTED
        if self.done is None:
            self.done = message if self.lost_at is None else self._honest(message)
        return Arrival.HOLE if self.unfinished else Arrival.NOTED

    def _token(self, token: Token, now: float) -> Arrival:
        if token.choice >= len(self.choices):
            return Arrival.WRONG
        ids = self.ids[token.choice]
        if self.choices[token.choice].finish is not None or token.index < len(ids):
            return Arrival.NOTED
        if token.index > len(ids):
            return Arrival.HOLE
        if not self._plausible(token):
            return Arrival.WRONG
        ids.append(token.token)
        self._deaths = self._fruitless = 0
        self._missing = None
        if not self._first:
            self._first, self._first_number = now, self.number
        self._last = now
        return Arrival.NEXT

    def _plausible(self, token: Token) -> bool:
        """Whether the next token of a choice can be this one, and end it if it does."""
        last = token.index + 1 >= self.prompt.max_tokens
        alternatives = self._params.sampling.logprobs or 0
        ids = (token.token, *(it for it, _ in token.top))
        if len(ids) > 1 + alternatives or max(ids) >= self._vocabulary_size:
            return False
        reason, _, matched = token.finish.partition(":")
        if matched:
            return int(matched) == token.token and token.token in self._params.stop_token_ids
        if reason == "stop":
            return token.token in self._eos_ids
        return last if reason else not last

    def _behind(self, sent: Sequence[int]) -> bool:
        """True if a node has sent tokens that have not come since it last said so."""
        held = tuple(map(len, self.ids))
        ahead = any(
            choice.finish is None and count > have
            for choice, count, have in zip(self.choices, sent, held, strict=False)
        )
        lost = ahead and self._missing == held
        self._missing = held if ahead else None
        return lost

    # -- the next attempt --------------------------------------------------------------------------

    def refused(self) -> None:
        """The node has no room for it."""
        if self.placement is not None:
            self.refused_by |= {self.placement.node.address}
        self.placement = None

    def lost(self, loss: Loss, now: float) -> bool:
        """Ends the attempt. False: it was tried often enough."""
        if self.placement is not None:
            address = self.placement.node.address
            self._holes[address] += loss in (Loss.HOLE, Loss.FORGOTTEN)
            self.doubted |= {address} if self._holes[address] >= MAX_HOLES else frozenset()
            self.broken_by |= {address} if loss is Loss.BROKEN else frozenset()
        self.placement, self._missing, self.refused_by = None, None, frozenset()
        self.number += 1
        self.lost_at = now
        self._fruitless += 1
        self._deaths += loss in (Loss.DEAD, Loss.STALLED, Loss.BROKEN)
        return self._deaths <= MAX_DEATHS and self._fruitless <= MAX_ATTEMPTS

    def settle(self) -> None:
        """All choices have ended, but the account of it is lost: what is known is put in its place.

        If no node has said how many prompt tokens were cached, nobody can any more.
        """
        if self.done is None:
            self.vouched = self._sources is not None
            sources = self._sources or PromptSources(decode=self.prompt.size)
            self.done = Done(0, sources, self._measured(), 0.0, 0, self._predicted_ms(), 0, 0)

    def _honest(self, done: Done) -> Done:
        """The account of a node that was not the first: what counts is what the first one found.

        Times are the request's, not the node's.
        """
        sources = self._sources or without_own(done.sources, self._known)
        if self._first_number == self.number:
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
