"""`kvferry gateway`: the process around the application.

Owns the listening socket, the HTTP server and the process's end: the first signal stops new work
and lets running requests finish, the second ends at once. It knows no path and no request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from types import FrameType

import uvicorn
import zmq
from prometheus_client import disable_created_metrics
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.errors import BadRequest, shutting_down
from kvferry.gateway.http.app import build_app
from kvferry.gateway.prompt.model import ServedModel, load_model
from kvferry.gateway.router.nodes import Nodes
from kvferry.gateway.service import Gateway
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.collector import Collector
from kvferry.kvstore.process.lifecycle import StatusPipe
from kvferry.kvstore.process.listener import bind, inherited, url
from kvferry.kvstore.process.logs import set_up_logging
from kvferry.kvstore.process.settings import parse
from kvferry.kvstore.wire.codec import PROTOCOL
from kvferry.kvstore.wire.curve import load_keys
from kvferry.kvstore.wire.hello import Hello
from kvferry.kvstore.wire.sockets import new_incarnation

log = logging.getLogger(__name__)

COLLECTOR_SECONDS = 1.0
"""Between two looks whether it is time to collect garbage."""
LAST_SECONDS = 3
"""What connections get to take their last bytes after the drain."""


def run(argv: Sequence[str]) -> int:
    config = parse(
        GatewayConfig,
        argv,
        os.environ,
        prog="kvferry gateway",
        description="Serves the HTTP API for decode and prefill nodes that run elsewhere.",
    )
    set_up_logging("gateway", config.log_level, config.log_format)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    if not config.decode_node:
        raise ConfigError("no decode node: name one with --decode-node tcp://HOST:PORT")
    status = StatusPipe(config.status_fd)
    fd = config.fd
    with bind(config.host, config.port) if fd is None else inherited(fd) as listener:
        model = load_model(config, log.info)
        log.info("serves %s at %s", model.name, url(listener))
        serve(config, model, listener, status)
    return 0


def serve(
    config: GatewayConfig, model: ServedModel, listener: socket.socket, status: StatusPipe
) -> None:
    """Answers requests on `listener` until a signal ends it."""
    curve = load_keys(config.curve_keys) if config.curve_keys else None
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        nodes = Nodes(
            context,
            config.decode_node,
            config.prefill_node,
            config.store_node,
            Hello(PROTOCOL, "gateway", {"tokenizer": model.tokenizer_digest}),
            new_incarnation(),
            on_ready=lambda: status.report(ready=True),
            curve=curve,
        )
        gateway = Gateway(config, model, nodes)
        server = HttpServer(gateway, Collector())
        try:
            server.run(sockets=[listener])
        finally:
            gateway.intake.close()  # after a second signal nothing else has closed it
    finally:
        context.destroy(linger=0)


class Protocol(HttpToolsProtocol):
    """HTTP/1.1 whose answer to what is none is JSON, too, and that a closed connection ends."""

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        # Else the timer of the idle connection keeps it and its last request for 75 s.
        self._unset_keepalive_if_required()

    def send_400_response(self, msg: str) -> None:
        body = BadRequest(msg, code="invalid_http").body()
        head = (
            "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """uvicorn with a drain before its shutdown."""

    def __init__(self, gateway: Gateway, collector: Collector | None = None) -> None:
        _quieten(gateway.config.log_level)
        super().__init__(
            uvicorn.Config(
                build_app(gateway),
                http=Protocol,
                loop="uvloop",
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=LAST_SECONDS,
            )
        )
        self._gateway = gateway
        self._collector = collector
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if self._collector is not None:
            self._collect(self._collector)
        await super().startup(sockets)

    def _collect(self, collector: Collector) -> None:
        collector.turn(idle=not self._gateway.open)
        asyncio.get_running_loop().call_later(COLLECTOR_SECONDS, self._collect, collector)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())
        else:
            self._gateway.fail_all(shutting_down())
            self.should_exit = self.force_exit = True

    async def _drain_and_exit(self) -> None:
        await self._gateway.drain(self._gateway.config.shutdown_timeout)
        self.should_exit = True


def _quieten(level: str) -> None:
    """uvicorn's own lines: its warnings, but not the cut that ends a failed stream."""
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(level.upper() if level == "debug" else logging.WARNING)
    logger.addFilter(lambda line: "without completing response" not in line.getMessage())
