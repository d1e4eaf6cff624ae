"""HAProxy processes that an earlier run left behind: who killed the command may have left its proxy on the port.

Such a proxy still takes connections and has nobody to hand them to: a new run would say that it is ready, while every
other request is answered by the old proxy with an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PROCESSES = Path("/proc")
_SERVE_FOLDER = "haproxy-serve"  # Ray Serve's own default for its proxy's files
FOLDER_PREFIX = "mktts-serve-"  # short: a socket below it may have a path of 97 characters
_KEEPER = b"ray::"  # what a process of Ray is called
_BIND = re.compile(r"^\s*bind\s+(?P<host>\S*):(?P<port>[0-9]+)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Orphan:
    """pid: of the proxy. ports: that its configuration has it listen on, in the order written."""

    pid: int
    ports: tuple[int, ...]


def orphans(processes: Path = _PROCESSES) -> list[Orphan]:
    """Proxies of Ray Serve whose process of Ray is gone; none where there is no /proc."""
    found = []
    for folder in processes.glob("[0-9]*"):
        words = _read(folder / "cmdline").split(b"\0")
        config = _config_of(words)
        if config is not None and not _is_kept(processes, folder):
            text = _read(config).decode("utf-8", "replace")
            ports = tuple(dict.fromkeys(int(bind["port"]) for bind in _BIND.finditer(text)))
            found.append(Orphan(int(folder.name), ports))
    return sorted(found, key=lambda one: one.pid)


def _config_of(words: list[bytes]) -> Path | None:
    """The configuration of a proxy that Ray Serve started; None where `words` are another command."""
    if not words or Path(words[0].decode("utf-8", "replace")).name != "haproxy" or b"-f" not in words[:-1]:
        return None
    config = Path(words[words.index(b"-f") + 1].decode("utf-8", "replace"))
    ours = any(part == _SERVE_FOLDER or part.startswith(FOLDER_PREFIX) for part in config.parts)
    return config if ours else None


def _is_kept(processes: Path, folder: Path) -> bool:
    """Whether the parent of a process is one of Ray's."""
    parent = re.search(rb"^PPid:\s*([0-9]+)", _read(folder / "status"), re.MULTILINE)
    return parent is not None and _read(processes / parent[1].decode() / "cmdline").startswith(_KEEPER)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # it ended, or belongs to somebody else
        return b""
