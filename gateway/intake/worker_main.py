"""The process that reads large bodies for a gateway.

Owns its loop: a request and its body in, a result out, until the gateway closes the pipe. It runs
at low priority, because the nodes and the gateway have other users to serve.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import msgspec

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.errors import ApiError, EngineFailure
from kvferry.gateway.intake.reader import ReadRequest
from kvferry.gateway.intake.worker import ReaderConfig, ReadResult, receive, send, to_failure
from kvferry.gateway.prompt.model import load_model
from kvferry.gateway.prompt.prompts import PromptMaker
from kvferry.gateway.protocols.common import Body, ReadingContext
from kvferry.kvstore.process.logs import set_up_logging

log = logging.getLogger(__name__)

NICENESS = 10


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the gateway, which drains, then kills
    os.nice(NICENESS)
    results = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints shall not end up in them
    requests = sys.stdin.buffer
    config = msgspec.msgpack.decode(receive(requests), type=ReaderConfig)
    set_up_logging("gateway", config.log_level, config.log_format)
    context = _context(config)
    while True:
        try:
            request = msgspec.msgpack.decode(receive(requests), type=ReadRequest)
            body = receive(requests)
        except EOFError:
            return
        send(results, msgspec.msgpack.encode(_result(request, body, context)))


def _context(settings: ReaderConfig) -> ReadingContext:
    config = GatewayConfig(
        model=settings.model,
        served_model_name=settings.served_model_name,
        chat_template=Path(settings.chat_template) if settings.chat_template else None,
        cache_dir=Path(settings.cache_dir),
    )
    model = load_model(config, lambda line: None)
    return ReadingContext(model, PromptMaker(model), settings.enable_test_hooks)


def _result(request: ReadRequest, body: Body, context: ReadingContext) -> ReadResult:
    try:
        return ReadResult(request.read(body, context))
    except ApiError as error:
        return ReadResult(None, to_failure(error))
    except Exception:
        log.exception("a large body could not be read")
        failure = EngineFailure("The body could not be read.", code="internal_error")
        return ReadResult(None, to_failure(failure))


if __name__ == "__main__":
    main()
