"""Everything the gateway refuses or fails at, and the one place where it becomes HTTP.

    ApiError
     ├── BadRequest            400  the body is wrong; `param` names the place
     │    └── ContextLength    400  the prompt (and the room asked for) exceeds the model's length
     ├── Unauthorized          401  no key, or one that is not configured
     ├── NotFound              404  no such path or model
     ├── MethodNotAllowed      405
     ├── TooLarge              413  the body exceeds the limit
     ├── NotJson               415  the body is of another type
     ├── NotSupported          501  a feature that this server does not have
     ├── Aborted               499  somebody ended the request by its id
     ├── Unavailable           503  loading, draining, overloaded, out of time: worth a retry
     └── EngineFailure         500  a node failed, or was lost, while it worked on the request

Bodies have OpenAI's form on every path. `invalid_request_error` never goes with a 5xx, because
clients decide by that word whether a retry makes sense. It does not know who raises what, and it
does not log.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvferry.kvstore.wire.generation import Rejected

MAX_MESSAGE = 1000
"""Characters of one error message: what a client sent is never echoed at length."""


class ApiError(Exception):
    """Base: an answer that is not the one asked for."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
        self.param = param
        self.code = code or self.default_code

    @property
    def headers(self) -> Mapping[str, str]:
        return {}

    def body(self) -> bytes:
        """`{"error": {...}}`, the same in a response and in a stream."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})


class BadRequest(ApiError):
    status = 400
    kind = "invalid_request_error"


class ContextLength(BadRequest):
    default_code = "context_length_exceeded"

    def __init__(self, limit: int, prompt: int, wanted: int | None, param: str) -> None:
        text = f"This model's maximum context length is {limit} tokens. "
        if wanted is None:
            text += f"However, your prompt contains {prompt} input tokens"
            text += ", which leaves no room for an answer." if prompt == limit else "."
        else:
            text += (
                f"However, you requested {prompt + wanted} tokens "
                f"({prompt} input tokens in your prompt and {wanted} for the completion)."
            )
        super().__init__(text + " Please reduce the length.", param=param)


class Unauthorized(ApiError):
    status = 401
    kind = "invalid_request_error"
    default_code = "invalid_api_key"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"www-authenticate": "Bearer"}


class NotFound(ApiError):
    status = 404
    kind = "invalid_request_error"
    default_code = "not_found"


class MethodNotAllowed(ApiError):
    status = 405
    kind = "invalid_request_error"
    default_code = "method_not_allowed"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self._allow = allow

    @property
    def headers(self) -> Mapping[str, str]:
        return {"allow": self._allow} if self._allow else {}


class TooLarge(ApiError):
    status = 413
    kind = "invalid_request_error"
    default_code = "request_too_large"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"connection": "close"}


class NotJson(ApiError):
    status = 415
    kind = "invalid_request_error"
    default_code = "unsupported_media_type"


class NotSupported(ApiError):
    status = 501
    kind = "not_implemented_error"
    default_code = "not_supported"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"x-should-retry": "false"}


class Aborted(ApiError):
    """Nobody repeats it: whoever aborted it meant it."""

    status = 499
    kind = "invalid_request_error"
    default_code = "request_aborted"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"x-should-retry": "false"}


class Unavailable(ApiError):
    """`code`: `model_loading`, `shutting_down`, `server_overloaded`, `engine_unavailable`, or
    `deadline_exceeded`: no gateway in front timed out, this server says when it has had enough."""

    status = 503
    kind = "service_unavailable_error"

    def __init__(self, message: str, *, code: str, retry_after: int) -> None:
        super().__init__(message, code=code)
        self._retry_after = retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        headers = {"retry-after": str(self._retry_after)}
        if self.code == "shutting_down":
            headers["connection"] = "close"
        return headers


class EngineFailure(ApiError):
    default_code = "engine_error"


def shutting_down() -> Unavailable:
    return Unavailable("The server is shutting down.", code="shutting_down", retry_after=5)


def deadline_exceeded(message: str) -> Unavailable:
    return Unavailable(message, code="deadline_exceeded", retry_after=10)


def no_node(reason: str) -> Unavailable:
    """No decode node can take a request: the model is `loading`, all are `draining`, or `lost`."""
    if reason == "draining":
        return shutting_down()
    if reason == "loading":
        return Unavailable("The model is loading.", code="model_loading", retry_after=5)
    return Unavailable(
        "No decode node is reachable; one is expected back soon.",
        code="engine_unavailable",
        retry_after=2,
    )


def from_rejection(rejected: Rejected) -> ApiError:
    """What a decode node's refusal means to the client."""
    text, code = rejected.message, rejected.code
    if code == "server_overloaded":
        return Unavailable(text, code=code, retry_after=2)
    if code == "shutting_down":
        return Unavailable(text, code=code, retry_after=5)
    if code == "deadline_exceeded":
        return deadline_exceeded(text)
    if code in ("context_length_exceeded", "invalid_request"):
        return BadRequest(text, code=code)
    return EngineFailure(text, code=code)


def from_http(error: HTTPException, path: str) -> ApiError:
    """The router's own 404 and 405, in the form of all others."""
    if error.status_code == 404:
        return NotFound(f"There is nothing at {path[:200]}.{_hint(path)}")
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{path[:200]} accepts {allow or 'another method'}.", allow)
    if error.status_code < 500:
        return BadRequest(str(error.detail))
    return EngineFailure(str(error.detail))


def _hint(path: str) -> str:
    if path.startswith("/v1/v1/"):
        return " Is /v1 in the base URL twice?"
    if path.startswith("/chat/") or path.startswith("/completions"):
        return " Does the base URL lack /v1?"
    return ""


def to_response(error: ApiError) -> Response:
    return Response(
        error.body(),
        status_code=error.status,
        headers=dict(error.headers),
        media_type="application/json",
    )
