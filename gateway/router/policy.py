"""Which decode node takes a request, and which prefill nodes it may ask, in order.

Owns what the gateway knows of each node's blocks, from the numbered batches in which nodes report
them, and the score by which nodes are compared. Pure: batches and figures in, decisions out. It
knows no link and no request, and a wrong guess costs time only: nodes look for themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from operator import itemgetter
from struct import iter_unpack

from kvferry.kvstore.errors import ProtocolBroken
from kvferry.kvstore.keys import KEY_BYTES
from kvferry.kvstore.wire.status import KeyBatch

MAX_KEYS = 4 << 20
"""Kept of one node, whatever it says that it has room for."""
COMPANY_TOKENS = 64
"""What one more request in a node's batch weighs, in prompt tokens to compute: a step takes longer
with each. A shared prefix of 640 tokens draws ten requests more to its node than go elsewhere."""
QUEUED_TOKENS = 1024
"""What a request weighs that a full batch must let in first: it waits for another one's end."""


class KnownKeys:
    """The blocks of one node.

    Nothing is known until a full batch has come, and again from a gap in the numbers to the next
    full batch. Keys may also be *expected*: of prompts on their way there, which the node will have
    before anybody who is sent after them.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        """Of the last batch; None: a full one is needed."""
        self._held: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()

    @property
    def synced(self) -> bool:
        return self._number is not None

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def forget(self) -> None:
        """Another process answers at the node's address."""
        self._number = None
        self._held = set()
        self._expected.clear()

    def apply(self, batch: KeyBatch, capacity: int = MAX_KEYS) -> None:
        """Takes a batch; afterwards `synced` says whether a full one must be asked for.

        Raises
        ------
        ProtocolBroken
            More keys than the node has blocks, which are `capacity`. Nothing is known then.
        """
        count = max(len(batch.committed), len(batch.evicted)) // KEY_BYTES
        if count <= capacity:
            self._apply(batch)
            count = len(self._held)
        if count > capacity:
            self._number, self._held = None, set()
            raise ProtocolBroken(f"keys of {count} blocks, of which it has {capacity}")

    def _apply(self, batch: KeyBatch) -> None:
        last = self._number
        if batch.full:
            if last is None or batch.number >= last:  # else it was overtaken by newer ones
                self._number = batch.number
                self._held = set(split(batch.committed))
        elif last is not None and batch.number == last + 1:
            self._number = batch.number
            self._held.difference_update(split(batch.evicted))
            self._held.update(split(batch.committed))
        elif last is not None and batch.number > last:
            self._number = None
            self._held = set()

    def expect(self, keys: bytes) -> None:
        """A prompt with these keys is on its way to the node."""
        self._expected.update(split(keys))

    def expected_no_more(self, keys: bytes) -> None:
        """Undoes one `expect`: by now the node has reported them, or will never have them."""
        for key in split(keys):
            self._expected[key] -= 1
            if self._expected[key] <= 0:
                del self._expected[key]

    def prefix(self, keys: bytes) -> int:
        """How many leading keys the node has or will have."""
        order = list(split(keys))
        count = len(list(takewhile(self._held.__contains__, order)))
        while count < len(order) and (order[count] in self._held or order[count] in self._expected):
            count += 1
        return count


def split(keys: bytes) -> Iterator[bytes]:
    """Keys that were concatenated; a torn one at the end is none."""
    # In C: of a long prompt these are thousands, on the event loop.
    whole = memoryview(keys)[: len(keys) - len(keys) % KEY_BYTES]
    return map(itemgetter(0), iter_unpack(f"{KEY_BYTES}s", whole))


@dataclass(frozen=True, slots=True)
class DecodeView:
    """A decode node as the router sees it."""

    prefix: int
    """Tokens of the prompt that it has."""
    pending: int
    """Prompt tokens of other requests that it, or a prefill node for it, must compute first."""
    requests: int
    slots: int
    """Requests that it runs at once."""
    chosen: int
    """Counts up with every choice: of equals the one that was not chosen longest is next."""
    affinity: int = 0
    """How much the request's session belongs there (`affinity`): decides between equals only."""

    def cost(self, tokens: int) -> int:
        """What a prompt of so many tokens waits for there, in prompt tokens to compute.

        The part that is not there yet, what is ahead of it, the company it will have, and the queue
        beyond a full batch.
        """
        company = COMPANY_TOKENS * min(self.requests, self.slots)
        queue = QUEUED_TOKENS * max(0, self.requests + 1 - self.slots)
        return max(0, tokens - self.prefix) + self.pending + company + queue


@dataclass(frozen=True, slots=True)
class PrefillView:
    """A prefill node as the router sees it."""

    prefix: int
    jobs: int
    chosen: int
    affinity: int = 0


def best_decode(views: Sequence[DecodeView], tokens: int) -> int:
    """The index of the node that a prompt of so many tokens should go to."""
    ranks = [(view.cost(tokens), -view.affinity, view.chosen) for view in views]
    return ranks.index(min(ranks))


def order_prefill(views: Sequence[PrefillView]) -> list[int]:
    """Indices, the best node first: the shortest queue, then the longest prefix."""
    ranks = [(view.jobs, -view.prefix, -view.affinity, view.chosen) for view in views]
    return sorted(range(len(views)), key=ranks.__getitem__)


def affinity(session: bytes, address: str) -> int:
    """How much a session belongs to a node; 0 for a request of no session.

    The node with the highest number among those that are there is the session's: rendezvous
    hashing (Thaler and Ravishankar, 1998). Every gateway comes to the same answer, none remembers
    anything, and only the sessions of a node that goes move elsewhere.
    """
    if not session:
        return 0
    digest = blake2b(address.encode(), digest_size=8, key=session[:64]).digest()
    return 1 + int.from_bytes(digest, "big")
