"""Who may ask, and as which tenant.

Owns the configured keys. A key is written `name=secret`; the name is the tenant, so a rotated
secret keeps its cache, and a bare secret belongs to the tenant `default`. Without any key the
server is open. Nothing in a request's body can choose a tenant, and this module knows no path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hmac import compare_digest

from kvferry.gateway.errors import Unauthorized
from kvferry.kvstore.errors import ConfigError

DEFAULT_TENANT = "default"


class Keys:
    """The keys of one kind (users', or the operator's)."""

    def __init__(self, configured: Sequence[str]) -> None:
        self._keys = [_parse(text) for text in configured]

    @property
    def open(self) -> bool:
        """No key is configured: everybody is the default tenant."""
        return not self._keys

    def known(self, headers: Mapping[str, str]) -> bool:
        """A key is configured, and the request carries it."""
        return not self.open and self._find(_offered(headers)) is not None

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request.

        Raises
        ------
        Unauthorized
            The request carries no configured key.
        """
        if not self._keys:
            return DEFAULT_TENANT
        offered = _offered(headers)
        if not offered:
            raise Unauthorized("No API key was given: send it as 'Authorization: Bearer KEY'.")
        found = self._find(offered)
        if found is None:
            raise Unauthorized("The API key is not one of this server's.")
        return found

    def _find(self, offered: bytes) -> str | None:
        found = None
        for name, secret in self._keys:  # all of them, so that time tells nothing
            if compare_digest(secret, offered):
                found = name
        return found


def _parse(text: str) -> tuple[str, bytes]:
    name, equals, secret = text.partition("=")
    if not equals:
        name, secret = DEFAULT_TENANT, text
    if not name or not secret:
        raise ConfigError("an API key must be written name=secret, or as a bare secret")
    return name, secret.encode()


def _offered(headers: Mapping[str, str]) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    text = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    return text.encode("utf-8", "surrogateescape")
