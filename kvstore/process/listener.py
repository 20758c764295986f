"""The socket on which HTTP is served: bound here, or inherited from whoever bound it before.

Owns what is said when it cannot be had. A supervisor binds it and hands it to every gateway it
starts; a gateway that runs alone binds its own. What is served on it is no matter here.
"""

from __future__ import annotations

import errno
import socket

from kvferry.kvstore.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """The listening socket; ConfigError if the address cannot be had."""
    if port > 65535:
        raise ConfigError(f"--port is {port}, but must be at most 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use: stop what listens there, or choose --port"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}") from None


def inherited(fd: int) -> socket.socket:
    """The socket that a supervisor has passed on as `--fd`; ConfigError if it is none."""
    try:
        return socket.socket(fileno=fd)
    except OSError as error:
        raise ConfigError(f"--fd {fd} is no socket: {error.strerror}") from None


def url(listener: socket.socket) -> str:
    """Where clients reach it."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
