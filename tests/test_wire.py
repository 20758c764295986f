"""Messages survive the wire, and nothing that is not one gets past it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Annotated

import msgspec
import pytest
import xxhash
from msgspec import inspect

from kvferry.kvstore import wire
from kvferry.kvstore.errors import MalformedFrame

EXAMPLES: list[wire.AnyMessage] = [
    wire.Hello(1, "decode", {"a": "b"}),
    wire.Welcome("prefill", {"a": "b"}, 16, 100, 8192, 16),
    wire.HelloRequired(),
    wire.Refused("dtype", "float32", "float16"),
    wire.Ping(1.5),
    wire.Pong(1.5, 2.5),
    wire.Generate(
        1, b"abcd", b"r" * 16, b"", 5, 0, (2,), (), wire.Sampling(logit_bias=((1, -2.0),)), -7, 2
    ),
    wire.Stop(1, 0, 4),
    wire.Abort(1),
    wire.Drain(),
    wire.Resync(),
    wire.StepOutput((wire.Token(1, 0, 3, 9, "stop:9", -0.5, ((9, -0.5),)),)),
    wire.Done(1, wire.PromptSources(device=16), wire.Stages(queue=1.0), 2.0, 3, 4.0, 5, 0),
    wire.Rejected(1, "server_overloaded", "full"),
    wire.Load(1, 2, 3, 4, 5, False, {"steps": 1.0}),
    wire.KeyBatch(1, True, b"k" * 16, b""),
    wire.StepNotice(0.5),
    wire.Offer(1, 1, b"t" * 64, b"k" * 16, 0, 1, 1000),
    wire.Accepted(1, 1, 0, 0.0),
    wire.Declined(1, 1, "too_large", 10, 5),
    wire.Blocks(1, 1, 0, (2**64 - 1,)),
    wire.Credit(1, 1, 10),
    wire.Complete(1, 1, 0, 1, 1.0, 2.0),
    wire.AbortTransfer(1, 1),
    wire.TransferAborted(1, 1, "asked"),
    wire.Inquire(1),
    wire.Running(1, (3, 4)),
    wire.DebugRequest(1, "ledger", b""),
    wire.DebugReply(1, b"{}"),
    wire.ResetCache(1),
    wire.CacheReset(1, 5, 2),
    wire.Probe(1, 1),
    wire.Progress(1, 1, True, 4),
    wire.Lent(1, 1, 4, 9, (3, 4), (1, 2**64 - 1)),
    wire.Attach(4096, True),
    wire.Attached("/dev/shm/a", 3, 4096, 100, 10.0),
    wire.Mapped(True),
    wire.Granted(1, (1, 2)),
    wire.Holding(1, (1, 2)),
    wire.Keeping((4, 5)),
    wire.GiveBack((1, 2)),
    wire.Commit(b"t" * 16, b"p" * 16, 3, b"k" * 16, (1,), (2**64 - 1,), False, True),
    wire.Release((1,)),
    wire.Locate(1, b"k" * 16),
    wire.Located(1, b"hd"),
    wire.Fetch(1, b"k" * 32, 1, 0.5, 8),
    wire.Leased(1, 0, (4,), (2**64 - 1,), b"h"),
    wire.Delivered(1, 0, (2**64 - 1,), b"d"),
    wire.Taken(1, 3),
    wire.FetchEnded(1, "short"),
    wire.CancelFetch(1),
    wire.Damaged(b"k" * 16),
    wire.CacheRequest(1, "pin", b"", b"k" * 16, 60.0),
    wire.CacheReply(1, b"{}"),
]


def sizes(message: wire.AnyMessage) -> tuple[int, ...]:
    inline = isinstance(message, wire.Blocks | wire.Delivered | wire.Commit)
    return (8,) if inline else ()


def test_there_is_an_example_of_every_message() -> None:
    assert {type(one) for one in EXAMPLES} == set(wire.AnyMessage.__args__)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda one: type(one).__name__)
def test_a_message_survives(message: wire.AnyMessage) -> None:
    envelope = wire.Envelope(5, 6, message)
    assert wire.decode(wire.encode(envelope), sizes(message)) == envelope


def test_messages_are_frozen() -> None:
    with pytest.raises(AttributeError):
        wire.Abort(1).request = 2  # type: ignore[misc]


def test_a_header_must_announce_its_payloads() -> None:
    blocks = wire.encode(wire.Envelope(1, 2, wire.Blocks(1, 1, 0, (1, 2))))
    for payloads in ((), (8,), (8, 8, 8)):
        with pytest.raises(MalformedFrame, match="payloads"):
            wire.decode(blocks, payloads)
    with pytest.raises(MalformedFrame, match="payloads"):
        wire.decode(wire.encode(wire.Envelope(1, 2, wire.Abort(1))), (8,))


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
        wire.decode(encoded + xxhash.xxh3_64_digest(encoded), ())


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
    for kind in constraints(inspect.type_info(wire.Envelope)):
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
        wire.Ping(float("nan")),
        wire.Ping(float("inf")),
        wire.Ping(-1.0),
        wire.StepNotice(1e9),
        wire.Welcome("decode", {}, 0, 1, 1, 1),
        wire.Welcome("decode", {}, 1 << 20, 1, 1, 1),
        wire.Welcome("decode", {str(n): "" for n in range(65)}, 16, 1, 1, 1),
        wire.Welcome("two\nlines", {}, 16, 1, 1, 1),
        wire.Stop(1, 128, 0),
        wire.StepOutput((wire.Token(-1, 0, 0, 0),)),
        wire.StepOutput((wire.Token(1, -1, 0, 0),)),
        wire.StepOutput((wire.Token(1, 0, -1, 0),)),
        wire.StepOutput((wire.Token(1, 0, 0, 1 << 31),)),
        wire.StepOutput((wire.Token(1, 0, 0, 0, "stop:x"),)),
        wire.StepOutput((wire.Token(1, 0, 0, 0, "stop\n"),)),
        wire.StepOutput((wire.Token(1, 0, 0, 0, "", float("nan")),)),
        wire.StepOutput((wire.Token(1, 0, 0, 0, "", 0.0, ((0, float("-inf")),)),)),
        wire.Done(1, wire.PromptSources(device=-1), wire.Stages(), 0.0, 0, 0.0, 0, 0),
        wire.Done(1, wire.PromptSources(), wire.Stages(float("nan")), 0.0, 0, 0.0, 0, 0),
        wire.Load(-1, 0, 0, 0, 0, False, {}),
        wire.Load(0, 0, 0, 0, 0, False, {"a b": 1.0}),
        wire.Load(0, 0, 0, 0, 0, False, {"a": float("nan")}),
        wire.Load(0, 0, 0, 0, 0, False, {f"c{n}": 1.0 for n in range(257)}),
        wire.Running(1, (1,) * 129),
    ],
    ids=repr,
)
def test_what_no_honest_peer_says_is_refused(message: wire.AnyMessage) -> None:
    with pytest.raises(MalformedFrame, match="not a message"):
        wire.decode(wire.encode(wire.Envelope(1, 2, message)), ())


def test_a_torn_key_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        wire.KeyBatch(1, True, bytes(17), b"")
    encoded = msgspec.msgpack.encode([1, 2, [24, 1, True, bytes(16), bytes(15)]])
    with pytest.raises(MalformedFrame, match="16 bytes"):
        wire.decode(encoded + xxhash.xxh3_64_digest(encoded), ())


@pytest.mark.D7
def test_no_flipped_bit_of_a_header_gets_through() -> None:
    for message in EXAMPLES:
        whole = wire.encode(wire.Envelope(1, 2, message))
        for bit in range(8 * len(whole)):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            with pytest.raises(MalformedFrame, match="checksum"):
                wire.decode(bytes(damaged), sizes(message))


@pytest.mark.B5
def test_noise_and_truncation_are_refused() -> None:
    noise = random.Random(1)
    for message in EXAMPLES:
        whole = wire.encode(wire.Envelope(1, 2, message))
        for cut in range(len(whole)):
            with pytest.raises(MalformedFrame):
                wire.decode(whole[:cut], sizes(message))
    for _ in range(2000):
        with pytest.raises(MalformedFrame):
            wire.decode(noise.randbytes(noise.randrange(1, 60)), ())


def test_an_enormous_header_is_refused_unread() -> None:
    with pytest.raises(MalformedFrame, match="limit"):
        wire.decode(memoryview(bytes(wire.MAX_HEADER_BYTES + 1)), ())
