"""One model behind HTTP and WebSocket: `python -m mktts serve`.

The names below are what other folders use. `Gate` and `GracefulServer` are loaded when they are asked for, because they
need fastapi and uvicorn (requirements.txt); importing this does not.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
    "Gate",
    "GracefulServer",
    "Limits",
    "add_address_arguments",
    "checked_hosts",
    "checked_origins",
    "listen",
    "read_keys",
    "refuse_open_address",
    "url_of",
]
_LATER = {"Gate": "mktts.server.gate", "GracefulServer": "mktts.server.graceful"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
