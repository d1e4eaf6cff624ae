"""One model behind HTTP and WebSocket: `python -m mktts serve`.

The names below are the room's face: the agent puts its own server together from them. `Gate` and `OrderlyServer` are
loaded when they are asked for, because they need fastapi and uvicorn (requirements.txt); importing this does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from mktts.server.access.address import add_address_arguments, listen, read_keys, refuse_open_address, url_of
from mktts.server.access.hosts import checked_hosts, checked_origins
from mktts.server.limits import Limits

__all__ = [
    "Gate",
    "Limits",
    "OrderlyServer",
    "add_address_arguments",
    "checked_hosts",
    "checked_origins",
    "listen",
    "read_keys",
    "refuse_open_address",
    "url_of",
]
_LATER = {"Gate": "mktts.server.access.gate", "OrderlyServer": "mktts.server.orderly"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
