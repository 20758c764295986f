"""Identity of blocks: golden vectors, unambiguous encoding, no collisions between contexts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvferry.kvstore.keys import (
    chain,
    checksum,
    matchable_blocks,
    next_key,
    pack_tokens,
    root_key,
    split_keys,
    unpack_tokens,
)

GOLDEN_FINGERPRINT = {"weights": "0123", "dtype": "float32", "block_size": "16"}
GOLDEN_ROOT = "75181c7b4d62e19eb7517157f8201d6c"
GOLDEN_KEYS = ["7c13eac7c1ce9d612e81eae2168a2c6b", "4ec984c5c373cd050e1b5b77e41638d2"]


def golden() -> tuple[str, list[str]]:
    root = root_key(GOLDEN_FINGERPRINT, "tenant", "salt")
    return root.hex(), [key.hex() for key in chain(root, range(40), 16)]


@pytest.mark.A3
def test_keys_equal_the_golden_vector() -> None:
    assert golden() == (GOLDEN_ROOT, GOLDEN_KEYS)


@pytest.mark.A3
def test_keys_are_the_same_in_a_process_with_another_hash_seed() -> None:
    code = "from kvferry.tests.kvstore.test_keys import golden; print(golden())"
    for seed in ("0", "12345"):
        printed = subprocess.check_output(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True
        )
        assert printed.strip() == repr(golden())


@pytest.mark.A1
def test_contexts_that_join_alike_have_different_roots() -> None:
    assert root_key({}, "ab", "c") != root_key({}, "a", "bc")
    assert root_key({}, "a", None) != root_key({}, "a", "")
    assert root_key({"x": "yz"}, "a", None) != root_key({"xy": "z"}, "a", None)
    assert root_key({"x": "1"}, "a", None) != root_key({"x": "2"}, "a", None)
    assert root_key({"b": "1", "a": "2"}, "t", None) == root_key({"a": "2", "b": "1"}, "t", None)


@pytest.mark.A1
def test_ten_thousand_contexts_have_ten_thousand_roots() -> None:
    contexts = [
        ({"weights": str(number % 100)}, f"tenant{number // 100}", None if number % 2 else "")
        for number in range(10_000)
    ]
    assert len({root_key(*context) for context in contexts}) == len(contexts)


def test_a_chain_depends_on_everything_before_it() -> None:
    root = root_key({}, "t", None)
    tokens = list(range(64))
    keys = list(chain(root, tokens, 16))
    assert len(keys) == 4
    assert list(chain(root, tokens + [1] * 15, 16)) == keys
    changed = list(chain(root, [7, *tokens[1:]], 16))
    assert not set(keys) & set(changed)
    assert next_key(keys[1], tokens[32:48]) == keys[2]


def test_tokens_and_keys_survive_packing() -> None:
    assert unpack_tokens(pack_tokens([0, 1, 2**31 - 1])) == [0, 1, 2**31 - 1]
    keys = list(chain(b"r" * 16, range(48), 16))
    assert split_keys(b"".join(keys)) == keys
    with pytest.raises(ValueError, match="whole number"):
        split_keys(b"x" * 17)
    with pytest.raises(ValueError):
        unpack_tokens(b"xyz")


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(0, 0), (1, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2)]
)
def test_a_match_leaves_at_least_one_token(tokens: int, blocks: int) -> None:
    assert matchable_blocks(tokens, 16) == blocks


def test_a_checksum_sees_one_bit() -> None:
    payload = bytearray(1024)
    before = checksum(bytes(payload))
    payload[500] ^= 1
    assert checksum(bytes(payload)) != before
    assert checksum(memoryview(b"abc")) == checksum(b"abc")
