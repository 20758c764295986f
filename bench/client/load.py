"""The load client: streams answers over HTTP/1.1 and notes when every event came.

Owns one connection a request. While a stream runs it only splits bytes into events and stamps them,
so that it costs next to nothing beside the server; what the events say is read afterwards. Tokens
are counted from `usage`, never from events; the first token is the first text that is not empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httptools
import orjson

Json = dict[str, Any]


# -- asking ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Target:
    """Who is asked."""

    host: str
    port: int
    model: str


@dataclass(frozen=True, slots=True)
class Ask:
    """One streamed request; always greedy, always with usage."""

    path: str
    body: Mapping[str, Any]


def completion(prompt: Sequence[int], tokens: int, **more: Any) -> Ask:
    """Exactly `tokens` tokens after these ids, with the ids of each event's tokens."""
    body = {"prompt": list(prompt), "ignore_eos": True, "return_token_ids": True}
    return Ask("/v1/completions", _streamed(tokens) | body | more)


def chat(messages: Sequence[Mapping[str, str]], tokens: int, **more: Any) -> Ask:
    """At most `tokens` tokens of an answer to these messages."""
    return Ask("/v1/chat/completions", _streamed(tokens) | {"messages": list(messages)} | more)


def _streamed(tokens: int) -> Json:
    options = {"include_usage": True}
    return {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": options}


# -- what came back --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event that carried text or tokens."""

    at: float
    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """A stream, read. `failure` is the class of what went wrong; empty when nothing did."""

    sent: float
    arrivals: tuple[Arrival, ...]
    usage: Mapping[str, Any]
    timings: Mapping[str, Any]
    failure: str

    @property
    def first(self) -> float | None:
        """When the first text came."""
        return next((one.at for one in self.arrivals if one.text), None)

    @property
    def ttft(self) -> float:
        """Seconds from sending to the first text; infinite without one."""
        return float("inf") if self.first is None else self.first - self.sent

    @property
    def tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    @property
    def ids(self) -> list[int]:
        return [token for one in self.arrivals for token in one.ids]

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.arrivals)


@dataclass(slots=True)
class Recording:
    """A stream while it runs: the bytes of its events, and when each was whole."""

    sent: float = 0.0
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    failure: str = ""

    def read(self) -> Answer:
        """What the events say so far. A stream that was given up is `truncated`."""
        arrivals: list[Arrival] = []
        usage: Json = {}
        timings: Json = {}
        failure, done = self.failure, False
        for at, data in self.events:
            if data == b"[DONE]":
                done = True
                continue
            chunk = orjson.loads(data)
            if "error" in chunk:
                failure = failure or "error event"
            usage, timings = chunk.get("usage") or usage, chunk.get("timings") or timings
            arrivals += _arrivals(at, chunk)
        if not failure and not done:
            failure = "truncated"
        if not failure and not any(one.text for one in arrivals):
            failure = "no text"
        return Answer(self.sent, tuple(arrivals), usage, timings, failure)


def _arrivals(at: float, chunk: Json) -> list[Arrival]:
    found = []
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
        ids = tuple(choice.get("token_ids") or ())
        if text or ids:
            found.append(Arrival(at, text, ids))
    return found


# -- the connection --------------------------------------------------------------------------------


async def stream(
    target: Target, ask: Ask, recording: Recording | None = None, limit_s: float = 600
) -> Answer:
    """Sends `ask` and follows its answer to the end; cancelling it closes the connection."""
    recording = Recording() if recording is None else recording
    try:
        async with asyncio.timeout(limit_s):
            await _follow(target, ask, recording)
    except TimeoutError:
        recording.failure = recording.failure or "timeout"
    except OSError:
        recording.failure = recording.failure or "connection"
    return recording.read()


async def together(target: Target, asks: Sequence[Ask]) -> list[Answer]:
    """All of them at once."""
    return list(await asyncio.gather(*(stream(target, ask) for ask in asks)))


async def _follow(target: Target, ask: Ask, recording: Recording) -> None:
    loop = asyncio.get_running_loop()
    body = orjson.dumps({"model": target.model, **ask.body})
    head = (
        f"POST {ask.path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    receiver = _Receiver(recording, loop.create_future())
    transport, _ = await loop.create_connection(lambda: receiver, target.host, target.port)
    try:
        recording.sent = time.perf_counter()
        transport.write(head.encode() + body)
        await receiver.ended
    finally:
        transport.abort()


class _Receiver(asyncio.Protocol):
    """Splits what comes into events. httptools calls the `on_` methods."""

    def __init__(self, recording: Recording, ended: asyncio.Future[None]) -> None:
        self.ended = ended
        self._recording = recording
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._recording.failure = self._recording.failure or "not HTTP"
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def on_headers_complete(self) -> None:
        self._recording.status = self._parser.get_status_code()
        if self._recording.status != 200:
            self._recording.failure = f"status {self._recording.status}"

    def on_body(self, body: bytes) -> None:
        # An event is one `data:` line, since JSON has no raw line feed.
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._recording.events.append((self._now, line[5:].strip()))

    def on_message_complete(self) -> None:
        self._end()

    def _end(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            self.ended.set_result(None)
