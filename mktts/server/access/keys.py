"""Who asks: a server's keys, kept as hashes, and the places of a request where one may stand."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

PROTOCOL = "mktts"  # what a browser offers beside its key, to have a protocol that the server can choose
KEY_PROTOCOLS = ("mktts.key.", "openai-insecure-api-key.")  # the first followed by base64url, the second by the key
_OWNER = b"mktts: owner of uploaded voices\0"
NOBODY = "nobody"  # who asks where there is no key: all the same one


class Keys:
    """api_key: one, several, or None, which lets everyone in as the same caller."""

    def __init__(self, api_key: str | Sequence[str] | None) -> None:
        keys = [api_key] if isinstance(api_key, str) else list(api_key or ())
        self.wanted = bool(keys)
        self._known = {_digest(key.encode()): owner_of(key) for key in keys}

    def owner(self, scope: Any) -> str | None:
        """Whose request it is; None where a key is wanted and none of ours is there."""
        if not self.wanted:
            return NOBODY
        for key in _given(scope):
            found = _digest(key)
            for known, owner in self._known.items():
                if hmac.compare_digest(found, known):
                    return owner
        return None


def owner_of(key: str) -> str:
    """A name for the owner of a key that does not tell the key: 64 hexadecimal digits, the same on every server."""
    return hashlib.sha256(_OWNER + key.encode()).hexdigest()


def chosen_protocol(offered: Sequence[str]) -> str | None:
    """The subprotocol to answer a WebSocket with that carries its key as one; None where it carries none so.

    A browser gives a connection up that is answered with none of those it offered.
    """
    carriers = [name for name in offered if name.startswith(KEY_PROTOCOLS)]
    others = [name for name in offered if name not in carriers]
    return None if not carriers else (PROTOCOL if PROTOCOL in others else (others or carriers)[0])


def without_key(query: bytes) -> bytes:
    """A query string less its `key`."""
    pairs = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    return urlencode([(name, value) for name, value in pairs if name != "key"]).encode()


def _given(scope: Any) -> Iterator[bytes]:
    """Keys as the request brings them: as a bearer, or, of a WebSocket, in the query or as a subprotocol. A browser's
    page can set no header there."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            if scheme.lower() == b"bearer":
                yield given.strip()
    if scope["type"] != "websocket":
        return
    for name, value in parse_qsl(scope["query_string"].decode("latin-1")):
        if name == "key":
            yield value.encode()
    for word in scope.get("subprotocols", ()):
        if word.startswith(KEY_PROTOCOLS[1]):
            yield word.removeprefix(KEY_PROTOCOLS[1]).encode()
        elif word.startswith(KEY_PROTOCOLS[0]):
            plain = word.removeprefix(KEY_PROTOCOLS[0])
            try:
                yield base64.urlsafe_b64decode(plain + "=" * (-len(plain) % 4))
            except (binascii.Error, ValueError):
                continue


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of equal length: how long the comparison takes says nothing about the key's
