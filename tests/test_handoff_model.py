"""Every way in which a small hand-off can go, faults included, ends well.

Breadth first over all states of a gateway, a decode node, a prefill node and the channels between
them: two requests of at most two blocks, at most two faults. A turn of a node may find any number
of the messages that wait for it; a channel that holds three makes its sender rest until the other
node has had a turn. The faults: a message lost, or copied to arrive again later; a request aborted;
either node restarted; the connection gone; a hello lost; a second that passes too early.

Two things are proved. *Safety*: no owner's invariant breaks in any state, no findable or computed
block has a wrong byte, no token is wrong, no request ends twice or is refused. *Liveness*: from
every state the run without further faults, in which whatever can be done is done and time passes
only when nothing can, ends in a state where nothing is left of any request. Mutants of the nodes
show that the exploration finds what it looks for.
"""

from __future__ import annotations

import copy
import gc
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from kvferry.decode_node import scheduler as decode_scheduler
from kvferry.decode_node.inbox import Inbox, Transfer
from kvferry.decode_node.receiver import Receiver
from kvferry.decode_node.request import Sequence
from kvferry.decode_node.scheduler import DecodeScheduler
from kvferry.kvstore.blocks import BlockPool
from kvferry.kvstore.wire import Abort
from kvferry.prefill_node.job import Job, JobState
from kvferry.prefill_node.scheduler import PrefillScheduler
from kvferry.tests.handoff_model import (
    Answer,
    DecodeSide,
    Given,
    Machine,
    Number,
    Post,
    PrefillSide,
    Setup,
    generate,
    prompt_of,
    reply,
)

CHANNEL = 3
"""A node whose channel holds so many messages rests until the other one has read some."""
DONE, ABORTED, LOST = -1, -2, -3
"""Outcomes of a request that is over for its gateway; of others, how many tokens came."""

Action = tuple[str | int, ...]
Channel = tuple[Number, ...]


class State(NamedTuple):
    """Everything that there is. A node is the number of its state."""

    faults: int
    """How many may still happen."""
    outcomes: tuple[int, ...]
    gateway: Channel
    """What the decode node has not yet read."""
    decode: int
    prefill: int
    link: str
    """From the decode node: `none`, `connecting`, `mute` (its hello was lost), `ready`, or `cut`
    (the prefill node that it led to is no more)."""
    peer: int
    """What the prefill node calls this link."""
    to_prefill: Channel
    to_decode: Channel
    stale: tuple[tuple[int, Channel], ...]
    """Links that the decode node has closed and the prefill node has not missed yet."""

    @property
    def is_over(self) -> bool:
        return max(self.outcomes) < 0


class Violation(AssertionError):
    """What went wrong, and how one gets there."""

    def __init__(self, why: str, trace: list[str]) -> None:
        super().__init__("\n".join([why, *(f"{at:3} {it}" for at, it in enumerate(trace, 1))]))
        self.why = why
        self.trace = trace


