"""The socket for HTTP: its URL, and what is said when it cannot be had."""

from __future__ import annotations

import os
import socket

import pytest

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.listener import bind, inherited, url


def test_urls() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert url(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"
    if socket.has_ipv6:
        with bind("::1", 0) as listener:
            assert url(listener).startswith("http://[::1]:")


def test_an_address_that_cannot_be_had_is_named() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use: stop what"):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="--port is 65536, but must be at most 65535"):
        bind("127.0.0.1", 65536)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1 port 0: "):
        bind("192.0.2.1", 0)


def test_what_is_inherited_is_the_same_socket_or_refused() -> None:
    with bind("127.0.0.1", 0) as listener, inherited(os.dup(listener.fileno())) as same:
        assert same.getsockname() == listener.getsockname()
    reader, writer = os.pipe()
    with pytest.raises(ConfigError, match=f"--fd {reader} is no socket"):
        inherited(reader)
    os.close(reader)
    os.close(writer)
