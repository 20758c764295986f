"""What the nodes of the hand-off's model run on: a list of bytes for an engine, a clock, sockets.

A byte of KV is a function of the token and its position, logits are a hash of all the bytes read:
any wrong byte shows. Time passes when somebody says so; what arrives is set, what is sent is kept.
This module knows neither nodes nor requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from hashlib import blake2b

import numpy as np

from kvferry.kernels.engine import Batch, EngineSpec, Logits, Span
from kvferry.kvstore.keys import chain
from kvferry.kvstore.process.logs import SparseLog
from kvferry.kvstore.wire.client import LinkState, Received
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.hello import Welcome
from kvferry.kvstore.wire.server import FromPeer, Peer
from kvferry.kvstore.wire.sockets import SocketCounters

BLOCK = 64
"""As long as a chunk must be, so that a pass of the prefill node computes one block."""
VOCABULARY = 60
QUANTUM = 1.01
"""Seconds that pass at once: more than a probe waits, and twice it more than a connection does."""
ROOT = bytes(16)


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

    def prepare(self) -> bool:
        return False


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

    def _write(self, *line: object) -> None:
        pass


class FakeServer:
    """A node's socket: each `receive` finds one of the `arriving` lots; peers may be gone."""

    def __init__(self) -> None:
        self.counters = SocketCounters()
        self.peer_log = Unsaid(logging.getLogger(__name__))
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
