"""Encryption between hosts: the cluster's CURVE keys, and who may connect with them.

    DIR/server.key_secret   0600   proves that a node is of the cluster
    DIR/server.key          0644   what clients know nodes by
    DIR/client.key_secret   0600   proves that a client is of the cluster
    DIR/client.key          0644   what nodes know clients by

Owns the four files, the same on every host, and the command that makes them; the socket options
that follow from them; and the thread that ZeroMQ asks about a client's key (ZAP). A server requires
the cluster's client key and nothing else; without that thread it lets nobody in. Knows no message.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.settings import parse, positional

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"kvferry"
QUIET_SECONDS = 10.0
"""After a refused key was logged, others are only counted for so long."""
NAMES = ("server.key_secret", "server.key", "client.key_secret", "client.key")
_KEY_CHARACTERS = 40


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Z85 text."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"KeyPair(public={self.public!r})"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """What every process of the cluster has."""

    server: KeyPair
    client: KeyPair

    def protect_server(self, socket: zmq.Socket[bytes]) -> None:
        """Call it before the socket is bound, with a `Gate` in its context."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server.secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def protect_client(self, socket: zmq.Socket[bytes]) -> None:
        """Call it before the socket is connected."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client.secret)


# -- files -----------------------------------------------------------------------------------------


def make_keys(folder: Path) -> None:
    """Writes a new cluster's keys.

    Raises
    ------
    ConfigError
        A key is there already, or the folder cannot be written.
    """
    _require_curve()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in NAMES:
            if os.path.lexists(folder / name):
                raise ConfigError(f"{folder / name} exists: choose another folder")
        for side in ("server", "client"):
            public, secret = zmq.curve_keypair()
            _write(folder / f"{side}.key_secret", secret, 0o600)
            _write(folder / f"{side}.key", public, 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write keys to {folder}: {error.strerror}") from None


def load_keys(folder: Path) -> CurveKeys:
    """The keys that `make_keys` wrote there.

    Raises
    ------
    ConfigError
        A file is missing, is no key, does not fit the other one, or is open to other users.
    """
    _require_curve()
    server, client = (_load_pair(folder, side) for side in ("server", "client"))
    return CurveKeys(server, client)


def _load_pair(folder: Path, side: str) -> KeyPair:
    secret_path = folder / f"{side}.key_secret"
    secret, public = _read(secret_path), _read(folder / f"{side}.key")
    if secret_path.stat().st_mode & 0o077:
        raise ConfigError(f"{secret_path} is open to other users: chmod 600 {secret_path}")
    try:
        belongs = zmq.curve_public(secret) == public
    except (zmq.ZMQError, ValueError):
        raise ConfigError(f"{secret_path} is no key: `kvferry keys` writes them") from None
    if not belongs:
        raise ConfigError(
            f"{folder}: {side}.key does not belong to {side}.key_secret; copy the whole folder"
        )
    return KeyPair(public, secret)


def _write(path: Path, key: bytes, mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)  # the umask may have taken something away
        file.write(key + b"\n")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(_KEY_CHARACTERS + 3).strip()
    except OSError as error:
        raise ConfigError(
            f"no CURVE key {path}: {error.strerror}; `kvferry keys {path.parent}` makes keys"
        ) from None
    if len(text) != _KEY_CHARACTERS:
        raise ConfigError(f"{path} is no key: `kvferry keys` writes them")
    return text


def _require_curve() -> None:
    if not zmq.has("curve"):
        raise ConfigError("this build of libzmq has no CURVE: install pyzmq from its own wheel")


# -- who may come in -------------------------------------------------------------------------------


class Gate:
    """The thread that ZeroMQ asks whether a client may connect to a server of this context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys) -> None:
        self.refused = 0
        self._allowed = z85.decode(keys.client.public)
        self._quiet_until = 0.0
        self._requests = context.socket(zmq.REP)
        self._requests.setsockopt(zmq.LINGER, 0)
        self._requests.bind(ZAP_ENDPOINT)
        self._end, far_end = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._end.bind(f"inproc://kvferry.gate.{id(self)}")
        far_end.connect(f"inproc://kvferry.gate.{id(self)}")
        self._thread = threading.Thread(
            target=self._run, args=(far_end,), name="curve", daemon=True
        )
        self._thread.start()

    def _run(self, end: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(self._requests, zmq.POLLIN)
        poller.register(end, zmq.POLLIN)
        while end not in dict(poller.poll()):
            self._requests.send_multipart(self._answer(self._requests.recv_multipart()))
        self._requests.close(0)
        end.close(0)

    def _answer(self, request: Sequence[bytes]) -> list[bytes]:
        version, number, _, address, _, mechanism, *credentials = request
        if mechanism == b"CURVE" and credentials == [self._allowed]:
            return [version, number, b"200", b"OK", b"", b""]
        self.refused += 1
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            log.warning("refused a client at %s: its key is not the cluster's", address.decode())
        return [version, number, b"400", b"unknown key", b"", b""]

    def close(self) -> None:
        self._end.send(b"")
        self._thread.join()
        self._end.close(0)


@contextmanager
def guarded(context: zmq.Context[zmq.Socket[bytes]], keys: CurveKeys | None) -> Iterator[None]:
    """Keeps a gate meanwhile, if there are keys. Leave it before the context is destroyed."""
    if keys is None:
        yield
        return
    gate = Gate(context, keys)
    try:
        yield
    finally:
        gate.close()


def is_local(address: str) -> bool:
    """Whether a bound address can be reached from this host only."""
    parts = urlsplit(address)
    if parts.scheme in ("ipc", "inproc"):
        return True
    try:
        return ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False


# -- `kvferry keys` --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeysConfig:
    """`kvferry keys`."""

    keys_dir: Path | None = positional(None, "where to write the keys")


def run(argv: Sequence[str]) -> int:
    config = parse(
        KeysConfig,
        argv,
        os.environ,
        prog="kvferry keys",
        description="Makes the keys that let the processes of one cluster, and nobody else, "
        "connect to each other: copy the folder to every host, and give --curve-keys DIR.",
    )
    if config.keys_dir is None:
        raise ConfigError("no folder: kvferry keys DIR")
    make_keys(config.keys_dir)
    print(f"wrote {', '.join(NAMES)} to {config.keys_dir}: copy the folder to every host")
    return 0
