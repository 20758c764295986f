"""Every row of the table of endpoints has what it needs, and nothing else declares a path."""

from __future__ import annotations

import ast
from collections import Counter
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from kvferry.gateway import http
from kvferry.gateway.http.endpoints import ENDPOINTS, Access, Endpoint, access_of
from kvferry.gateway.intake.reader import TextApi

PATHS = [path for one in ENDPOINTS for path in one.paths]
GATEWAY = Path(http.__file__).parents[1]
NAMES_PATHS = {"http/endpoints.py", "cli/cache.py"}
"""The table, and who asks another server."""


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda one: one.paths[0])
def test_every_row_has_what_it_needs(endpoint: Endpoint) -> None:
    assert endpoint.method in ("GET", "POST") and endpoint.paths and endpoint.summary
    assert all(path.startswith("/") for path in endpoint.paths)
    assert endpoint.asks is None or endpoint.method == "POST"
    if endpoint.handler is None:
        assert not (endpoint.asks or endpoint.answers or endpoint.media or endpoint.failures)
        assert endpoint.summary.endswith("API")
    elif endpoint.method == "POST":
        assert endpoint.answers is not None
    assert not {400, 401, 413, 415, 500} & set(endpoint.failures), "these follow"


def test_no_path_is_there_twice() -> None:
    assert {count for count in Counter(PATHS).values()} == {1}


def test_every_api_that_generates_text_has_a_row() -> None:
    apis = [one.handler.args[0] for one in ENDPOINTS if isinstance(one.handler, partial)]
    assert {type(api) for api in apis} == set(get_args(TextApi))
    for one in ENDPOINTS:
        assert bool(one.operation) == isinstance(one.handler, partial), "only those have spans"


def test_nothing_else_declares_a_path() -> None:
    for file in GATEWAY.rglob("*.py"):
        name = file.relative_to(GATEWAY).as_posix()
        nodes = list(ast.walk(ast.parse(file.read_text())))
        texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
        routes = [node for node in nodes if isinstance(node, ast.Name) and node.id == "Route"]
        assert name in NAMES_PATHS or not texts & ({*PATHS} - {"/"}), name
        assert name == "http/app.py" or not routes, name


def test_who_may_ask() -> None:
    for one in ENDPOINTS:
        assert {access_of(path) for path in one.paths} == {one.access}
    for path in ("/admin", "/admin/x", "/administer", "/debug/", "/flush_cache/x", "/server_infos"):
        assert access_of(path) is Access.ADMIN, path
    for path in ("/x", "/v1/abort/x", "/abort_request/", "/v1/models/m", "/healthy", "/ready/"):
        assert access_of(path) is Access.TENANT, path
