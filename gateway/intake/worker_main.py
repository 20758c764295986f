"""The process that reads large bodies for a gateway.

Owns its loop: a question and a body in, a reply out, until the gateway closes the pipe. It runs at
low priority, because the nodes and the gateway have other users to serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.errors import ApiError, EngineFailure
from kvferry.gateway.intake.reader import Body, Reader
from kvferry.gateway.intake.worker import (
    ARGUMENTS,
    Question,
    Reply,
    Setup,
    receive,
    send,
    to_failure,
)
from kvferry.gateway.prompt.model import load_model
from kvferry.gateway.prompt.prompts import PromptMaker
from kvferry.kvstore.process.logs import set_up_logging

log = logging.getLogger(__name__)

NICENESS = 10
_NOTHING = msgspec.Raw(msgspec.msgpack.encode(None))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are for the gateway, which drains, then kills
    os.nice(NICENESS)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints shall not end up in them
    questions = sys.stdin.buffer
    setup = msgspec.msgpack.decode(receive(questions), type=Setup)
    set_up_logging("gateway", setup.log_level, setup.log_format)
    reader = _reader(setup)
    while True:
        try:
            question = msgspec.msgpack.decode(receive(questions), type=Question)
            body = receive(questions)
        except EOFError:
            return
        send(replies, msgspec.msgpack.encode(_reply(reader, question, body)))


def _reader(setup: Setup) -> Reader:
    config = GatewayConfig(
        model=setup.model,
        served_model_name=setup.served_model_name,
        chat_template=Path(setup.chat_template) if setup.chat_template else None,
        cache_dir=Path(setup.cache_dir),
    )
    model = load_model(config, lambda line: None)
    threads = ThreadPoolExecutor(1)
    prompts = PromptMaker(model, threads)
    return Reader(model, prompts, threads, test_hooks=setup.enable_test_hooks)


def _reply(reader: Reader, question: Question, body: Body) -> Reply:
    try:
        answer = asyncio.run(_read(reader, question, body))
        return Reply(msgspec.Raw(msgspec.msgpack.encode(answer)))
    except ApiError as error:
        return Reply(_NOTHING, to_failure(error))
    except Exception:
        log.exception("a large body could not be read")
        failure = EngineFailure("The body could not be read.", code="internal_error")
        return Reply(_NOTHING, to_failure(failure))


async def _read(reader: Reader, question: Question, body: Body) -> Any:
    arguments = msgspec.msgpack.decode(question.arguments, type=ARGUMENTS[question.method])
    return await getattr(reader, question.method)(body, *arguments)


if __name__ == "__main__":
    main()
