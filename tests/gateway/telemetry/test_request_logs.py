"""What the logs say of requests, in both forms, and what they never say."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.kvstore.process.logs import JsonLines
from kvferry.tests.rigs.gateway.rig import Rig, ids_of, running, wait_until

CANARY = "canary-in-the-prompt"
SECRET = "s3cret-of-alice"
ALICE = {"authorization": f"Bearer {SECRET}"}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    keys = (f"alice={SECRET}",)
    folder = tmp_path_factory.mktemp("model") / "standin"
    with running(folder, api_key=keys, admin_api_key="op-3rator") as rig:
        yield rig


def lines_about(caplog: pytest.LogCaptureFixture, name: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if name in record.getMessage()]


def test_one_line_a_request_with_its_timings(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    headers = ALICE | {"x-request-id": "told-once"}
    answer = rig.post("/v1/completions", {"prompt": "hello"}, headers=headers)
    wait_until(lambda: bool(lines_about(caplog, "told-once")))
    (record,) = lines_about(caplog, "told-once")
    line = record.getMessage()
    assert line.startswith("POST /v1/completions 200 request=told-once tenant=alice ")
    for part in (f"response={answer.json()['id']}", "prompt=5", "completion=8", "finish=stop",
                 "queue_ms=1.0", "first_step_ms=6.0", "handoff_ms=7.0"):  # fmt: skip
        assert f" {part} " in line
    assert " ttft_ms=" in line and " total_ms=" in line


def test_as_json_the_same_facts_are_fields(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    headers = ALICE | {"x-request-id": "as-json"}
    rig.post("/v1/completions", {"prompt": "hello", "temperature": -1}, headers=headers)
    rig.post("/v1/completions", {"prompt": "hello"}, headers=headers)
    wait_until(lambda: len(lines_about(caplog, "as-json")) == 2)
    told = [json.loads(JsonLines("gateway").format(it)) for it in lines_about(caplog, "as-json")]
    for line in told:
        assert (line["role"], line["level"], line["method"]) == ("gateway", "info", "POST")
        assert (line["path"], line["request"]) == ("/v1/completions", "as-json")
        assert line["time"].endswith("+00:00") and line["total_ms"] > 0
    assert (told[0]["status"], told[0]["code"]) == (400, "invalid_request_error")
    assert (told[1]["status"], told[1]["prompt"], told[1]["cached"]) == (200, 5, 0)
    assert (told[1]["queue_ms"], told[1]["completion"], told[1]["stream"]) == (1.0, 8, False)


def test_a_json_line_is_one_line_whatever_happened() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines("decode-1"))
    logger = logging.Logger("x")
    logger.addHandler(handler)
    try:
        raise ValueError("two\nlines \ud800")
    except ValueError:
        logger.exception("it\nfailed", extra={"facts": {"message": "no", "path": Path("/x")}})
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert (told["role"], told["message"], told["path"]) == ("decode-1", "it\nfailed", "/x")
    assert "ValueError: two\nlines" in told["exception"]


def bodies() -> list[tuple[str, dict[str, Any]]]:
    message = {"role": "user", "content": CANARY}
    return [
        ("/v1/completions", {"prompt": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "stream": True}),
        ("/v1/completions", {"prompt": CANARY * 100}),
        ("/v1/completions", {"prompt": CANARY, "temperature": CANARY}),
        ("/v1/completions", {"prompt": CANARY, "model": "nobody"}),
        ("/v1/chat/completions", {"messages": [message]}),
        ("/v1/chat/completions", {"messages": [message | {"role": "x"}]}),
        ("/render", {"messages": [message]}),
        ("/tokenize", {"prompt": CANARY}),
    ]


def test_neither_prompts_nor_keys_are_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for path, body in bodies():
        rig.post(path, body, headers=ALICE)
        rig.post(path, body, headers={"x-api-key": f"{SECRET}-but-wrong"})
    lines = "kvferry.gateway.telemetry.access_log"
    wait_until(lambda: sum(it.name == lines for it in caplog.records) == 2 * len(bodies()))
    ids = str(ids_of(CANARY))[1:-1]
    for record in [it for it in caplog.records if not it.name.startswith("http")]:
        for text in (record.getMessage(), JsonLines("gateway").format(record)):
            assert CANARY not in text and ids not in text
            assert SECRET not in text and "op-3rator" not in text


def test_prompts_are_logged_where_it_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running(tmp_path / "m", enable_log_requests=True, max_log_len=6) as rig:
        rig.post("/v1/completions", {"prompt": CANARY}, headers={"x-request-id": "asked"})
        wait_until(lambda: len(lines_about(caplog, "asked")) == 2)
    (record, _) = lines_about(caplog, "asked")
    assert f"asks '{CANARY[:6]}', {len(CANARY)} ids" in record.getMessage()
    told = json.loads(JsonLines("gateway").format(record))
    assert (told["prompt"], told["prompt_token_ids"]) == (CANARY[:6], ids_of(CANARY[:6]))


def test_nodes_are_told_apart_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines("prefill-1"))
    logger = logging.Logger("x")
    logger.addHandler(handler)
    logger.warning("hello")
    assert json.loads(capsys.readouterr().err)["role"] == "prefill-1"
