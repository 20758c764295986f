"""Sending an answer to a client that may leave at any moment.

Owns the wire form of server-sent events and the watch over the client's connection, in plain
answers as in streams. A stream's status is decided by its first event, so that a refusal is still a
status; after that a failure is an event, and the connection is cut without `[DONE]`, because a
clean early end looks to every client like success. It knows no API and no node.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvferry.gateway.errors import ApiError, EngineFailure, to_response

log = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
_LINE_ENDS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)
"""In UTF-8 and as JSON escapes; outside strings JSON has none of them."""
_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


def event(data: bytes) -> bytes:
    """One event, of JSON. It is one line for every client.

    JSON has no raw line feed, but may have three more characters at which clients that are built on
    `str.splitlines`, httpx's `iter_lines` among them, end a line.
    """
    if b"\xc2\x85" in data or b"\xe2\x80" in data:
        for raw, escaped in _LINE_ENDS:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises
    ------
    ClientGone
        It left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_wait_until_gone(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await _cancel(task)
        await _cancel(gone)


class EventStream(Response):
    """A stream of ready-made events. `[DONE]` is the last of `events`, if it is to be sent."""

    def __init__(self, events: AsyncGenerator[bytes], keep_alive: float) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._keep_alive = keep_alive or None
        self._begun = False
        self._silent = True
        """Nothing was sent since the last look."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(scope, receive, send))
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            while not pump.done():
                await asyncio.wait(
                    {pump, gone}, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED
                )
                if pump.done():
                    break
                if gone.done():
                    raise ClientGone
                if self._silent:
                    await self._send(send, _KEEP_ALIVE)
                self._silent = True
            pump.result()
        finally:
            await _cancel(pump)
            await _cancel(gone)
            await self._events.aclose()

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for chunk in self._events:
                self._silent = False
                await self._send(send, chunk)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            log.exception("a stream failed")
            failure = EngineFailure("The gateway failed.", code="internal_error")
            await self._fail(failure, scope, receive, send)

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._begun:
            await to_response(error)(scope, receive, send)
        else:
            # The body stays unfinished, so the server cuts the connection.
            await self._send(send, event(error.body()))

    async def _send(self, send: Send, chunk: bytes) -> None:
        if not self._begun:
            self._begun = True
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(task: asyncio.Future[T]) -> None:
    if not task.done():
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
