"""What is asked of one node or store, and who waits for the answers.

Owns the numbers by which an answer finds its question. A question without an answer in time is
answered all the same: with None, or with JSON that says `error`. What the answers mean is for
whoever asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson

from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.status import CacheReset, DebugReply, DebugRequest, ResetCache
from kvferry.kvstore.wire.store import CacheReply, CacheRequest

Answer = DebugReply | CacheReset | CacheReply
"""To a question that carries a number."""
Json = dict[str, Any]


class Questions:
    """Those that are open; `send` says whether a message has left."""

    def __init__(self, send: Callable[[AnyMessage], bool]) -> None:
        self._send = send
        self._open: dict[int, asyncio.Future[Answer | None]] = {}
        self._next = 1

    async def debug(self, kind: str, body: bytes, timeout: float) -> Json:
        """A node's answer to a debug request."""
        answer = await self._ask(lambda number: DebugRequest(number, kind, body), timeout)
        return _read(answer.body if isinstance(answer, DebugReply) else None, timeout)

    async def reset_cache(self, timeout: float) -> CacheReset | None:
        """Makes the node forget every block that nobody uses."""
        answer = await self._ask(ResetCache, timeout)
        return answer if isinstance(answer, CacheReset) else None

    async def store(
        self,
        action: str,
        timeout: float,
        *,
        tenant: bytes = b"",
        keys: bytes = b"",
        seconds: float = 0.0,
    ) -> Json:
        """A store's answer to a `CacheRequest`."""
        answer = await self._ask(
            lambda number: CacheRequest(number, action, tenant, keys, seconds), timeout
        )
        return _read(answer.body if isinstance(answer, CacheReply) else None, timeout)

    async def _ask(self, make: Callable[[int], AnyMessage], timeout: float) -> Answer | None:
        number, self._next = self._next, self._next + 1
        question = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            if not self._send(make(number)):
                return None
            return await asyncio.wait_for(question, timeout)
        except TimeoutError:
            return None
        finally:
            self._open.pop(number, None)

    def answered(self, answer: Answer) -> None:
        """Tells whoever waits for it, if anybody still does."""
        question = self._open.pop(answer.number, None)
        if question is not None and not question.done():
            question.set_result(answer)

    def abandon(self) -> None:
        """Nobody is there any more who could answer."""
        for question in self._open.values():
            if not question.done():
                question.set_result(None)
        self._open.clear()


def _read(reply: bytes | None, timeout: float) -> Json:
    if reply is None:
        return {"error": f"no answer within {timeout:g} s"}
    try:
        answer = orjson.loads(reply)
        orjson.dumps(answer)  # it reads deeper nesting than it writes
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        answer = None
    return answer if isinstance(answer, dict) else {"error": "an answer that is no JSON object"}
