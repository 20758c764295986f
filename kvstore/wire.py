"""Every message that crosses a process border, and how one becomes bytes.

A message is a frozen struct that msgspec encodes as a positional msgpack array with an integer tag
and checks against these annotations before anything acts on it: every number has its bounds, every
text, tuple and dict its largest size, and no float is infinite or no number. What only a receiver
can know it checks where it acts. The header frame is an
`Envelope` that carries both sides' incarnations; raw bytes (KV blocks) follow in frames of their
own and never pass through msgpack. Nothing is ever unpickled. This module owns the vocabulary; it
knows neither sockets nor what a message makes somebody do.

    gateway → node    Hello  Generate  Stop  Abort  Inquire  Drain  Resync  ResetCache  DebugRequest
    node → gateway    Welcome  StepOutput  Done  Rejected  Running  Load  KeyBatch  CacheReset
                      DebugReply
    D → P             Hello  Offer  Credit  AbortTransfer  Probe
    P → D             Welcome  Accepted  Declined  Blocks  Lent  Complete  TransferAborted  Progress
    node → store      Hello  Attach  Mapped  Holding  Keeping  GiveBack  Commit  Release  Locate
                      Fetch  Taken  CancelFetch  Damaged  CacheRequest
    store → node      Welcome  Attached  Granted  Located  Leased  Delivered  FetchEnded  CacheReply
    anyone            Ping  Pong  HelloRequired  Refused  StepNotice

The header frame ends with the xxh3-64 of its other bytes: a header that was damaged on its way is
dropped like one that was lost, and never acted on.
"""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta, Struct

from kvferry.kvstore.errors import MalformedFrame
from kvferry.kvstore.keys import KEY_BYTES

PROTOCOL = 4
MAX_HEADER_BYTES = 64 << 20
"""A header larger than this is refused unread: 2 million prompt tokens fit."""

MAX_STEP_SECONDS = 60.0
"""No node announces, nor is believed, that a step takes longer."""
MAX_CHOICES = 128

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
"""Exact in JSON and as a float."""
Integer = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Incarnation = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Sum = Annotated[int, Meta(ge=0)]
"""64 bits, which is all that msgpack has for an integer."""
TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Choice = Annotated[int, Meta(ge=0, le=MAX_CHOICES - 1)]
Real = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
"""Any number, but a number: bounds keep out infinities, and NaN, which is within none."""
Figure = Annotated[float, Meta(ge=0, le=1e18)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
"""A duration, or a reading of somebody's monotonic clock."""
Milliseconds = Annotated[float, Meta(ge=0, le=1e12)]
LogProb = Annotated[float, Meta(ge=-1e9, le=1.0)]
"""Minus infinity is sent as a large negative number; rounding may put a certain token above 0."""
Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=100, pattern=r"^[a-z][a-z0-9_]*\Z")]
"""Of a role, a counter or a fingerprint's field: harmless in a log line and as a metric's name."""
Slots = Annotated[tuple[Count, ...], Meta(max_length=1 << 20)]
Sums = Annotated[tuple[Sum, ...], Meta(max_length=1 << 20)]
Finish = Annotated[str, Meta(max_length=32, pattern=r"^(stop|length|stop:[0-9]{1,10})?\Z")]
Raw = Annotated[bytes, Meta(max_length=MAX_HEADER_BYTES)]
Key = Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Fingerprint = Annotated[dict[Name, Text], Meta(max_length=64)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=4096)]
Alternatives = Annotated[tuple[tuple[TokenId, LogProb], ...], Meta(max_length=1024)]


class Message(Struct, frozen=True, array_like=True):
    """Base of all messages; each has its own integer tag."""


# -- meeting -----------------------------------------------------------------------------------


class Hello(Message, frozen=True, array_like=True, tag=1):
    """The first message of a client. A gateway sends the fingerprint fields it can know."""

    protocol: Integer
    role: Name
    fingerprint: Fingerprint


class Welcome(Message, frozen=True, array_like=True, tag=2):
    """The server's answer to a Hello it accepts."""

    role: Name
    fingerprint: Fingerprint
    block_size: Annotated[int, Meta(ge=1, le=1 << 16)]
    num_blocks: Annotated[int, Meta(ge=1, le=1 << 24)]
    max_model_len: Annotated[int, Meta(ge=1, le=1 << 31)]
    max_num_seqs: Annotated[int, Meta(ge=0, le=1 << 20)]


class HelloRequired(Message, frozen=True, array_like=True, tag=3):
    """The only answer to an identity that has not said hello to this incarnation."""


