"""`kvferry cache`: the command line with which an operator asks about blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.gateway.cli.cache import run
from kvferry.kvstore.errors import ConfigError
from kvferry.tests.rigs.gateway.cache import Store, emptied, keys_of, text
from kvferry.tests.rigs.gateway.rig import Rig


@pytest.fixture
def rig(both: tuple[Rig, Store]) -> Iterator[Rig]:
    with emptied(*both) as rig:
        yield rig


@pytest.fixture
def cache(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    monkeypatch.setenv("KVFERRY_ADMIN_API_KEY", "root")

    def call(*arguments: str) -> str:
        assert run([*arguments, f"--url={rig.url}"]) == 0
        return capsys.readouterr().out

    return call


def test_the_command_line_asks_all_of_it(
    rig: Rig, store: Store, cache: Callable[..., str], tmp_path: Path
) -> None:
    body = {"prompt": text("command ", 5)}
    request = tmp_path / "body.json"
    request.write_text(json.dumps(body))
    chain = (f"--request={request}", "--tenant=alice")
    keys = keys_of(rig, tenant="alice", **body)
    store.put(keys[:3], "alice")
    assert cache("inspect", *chain).splitlines()[0] == "hhh" + "." * (len(keys) - 3)
    assert cache("inspect", "--prompt", body["prompt"], "--tenant=alice").startswith("hhh.")
    assert json.loads(cache("inspect", *chain, "--json"))["summary"]["host"] == 3
    assert "pinned 3" in cache("pin", *chain, "--ttl=60")
    assert "unpinned 3" in cache("unpin", *chain)
    assert "host 3" in cache("prefetch", *(f"--key={key.hex()}" for key in keys))
    stats = cache("stats")
    assert store.address in stats and "blocks 3" in stats
    assert set(json.loads(cache("clear", "--all", "--tier=device", "--json"))["tiers"]) == {
        "device"
    }
    told = cache("clear", "--tenant=alice").splitlines()
    assert {"host: 3 blocks gone, 0 in use", "disk: 3 blocks gone, 0 in use"} <= set(told)
    assert cache("inspect", *chain).startswith(".....")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "say what to do"),
        (["forget"], "must be one of stats, inspect"),
        (["pin", "--prompt=x"], "--ttl"),
        (["inspect"], "one of --request FILE"),
        (["inspect", "--prompt=x", "--key=00"], "one of --request FILE"),
        (["inspect", "--request=/no/such/file"], "No such file"),
        (["clear"], "--tenant NAME or --all"),
        (["clear", "--tenant=a", "--all"], "--tenant NAME or --all"),
        (["stats", "--url=nowhere"], "must begin with http"),
        (["stats", "--url=http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["inspect", "--key=xyz"], "400: keys must be block keys"),
        (["stats", "--admin-api-key=wrong"], "KVFERRY_ADMIN_API_KEY"),
    ],
)
def test_what_the_command_line_cannot_do_is_one_line(
    cache: Callable[..., str], rig: Rig, arguments: list[str], says: str
) -> None:
    whole = [f"--url={rig.url}", *arguments]
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as error:
        run(whole)
    assert says in str(error.value)
