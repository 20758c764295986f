"""What is remembered between prompts: bounded, each tenant's own, and never another result."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.gateway.output.choice import Choice
from kvferry.gateway.params import OutputRules
from kvferry.gateway.prompt.memory import ENTRY_BYTES, STRIDE_BLOCKS, KeyChain, TenantCache
from kvferry.gateway.tokenizer.tokenizer import Tokenizer
from kvferry.kvstore.keys import chain, chain_packed, pack_tokens
from kvferry.kvstore.wire.generation import Token
from kvferry.tests.gateway.tokenizer.test_tokenizer import BYTE_LEVEL


def test_the_least_recently_used_goes_first() -> None:
    cache = TenantCache(3 * (10 + ENTRY_BYTES))
    for key in (b"a", b"b", b"c"):
        cache.put("t", key, b"x" * 10)
    assert cache.get("t", b"a") == b"x" * 10
    cache.put("t", b"d", b"x" * 10)
    assert cache.get("t", b"b") is None
    assert [cache.get("t", key) is not None for key in (b"a", b"c", b"d")] == [True] * 3


@pytest.mark.A9
def test_who_holds_most_gives_way() -> None:
    cache = TenantCache(10 * (10 + ENTRY_BYTES))
    cache.put("small", b"k", b"x" * 10)
    for number in range(50):
        cache.put("large", b"%d" % number, b"x" * 10)
    assert cache.get("small", b"k") is not None
    assert len(cache) == 10 and cache.get("large", b"49") is not None


@pytest.mark.A1
def test_tenants_do_not_see_each_others() -> None:
    cache = TenantCache(1 << 20)
    cache.put("one", b"k", b"1")
    assert cache.get("two", b"k") is None
    cache.put("two", b"k", b"2")
    assert (cache.get("one", b"k"), cache.get("two", b"k")) == (b"1", b"2")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.binary(max_size=1), st.integers(0, 400))))
def test_the_bound_holds_and_the_size_is_what_is_there(puts: list[tuple[str, bytes, int]]) -> None:
    cache = TenantCache(2000)
    for tenant, key, size in puts:
        cache.put(tenant, key, bytes(size))
        assert 0 <= cache.size <= 2000
    held = [cache.get(tenant, key) for tenant, key in {(tenant, key) for tenant, key, _ in puts}]
    values = [value for value in held if value is not None]
    assert cache.size == sum(len(value) + ENTRY_BYTES for value in values)
    assert len(cache) == len(values)


def test_too_large_a_value_is_not_kept() -> None:
    cache = TenantCache(1000)
    cache.put("t", b"a", b"x")
    cache.put("t", b"b", b"x" * 1000)
    assert cache.get("t", b"b") is None and cache.get("t", b"a") == b"x"


# -- block keys ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1 << 20], ids=["forgets", "remembers"])
def test_remembered_keys_are_those_of_the_chain(limit: int) -> None:
    keys, draw = KeyChain(limit), random.Random(3)
    base = [draw.randrange(1000) for _ in range(5 * STRIDE_BLOCKS * 4)]
    for block_size in (4, 16):
        for root in (b"r" * 16, b"s" * 16):
            for size in (0, 3, len(base) // 2, len(base) - 1, len(base)):
                ids = [*base[:size], draw.randrange(1000)]
                expected = b"".join(chain(root, ids, block_size))
                assert keys.keys("t", root, pack_tokens(ids), block_size) == expected


def test_only_new_blocks_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    def counting(parent: bytes, tokens: bytes, block_size: int) -> object:
        nonlocal hashed
        hashed += len(tokens) // (4 * block_size)
        return chain_packed(parent, tokens, block_size)

    monkeypatch.setattr("kvferry.gateway.prompt.memory.chain_packed", counting)
    keys, ids = KeyChain(1 << 20), list(range(100_000))
    keys.keys("t", b"r" * 16, pack_tokens(ids), 16)
    assert hashed == 6250
    keys.keys("t", b"r" * 16, pack_tokens([*ids, *range(200)]), 16)
    assert hashed - 6250 < STRIDE_BLOCKS + 200 // 16


def test_what_is_remembered_of_keys_is_counted_and_bounded() -> None:
    limit, stride = 20_000, 16 * STRIDE_BLOCKS
    keys = KeyChain(limit)
    for first in range(0, 40 * stride, stride):
        keys.keys("t", b"r" * 16, pack_tokens(list(range(first, first + stride))), 16)
        assert 0 < keys.remembered_bytes <= limit
    assert keys.remembered_bytes > limit - 2 * (16 * STRIDE_BLOCKS + ENTRY_BYTES)
    keys.forget("t")
    assert keys.remembered_bytes == 0


# -- where a reply's tokens end --------------------------------------------------------------------


TOKENIZER = Tokenizer(BYTE_LEVEL.to_str())


@given(
    st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 4), max_size=25),
    st.sampled_from([(), ("t",), ("he", "\ufffd")]),
)
def test_a_cut_reply_is_whole_tokens_and_the_rest_of_the_text(
    ids: list[int], stops: tuple[str, ...]
) -> None:
    ids = [token for token in ids if token not in TOKENIZER.special]
    choice = Choice(TOKENIZER, OutputRules(stops=stops))
    shown = ""
    for at, token in enumerate(ids):
        end = "length" if at + 1 == len(ids) else ""
        piece = choice.push(Token(0, 0, at, token, end, 0.0, ()))
        shown += piece.text if piece is not None else ""
    reply = choice.reply
    assert reply.text == shown
    for size in range(len(shown) + 1):
        kept, rest = reply.cut(size)
        assert list(kept) == ids[: len(kept)]
        assert TOKENIZER.decode(list(kept)) + rest == shown[:size]
    if not stops:
        assert list(reply.cut(len(shown))[0]) == ids
