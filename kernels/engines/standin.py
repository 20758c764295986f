"""The stand-in engine: exact, instant and without torch, for tests of everything around a model.

The KV bytes of a token are a mix of token and position; the logits are a mix of a cryptographic
hash of all KV bytes that the block table leads to, so one wrong byte anywhere in a context changes
every logit. This module knows nothing of torch, transformers or real weights.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.kernels.engine import Batch, EngineSpec, Logits, Span, check_batch
from kvferry.kernels.errors import ModelError

MODEL_TYPE = "kvferry-standin"

_WORD = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_TOKEN = np.uint64(0xD6E8FEB86659FD93)
_POSITION = np.uint64(0xA0761D6478BD642F)


@dataclass(frozen=True, slots=True)
class StandinConfig:
    """The fields of a stand-in's config.json; ModelError names a bad one."""

    vocab_size: int = 259
    max_position_embeddings: int = 8192
    num_hidden_layers: int = 4
    """How often `between_layers` is called in a pass."""
    kv_bytes_per_token: int = 16
    seconds_per_token: float = 0.0
    """Slept for each token of a pass, spread over the layers."""
    seconds_per_pass: float = 0.0
    salt: str = ""
    """Changes KV and logits as other weights would."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_position_embeddings", "num_hidden_layers"):
            if getattr(self, name) < 1:
                raise ModelError(f"stand-in model: {name} must be at least 1")
        if self.kv_bytes_per_token < _WORD or self.kv_bytes_per_token % _WORD:
            raise ModelError(f"stand-in model: kv_bytes_per_token must be a multiple of {_WORD}")
        if self.seconds_per_token < 0 or self.seconds_per_pass < 0:
            raise ModelError("stand-in model: seconds must not be negative")

    @property
    def key(self) -> bytes:
        """32 bytes that stand for the weights."""
        return hashlib.blake2b(self.salt.encode(), digest_size=32).digest()

    @property
    def words(self) -> int:
        return self.kv_bytes_per_token // _WORD


def read_standin_config(folder: Path) -> StandinConfig:
    """Reads `folder`/config.json; keys that are no field of `StandinConfig` are ignored."""
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if raw.get("model_type") != MODEL_TYPE:
        raise ModelError(f"{folder}: model_type is {raw.get('model_type')!r}, not {MODEL_TYPE!r}")
    return StandinConfig(**{f.name: raw[f.name] for f in fields(StandinConfig) if f.name in raw})


def load_standin_engine(
    folder: Path, *, block_size: int, num_blocks: int, max_model_len: int | None = None
) -> StandinEngine:
    config = read_standin_config(folder)
    return StandinEngine(
        config, block_size=block_size, num_blocks=num_blocks, max_model_len=max_model_len
    )


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The splitmix64 finalizer (Steele, Lea and Flood, 2014), in place."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def standin_kv(tokens: Sequence[int], start: int, config: StandinConfig) -> NDArray[np.uint8]:
    """The KV bytes of `tokens` at positions `start` and up, ``[len(tokens), kv_bytes_per_token]``.

    They depend on nothing else: not on the tokens before, the chunk or the block.
    """
    token = np.asarray(tokens, dtype=np.uint64)
    position = np.arange(start, start + len(token), dtype=np.uint64)
    seed = np.frombuffer(config.key, dtype="<u8", count=1)
    x = _mix(token * _TOKEN + seed)
    x = _mix(x ^ (position * _POSITION))
    words = np.arange(1, config.words + 1, dtype=np.uint64) * _GOLDEN
    return _mix(x[:, None] + words[None, :]).astype("<u8", copy=False).view(np.uint8)


def _hasher(config: StandinConfig) -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=_WORD, key=config.key)


def _logits(hasher: hashlib.blake2b, vocab_size: int) -> Logits:
    """float32 ``[vocab_size]``, spread evenly over [-8, 8) in steps of 2**-20."""
    seed = np.frombuffer(hasher.digest(), dtype="<u8")
    x = _mix(np.arange(vocab_size, dtype=np.uint64) * _GOLDEN + seed)
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2**-20) - np.float32(8)


def standin_logits(tokens: Sequence[int], config: StandinConfig) -> Logits:
    """The logits after `tokens` by definition, without a pool; float32 ``[vocab_size]``."""
    hasher = _hasher(config)
    hasher.update(standin_kv(tokens, 0, config).data)
    return _logits(hasher, config.vocab_size)


def standin_reply(tokens: Sequence[int], config: StandinConfig, n: int) -> list[int]:
    """The `n` greedy tokens after `tokens`, without a pool and without stopping at any id."""
    hasher = _hasher(config)
    hasher.update(standin_kv(tokens, 0, config).data)
    reply: list[int] = []
    for position in range(len(tokens), len(tokens) + n):
        reply.append(int(_logits(hasher.copy(), config.vocab_size).argmax()))
        hasher.update(standin_kv(reply[-1:], position, config).data)
    return reply


class StandinEngine:
    """An `Engine` whose pool is a numpy array ``[num_blocks, block_size, kv_bytes_per_token]``.

    A pass sleeps and calls `between_layers` first and writes KV last, so that whoever relies on
    the blocks of a pass that was broken off finds them missing.
    """

    def __init__(
        self,
        config: StandinConfig,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int | None = None,
    ) -> None:
        limit = config.max_position_embeddings
        if max_model_len is not None and max_model_len > limit:
            raise ModelError(f"max_model_len {max_model_len} exceeds the model's {limit} positions")
        self._config = config
        self._pool = np.zeros((num_blocks, block_size, config.kv_bytes_per_token), np.uint8)
        self._spec = EngineSpec(
            block_size=block_size,
            num_blocks=num_blocks,
            block_bytes=block_size * config.kv_bytes_per_token,
            num_layers=config.num_hidden_layers,
            vocab_size=config.vocab_size,
            max_model_len=max_model_len or limit,
            identity={
                "engine": "standin",
                "numerics": "1",
                "block_shape": f"{block_size}x{config.kv_bytes_per_token}",
                "layers": str(config.num_hidden_layers),
            },
        )

    @property
    def spec(self) -> EngineSpec:
        return self._spec

    def forward(self, batch: Batch, between_layers: Callable[[], None]) -> Logits:
        check_batch(batch, self._spec)
        self._pass_time(batch.num_tokens, between_layers)
        for span in batch.spans:
            self._write_span(span)
        rows = [self._row(span) for span in batch.spans if span.wants_logits]
        if not rows:
            return np.empty((0, self._spec.vocab_size), np.float32)
        return np.stack(rows)

    def read(self, block: int) -> memoryview:
        return memoryview(self._pool[block].reshape(-1)).toreadonly()

    def write(self, block: int, payload: bytes | memoryview) -> None:
        data = np.frombuffer(payload, np.uint8)
        if data.size != self._spec.block_bytes:
            raise ValueError(f"a block has {self._spec.block_bytes} bytes, not {data.size}")
        self._pool[block] = data.reshape(self._pool.shape[1:])

    def copy(self, source: int, target: int) -> None:
        self._pool[target] = self._pool[source]

    def prepare(self) -> bool:
        return False

    def _pass_time(self, tokens: int, between_layers: Callable[[], None]) -> None:
        config = self._config
        seconds = config.seconds_per_pass + tokens * config.seconds_per_token
        for _ in range(config.num_hidden_layers):
            if seconds:
                time.sleep(seconds / config.num_hidden_layers)
            between_layers()

    def _write_span(self, span: Span) -> None:
        positions = np.arange(span.start, span.end)
        block, offset = np.divmod(positions, self._spec.block_size)
        table = np.asarray(span.blocks)
        self._pool[table[block], offset] = standin_kv(span.tokens, span.start, self._config)

    def _row(self, span: Span) -> Logits:
        count = -(-span.end // self._spec.block_size)
        used = self._pool[np.asarray(span.blocks[:count])].reshape(-1)
        hasher = _hasher(self._config)
        hasher.update(used[: span.end * self._config.kv_bytes_per_token].data)
        return _logits(hasher, self._config.vocab_size)


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 0, 1 and 2, as in SmolLM2; the token of byte ``b`` is ``b + 3``."""


