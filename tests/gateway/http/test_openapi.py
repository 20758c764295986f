"""The OpenAPI document is true: paths, statuses and shapes, whatever a request looks like."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckFunction
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kvferry.gateway.http.app import build_app
from kvferry.gateway.http.endpoints import ENDPOINTS, Endpoint
from kvferry.gateway.http.openapi import document
from kvferry.tests.rigs.gateway import web
from kvferry.tests.rigs.gateway.rig import Rig, running, wait_until

CHECKS: list[CheckFunction] = [
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
SECONDS = 3.0
"""For one operation with a body, in one mode."""
ADMIN = {"authorization": "Bearer root"}
OPERATIONS = [(one, path.replace(":path}", "}")) for one in ENDPOINTS for path in one.paths]
MODES = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("model") / "standin"
    with running(folder, enable_debug=True, admin_api_key="root") as made:
        yield made


@pytest.fixture(scope="module")
def schema(rig: Rig) -> Any:
    served = rig.get("/openapi.json").json()
    return schemathesis.openapi.from_dict(served, config=SchemathesisConfig())


def test_the_document_is_one(schema: Any, rig: Rig) -> None:
    schema.validate()
    version = rig.get("/version").json()["version"]
    assert rig.get("/openapi.json").json() == document(version, ENDPOINTS)


def test_it_has_every_path(rig: Rig) -> None:
    routes = {
        (method.lower(), route.path.replace(":path}", "}"))  # type: ignore[attr-defined]
        for route in build_app(rig.gateway).routes
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]
    }
    paths = rig.get("/openapi.json").json()["paths"]
    assert {(method, path) for path in paths for method in paths[path]} == routes
    assert {(one.method.lower(), path) for one, path in OPERATIONS} == routes


def test_every_operation_can_fail_as_it_says(rig: Rig) -> None:
    documented = rig.get("/openapi.json").json()["paths"]
    for one, path in OPERATIONS:
        if one.handler is None:
            response = web.request(one.method, rig.url + path, timeout=20)
            assert response.status_code == 501
            assert "501" in documented[path][one.method.lower()]["responses"]
            assert response.headers["x-should-retry"] == "false"
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("not_implemented_error", "not_supported")
            assert "API is not supported yet" in error["message"]


@pytest.mark.C6
@pytest.mark.parametrize(
    ("endpoint", "path", "mode"),
    [
        pytest.param(one, path, mode, id=f"{one.method} {path} {about}")
        for one, path in OPERATIONS
        for mode, about in zip(MODES, ("as-documented", "otherwise"), strict=True)
        if mode is MODES[0] or one.asks is not None  # else it takes nothing that could be wrong
    ],
)
def test_no_request_gets_an_undocumented_answer(
    rig: Rig, schema: Any, endpoint: Endpoint, path: str, mode: schemathesis.GenerationMode
) -> None:
    described = schema[path][endpoint.method]
    headers = ADMIN if path.startswith(("/debug", "/admin/cache")) else None
    session, seen, failed = requests.Session(), Counter[int](), False
    deadline = time.monotonic() + SECONDS

    def check(case: Any) -> None:
        response = case.call(base_url=rig.url, session=session, headers=headers, timeout=60)
        seen[response.status_code] += 1
        assert response.status_code < 500 or response.status_code == 501, response.text[:300]
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            assert len(response.content) < 4096

    @settings(
        max_examples=40 if endpoint.asks is not None else 5,
        phases=[Phase.generate],
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=described.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        nonlocal failed
        if time.monotonic() > deadline and seen and not failed:
            return
        failed = True
        check(case)
        failed = False

    ask()
    session.close()
    wait_until(rig.idle)
    assert seen.total()
