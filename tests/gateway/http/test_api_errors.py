"""What the HTTP API refuses, and what it says when nodes fail, over real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.api import CHAT, COMPLETIONS, error_of, raw_request
from kvferry.tests.rigs.gateway.rig import MAX_MODEL_LEN, FakeDecode, Rig, running, wait_until

# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.C6
@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_are_refused_before_any_compute(rig: Rig, stream: bool) -> None:
    response = rig.chat(stream=stream, temperature=9)
    assert response.status_code == 400
    assert error_of(response)["param"] == "temperature"
    assert rig.decode.generates == []
    assert rig.chat().status_code == 200


@pytest.mark.C5
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("over", [0, 1, 44, 400 * MAX_MODEL_LEN])
def test_over_length(rig: Rig, over: int, stream: bool) -> None:
    size = MAX_MODEL_LEN + over
    response = rig.post(COMPLETIONS, {"prompt": "x" * size, "stream": stream})
    assert response.status_code == 400
    error = error_of(response)
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]
    assert str(size) in error["message"]
    assert rig.decode.generates == []


@pytest.mark.C5
def test_room_for_one_token_is_enough(rig: Rig) -> None:
    body = {"prompt": "x" * (MAX_MODEL_LEN - 1)}
    assert rig.post(COMPLETIONS, body).json()["usage"]["completion_tokens"] == 1
    response = rig.post(COMPLETIONS, body | {"max_tokens": 2})
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert f"{MAX_MODEL_LEN + 1} tokens" in error_of(response)["message"]


@pytest.mark.C6
@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", 1], [5000], [-1]])
def test_prompts_without_meaning(rig: Rig, prompt: object) -> None:
    response = rig.post(COMPLETIONS, {"prompt": prompt})
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "text/plain"}, b"{}", 415),
        ({"content-type": "application/x-www-form-urlencoded"}, b"a=b", 415),
        ({"content-type": "application/json", "content-encoding": "gzip"}, b"", 415),
        ({"content-type": "application/json; charset=utf-8"}, b"{", 400),
        ({}, b'{"messages": []}', 400),
    ],
)
def test_bodies(rig: Rig, headers: dict[str, str], content: bytes, status: int) -> None:
    response = web.post(rig.url + CHAT, content=content, headers=headers, timeout=20)
    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.C5
@pytest.mark.parametrize("chunked", [False, True])
def test_large_bodies(tmp_path: Path, chunked: bool) -> None:
    with running(tmp_path / "m", max_request_bytes=1000) as rig:
        content = (b"x" * 100 for _ in range(30)) if chunked else b"x" * 3000
        headers = {"content-type": "application/json"}
        response = web.post(rig.url + CHAT, content=content, headers=headers, timeout=20)
        assert response.status_code == 413
        assert "1000 bytes" in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "status"),
    [("server_overloaded", 503), ("shutting_down", 503), ("engine_error", 500),
     ("deadline_exceeded", 503), ("context_length_exceeded", 400)],
)  # fmt: skip
def test_a_nodes_refusal_is_a_status(rig: Rig, code: str, status: int, stream: bool) -> None:
    rig.decode.does.reject = code
    response = rig.chat(stream=stream)
    assert (response.status_code, error_of(response)["code"]) == (status, code)
    if status == 503:
        assert 1 <= int(response.headers["retry-after"]) <= 30


def test_every_path_and_method_answers_json(rig: Rig) -> None:
    for method, path, status in [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/v1/messages", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("POST", "/v1/responses", 501),
        ("POST", "/v1/messages", 501),
        ("POST", "/v1/embeddings", 501),
        ("GET", "/debug/ledger", 401),
        ("GET", "/v1/models/", 404),
    ]:
        response = web.request(method, rig.url + path, timeout=20)
        assert response.status_code == status, path
        error = error_of(response)
        assert (error["type"] == "invalid_request_error") == (status < 500)


def test_unknown_model(rig: Rig) -> None:
    response = rig.chat(model="gpt-4")
    assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


def test_request_ids(rig: Rig) -> None:
    for path in ("/health", "/nowhere"):
        own = rig.get(path).headers
        assert own["x-request-id"] == own["request-id"] != ""
        assert rig.get(path, headers={"x-request-id": "a.b-1"}).headers["x-request-id"] == "a.b-1"
        for odd in ("a b", "x" * 200, "é".encode()):
            assert rig.get(path, headers={"x-request-id": odd}).headers["x-request-id"] != odd


# -- nodes that die --------------------------------------------------------------------------------


@pytest.mark.C7
@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_node_ends_the_answer_with_one_error(tmp_path: Path, stream: bool) -> None:
    with running(tmp_path / "m") as rig:
        rig.decode.does.pace = 0.01
        connection = raw_request(rig, stream=stream)
        wait_until(lambda: bool(rig.decode.generates))
        got = connection.recv(1 << 16) if stream else b""
        rig.decode.close()
        connection.settimeout(4)
        while piece := connection.recv(1 << 16):
            got += piece
            if not stream and b"}}" in got:
                break
        connection.close()
        text = got.decode()
        assert text.count('{"error":') == 1
        assert ('"code":"engine_lost"' if stream else '"code":"engine_unavailable"') in text
        assert "[DONE]" not in text and '"finish_reason":"stop"' not in text
        assert text.startswith("HTTP/1.1 200" if stream else "HTTP/1.1 503")
        if stream:
            assert not text.endswith("0\r\n\r\n"), "a clean end looks like success"


@pytest.mark.D1
def test_readiness_follows_the_decode_node(tmp_path: Path) -> None:
    with running(tmp_path / "m") as rig:
        rig.decode.close()
        wait_until(lambda: rig.get("/ready").status_code == 503)
        assert rig.get("/health").status_code == 200
        refused = rig.chat()
        assert (refused.status_code, error_of(refused)["code"]) == (503, "engine_unavailable")
        assert int(refused.headers["retry-after"]) <= 60
        back = FakeDecode(rig.decode.address)
        try:
            wait_until(lambda: rig.get("/ready").status_code == 200)
            assert rig.chat().status_code == 200
        finally:
            back.close()


@pytest.mark.D1
def test_before_the_first_node_answers_the_model_is_loading(tmp_path: Path) -> None:
    with running(tmp_path / "m", decode_node=("tcp://127.0.0.1:9",), wait=False) as rig:
        assert rig.get("/health").status_code == 200
        for refused in (rig.get("/ready"), rig.chat(), rig.chat(stream=True)):
            assert (refused.status_code, error_of(refused)["code"]) == (503, "model_loading")
            assert int(refused.headers["retry-after"]) <= 60
        assert rig.get("/v1/models").json()["data"][0]["max_model_len"] is None


@pytest.mark.D1
def test_a_prefill_node_is_named_while_it_is_there(tmp_path: Path) -> None:
    prefill = FakeDecode(role="prefill")
    with running(tmp_path / "m", prefill_node=(prefill.address,)) as rig:
        wait_until(lambda: rig.get("/ready").json()["status"] == "ready")
        rig.chat()
        assert rig.decode.generates[-1].prefill_nodes == (prefill.address,)
        prefill.close()
        wait_until(lambda: rig.get("/ready").json()["status"] == "degraded")
        assert rig.chat().status_code == 200
        assert not rig.decode.generates[-1].prefill_nodes


def test_a_node_of_another_role_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = FakeDecode()
    with running(tmp_path / "m", first, prefill_node=(first.address,), wait=False) as rig:
        wait_until(lambda: "is not used: it is a decode node" in caplog.text)
        (node,) = rig.gateway.nodes.prefill
        assert not node.usable and not node.able


def test_nodes_that_differ_are_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, other = FakeDecode(), FakeDecode(weights="v")
    addresses = (first.address, other.address)
    try:
        with running(tmp_path / "m", first, decode_node=addresses) as rig:
            wait_until(lambda: "is not used: weights differs" in caplog.text)
            usable = [node for node in rig.gateway.nodes if node.usable]
            assert len(usable) == 1
            assert rig.get("/ready").json()["status"] == "degraded"
            assert rig.chat().status_code == 200
    finally:
        other.close()


def test_a_node_with_another_tokenizer_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = FakeDecode(), FakeDecode(tokenizer="another")
    try:
        with running(tmp_path / "m", first, decode_node=(first.address, other.address)) as rig:
            wait_until(lambda: "its tokenizer is 'another'" in caplog.text)
            assert [node.usable for node in rig.gateway.nodes.decode] == [True, False]
    finally:
        other.close()


# -- load and the end ------------------------------------------------------------------------------


@pytest.mark.D11
def test_too_many_waiting_requests_are_refused_at_once(tmp_path: Path) -> None:
    with running(tmp_path / "m", max_num_queued_reqs=2) as rig:
        rig.decode.does.hold = True
        accepted = 2 + rig.gateway.nodes.slots
        waiting = [raw_request(rig) for _ in range(accepted)]
        wait_until(lambda: len(rig.decode.generates) == accepted)
        refused = rig.chat()
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_overloaded")
        for connection in waiting:
            connection.close()
        wait_until(rig.idle)
        rig.decode.does.hold = False
        assert rig.chat().status_code == 200


def test_metrics_cannot_fail_a_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(reason: str) -> None:
        raise RuntimeError(reason)

    monkeypatch.setattr(rig.gateway.metrics, "_success", broken)
    assert rig.chat().status_code == 200