class Refused(Message, frozen=True, array_like=True, tag=4):
    """The peers differ in `field`: they must not exchange blocks."""

    field: Text
    server_value: Text
    client_value: Text


class Ping(Message, frozen=True, array_like=True, tag=5):
    sent_at: Seconds
    """The sender's monotonic clock, seconds."""


class Pong(Message, frozen=True, array_like=True, tag=6):
    sent_at: Seconds
    """Echo of the Ping."""
    answered_at: Seconds
    """The answerer's monotonic clock, seconds: the pair gives the offset of the two clocks."""


# -- gateway and decode node -------------------------------------------------------------------


class Sampling(Struct, frozen=True, array_like=True):
    """How one request's tokens are drawn; the defaults change nothing."""

    temperature: Real = 1.0
    top_p: Real = 1.0
    top_k: Integer = 0
    min_p: Real = 0.0
    repetition_penalty: Real = 1.0
    frequency_penalty: Real = 0.0
    presence_penalty: Real = 0.0
    logit_bias: Annotated[tuple[tuple[TokenId, Real], ...], Meta(max_length=1 << 20)] = ()
    logprobs: Annotated[int, Meta(ge=0, le=1024)] | None = None
    """None: none wanted; else how many alternatives beside the drawn token."""


class Generate(Message, frozen=True, array_like=True, tag=10):
    """Run a prompt to its end on this decode node."""

    request: Count
    """Chosen by the gateway, unique on its connection."""
    prompt: Raw
    """Token ids, int32."""
    root: Key
    """Root key of the tenant: generated blocks are chained from it too."""
    keys: Raw
    """Keys of the prompt's whole blocks, concatenated."""
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 53)]
    min_tokens: Count
    eos_ids: TokenIds
    """Ids that end a choice; empty under ignore_eos."""
    stop_token_ids: TokenIds
    sampling: Sampling
    seed: Integer
    choices: Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
    outputs: Annotated[tuple[Raw, ...], Meta(max_length=MAX_CHOICES)] = ()
    """Token ids already streamed, per choice: the request resumes behind them."""
    finished: Annotated[tuple[Choice, ...], Meta(max_length=MAX_CHOICES)] = ()
    """Choices that had ended already when the request resumed."""
    prefill_nodes: Annotated[tuple[Text, ...], Meta(max_length=1024)] = ()
    """Addresses of prefill nodes, the best one first; the next is asked when one fails."""
    priority: Integer = 0
    deadline_s: Seconds = 0.0
    """Seconds from arrival until the whole request is given up; 0: never."""
    tenant: Key = bytes(KEY_BYTES)
    """Whose blocks they are, for a store: `keys.tenant_key`."""
    forced: Raw = b""
    """Ids to emit in place of drawn ones (test hook); int32."""


class Stop(Message, frozen=True, array_like=True, tag=11):
    """The gateway ended one choice (a stop string): `kept` tokens count, the rest is overrun."""

    request: Count
    choice: Choice
    kept: Count


class Abort(Message, frozen=True, array_like=True, tag=12):
    """The client is gone: free everything of this request."""

    request: Count


class Inquire(Message, frozen=True, array_like=True, tag=13):
    """Nothing has come for this request for a while: `Running`, or `Rejected` if it is unknown."""

    request: Count


class Running(Message, frozen=True, array_like=True, tag=14):
    """The request is alive, and so many tokens of each choice have been sent."""

    request: Count
    sent: Annotated[tuple[Count, ...], Meta(max_length=MAX_CHOICES)]


class ResetCache(Message, frozen=True, array_like=True, tag=15):
    """Forget every block that nobody uses; the answer is `CacheReset` with the same number."""

    number: Count


class CacheReset(Message, frozen=True, array_like=True, tag=16):
    number: Count
    evicted: Count
    """Blocks that were findable and are free now."""
    held: Count
    """Blocks that running requests or transfers use: they stay."""


class Token(Struct, frozen=True, array_like=True):
    """One generated token of one choice."""

    request: Count
    choice: Choice
    index: Count
    """How many tokens of this choice came before."""
    token: TokenId
    finish: Finish = ""
    """Empty, or why this was the last token: `stop`, `length`, `stop:<token id>`."""
    logprob: LogProb = 0.0
    top: Alternatives = ()


class StepOutput(Message, frozen=True, array_like=True, tag=20):
    """All tokens that one step made for one gateway."""

    tokens: Annotated[tuple[Token, ...], Meta(max_length=1 << 16)]


class PromptSources(Struct, frozen=True, array_like=True):
    """Where a prompt's tokens came from; the sum is the prompt's length."""

    device: Count = 0
    host: Count = 0
    disk: Count = 0
    remote: Count = 0
    prefill: Count = 0
    """Computed on the prefill node."""
    decode: Count = 0
    """Computed on the decode node."""


