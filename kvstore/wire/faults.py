"""Faults on purpose: what a test makes of the messages that a socket is about to send.

Owns the rules, the dice, and the messages that are held back. Pure: the generator is seeded and
time is an argument, so a failing run can be run again. It does not know sockets: `Server` and
`Client` ask it what to send in place of a message, if somebody has given them an injector, which
only a process with test hooks does.

A message meets at most one fault: the first rule that applies to it and whose dice fall. The
messages by which two processes meet and probe each other are spared unless a rule names them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from kvferry.kvstore.wire.codec import AnyMessage

Frame = bytes | memoryview
Frames = list[Frame]
Action = Literal["delay", "drop", "duplicate", "reorder", "corrupt"]

SPARED = frozenset({"Hello", "Welcome", "HelloRequired", "Refused", "Ping", "Pong"})
REORDER_SECONDS = 0.05
"""How long a message waits for another one to overtake it."""
MAX_SECONDS = 600.0
MAX_HELD = 10_000
"""Messages one socket holds back at most; what comes then is sent at once."""
_NAMES = frozenset(kind.__name__ for kind in get_args(AnyMessage))


class FaultRule(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of fault. ValueError when a field makes no sense."""

    action: Action
    messages: tuple[str, ...] = ()
    """Class names of `wire`; empty: all that are not spared."""
    probability: float = 1.0
    seconds: float = 0.0
    """How long `delay` holds a message."""
    count: int = 0
    """How often at most; 0: without end."""
    part: Literal["header", "payload"] = "header"
    """What `corrupt` damages; a message without payload has no payload to damage."""

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"action {self.action!r} is none of {', '.join(get_args(Action))}")
        if unknown := sorted(set(self.messages) - _NAMES):
            raise ValueError(f"no message is called {unknown[0]!r}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability {self.probability} is not from 0 to 1")
        if not 0 <= self.seconds <= MAX_SECONDS:
            raise ValueError(f"seconds {self.seconds} is not from 0 to {MAX_SECONDS:g}")
        if self.count < 0:
            raise ValueError(f"count {self.count} is negative")
        if self.part not in ("header", "payload"):
            raise ValueError(f"part {self.part!r} is neither header nor payload")

    def concerns(self, message: AnyMessage, num_frames: int) -> bool:
        name = type(message).__name__
        if name in SPARED if not self.messages else name not in self.messages:
            return False
        return num_frames > 1 or self.action != "corrupt" or self.part == "header"


def rules_from_json(data: bytes | Sequence[object]) -> tuple[FaultRule, ...]:
    """Rules from a JSON list of objects, as text or decoded; ValueError says what is wrong."""
    try:
        decoded = msgspec.json.decode(data) if isinstance(data, bytes) else data
        return msgspec.convert(decoded, tuple[FaultRule, ...])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"fault rules: {error}") from None


def rules_to_json(rules: Sequence[FaultRule]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = msgspec.to_builtins(list(rules))
    return listed


# -- dice ------------------------------------------------------------------------------------------


class _Dice:
    """Which rule strikes: shared by the injectors of one process, so that a `count` is one."""

    def __init__(self, rules: Sequence[FaultRule], seed: int) -> None:
        self.random = random.Random(seed)
        self.counters: Counter[str] = Counter()
        self.rules: list[FaultRule] = []
        self._used: list[int] = []
        self.replace(rules)

    def replace(self, rules: Sequence[FaultRule]) -> None:
        self.rules = list(rules)
        self._used = [0] * len(self.rules)

    def roll(
        self, message: AnyMessage, num_frames: int, excluded: Collection[str]
    ) -> FaultRule | None:
        for index, rule in enumerate(self.rules):
            if rule.count and self._used[index] >= rule.count:
                continue
            if rule.action in excluded or not rule.concerns(message, num_frames):
                continue
            if self.random.random() < rule.probability:
                self._used[index] += 1
                self.counters[rule.action] += 1
                return rule
        return None

    def damaged(self, frames: Sequence[Frame], part: str) -> Frames:
        """A copy in which one bit is another."""
        where = 0 if part == "header" else self.random.randrange(1, len(frames))
        copy = bytearray(frames[where])
        if copy:
            copy[self.random.randrange(len(copy))] ^= 1 << self.random.randrange(8)
        return [*frames[:where], bytes(copy), *frames[where + 1 :]]


# -- injecting -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Held:
    """A message on its way to a peer, kept back until `at`."""

    at: float
    to: bytes
    frames: Frames


class FaultInjector:
    """What one socket sends in place of its messages. Frames come without a ROUTER's identity."""

    def __init__(self, rules: Sequence[FaultRule] = (), seed: int = 0) -> None:
        self._dice = _Dice(rules, seed)
        self._delayed: list[Held] = []
        self._overtakable: dict[bytes, Held] = {}
        """By peer: what goes behind the next message to it, or when its time has come."""

    @classmethod
    def from_json(cls, data: bytes | Sequence[object], seed: int = 0) -> FaultInjector:
        return cls(rules_from_json(data), seed)

    def to_json(self) -> list[dict[str, Any]]:
        """The rules, as `from_json` reads them."""
        return rules_to_json(self._dice.rules)

    def sibling(self) -> FaultInjector:
        """For another socket of this process: the same rules, dice and counts."""
        other = FaultInjector()
        other._dice = self._dice
        return other

    def replace(self, rules: Sequence[FaultRule]) -> None:
        """Other rules from now on, for siblings too; what is held goes when its time has come."""
        self._dice.replace(rules)

    @property
    def counters(self) -> dict[str, int]:
        """How many messages met each action."""
        return dict(self._dice.counters)

    @property
    def num_held(self) -> int:
        return len(self._delayed) + len(self._overtakable)

    def outgoing(
        self, message: AnyMessage, frames: Sequence[Frame], now: float, to: bytes = b""
    ) -> list[Frames]:
        """What to send now, in this order; the rest comes from `due`."""
        waiting = to in self._overtakable
        excluded: tuple[str, ...] = ("reorder",) if waiting else ()
        if self.num_held >= MAX_HELD:
            excluded = ("reorder", "delay")
        sent = self._struck(self._dice.roll(message, len(frames), excluded), frames, now, to)
        if sent and waiting:
            sent.append(self._overtakable.pop(to).frames)
        return sent

    def _struck(
        self, rule: FaultRule | None, frames: Sequence[Frame], now: float, to: bytes
    ) -> list[Frames]:
        if rule is None:
            return [list(frames)]
        match rule.action:
            case "drop":
                return []
            case "duplicate":
                return [list(frames), list(frames)]
            case "corrupt":
                return [self._dice.damaged(frames, rule.part)]
            case "delay":
                self._delayed.append(Held(now + rule.seconds, to, _copies(frames)))
            case "reorder":
                self._overtakable[to] = Held(now + REORDER_SECONDS, to, _copies(frames))
        return []

    def due(self, now: float) -> list[Held]:
        """Held messages whose time has come, the earliest first."""
        if not self.num_held:
            return []
        ready = [held for held in (*self._delayed, *self._overtakable.values()) if held.at <= now]
        self._delayed = [held for held in self._delayed if held.at > now]
        for held in ready:
            if self._overtakable.get(held.to) is held:
                del self._overtakable[held.to]
        return sorted(ready, key=lambda held: held.at)


def _copies(frames: Sequence[Frame]) -> Frames:
    """The memory behind a view may hold something else by the time these are sent."""
    return [bytes(frame) for frame in frames]
