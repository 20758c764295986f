"""Every refusal has OpenAI's form and the status and headers that clients act on."""

from __future__ import annotations

import orjson
import pytest
from starlette.exceptions import HTTPException

from kvferry.gateway.auth import Keys
from kvferry.gateway.errors import (
    ApiError,
    BadRequest,
    ContextLength,
    EngineFailure,
    NotFound,
    NotSupported,
    Unauthorized,
    from_http,
    from_rejection,
    to_response,
)
from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.wire.generation import Rejected

CODES = {
    "server_overloaded": 503,
    "shutting_down": 503,
    "context_length_exceeded": 400,
    "invalid_request": 400,
    "deadline_exceeded": 503,
    "engine_error": 500,
    "something_new": 500,
}


@pytest.mark.parametrize("code", CODES)
def test_rejections_of_a_node(code: str) -> None:
    error = from_rejection(Rejected(1, code, "why"))
    response = to_response(error)
    assert response.status_code == CODES[code]
    body = orjson.loads(response.body)
    assert body == {"error": {"message": "why", "type": error.kind, "param": None, "code": code}}
    if response.status_code == 503:
        assert 1 <= int(response.headers["retry-after"]) <= 30
    if response.status_code >= 500:
        assert error.kind != "invalid_request_error"


def kinds(base: type[ApiError]) -> list[type[ApiError]]:
    return [base, *(kind for sub in base.__subclasses__() for kind in kinds(sub))]


def test_no_5xx_calls_the_request_invalid() -> None:
    for kind in kinds(ApiError):
        assert (kind.kind == "invalid_request_error") == (400 <= kind.status < 500)


@pytest.mark.C5
def test_over_length_says_the_phrase_the_code_and_both_numbers() -> None:
    for wanted in (None, 7):
        error = ContextLength(8192, 8200, wanted, "messages")
        assert "maximum context length is 8192 tokens" in error.message
        assert "8200 input tokens" in error.message
        assert (error.status, error.code) == (400, "context_length_exceeded")


def test_headers() -> None:
    assert to_response(Unauthorized("x")).headers["www-authenticate"] == "Bearer"
    assert to_response(NotSupported("x")).headers["x-should-retry"] == "false"
    assert to_response(from_rejection(Rejected(1, "shutting_down", ""))).headers["connection"]


def test_messages_are_bounded() -> None:
    assert len(BadRequest("x" * 10_000).body()) < 4000


def test_router_errors() -> None:
    assert isinstance(from_http(HTTPException(404), "/x"), NotFound)
    assert "twice" in from_http(HTTPException(404), "/v1/v1/messages").message
    wrong = from_http(HTTPException(405, headers={"Allow": "GET"}), "/health")
    assert (wrong.status, dict(wrong.headers)) == (405, {"allow": "GET"})
    assert isinstance(from_http(HTTPException(500), "/"), EngineFailure)


# -- keys ------------------------------------------------------------------------------------------


def test_keys_name_tenants() -> None:
    keys = Keys(("alice=s1", "bob=s2", "s=3=4", "bare"))
    assert keys.tenant({"authorization": "Bearer s1"}) == "alice"
    assert keys.tenant({"x-api-key": "s2"}) == "bob"
    assert keys.tenant({"authorization": "bearer 3=4"}) == "s"
    assert keys.tenant({"authorization": "Bearer bare"}) == "default"
    assert Keys(()).tenant({}) == "default"


@pytest.mark.parametrize(
    "headers",
    [{}, {"authorization": "Bearer nope"}, {"authorization": "s1"}, {"x-api-key": ""},
     {"authorization": "Basic s1"}, {"x-api-key": "\udcff"}],
)  # fmt: skip
def test_other_keys_are_refused(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthorized):
        Keys(("alice=s1",)).tenant(headers)


@pytest.mark.parametrize("text", ["=x", "x=", ""])
def test_misspelled_keys_are_config_errors(text: str) -> None:
    with pytest.raises(ConfigError):
        Keys((text,))
