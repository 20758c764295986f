"""Valid messages with absurd contents, drawn from what the wire's annotations allow.

Owns no socket. `absurd` fills every field at random; `nearly` changes one field of a message that
makes sense, which gets far deeper into whoever receives it.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import inspect

from kvferry.kvstore.keys import chain, checksum, pack_tokens
from kvferry.kvstore.wire.codec import AnyMessage
from kvferry.kvstore.wire.generation import Generate, Sampling
from kvferry.kvstore.wire.handoff import Blocks, Offer
from kvferry.kvstore.wire.message import Message

KINDS: tuple[type[Message], ...] = get_args(AnyMessage)
BLOCK = 16
_INTS: tuple[int, ...] = (
    *(0, 1, 2, 3, 7, 16, 127, 128, 4096, -1, -2),
    *(1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 31), -(1 << 63)),
)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS: tuple[str, ...] = (
    *("", "gateway", "decode", "asked", "too_large", "ledger", "faults"),
    *("\0", "é" * 50, "x" * 4096, "../", "tcp://", "tcp://127.0.0.1:99999999", "inproc://nowhere"),
)
_WORDS = (
    "stop",
    "length",
    "stop:5",
    "stop:9999999999",
    "up",
    "num_preemptions",
    "a_total",
    "steps",
)

Kind = TypeVar("Kind", bound=msgspec.Struct)


class Fuzz:
    """A seeded source of messages. `texts` are also drawn where a text is wanted."""

    def __init__(self, seed: int, texts: Sequence[str] = ()) -> None:
        self.dice = random.Random(seed)
        self._texts = (*_TEXTS, *texts)
        self._tokens = pack_tokens([3 + self.dice.randrange(250) for _ in range(1 << 15)])
        self._infos: dict[type, inspect.StructType] = {}

    def absurd(self, kind: type[Kind]) -> Kind:
        """Every field is some value that the decoder lets through."""
        info = self._info(kind)
        while True:
            try:
                return kind(**{field.name: self._value(field.type) for field in info.fields})
            except ValueError:
                continue  # its fields contradict each other

    def nearly(self, message: Kind) -> Kind:
        """The message with another value in one or two of its fields."""
        info = self._info(type(message))
        fields = self.dice.sample(info.fields, min(len(info.fields), self.dice.choice((1, 1, 2))))
        while True:
            changes = {field.name: self._value(field.type) for field in fields}
            try:
                return msgspec.structs.replace(message, **changes)
            except ValueError:
                continue

    def generate(self, *prefill_nodes: str) -> Generate:
        """A small request that makes sense."""
        dice = self.dice
        prompt = [3 + dice.randrange(250) for _ in range(dice.choice((1, 16, 100, 400)))]
        root = dice.randbytes(16)
        return Generate(
            request=dice.randrange(1, 1 << 20),
            prompt=pack_tokens(prompt),
            root=root,
            keys=b"".join(chain(root, prompt, BLOCK)),
            max_tokens=8,
            min_tokens=0,
            eos_ids=(2,),
            stop_token_ids=(),
            sampling=Sampling(),
            seed=1,
            choices=dice.choice((1, 1, 2)),
            prefill_nodes=prefill_nodes,
        )

    def offer(self) -> Offer:
        """A small span that makes sense."""
        dice = self.dice
        blocks = dice.choice((1, 2, 30))
        tokens = [3 + dice.randrange(250) for _ in range(blocks * BLOCK)]
        keys = chain(dice.randbytes(16), tokens, BLOCK)
        transfer, epoch = dice.randrange(1, 4), dice.randrange(1, 4)
        return Offer(
            transfer,
            epoch,
            pack_tokens(tokens),
            b"".join(keys),
            0,
            blocks,
            dice.choice((256, 1 << 20)),
        )

    def payloads(self, message: Message) -> list[bytes]:
        """As many as the message announces; some fit their checksums, once `Blocks` are fitted."""
        if not isinstance(message, Blocks):
            return []
        return [self.dice.randbytes(self.dice.choice((0, 1, 256, 5000))) for _ in message.checksums]

    def fitted(self, message: Blocks, payloads: Sequence[bytes]) -> Blocks:
        sums = tuple(checksum(payload) for payload in payloads)
        return msgspec.structs.replace(message, checksums=sums)

    def _info(self, kind: type) -> inspect.StructType:
        if kind not in self._infos:
            info = inspect.type_info(kind)
            assert isinstance(info, inspect.StructType)
            self._infos[kind] = info
        return self._infos[kind]

    # -- values -----------------------------------------------------------------------------------

    def _value(self, kind: inspect.Type) -> Any:
        dice = self.dice
        match kind:
            case inspect.IntType(ge=low, le=high):
                top = (1 << 64) - 1 if high is None else high
                bottom = -(1 << 63) if low is None else low
                return dice.choice([n for n in (*_INTS, bottom, top) if bottom <= n <= top])
            case inspect.FloatType(ge=low, le=high):
                assert low is not None and high is not None, "an unbounded float"
                return dice.choice([x for x in (*_FLOATS, low, high) if low <= x <= high])
            case inspect.BoolType():
                return dice.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.StrType(pattern=pattern):
                texts = (*self._texts, *_WORDS)
                fitting = [it for it in texts if pattern is None or re.search(pattern, it)]
                return dice.choice(fitting)
            case inspect.BytesType(min_length=least, max_length=most):
                fixed = least is not None and least == most
                return dice.randbytes(least or 0) if fixed else self._bytes()
            case inspect.VarTupleType(item_type=item, max_length=most):
                count = min(dice.choice((0, 1, 2, 5, 300)), 300 if most is None else most)
                return tuple(self._value(item) for _ in range(count))
            case inspect.TupleType(item_types=items):
                return tuple(self._value(item) for item in items)
            case inspect.DictType(key_type=name, value_type=item):
                return {self._value(name): self._value(item) for _ in range(3)}
            case inspect.StructType(cls=struct):
                return self.absurd(struct)
            case inspect.UnionType(types=arms):
                return self._value(dice.choice(arms))
        raise AssertionError(f"a field of a kind unknown here: {kind}")

    def _bytes(self) -> bytes:
        """Nothing, a few, whole token ids, whole keys, or very many."""
        count = self.dice.choice((0, 1, 3, 64, 1600, 1 << 16))
        if self.dice.random() < 0.5:
            return self.dice.randbytes(count)
        start = self.dice.randrange(1 << 8) * 4
        return self._tokens[start : start + count]
