"""One model behind HTTP and WebSocket: `python -m mktts serve`.

The names below need neither fastapi nor uvicorn (requirements.txt); `AccessMiddleware` and `GracefulServer` do, and are
imported from their modules.
"""

from __future__ import annotations

from mktts.server.address import (
    add_address_arguments,
    checked_hosts,
    checked_origins,
    listen,
    read_keys,
    refuse_open_address,
    url_of,
)
from mktts.server.limits import Limits

__all__ = [
    "Limits",
    "add_address_arguments",
    "checked_hosts",
    "checked_origins",
    "listen",
    "read_keys",
    "refuse_open_address",
    "url_of",
]
