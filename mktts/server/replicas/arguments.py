"""`serve`'s arguments for more than one server, and what they stand for."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from mktts.errors import ServerError

AUTO = "auto"
SESSION_HEADER = "x-session-id"
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a token of RFC 9110, 5.6.2


@dataclass(frozen=True)
class Scale:
    """How many replicas, and where.

    count: that many; None lets the open streams decide, from one to one a device. address: of a Ray cluster that runs
    already; None starts one on this machine, which ends with the command. session_header: requests with the same value
    of it go to the same replica; None sends each to the one with the fewest connections.
    Raises ServerError for a count below 1 and for what is no header's name.
    """

    count: int | None
    address: str | None = None
    session_header: str | None = None

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ServerError(f"--replicas must be auto, or 1 or more, got {self.count}")
        if self.session_header is not None and not _HEADER.fullmatch(self.session_header):
            raise ServerError(f"--session-header must be a header's name, as x-session-id, got {self.session_header!r}")


def add_replica_arguments(parser: argparse.ArgumentParser) -> None:
    """--replicas, --ray-address, --session-header."""
    group = parser.add_argument_group("several GPUs, by Ray Serve (pip install -e '.[ray]' in the checkout)")
    group.add_argument(
        "--replicas",
        metavar="N|auto",
        help="complete servers at one address, one a GPU; auto: as streams need them",
    )
    group.add_argument(
        "--ray-address", metavar="ADDRESS", help="of a running Ray cluster (default: one is started here)"
    )
    group.add_argument(
        "--session-header",
        nargs="?",
        const=SESSION_HEADER,
        metavar="NAME",
        help=f"requests with the same value of it go to the same replica (NAME left out: {SESSION_HEADER})",
    )


def scale_of(arguments: argparse.Namespace) -> Scale | None:
    """What the arguments ask for; None for one server without Ray. Raises ServerError."""
    if arguments.replicas is None:
        for name in ("ray_address", "session_header"):
            if getattr(arguments, name) is not None:
                raise ServerError(f"--{name.replace('_', '-')} belongs to --replicas: give that too, or leave it out")
        return None
    word = arguments.replicas.strip().lower()
    if word != AUTO and not re.fullmatch(r"-?[0-9]+", word):
        raise ServerError(f"--replicas must be auto, or 1 or more, got {arguments.replicas!r}")
    return Scale(None if word == AUTO else int(word), arguments.ray_address, arguments.session_header)
