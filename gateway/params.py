"""What a request asks for, as values: every default filled in, the same for all protocols.

Owns no check: whoever reads a request makes these, whoever serves it believes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.kvstore.wire.generation import Sampling

MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How one request's tokens become text."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special: bool = True


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What values are checked against, and what the model's author recommends."""

    size: int
    defaults: Mapping[str, float]
    """By parameter name, from the model's generation config."""


@dataclass(frozen=True, slots=True)
class Params:
    n: int
    max_tokens: int | None
    """None: the room that is left."""
    default_max_tokens: int | None
    """What to use when none was asked for; it shrinks to the room that is left."""
    rules: OutputRules
    sampling: Sampling
    seed: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    priority: int
    cache_salt: str | None
    forced: tuple[int, ...]
    return_token_ids: bool
    return_prompt_token_ids: bool
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