class Stages(Struct, frozen=True, array_like=True):
    """Time to first token by stage: disjoint intervals on the decode node's clock, milliseconds."""

    queue: Milliseconds = 0.0
    lookup: Milliseconds = 0.0
    load: Milliseconds = 0.0
    prefill: Milliseconds = 0.0
    transfer: Milliseconds = 0.0
    first_step: Milliseconds = 0.0


class Done(Message, frozen=True, array_like=True, tag=21):
    """All choices of a request have ended; nothing more comes for it."""

    request: Count
    sources: PromptSources
    stages: Stages
    handoff_ms: Milliseconds
    """From the end of the prefill node's last chunk to the start of the first step, or 0."""
    predicted_n: Count
    predicted_ms: Milliseconds
    """From the first token to the last, all choices."""
    bytes_shipped: Count
    preemptions: Count


class Rejected(Message, frozen=True, array_like=True, tag=22):
    """The request ended without running to its end; nothing is held for it any more.

    `code` is one of `server_overloaded`, `context_length_exceeded`, `shutting_down`,
    `deadline_exceeded`, `invalid_request`, `engine_error`, `unknown_request`.
    """

    request: Count
    code: Name
    message: Text


class Load(Message, frozen=True, array_like=True, tag=23):
    """A node's state, sent to every gateway about once a second and when it changes much."""

    running: Count
    waiting: Count
    blocks_used: Count
    blocks_cached: Count
    blocks_total: Count
    draining: bool
    counters: Annotated[dict[Name, Figure], Meta(max_length=256)]
    """Monotonic counters of this incarnation, by metric stem."""


class KeyBatch(Message, frozen=True, array_like=True, tag=24):
    """Blocks that a node's device pool gained and lost; `full` restates everything."""

    number: Count
    full: bool
    committed: Raw
    evicted: Raw

    def __post_init__(self) -> None:
        torn = len(self.committed) % KEY_BYTES or len(self.evicted) % KEY_BYTES
        if torn:
            raise ValueError(f"keys have {KEY_BYTES} bytes each, and {torn} are left over")


class StepNotice(Message, frozen=True, array_like=True, tag=25):
    """The node starts a step that it expects to take this long: silence until then is no stall."""

    predicted_s: Annotated[float, Meta(ge=0, le=MAX_STEP_SECONDS)]


class DebugRequest(Message, frozen=True, array_like=True, tag=28):
    """Asks a node that allows it: `ledger`, or `faults` with rules as JSON."""

    number: Count
    kind: Text
    body: Annotated[bytes, Meta(max_length=1 << 20)]


class DebugReply(Message, frozen=True, array_like=True, tag=29):
    number: Count
    body: Annotated[bytes, Meta(max_length=16 << 20)]
    """JSON; `{"error": …}` when it was refused."""


class Drain(Message, frozen=True, array_like=True, tag=26):
    """Accept no new requests; end when the last one has."""


class Resync(Message, frozen=True, array_like=True, tag=27):
    """A gateway missed a `KeyBatch`: restate all keys."""


# -- the hand-off -------------------------------------------------------------------------------


class Offer(Message, frozen=True, array_like=True, tag=30):
    """D has reserved blocks `[first, last)` of this prompt and asks P for them."""

    transfer: Count
    epoch: Count
    tokens: Raw
    """Token ids of blocks `[0, last)`, int32."""
    keys: Raw
    """Keys of blocks `[0, last)`."""
    first: Count
    last: Count
    credit: Count
    """Bytes that P may have in flight before D returns some."""
    priority: Integer = 0
    root: Key = bytes(KEY_BYTES)
    tenant: Key = bytes(KEY_BYTES)
    """As in `Generate`: what P puts into a store is chained from the root, and the tenant's."""
    store: Incarnation = 0
    """Of the store whose arena D has mapped: blocks may be `Lent`. 0: none."""


class Accepted(Message, frozen=True, array_like=True, tag=31):
    """P has reserved the whole span. Its own prefix reaches to block `prefix`."""

    transfer: Count
    epoch: Count
    prefix: Count
    expected_start_s: Seconds
    """Seconds until P expects to start computing."""


class Declined(Message, frozen=True, array_like=True, tag=32):
    """P will not do it: `too_large` (more blocks than P has), `busy`, `draining`, `invalid`."""

    transfer: Count
    epoch: Count
    reason: Text
    needed: Count
    available: Count