class World:
    """What follows from a state and an action."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.post = Post()
        self.decode = Machine(DecodeSide(setup), self.post)
        self.prefill = Machine(PrefillSide(setup), self.post)
        prompts = range(len(setup.prompts))
        self._generates = [self.post.number(generate(setup, number)) for number in prompts]
        self._aborts = [self.post.number(Abort(number)) for number in prompts]

    def start(self, faults: int) -> State:
        open_ = tuple(0 for _ in self.setup.prompts)
        return State(faults, open_, tuple(self._generates), 0, 0, "none", -1, (), (), ())

    def left(self, state: State) -> str:
        """What is not over; empty when nothing is left of any request."""
        things = {
            "open requests": not state.is_over,
            f"decode node: {self.decode.left[state.decode]}": self.decode.left[state.decode],
            f"prefill node: {self.prefill.left[state.prefill]}": self.prefill.left[state.prefill],
            "messages": state.gateway or state.to_prefill or state.to_decode or state.stale,
        }
        return "; ".join(what for what, is_left in things.items() if is_left)

    def after(self, state: State, action: Action) -> State:
        kind, *arguments = action
        after: State = getattr(self, f"_{kind}")(state, *arguments)
        return after

    # -- what happens without faults -------------------------------------------------------------

    def turns(self, state: State) -> Iterator[list[Action]]:
        """All that can happen but faults and time, in groups; the last one of a group is whole."""
        yield [("up",)] if state.link == "connecting" else []
        waiting = sum(len(messages) for _, messages in state.stale) + len(state.to_prefill)
        full, empty = len(state.to_decode) >= CHANNEL, waiting < CHANNEL
        yield [] if full and empty else list(self._prefill_turns(state, waiting))
        full, empty = waiting >= CHANNEL, len(state.to_decode) < CHANNEL
        yield (
            []
            if full and empty
            else [
                ("decode", requests, found, dies)
                for dies in range((state.link == "cut") + 1)
                for requests in range(len(state.gateway) + 1)
                for found in range(len(state.to_decode) + 1)
            ]
        )

    def _prefill_turns(self, state: State, waiting: int) -> Iterator[Action]:
        for gone in range(bool(state.stale) + 1):
            for before in range(waiting + 1):
                given = self._prefill_given(state, before, 0, gone)
                _, turn = self.prefill.step(state.prefill, given)
                for between in range(waiting - before if turn.computed else 0, -1, -1):
                    yield ("prefill", before, between, gone)

    def _up(self, state: State) -> State:
        used = [peer for peer, _ in state.stale]
        peer = min(number for number in range(len(used) + 1) if number not in used)
        prefill, _ = self.prefill.step(state.prefill, ("meet", peer))
        decode, _ = self.decode.step(state.decode, ("up",))
        return state._replace(decode=decode, prefill=prefill, link="ready", peer=peer)

    def _time(self, state: State) -> State:
        decode, _ = self.decode.step(state.decode, ("time",))
        prefill, _ = self.prefill.step(state.prefill, ("time",))
        return state._replace(decode=decode, prefill=prefill)

    def _prefill_given(self, state: State, before: int, between: int, gone: int) -> Given:
        inbound = [(state.peer, one) for one in state.to_prefill]
        missed: tuple[int, ...] = ()
        if state.stale:
            inbound[:0] = [(peer, one) for peer, messages in state.stale for one in messages]
            missed = tuple(peer for peer, _ in state.stale) if gone else ()
        both = before + between
        return ("turn", tuple(inbound[:before]), tuple(inbound[before:both]), missed)

    def _prefill(self, state: State, before: int, between: int, gone: int) -> State:
        given = self._prefill_given(state, before, between, gone)
        prefill, turn = self.prefill.step(state.prefill, given)
        read = before + between
        stale = []
        for peer, messages in state.stale:
            stale.append((peer, messages[read:]))
            read -= min(read, len(messages))
        came = state.to_decode
        if turn.sent and state.link == "ready":
            came += tuple(one for peer, one in turn.sent if peer == state.peer)
        return State(
            *state[:4],
            prefill,
            *state[5:7],
            state.to_prefill[read:],
            came,
            () if gone else tuple(stale),
        )

    def _decode(self, state: State, requests: int, found: int, dies: int) -> State:
        given = ("turn", state.gateway[:requests], state.to_decode[:found], dies)
        decode, turn = self.decode.step(state.decode, given)
        outcomes = list(state.outcomes)
        for answer in turn.answers:
            outcomes[answer.request] = self._told(outcomes[answer.request], answer)
        state = State(
            state.faults,
            tuple(outcomes),
            state.gateway[requests:],
            decode,
            *state[4:7],
            state.to_prefill + turn.sent if state.link == "ready" else (),
            state.to_decode[found:],
            state.stale,
        )
        if turn.closed:
            state = self._closed(state)
        return state._replace(link="connecting") if turn.connected else state

    def _closed(self, state: State) -> State:
        if state.link == "ready":
            state = state._replace(stale=(*state.stale, (state.peer, state.to_prefill)))
        return state._replace(link="none", peer=-1, to_prefill=(), to_decode=())

    def _told(self, outcome: int, answer: Answer) -> int:
        """The gateway's opinion of an answer."""
        if outcome in (DONE, LOST):
            raise AssertionError("an answer to a request that has ended")
        if answer.ended not in ("", "done"):
            raise AssertionError(f"rejected: {answer.ended}")
        if outcome == ABORTED:
            return outcome
        wanted = reply(self.setup.prompts[answer.request], self.setup.max_tokens)
        if answer.ended:
            assert outcome == len(wanted), "tokens are missing"
            return DONE
        assert answer.place == outcome, "a token is missing or came twice"
        assert answer.token == wanted[answer.place], "a wrong token"
        return outcome + 1

    # -- faults ------------------------------------------------------------------------------------

    def faults(self, state: State) -> Iterator[Action]:
        """Every fault that can happen now."""
        if state.faults:
            yield from (one for one in self._faults(state) if one[0] in self.setup.faults)

    def _faults(self, state: State) -> Iterator[Action]:
        yield ("restart_prefill",)
        yield ("restart_decode",)
        if state.link == "ready":
            yield ("disconnect",)
        for request, outcome in enumerate(state.outcomes):
            if outcome >= 0:
                yield ("abort", request)
        if state.link != "none":
            yield ("late",)
        if state.link == "connecting":
            yield ("mute",)
        for way in ("to_prefill", "to_decode"):
            length = len(getattr(state, way))
            for index in range(length):
                yield ("lose", way, index)
                if length < CHANNEL:
                    yield ("repeat", way, index)

    def fault(self, state: State, action: Action) -> State:
        return self.after(state._replace(faults=state.faults - 1), action)

    _late = _time
    """A second passes while there is something to do."""

    def _mute(self, state: State) -> State:
        return state._replace(link="mute")

    def _lose(self, state: State, way: str, index: int) -> State:
        if way == "to_prefill":
            return state._replace(to_prefill=_without(state.to_prefill, index))
        return state._replace(to_decode=_without(state.to_decode, index))

    def _repeat(self, state: State, way: str, index: int) -> State:
        """The copy may be later than the message by any time."""
        if way == "to_prefill":
            return state._replace(to_prefill=(*state.to_prefill, state.to_prefill[index]))
        return state._replace(to_decode=(*state.to_decode, state.to_decode[index]))

    def _abort(self, state: State, request: int) -> State:
        outcomes = list(state.outcomes)
        outcomes[request] = ABORTED
        gateway = (*state.gateway, self._aborts[request])
        return state._replace(outcomes=tuple(outcomes), gateway=gateway)

    def _restart_prefill(self, state: State) -> State:
        link = "cut" if state.link == "ready" else state.link
        return state._replace(prefill=0, link=link, peer=-1, to_prefill=(), stale=())

    def _restart_decode(self, state: State) -> State:
        outcomes = tuple(
            LOST if outcome >= 0 and self._generates[request] not in state.gateway else outcome
            for request, outcome in enumerate(state.outcomes)
        )
        return self._closed(state)._replace(decode=0, outcomes=outcomes)

    def _disconnect(self, state: State) -> State:
        stale = (*state.stale, (state.peer, state.to_prefill))
        return state._replace(link="cut", peer=-1, to_prefill=(), stale=stale)


