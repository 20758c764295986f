"""Reads large bodies in a process beside the gateway's, so that its streams go on meanwhile.

Owns that process: it starts with the first large body, reads one at a time, and is made again when
it has died. A thread waits for it, which costs the event loop nothing. What is read, and how, is
for `reader`; the result is the one that the gateway itself would have, but for what that remembers
of earlier requests. What goes through the pipe is msgpack of known types.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO

import msgspec
from msgspec import Struct

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.errors import ApiError, BadRequest, EngineFailure, NotFound, NotSupported
from kvferry.gateway.intake.reader import PreparedRequest, ReadRequest
from kvferry.gateway.protocols.common import Body
from kvferry.kvstore.process.lifecycle import die_with_parent

log = logging.getLogger(__name__)

_KINDS: tuple[type[ApiError], ...] = (BadRequest, NotFound, NotSupported, EngineFailure)


class ReaderConfig(Struct, frozen=True):
    """The part of the gateway's configuration that decides how bodies are read."""

    model: str | None
    served_model_name: tuple[str, ...]
    chat_template: str | None
    cache_dir: str
    enable_test_hooks: bool
    log_level: str
    log_format: str


class Failure(Struct, frozen=True):
    """An ApiError."""

    kind: str
    message: str
    param: str | None
    code: str | None


class ReadResult(Struct, frozen=True):
    """What became of a request and of its body, which was the frame behind it."""

    answer: PreparedRequest | bytes | None
    failure: Failure | None = None


class ReaderProcess:
    """Another process that reads bodies."""

    def __init__(self, config: GatewayConfig) -> None:
        template = config.chat_template
        reader_config = ReaderConfig(
            model=config.model,
            served_model_name=config.served_model_name,
            chat_template=None if template is None else str(template),
            cache_dir=str(config.cache_dir),
            enable_test_hooks=config.enable_test_hooks,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        self._config = msgspec.msgpack.encode(reader_config)
        self._thread = ThreadPoolExecutor(1, "large-bodies")
        self._closed = False
        self.process: subprocess.Popen[bytes] | None = None

    async def read(self, request: ReadRequest, body: Body) -> PreparedRequest | bytes:
        """What a body comes to there.

        Raises
        ------
        ApiError
            It raised one, or the process died of this body.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._ask, request, body)

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self._closed:
            return
        self._closed = True
        if self.process is not None:
            self.process.kill()
            self._thread.submit(self._lost)  # behind what waits for it now
        self._thread.shutdown(wait=False)

    # -- on the thread -----------------------------------------------------------------------------

    def _ask(self, request: ReadRequest, body: Body) -> PreparedRequest | bytes:
        try:
            if self._closed:
                raise EOFError
            process = self.process or self._start()
            assert process.stdin is not None and process.stdout is not None
            send(process.stdin, msgspec.msgpack.encode(request))
            send(process.stdin, body)
            raw = receive(process.stdout)
        except (OSError, EOFError) as error:
            self._lost()
            raise EngineFailure("The body could not be read.", code="internal_error") from error
        result = msgspec.msgpack.decode(raw, type=ReadResult)
        if result.failure is not None:
            raise from_failure(result.failure)
        assert result.answer is not None
        return result.answer

    def _start(self) -> subprocess.Popen[bytes]:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvferry.gateway.intake.worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        if self._closed:
            raise EOFError
        assert self.process.stdin is not None
        send(self.process.stdin, self._config)
        return self.process

    def _lost(self) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.kill()
        status = process.wait()
        for end in (process.stdin, process.stdout):
            assert end is not None
            try:
                end.close()
            except OSError:
                log.debug("the rest of a body had no reader")
        if not self._closed:
            log.error("the process for large bodies ended with %s", status)


# -- the pipe --------------------------------------------------------------------------------------


def send(stream: IO[bytes], frame: Body) -> None:
    stream.write(len(frame).to_bytes(8, "little"))
    stream.write(frame)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes:
    """The next frame; EOFError when the other side is gone."""
    head = stream.read(8)
    size = int.from_bytes(head, "little")
    frame = stream.read(size)
    if len(head) < 8 or len(frame) < size:
        raise EOFError
    return frame


def to_failure(error: ApiError) -> Failure:
    kind = next((kind for kind in _KINDS if isinstance(error, kind)), EngineFailure)
    return Failure(kind.__name__, error.message, error.param, error.code)


def from_failure(failure: Failure) -> ApiError:
    kind = next(kind for kind in _KINDS if kind.__name__ == failure.kind)
    return kind(failure.message, param=failure.param, code=failure.code)
