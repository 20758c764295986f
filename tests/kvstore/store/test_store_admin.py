"""Care of the cache: what is cleared, pinned and counted, also while the disk is still read."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.kvstore.keys import tenant_key
from kvferry.kvstore.tiers.disk.files import FileSystem, Scan
from kvferry.kvstore.wire.client import Client, LinkState
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.sockets import new_incarnation
from kvferry.kvstore.wire.store import CacheReply, CacheRequest
from kvferry.tests.rigs.store.rig import StoreRig, chain_keys


class SlowScan(FileSystem):
    """Files that are not read before they may be."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.may = threading.Event()

    def scan(self, number: int) -> Scan:
        assert self.may.wait(20)
        return super().scan(number)


def test_a_tenant_that_is_cleared_while_files_are_still_read_does_not_come_back(
    tmp_path: Path,
) -> None:
    alice, bob = chain_keys("x", 30, "alice"), chain_keys("x", 10, "bob")
    rig = StoreRig(tmp_path, disk=4 << 20)
    client = rig.client()
    rig.put(client, alice, tenant=tenant_key("alice"))
    rig.put(client, bob, tenant=tenant_key("bob"))
    rig.settle()
    rig.close()
    files = SlowScan(tmp_path / "blocks")
    files.lock()
    rig = StoreRig(tmp_path, disk=4 << 20, files=files)
    client = rig.client(wait=False)
    rig.until(lambda: rig.storage_or_none is not None)
    assert rig.node.figures()["recovering_files"] > 0 and not client.link.attached
    rig.answer(client.admin("clear", tenant=tenant_key("alice")))
    files.may.set()
    rig.until(lambda: client.link.attached)
    rig.settle()
    assert rig.answer(client.locate(alice)) == ""
    assert rig.answer(client.locate(bob)) == "d" * 10
    written = b"".join(path.read_bytes() for path in (tmp_path / "blocks").glob("*.kv"))
    assert tenant_key("alice") not in written and tenant_key("bob") in written
    rig.close()


def ask(rig: StoreRig, action: str, **fields: Any) -> dict[str, Any]:
    """What a store says to a gateway, which attaches to nothing."""
    hello = Hello(PROTOCOL, "gateway", {})
    client = Client(rig.context, rig.server.address, hello, new_incarnation())
    answers: list[CacheReply] = []

    def turn() -> None:
        client.tick(time.monotonic())
        answers.extend(it.message for it in client.receive() if isinstance(it.message, CacheReply))
        rig.turn()

    deadline, sent = time.monotonic() + 20, False
    while not answers:
        assert time.monotonic() < deadline
        turn()
        if client.state is LinkState.READY and not sent:
            sent = client.send(CacheRequest(7, action, **fields))
        time.sleep(0.001)
    client.close()
    answer: dict[str, Any] = msgspec.json.decode(answers[0].body)
    return answer


def test_before_a_node_has_come_a_tenant_is_refused_and_all_is_cleared(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path, disk=4 << 20)
    rig.put(rig.client(), chain_keys("x", 5))
    rig.settle()
    rig.close()
    rig = StoreRig(tmp_path, disk=4 << 20)
    assert rig.bytes_on_disk() > 0
    assert "no node has come yet" in ask(rig, "clear", tenant=tenant_key("a"))["error"]
    assert ask(rig, "inspect", keys=b"k" * 48) == {"tiers": "---"}
    assert ask(rig, "stats")["tiers"]["disk"]["capacity_bytes"] == 4 << 20
    assert ask(rig, "clear")["cleared_disk"] >= 1
    assert rig.bytes_on_disk() == 0
    assert ask(rig, "clear", tenant=tenant_key("a"))["cleared_disk"] == 0
    rig.close()


class Broken(FileSystem):
    def write(self, fd: int, parts: Sequence[bytes | memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "broken")


def test_a_broken_disk_holds_up_no_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.kvstore.tiers.disk.tier.FAILING_REST_S", 0.6)
    files = Broken(tmp_path / "blocks")
    files.lock()
    rig = StoreRig(tmp_path, disk=4 << 20, files=files)
    rig.put(rig.client(), chain_keys("x", 5))
    rig.until(lambda: rig.counters["unwritten_bytes"] > 0)
    rig.storage.drain(lambda: False, time.monotonic)  # it would wait for ever
    assert rig.counters["disk_write_errors"] >= 1
    rig.close()
