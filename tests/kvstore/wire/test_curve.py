"""CURVE: the key files, and who gets in with which keys."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvferry.__main__ import main
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.wire.client import Client, LinkState, Received
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.curve import (
    NAMES,
    CurveKeys,
    Gate,
    guarded,
    is_local,
    load_keys,
    make_keys,
)
from kvferry.kvstore.wire.generation import Abort
from kvferry.kvstore.wire.handoff import Blocks
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.server import FromPeer, Server
from kvferry.kvstore.wire.sockets import new_incarnation

Context = zmq.Context[zmq.Socket[bytes]]
WELCOME = Welcome("prefill", {}, 16, 100, 8192, 4)


def fresh_keys(folder: Path) -> CurveKeys:
    make_keys(folder)
    return load_keys(folder)


@pytest.fixture
def keys(tmp_path: Path) -> CurveKeys:
    return fresh_keys(tmp_path / "keys")


@pytest.fixture
def ends() -> Iterator[list[Server | Client]]:
    made: list[Server | Client] = []
    yield made
    for end in made:
        end.close()


@pytest.fixture
def context(keys: CurveKeys) -> Iterator[Context]:
    """With the gate of the cluster's keys in it."""
    made: Context = zmq.Context()
    with guarded(made, keys):
        yield made
    made.destroy(0)


def serve(context: Context, keys: CurveKeys | None) -> Server:
    server = Server(context, "tcp://127.0.0.1:0", new_incarnation(), keys)
    server.open(WELCOME)
    return server


def connect(context: Context, server: Server, keys: CurveKeys | None) -> Client:
    hello = Hello(PROTOCOL, "decode", {})
    return Client(context, server.address, hello, new_incarnation(), keys)


def turn(server: Server, *clients: Client, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not until():
        assert time.monotonic() < deadline, "nothing happened for too long"
        for client in clients:
            client.tick(time.monotonic())
            assert not list(client.receive())
        server.tick(time.monotonic())
        assert not list(server.receive())
        time.sleep(0.001)


# -- who gets in -----------------------------------------------------------------------------------


def test_the_right_keys_carry_messages_and_payloads(
    keys: CurveKeys, context: Context, ends: list[Server | Client]
) -> None:
    server = serve(context, keys)
    client = connect(context, server, keys)
    ends += [client, server]
    turn(server, client, until=lambda: client.state is LinkState.READY)
    payload = os.urandom(4 << 20)
    (peer,) = server.peers.values()
    assert client.send(Abort(7)) and server.send(peer, Blocks(1, 1, 0, (9,)), [payload])
    deadline = time.monotonic() + 10
    to_server: list[FromPeer] = []
    to_client: list[Received] = []
    while not (to_server and to_client) and time.monotonic() < deadline:
        to_server += server.receive()
        to_client += client.receive()
    assert to_server[0].message == Abort(7)
    assert bytes(to_client[0].payloads[0]) == payload


@pytest.mark.B5
@pytest.mark.parametrize("which", ["none", "all others", "another client's", "another server's"])
def test_other_keys_get_nothing_and_the_server_lives(
    which: str, keys: CurveKeys, context: Context, ends: list[Server | Client], tmp_path: Path
) -> None:
    other = fresh_keys(tmp_path / "other")
    wrong = {
        "none": None,
        "all others": other,
        "another client's": CurveKeys(keys.server, other.client),
        "another server's": CurveKeys(other.server, keys.client),
    }[which]
    server = serve(context, keys)
    client = connect(context, server, wrong)
    ends += [client, server]
    turn(server, client, until=lambda: client.state is LinkState.REFUSED)
    assert client.refusal is not None and client.refusal.field == "encryption"
    assert not server.peers and not client.send(Abort(1))
    good = connect(context, server, keys)
    ends.append(good)
    turn(server, good, until=lambda: good.state is LinkState.READY)
    assert [peer.role for peer in server.peers.values()] == ["decode"]


def test_a_client_with_keys_does_not_speak_to_a_server_without(
    keys: CurveKeys, context: Context, ends: list[Server | Client]
) -> None:
    server = serve(context, None)
    client = connect(context, server, keys)
    ends += [client, server]
    turn(server, client, until=lambda: client.state is LinkState.REFUSED)
    assert not server.peers


def test_without_its_gate_a_server_lets_nobody_in(keys: CurveKeys) -> None:
    context: Context = zmq.Context()
    server = serve(context, keys)
    client = connect(context, server, keys)
    until = time.monotonic() + 0.5
    turn(server, client, until=lambda: time.monotonic() > until)
    assert client.state is not LinkState.READY and not server.peers
    client.close()
    server.close()
    context.destroy(0)


def test_raw_bytes_on_a_guarded_port_do_no_harm(
    keys: CurveKeys, context: Context, ends: list[Server | Client]
) -> None:
    server = serve(context, keys)
    ends.append(server)
    attacker = context.socket(zmq.STREAM)
    attacker.setsockopt(zmq.LINGER, 0)
    attacker.connect(server.address)
    identity = attacker.getsockopt(zmq.ROUTING_ID)
    assert isinstance(identity, bytes)
    for noise in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\3\0CURVE",
        os.urandom(999),
    ):
        attacker.send_multipart([identity, noise], zmq.NOBLOCK)
    client = connect(context, server, keys)
    ends.append(client)
    turn(server, client, until=lambda: client.state is LinkState.READY)
    attacker.close()


