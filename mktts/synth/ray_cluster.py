"""The way to a Ray cluster, for every command that takes one. Who uses Ray imports it, and hands the module in."""

from __future__ import annotations

import logging
import re
import socket
from typing import Any

LEAST_OBJECTS_BYTES = 80 * 2**20  # of shared memory for Ray's objects, where there are hardly any: its least is 75 MiB
_PLACE = re.compile(r"(?:ray://)?\[?([\w.:-]+)\]?:(\d+)")
_PATIENCE_S = 5.0


def connect(ray: Any, address: str | None, objects_bytes: int = LEAST_OBJECTS_BYTES, **settings: Any) -> None:
    """Connects to the cluster at `address`, or to a new one of this machine. settings: others of `ray.init`.

    Raises OSError, RuntimeError or ValueError where there is none: at once where nothing listens at the address, which
    Ray itself asks for minutes.
    """
    # It says that the cluster's ports obey this user alone, which is how it should be.
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    if address and (place := _PLACE.fullmatch(address)):
        socket.create_connection((place[1], int(place[2])), _PATIENCE_S).close()
    alone = {} if address else {"include_dashboard": False, "object_store_memory": objects_bytes}
    ray.init(address or "local", log_to_driver=False, logging_level=logging.WARNING, **alone, **settings)