def write_standin_model(folder: Path, **overrides: Any) -> StandinConfig:
    """Writes a model folder that selects the stand-in; `overrides` are fields of `StandinConfig`.

    Beside config.json there are generation_config.json, a byte-level tokenizer.json with
    tokenizer_config.json, a ChatML chat_template.jinja, and a model.safetensors whose bytes differ
    with the salt, so that whatever reads a model folder finds what it would find in a real one.
    """
    config = StandinConfig(**overrides)
    if config.vocab_size < len(SPECIALS) + 256:
        raise ModelError("stand-in model: vocab_size has no room for 256 bytes and 3 specials")
    folder.mkdir(parents=True, exist_ok=True)
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    eos = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    tokens = {"bos_token": SPECIALS[1], "eos_token": SPECIALS[2], "unk_token": SPECIALS[0]}
    documents: dict[str, dict[str, Any]] = {
        "config.json": {"model_type": MODEL_TYPE, "dtype": "float32", **values, **eos},
        "generation_config.json": eos,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": config.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            **tokens,
        },
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _write_tokenizer(folder / "tokenizer.json")
    _write_weights(folder / "model.safetensors", config)
    return config


def _write_weights(path: Path, config: StandinConfig) -> None:
    from safetensors.numpy import save_file

    save_file({"salt": np.frombuffer(config.key, np.uint8)}, path)


def _write_tokenizer(path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {special: i for i, special in enumerate(SPECIALS)}
    vocab |= {char: len(SPECIALS) + byte for byte, char in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    tokenizer.save(str(path))


def _byte_characters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2, 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    codes = {byte: byte for byte in printable}
    codes |= {byte: 256 + i for i, byte in enumerate(others)}
    return [chr(codes[byte]) for byte in range(256)]
