"""Valid messages with absurd contents, drawn from what the wire's annotations allow.

Owns no socket. `absurd` fills every field at random; `nearly` changes one field of a message that
makes sense, which gets far deeper into whoever receives it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar, get_args

import msgspec
from msgspec import inspect

from kvferry.kvstore.keys import chain, checksum, pack_tokens
from kvferry.kvstore.wire import AnyMessage, Blocks, Generate, Message, Offer, Sampling

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

Kind = TypeVar("Kind", bound=msgspec.Struct)


class Fuzz:
    """A seeded source of messages. `texts` are also drawn where a text is wanted."""

    def __init__(self, seed: int, texts: Sequence[str] = ()) -> None:
        self.dice = random.Random(seed)
        self._texts = (*_TEXTS, *texts)

    def absurd(self, kind: type[Kind]) -> Kind:
        """Every field is some value that the decoder lets through."""
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        return kind(**{field.name: self._value(field.type) for field in info.fields})

    def nearly(self, message: Kind) -> Kind:
        """The message with another value in one or two of its fields."""
        info = inspect.type_info(type(message))
        assert isinstance(info, inspect.StructType)
        fields = self.dice.sample(info.fields, min(len(info.fields), self.dice.choice((1, 1, 2))))
        return msgspec.structs.replace(
            message, **{field.name: self._value(field.type) for field in fields}
        )

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

    # -- values -----------------------------------------------------------------------------------

    def _value(self, kind: inspect.Type) -> Any:
        dice = self.dice
        match kind:
            case inspect.IntType(ge=low, le=high):
                allowed = [
                    n for n in _INTS if (low is None or n >= low) and (high is None or n <= high)
                ]
                return dice.choice(allowed)
            case inspect.FloatType():
                return dice.choice(_FLOATS)
            case inspect.BoolType():
                return dice.random() < 0.5
            case inspect.NoneType():
                return None
            case inspect.StrType():
                return dice.choice(self._texts)
            case inspect.BytesType(min_length=low, max_length=high):
                return dice.randbytes(low) if low is not None and low == high else self._bytes()
            case inspect.VarTupleType(item_type=item):
                return tuple(self._value(item) for _ in range(dice.choice((0, 1, 2, 5, 300))))
            case inspect.TupleType(item_types=items):
                return tuple(self._value(item) for item in items)
            case inspect.DictType(value_type=item):
                return {f"{n}{dice.choice(self._texts)}": self._value(item) for n in range(3)}
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
        return pack_tokens([3 + self.dice.randrange(250) for _ in range(count // 4)])