def test_refusals_are_counted_and_logged_once(
    keys: CurveKeys,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    context: Context = zmq.Context()
    gate = Gate(context, keys)
    server = serve(context, keys)
    wrong = CurveKeys(keys.server, fresh_keys(tmp_path / "other").client)
    clients = [connect(context, server, wrong) for _ in range(3)]
    with caplog.at_level(logging.WARNING):
        turn(server, *clients, until=lambda: gate.refused >= 3)
    assert sum("its key is not the cluster's" in line for line in caplog.messages) == 1
    for client in clients:
        client.close()
    server.close()
    gate.close()
    context.destroy(0)


# -- the files -------------------------------------------------------------------------------------


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_secret_files_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        make_keys(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    folder = tmp_path / "a" / "b"
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    modes = {path.name: mode_of(path) for path in folder.iterdir()}
    assert modes == {name: 0o600 if "secret" in name else 0o644 for name in NAMES}
    keys = load_keys(folder)
    assert keys.server != keys.client
    for pair in (keys.server, keys.client):
        assert pair.secret.decode() not in repr(keys), "a log must not show it"


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_never_overwritten(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(ConfigError, match=f"{name} exists"):
        make_keys(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_or_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    path = tmp_path / "keys" / name
    whole = path.read_bytes()
    for content in (b"", whole[:-2], whole + b"x", b"\xff" * 40, b"~" * 40):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            load_keys(tmp_path / "keys")
    path.unlink()
    with pytest.raises(ConfigError, match=f"{name}: No such file.*kvferry keys"):
        load_keys(tmp_path / "keys")


def test_files_of_two_clusters_do_not_mix(tmp_path: Path) -> None:
    make_keys(tmp_path / "a")
    make_keys(tmp_path / "b")
    shutil.copy(tmp_path / "b" / "server.key", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"server\.key does not belong"):
        load_keys(tmp_path / "a")


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_secret_that_others_can_read_is_refused(side: str, tmp_path: Path) -> None:
    make_keys(tmp_path)
    (tmp_path / f"{side}.key_secret").chmod(0o640)
    with pytest.raises(ConfigError, match="open to other users: chmod 600"):
        load_keys(tmp_path)


def test_a_build_without_curve_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    for use in (make_keys, load_keys):
        with pytest.raises(ConfigError, match="no CURVE"):
            use(tmp_path)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("tcp://127.0.0.1:5000", True),
        ("tcp://[::1]:5000", True),
        ("ipc:///tmp/x", True),
        ("tcp://0.0.0.0:5000", False),
        ("tcp://[::]:5000", False),
        ("tcp://10.0.0.1:5000", False),
        ("tcp://*:5000", False),
    ],
)
def test_what_counts_as_this_host(address: str, local: bool) -> None:
    assert is_local(address) is local


# -- the commands ----------------------------------------------------------------------------------


def test_the_command_makes_keys_and_refuses_to_repeat(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    before = load_keys(folder)
    assert main(["keys", str(folder)]) == 2
    assert "exists" in capsys.readouterr().err
    assert load_keys(folder) == before
    assert main(["keys"]) == 2 and "kvferry keys DIR" in capsys.readouterr().err
    assert main(["keys", "/proc/no/such"]) == 2
    assert "cannot write keys" in capsys.readouterr().err


@pytest.mark.parametrize("role", ["serve", "gateway", "prefill", "decode"])
def test_every_role_names_the_folder_that_has_no_keys(
    role: str, standin: Path, tmp_path: Path
) -> None:
    flags = {"serve": ["--port=0"], "gateway": ["--port=0", "--decode-node=tcp://127.0.0.1:9"]}
    command = [sys.executable, "-P", "-m", "kvferry", role, str(standin)]
    done = subprocess.run(
        [*command, f"--curve-keys={tmp_path}", *flags.get(role, [])],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"{tmp_path}/server.key_secret: No such file" in done.stderr
