"""The two nodes of a hand-off as values: a state, what is given to it, the next state.

The nodes are the real ones, with their schedulers, pools, inbox and jobs; only sockets, the engine
and time are replaced: messages come as arguments, an engine is a list of bytes, and time passes
when somebody says so. A turn of a node depends on nothing but its own state and what it is given,
so `Machine` numbers the states of one and runs each turn once. `view` is all of a node that can
influence what comes, with blocks and keys renamed; `prove` holds in every state. This module knows
neither channels nor faults.
"""

from __future__ import annotations

import io
import logging
import marshal
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from hashlib import blake2b
from types import CellType, FunctionType
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np
from msgspec import Struct

from kvferry.decode_node.inbox import TransferState, Windows
from kvferry.decode_node.node import DecodeLimits, DecodeNode
from kvferry.kernels.engine import Batch, EngineSpec, Logits, Span
from kvferry.kvstore.blocks import BlockPool
from kvferry.kvstore.keys import chain, pack_tokens
from kvferry.kvstore.link import Client, LinkState, Received
from kvferry.kvstore.router import FromPeer, Peer, Server
from kvferry.kvstore.sockets import LinkCounters
from kvferry.kvstore.sparse_log import SparseLog
from kvferry.kvstore.wire import (
    AnyMessage,
    Done,
    Generate,
    Rejected,
    Sampling,
    StepOutput,
    Welcome,
)
from kvferry.prefill_node.node import PrefillNode

BLOCK = 64
"""As long as a chunk must be, so that a pass of the prefill node computes one block."""
VOCABULARY = 60
QUANTUM = 1.01
"""Seconds that pass at once: more than a probe waits, and twice it more than a connection does."""
ROOT = bytes(16)
ADDRESS = "P"
GATEWAY = Peer(b"gateway", "gateway", 1)
LIMITS = DecodeLimits(16, 512, 256, local_prefill=0, reuse=True, forced_ids=False)

View = tuple[Any, ...]
Number = int
"""Of a message in the `Post`."""


