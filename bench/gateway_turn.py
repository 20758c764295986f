"""What one more turn of a long chat costs the gateway, step by step, and what others feel of it.

Owns the chats (real ones, put in a row until they have the tokens asked for) and the timing of the
gateway's own steps on them: template, tokens, block keys, routing; then the same turns through the
prompt maker, while a task on the event loop measures how late it is woken. No engine and no socket
takes part. It also compares the ids of 100 real chats with those of `transformers`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from kvferry.bench.client.figures import percentile
from kvferry.bench.client.prompts import NoChats, load_conversations
from kvferry.gateway.config import GatewayConfig
from kvferry.gateway.prompt.chat_ids import ChatEncoder
from kvferry.gateway.prompt.chat_template import ChatMessage, ChatTemplate
from kvferry.gateway.prompt.conversation import Conversation, render
from kvferry.gateway.prompt.memory import KeyChain
from kvferry.gateway.prompt.model import ServedModel, load_model
from kvferry.gateway.prompt.prompts import KEY_CHAIN_BYTES, PromptMaker, Shape
from kvferry.gateway.protocols.chat import ChatRequest, read_chat
from kvferry.gateway.router.policy import KnownKeys
from kvferry.kvstore.keys import KEY_BYTES, root_key
from kvferry.kvstore.process.model_files import resolve_model
from kvferry.kvstore.process.settings import default_cache_dir
from kvferry.kvstore.wire.status import KeyBatch

SIZES = (1_000, 10_000, 100_000)
NEW_TOKENS = 200
BLOCK = 16
TICK_SECONDS = 0.001
LAG_LIMIT_MS = 20.0
T = TypeVar("T")
Chat = list[ChatMessage]


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds of one turn."""

    tokens: int
    template: float
    tokenize: float
    hash: float
    route: float

    @property
    def total(self) -> float:
        return self.template + self.tokenize + self.hash + self.route