def _without(channel: Channel, index: int) -> Channel:
    return channel[:index] + channel[index + 1 :]


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


# -- the real nodes --------------------------------------------------------------------------------

WALKS = 300
APART = (prompt_of([0, 1]), prompt_of([2, 3]))
FEWER = ("lose", "repeat", "abort", "restart_prefill", "restart_decode")
SHARED = Setup("shared", (prompt_of([0, 1]), prompt_of([0, 2])), faults=FEWER)
SMALL = Setup("one-on-decode", APART, decode_blocks=4, prefill_blocks=2)
SETUPS = [
    Setup("apart", APART, faults=FEWER),
    Setup("apart-once", APART, most_faults=1),
    SHARED,
    SMALL,
    Setup("one-on-prefill", (prompt_of([0]), prompt_of([2])), prefill_blocks=1, faults=FEWER),
    Setup("declined", (prompt_of([0, 1]), prompt_of([0])), prefill_blocks=1),
]
PREEMPTED = Setup(
    "preempted",
    (prompt_of([0, 1], 0), prompt_of([2, 3])),
    decode_blocks=5,
    max_tokens=2,
    growth=0,
    faults=("lose", "repeat", "abort", "restart_prefill"),
)


@pytest.fixture(autouse=True)
def quietly() -> Iterator[None]:
    """Copies come and go in cycles by the thousand: collected in larger lots, unlogged."""
    threshold = gc.get_threshold()
    gc.set_threshold(20_000, 50, 50)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)
    gc.set_threshold(*threshold)


def explorer(setup: Setup, faults: int, patch: pytest.MonkeyPatch) -> Explorer:
    patch.setattr(decode_scheduler, "GROWTH_TOKENS", setup.growth)
    return Explorer(setup, faults)


