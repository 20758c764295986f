"""Which conversation a request belongs to, as far as its client lets on.

Owns the list of headers and fields in which real clients name a session. The name is a hint for
routing and for `/render`, never a key to anything: it is hashed with the tenant, so that two
tenants with one name are two sessions, and a wrong or missing one costs time only.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

HEADERS = (
    "x-session-affinity",
    "x-session-id",
    "session-id",
    "thread-id",
    "x-claude-code-session-id",
    "x-correlation-id",
)
"""As sent by aiperf, proxies, Codex and Claude Code; the first one that is there counts."""
MAX_NAME = 1024
"""Characters of a name that count."""


def session_of(headers: Mapping[str, str], tenant: str, *fields: object) -> bytes:
    """16 bytes for the session that a body's `fields` or the headers name; none without one."""
    names = [field for field in fields if isinstance(field, str) and field]
    names += [headers[name] for name in HEADERS if headers.get(name)]
    if not names:
        return b""
    text = f"{tenant}\0{names[0][:MAX_NAME]}"
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