class Blocks(Message, frozen=True, array_like=True, tag=33):
    """Consecutive blocks from `first` on; their payloads are the frames behind this header."""

    transfer: Count
    epoch: Count
    first: Count
    checksums: Sums
    """xxh3-64 of each payload frame."""


class Credit(Message, frozen=True, array_like=True, tag=34):
    """D has taken over this many more bytes: P may send as many again and drop their blocks."""

    transfer: Count
    epoch: Count
    size: Count
    taken: Count = 0
    """All blocks before this one have been copied out of their slots."""


class Lent(Message, frozen=True, array_like=True, tag=40):
    """As `Blocks`, but the payloads lie in slots of the arena that both nodes have mapped."""

    transfer: Count
    epoch: Count
    first: Count
    store: Incarnation
    """Of the store whose arena it is."""
    slots: Slots
    checksums: Sums


class Complete(Message, frozen=True, array_like=True, tag=35):
    """P has shipped the last block of the transfer."""

    transfer: Count
    epoch: Count
    reused: Count
    """Blocks that came from P's own pool."""
    computed: Count
    started_at: Seconds
    """When P began to compute, on P's monotonic clock; equal to finished_at if it did not."""
    finished_at: Seconds
    """When P's last chunk ended."""


class AbortTransfer(Message, frozen=True, array_like=True, tag=36):
    transfer: Count
    epoch: Count


class TransferAborted(Message, frozen=True, array_like=True, tag=37):
    """P sends nothing more of this transfer: it acknowledges an abort, or gives up by itself.

    `reason` is `asked`, or what went wrong on P.
    """

    transfer: Count
    epoch: Count
    reason: Text


class Probe(Message, frozen=True, array_like=True, tag=38):
    """Nothing has come of this transfer for a while: `Progress`, or `TransferAborted`."""

    transfer: Count
    epoch: Count


class Progress(Message, frozen=True, array_like=True, tag=39):
    """How far a transfer is on P."""

    transfer: Count
    epoch: Count
    working: bool
    """P still has to accept it or to compute for it. Otherwise only credit can be missing."""
    sent: Count
    """The next block to ship."""


# -- the store ----------------------------------------------------------------------------------


class Attach(Message, frozen=True, array_like=True, tag=50):
    """A node wants to put and load blocks of this size."""

    block_bytes: Annotated[int, Meta(ge=1, le=1 << 31)]
    shared: bool
    """Whether it would map the arena."""


class Attached(Message, frozen=True, array_like=True, tag=51):
    """Where the arena is. The node maps it and locks its lane, and says so with `Mapped`."""

    path: Text
    """Empty: there is none to map, blocks travel inline."""
    lane: Count
    slot_bytes: Count
    num_slots: Count
    lease_s: Seconds
    """How long a handed-out block stays in its slot. A reader counts from when it asked."""


class Mapped(Message, frozen=True, array_like=True, tag=52):
    """False: the node cannot map the arena, and everything travels inline."""

    shared: bool


class Granted(Message, frozen=True, array_like=True, tag=53):
    """Slots that this node alone may write until it commits them or gives them back."""

    number: Count
    """Counts grants from 1; one that does not come next in order is ignored."""
    slots: Slots


class Holding(Message, frozen=True, array_like=True, tag=68):
    """Of all slots granted up to `number` the node has these left: it would have more.

    What it has not, it committed, gave back or never heard of.
    """

    number: Count
    slots: Slots


class Keeping(Message, frozen=True, array_like=True, tag=69):
    """Of all that the node committed with `hold`, these are still wanted: a lost `Release`."""

    slots: Slots


class GiveBack(Message, frozen=True, array_like=True, tag=54):
    slots: Slots


class Commit(Message, frozen=True, array_like=True, tag=55):
    """Consecutive blocks of one chain are in these granted slots, or in the frames behind."""

    tenant: Key
    parent: Key
    """Key of the block before the first one, or the root."""
    depth: Count
    """How many blocks come before the first one."""
    keys: Raw
    slots: Slots
    checksums: Sums
    """xxh3-64 of each block."""
    hold: bool
    """Keep the slots as they are until `Release`: another node will read them."""
    inline: bool


class Release(Message, frozen=True, array_like=True, tag=56):
    """What was committed with `hold` has been read, or will not be."""

    slots: Slots


class Locate(Message, frozen=True, array_like=True, tag=57):
    number: Count
    keys: Raw


class Located(Message, frozen=True, array_like=True, tag=58):
    """One byte a block for the longest prefix that is there: `h` in memory, `d` on disk."""

    number: Count
    tiers: Raw


