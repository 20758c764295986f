"""Two nodes, a gateway and the channels between them: what can happen in a state, and what follows.

A turn of a node may find any number of the messages that wait for it; a channel that holds three
makes its sender rest until the other node has had a turn. The faults: a message lost, or copied to
arrive again later; a request aborted; either node restarted; the connection gone; a hello lost; a
second that passes too early. This module explores nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvferry.kvstore.wire.generation import Abort
from kvferry.tests.rigs.handoff.fakes import reply
from kvferry.tests.rigs.handoff.machine import Given, Machine
from kvferry.tests.rigs.handoff.model import Answer, DecodeSide, PrefillSide
from kvferry.tests.rigs.handoff.setup import Number, Post, Setup, generate

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
