"""Where each body is read: on the event loop, on a thread beside it, or in another process.

Owns the threads and that process. The loop has streams to serve, so it reads short bodies only;
decoding holds the interpreter whatever thread does it, so a body whose decoding alone would take as
long as several tokens is read by another process. What a body comes to is for `reader`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar, overload

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.intake.reader import (
    PreparedRequest,
    ReadPrompts,
    ReadRequest,
)
from kvferry.gateway.intake.worker import ReaderProcess
from kvferry.gateway.protocols.common import Body, ReadingContext
from kvferry.gateway.protocols.tokens import Detokenize, Tokenize

THREADS = 2
INLINE_BYTES = 2048
"""Bodies up to this size are read on the event loop: about a millisecond."""
LARGE_BYTES = 1 << 20
"""Decoding this much holds the interpreter for 6 ms if it is text with escapes, 20 ms if ids."""
LARGE_OBJECTS = 20_000
"""Decoding this many takes 20 ms, a few more characters each."""
T = TypeVar("T")


def is_large(body: Body) -> bool:
    """Whether to decode it would keep the event loop of this process waiting."""
    return len(body) > LARGE_BYTES or body.count(b"{") > LARGE_OBJECTS


class Intake:
    """Reads bodies for a gateway, wherever that harms its streams least."""

    def __init__(self, config: GatewayConfig, context: ReadingContext) -> None:
        self.worker = ReaderProcess(config)
        self._context = context
        self._executor = _all_threads(ThreadPoolExecutor(THREADS, "intake"))

    def close(self) -> None:
        self.worker.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def beside(self, work: Callable[[], T]) -> T:
        """The result of long work, which a thread does."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    @overload
    async def read(self, request: ReadPrompts, body: Body) -> PreparedRequest: ...

    @overload
    async def read(self, request: Tokenize | Detokenize, body: Body) -> bytes: ...

    async def read(self, request: ReadRequest, body: Body) -> PreparedRequest | bytes:
        """What a body comes to; ApiError for what cannot be served."""
        if len(body) <= INLINE_BYTES:
            return request.read(body, self._context)
        if is_large(body):
            return await self.worker.read(request, body)
        return await self.beside(lambda: request.read(body, self._context))


def _all_threads(executor: ThreadPoolExecutor) -> ThreadPoolExecutor:
    """Starts every thread now, so that the process has as many later as at the start."""
    together = Barrier(THREADS)
    for _ in range(THREADS):
        executor.submit(together.wait)
    return executor
