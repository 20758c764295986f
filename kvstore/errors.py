"""The exceptions of the shared layer, in one tree.

    KvferryError
     ├── ConfigError        a flag, a variable or a folder is wrong; the user can fix it
     └── WireError          a peer sent something this process must not act on
          ├── MalformedFrame   not a message at all, or one whose sizes do not add up
          ├── PeerMismatch     well-formed, but the peer computes or speaks differently
          └── ProtocolBroken   well-formed, but nothing that a peer which works would say

Knows nothing of HTTP: the gateway maps what reaches it in one place of its own.
"""

from __future__ import annotations


class KvferryError(Exception):
    """Base of everything kvferry raises on purpose."""


class ConfigError(KvferryError):
    """The operator asked for something impossible. The message names the value and the fix."""


class WireError(KvferryError):
    """A peer sent something that must not be acted on."""


class MalformedFrame(WireError):
    """A frame that does not decode, or whose sizes and counts contradict each other."""


class ProtocolBroken(WireError):
    """A message that its sender could not send if it did what it must."""


class PeerMismatch(WireError):
    """A peer whose fingerprint or protocol differs."""

    def __init__(self, field: str, ours: str, theirs: str) -> None:
        super().__init__(f"{field} differs: ours is {ours!r}, the peer's is {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs
