"""Which web pages may use a server, and by which names it may be called."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from mktts.errors import ServerError

# What a browser writes into Origin for a page on this machine. A page that lies there was put there by its owner.
LOOPBACK_ORIGIN = r"https?://(localhost|([a-z0-9-]+\.)+localhost|127(\.[0-9]{1,3}){3}|\[::1\])(:[0-9]{1,5})?"
_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?")


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def is_local_page(origin: str) -> bool:
    """Whether a header Origin is that of a page on this machine."""
    return re.fullmatch(LOOPBACK_ORIGIN, origin) is not None


def is_own_name(header: str, names: Collection[str]) -> bool:
    """Whether a header Host can be meant for a server that is called `names` (lower case), beside its addresses.

    A page whose name somebody points at this machine after it was loaded (DNS rebinding) still sends that name. A
    number or `localhost` nobody can point anywhere.
    """
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return is_loopback(host) or host in names


def checked_origins(words: Iterable[str]) -> tuple[str, ...]:
    """Origins as browsers write them, in lower case. Raises ServerError for a word that no Origin can equal."""
    return tuple(_origin(word) for word in words)


def _origin(word: str) -> str:
    try:
        parts = urlsplit(word.strip().lower())
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host = ""
    if not host or parts.scheme not in ("http", "https") or parts.username is not None or not _is_name(host):
        raise ServerError(f"--allow-origin must be like https://app.example or http://localhost:3000, got {word!r}")
    host = f"[{host}]" if ":" in host else host
    usual = {"http": 80, "https": 443}[parts.scheme]
    origin = f"{parts.scheme}://{host}" + ("" if port in (None, usual) else f":{port}")
    if parts.path or parts.query or parts.fragment:
        raise ServerError(f"--allow-origin must end after the host and port, as {origin}, got {word!r}")
    return origin


def checked_hosts(words: Iterable[str]) -> frozenset[str]:
    """Host names in lower case. Raises ServerError for a word that is none."""
    names = [word.strip().lower().rstrip(".") for word in words]
    for word, name in zip(words, names, strict=True):
        if not _is_name(name):
            raise ServerError(f"--allow-host must be a name without scheme and port, as tts.example, got {word!r}")
    return frozenset(names)


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return _NAME.fullmatch(host) is not None
