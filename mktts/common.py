"""Helpers shared by all folders: files, folders, child processes, checks of arguments, messages."""

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from mktts.errors import CheckpointError, MkttsError, OptionsError


def write_whole(path: Path | str, data: bytes, mode: int = 0o644) -> Path:
    """Writes `data` to a temporary file beside `path` and renames it, so that no reader ever sees a partial file.

    mode: permissions of the file; the temporary file is readable by its owner only. A symbolic link is kept and its
    target replaced; a device or a FIFO is written to directly."""
    path = Path(path)
    try:
        if is_special(path):
            path.write_bytes(data)
            return path
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(part, mode)  # mkstemp creates files that only their owner can read
            os.replace(part, target)
        except BaseException:
            os.unlink(part)
            raise
    except OSError as error:
        if error.errno is not None:
            error.filename, error.filename2 = str(path), None  # the caller does not know the temporary file's name
        raise
    return path


def is_special(path: Path | str) -> bool:
    """Whether `path` is neither a regular file nor a folder, but a device, a FIFO or a socket."""
    return os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path))  # of a link, its target


def require_writable(path: Path | str) -> None:
    """Raises MkttsError if `write_whole` could not write `path`, so that a command fails before its work, not after."""
    if os.path.isdir(path):
        raise MkttsError(f"{path}: expected a file to write, found a folder")
    if os.path.exists(path) and not os.access(path, os.W_OK):
        raise MkttsError(f"{path}: expected a file that may be written, found one that may not")
    if is_special(path):
        return
    folder = os.path.dirname(os.path.realpath(path))
    if not os.path.isdir(folder):
        raise MkttsError(f"{path}: expected a file name in a folder that exists, found no folder {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()  # only an attempt shows whether the folder is writable
    except OSError as error:
        raise MkttsError(f"{path}: expected a folder that can be written to: {folder}: {error.strerror}") from None


def read_json(path: Path | str, error: type[MkttsError] = CheckpointError, hint: str = "") -> Any:
    """Reads a JSON file. Raises `error` if it cannot be read; the message ends with `hint`."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as reason:
        why = "found nothing" if isinstance(reason, FileNotFoundError) else f"could not read it: {reason}"
        raise error(f"{path}: expected a JSON file, {why}{hint}") from None


def read_object(path: Path | str, error: type[MkttsError] = CheckpointError, hint: str = "") -> dict[str, Any]:
    """Reads a file that holds one JSON object. Raises `error` as `read_json` does."""
    value = read_json(path, error, hint)
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}{hint}")
    return value


def write_json(path: Path, value: Any, *, sort_keys: bool = True) -> None:
    """Writes `value` as JSON to `path`, completely or not at all; creates its folder if it is missing."""
    text = json.dumps(value, indent=2, sort_keys=sort_keys, allow_nan=False, ensure_ascii=False)
    write_whole(path, f"{text}\n".encode())


def cache_folder(cache: str | Path | None = None) -> Path:
    """The folder that caches random checkpoints and compiled kernels: `cache`, else $MKTTS_CACHE, else ~/.cache/mktts,
    else, without a writable home, a folder of this user among the temporary files.

    Raises CheckpointError if that last folder belongs to another user, because its content is loaded and executed."""
    if named := cache or os.environ.get("MKTTS_CACHE"):
        return Path(named).expanduser()
    try:
        folder = Path.home() / ".cache" / "mktts"
        above = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if above == folder or (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
            return folder
    except (OSError, RuntimeError):  # an unreadable home; a user id without a home
        pass
    folder = Path(tempfile.gettempdir()) / f"mktts-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: expected to make this folder: {error}; name another: $MKTTS_CACHE") from None
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise CheckpointError(f"{folder}: expected a folder of user {os.getuid()}; name another: $MKTTS_CACHE")
    return folder


def python_path() -> dict[str, str]:
    """PYTHONPATH for child processes, with this package's folder first, so that it need not be installed."""
    package = str(Path(__file__).resolve().parents[1])
    others = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != package]
    return {"PYTHONPATH": os.pathsep.join([package, *others])}


@contextmanager
def announced(what: str, patience_s: float = 1.0) -> Iterator[None]:
    """Prints `what` to standard error if the block takes longer than `patience_s`, and its duration when it ends."""
    begun_s = time.perf_counter()
    timer = threading.Timer(patience_s, lambda: print(f"{what} ...", end="", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        elapsed_s = time.perf_counter() - begun_s
        if elapsed_s > patience_s:
            print(f" {elapsed_s:.1f} s", file=sys.stderr)


def checked_int(
    name: str, value: object, at_least: int, at_most: int | None = None, error: type[MkttsError] = OptionsError
) -> None:
    """Raises `error` unless `value` is a whole number of at least `at_least` and, if given, at most `at_most`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
        raise error(f"{name} must be a whole number of at least {at_least}, got {value!r}")
    if at_most is not None and value > at_most:
        raise error(f"{name} must be at most {at_most}, got {value}")


def checked_number(
    name: str, value: object, above: float, at_most: float, error: type[MkttsError] = OptionsError, hint: str = ""
) -> None:
    """Raises `error`, which ends in `hint`, unless `value` is a number above `above` and at most `at_most`."""
    if not isinstance(value, Real) or not above < value <= at_most:
        raise error(f"{name} must be a number above {above:g} and at most {at_most:g}, got {value!r}{hint}")


def whole_numbers(name: str, words: str) -> tuple[int, ...]:
    """Parses "1,1,2" as (1, 1, 2). Raises OptionsError, naming `name`, unless all are whole numbers of at least 1."""
    numbers = [word.strip() for word in words.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise OptionsError(f"{name} takes whole numbers of at least 1, commas between them, got {words!r}")
    return tuple(map(int, numbers))


def one_of(name: str, value: object, known: Collection[object], error: type[MkttsError] = OptionsError) -> None:
    """Raises `error` unless `value` is one of `known`."""
    if value not in known:
        raise error(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


def counted(number: int, what: str) -> str:
    """A number with its noun: "1 stream", "2 streams"."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
