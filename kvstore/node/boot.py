"""How a node process starts: cores, logging, signals, its socket, its identity, then the world.

Owns the order of these steps, the same for both nodes. The engine is loaded by a callable that the
node passes in, because nothing here may know what computes. The socket is bound first and its
address reported at once; hellos are answered when the engine is there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import zmq

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.node.config import NodeConfig
from kvferry.kvstore.process.cores import apply_cores
from kvferry.kvstore.process.lifecycle import StatusPipe, StopSignal
from kvferry.kvstore.process.logs import set_up_logging
from kvferry.kvstore.process.model_files import (
    ModelFiles,
    content_digest,
    resolve_model,
    tokenizer_digest,
)
from kvferry.kvstore.wire.client import Client
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.curve import CurveKeys, guarded, is_local, load_keys
from kvferry.kvstore.wire.hello import Hello, Welcome
from kvferry.kvstore.wire.server import Server
from kvferry.kvstore.wire.sockets import new_incarnation

log = logging.getLogger(__name__)


class Computes(Protocol):
    """What the world may know of an engine before it is used."""

    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def identity(self) -> Mapping[str, str]: ...
    @property
    def block_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Booted:
    """A node's surroundings, ready to load an engine."""

    role: str
    context: zmq.Context[zmq.Socket[bytes]]
    server: Server
    status: StatusPipe
    stop: StopSignal
    files: ModelFiles
    cache_dir: Path
    curve: CurveKeys | None

    def fingerprint(self, spec: Computes) -> dict[str, str]:
        """Everything that changes the bytes of a block, for hellos and root keys."""
        return {
            **spec.identity,
            "block_size": str(spec.block_size),
            "weights": content_digest(self.files.folder, self.cache_dir),
            "tokenizer": tokenizer_digest(self.files.folder),
        }

    def connector(self, spec: Computes) -> Callable[[str], Client]:
        """What makes links to other nodes."""
        hello = Hello(PROTOCOL, self.role, self.fingerprint(spec))
        return lambda address: Client(
            self.context, address, hello, self.server.incarnation, self.curve, self.server.peer_log
        )

    def open(self, spec: Computes, max_num_seqs: int) -> None:
        """Starts answering hellos."""
        fingerprint = self.fingerprint(spec)
        self.server.open(
            Welcome(
                self.role,
                fingerprint,
                spec.block_size,
                spec.num_blocks,
                spec.max_model_len,
                max_num_seqs,
            )
        )
        self.status.report(ready=True)
        log.info(
            "ready at %s: %d blocks of %d tokens, up to %d tokens a request",
            self.server.address,
            spec.num_blocks,
            spec.block_size,
            spec.max_model_len,
        )


@contextmanager
def boot(role: str, config: NodeConfig) -> Iterator[Booted]:
    """Everything up to the engine. Call it before torch is imported.

    Raises
    ------
    ConfigError
        The model, the address or the keys cannot be used.
    """
    set_up_logging(config.name or role, config.log_level, config.log_format)
    apply_cores(config.cores, config.threads, config.nice, config.spin)
    status = StatusPipe(config.status_fd)
    curve = load_keys(config.curve_keys) if config.curve_keys else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        with guarded(context, curve):
            server = bind(context, config.listen, curve)
            status.report(address=server.address)
            files = resolve_model(config.model, config.cache_dir, log.info)
            with StopSignal() as stop:
                yield Booted(role, context, server, status, stop, files, config.cache_dir, curve)
    finally:
        context.destroy(0)


def bind(context: zmq.Context[zmq.Socket[bytes]], listen: str, curve: CurveKeys | None) -> Server:
    """The process's one socket; ConfigError when the address cannot be had."""
    try:
        server = Server(context, listen, new_incarnation(), curve)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen on {listen!r}: {error}") from error
    if curve is None and not is_local(server.address):
        log.warning(
            "%s can be reached from other hosts, by anybody and unencrypted: "
            "make keys with `kvferry keys DIR` and give --curve-keys DIR to every process",
            server.address,
        )
    return server
