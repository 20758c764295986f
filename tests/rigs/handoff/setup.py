"""What is asked of a small hand-off and what may go wrong in it; its messages, by number.

This module knows neither nodes nor channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvferry.kvstore.keys import chain, pack_tokens
from kvferry.kvstore.wire.client import Received
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.generation import Generate, Sampling
from kvferry.tests.rigs.handoff.fakes import BLOCK, ROOT, VOCABULARY

ADDRESS = "P"

View = tuple[Any, ...]
Number = int
"""Of a message in the `Post`."""

FAULTS = (
    "late", "lose", "repeat", "mute", "abort", "restart_prefill", "restart_decode", "disconnect"
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """Two prompts, the room on both sides, how many tokens are wanted, what may go wrong."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    decode_blocks: int = 8
    prefill_blocks: int = 8
    max_tokens: int = 1
    reuse: bool = True
    growth: int = 64
    """Tokens that the decode node reserves at admission; with few of them it preempts."""
    faults: tuple[str, ...] = FAULTS
    most_faults: int = 2


def prompt_of(blocks: Sequence[int], more: int = 1) -> tuple[int, ...]:
    """Whole blocks that differ by their numbers, and `more` tokens behind them."""
    tokens = [(17 * at + 11 * block) % VOCABULARY for block in blocks for at in range(BLOCK)]
    return (*tokens, *range(more))


def generate(setup: Setup, number: int) -> Generate:
    prompt = setup.prompts[number]
    return Generate(
        request=number,
        prompt=pack_tokens(prompt),
        root=ROOT,
        keys=b"".join(chain(ROOT, prompt, BLOCK)),
        max_tokens=setup.max_tokens,
        min_tokens=0,
        eos_ids=(),
        stop_token_ids=(),
        sampling=Sampling(temperature=0.0),
        seed=1,
        choices=1,
        prefill_nodes=(ADDRESS,),
    )


class Post:
    """Numbers messages by their content; readings of a clock do not count as such."""

    def __init__(self) -> None:
        self._numbers: dict[View, Number] = {}
        self._messages: list[Received] = []

    def number(self, message: AnyMessage, payloads: Sequence[bytes] = ()) -> Number:
        fields = [getattr(message, name) for name in message.__struct_fields__]
        content = [value for value in fields if not isinstance(value, float)]
        view = (type(message), *content, *payloads)
        if view not in self._numbers:
            self._numbers[view] = len(self._messages)
            self._messages.append(Received(message, cast(Any, tuple(payloads))))
        return self._numbers[view]

    def __getitem__(self, number: Number) -> Received:
        return self._messages[number]

    def name(self, number: Number) -> str:
        message = cast(Any, self._messages[number].message)
        about = getattr(message, "transfer", getattr(message, "request", ""))
        return f"{type(message).__name__}({about})"