FAULTS = (
    "late", "lose", "repeat", "mute", "abort", "restart_prefill", "restart_decode", "disconnect"
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """Two prompts, the room on both sides, how many tokens are wanted, what may go wrong."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    decode_blocks: int = 8
    prefill_blocks: int = 8
    max_tokens: int = 1
    reuse: bool = True
    growth: int = 64
    """Tokens that the decode node reserves at admission; with few of them it preempts."""
    faults: tuple[str, ...] = FAULTS
    most_faults: int = 2


def prompt_of(blocks: Sequence[int], more: int = 1) -> tuple[int, ...]:
    """Whole blocks that differ by their numbers, and `more` tokens behind them."""
    tokens = [(17 * at + 11 * block) % VOCABULARY for block in blocks for at in range(BLOCK)]
    return (*tokens, *range(more))


def generate(setup: Setup, number: int) -> Generate:
    prompt = setup.prompts[number]
    return Generate(
        request=number,
        prompt=pack_tokens(prompt),
        root=ROOT,
        keys=b"".join(chain(ROOT, prompt, BLOCK)),
        max_tokens=setup.max_tokens,
        min_tokens=0,
        eos_ids=(),
        stop_token_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=1,
        choices=1,
        prefill_nodes=(ADDRESS,),
    )


class Post:
    """Numbers messages by their content; readings of a clock do not count as such."""

    def __init__(self) -> None:
        self._numbers: dict[View, Number] = {}
        self._messages: list[Received] = []

    def number(self, message: AnyMessage, payloads: Sequence[bytes] = ()) -> Number:
        fields = [getattr(message, name) for name in message.__struct_fields__]
        content = [value for value in fields if not isinstance(value, float)]
        view = (type(message), *content, *payloads)
        if view not in self._numbers:
            self._numbers[view] = len(self._messages)
            self._messages.append(Received(message, cast(Any, tuple(payloads))))
        return self._numbers[view]

    def __getitem__(self, number: Number) -> Received:
        return self._messages[number]

    def name(self, number: Number) -> str:
        message = cast(Any, self._messages[number].message)
        about = getattr(message, "transfer", getattr(message, "request", ""))
        return f"{type(message).__name__}({about})"


# -- the engine ------------------------------------------------------------------------------------


@cache
def kv_of(tokens: tuple[int, ...], start: int) -> bytes:
    """A byte a token, never 0, of the token and its position."""
    return bytes((7 * token + 13 * at) % 251 + 1 for at, token in enumerate(tokens, start))


@cache
def logits_of(kv: bytes) -> Logits:
    row = np.zeros(VOCABULARY, np.float32)
    row[int.from_bytes(blake2b(kv, digest_size=4).digest(), "little") % VOCABULARY] = 1
    return row


@cache
def reply(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The tokens that must come after `prompt`."""
    tokens = prompt
    for _ in range(count):
        tokens += (int(logits_of(kv_of(tokens, 0)).argmax()),)
    return tokens[len(prompt) :]


@cache
def references(prompts: tuple[tuple[int, ...], ...]) -> dict[bytes, bytes]:
    """What a block with this key must contain."""
    found = {}
    for prompt in prompts:
        for index, key in enumerate(chain(ROOT, prompt, BLOCK)):
            start = index * BLOCK
            found[key] = kv_of(prompt[start : start + BLOCK], start)
    return found


class ListEngine:
    """An engine of one layer whose pool is a list of bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.content = [bytes(BLOCK)] * num_blocks

    @property
    def spec(self) -> EngineSpec:
        return _spec(len(self.content))

    def forward(self, batch: Batch, between_layers: Callable[[], None]) -> Logits:
        between_layers()
        for span in batch.spans:
            self._write_span(span)
        rows = [self.context(one.blocks, one.end) for one in batch.spans if one.wants_logits]
        return (
            np.stack([logits_of(row) for row in rows])
            if rows
            else np.empty((0, VOCABULARY), np.float32)
        )

    def _write_span(self, span: Span) -> None:
        kv = kv_of(tuple(span.tokens), span.start)
        first = span.start // BLOCK
        table = span.blocks[first : -(-span.end // BLOCK)]
        before = span.start - first * BLOCK
        whole = b"".join(self.content[block] for block in table)
        whole = whole[:before] + kv + whole[before + len(kv) :]
        for index, block in enumerate(table):
            self.content[block] = whole[index * BLOCK : (index + 1) * BLOCK]

    def context(self, blocks: Sequence[int], end: int) -> bytes:
        used = blocks[: -(-end // BLOCK)]
        return b"".join([self.content[block] for block in used])[:end]

    def read(self, block: int) -> bytes:
        return self.content[block]

    def write(self, block: int, payload: bytes | memoryview) -> None:
        self.content[block] = bytes(payload)

    def copy(self, source: int, target: int) -> None:
        self.content[target] = self.content[source]


@cache
def _spec(num_blocks: int) -> EngineSpec:
    return EngineSpec(BLOCK, num_blocks, BLOCK, 1, VOCABULARY, 1024, {})


# -- time and sockets ------------------------------------------------------------------------------


class Clock:
    """Stands still but for a trifle at each reading, so that what comes later is later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-7
        return self.now

    def age(self, reading: float) -> int:
        """Whole quanta since a reading."""
        return round((self.now - reading) / QUANTUM)


class Link:
    """The decode node's client of the prefill node. Hello is one step: its state is set."""

    welcome: Welcome | None = None
    refusal = None

    def __init__(self, address: str, sent: list[AnyMessage]) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.arriving: list[Received] = []
        self.dies = False
        self.closed = False
        self._sent = sent

    def send(self, message: AnyMessage) -> bool:
        if self.state is LinkState.READY:
            self._sent.append(message)
        return self.state is LinkState.READY

    def receive(self) -> Iterator[Received]:
        while self.arriving and self.state is LinkState.READY:
            yield self.arriving.pop(0)
        if self.dies:
            self.state = LinkState.DEAD

    def tick(self, now: float) -> None:
        pass

    def silence(self, now: float) -> float:
        return 0.0

    def to_local(self, server_time: float) -> float:
        return server_time

    def close(self) -> None:
        self.closed = True


class Unsaid(SparseLog):
    """Log lines are no part of a state."""

    def _say(self, *line: object) -> None:
        pass


class FakeServer:
    """A node's socket: each `receive` finds one of the `arriving` lots; peers may be gone."""

    def __init__(self) -> None:
        self.counters = LinkCounters()
        self.said = Unsaid(logging.getLogger(__name__))
        self.peers: dict[bytes, Peer] = {}
        self.arriving: list[list[FromPeer]] = []
        self.gone: set[bytes] = set()
        self.sent: list[tuple[Peer, AnyMessage, tuple[bytes, ...]]] = []
        self._lost: list[Peer] = []

    def receive(self) -> Iterator[FromPeer]:
        yield from self.arriving.pop(0) if self.arriving else ()

    def send(self, peer: Peer, message: AnyMessage, payloads: Sequence[bytes] = ()) -> bool:
        if peer.identity in self.gone:
            self._lose(peer)
            return False
        self.sent.append((peer, message, tuple(payloads)))
        return True

    def ignored(self, peer: Peer, message: AnyMessage) -> None:
        raise AssertionError(f"a {peer.role} sent a {type(message).__name__}")

    def _lose(self, peer: Peer) -> None:
        if self.peers.pop(peer.identity, None) is not None:
            self._lost.append(peer)

    def tick(self, now: float) -> None:
        for peer in list(self.peers.values()):
            if peer.identity in self.gone:
                self._lose(peer)

    def take_lost(self) -> list[Peer]:
        lost, self._lost = self._lost, []
        return lost


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
        self.node.receiver.inbox.windows = Windows(BLOCK, BLOCK, BLOCK)

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
        pool, inbox = self.node.pool, self.node.receiver.inbox
        things = {
            "requests": len(self.node.desk),
            "held blocks": pool.num_held,
            "claims": len(pool._pending),
            "live transfers": inbox.num_live,
            "draining transfers": inbox.num_draining,
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
            tuple(sorted(number for _, number in self.node.desk._ended)),
            _view_pool(self.node.pool, tables, names),
            receiver.inbox._next,
            tuple(self._view_transfer(one) for one in receiver.inbox.all()),
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
            "jobs": len(scheduler.active) + len(scheduler.waiting),
            "held blocks": self.node.pool.num_held,
            "claims": len(self.node.pool._pending),
        }
        return ", ".join(f"{count} {what}" for what, count in things.items() if count)

    def view(self) -> View:
        names = self._names()
        scheduler = self.node.scheduler
        jobs = scheduler.active + scheduler.waiting
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
        tables = [one.blocks for one in scheduler.active]
        peers = tuple(sorted(self.server.peers))
        newest = tuple(sorted(self.node._newest.items()))
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


# -- copies ----------------------------------------------------------------------------------------

_kept: dict[int, Any] = {}
"""By their ids: values that no copy needs for itself, and functions made inside functions."""


class _Saver(pickle.Pickler):
    """Pickles a node. What cannot change is shared by all copies; a function made inside a function
    is made anew over what it closes over, so that the copy's is over the copy."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and "<locals>" in value.__qualname__:
            made = _kept.setdefault(id(value.__code__), value)
            contents = tuple(cell.cell_contents for cell in value.__closure__ or ())
            return _inner_function, (id(made.__code__), contents)
        parameters = getattr(type(value), "__dataclass_params__", None)
        is_frozen = parameters is not None and parameters.frozen
        if is_frozen or isinstance(value, type | Enum | Struct):
            _kept[id(value)] = value
            return _constant, (id(value),)
        return NotImplemented


def _inner_function(number: int, contents: tuple[Any, ...]) -> FunctionType:
    made = _kept[number]
    cells = tuple(map(CellType, contents))
    return FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, cells)


def _constant(number: int) -> Any:
    return _kept[number]


def _saved(node: Side) -> bytes:
    buffer = io.BytesIO()
    _Saver(buffer, 5).dump(node)
    return buffer.getvalue()


# -- numbered states -------------------------------------------------------------------------------

Node = TypeVar("Node", DecodeSide, PrefillSide)
Given = tuple[Any, ...]
"""The name of a method of a node, and its arguments."""


class Machine(Generic[Node]):
    """The states of one node by number, 0 at its start. What was run once is known."""

    def __init__(self, start: Node, post: Post) -> None:
        self.left: list[str] = []
        """By state: what the node still holds."""
        self._post = post
        self._numbers: dict[bytes, int] = {}
        self._saved: list[bytes] = []
        self._known: dict[tuple[int, Given], tuple[int, Any]] = {}
        self._enter(start)

    @property
    def num_states(self) -> int:
        return len(self._saved)

    @property
    def num_runs(self) -> int:
        return len(self._known)

    def step(self, state: int, given: Given) -> tuple[int, Any]:
        """The next state, and what the method returned."""
        known = self._known.get((state, given))
        if known is None:
            node: Node = pickle.loads(self._saved[state])
            result = self.run(node, given)
            node.prove()
            known = self._known[state, given] = (self._enter(node), result)
        return known

    def run(self, node: Node, given: Given) -> Any:
        name, *arguments = given
        if name == "turn":
            arguments.insert(0, self._post)
        return getattr(node, name)(*arguments)

    def number(self, node: Node) -> int | None:
        """Of a state that is known."""
        return self._numbers.get(_digest(node.view()))

    def _enter(self, node: Node) -> int:
        number = self._numbers.setdefault(_digest(node.view()), len(self._saved))
        if number == len(self._saved):
            self._saved.append(_saved(node))
            self.left.append(node.left())
        return number


def _digest(view: View) -> bytes:
    return blake2b(marshal.dumps(view, 2), digest_size=16).digest()
