"""What the notebooks need and nothing else does: run folders, inline audio, tables, parameters as arguments.

The Jupyter packages are imported where they are used, so `import mktts.notebook.nb` works without them.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mktts.audio import write_audio
from mktts.errors import MkttsError
from mktts.measure.tables import cell
from mktts.notebook.controls import Controls, controls
from mktts.notebook.player import live_player
from mktts.spec import SAMPLE_RATE_HZ

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.speech.options import Chunk

__all__ = [
    "Controls", "clip", "controls", "languages", "live_player", "ready_and_samples", "repository", "run_dir",
    "shape", "stream_arguments", "table",
]  # fmt: skip

EMBED_LIMIT_S = 10.0  # inline audio costs 64 kB of notebook per second; the WAV file always holds all of it
RANDOM_WEIGHTS = "random weights: not speech"


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
    """The folder a run writes to, created if absent: `path`, or outputs/runs/<notebook>-manual where `path` is ""."""
    folder = Path(path) if path else repository() / "outputs" / "runs" / f"{notebook}-manual"
    folder = folder.expanduser().resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def clip(pcm: np.ndarray, label: str, folder: Path, *, random_weights: bool) -> Path:
    """Writes `pcm` (S,) float32 in [-1, 1] to `folder`/<label>.wav and shows it with an audio element.

    Levels are shown as they are (no normalisation). At most EMBED_LIMIT_S are embedded in the notebook.
    Audio from random weights is labelled as such. Returns the file's path. Raises MkttsError on unusable PCM.
    """
    from IPython.display import Audio, display

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
    _show_html(f"<b>{html.escape(label)}</b> ({html.escape(', '.join(notes))})", f"{label} ({', '.join(notes)})")
    display(Audio(pcm[:limit_samples], rate=SAMPLE_RATE_HZ, normalize=False))
    return path


def table(rows: Sequence[Mapping[str, Any]], caption: str = "", omit: Sequence[str] = ()) -> None:
    """Shows `rows` as a table; the columns are the keys in order of first appearance, a missing value is empty.

    `omit` names columns that are left out.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in omit))
    cells = [[cell(row.get(column, "")) for column in columns] for row in rows]
    numeric = [all(_is_number(row.get(column, 0)) for row in rows) for column in columns]
    align = ["right" if right else "left" for right in numeric]
    head = "".join(f'<th style="text-align:{a}">{html.escape(c)}</th>' for c, a in zip(columns, align, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f'<td style="text-align:{a}">{html.escape(c)}</td>' for c, a in zip(row, align, strict=True))
        + "</tr>"
        for row in cells
    )
    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    markup = f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    _show_html(markup, "\n".join(([caption] if caption else []) + [" | ".join(row) for row in [columns, *cells]]))


def shape(dimensions: Sequence[int]) -> str:
    """(64, 192) as "64 × 192"."""
    return " × ".join(str(size) for size in dimensions)


def ready_and_samples(chunks: Sequence[Chunk]) -> tuple[list[float], list[int]]:
    """When each chunk was in host memory (ms from the call) and its length in samples: what a timeline needs."""
    return [chunk.timings.ready_ms for chunk in chunks], [len(chunk.pcm) for chunk in chunks]


def languages(checkpoint: Checkpoint) -> list[str]:
    """What LANGUAGE may be; dialects come with their speakers and cannot be asked for."""
    return ["auto", *sorted(name for name in checkpoint.config.languages if "dialect" not in name)]


def stream_arguments(checkpoint: Checkpoint, **parameters: Any) -> dict[str, Any]:
    """Notebook parameters as keyword arguments of `Synthesizer.stream`; "" means the checkpoint's own default.

    Knows TEXT, LANGUAGE, SPEAKER (default: the first built-in one), INSTRUCT, VOICE (a saved voice's path), SEED,
    MAX_FRAMES and SCHEDULE ("1,1,2,4,8"). Raises MkttsError for another name.
    """
    from mktts.model.voice import Voice
    from mktts.speech.options import StreamOptions

    first = next(iter(checkpoint.config.speakers), None)
    convert: dict[str, Callable[[Any], Any]] = {
        "TEXT": str,
        "LANGUAGE": str,
        "SPEAKER": lambda name: name or first,
        "INSTRUCT": lambda text: text or None,
        "VOICE": lambda path: Voice.load(path) if path else None,
        "SEED": int,
        "MAX_FRAMES": int,
    }
    arguments = {name.lower(): convert[name](value) for name, value in parameters.items() if name in convert}
    if "SCHEDULE" in parameters:
        schedule = tuple(int(frames) for frames in parameters["SCHEDULE"].split(","))
        arguments["options"] = StreamOptions(schedule=schedule)
    unknown = sorted(set(parameters) - set(convert) - {"SCHEDULE"})
    if unknown:
        raise MkttsError(f"expected parameters among {sorted([*convert, 'SCHEDULE'])}, found {unknown}")
    return arguments


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _show_html(markup: str, text: str) -> None:
    from IPython.display import display

    display({"text/html": markup, "text/plain": text}, raw=True)
