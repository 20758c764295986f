"""Bodies that take long to read: other streams go on meanwhile, and the answer is the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from kvferry.gateway.errors import (
    ApiError,
    BadRequest,
    ContextLength,
    EngineFailure,
    NotFound,
    NotSupported,
)
from kvferry.gateway.intake.dispatch import INLINE_BYTES, LARGE_BYTES, LARGE_OBJECTS, is_large
from kvferry.gateway.intake.worker import from_failure, to_failure
from kvferry.gateway.protocols import chat, common, completions
from kvferry.kvstore.keys import unpack_tokens
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import (
    MAX_MODEL_LEN,
    Behaviour,
    Rig,
    ids_of,
    running,
    wait_until,
)
from kvferry.tests.rigs.slow import slow_but

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with running(tmp_path_factory.mktemp("model") / "standin") as made:
        yield made


class Beside:
    """A stream of single characters that goes on until the end of its `with`."""

    def __init__(self, rig: Rig) -> None:
        self.tokens = 0
        self.failure = ""
        self._rig = rig
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._follow)

    def __enter__(self) -> Beside:
        self._rig.decode.does = Behaviour(pace=0.01)
        self._thread.start()
        wait_until(lambda: self.tokens > 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._thread.join(20)
        self._rig.decode.does = Behaviour()
        wait_until(self._rig.idle)

    def _follow(self) -> None:
        while not self._leave.is_set():
            body = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
            url = self._rig.url + COMPLETIONS
            with web.stream("POST", url, json=body, timeout=20) as response:
                for line in response.iter_lines():
                    self.tokens += line.startswith("data: {")
                    if self._leave.is_set():
                        return


def huge(kind: str) -> tuple[str, bytes]:
    """A path, and a body of 15 MB; of 5 MB, if all of it becomes tokens."""
    size = 15_000_000
    if kind == "text":
        content = "ab\n" * (size // 12)
        return CHAT, orjson.dumps({"messages": [{"role": "user", "content": content}]})
    if kind == "ids":
        return COMPLETIONS, b'{"prompt": [' + b"12," * (size // 3) + b"1]}"
    messages = b'{"role":"user"},' * (size // 16)
    return CHAT, b'{"messages": [' + messages + b'{"role":"nobody"}]}'


@pytest.mark.C5
@pytest.mark.parametrize("kind", slow_but(["text", "ids", "messages"], "ids"))
def test_a_stream_goes_on_beside_a_huge_body(
    rig: Rig, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[int] = []

    def watched(body: bytes, kind: type[Any]) -> Any:
        here.append(len(body))
        return common.decode(body, kind)

    for module in (chat, completions):
        monkeypatch.setattr(module, "decode", watched)
    path, body = huge(kind)
    before = len(rig.decode.generates)
    with Beside(rig) as beside:
        tokens = beside.tokens
        response = web.post(rig.url + path, content=body, headers=JSON, timeout=100)
        assert beside.tokens >= tokens + 20
    assert response.status_code == 400
    error = response.json()["error"]
    if kind == "messages":
        assert error["param"] == f"messages[{15_000_000 // 16}].role"
    else:
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert max(here) < INLINE_BYTES, "it was read in the gateway's own process"
    assert all(len(one.prompt) == 4 for one in rig.decode.generates[before:])


@pytest.mark.C5
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_over_the_limit_beside_a_stream(rig: Rig, announced: bool) -> None:
    size, part = 27_000_000, b"x" * 100_000
    parts = (part for _ in range(size // len(part)))
    headers = JSON | ({"content-length": str(size)} if announced else {})
    with Beside(rig) as beside:
        tokens = beside.tokens
        response = web.post(rig.url + CHAT, content=parts, headers=headers, timeout=60)
        wait_until(lambda: beside.tokens > tokens)
    assert response.status_code == 413
    error = response.json()["error"]
    assert error["code"] == "request_too_large" and "16777216 bytes" in error["message"]


@pytest.mark.C5
def test_who_waits_for_a_go_ahead_is_refused_without_sending(rig: Rig) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += "Content-Length: 27000000\r\nExpect: 100-continue\r\n\r\n"
    with socket.create_connection(("127.0.0.1", rig.port)) as connection:
        connection.settimeout(20)
        connection.sendall(head.encode())
        got = b""
        while piece := connection.recv(1 << 16):
            got += piece
    assert got.startswith(b"HTTP/1.1 413 ") and b"request_too_large" in got


def test_a_large_body_gets_the_answer_of_a_small_one(rig: Rig) -> None:
    padding = {"metadata": {"pad": "x" * (LARGE_BYTES + 1)}}
    messages: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 1}
    for body, path in ((messages, CHAT), ({"prompt": ["a", "b"], "seed": 1, "echo": True},
                                          COMPLETIONS)):  # fmt: skip
        small, large = rig.post(path, body).json(), rig.post(path, body | padding).json()
        assert large["choices"] == small["choices"]
        first, second = rig.decode.generates[-2 * len(small["choices"])], rig.decode.generates[-1]
        assert (first.sampling, first.root) == (second.sampling, second.root)
    plain: list[tuple[str, dict[str, Any]]] = [
        ("/tokenize", {"prompt": "hé"}),
        ("/detokenize", {"tokens": ids_of("hé")}),
    ]
    for path, body in plain:
        assert rig.post(path, body | padding).json() == rig.post(path, body).json()
    assert unpack_tokens(rig.decode.generates[-1].prompt) == ids_of("b")


def test_errors_of_a_large_body_are_those_of_a_small_one(rig: Rig) -> None:
    padding = {"metadata": "x" * (LARGE_BYTES + 1)}
    for fields in ({"model": "nobody"}, {"temperature": 9}, {"tool_choice": "required"},
                   {"messages": [{"role": "user", "content": "x" * MAX_MODEL_LEN}]}):  # fmt: skip
        small, large = rig.chat(**fields), rig.chat(**(fields | padding))
        assert (large.status_code, large.json()) == (small.status_code, small.json())
        assert small.status_code >= 400


def test_its_process_is_made_again_when_it_dies(rig: Rig) -> None:
    padding = "x" * (LARGE_BYTES + 1)
    assert rig.chat(metadata=padding).status_code == 200
    process = rig.gateway.intake.worker.process
    assert process is not None
    process.kill()
    process.wait()
    statuses = [rig.chat(metadata=padding).status_code for _ in range(2)]
    assert statuses in ([200, 200], [500, 200])
    assert rig.gateway.intake.worker.process is not process


def test_it_ends_with_the_gateway(tmp_path: Path) -> None:
    with running(tmp_path / "m") as rig:
        assert rig.gateway.intake.worker.process is None, "nobody needed it yet"
        rig.chat(metadata="x" * (LARGE_BYTES + 1))
        process = rig.gateway.intake.worker.process
        assert process is not None and process.poll() is None
    wait_until(lambda: process.returncode == -9)
    wait_until(lambda: rig.gateway.intake.worker.process is None)


def test_what_is_large() -> None:
    assert not is_large(b" " * LARGE_BYTES)
    assert is_large(b" " * (LARGE_BYTES + 1))
    assert not is_large(b"{" * LARGE_OBJECTS)
    assert is_large(b"{" * (LARGE_OBJECTS + 1))


@pytest.mark.parametrize(
    "error",
    [
        BadRequest("what", param="where", code="c"),
        ContextLength(10, 20, 3, "messages"),
        NotFound("none", code="model_not_found"),
        NotSupported("later", param="tools"),
        EngineFailure("broken"),
    ],
)
def test_errors_survive_the_way_from_another_process(error: ApiError) -> None:
    again = from_failure(to_failure(error))
    assert (again.status, again.body(), again.headers) == (
        error.status, error.body(), error.headers,
    )  # fmt: skip
