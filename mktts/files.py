"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path | str, data: bytes) -> Path:
    """Writes `data` beside `path` first and then puts it in place, so that no reader ever sees a part of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(part, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise
    return path
