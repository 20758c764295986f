"""Who misuses a node's socket, as a client or as a server, and the server that must stand it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import zmq

from kvferry.kernels.engines.standin import StandinConfig, standin_reply
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL, AnyMessage
from kvferry.kvstore.wire.handoff import Blocks, Offer, Probe
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.message import Message
from kvferry.kvstore.wire.server import Peer, Server
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.tests.rigs.servers.served import Served
from kvferry.tests.rigs.servers.wire_fuzz import KINDS, Fuzz

Context = zmq.Context[zmq.Socket[bytes]]
CONFIG = StandinConfig()
BLOCK_BYTES = 16 * CONFIG.kv_bytes_per_token


class Victim:
    """A `kvferry serve` with a prefill node, and what it must look like again afterwards."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.served = Served(model, folder / "log", "--prefill-nodes=1")
        found = re.findall(r" (prefill|decode) INFO ready at (tcp://\S+?):? ", self.log)
        self.addresses: dict[str, str] = dict(found)
        assert set(self.addresses) == {"prefill", "decode"}, self.log
        self.answers(1)
        self.answers(2)
        self.processes = self.served.children()
        self.fds = self.open_fds()
        self.files = sorted(folder.iterdir())
        self.folder = folder

    @property
    def log(self) -> str:
        return self.served.log.read_text()

    def open_fds(self) -> dict[str, int]:
        return {
            role: len(os.listdir(f"/proc/{pid}/fd")) for role, pid in self.served.children().items()
        }

    def answers(self, seed: int) -> None:
        """A prompt long enough for the prefill node gets its reference."""
        prompt = [3 + (seed * 101 + index * 31 + index // 7) % 250 for index in range(300)]
        assert self.served.ids(prompt, 20) == standin_reply(prompt, CONFIG, 20)

    def alive(self) -> None:
        assert self.served.children() == self.processes, self.log[-5000:]

    def unharmed(self) -> None:
        self.alive()
        self.answers(time.monotonic_ns())
        wait(lambda: self.open_fds() == self.fds, 60, lambda: f"{self.open_fds()}, not {self.fds}")
        assert sorted(self.folder.iterdir()) == self.files
        assert "Traceback" not in self.log
        self.alive()


def wait(condition: Callable[[], bool], seconds: float, says: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, says()
        time.sleep(0.02)


class Intruder:
    """A client that has said hello in a role, with the fingerprint that it was told."""

    def __init__(
        self, context: Context, address: str, role: str, fingerprint: dict[str, str]
    ) -> None:
        self.got: list[AnyMessage] = []
        hello = Hello(PROTOCOL, role, fingerprint)
        self._connect = partial(Client, context, address, hello, new_incarnation())
        self.client = self._connect()
        self.until(lambda: self.client.state is LinkState.READY)

    @classmethod
    def learned(cls, context: Context, address: str, role: str) -> Intruder:
        scout = cls(context, address, "gateway", {})
        assert scout.client.welcome is not None
        fingerprint = scout.client.welcome.fingerprint
        scout.client.close()
        return cls(context, address, role, fingerprint)

    def turn(self) -> None:
        self.client.tick(time.monotonic())
        self.got = [received.message for received in self.client.receive()]

    def until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"nothing happened: {self.client.state}"
            self.turn()
            time.sleep(0.001)

    def say(self, message: Message, payloads: list[bytes]) -> None:
        """Sends it; meets the server again first, if what was said before ended the link."""
        self.turn()
        if self.client.state is not LinkState.READY:
            self.client.close()
            self.client = self._connect()
            self.until(lambda: self.client.state is LinkState.READY)
        self.client.send(message, payloads)  # type: ignore[arg-type]

    def heard(self) -> None:
        """Until the server has answered a hello behind everything said before."""
        self.client.close()
        self.client = self._connect()
        self.until(lambda: self.client.state is LinkState.READY)


class Impostor:
    """A server that a decode node takes for a prefill node, and that answers anything."""

    def __init__(self, context: Context, welcome: Welcome, fuzz: Fuzz, answers: int) -> None:
        self.server = Server(context, "tcp://127.0.0.1:0", new_incarnation())
        self.server.open(welcome)
        self._fuzz = fuzz
        self._answers = answers
        """How many messages it sends for each one that comes."""
        self._kinds = [kind for kind in KINDS if kind.__name__ not in ("Refused", "HelloRequired")]

    def turn(self) -> None:
        self.server.tick(time.monotonic())
        for received in self.server.receive():
            if isinstance(received.message, Offer | Probe):
                for _ in range(self._answers):
                    self._answer(received.peer, received.message)

    def _told_apart(self, message: Blocks, payloads: Sequence[bytes]) -> Blocks:
        """No whole block has the checksum that it came with: with the right one, under the right
        transfer, it would be what a node sends that computes wrongly, and be believed."""
        sums = (
            total ^ (len(payload) == BLOCK_BYTES)
            for total, payload in zip(message.checksums, payloads, strict=True)
        )
        return msgspec.structs.replace(message, checksums=tuple(sums))

    def _answer(self, peer: Peer, asked: Offer | Probe) -> None:
        fuzz = self._fuzz
        message = fuzz.absurd(fuzz.dice.choice(self._kinds))
        if "transfer" in message.__struct_fields__ and fuzz.dice.random() < 0.9:
            message = msgspec.structs.replace(message, transfer=asked.transfer, epoch=asked.epoch)
        payloads = fuzz.payloads(message)
        if isinstance(message, Blocks):
            message = self._told_apart(fuzz.fitted(message, payloads), payloads)
        self.server.send(peer, message, payloads)  # type: ignore[arg-type]
