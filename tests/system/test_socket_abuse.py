"""Everything wrong that can be sent to a node's socket, against real processes.

After it all the same processes still give the reference answer, with nothing left open.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import xxhash
import zmq

from kvferry.kernels.engines.standin import standin_reply
from kvferry.kvstore.keys import chain, pack_tokens
from kvferry.kvstore.wire.codec import PROTOCOL, AnyMessage, Envelope, encode
from kvferry.kvstore.wire.generation import (
    Abort,
    Done,
    Generate,
    Rejected,
    Sampling,
    StepOutput,
)
from kvferry.kvstore.wire.handoff import Blocks
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.status import Drain
from kvferry.tests.rigs.servers.intruders import CONFIG, Context, Impostor, Intruder, Victim
from kvferry.tests.rigs.servers.served import listening
from kvferry.tests.rigs.servers.wire_fuzz import KINDS, Fuzz
from kvferry.tests.rigs.slow import slow_but

pytestmark = [pytest.mark.D9, pytest.mark.B5]


@pytest.fixture(scope="module")
def victim(standin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    made = Victim(standin, tmp_path_factory.mktemp("victim"))
    yield made
    assert made.served.stop() == 0, made.log[-5000:]


@pytest.fixture
def context() -> Iterator[Context]:
    made: Context = zmq.Context()
    yield made
    made.destroy(0)


@pytest.fixture(params=["decode", "prefill"])
def address(request: pytest.FixtureRequest, victim: Victim) -> str:
    return victim.addresses[request.param]


# -- addresses ------------------------------------------------------------------------------------


def test_links_to_addresses_that_lead_nowhere_are_given_up(
    victim: Victim, context: Context
) -> None:
    """First, since a node keeps such links for ten seconds: the next tests see them go."""
    gateway = Intruder.learned(context, victim.addresses["decode"], "gateway")
    prompt = [3 + index % 250 for index in range(400)]
    nowhere = ("tcp://127.0.0.1:1", "tcp://nonsense", "inproc://x", "", victim.addresses["decode"])
    for number, address in enumerate(nowhere, 1):
        gateway.say(request_of(number, prompt, address), [])
        time.sleep(0.1)  # until the node has chosen where to prefill
        gateway.say(Abort(number), [])
    gateway.heard()
    gateway.client.close()
    victim.alive()
    victim.answers(3)


# -- bytes that are no messages --------------------------------------------------------------------


class Bomb:
    """A pickle that makes a file wherever it is loaded."""

    def __init__(self, trap: Path) -> None:
        self._trap = trap

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mknod, (str(self._trap),)


def summed(body: bytes) -> bytes:
    """With the checksum that a header ends with."""
    return body + xxhash.xxh3_64_digest(body)


def noise(fuzz: Fuzz, trap: Path) -> Iterator[list[bytes]]:
    bomb = pickle.dumps(Bomb(trap))
    hello = encode(Envelope(5, 0, Hello(PROTOCOL, "gateway", {})))
    whole = hello[:-8]
    yield from ([bomb], [summed(bomb)], [hello, bomb], [b"", bomb], [bomb] * 50)
    yield from ([], [b""], [b"", b""], [summed(b"")], [summed(b"\x93")], [b"\x00" * 8])
    yield from ([hello[:end]] for end in range(len(hello)))
    yield from ([summed(whole[:end])] for end in range(len(whole)))
    yield [summed(b"\x91" * 100_000)]  # nested too deep
    yield [summed(b"\xdd\xff\xff\xff\xff")]  # announces 4 billion items
    yield [summed(b"\x93\x01\x02\xdc\xff\xff\x01")]
    yield [os.urandom(32 << 20)]
    yield [b""] * 50_000
    yield [encode(Envelope(5, 0, Blocks(1, 1, 0, (1,) * 1000)))] + [b"x"] * 999
    for _ in range(3000):
        frames = [
            fuzz.dice.randbytes(fuzz.dice.choice((1, 8, 40)))
            for _ in range(fuzz.dice.choice((1, 2, 9)))
        ]
        yield [summed(frames[0]), *frames[1:]] if fuzz.dice.random() < 0.5 else frames


def strangers(fuzz: Fuzz) -> Iterator[list[bytes]]:
    """Well-formed, from nobody: hellos of every absurd kind, and all messages without one."""
    for protocol in (0, PROTOCOL - 1, PROTOCOL + 1, -1, (1 << 63) - 1):
        yield [encode(Envelope(1, 0, Hello(protocol, "decode", {})))]
    yield [encode(Envelope(1, 0, Hello(PROTOCOL, "x" * 5000, {})))]
    yield [encode(Envelope(1, 0, Hello(PROTOCOL, "decode", {"dtype": "x" * (8 << 20)})))]
    many = {str(number): "v" for number in range(200_000)}
    yield [encode(Envelope(1, 0, Hello(PROTOCOL, "decode", many)))]
    for _ in range(10):
        for kind in KINDS:
            message = fuzz.absurd(kind)
            sender, receiver = fuzz.dice.choice(((0, 0), (-1, -1), (1 << 62, 1 << 63)))
            body: AnyMessage = message  # type: ignore[assignment]
            yield [encode(Envelope(sender, receiver, body)), *fuzz.payloads(message)]


@pytest.mark.parametrize("what", slow_but(["noise", "strangers"], "strangers"))
def test_what_is_no_message_of_a_peer_does_no_harm(
    what: str, victim: Victim, address: str, context: Context, tmp_path: Path
) -> None:
    fuzz = Fuzz(7)
    trap = tmp_path / "touched"
    attacker = context.socket(zmq.DEALER)
    attacker.setsockopt(zmq.LINGER, 0)
    attacker.connect(address)
    messages = noise(fuzz, trap) if what == "noise" else strangers(fuzz)
    for frames in messages:
        if frames:
            attacker.send_multipart(frames)
        while attacker.poll(0):
            attacker.recv_multipart()
    # Answered behind all of it, so all of it has been read.
    attacker.send(encode(Envelope(9, 0, Hello(PROTOCOL, "gateway", {}))))
    deadline = time.monotonic() + 60
    while True:
        assert attacker.poll(int(1e3 * (deadline - time.monotonic()))), "no answer any more"
        reply = msgspec.msgpack.decode(attacker.recv_multipart()[0][:-8])
        if reply[1] == 9 and reply[2][0] == Welcome.__struct_config__.tag:
            break
    attacker.close()
    assert not trap.exists()
    victim.unharmed()


def test_raw_tcp_does_no_harm(victim: Victim, address: str, context: Context) -> None:
    stream = context.socket(zmq.STREAM)
    stream.setsockopt(zmq.LINGER, 0)
    for junk in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1 << 16),
        b"\xff" + bytes(8) + b"\x7f\x03\x00NULL",
        b"",
    ):
        stream.connect(address)
        identity = stream.getsockopt(zmq.ROUTING_ID)
        assert isinstance(identity, bytes)
        stream.send_multipart([identity, junk])
    time.sleep(0.2)
    stream.close()
    victim.unharmed()


# -- messages of peers -----------------------------------------------------------------------------


@pytest.mark.parametrize("role", slow_but(["gateway", "decode", "prefill", "nobody"], "gateway"))
def test_every_message_with_absurd_contents_does_no_harm(
    role: str, victim: Victim, address: str, context: Context
) -> None:
    fuzz = Fuzz(11, tuple(victim.addresses.values()))
    intruder = Intruder.learned(context, address, role)
    for kind in KINDS:
        if kind is Drain:
            continue  # a peer may ask for it
        for _ in range(20):
            message = fuzz.absurd(kind)
            payloads = fuzz.payloads(message)
            if isinstance(message, Blocks) and fuzz.dice.random() < 0.5:
                message = fuzz.fitted(message, payloads)
            intruder.say(message, payloads)
        intruder.heard()
        victim.alive()
    intruder.client.close()
    victim.unharmed()


@pytest.mark.slow
def test_requests_with_one_absurd_field_do_no_harm(victim: Victim, context: Context) -> None:
    fuzz = Fuzz(13, tuple(victim.addresses.values()))
    intruder = Intruder.learned(context, victim.addresses["decode"], "gateway")
    for _ in range(300):
        request = fuzz.nearly(fuzz.generate(victim.addresses["prefill"]))
        intruder.say(request, [])
        if fuzz.dice.random() < 0.9:
            intruder.say(Abort(request.request), [])
        if fuzz.dice.random() < 0.1:
            intruder.heard()
            victim.alive()
    intruder.heard()
    intruder.client.close()
    victim.unharmed()


def test_offers_with_one_absurd_field_do_no_harm(victim: Victim, context: Context) -> None:
    fuzz = Fuzz(17)
    intruder = Intruder.learned(context, victim.addresses["prefill"], "decode")
    others = [kind for kind in KINDS if kind is not Drain]
    for _ in range(300):
        offer = fuzz.nearly(fuzz.offer())
        intruder.say(offer, [])
        for kind in fuzz.dice.sample(others, 2):
            message = fuzz.absurd(kind)
            if "transfer" in kind.__struct_fields__:
                message = msgspec.structs.replace(
                    message, transfer=offer.transfer, epoch=offer.epoch
                )
            intruder.say(message, fuzz.payloads(message))
        if fuzz.dice.random() < 0.1:
            intruder.heard()
            victim.alive()
    intruder.heard()
    intruder.client.close()
    victim.unharmed()


@pytest.mark.parametrize(
    ("answers", "rounds"),
    [pytest.param(12, 6, id="nonsense", marks=pytest.mark.slow), pytest.param(0, 1, id="nothing")],
)
def test_a_prefill_node_that_answers_nonsense_costs_only_time(
    answers: int, rounds: int, victim: Victim, context: Context
) -> None:
    fuzz = Fuzz(19)
    gateway = Intruder.learned(context, victim.addresses["decode"], "gateway")
    scout = Intruder(context, victim.addresses["prefill"], "gateway", {})
    welcome = scout.client.welcome
    assert welcome is not None
    scout.client.close()
    for number in range(1, rounds + 1):
        # A new one each time: one that was caught is avoided for a while.
        impostor = Impostor(context, welcome, fuzz, answers)
        prompt = [3 + (number * 57 + index * 31 + index // 7) % 250 for index in range(400)]
        gateway.say(request_of(number, prompt, impostor.server.address), [])
        ids: list[int] = []
        ended = False
        deadline = time.monotonic() + 30
        while not ended:
            assert time.monotonic() < deadline, victim.log[-3000:]
            impostor.turn()
            gateway.turn()
            for message in gateway.got:
                assert not isinstance(message, Rejected), message
                if isinstance(message, StepOutput):
                    ids += [token.token for token in message.tokens]
                ended = ended or (isinstance(message, Done) and message.request == number)
            time.sleep(0.001)
        assert ids == standin_reply(prompt, CONFIG, len(ids)) and len(ids) == 8
        impostor.server.close()
        victim.alive()
    gateway.client.close()
    victim.unharmed()


def request_of(number: int, prompt: list[int], prefill_node: str) -> Generate:
    """Eight greedy tokens."""
    root = os.urandom(16)
    return Generate(
        request=number,
        prompt=pack_tokens(prompt),
        root=root,
        keys=b"".join(chain(root, prompt, 16)),
        max_tokens=8,
        min_tokens=0,
        eos_ids=(),
        stop_token_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=1,
        choices=1,
        prefill_nodes=(prefill_node,),
    )


# -- who can reach it ------------------------------------------------------------------------------


def test_nothing_listens_beyond_this_host(victim: Victim) -> None:
    processes = {**victim.served.children(), "serve": victim.served.process.pid}
    found = {role: listening(pid) for role, pid in processes.items()}
    assert found["decode"] and found["prefill"] and found["gateway"]
    for role, addresses in found.items():
        for one in addresses:
            host = one.partition(":")[0]
            assert host in ("0100007F", "00000000000000000000000001000000"), f"{role}: {one}"
