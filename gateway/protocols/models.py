"""`/v1/models`, and what the server says of itself to everybody: what is promised.

Owns the field names of these answers; there is nothing that a request could say.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Name(Struct):
    name: str
    version: str


class Version(Struct):
    version: str


class Readiness(Struct):
    status: Literal["ready", "degraded"]
    absent: list[str]
