"""Flags and environment variables, generated from the fields of a frozen dataclass.

Owns the one place where kvferry reads the environment: every field of a role's config class is a
flag (`--max-num-seqs`) and a variable (`KVFERRY_MAX_NUM_SEQS`); the command line wins. Knows what
a size, a choice and a list look like as text; it does not know any role's fields, nor check what
only a role can judge.
"""

from __future__ import annotations

import argparse
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from inspect import get_annotations
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kvferry.kvstore.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Config = TypeVar("Config", bound="DataclassInstance")

Environ = Mapping[str, str]

PREFIX = "KVFERRY_"
Size = Annotated[int, "bytes"]
"""An int field that reads `2GiB`, `512MiB`, `1GB` or plain bytes."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


# -- declaring -------------------------------------------------------------------------------------


def flag(
    default: T,
    help: str,
    *,
    metavar: str | None = None,
    hidden: bool = False,
    secret: bool = False,
    own: bool = False,
    minimum: float | None = None,
) -> T:
    """A field that is a flag.

    A `secret` one reaches child processes by the environment only. An `own` one is no matter of
    whoever starts several roles at once: `flags_of` leaves it out.
    """
    about = _About(help, metavar, hidden, secret, own, minimum)
    return field(default=default, metadata={"about": about})


def flag_from_environ(default: Callable[[Environ], T], help: str) -> T:
    """A flag whose default is computed from the environment; `help` says how."""
    about = _About(help, from_environ=default)
    return field(default_factory=lambda: default(os.environ), metadata={"about": about})


def positional(default: T, help: str) -> T:
    """A field that is the role's one argument without a dash (also accepted as a flag)."""
    return field(default=default, metadata={"about": _About(help, positional=True)})


def flags_of(role: type[Config]) -> Config:
    """A field that is the config of another role, whose flags the command offers beside its own.

    A flag that several of its roles have is told to each of them; its help is the first one's. What
    the command has a flag of its own for is not told to any.
    """
    return field(default_factory=role, metadata={"role": role})


@dataclass(frozen=True, slots=True)
class _About:
    help: str
    metavar: str | None = None
    hidden: bool = False
    secret: bool = False
    own: bool = False
    minimum: float | None = None
    positional: bool = False
    from_environ: Callable[[Environ], Any] | None = None


def default_cache_dir(environ: Environ) -> Path:
    """`$XDG_CACHE_HOME/kvferry`, or `~/.cache/kvferry`."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "kvferry"


# -- reading ---------------------------------------------------------------------------------------


def parse(
    config_class: type[Config],
    argv: Sequence[str],
    environ: Environ,
    *,
    prog: str,
    description: str,
) -> Config:
    """The config that `argv` and `environ` ask for; `--help` prints and exits.

    Raises
    ------
    ConfigError
        An unknown flag, or a value that its field does not accept.
    """
    parser = _parser(_offered(config_class), prog, description)
    given = vars(parser.parse_args(argv))
    flags = _flags(config_class)
    values = _values(flags.values(), given, environ)
    for name, role in _roles(config_class).items():
        told = [item for item in _lent(role) if item.name not in flags]
        values[name] = role(**_values(told, given, environ))
    return config_class(**values)


def _values(flags: Iterable[_Flag], given: Mapping[str, Any], environ: Environ) -> dict[str, Any]:
    """What was said of these flags, by name; of the others the config has the default."""
    values: dict[str, Any] = {}
    for item in flags:
        variable = variable_name(item.name)
        if item.name in given:
            values[item.name] = item.read(option_name(item.name), given[item.name])
        elif environ.get(variable):
            raw = environ[variable]
            values[item.name] = item.read(variable, raw.split(",") if item.kind.repeats else raw)
        elif item.about.from_environ is not None:
            values[item.name] = item.about.from_environ(environ)
    return values


def option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return PREFIX + name.upper()


def parse_size(text: str) -> int:
    """Bytes of `2GiB`, `512MiB`, `1GB`, `1.5g` or `123`; ValueError if it is none of these."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(size: int) -> str:
    """The shortest exact text that `parse_size` reads back."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        scale = _UNITS[unit[:2].lower()]
        if size >= scale and size % scale == 0:
            return f"{size // scale}{unit}"
    return str(size)


# -- flags -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kind:
    """How text becomes a value of one type."""

    accepts: str
    convert: Callable[[str], Any]
    metavar: str = ""
    is_switch: bool = False
    repeats: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Flag:
    """A field that is a flag."""

    name: str
    default: Any
    """`MISSING` if it is computed."""
    about: _About
    kind: _Kind

    def read(self, source: str, raw: str | bool | Sequence[str]) -> Any:
        if isinstance(raw, bool):
            return raw
        if not isinstance(raw, str):
            return tuple(self._one(source, text) for text in raw)
        return self._one(source, raw)

    def _one(self, source: str, text: str) -> Any:
        minimum, accepts = self.about.minimum, self.kind.accepts
        if minimum is not None:
            accepts += f" of at least {minimum:g}"
        try:
            value = self.kind.convert(text.strip())
        except ValueError:
            raise ConfigError(f"{source} is {text!r}, but must be {accepts}") from None
        if minimum is not None and not value >= minimum:
            raise ConfigError(f"{source} is {text!r}, but must be {accepts}")
        return value


def _flags(config_class: type[DataclassInstance]) -> dict[str, _Flag]:
    """A class's flags by name: what it adds comes before what it inherits."""
    hints = get_type_hints(config_class, include_extras=True)
    known = {item.name: item for item in fields(config_class) if "about" in item.metadata}
    names = dict.fromkeys(name for base in config_class.__mro__ for name in get_annotations(base))
    return {
        name: _Flag(name, known[name].default, known[name].metadata["about"], _kind(hints[name]))
        for name in names
        if name in known
    }


