"""What the notebooks need and nothing else does: run folders, inline audio, tables, controls.

The Jupyter packages are imported where they are used, so `import mktts.notebook.nb` works without them.
"""

from __future__ import annotations

import base64
import html
import io
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mktts.audio import write_audio
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import MkttsError
from mktts.measure.tables import cell
from mktts.notebook.controls import Controls, button, controls
from mktts.notebook.player import live_player
from mktts.spec import SAMPLE_RATE_HZ

__all__ = [
    "Controls", "button", "clip", "controls", "live_player", "recording", "repository", "run_dir", "shape", "table",
]  # fmt: skip

EMBED_LIMIT_S = 10.0  # inline audio costs 64 kB of notebook per second; the WAV file always holds all of it
MP3_COMPRESSION = 0.6  # 0: largest, 1: smallest; two voices by turns take 3 kB a second, of variable rate
MANUAL = "-manual"  # ends the name of the folder of a run by hand; the second one's is -manual-2


def repository(start: Path | None = None) -> Path:
    """The repository's top folder: the first folder at or above `start` (default: the working folder) that has
    notebooks/ and a pyproject.toml, else the folder this package lies in. Raises MkttsError if neither is one."""
    start = (start or Path.cwd()).resolve()
    for folder in (start, *start.parents, Path(__file__).resolve().parents[2]):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise MkttsError(
        f"expected {start} to lie inside the repository, found no pyproject.toml beside a notebooks/ above it"
    )


def run_dir(path: str, notebook: str) -> Path:
    """The folder a run writes to, created if absent: `path`, or where `path` is "" (a run by hand) the first of
    outputs/runs/<notebook>-manual, -manual-2, ... that holds no recorded run yet; that one is then named."""
    if path:
        folder = Path(path).expanduser().resolve()
    else:
        root = repository()
        names = (f"{notebook}{MANUAL}{f'-{number}' if number > 1 else ''}" for number in itertools.count(1))
        folders = (root / "outputs" / "runs" / name for name in names)
        folder = next(folder for folder in folders if not (folder / "metrics.json").exists())
        note = f"results of this run by hand go to {folder.relative_to(root).as_posix()}"
        _show_html(html.escape(note), note)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clip(pcm: np.ndarray, label: str, folder: Path, *, random_weights: bool) -> Path:
    """Writes `pcm` (S,) float32 in [-1, 1] to `folder`/<label>.wav and shows it with an audio element.

    Levels are shown as they are (no normalisation). At most EMBED_LIMIT_S are embedded in the notebook.
    Audio from random weights is labelled as such. Returns the file's path. Raises MkttsError on unusable PCM.
    """
    from IPython.display import Audio

    pcm = np.asarray(pcm)
    if pcm.ndim != 1 or pcm.dtype != np.float32 or pcm.size == 0:
        raise MkttsError(f"clip {label!r}: expected (S,) float32 with S > 0, found {pcm.shape} {pcm.dtype}")
    if not np.isfinite(pcm).all() or np.abs(pcm).max() > 1.0:
        raise MkttsError(f"clip {label!r}: expected finite samples in [-1, 1]")
    path = folder / f"{re.sub(r'[^a-z0-9]+', '_', label.lower()).strip('_') or 'clip'}.wav"
    write_audio(path, pcm)
    limit_samples = int(EMBED_LIMIT_S * SAMPLE_RATE_HZ)
    notes = [f"{pcm.size / SAMPLE_RATE_HZ:.2f} s", path.name]
    if pcm.size > limit_samples:
        notes.append(f"first {EMBED_LIMIT_S:.0f} s embedded")
    if random_weights:
        notes.append(RANDOM_WEIGHTS)
    embedded = Audio(pcm[:limit_samples], rate=SAMPLE_RATE_HZ, normalize=False).data
    _show_audio(label, notes, path.name, embedded, "audio/wav")
    return path


def recording(path: Path, label: str, *, random_weights: bool) -> None:
    """Shows the sound file `path` with an audio element that holds all of it, as MP3.

    Raises MkttsError where it cannot be read. Without soundfile, or one without MP3, the file is named only.
    """
    notes = [path.name, *([RANDOM_WEIGHTS] if random_weights else [])]
    try:
        data, mime = as_mp3(path), "audio/mpeg"
    except ImportError:
        data, mime = b"", ""
    _show_audio(label, notes, path.name, data, mime)


def as_mp3(path: Path) -> bytes:
    """The sound file `path` as MP3, its channels and rate kept. Raises MkttsError where it cannot be read, ImportError
    without a soundfile that writes MP3."""
    import soundfile

    if "MP3" not in soundfile.available_formats():
        raise ImportError("this soundfile does not write MP3")
    try:
        samples, rate_hz = soundfile.read(path, dtype="float32")
    except (soundfile.SoundFileError, OSError) as error:
        raise MkttsError(f"{path}: expected a sound file, could not read it: {error}") from None
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="MP3", bitrate_mode="VARIABLE", compression_level=MP3_COMPRESSION)
    return file.getvalue()


def table(
    rows: Sequence[Mapping[str, Any]], caption: str = "", omit: Sequence[str] = (), heads: str | None = None
) -> None:
    """Shows `rows` as a table; the columns are the keys in order of first appearance, a missing value is empty.

    `omit` names columns that are left out. `heads`: the key whose values become the columns' heads, every other key a
    line, for rows with more keys than a page is wide.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in omit))
    if heads is not None and all(heads in row for row in rows):
        keys.remove(heads)
        rows = [{"": key, **{str(row[heads]): row.get(key, "") for row in rows}} for key in keys]
        keys = list(rows[0]) if rows else []
    cells = [[cell(row.get(key, "")) for key in keys] for row in rows]
    numeric = [all(_is_number(row.get(key, 0)) for row in rows) for key in keys]
    align = ["right" if right else "left" for right in numeric]
    head = "".join(f'<th style="text-align:{a}">{html.escape(k)}</th>' for k, a in zip(keys, align, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align:{a}">{html.escape(c)}</td>' for c, a in zip(row, align, strict=True))
        + "</tr>"
        for row in cells
    )
    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    markup = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    _show_html(markup, "\n".join(([caption] if caption else []) + [" | ".join(row) for row in [keys, *cells]]))


def shape(dimensions: Sequence[int]) -> str:
    """(64, 192) as "64 × 192"."""
    return " × ".join(str(size) for size in dimensions)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _show_html(markup: str, text: str) -> None:
    from IPython.display import display

    display({"text/html": markup, "text/plain": text}, raw=True)


def _show_audio(label: str, notes: Sequence[str], name: str, data: bytes, mime: str) -> None:
    """`name`, of the sound file in the run's folder, is the element's title: `publish` makes a link of it."""
    about = ", ".join(notes)
    source = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    player = f'<br><audio controls title="{html.escape(name)}" src="{source}"></audio>' if data else ""
    _show_html(f"<b>{html.escape(label)}</b> ({html.escape(about)}){player}", f"{label} ({about})")
