"""What the operator may ask, and what a tenant may ask of its own requests, over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.gateway.prompt.memory import LastPrompts
from kvferry.kvstore.wire.status import ResetCache
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import Behaviour, Rig, ids_of, running, wait_until

ADMIN = {"authorization": "Bearer op-3rator"}
ALICE, BOB = {"authorization": "Bearer a-secret"}, {"authorization": "Bearer b-secret"}
COMPLETIONS = "/v1/completions"
SLOW = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model") / "standin"
    keys = ("alice=a-secret", "bob=b-secret")
    with running(folder, api_key=keys, admin_api_key="op-3rator") as rig:
        yield rig


@pytest.fixture
def rig(shared: Rig) -> Iterator[Rig]:
    shared.decode.does = Behaviour()
    yield shared
    shared.decode.does = Behaviour()
    shared.gateway.paused = False
    wait_until(shared.idle)


def code_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/server_info"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/flush_cache"),
        ("POST", "/admin/drain"),
        ("POST", "/admin/resume"),
    ],
)
def test_the_operators_paths_take_no_other_key(rig: Rig, method: str, path: str) -> None:
    for headers in ({}, ALICE):
        refused = web.request(method, rig.url + path, headers=headers)
        assert code_of(refused) == (401, "invalid_api_key")
    assert not rig.gateway.draining
    assert web.request(method, rig.url + path, headers=ADMIN).status_code == 200


def test_without_an_admin_key_nobody_is_the_operator(tmp_path: Path) -> None:
    with running(tmp_path / "m") as rig:
        assert rig.get("/server_info").status_code == 401
        assert rig.post("/reset_prefix_cache", {}).status_code == 401


# -- server_info -----------------------------------------------------------------------------------


def test_server_info_says_what_runs_and_no_secret(rig: Rig) -> None:
    response = rig.get("/server_info", headers=ADMIN)
    info = response.json()
    assert info["model"] == "standin" and info["block_size"] == 16
    assert info["fingerprint"] == {"weights": "w"}
    (node,) = info["nodes"]
    assert (node["name"], node["state"]) == ("decode-0", "usable")
    assert info["config"]["max_num_queued_reqs"] == rig.gateway.config.max_num_queued_reqs
    assert not any(key in response.text for key in ("a-secret", "b-secret", "op-3rator"))


# -- the prefix cache ------------------------------------------------------------------------------


def test_a_reset_reaches_every_node_and_says_what_went(rig: Rig) -> None:
    for path in ("/reset_prefix_cache", "/flush_cache"):
        answer = web.post(rig.url + path, headers=ADMIN).json()  # without any body
        assert answer["success"] and answer["absent"] == []
        (node,) = answer["nodes"]
        assert node["name"] == "decode-0"
        assert node["tiers"] == {"device": {"evicted": 5, "held": 2}}


def test_a_reset_that_a_node_does_not_confirm_is_an_error(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.gateway.router.cache.ANSWER_SECONDS", 0.1)
    rig.decode.does.ignores = lambda message: isinstance(message, ResetCache)
    refused = web.post(rig.url + "/reset_prefix_cache", headers=ADMIN)
    assert code_of(refused) == (503, "engine_unavailable")
    assert "decode-0" in refused.json()["error"]["message"]


# -- drain -----------------------------------------------------------------------------------------


@pytest.mark.D1
def test_a_drain_lets_nothing_in_and_what_runs_go_on(rig: Rig) -> None:
    rig.decode.does = Behaviour(pace=0.005)
    with web.stream("POST", rig.url + COMPLETIONS, json=SLOW | {"stream": True}, headers=ALICE,
                      timeout=20) as response:  # fmt: skip
        lines = response.iter_lines()
        next(lines)
        told = rig.post("/admin/drain", {}, headers=ADMIN).json()
        assert told == {"draining": True, "requests": 1}
        assert code_of(rig.get("/ready")) == (503, "shutting_down")
        assert rig.get("/health").status_code == 200
        refused = rig.post(COMPLETIONS, SLOW, headers=ALICE)
        assert code_of(refused) == (503, "shutting_down")
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert rig.post("/admin/resume", {}, headers=ADMIN).json()["draining"] is False
    rig.decode.does = Behaviour()
    assert rig.get("/ready").status_code == 200
    assert rig.post(COMPLETIONS, SLOW, headers=ALICE).status_code == 200


# -- abort -----------------------------------------------------------------------------------------


class Asking:
    """A request in a thread of its own, until it has ended."""

    def __init__(self, rig: Rig, headers: dict[str, str], name: str) -> None:
        self.response: httpx.Response | None = None
        self._headers = headers | {"x-request-id": name}
        self._thread = threading.Thread(target=self._run, args=(rig,))
        before = len(rig.gateway.open)
        self._thread.start()
        wait_until(lambda: len(rig.gateway.open) > before)

    def _run(self, rig: Rig) -> None:
        self.response = rig.post(COMPLETIONS, SLOW, headers=self._headers)

    def end(self) -> httpx.Response:
        self._thread.join(20)
        assert self.response is not None
        return self.response


def test_a_tenant_ends_its_own_requests_and_no_others(rig: Rig) -> None:
    rig.decode.does = Behaviour(hold=True)
    alice, bob = Asking(rig, ALICE, "the-same"), Asking(rig, BOB, "the-same")
    for name in ("other", "the-sam", ""):
        body = {"request_id": name}
        assert rig.post("/v1/abort", body, headers=ALICE).status_code in (400, 404)
    assert len(rig.gateway.open) == 2
    told = rig.post("/v1/abort", {"request_id": "the-same"}, headers=ALICE)
    assert told.json() == {"aborted": 1}
    assert code_of(alice.end()) == (499, "request_aborted")
    assert alice.end().headers["x-should-retry"] == "false"
    assert len(rig.gateway.open) == 1, "the other tenant's request runs on"
    again = rig.post("/abort_request", {"rid": "the-same"}, headers=ALICE)
    assert code_of(again) == (404, "request_not_found")
    assert rig.post("/abort_request", {"rid": "the-same"}, headers=ADMIN).json() == {"aborted": 1}
    assert code_of(bob.end()) == (499, "request_aborted")
    wait_until(lambda: len(rig.decode.aborts) >= 2)


def test_requests_that_share_an_id_are_two(rig: Rig) -> None:
    rig.decode.does = Behaviour(hold=True)
    pair = [Asking(rig, ALICE, "twice") for _ in range(2)]
    assert len(rig.gateway.open) == 2
    rig.decode.does = Behaviour(hold=False)
    for one in pair:
        response = one.end()
        assert response.status_code == 200
        assert response.headers["x-request-id"] == response.headers["request-id"] == "twice"


def test_a_stream_is_aborted_by_the_id_of_its_answer(rig: Rig) -> None:
    rig.decode.does = Behaviour(pace=0.01)
    with web.stream("POST", rig.url + COMPLETIONS, json=SLOW | {"stream": True}, headers=ALICE,
                      timeout=20) as response:  # fmt: skip
        lines = response.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        assert rig.post("/v1/abort", {"request_id": name}, headers=BOB).status_code == 404
        assert rig.post("/v1/abort", {"request_id": name}, headers=ALICE).status_code == 200
        rest: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            rest.extend(lines)
            raise AssertionError("a clean end looks like success")
    assert not any("[DONE]" in line for line in rest)


# -- render ----------------------------------------------------------------------------------------


def render(rig: Rig, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = rig.post("/render", body, headers=ALICE | headers)
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    return told


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return {"messages": messages}


def test_render_is_what_the_node_gets(rig: Rig) -> None:
    for path, body in [
        ("/v1/chat/completions", chat("Grüß dich 😀", "ok", "und weiter")),
        (COMPLETIONS, {"prompt": "plain"}),
        (COMPLETIONS, {"prompt": ids_of("ids")}),
    ]:
        told = render(rig, body)
        rig.decode.generates.clear()
        assert rig.post(path, body, headers=ALICE).status_code == 200
        (generate,) = rig.decode.generates
        ids = memoryview(generate.prompt).cast("i").tolist()
        assert told["token_ids"] == ids and told["count"] == len(ids)
        assert told["prompt"] == rig.gateway.model.tokenizer.decode(ids, skip_special=False)
    assert "Grüß dich 😀" in render(rig, chat("Grüß dich 😀"))["prompt"]


def test_render_shows_where_a_prompt_leaves_the_last_one(rig: Rig) -> None:
    session = {"x-session-id": "one"}
    first = render(rig, chat("The time is 10:00.", "ok", "go on"), **session)
    assert first["difference"] is None
    second = render(rig, chat("The time is 10:05.", "ok", "go on"), **session)
    difference = second["difference"]
    at = difference["common_tokens"]
    assert first["token_ids"][:at] == second["token_ids"][:at]
    assert first["token_ids"][at] != second["token_ids"][at]
    assert second["prompt"][: difference["common_characters"]].endswith("The time is 10:0")
    assert difference["shared"].endswith("The time is 10:0")
    assert difference["previous"].startswith("0.") and difference["now"].startswith("5.")
    assert difference["previous_count"] == first["count"]


def test_the_last_prompt_may_be_a_real_requests(rig: Rig) -> None:
    session = {"x-session-id": "two"}
    rig.post(COMPLETIONS, {"prompt": "abcdef"}, headers=ALICE | session)
    difference = render(rig, {"prompt": "abcxyz"}, **session)["difference"]
    assert (difference["shared"], difference["previous"], difference["now"]) == (
        "abc",
        "def",
        "xyz",
    )
    longer = render(rig, {"prompt": "abcxyz and on"}, **session)["difference"]
    assert (longer["previous"], longer["now"]) == ("", " and on")


def test_callers_do_not_see_each_others_prompts(rig: Rig) -> None:
    common = {"x-session-id": "three"}
    render(rig, {"prompt": "alice has a secret"}, **common)
    other = rig.post("/render", {"prompt": "alice has a dog"}, headers=BOB | common).json()
    assert other["difference"] is None
    fourth = render(rig, {"prompt": "alice has a dog", "prompt_cache_key": "four"}, **common)
    assert fourth["difference"] is None, "another session"
    assert render(rig, {"prompt": "x", "prompt_cache_key": "four"})["difference"] is not None


def test_render_refuses_what_a_request_would_be_refused_for(rig: Rig) -> None:
    for body in ({"prompt": "x" * 600}, chat(), {"prompt": "x", "temperature": -1}, {}):
        refused = rig.post("/render", body, headers=ALICE)
        assert refused.status_code == 400, body
    assert rig.post("/render", {"prompt": ["a", "b"]}, headers=ALICE).status_code == 400


def test_what_is_remembered_of_callers_is_bounded() -> None:
    prompts = LastPrompts(max_bytes=100, max_callers=4)
    for number in range(50):
        assert prompts.swap((f"t{number}", b""), bytes(number)) is None
        assert prompts.bytes <= 100 and len(prompts) <= 4
    assert prompts.swap(("t49", b""), b"new") == bytes(49)
    assert prompts.swap(("t0", b""), b"x") is None, "the oldest is forgotten"
    assert prompts.swap(("big", b""), bytes(101)) is None
    assert prompts.swap(("big", b""), b"") is None, "what is too large is not kept"
