"""Flags, environment variables and sizes, by the fields of a config class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from kvferry.kvstore.errors import ConfigError
from kvferry.kvstore.process.settings import (
    Size,
    default_cache_dir,
    flag,
    flag_from_environ,
    flags_of,
    format_size,
    parse,
    parse_size,
    positional,
    shown,
    to_argv,
    to_environ,
    without_settings,
)


@dataclass(frozen=True, slots=True)
class Example:
    model: str | None = positional(None, "what to load")
    port: int = flag(8000, "where to listen", minimum=0)
    timeout: float = flag(30.0, "how long", metavar="S")
    name: tuple[str, ...] = flag((), "what to call it")
    memory: Size = flag(2 << 30, "how much")
    dtype: Literal["auto", "float32"] = flag("auto", "how exact")
    length: int | None = flag(None, "how far")
    debug: bool = flag(False, "whether to tell")
    color: bool = flag(True, "100% of the colours")
    secret: tuple[str, ...] = flag((), "a key", secret=True)
    internal: int = flag(1, "nobody's business", hidden=True)
    folder: Path = flag_from_environ(default_cache_dir, "where to keep it")


def read(*argv: str, **environ: str) -> Example:
    return parse(Example, argv, environ, prog="example", description="An example.")


def test_nothing_given_means_every_default() -> None:
    assert read(XDG_CACHE_HOME="/x") == Example(folder=Path("/x/kvferry"))


def test_flags_of_every_type() -> None:
    config = read(
        *("m", "--port=1", "--timeout", "2", "--name", "a", "--name", "b", "--memory", "1KiB"),
        *("--dtype", "float32", "--length", "3", "--debug", "--no-color", "--folder", "/f"),
    )
    assert config == Example(
        *("m", 1, 2.0, ("a", "b"), 1024, "float32", 3, True, False), folder=Path("/f")
    )


def test_environment_of_every_type_and_the_command_line_wins() -> None:
    config = read(
        "--port=7",
        KVFERRY_MODEL="m",
        KVFERRY_PORT="1",
        KVFERRY_NAME="a,b",
        KVFERRY_MEMORY="1GB",
        KVFERRY_DEBUG="yes",
        KVFERRY_COLOR="0",
        KVFERRY_LENGTH="",
    )
    assert (config.model, config.port, config.name) == ("m", 7, ("a", "b"))
    assert (config.memory, config.debug, config.color) == (10**9, True, False)
    assert config.length is None, "an empty variable is an unset one"


def test_a_positional_may_be_written_as_a_flag() -> None:
    assert read("--model=m").model == "m"


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--port=x"], {}, "--port is 'x', but must be a whole number of at least 0"),
        (["--port=-1"], {}, "--port is '-1', but must be a whole number of at least 0"),
        ([], {"KVFERRY_PORT": "1.5"}, "KVFERRY_PORT is '1.5', but must be a whole number"),
        ([], {"KVFERRY_DEBUG": "maybe"}, "KVFERRY_DEBUG is 'maybe', but must be one of 1, true"),
        (["--dtype=int3"], {}, "--dtype is 'int3', but must be one of auto, float32"),
        (["--memory=2XB"], {}, "--memory is '2XB', but must be a size such as 512MiB"),
        (["--name="], {}, "--name is '', but must be text"),
        (["--prot=1"], {}, r"unrecognized arguments: --prot=1 \(see example --help\)"),
        (["--por=1"], {}, "unrecognized arguments: --por=1"),
        (["--port"], {}, "argument --port: expected one argument"),
        (["m", "n"], {}, "unrecognized arguments: n"),
    ],
)
def test_a_bad_value_is_named_with_what_is_accepted(
    argv: Sequence[str], environ: Mapping[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(*argv, **environ)


def test_help_has_one_line_a_flag_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        read("--help")
    assert exit.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert lines[0] == "usage: example [MODEL] [flags]"
    assert "--memory SIZE" in text and "how much [2GiB]" in text
    assert "how exact: auto, float32 [auto]" in text
    assert "100% of the colours" in text
    assert "--internal" not in text and "--no-debug" not in text
    assert len(lines) <= 24


@pytest.mark.parametrize(
    ("text", "size"),
    [("123", 123), ("1GB", 10**9), ("2GiB", 2 << 30), ("512 mib", 512 << 20), ("1.5k", 1500)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 2", "1e9", "1PiB", "1i", "0x10"])
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError):
        parse_size(text)


def test_handing_on_reads_back_the_same_and_hides_secrets() -> None:
    given = Example("m", 1, 2.5, ("a", "-b"), 5, "float32", 3, True, False, ("k=1", "k2"), 2)
    argv, environ = to_argv(given), to_environ(given)
    assert not any("secret" in text for text in argv)
    assert environ == {"KVFERRY_SECRET": "k=1,k2"}
    assert read(*argv, **environ) == given


def test_only_what_is_no_default_is_handed_on() -> None:
    given = Example(port=1, color=False, folder=Path("/f"))
    assert to_argv(given) == ["--port=1", "--no-color", "--folder=/f"]


def test_a_secret_that_the_environment_cannot_carry() -> None:
    with pytest.raises(ConfigError, match="--secret has a value with a comma"):
        to_environ(Example(secret=("a,b",)))


@dataclass(frozen=True, slots=True)
class Role:
    level: Literal["low", "high"] = flag("low", "how loud")
    port: int = flag(1, "a role's")
    listen: str = flag("here", "where", own=True)


@dataclass(frozen=True, slots=True)
class Another(Role):
    size: int = flag(5, "how large", minimum=1)


@dataclass(frozen=True, slots=True)
class Command:
    port: int = flag(2, "the command's")
    role: Role = flags_of(Role)
    another: Another = flags_of(Another)


def test_a_command_has_the_flags_of_its_roles(capsys: pytest.CaptureFixture[str]) -> None:
    def command(*argv: str, **environ: str) -> Command:
        return parse(Command, argv, environ, prog="command", description="")

    told = command("--level=high", "--port=3", KVFERRY_SIZE="6", KVFERRY_LISTEN="there")
    assert told == Command(3, Role(level="high"), Another(level="high", size=6))
    with pytest.raises(ConfigError, match="unrecognized arguments: --listen=there"):
        command("--listen=there")
    with pytest.raises(ConfigError, match="--size is '0', but must be a whole number of at least"):
        command("--size=0")
    with pytest.raises(SystemExit):
        command("--help")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "  --" in line]
    assert [line[0] for line in lines] == ["--port", "--level", "--size"]
    assert lines[0][-2:] == ["command's", "[2]"]


def test_what_a_class_adds_is_listed_before_what_it_inherits() -> None:
    assert list(shown(Another())) == ["size", "level", "port", "listen"]


def test_a_child_inherits_no_setting() -> None:
    assert without_settings({"KVFERRY_PORT": "1", "HOME": "/h"}) == {"HOME": "/h"}
