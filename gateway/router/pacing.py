"""Work for the event loop in slices, so that nothing waits long behind much of it.

An event loop runs everything that is ready before it looks at its sockets and timers again. A step
of a thousand tokens, or a thousand requests that come at once, would be one long pause for all
others. Here both get a share of each turn of the loop, in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.generation import StepOutput


class MessagePacer:
    """Gives a node's messages to `act` in order, about `tokens` generated tokens a turn.

    As long as it is `busy` its owner should not read on; it calls `idle` when it may again.
    """

    def __init__(
        self, act: Callable[[AnyMessage], None], tokens: int, idle: Callable[[], None]
    ) -> None:
        self._act = act
        self._tokens = tokens
        self._idle = idle
        self._waiting: deque[AnyMessage] = deque()
        self.busy = False
        """Something waits for the next turn."""

    def push(self, message: AnyMessage) -> None:
        if isinstance(message, StepOutput) and len(message.tokens) > self._tokens:
            self._waiting += (
                StepOutput(message.tokens[start : start + self._tokens])
                for start in range(0, len(message.tokens), self._tokens)
            )
        else:
            self._waiting.append(message)
        if not self.busy:
            self._slice()

    def _turn(self) -> None:
        self._slice()
        if not self.busy:
            self._idle()

    def _slice(self) -> None:
        left = self._tokens
        while self._waiting and left > 0:
            message = self._waiting.popleft()
            left -= len(message.tokens) if isinstance(message, StepOutput) else 1
            self._act(message)
        self.busy = bool(self._waiting)
        if self.busy:
            asyncio.get_running_loop().call_soon(self._turn)

    def flush(self) -> None:
        """Everything that has come, now."""
        while self._waiting:
            self._act(self._waiting.popleft())


class RequestPacer:
    """Lets `width` tasks pass a turn of the loop; the others wait in line."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._left = width
        self._line: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def turn(self) -> None:
        """Returns when it is this task's turn."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._turn)
        if self._left > 0 and not self._line:
            self._left -= 1
            return
        place = asyncio.get_running_loop().create_future()
        self._line.append(place)
        await place

    def _turn(self) -> None:
        self._left = self._width
        while self._line and self._left > 0:
            place = self._line.popleft()
            if not place.done():  # else its task was cancelled meanwhile
                place.set_result(None)
                self._left -= 1
        self._scheduled = bool(self._line)
        if self._scheduled:
            asyncio.get_running_loop().call_soon(self._turn)
