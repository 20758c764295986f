"""`kvferry cache`: the operator's questions about the cache, asked of a running server over HTTP.

Owns the command line and what a person reads of the answers. It knows paths and bodies, and nothing
of nodes or stores; `--json` prints the answer as it came.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.settings import flag, parse, positional

PATIENCE_S = 30.0
WIDTH = 64
"""Blocks in one line of a map."""
Json = dict[str, Any]
Action = Literal["stats", "inspect", "pin", "unpin", "prefetch", "clear"]


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """`kvferry cache`."""

    action: Action | None = positional(None, "what to do")
    url: str = flag("http://127.0.0.1:8000", "where the server listens")
    admin_api_key: str | None = flag(
        None, "the server's --admin-api-key; better in the environment", metavar="KEY", secret=True
    )
    request: Path | None = flag(
        None, "JSON body of a chat or completions request; -: from stdin", metavar="FILE"
    )
    prompt: str | None = flag(None, "text of a completions request, in place of --request")
    key: tuple[str, ...] = flag(
        (), "block key as inspect --json prints it, repeatable, in place of a prompt"
    )
    tenant: str | None = flag(None, "whose: the name of an API key [default]", metavar="NAME")
    ttl: float | None = flag(None, "seconds a pin lasts, or a prefetch may take", metavar="S")
    all: bool = flag(False, "clear everybody's blocks")
    tier: Literal["device", "store"] | None = flag(None, "clear this tier only")
    json: bool = flag(False, "print the answer as it came")


def run(argv: Sequence[str]) -> int:
    """Asks, prints, and returns the exit status.

    Raises
    ------
    ConfigError
        The question is not complete, or the server cannot be reached or refuses it.
    """
    config = parse(
        CacheConfig,
        argv,
        os.environ,
        prog="kvferry cache",
        description="Asks a running server about its cache, as its operator.",
    )
    if config.action is None:
        raise ConfigError("say what to do: stats, inspect, pin, unpin, prefetch or clear")
    answer = _ask(config, config.action, _body(config, config.action))
    if config.json:
        print(json.dumps(answer, indent=2))
    else:
        print("\n".join(_TOLD[config.action](answer)))
    return 0


# -- asking ----------------------------------------------------------------------------------------


def _body(config: CacheConfig, action: str) -> Json | None:
    """What is sent; None: nothing, it is a GET."""
    if action == "stats":
        return None
    if action == "clear":
        if config.all == (config.tenant is not None):
            raise ConfigError("clear needs either --tenant NAME or --all")
        body: Json = {"all": True} if config.all else {"tenant": config.tenant}
        return body if config.tier is None else body | {"tiers": [config.tier]}
    body = _chain(config, action)
    if config.tenant is not None:
        body["tenant"] = config.tenant
    if action == "pin" and config.ttl is None:
        raise ConfigError("pin needs --ttl SECONDS")
    if config.ttl is not None and action != "inspect":
        body["ttl"] = config.ttl
    return body


def _chain(config: CacheConfig, action: str) -> Json:
    given = [config.request is not None, config.prompt is not None, bool(config.key)]
    if sum(given) != 1:
        raise ConfigError(f"{action} needs one of --request FILE, --prompt TEXT and --key KEY")
    if config.key:
        return {"keys": list(config.key)}
    if config.prompt is not None:
        return {"prompt": config.prompt}
    assert config.request is not None
    return _read(config.request)


def _read(path: Path) -> Json:
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
        body = json.loads(text)
    except OSError as error:
        raise ConfigError(f"--request {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--request {path} is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ConfigError(f"--request {path} is not a JSON object")
    return body


def _ask(config: CacheConfig, action: str, body: Json | None) -> Json:
    url = f"{config.url.rstrip('/').removesuffix('/v1')}/admin/cache/{action}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url is {config.url!r}, but must begin with http:// or https://")
    request = urllib.request.Request(
        url,
        None if body is None else json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    if config.admin_api_key is not None:
        request.add_header("Authorization", f"Bearer {config.admin_api_key}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
            answer = json.loads(response.read())
    except urllib.error.HTTPError as error:
        raise ConfigError(_refusal(config, error)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no answer from {config.url}: {reason}; is --url right?") from None
    if not isinstance(answer, dict):
        raise ConfigError(f"{config.url} answers no JSON object: is it a kvferry server?")
    return answer


def _refusal(config: CacheConfig, error: urllib.error.HTTPError) -> str:
    try:
        told = json.loads(error.read())["error"]["message"]
    except (OSError, ValueError, LookupError, TypeError):
        return f"{config.url} answers {error.code}: is it a kvferry server?"
    if error.code == 401:
        told += " Give it with --admin-api-key or KVFERRY_ADMIN_API_KEY."
    return f"{error.code}: {told}"


# -- telling ---------------------------------------------------------------------------------------


def _stats(answer: Json) -> list[str]:
    lines = []
    for node in answer["nodes"]:
        lines.append(f"{node['name']}  {node['address']}  {node['state']}")
        if "error" in node:
            lines.append(f"  {node['error']}")
        for tier, figures in node.get("tiers", {}).items():
            told = ", ".join(f"{name} {_figure(name, it)}" for name, it in figures.items())
            lines.append(f"  {tier:<7}{told}")
        for title in ("gauges", "counters"):
            for name, value in node.get(title, {}).items():
                if value:
                    lines.append(f"  {name:<24}{_figure(name, value)}")
    return lines


def _figure(name: str, value: float) -> str:
    if not name.endswith("bytes"):
        return f"{value:g}" if value != int(value) else str(int(value))
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def _inspect(answer: Json) -> list[str]:
    counts = answer["summary"]
    letters = "".join(_letter(block) for block in answer["blocks"])
    lines = [letters[at : at + WIDTH] for at in range(0, len(letters), WIDTH)]
    lines.append("# on a device   h in memory   d on disk   . nowhere")
    told = ", ".join(f"{name} {count}" for name, count in counts.items())
    return [*lines, told]


def _letter(block: Json) -> str:
    return "#" if block["device"] else {"host": "h", "disk": "d", None: "."}[block["store"]]


def _counts(answer: Json) -> list[str]:
    return [", ".join(f"{name} {value:g}" for name, value in answer.items())]


def _clear(answer: Json) -> list[str]:
    lines = [
        f"{tier}: {counts['evicted']} blocks gone, {counts['held']} in use"
        for tier, counts in answer["tiers"].items()
    ]
    return [*lines, *(f"{name} is not there" for name in answer["absent"])]


_TOLD: Mapping[str, Callable[[Json], list[str]]] = {
    "stats": _stats,
    "inspect": _inspect,
    "pin": _counts,
    "unpin": _counts,
    "prefetch": _counts,
    "clear": _clear,
}
