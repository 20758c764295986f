"""The states of a node by number: what was run once is known.

A turn of a node depends on nothing but its own state and what it is given, so `Machine` keeps one
copy of each state, as bytes, and runs each turn once. It knows of a node only its `view`, all that
can influence what comes, that it can `prove` itself, and what is `left`.
"""

from __future__ import annotations

import io
import marshal
import pickle
from enum import Enum
from hashlib import blake2b
from types import CellType, FunctionType
from typing import Any, Generic, TypeVar

from msgspec import Struct

from kvferry.tests.rigs.handoff.model import DecodeSide, PrefillSide, Side
from kvferry.tests.rigs.handoff.setup import Post, View

# -- copies ----------------------------------------------------------------------------------------

_kept: dict[int, Any] = {}
"""By their ids: values that no copy needs for itself, and functions made inside functions."""


class _Saver(pickle.Pickler):
    """Pickles a node. What cannot change is shared by all copies; a function made inside a function
    is made anew over what it closes over, so that the copy's is over the copy."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and "<locals>" in value.__qualname__:
            made = _kept.setdefault(id(value.__code__), value)
            contents = tuple(cell.cell_contents for cell in value.__closure__ or ())
            return _inner_function, (id(made.__code__), contents)
        parameters = getattr(type(value), "__dataclass_params__", None)
        is_frozen = parameters is not None and parameters.frozen
        if is_frozen or isinstance(value, type | Enum | Struct):
            _kept[id(value)] = value
            return _constant, (id(value),)
        return NotImplemented


def _inner_function(number: int, contents: tuple[Any, ...]) -> FunctionType:
    made = _kept[number]
    cells = tuple(map(CellType, contents))
    return FunctionType(made.__code__, made.__globals__, made.__name__, made.__defaults__, cells)


def _constant(number: int) -> Any:
    return _kept[number]


def _saved(node: Side) -> bytes:
    buffer = io.BytesIO()
    _Saver(buffer, 5).dump(node)
    return buffer.getvalue()


# -- numbered states -------------------------------------------------------------------------------

Node = TypeVar("Node", DecodeSide, PrefillSide)
Given = tuple[Any, ...]
"""The name of a method of a node, and its arguments."""


class Machine(Generic[Node]):
    """The states of one node by number, 0 at its start. What was run once is known."""

    def __init__(self, start: Node, post: Post) -> None:
        self.left: list[str] = []
        """By state: what the node still holds."""
        self._post = post
        self._numbers: dict[bytes, int] = {}
        self._saved: list[bytes] = []
        self._known: dict[tuple[int, Given], tuple[int, Any]] = {}
        self._enter(start)

    @property
    def num_states(self) -> int:
        return len(self._saved)

    @property
    def num_runs(self) -> int:
        return len(self._known)

    def step(self, state: int, given: Given) -> tuple[int, Any]:
        """The next state, and what the method returned."""
        known = self._known.get((state, given))
        if known is None:
            node: Node = pickle.loads(self._saved[state])
            result = self.run(node, given)
            node.prove()
            known = self._known[state, given] = (self._enter(node), result)
        return known

    def run(self, node: Node, given: Given) -> Any:
        name, *arguments = given
        if name == "turn":
            arguments.insert(0, self._post)
        return getattr(node, name)(*arguments)

    def number(self, node: Node) -> int | None:
        """Of a state that is known."""
        return self._numbers.get(_digest(node.view()))

    def _enter(self, node: Node) -> int:
        number = self._numbers.setdefault(_digest(node.view()), len(self._saved))
        if number == len(self._saved):
            self._saved.append(_saved(node))
            self.left.append(node.left())
        return number


def _digest(view: View) -> bytes:
    return blake2b(marshal.dumps(view, 2), digest_size=16).digest()