class Turns:
    """One gateway's memory, and the steps that a prompt takes through it."""

    def __init__(self, model: ServedModel, template: ChatTemplate) -> None:
        self._model, self._template = model, template
        self._encoder, self._chain = ChatEncoder(model.tokenizer), KeyChain(KEY_CHAIN_BYTES)
        self._node = KnownKeys()

    def turn(self, chat: Chat) -> Cost:
        """The cost of a prompt; afterwards the node has its blocks."""
        conversation = Conversation(tuple(chat))
        template, rendered = timed(
            lambda: render(conversation, self._template, self._model.tokenizer.control_text)
        )
        tokenize, made = timed(lambda: self._encoder.encode(rendered, "", None))
        root = root_key({}, "", None)
        hashing, keys = timed(lambda: self._chain.keys("", root, made.packed, BLOCK))
        route, _ = timed(lambda: self._route(keys))
        self._node.apply(KeyBatch(0, True, keys, b""))
        return Cost(len(made.packed) // 4, template, tokenize, hashing, route)

    def _route(self, keys: bytes) -> None:
        new = keys[KEY_BYTES * self._node.prefix(keys) :]
        self._node.expect(new)
        self._node.expected_no_more(new)


def timed(step: Callable[[], T]) -> tuple[float, T]:
    began = time.perf_counter()
    result = step()
    return 1e3 * (time.perf_counter() - began), result


# -- chats -----------------------------------------------------------------------------------------


class Speech:
    """Real turns, one after another."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._turns = (said for turns in load_conversations() for _, said in turns if said)

    def chat(self, tokens: int) -> Chat:
        """A chat of about so many tokens that ends in a question."""
        return self._until([], tokens)

    def longer(self, chat: Chat) -> Chat:
        """The chat with a reply and a question more, of about `NEW_TOKENS` together."""
        made = list(chat)
        for role in ("assistant", "user"):
            ids = self._ids(self._next())
            while len(ids) < NEW_TOKENS // 2:
                ids += self._ids(" " + self._next())
            text = self._model.tokenizer.decode(ids[: NEW_TOKENS // 2]).rstrip("\ufffd")
            made.append({"role": role, "content": text})
        return made

    def _until(self, chat: Chat, tokens: int) -> Chat:
        size = 0
        while size < tokens or len(chat) % 2 == 0:
            said = self._next()
            size += len(self._ids(said)) + 5
            chat.append({"role": ("user", "assistant")[len(chat) % 2], "content": said})
        return chat

    def _ids(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(text, add_special_tokens=False)

    def _next(self) -> str:
        return next(self._turns)


# -- the event loop --------------------------------------------------------------------------------


async def lag_of(model: ServedModel, chats: Iterable[Chat]) -> list[float]:
    """How late, in ms, the loop woke a task while these prompts were made one after another."""
    lags: list[float] = []
    with ThreadPoolExecutor(2) as executor:
        maker = PromptMaker(model)
        ticker = asyncio.create_task(_tick(lags))
        shape = Shape({}, BLOCK, 1 << 22)
        params = replace(
            read_chat(ChatRequest(messages=[]), model.vocabulary, test_hooks=False), max_tokens=1
        )
        for chat in chats:
            make = partial(maker.chat, Conversation(tuple(chat)), params, "", shape)
            await asyncio.get_running_loop().run_in_executor(executor, make)
            await asyncio.sleep(0.01)
        ticker.cancel()
        with suppress(asyncio.CancelledError):
            await ticker
    return lags


async def _tick(lags: list[float]) -> None:
    while True:
        began = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        lags.append(1e3 * (time.perf_counter() - began - TICK_SECONDS))


# -- transformers ----------------------------------------------------------------------------------


def differing(folder: Path, model: ServedModel, template: ChatTemplate, count: int = 100) -> int:
    """How many of the first real chats have other ids than `transformers` gives them."""
    from transformers import AutoTokenizer  # seconds, which the timing need not wait for

    theirs = AutoTokenizer.from_pretrained(folder)
    encoder = ChatEncoder(model.tokenizer)
    wrong = 0
    for turns in [turns for turns in load_conversations() if turns][:count]:
        chat = [
            {"role": "assistant" if who == "gpt" else "user", "content": said}
            for who, said in turns
        ]
        rendered = render(Conversation(tuple(chat)), template, model.tokenizer.control_text)
        ours = memoryview(encoder.encode(rendered, "", None).packed).cast("i").tolist()
        expected: Any = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)
        wrong += ours != (expected if isinstance(expected, list) else expected["input_ids"])
    return wrong


# -- the command -----------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvferry.bench.gateway_turn", description=__doc__)
    parser.add_argument("model", nargs="?", help="folder, GGUF file or hub id (default: SmolLM2)")
    parser.add_argument("--turns", type=int, default=20, help="second turns of each history (20)")
    arguments = parser.parse_args()
    cache = default_cache_dir(os.environ)
    config = GatewayConfig(model=arguments.model, cache_dir=cache)
    model = load_model(config, lambda line: print(line, file=sys.stderr))
    if model.template is None:
        parser.error("the model has no chat template")
    try:
        lags = _report(model, model.template, arguments.turns)
    except NoChats as error:
        parser.error(str(error))
    folder = resolve_model(arguments.model, cache, print).folder
    wrong = differing(folder, model, model.template)
    print(f"\nOf 100 real chats {wrong} have other ids than transformers gives them.")
    return int(wrong > 0 or lags > LAG_LIMIT_MS)


def _report(model: ServedModel, template: ChatTemplate, turns: int) -> float:
    """Prints both tables; the worst p99 of the loop's lag, in ms."""
    speech = Speech(model)
    print(f"{model.name}, {NEW_TOKENS} new tokens a turn.")
    print(f"Milliseconds; of the second turn the median of {turns}.\n")
    print("| history | turn | tokens | template | tokenize | hash | route | all |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    histories = {}
    for size in SIZES:
        first = speech.chat(size)
        chats = [first, *(speech.longer(first) for _ in range(turns))]
        histories[size] = chats
        gateway = Turns(model, template)
        costs = [gateway.turn(chat) for chat in chats]
        _row(size, "first", costs[0])
        _row(size, "second", sorted(costs[1:], key=lambda cost: cost.total)[turns // 2])
    print("\n| history | turns | loop lag p50 | p99 | max |\n| ---: | ---: | ---: | ---: | ---: |")
    worst = 0.0
    for size, chats in histories.items():
        lags = sorted(asyncio.run(lag_of(model, chats)))
        p99 = percentile(lags, 0.99)
        worst = max(worst, p99)
        p50 = percentile(lags, 0.5)
        print(f"| {size:,} | {len(chats)} | {p50:.2f} | {p99:.2f} | {lags[-1]:.2f} |")
    return worst


def _row(size: int, turn: str, cost: Cost) -> None:
    steps = (cost.template, cost.tokenize, cost.hash, cost.route, cost.total)
    figures = " | ".join(f"{step:.2f}" for step in steps)
    print(f"| {size:,} | {turn} | {cost.tokens:,} | {figures} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
