"""Messages survive the wire, and nothing that is not one gets past it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

import msgspec
import pytest
import xxhash
from msgspec import inspect

from kvferry.kvstore.errors import MalformedFrame
from kvferry.kvstore.wire.codec import AnyMessage, Envelope, decode, encode
from kvferry.kvstore.wire.generation import (
    Abort,
    Done,
    Generate,
    Inquire,
    PromptSources,
    Rejected,
    Running,
    Sampling,
    Stages,
    Started,
    StepOutput,
    Stop,
    Token,
)
from kvferry.kvstore.wire.handoff import (
    AbortTransfer,
    Accepted,
    Blocks,
    Complete,
    Credit,
    Declined,
    Lent,
    Offer,
    Probe,
    Progress,
    TransferAborted,
)
from kvferry.kvstore.wire.hello import Hello, HelloRequired, Ping, Pong, Refused, Welcome
from kvferry.kvstore.wire.message import MAX_HEADER_BYTES
from kvferry.kvstore.wire.status import (
    CacheReset,
    DebugReply,
    DebugRequest,
    Drain,
    KeyBatch,
    ResetCache,
    Resync,
    Status,
    StepNotice,
)
from kvferry.kvstore.wire.store import (
    Attach,
    Attached,
    CacheReply,
    CacheRequest,
    CancelFetch,
    Commit,
    Damaged,
    Delivered,
    FetchEnded,
    FetchRequest,
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

EXAMPLES: list[AnyMessage] = [
    Hello(1, "decode", {"a": "b"}),
    Welcome("prefill", {"a": "b"}, 16, 100, 8192, 16),
    HelloRequired(),
    Refused("dtype", "float32", "float16"),
    Ping(1.5),
    Pong(1.5, 2.5),
    Generate(1, b"abcd", b"r" * 16, b"", 5, 0, (2,), (), Sampling(logit_bias=((1, -2.0),)), -7, 2),
    Stop(1, 0, 4),
    Abort(1),
    Drain(),
    Resync(),
    Started(1, PromptSources(host=16, decode=4)),
    StepOutput((Token(1, 0, 3, 9, "stop:9", -0.5, ((9, -0.5),)),)),
    Done(1, PromptSources(device=16), Stages(queue=1.0), 2.0, 3, 4.0, 5, 0),
    Rejected(1, "server_overloaded", "full"),
    Status(1, 2, 3, 4, 5, False, {"steps": 1.0}),
    KeyBatch(1, True, b"k" * 16, b""),
    StepNotice(0.5),
    Offer(1, 1, b"t" * 64, b"k" * 16, 0, 1, 1000),
    Accepted(1, 1, 0, 0.0),
    Declined(1, 1, "too_large", 10, 5),
    Blocks(1, 1, 0, (2**64 - 1,)),
    Credit(1, 1, 10),
    Complete(1, 1, 0, 1, 1.0, 2.0),
    AbortTransfer(1, 1),
    TransferAborted(1, 1, "asked"),
    Inquire(1),
    Running(1, (3, 4)),
    DebugRequest(1, "ledger", b""),
    DebugReply(1, b"{}"),
    ResetCache(1),
    CacheReset(1, 5, 2),
    Probe(1, 1),
    Progress(1, 1, True, 4),
    Lent(1, 1, 4, 9, (3, 4), (1, 2**64 - 1)),
    Attach(4096, True),
    Attached("/dev/shm/a", 3, 4096, 100, 10.0),
    Mapped(True),
    Granted(1, (1, 2)),
    Holding(1, (1, 2)),
    Keeping((4, 5)),
    GiveBack((1, 2)),
    Commit(b"t" * 16, b"p" * 16, 3, b"k" * 16, (1,), (2**64 - 1,), False, True),
    Release((1,)),
    Locate(1, b"k" * 16),
    Located(1, b"hd"),
    FetchRequest(1, b"k" * 32, 1, 0.5, 8),
    Leased(1, 0, (4,), (2**64 - 1,), b"h"),
    Delivered(1, 0, (2**64 - 1,), b"d"),
    Taken(1, 3),
    FetchEnded(1, "short"),
    CancelFetch(1),
    Damaged(b"k" * 16),
    CacheRequest(1, "pin", b"", b"k" * 16, 60.0),
    CacheReply(1, b"{}"),
]


def sizes(message: AnyMessage) -> tuple[int, ...]:
    inline = isinstance(message, Blocks | Delivered | Commit)
    return (8,) if inline else ()


def test_there_is_an_example_of_every_message() -> None:
    assert {type(one) for one in EXAMPLES} == set(AnyMessage.__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_survives(message: AnyMessage) -> None:
    envelope = Envelope(5, 6, message)
    assert decode(encode(envelope), sizes(message)) == envelope


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        Abort(1).request = 2  # type: ignore[misc]


def test_a_header_must_announce_its_payloads() -> None:
    blocks = encode(Envelope(1, 2, Blocks(1, 1, 0, (1, 2))))
    for payloads in ((), (8,), (8, 8, 8)):
        with pytest.raises(MalformedFrame, match="payloads"):
            decode(blocks, payloads)
    with pytest.raises(MalformedFrame, match="payloads"):
        decode(encode(Envelope(1, 2, Abort(1))), (8,))


@pytest.mark.parametrize(
    "body",
    [
        [99, 1],
        [11, 1],
        [11, "one", 0, 0],
        [11, -1, 0, 0],
        [10, 1, b"", b"short", b"", 1, 0, [], [], [], 0, 1],
        {"type": 11},
        None,
    ],
)
def test_a_header_of_the_wrong_shape_is_refused(body: object) -> None:
    encoded = msgspec.msgpack.encode([1, 2, body])
    with pytest.raises(MalformedFrame, match="not a message"):
        decode(encoded + xxhash.xxh3_64_digest(encoded), ())


def constraints(kind: inspect.Type) -> Iterator[inspect.Type]:
    """Every type that a message consists of, down to the last number."""
    match kind:
        case inspect.StructType(fields=fields):
            for item in fields:
                yield from constraints(item.type)
        case inspect.UnionType(types=arms) | inspect.TupleType(item_types=arms):
            for arm in arms:
                yield from constraints(arm)
        case inspect.VarTupleType(item_type=inner):
            yield kind
            yield from constraints(inner)
        case inspect.DictType(key_type=key, value_type=value):
            yield kind
            yield from (*constraints(key), *constraints(value))
        case _:
            yield kind


@pytest.mark.B5
def test_everything_on_the_wire_is_bounded() -> None:
    for kind in constraints(inspect.type_info(Envelope)):
        match kind:
            case inspect.FloatType(ge=low, le=high):
                # Both bounds: then neither infinities nor NaN get in.
                assert low is not None and high is not None
                decoder = msgspec.msgpack.Decoder(Annotated[float, msgspec.Meta(ge=low, le=high)])
                for value in (float("nan"), float("inf"), float("-inf")):
                    with pytest.raises(msgspec.ValidationError):
                        decoder.decode(msgspec.msgpack.encode(value))
            case inspect.IntType(ge=low):
                assert low is not None
            case inspect.BoolType() | inspect.NoneType():
                pass
            case _:
                assert getattr(kind, "max_length", None) is not None, kind


@pytest.mark.B5
@pytest.mark.parametrize(
    "message",
    [
        Ping(float("nan")),
        Ping(float("inf")),
        Ping(-1.0),
        StepNotice(1e9),
        Welcome("decode", {}, 0, 1, 1, 1),
        Welcome("decode", {}, 1 << 20, 1, 1, 1),
        Welcome("decode", {str(n): "" for n in range(65)}, 16, 1, 1, 1),
        Welcome("two\nlines", {}, 16, 1, 1, 1),
        Stop(1, 128, 0),
        StepOutput((Token(-1, 0, 0, 0),)),
        StepOutput((Token(1, -1, 0, 0),)),
        StepOutput((Token(1, 0, -1, 0),)),
        StepOutput((Token(1, 0, 0, 1 << 31),)),
        StepOutput((Token(1, 0, 0, 0, "stop:x"),)),
        StepOutput((Token(1, 0, 0, 0, "stop\n"),)),
        StepOutput((Token(1, 0, 0, 0, "", float("nan")),)),
        StepOutput((Token(1, 0, 0, 0, "", 0.0, ((0, float("-inf")),)),)),
        Done(1, PromptSources(device=-1), Stages(), 0.0, 0, 0.0, 0, 0),
        Done(1, PromptSources(), Stages(float("nan")), 0.0, 0, 0.0, 0, 0),
        Status(-1, 0, 0, 0, 0, False, {}),
        Status(0, 0, 0, 0, 0, False, {"a b": 1.0}),
        Status(0, 0, 0, 0, 0, False, {"a": float("nan")}),
        Status(0, 0, 0, 0, 0, False, {f"c{n}": 1.0 for n in range(257)}),
        Running(1, (1,) * 129),
    ],
    ids=repr,
)
def test_what_no_honest_peer_says_is_refused(message: AnyMessage) -> None:
    with pytest.raises(MalformedFrame, match="not a message"):
        decode(encode(Envelope(1, 2, message)), ())


def test_a_torn_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        KeyBatch(1, True, bytes(17), b"")
    encoded = msgspec.msgpack.encode([1, 2, [24, 1, True, bytes(16), bytes(15)]])
    with pytest.raises(MalformedFrame, match="16 bytes"):
        decode(encoded + xxhash.xxh3_64_digest(encoded), ())


@pytest.mark.D7
def test_no_flipped_bit_of_a_header_gets_through() -> None:
    for message in EXAMPLES:
        whole = encode(Envelope(1, 2, message))
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(MalformedFrame, match="checksum"):
                decode(bytes(damaged), sizes(message))


@pytest.mark.B5
def test_noise_and_truncation_are_refused() -> None:
    noise = random.Random(1)
    for message in EXAMPLES:
        whole = encode(Envelope(1, 2, message))
        for cut in range(len(whole)):
            with pytest.raises(MalformedFrame):
                decode(whole[:cut], sizes(message))
    for _ in range(2000):
        with pytest.raises(MalformedFrame):
            decode(noise.randbytes(noise.randrange(1, 60)), ())


def test_an_enormous_header_is_refused_unread() -> None:
    with pytest.raises(MalformedFrame, match="limit"):
        decode(memoryview(bytes(MAX_HEADER_BYTES + 1)), ())
