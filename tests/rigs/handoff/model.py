"""The two nodes of a hand-off as values: a state, what is given to it, the next state.

The nodes are the real ones, with their schedulers, pools, transfers and jobs; only sockets, the
engine and time are replaced (`fakes.py`). `view` is all of a node that can influence what comes,
with blocks and keys renamed; `prove` holds in every state. This module knows neither channels nor
faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, cast

from kvferry.decode_node.node import DecodeLimits, DecodeNode
from kvferry.decode_node.transfers import TransferState, Windows
from kvferry.kvstore.tiers.device import BlockPool
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.generation import Done, Rejected, StepOutput
from kvferry.kvstore.wire.server import FromPeer, Peer, Server
from kvferry.prefill_node.node import PrefillNode
from kvferry.tests.rigs.handoff.fakes import (
    BLOCK,
    QUANTUM,
    Clock,
    FakeServer,
    Link,
    ListEngine,
    kv_of,
    references,
)
from kvferry.tests.rigs.handoff.setup import ADDRESS, Number, Post, Setup, View

GATEWAY = Peer(b"gateway", "gateway", 1)
LIMITS = DecodeLimits(16, 512, 256, local_prefill=0, reuse=True, forced_ids=False)


# -- the nodes -------------------------------------------------------------------------------------


class Side:
    """A node with its engine and its clock. Copies of it share nothing."""

    def __init__(self, setup: Setup, num_blocks: int) -> None:
        self.setup = setup
        self.clock = Clock()
        self.engine = ListEngine(num_blocks)
        self.server = FakeServer()

    def time(self) -> None:
        self.clock.now += QUANTUM

    def _prove_pool(self, pool: BlockPool) -> None:
        expected = references(self.setup.prompts)
        for block, key in pool._key_of.items():
            assert self.engine.content[block] == expected[key], "a findable block is wrong"

    def _names(self) -> dict[bytes, int]:
        return {key: at for at, key in enumerate(references(self.setup.prompts))}


class DecodeSide(Side):
    """The decode node, the client it has, and what its last turn sent."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.decode_blocks)
        self.links: list[Link] = []
        self.sent: list[AnyMessage] = []
        limits = replace(LIMITS, reuse=setup.reuse)
        server = cast(Server, self.server)
        self.node = DecodeNode(self.engine, server, self._connect, limits, self.clock)
        # One block: the next one waits for its return.
        self.node.receiver.transfers.windows = Windows(BLOCK, BLOCK, BLOCK)

    def _connect(self, address: str) -> Client:
        self.links.append(Link(address, self.sent))
        return cast(Client, self.links[-1])

    def up(self) -> None:
        self.links[0].state = LinkState.READY

    def turn(
        self, post: Post, requests: tuple[Number, ...], found: tuple[Number, ...], dies: int
    ) -> DecodeTurn:
        """A turn that finds these messages, and maybe the end of its connection."""
        had = len(self.links)
        for link in self.links:
            link.arriving, link.dies = [post[one] for one in found], bool(dies)
        self.server.arriving = [[FromPeer(GATEWAY, post[one].message, ()) for one in requests]]
        self.node.turn()
        assert not any(link.arriving for link in self.links if not link.closed), "left unread"
        made = len(self.links) - had
        self.links[:] = [link for link in self.links if not link.closed]
        sent = tuple(post.number(one) for one in self.sent)
        answers = tuple(answer for _, message, _ in self.server.sent for answer in _told(message))
        self.sent.clear()
        self.server.sent.clear()
        return DecodeTurn(sent, had + made > len(self.links), made > 0, answers)

    def prove(self) -> None:
        self.node.check()
        self._prove_pool(self.node.pool)
        for sequence in self.node.scheduler.running:
            kv = self.engine.context(sequence.blocks, sequence.computed)
            assert kv == kv_of(tuple(sequence.tokens), 0)[: len(kv)], "a context is wrong"

    def left(self) -> str:
        """What it still holds."""
        pool, transfers = self.node.pool, self.node.receiver.transfers
        things = {
            "requests": len(self.node.requests),
            "held blocks": pool.num_held,
            "claims": len(pool._pending),
            "live transfers": transfers.num_live,
            "draining transfers": transfers.num_draining,
        }
        return ", ".join(f"{count} {what}" for what, count in things.items() if count)

    def view(self) -> View:
        names = self._names()
        scheduler, receiver = self.node.scheduler, self.node.receiver
        everybody = scheduler.running + scheduler.waiting
        order = _order(self.clock, [(one, one.request.timeline.arrived) for one in everybody])
        sequences = tuple(
            (
                one.request.message.request,
                one.phase.value,
                one.computed,
                len(one.tokens),
                len(one.spare),
                one.attempts[ADDRESS],
                _pending(self.node.pool, one.awaited, names),
                order[id(one)],
            )
            for one in everybody
        )
        tables = [one.blocks for one in scheduler.running]
        avoided = receiver.links._avoided.get(ADDRESS, 0.0) - self.clock.now
        return (
            sequences,
            tuple(sorted(number for _, number in self.node.requests._ended)),
            _view_pool(self.node.pool, tables, names),
            receiver.transfers._next,
            tuple(self._view_transfer(one) for one in receiver.transfers.all()),
            tuple(link.state.value for link in self.links),
            max(0, -int(-avoided // QUANTUM)),
        )

    def _view_transfer(self, one: Any) -> View:
        assert one.epoch == one.number
        age = min(2, self.clock.age(one.moved_at))
        if one.state is TransferState.ABORTED:
            return (one.number, "aborted", age)
        return (
            one.number,
            one.owner.request.message.request,
            one.first,
            one.last,
            one.state.value,
            one.offered,
            tuple(sorted(one.landed)),
            one.complete is not None,
            one.standing,
            one.window,
            age,
        )


class Answer(NamedTuple):
    """What a gateway is told of a request: a token, or that it has ended (or was rejected)."""

    request: int
    place: int
    token: int
    ended: str


class DecodeTurn(NamedTuple):
    sent: tuple[Number, ...]
    """Over the client it had when the turn began."""
    closed: bool
    connected: bool
    answers: tuple[Answer, ...]


def _told(message: AnyMessage) -> Iterator[Answer]:
    match message:
        case StepOutput(tokens):
            yield from (Answer(one.request, one.index, one.token, "") for one in tokens)
        case Done(request):
            yield Answer(request, -1, -1, "done")
        case Rejected(request, code):
            yield Answer(request, -1, -1, code)


class PrefillSide(Side):
    """The prefill node; its peers are numbered."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, setup.prefill_blocks)
        server = cast(Server, self.server)
        self.node = PrefillNode(
            self.engine, server, BLOCK, max_queued=8, reuse=setup.reuse, clock=self.clock
        )

    def meet(self, peer: int) -> None:
        self.server.peers[_peer(peer).identity] = _peer(peer)

    def turn(
        self,
        post: Post,
        before: tuple[tuple[int, Number], ...],
        between: tuple[tuple[int, Number], ...],
        gone: tuple[int, ...],
    ) -> PrefillTurn:
        """A turn that finds messages before its pass and between its layers, and peers gone."""
        server = self.server
        server.arriving = [
            [FromPeer(_peer(peer), post[one].message, ()) for peer, one in lot]
            for lot in (before, between)
        ]
        server.gone = {_peer(peer).identity for peer in gone}
        self.node.turn()
        assert not server.peers.keys() & server.gone, "a peer's end went unnoticed"
        sent = tuple(
            (int(peer.identity), post.number(message, payloads))
            for peer, message, payloads in server.sent
        )
        computed = not server.arriving
        server.sent.clear()
        server.arriving, server.gone = [], set()
        return PrefillTurn(sent, computed)

    def prove(self) -> None:
        self.node.check()
        self._prove_pool(self.node.pool)

    def left(self) -> str:
        """What it still holds."""
        scheduler = self.node.scheduler
        things = {
            "jobs": len(scheduler.running) + len(scheduler.waiting),
            "held blocks": self.node.pool.num_held,
            "claims": len(self.node.pool._pending),
        }
        return ", ".join(f"{count} {what}" for what, count in things.items() if count)

    def view(self) -> View:
        names = self._names()
        scheduler = self.node.scheduler
        jobs = scheduler.running + scheduler.waiting
        order = _order(self.clock, [(one, one.arrived) for one in jobs])
        views = tuple(
            (
                one.peer.identity,
                one.number,
                one.first,
                one.last,
                one.keys[-1],
                one.state.value,
                one.computed,
                one.sent,
                one.credit,
                one.prefix,
                _pending(self.node.pool, one.awaited, names),
                order[id(one)],
            )
            for one in jobs
        )
        tables = [one.blocks for one in scheduler.running]
        peers = tuple(sorted(self.server.peers))
        newest = tuple(sorted(self.node.offers.newest.items()))
        return (views, _view_pool(self.node.pool, tables, names), peers, newest)


class PrefillTurn(NamedTuple):
    sent: tuple[tuple[int, Number], ...]
    computed: bool
    """Whether there was a pass, between whose layers messages can come."""


@cache
def _peer(number: int) -> Peer:
    return Peer(b"%d" % number, "decode", 1)


# -- views -----------------------------------------------------------------------------------------


def _order(clock: Clock, arrivals: list[tuple[Any, float]]) -> dict[int, View]:
    """For each its rank by arrival and its age, which for the newest one is only new or not."""
    arrivals = sorted(arrivals, key=lambda one: one[1])
    newest = clock.age(arrivals[-1][1]) if arrivals else 0
    too_old = max(0, newest - 1)
    return {
        id(one): (rank, clock.age(arrived) - too_old)
        for rank, (one, arrived) in enumerate(arrivals)
    }


def _pending(pool: BlockPool, key: bytes, names: dict[bytes, int]) -> int:
    """A key that is waited for matters as long as somebody fills its block."""
    return names[key] if pool.is_pending(key) else -1


def _view_pool(pool: BlockPool, tables: list[list[int]], names: dict[bytes, int]) -> View:
    alias: dict[int, int] = {}
    for table in tables:
        for block in table:
            alias.setdefault(block, len(alias))
    return (
        tuple(tuple(alias[block] for block in table) for table in tables),
        tuple(names[pool._key_of[block]] for block in pool._cached),
        tuple(sorted((names[k], alias[b]) for k, b in pool._block_of.items() if b in alias)),
        tuple(sorted((names[k], alias.get(b, -1)) for k, b in pool._pending.items())),
    )
