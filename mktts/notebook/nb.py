"""What every notebook needs: run folders, inline audio, tables, widgets with a Start button.

The Jupyter packages are imported where they are used, so `import mktts.notebook.nb` works without them.
"""

from __future__ import annotations

import asyncio
import base64
import html
import io
import itertools
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mktts.audio import write_audio
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import MkttsError
from mktts.measure.metrics import cell
from mktts.notebook.player import live_player
from mktts.notebook.plots import short
from mktts.spec import SAMPLE_RATE_HZ

__all__ = ["button", "clip", "controls", "live_player", "recording", "repository", "run_dir", "table"]

EMBED_LIMIT_S = 10.0  # inline audio costs 64 kB of notebook per second; the WAV file always holds all of it
MP3_COMPRESSION = 0.6  # 0: largest, 1: smallest; two voices by turns take 3 kB a second, of variable rate
MOST_ROWS = 8  # of a table that is seen without unfolding it
LINE_CHARS = 40  # a longer text gets a box of several lines
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


def table(rows: Sequence[Mapping[str, Any]], caption: str = "", omit: Sequence[str] = ()) -> None:
    """Shows `rows` as a table; the columns are the keys in order of first appearance, a missing value is empty.

    Of more than MOST_ROWS rows the rest is folded; numbers have three significant digits. `omit` names columns that are
    left out.
    """
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in omit))
    cells = [[_shown(row.get(key, "")) for key in keys] for row in rows]
    kinds = [{type(row[key]) for row in rows if key in row} for key in keys]
    align = [
        "right" if all(issubclass(k, (int, float)) and k is not bool for k in found) else "left" for found in kinds
    ]

    def markup(lines: Sequence[Sequence[str]]) -> str:
        head, *body = (
            "".join(f'<{tag} style="text-align:{a}">{html.escape(c)}</{tag}>' for c, a in zip(line, align, strict=True))
            for tag, line in zip(["th", *["td"] * len(lines)], [keys, *lines], strict=True)
        )
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        return f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    shown = f"<table>{title}{markup(cells[:MOST_ROWS])}"
    if rest := cells[MOST_ROWS:]:
        shown += f"<details><summary>{len(rest)} more</summary><table>{markup(rest)}</details>"
    _show_html(shown, "\n".join(([caption] if caption else []) + [" | ".join(row) for row in [keys, *cells]]))


def _shown(value: Any) -> str:
    return short(value) if isinstance(value, float) else cell(value)


def _show_html(markup: str, text: str) -> None:
    from IPython.display import display

    display({"text/html": markup, "text/plain": text}, raw=True)


def _show_audio(label: str, notes: Sequence[str], name: str, data: bytes, mime: str) -> None:
    """`name`, of the sound file in the run's folder, is the element's title: `publish` makes a link of it."""
    about = ", ".join(notes)
    source = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    player = f'<br><audio controls title="{html.escape(name)}" src="{source}"></audio>' if data else ""
    _show_html(f"<b>{html.escape(label)}</b> ({html.escape(about)}){player}", f"{label} ({about})")


# ---- widgets

Choices = Sequence[str] | tuple[float, float]


def controls(choices: Mapping[str, Choices] | None = None, **parameters: Any) -> Controls:
    """One widget per notebook parameter (`TEXT=TEXT, SEED=SEED`), plus Start.

    A widget changes only what the parameter already defines, so a headless run, where nobody turns the knobs,
    computes exactly what the parameters say. `choices` turns a string parameter into a drop-down, and a number into a
    slider from the first to the second of two numbers.
    """
    return Controls(choices or {}, parameters)


class Controls:
    """The panel of `controls`. `values` are the present settings, under the parameters' names."""

    def __init__(self, choices: Mapping[str, Choices], parameters: Mapping[str, Any]) -> None:
        import ipywidgets

        unknown = sorted(set(choices) - set(parameters))
        if unknown:
            raise MkttsError(f"controls: choices for {unknown}, which are no parameters of the panel")
        self._widgets = {name: _widget(name, value, choices.get(name)) for name, value in parameters.items()}
        self.start_button = ipywidgets.Button(description="Start", icon="play")
        self.message = ipywidgets.HTML()
        self.panel = ipywidgets.VBox([*self._widgets.values(), ipywidgets.HBox([self.start_button, self.message])])
        self._start: Callable[[], Awaitable[Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def values(self) -> dict[str, Any]:
        """Parameter name -> present value."""
        return {name: widget.value for name, widget in self._widgets.items()}

    def show(self, start: Callable[[], Awaitable[Any]], *below: Any) -> None:
        """Displays the panel and, under it, the widgets `below`. Start runs `start()` on the kernel's event loop.

        Call it from a cell: the cell's loop is the one that Start uses, for as long as the kernel lives. (Since
        ipykernel 7 a button's callback may arrive on another thread, that of the front end's subshell.) One run at a
        time: Start is disabled during it.
        """
        import ipywidgets
        from IPython.display import display

        self._start, self._loop = start, asyncio.get_running_loop()
        self.start_button.on_click(lambda _: asyncio.run_coroutine_threadsafe(self._pressed(), self._loop))
        display(ipywidgets.VBox([self.panel, *below]))

    async def run(self) -> None:
        """What Start does, awaited by a cell: an error ends the cell instead of standing in the panel."""
        if self._start is None:
            raise MkttsError("expected show(start) before run()")
        self.start_button.disabled, self.message.value = True, ""
        try:
            await self._start()
        finally:
            self.start_button.disabled = False

    async def _pressed(self) -> None:
        try:
            await self.run()
        except Exception as error:  # nobody awaits a button's task: the panel is where its error can be read
            self.message.value = html.escape(f"{type(error).__name__}: {error}")


def button(label: str, press: Callable[[], Any], icon: str = "") -> Any:
    """A button, to end a cell with, that calls `press` once and is disabled from then on."""
    import ipywidgets

    shown = ipywidgets.Button(description=label, icon=icon)

    def pressed(_: Any) -> None:
        if not shown.disabled:
            shown.disabled = True
            press()

    shown.on_click(pressed)
    return shown


def _widget(name: str, value: Any, choices: Choices | None) -> Any:
    import ipywidgets

    common = {"description": name, "layout": ipywidgets.Layout(width="46em"), "style": {"description_width": "11em"}}
    if choices is not None and isinstance(value, (int, float)):
        low, high = choices
        if not low <= value <= high:
            raise MkttsError(f"{name}={value!r} is not between {low} and {high}")
        slider = ipywidgets.IntSlider if isinstance(value, int) else ipywidgets.FloatSlider
        step = {} if isinstance(value, int) else {"step": 0.05}
        return slider(value=value, min=low, max=high, continuous_update=False, **step, **common)
    if choices is not None:
        if value not in choices:
            raise MkttsError(f"{name}={value!r} is not among its choices {list(choices)}")
        return ipywidgets.Dropdown(options=list(choices), value=value, **common)
    line = ipywidgets.Textarea if isinstance(value, str) and len(value) > LINE_CHARS else ipywidgets.Text
    kinds = {bool: ipywidgets.Checkbox, int: ipywidgets.IntText, float: ipywidgets.FloatText, str: line}
    kind = kinds.get(type(value))
    if kind is None:
        raise MkttsError(f"{name}={value!r}: expected bool, int, float or str, found {type(value).__name__}")
    return kind(value=value, **common)