class Fetch(Message, frozen=True, array_like=True, tag=59):
    """A request wants this chain, and the bytes of its blocks from `first` on."""

    number: Count
    keys: Raw
    """From the first block of the chain."""
    first: Count
    deadline_s: Seconds
    """Seconds from arrival; what is not there then is not sent."""
    window: Annotated[int, Meta(ge=1, le=1 << 31)]
    """How many blocks may be handed out and not taken."""


class Leased(Message, frozen=True, array_like=True, tag=60):
    """Blocks from `first` on lie in these slots."""

    number: Count
    first: Count
    slots: Slots
    checksums: Sums
    tiers: Raw
    """One byte a block, as in `Located`: where it came from."""


class Delivered(Message, frozen=True, array_like=True, tag=61):
    """Blocks from `first` on, in the frames behind."""

    number: Count
    first: Count
    checksums: Sums
    tiers: Raw


class Taken(Message, frozen=True, array_like=True, tag=62):
    """The node has copied this many more blocks of a fetch."""

    number: Count
    count: Count


class FetchEnded(Message, frozen=True, array_like=True, tag=63):
    """Nothing more comes: `complete`, `short` (no more is there), `deadline`, `refused`."""

    number: Count
    reason: Text


class CancelFetch(Message, frozen=True, array_like=True, tag=64):
    number: Count


class Damaged(Message, frozen=True, array_like=True, tag=65):
    """A copy made under a lease was not what its checksum says."""

    key: Key


class CacheRequest(Message, frozen=True, array_like=True, tag=66):
    """Care of the cache: `stats`, `inspect`, `clear`, `pin`, `unpin`, `prefetch`."""

    number: Count
    action: Text
    tenant: Raw = b""
    """Of `clear`; empty: all tenants."""
    keys: Raw = b""
    """A chain, for `inspect`, `pin`, `unpin` and `prefetch`."""
    seconds: Seconds = 0.0
    """How long a pin lasts, or a prefetch may take."""


class CacheReply(Message, frozen=True, array_like=True, tag=67):
    number: Count
    body: Raw
    """JSON; `{"error": …}` when it was refused."""


AnyMessage = (
    Hello | Welcome | HelloRequired | Refused | Ping | Pong
    | Generate | Stop | Abort | Inquire | StepOutput | Done | Rejected | Running
    | Load | KeyBatch | StepNotice | Drain | Resync | ResetCache | CacheReset
    | DebugRequest | DebugReply
    | Offer | Accepted | Declined | Blocks | Credit | Complete | AbortTransfer | TransferAborted
    | Probe | Progress | Lent
    | Attach | Attached | Mapped | Granted | Holding | Keeping | GiveBack | Commit | Release
    | Locate | Located | Fetch | Leased | Delivered | Taken | FetchEnded | CancelFetch | Damaged
    | CacheRequest | CacheReply
)  # fmt: skip


class Envelope(Struct, frozen=True, array_like=True):
    """The header frame."""

    sender: Incarnation
    """Incarnation of the sending process: random, new with every start."""
    receiver: Incarnation
    """Incarnation that the sender believes it speaks to; 0 before it knows one."""
    body: AnyMessage


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


_SUM_BYTES = 8


def encode(envelope: Envelope) -> bytes:
    """The header frame: the envelope and its checksum."""
    encoded = _encoder.encode(envelope)
    return encoded + xxhash.xxh3_64_digest(encoded)


def decode(frame: bytes | memoryview, payload_sizes: tuple[int, ...]) -> Envelope:
    """The header of a message whose raw frames have these sizes in bytes.

    Raises
    ------
    MalformedFrame
        The header does not decode, or it announces another number of payload frames.
    """
    if len(frame) > MAX_HEADER_BYTES:
        raise MalformedFrame(f"a header of {len(frame)} bytes; the limit is {MAX_HEADER_BYTES}")
    view = memoryview(frame)
    if xxhash.xxh3_64_digest(view[:-_SUM_BYTES]) != bytes(view[-_SUM_BYTES:]):
        raise MalformedFrame(f"a header of {len(frame)} bytes whose checksum does not hold")
    try:
        envelope = _decoder.decode(view[:-_SUM_BYTES])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise MalformedFrame(f"not a message: {str(error)[:200]}") from error
    announced = _payloads(envelope.body)
    if announced != len(payload_sizes):
        raise MalformedFrame(
            f"{type(envelope.body).__name__} announces {announced} payloads, "
            f"{len(payload_sizes)} came"
        )
    return envelope


def _payloads(message: AnyMessage) -> int:
    """How many raw frames follow the header."""
    match message:
        case Blocks(checksums=checksums) | Delivered(checksums=checksums):
            return len(checksums)
        case Commit(checksums=checksums, inline=True):
            return len(checksums)
    return 0
