"""A node's side of the store: offer finished blocks, load a prefix, ship through the arena.

Owns the link to the store (and makes another when it dies), the mapping of the arena, and the copy
into and out of it. Nothing here waits: the node's loop calls `turn` every round and polls `sockets`
beside its own. It knows no pool and no request: bytes come from and go to callables of the node.

Without a store every call is harmless: nothing is accepted, a fetch ends at once, and the node
computes. How a node uses it:

    store = StoreClient(lambda: connect(address), block_bytes)
    each round      store.turn()
    a block is done store.put(tenant, parent, depth, keys, read)
    a prompt comes  fetch = store.fetch(keys, first, deadline_s=…)
    each round      while fetch.ready and there is time: fetch.take(write)
    fetch.ended     blocks [first, first + fetch.taken) are in the pool, verified; compute the rest
    no longer       fetch.cancel()
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq

from kvferry.kvstore.keys import checksum
from kvferry.kvstore.link import Client, LinkState
from kvferry.kvstore.shared_memory import ArenaUnavailable, SharedMemory
from kvferry.kvstore.store_messages import (
    Attach,
    Attached,
    CacheReply,
    CacheRequest,
    CancelFetch,
    Commit,
    Damaged,
    Delivered,
    Fetch,
    FetchEnded,
    GiveBack,
    Granted,
    Holding,
    Keeping,
    Leased,
    Locate,
    Located,
    Mapped,
    Release,
    Taken,
)
from kvferry.kvstore.wire import AnyMessage

log = logging.getLogger(__name__)

Transfer = Literal["auto", "arena", "inline"]
Read = Callable[[int], "bytes | memoryview"]
"""The bytes of the n-th block of a call; valid until the next call."""
Write = Callable[[memoryview], "bytes | memoryview"]
"""Copies a block to its place and returns a view of the copy, which is what gets verified."""

RETRY_SECONDS = 1.0
"""Between a link's end and the next one."""
WINDOW_BYTES = 32 << 20
"""Of a fetch: handed out and not taken."""
KNOWN_SECONDS = 30.0
"""How long a block that was seen in the store is not offered to it again."""
MAX_KNOWN = 1 << 16
ATTACH_SECONDS = 10.0
"""What a starting node gives its store, which may be reading its disk."""
LAST_BLOCKS_MS = 1000
"""What a node that ends gives its last blocks to reach the store."""
ATTACH_AGAIN_SECONDS = 2.0
"""Unless there was an answer by then. A store that reads its disk answers when it has."""
KEEPING_SECONDS = 2.0
"""How often a node that ships says what of it is still to be copied."""
KEEPING_TIMES = 4
"""How often it says so after the last shipment: one may be lost."""
HOLDING_SECONDS = 1.0
"""Without a slot to write for so long, a node says so: something may have been lost on its way."""
LATE_SECONDS = 1.0
"""Blocks of a fetch that ends by its deadline may still be under way for so long."""


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A block in a slot of the arena, for another node of the same host."""

    store: int
    """Incarnation of the store whose arena it is."""
    slot: int
    checksum: int


@dataclass(slots=True)
class _Handed:
    checksum: int
    tier: str
    slot: int = -1
    payload: memoryview | None = None
    late_at: float = 0.0


class Loading:
    """One fetch. Blocks come in order; `take` them as there is time."""

    def __init__(
        self, client: StoreClient, number: int, keys: Sequence[bytes], first: int, deadline: float
    ) -> None:
        self.first = first
        self.taken = 0
        """Blocks copied and verified: `[first, first + taken)`."""
        self.from_host = 0
        self.from_disk = 0
        self.number = number
        self.deadline = deadline
        self._client = client
        self._keys = keys
        self._handed: deque[_Handed] = deque()
        self._over = ""
        self._untold = 0

    @property
    def ready(self) -> int:
        """Blocks that can be taken now."""
        return len(self._handed)

    @property
    def ended(self) -> str:
        """Empty while blocks may come; then why none does: `complete`, `short`, `deadline`,
        `damaged`, `cancelled`, `refused`, `lost` (the link) or `no store`."""
        return "" if self._handed else self._over

    def take(self, write: Write) -> bool:
        """Copies the next block through `write` and verifies the copy.

        False when the copy is not what it should be: the load has ended before this block, and
        what was written there is worth nothing.
        """
        handed = self._handed.popleft()
        if not self._client._copied(handed, write):
            self._client._spoiled(self, handed, self._keys[self.first + self.taken])
            return False
        self.taken += 1
        if handed.tier == "d":
            self.from_disk += 1
        else:
            self.from_host += 1
        self._untold += 1
        self._client._tell_taken(self)
        return True

    def cancel(self) -> None:
        """Nothing more is wanted. Harmless when it has ended."""
        self._client._cancel(self, "cancelled")


class Asked:
    """A question to the store; `answer` is None until it has come. `lost`: none will."""

    def __init__(self) -> None:
        self.answer: Any = None
        self.lost = False


class StoreClient:
    """`connect` makes a link to the store; it is called again after each link's death."""

    def __init__(
        self,
        connect: Callable[[], Client],
        block_bytes: int,
        *,
        transfer: Transfer = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._connect = connect
        self._block_bytes = block_bytes
        self._transfer = transfer
        self._clock = clock
        self._link: Client | None = None
        self._retry_at = 0.0
        self._attach_at = 0.0
        self._lent: set[int] = set()
        """Slots that another node is still to copy."""
        self._keeping_at = self._keep_until = 0.0
        self._attached: Attached | None = None
        self._arena: SharedMemory | None = None
        self._unmapped: list[SharedMemory] = []
        """Arenas of dead stores of which somebody still holds a view."""
        self._stock: deque[int] = deque()
        """Slots that this node may write."""
        self._grants = 0
        """The last grant that has come."""
        self._holding_at = 0.0
        self._loads: dict[int, Loading] = {}
        self._asks: dict[int, Asked] = {}
        self._known: OrderedDict[bytes, float] = OrderedDict()
        self._next = 1

    # -- the loop -------------------------------------------------------------------------------

    @property
    def available(self) -> bool:
        """Whether a store is there and knows how blocks travel."""
        return self._attached is not None

    @property
    def shared(self) -> bool:
        """Whether blocks go through the arena and not through messages."""
        return self._arena is not None

    @property
    def incarnation(self) -> int:
        """Of the store whose arena is mapped; 0: none is."""
        return self._incarnation if self.shared else 0

    @property
    def room(self) -> int:
        """How many blocks `put` would take now."""
        return len(self._stock)

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """What to poll for reading; another list after each `turn`."""
        return [] if self._link is None else [self._link.socket, self._link.monitor]

    @property
    def links(self) -> list[Client]:
        """For the ledger and for faults."""
        return [] if self._link is None else [self._link]

    def turn(self) -> None:
        """Takes what has come, keeps the link, ends what is over. Call every round."""
        now = self._clock()
        link = self._link
        if link is None:
            if now >= self._retry_at:
                self._link = self._connect()
                self._link.tick(now)
            return
        link.tick(now)
        for received in link.receive():
            self._take(received.message, received.payloads, now)
        if link.state in (LinkState.DEAD, LinkState.REFUSED):
            self._lose(link, now)
            return
        if link.state is LinkState.READY and self._attached is None and now >= self._attach_at:
            self._attach_at = now + ATTACH_AGAIN_SECONDS
            link.send(Attach(self._block_bytes, shared=self._transfer != "inline"))
        if self._stock:
            self._holding_at = now + HOLDING_SECONDS
        elif self._attached is not None and now >= self._holding_at:
            self._holding_at = now + HOLDING_SECONDS
            link.send(Holding(self._grants, ()))
        if self._attached is not None and now >= self._keeping_at and now < self._keep_until:
            self._keeping_at = now + KEEPING_SECONDS
            link.send(Keeping(tuple(self._lent)))
        late = now - LATE_SECONDS
        for load in [it for it in self._loads.values() if not it._over and it.deadline < late]:
            self._cancel(load, "deadline")

    def close(self) -> None:
        """Lets go of the store; granted slots return to it with the link's end."""
        if self._link is not None:
            self._link.send(GiveBack(tuple(self._stock)))
            self._lose(self._link, self._clock(), LAST_BLOCKS_MS)
        for arena in self._unmapped:
            arena.close()

    def _lose(self, link: Client, now: float, linger_ms: int = 0) -> None:
        if link.refusal is not None:
            log.error("the store refuses this node: %s", link.refusal)
        if self._attached is not None:
            self.counters["stores_lost"] += 1
        link.close(linger_ms)
        self._link, self._attached, self._attach_at = None, None, 0.0
        self._lent.clear()
        self._retry_at = now + RETRY_SECONDS
        self._stock.clear()
        self._grants = 0
        self._known.clear()
        for load in self._loads.values():
            load._handed.clear()
            load._over = "lost"
        self._loads.clear()
        for asked in self._asks.values():
            asked.lost = True
        self._asks.clear()
        if self._arena is not None:
            self._unmapped.append(self._arena)
            self._arena = None
        self._unmap()

    def _unmap(self) -> None:
        """A store that is gone gets its slots back when this has succeeded."""
        for arena in list(self._unmapped):
            try:
                arena.close()
            except BufferError:  # a view of it is still out there
                continue
            self._unmapped.remove(arena)

    # -- messages -------------------------------------------------------------------------------

    def _take(self, message: AnyMessage, payloads: tuple[memoryview, ...], now: float) -> None:
        match message:
            case Attached():
                self._map(message)
            case Granted(number, slots):
                self._granted(number, slots)
            case Leased() | Delivered():
                self._handed_out(message, payloads, now)
            case FetchEnded(number, reason):
                load = self._loads.get(number)
                if load is not None:
                    load._over = load._over or reason
                    self._forget_if_over(load)
            case Located(number, tiers):
                self._answered(number, tiers.decode())
            case CacheReply(number, body):
                self._answered(number, msgspec.json.decode(body))
            case _:
                log.warning("ignored a %s from the store", type(message).__name__)

    def _granted(self, number: int, slots: tuple[int, ...]) -> None:
        """One that comes late or twice is ignored: its slots may be somebody else's by now."""
        if number > self._grants:
            self._grants = number
            self._stock.extend(slots)

    def _map(self, attached: Attached) -> None:
        assert self._link is not None
        arena = None
        if attached.path:
            try:
                arena = SharedMemory.attach(
                    Path(attached.path),
                    self._link.server_incarnation,
                    attached.slot_bytes,
                    attached.lane,
                )
            except ArenaUnavailable as error:
                say = log.error if self._transfer == "arena" else log.info
                say("blocks travel inline: %s", error)
        if arena is None and self._transfer == "arena":
            return  # not available: inline was not allowed
        if arena is not None:
            arena.prefault()
        self._arena, self._attached = arena, attached
        self._link.send(Mapped(arena is not None))

    def _answered(self, number: int, answer: Any) -> None:
        asked = self._asks.pop(number, None)
        if asked is not None:
            asked.answer = answer

    # -- putting --------------------------------------------------------------------------------

    def put(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], read: Read
    ) -> int:
        """Offers consecutive finished blocks of one chain; never waits.

        Parameters
        ----------
        tenant
            16 bytes that `clear` can name: `keys.tenant_key`.
        parent
            Key of the block before the first one, or the root.
        depth
            How many blocks come before the first one.
        read
            Called with 0 … n - 1 for the blocks that are accepted.

        Returns how many of them the store has now or had; the rest is dropped and counted.
        """
        done = 0
        while done < len(keys):
            if self._is_known(keys[done]):
                done += 1
                continue
            run = done
            while run < len(keys) and not self._is_known(keys[run]):
                run += 1
            above = keys[done - 1] if done else parent
            placed = self._write(tenant, above, depth + done, keys[done:run], _behind(read, done))
            done += len(placed)
            if done < run:
                self.counters["puts_dropped"] += len(keys) - done
                break
        return done

    def ship(
        self, tenant: bytes, parent: bytes, depth: int, keys: Sequence[bytes], read: Read
    ) -> list[SlotRef]:
        """Puts blocks and keeps their slots for another node, until `let_go`.

        As `put`, but a block is written even if the store has it. Returns where the leading blocks
        are; fewer than were given, or none, when the rest must travel inline.
        """
        if not self.shared:
            return []
        refs = self._write(tenant, parent, depth, keys, read, hold=True)
        self._lent.update(ref.slot for ref in refs)
        self._keep_until = self._clock() + KEEPING_TIMES * KEEPING_SECONDS
        return refs

    def let_go(self, refs: Sequence[SlotRef]) -> None:
        """The other node has copied these, or will not."""
        ours = tuple(ref.slot for ref in refs if ref.store == self._incarnation)
        self._lent.difference_update(ours)
        self._keep_until = self._clock() + KEEPING_TIMES * KEEPING_SECONDS
        if ours and self._link is not None:
            self._link.send(Release(ours))

    def copy(self, ref: SlotRef, write: Write) -> bool:
        """Copies a block that another node has shipped; False when it is not there any more."""
        if self._arena is None or self._attached is None or ref.store != self._incarnation:
            return False
        if not 0 <= ref.slot < self._attached.num_slots:
            return False
        if self._copied(_Handed(ref.checksum, "h", ref.slot), write):
            return True
        self.counters["shipments_damaged"] += 1
        return False

    @property
    def _incarnation(self) -> int:
        return 0 if self._link is None else self._link.server_incarnation

    def _write(
        self,
        tenant: bytes,
        parent: bytes,
        depth: int,
        keys: Sequence[bytes],
        read: Read,
        *,
        hold: bool = False,
    ) -> list[SlotRef]:
        count = min(len(keys), len(self._stock))
        if not count or self._link is None or self._attached is None:
            return []
        refs, payloads = [], []
        for index in range(count):
            slot, payload = self._stock.popleft(), read(index)
            if self._arena is None:
                payloads.append(bytes(payload))
                total = checksum(payloads[-1])
            else:
                total = self._copy_in(slot, payload)
            refs.append(SlotRef(self._incarnation, slot, total))
        message = Commit(
            tenant,
            parent,
            depth,
            b"".join(keys[:count]),
            tuple(ref.slot for ref in refs),
            tuple(ref.checksum for ref in refs),
            hold,
            self._arena is None,
        )
        if not self._link.send(message, payloads):
            return []
        self.counters["puts"] += count
        for key in keys[:count]:
            self._know(key)
        return refs

    def _copy_in(self, slot: int, payload: bytes | memoryview) -> int:
        """The checksum is of the source: it is what the copy will be compared with."""
        assert self._arena is not None and self._attached is not None
        view = self._arena.slot(slot, self._attached.slot_bytes, self._block_bytes)
        view[:] = payload
        total = checksum(payload)
        view.release()
        return total

    def _know(self, key: bytes) -> None:
        self._known[key] = self._clock() + KNOWN_SECONDS
        self._known.move_to_end(key)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def _is_known(self, key: bytes) -> bool:
        until = self._known.get(key)
        if until is None:
            return False
        if until < self._clock():
            del self._known[key]
            return False
        return True

    # -- loading --------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], first: int = 0, *, deadline_s: float) -> Loading:
        """Asks for blocks `[first, len(keys))` of a chain; `keys` begins at its root.

        The load ends at the first block that the store has not, or at the deadline.
        """
        now = self._clock()
        load = Loading(self, self._next, tuple(keys), first, now + deadline_s)
        self._next += 1
        window = max(1, WINDOW_BYTES // self._block_bytes)
        wish = Fetch(load.number, b"".join(keys), first, deadline_s, window)
        if self._attached is None or self._link is None or not self._link.send(wish):
            load._over = "no store"
            return load
        self._loads[load.number] = load
        return load

    def _handed_out(
        self, message: Leased | Delivered, payloads: tuple[memoryview, ...], now: float
    ) -> None:
        load = self._loads.get(message.number)
        if load is None or self._attached is None:
            self.counters["blocks_unwanted"] += 1
            return
        if message.first != load.first + load.taken + load.ready:
            # A message was lost or came twice. The store asks nothing back, so the load ends here.
            self.counters["blocks_out_of_order"] += 1
            self._cancel(load, "lost")
            return
        late_at = now + self._attached.lease_s / 2
        for index, total in enumerate(message.checksums):
            handed = _Handed(total, chr(message.tiers[index]), late_at=late_at)
            if isinstance(message, Leased):
                handed.slot = message.slots[index]
            else:
                handed.payload = payloads[index]
            load._handed.append(handed)
            self._know(load._keys[message.first + index])

    def _copied(self, handed: _Handed, write: Write) -> bool:
        if handed.payload is not None:
            return checksum(write(handed.payload)) == handed.checksum
        if self._arena is None or self._attached is None:
            return False
        view = self._arena.slot(handed.slot, self._attached.slot_bytes, self._block_bytes)
        try:
            return checksum(write(view)) == handed.checksum
        finally:
            view.release()

    def _spoiled(self, load: Loading, handed: _Handed, key: bytes) -> None:
        self._known.pop(key, None)
        if handed.payload is None and self._clock() > handed.late_at:
            self.counters["leases_late"] += 1
        else:
            self.counters["blocks_damaged"] += 1
            if self._link is not None and handed.payload is None:
                self._link.send(Damaged(key))
        self._cancel(load, "damaged")
        load._over = "damaged"  # also when the store had sent all of it already

    def _tell_taken(self, load: Loading) -> None:
        most = max(1, WINDOW_BYTES // self._block_bytes // 4)
        if self._link is not None and (load._untold >= most or not load.ready):
            self._link.send(Taken(load.number, load._untold))
            load._untold = 0
        self._forget_if_over(load)

    def _forget_if_over(self, load: Loading) -> None:
        if load.ended:
            self._loads.pop(load.number, None)

    def _cancel(self, load: Loading, reason: str) -> None:
        load._untold = 0
        if self._loads.pop(load.number, None) is not None:
            load._handed.clear()
            load._over = reason
            if self._link is not None:
                self._link.send(CancelFetch(load.number))

    # -- asking ---------------------------------------------------------------------------------

    def locate(self, keys: Sequence[bytes]) -> Asked:
        """The answer is a text of one letter a block for the longest prefix: `h` or `d`."""
        return self._ask(lambda number: Locate(number, b"".join(keys)))

    def care(
        self, action: str, *, tenant: bytes = b"", keys: Sequence[bytes] = (), seconds: float = 0.0
    ) -> Asked:
        """`stats`, `inspect`, `clear`, `pin`, `unpin`, `prefetch`; the answer is a dict."""
        if action == "clear":
            self._known.clear()
        joined = b"".join(keys)
        return self._ask(lambda number: CacheRequest(number, action, tenant, joined, seconds))

    def _ask(self, message: Callable[[int], AnyMessage]) -> Asked:
        asked, number = Asked(), self._next
        self._next += 1
        if self._link is None or not self._link.send(message(number)):
            asked.lost = True
            return asked
        self._asks[number] = asked
        return asked


def _behind(read: Read, start: int) -> Read:
    return lambda index: read(start + index)


def store_client(
    address: str | None, connect: Callable[[str], Client], block_bytes: int, transfer: Transfer
) -> StoreClient | None:
    """A client of the store at `address`; None when there is none."""
    if address is None:
        return None
    return StoreClient(lambda: connect(address), block_bytes, transfer=transfer)


def await_store(store: StoreClient | None, address: str | None) -> None:
    """Gives the store time to answer: what it has is worth a moment at the start."""
    deadline = time.monotonic() + ATTACH_SECONDS
    while store is not None and not store.available:
        store.turn()
        if time.monotonic() > deadline:
            log.warning("the store at %s does not answer yet: going on without it", address)
            return
        poller = zmq.Poller()
        for one in store.sockets:
            poller.register(one, zmq.POLLIN)
        poller.poll(50)