@pytest.mark.B1
@pytest.mark.B2
@pytest.mark.B3
@pytest.mark.D7
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.name)
def test_every_hand_off_ends_well(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    exploring = explorer(setup, setup.most_faults, monkeypatch)
    report = exploring.run()
    print(f"\n{setup.name}: {report}")
    assert report.ends > 1 and report.longest < 40 and report.channel >= CHANNEL
    assert report.faults.keys() == set(setup.faults)
    dice = random.Random(setup.name)
    for _ in range(WALKS):
        wander(exploring.world, dice, length=60)


def test_every_hand_off_ends_well_with_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    test_every_hand_off_ends_well(PREEMPTED, monkeypatch)


class Witness:
    """A machine's steps, each taken by a node too that is neither copied nor merged with others."""

    def __init__(self, machine: Machine[Any], node: DecodeSide | PrefillSide) -> None:
        self._machine = machine
        self._node = node

    def step(self, state: int, given: Given) -> tuple[int, Any]:
        reached, result = self._machine.step(state, given)
        assert self._machine.run(self._node, given) == result, f"it does something else: {given}"
        assert self._machine.number(self._node) == reached, f"it is another one: {given}"
        return reached, result


def wander(world: World, dice: random.Random, length: int) -> None:
    """At each step anything that can happen may, a fault more seldom."""
    witnessed: Any = copy.copy(world)
    witnessed.decode = Witness(world.decode, DecodeSide(world.setup))
    witnessed.prefill = Witness(world.prefill, PrefillSide(world.setup))
    state = world.start(faults=2)
    for _ in range(length):
        if not world.left(state):
            break
        turns = [action for group in world.turns(state) for action in group]
        faults = list(world.faults(state)) if dice.random() < 0.1 else []
        action = dice.choice(faults or turns or [("time",)])
        state = (witnessed.fault if faults else witnessed.after)(state, action)
        if action[0] == "restart_decode":
            witnessed.decode = Witness(world.decode, DecodeSide(world.setup))
        if action[0] == "restart_prefill":
            witnessed.prefill = Witness(world.prefill, PrefillSide(world.setup))


# -- mutants ---------------------------------------------------------------------------------------


def _forgets_to_release(self: PrefillScheduler, job: Job) -> None:
    self.active.remove(job)
    job.state = JobState.DRAINED


def _keeps_aborted_jobs(self: PrefillScheduler, job: Job) -> None:
    job.state = JobState.ABORTED


def _does_not_look_again(self: DecodeScheduler, sequence: Sequence) -> bool:
    keys = sequence.keys
    found = self.pool.match_length(keys)
    if found < len(keys) and self.pool.is_pending(keys[found]):
        sequence.awaited = keys[found]
    return bool(sequence.awaited)


def _cancels_in_silence(self: Receiver, sequence: Sequence) -> None:
    transfer = self.inbox.of_owner(sequence)
    if transfer is not None:
        self.inbox.abort(transfer, acknowledged=True)


def _takes_all_for_landed(
    self: Receiver, transfer: Transfer[Sequence], *, acknowledged: bool, again: bool = False
) -> None:
    self.inbox.abort(transfer, acknowledged=acknowledged)
    self._release(transfer, transfer.last)


def _finds_the_dead(self: Inbox[Sequence], number: int, epoch: int) -> Transfer[Sequence] | None:
    return self._transfers.get(number)


def _nobody(*arguments: object) -> list[Job]:
    return []


def _nothing(*arguments: object, **more: object) -> None:
    pass


MUTANTS = {
    "blocks-not-released": (1, PrefillScheduler, "_let_go", _forgets_to_release, "held by nobody"),
    "aborted-jobs-kept": (1, PrefillScheduler, "abort", _keeps_aborted_jobs, "1 jobs"),
    "lost-peers-forgotten": (1, PrefillScheduler, "of_peer", _nobody, "1 jobs"),
    "claims-not-cleared": (1, BlockPool, "_unclaim", _nothing, "a claim on a block nobody holds"),
    "waits-for-ever": (0, DecodeScheduler, "_awaits_other", _does_not_look_again, "open requests"),
    "drained-ignored": (1, Inbox, "drained", _nothing, "round and round: .* draining transfers"),
    "dead-transfers-found": (1, Inbox, "find", _finds_the_dead, "IndexError"),
    "death-unnoticed": (1, Receiver, "_lost", _nothing, "live transfers"),
    "loss-unnoticed": (1, Receiver, "_progress", _nothing, "round and round: open requests"),
    "cancelled-in-silence": (2, Receiver, "cancel", _cancels_in_silence, "1 jobs"),
    "landed-by-mistake": (1, Receiver, "_fail", _takes_all_for_landed, "a wrong token"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, owner, method, mutant, expected = MUTANTS[name]
    monkeypatch.setattr(mutant, "__name__", method)  # copies find bound methods by name
    monkeypatch.setattr(owner, method, mutant)
    setup = SHARED if owner is DecodeScheduler else SMALL
    with pytest.raises(Violation, match=expected) as found:
        explorer(setup, faults, monkeypatch).run()
    print(f"\n{name}: {found.value}")
    assert len(found.value.trace) < 20