def _roles(config_class: type[DataclassInstance]) -> dict[str, type[DataclassInstance]]:
    """The config classes of a command's roles, by field."""
    metadata = {item.name: item.metadata for item in fields(config_class)}
    return {name: about["role"] for name, about in metadata.items() if "role" in about}


def _lent(role: type[DataclassInstance]) -> list[_Flag]:
    """What a command that has this role offers of the role's flags."""
    return [item for item in _flags(role).values() if not item.about.own]


def _offered(config_class: type[DataclassInstance]) -> list[_Flag]:
    """Every flag of a command, each once: its own, then those of its roles."""
    offered = _flags(config_class)
    for role in _roles(config_class).values():
        offered |= {item.name: item for item in _lent(role) if item.name not in offered}
    return list(offered.values())


def _kind(hint: Any) -> _Kind:
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = [arm for arm in get_args(hint) if arm is not types.NoneType]
    if hint == tuple[str, ...]:
        return _Kind("text", _nonempty, repeats=True)
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return _Kind("one of " + ", ".join(choices), _one_of(choices), choices=choices)
    return {
        str: _Kind("text", _nonempty),
        int: _Kind("a whole number", int, "N"),
        float: _Kind("a number", float, "X"),
        Path: _Kind("a path", lambda text: Path(_nonempty(text)).expanduser()),
        bool: _Kind("one of " + ", ".join(_TRUE + _FALSE), _boolean, is_switch=True),
        Size: _Kind("a size such as 512MiB or 2GiB", parse_size, "SIZE"),
    }[hint]


def _nonempty(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    return lambda text: choices[choices.index(text)]


def _boolean(text: str) -> bool:
    return (_TRUE + _FALSE).index(text.lower()) < len(_TRUE)


# -- argparse --------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _formatter(prog: str) -> argparse.HelpFormatter:
    return argparse.HelpFormatter(prog, max_help_position=36, width=100)


def _parser(flags: Iterable[_Flag], prog: str, description: str) -> _Parser:
    # Defaults stay out of the namespace, so that what is in it was typed.
    parser = _Parser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=description,
        epilog=f"--some-flag can also be set as {PREFIX}SOME_FLAG; the command line wins.",
        formatter_class=_formatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for item in flags:
        _add(parser, item)
    return parser


def _add(parser: _Parser, item: _Flag) -> None:
    about, kind, option = item.about, item.kind, option_name(item.name)
    help = argparse.SUPPRESS if about.hidden else _help_line(item)
    metavar = about.metavar or kind.metavar or item.name.upper().rpartition("_")[2]
    if about.positional:
        parser.usage = f"{parser.prog} [{metavar}] [flags]"
        parser.add_argument(item.name, nargs="?", metavar=metavar, help=help)
        parser.add_argument(option, dest=item.name, help=argparse.SUPPRESS)
    elif kind.is_switch:
        parser.add_argument(option, action="store_true", help=help)
        negation = f"--no-{option[2:]}"
        parser.add_argument(negation, dest=item.name, action="store_false", help=argparse.SUPPRESS)
    else:
        action = "append" if kind.repeats else "store"
        parser.add_argument(option, action=action, metavar=metavar, help=help)


def _help_line(item: _Flag) -> str:
    text = item.about.help
    if item.kind.choices:
        text += ": " + ", ".join(item.kind.choices)
    if item.default is MISSING or item.default is None or item.default in (False, ()):
        shown = ""
    elif item.kind.convert is parse_size:
        shown = format_size(item.default)
    else:
        shown = str(item.default)
    return (text + (f" [{shown}]" if shown else "")).replace("%", "%%")


# -- handing on ------------------------------------------------------------------------------------


def to_argv(config: DataclassInstance) -> list[str]:
    """The flags that make another process read the same config: what differs from the defaults.

    Secrets are left out: a command line is visible to every user of the machine.
    """
    return [
        text
        for item in _flags(type(config)).values()
        if not item.about.secret and getattr(config, item.name) != item.default
        for text in _as_flags(option_name(item.name), getattr(config, item.name))
    ]


def to_environ(config: DataclassInstance) -> dict[str, str]:
    """The environment variables for the secret ones."""
    return {
        variable_name(item.name): _as_variable(item.name, getattr(config, item.name))
        for item in _flags(type(config)).values()
        if item.about.secret and getattr(config, item.name)
    }


def shown(config: DataclassInstance) -> dict[str, Any]:
    """Every setting that may be shown to a person: no secrets, and nothing hidden."""
    values = {
        item.name: getattr(config, item.name)
        for item in _flags(type(config)).values()
        if not (item.about.secret or item.about.hidden)
    }
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in values.items()
    }


def without_settings(environ: Environ) -> dict[str, str]:
    """The environment less every variable that a config class would read."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def _as_flags(option: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option if value else f"--no-{option[2:]}"]
    if isinstance(value, tuple):
        return [f"{option}={part}" for part in value]
    return [f"{option}={value}"]


def _as_variable(name: str, value: str | tuple[str, ...]) -> str:
    parts = value if isinstance(value, tuple) else (value,)
    if isinstance(value, tuple) and any("," in part for part in parts):
        raise ConfigError(f"{option_name(name)} has a value with a comma: choose one without")
    return ",".join(parts)
