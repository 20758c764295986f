"""Breadth first over all states of a `World`: nothing breaks, and everything ends.

*Safety*: no owner's invariant breaks in any state, no findable or computed block has a wrong byte,
no token is wrong, no request ends twice or is refused. *Liveness*: from every state the run without
further faults, in which whatever can be done is done and time passes only when nothing can, ends in
a state where nothing is left of any request. This module does not know what can happen in a state.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.tests.rigs.handoff.setup import Setup
from kvferry.tests.rigs.handoff.world import Action, State, World


class Violation(AssertionError):
    """What went wrong, and how one gets there."""

    def __init__(self, why: str, trace: list[str]) -> None:
        super().__init__("\n".join([why, *(f"{at:3} {it}" for at, it in enumerate(trace, 1))]))
        self.why = why
        self.trace = trace


@dataclass
class Report:
    states: int = 0
    transitions: int = 0
    ends: int = 0
    """States in which nothing is left of any request."""
    depth: int = 0
    longest: int = 0
    """Actions of the longest run to an end without further faults."""
    channel: int = 0
    """Messages that one channel held at most."""
    faults: Counter[str] = field(default_factory=Counter)
    nodes: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        faults = ", ".join(f"{name} {count}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.states} states, {self.transitions} transitions ({faults}), {self.nodes}, "
            f"depth {self.depth}, {self.ends} ends, {self.longest} actions to one at most, "
            f"{self.channel} messages a channel at most, {self.seconds:.1f} s"
        )


class Explorer:
    """One exhaustive exploration, breadth first."""

    def __init__(self, setup: Setup, faults: int) -> None:
        self.report = Report()
        self.world = World(setup)
        start = self.world.start(faults)
        self._states = [start]
        self._numbers = {start: 0}
        self._parents: list[tuple[int, Action]] = [(-1, ())]
        self._onward: list[int] = []
        """By state: where the run without faults goes; itself at an end."""

    def run(self) -> Report:
        started = time.perf_counter()
        for number, state in enumerate(self._states):  # it grows meanwhile
            self._onward.append(self._expand(number, state))
        self._prove_that_all_runs_end()
        self.report.states = len(self._states)
        self.report.depth = len(self.trace(len(self._states) - 1))
        decode, prefill = self.world.decode, self.world.prefill
        self.report.nodes = (
            f"{decode.num_states} states and {decode.num_runs} turns of the decode node, "
            f"{prefill.num_states} and {prefill.num_runs} of the prefill node"
        )
        self.report.seconds = time.perf_counter() - started
        return self.report

    def trace(self, number: int) -> list[str]:
        actions: list[str] = []
        while number:
            number, action = self._parents[number]
            actions.append(self._describe(self._states[number], action))
        return actions[::-1]

    def _describe(self, state: State, action: Action) -> str:
        words = [" ".join(map(str, action))]
        for name in ("gateway", "to_prefill", "to_decode"):
            if channel := getattr(state, name):
                words.append(f"{name}: {' '.join(map(self.world.post.name, channel))}")
        return " | ".join(words)

    def _expand(self, number: int, state: State) -> int:
        if not self.world.left(state):
            self.report.ends += 1
            return number
        onward = -1
        for group in self._turns(number, state):
            reached = -1
            for action in group:
                reached = self._step(number, state, action, self.world.after)
            if onward < 0 and reached not in (-1, number):
                onward = reached
        if onward < 0:
            onward = self._step(number, state, ("time",), self.world.after)
            if onward == number:
                raise Violation(f"for ever: {self.world.left(state)}", self.trace(number))
        for action in self.world.faults(state):
            self.report.faults[str(action[0])] += 1
            self._step(number, state, action, self.world.fault)
        return onward

    def _turns(self, number: int, state: State) -> list[list[Action]]:
        try:
            return list(self.world.turns(state))
        except Exception as error:  # what can happen depends on whether the prefill node computes
            raise Violation(repr(error), self.trace(number)) from error

    def _step(
        self, number: int, state: State, action: Action, after: Callable[[State, Action], State]
    ) -> int:
        try:
            reached = after(state, action)
        except Exception as error:
            trace = [*self.trace(number), self._describe(state, action)]
            raise Violation(repr(error), trace) from error
        self.report.transitions += 1
        known = self._numbers.setdefault(reached, len(self._states))
        if known == len(self._states):
            self._states.append(reached)
            self._parents.append((number, action))
            longest = max(len(reached.to_prefill), len(reached.to_decode))
            self.report.channel = max(self.report.channel, longest)
        return known

    def _prove_that_all_runs_end(self) -> None:
        """From every state, onward and onward comes to an end."""
        distance = [0 if onward == at else -1 for at, onward in enumerate(self._onward)]
        for at in range(len(distance)):
            path: list[int] = []
            while distance[at] == -1:
                distance[at] = -2
                path.append(at)
                at = self._onward[at]
            if distance[at] == -2:
                left = self.world.left(self._states[at])
                raise Violation(f"round and round: {left}", self.trace(path[0]))
            for steps, passed in enumerate(reversed(path), distance[at] + 1):
                distance[passed] = steps
        self.report.longest = max(distance)
