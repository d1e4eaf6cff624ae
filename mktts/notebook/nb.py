"""Common parts of the notebooks: run folders, inline audio, tables, widgets with a Start button. Jupyter packages are
imported where they are used, so `import mktts.notebook.nb` works without them."""

import asyncio
import base64
import html
import io
import itertools
import re
import signal
import threading
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mktts.audio import encoded, write_audio
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import MkttsError
from mktts.measure.metrics import cell
from mktts.spec import SAMPLE_RATE_HZ

EMBED_LIMIT_S = 10.0  # inline audio costs 64 kB of notebook per second; the WAV file is always complete
MP3_COMPRESSION = 0.6  # 0: largest, 1: smallest; a dialogue takes 3 kB per second with a variable bit rate
MOST_ROWS = 8  # rows of a table that are visible without unfolding it
LINE_CHARS = 40  # a longer text gets a text area of several lines
INTERRUPT_STEP_S = 0.1  # interval at which the kernel's interrupt handler is checked
LABELS = {  # of parameters whose names are not clear enough
    "TOP_K": "Among likeliest",
    "GREEDY": "Likeliest code only",
    "MAX_FRAMES": "Frames at most",
    "SCHEDULE": "Frames per chunk",
    "INSTRUCT": "Style",
    "VOICE": "Saved voice's file",
    "SECONDS": "Seconds a load",
}
MANUAL = "-manual"  # suffix of the folder of an interactive run; the second one has -manual-2


def repository() -> Path:
    """The repository's top folder: the first folder at or above the working folder that has notebooks/ and
    pyproject.toml, else the one that contains this package. Raises MkttsError if there is none."""
    start = Path.cwd().resolve()
    for folder in (start, *start.parents, Path(__file__).resolve().parents[2]):
        if (folder / "pyproject.toml").is_file() and (folder / "notebooks").is_dir():
            return folder
    raise MkttsError(f"expected {start} inside the repository, found no pyproject.toml beside a notebooks/ above it")


def run_dir(path: str, notebook: str) -> Path:
    """The folder that a run writes to, created if missing: `path`, or for "" (an interactive run) the first of
    outputs/runs/<notebook>-manual, -manual-2, ... without a recorded run, whose name is then displayed."""
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

    Levels are not normalised. At most EMBED_LIMIT_S are embedded in the notebook. Audio from random weights is labelled
    as such. Returns the file's path. Raises MkttsError for unusable PCM."""
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
    _show_audio(label, notes, random_weights, path.name, encoded(pcm[:limit_samples], "wav"), "audio/wav")
    return path


def recording(path: Path, label: str, *, random_weights: bool) -> None:
    """Shows the whole sound file `path` with an audio element, embedded as MP3. Raises MkttsError if it cannot be
    read."""
    _show_audio(label, [path.name], random_weights, path.name, as_mp3(path), "audio/mpeg")


def as_mp3(path: Path) -> bytes:
    """Encodes the sound file `path` as MP3 with the same channels and rate. Raises MkttsError if it cannot be read."""
    import soundfile

    try:
        samples, rate_hz = soundfile.read(path, dtype="float32")
    except (soundfile.SoundFileError, OSError) as error:
        raise MkttsError(f"{path}: expected a sound file, could not read it: {error}") from None
    file = io.BytesIO()
    soundfile.write(file, samples, rate_hz, format="MP3", bitrate_mode="VARIABLE", compression_level=MP3_COMPRESSION)
    return file.getvalue()


def table(rows: Sequence[Mapping[str, Any]], caption: str = "", omit: Sequence[str] = ()) -> None:
    """Shows `rows` as a table whose columns are the keys in order of first appearance; missing values are empty. Rows
    after the first MOST_ROWS are collapsed. Numbers have three significant digits. omit: columns to leave out."""
    keys = list(dict.fromkeys(key for row in rows for key in row if key not in omit))
    cells = [[cell(row.get(key, ""), digits=3) for key in keys] for row in rows]
    kinds = [{type(row[key]) for row in rows if key in row} for key in keys]
    align = ["right" if bool not in k and all(issubclass(one, (int, float)) for one in k) else "left" for k in kinds]

    def line(tag: str, words: Sequence[str]) -> str:
        pairs = zip(words, align, strict=True)
        return "".join(f'<{tag} style="text-align:{a}">{html.escape(word)}</{tag}>' for word, a in pairs)

    def markup(lines: Sequence[Sequence[str]]) -> str:
        body = "".join(f"<tr>{line('td', one)}</tr>" for one in lines)
        return f"<thead><tr>{line('th', keys)}</tr></thead><tbody>{body}</tbody></table>"

    title = f'<caption style="text-align:left">{html.escape(caption)}</caption>' if caption else ""
    shown = f"<table>{title}{markup(cells[:MOST_ROWS])}"
    if rest := cells[MOST_ROWS:]:
        shown += f"<details><summary>{len(rest)} more</summary><table>{markup(rest)}</details>"
    _show_html(shown, "\n".join(([caption] if caption else []) + [" | ".join(row) for row in [keys, *cells]]))


def _show_html(markup: str, text: str) -> None:
    from IPython.display import display

    display({"text/html": markup, "text/plain": text}, raw=True)


def _show_audio(label: str, notes: Sequence[str], random_weights: bool, name: str, data: bytes, mime: str) -> None:
    """Shows an audio element. name: of the sound file in the run's folder; `publish` makes a link of it."""
    about = ", ".join([*notes, *([RANDOM_WEIGHTS] if random_weights else [])])
    source = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    player = f'<audio controls title="{html.escape(name)}" src="{source}"></audio>'
    _show_html(f"<b>{html.escape(label)}</b> ({html.escape(about)})<br>{player}", f"{label} ({about})")


# ---- widgets

Choices = Sequence[str] | tuple[float, float]


class Controls:
    """One widget per notebook parameter (`TEXT=TEXT, SEED=SEED`), plus Start and Stop. Widgets start with the values of
    the parameters, so a headless run, which changes none, uses exactly the parameters."""

    def __init__(self, choices: Mapping[str, Choices], more: Sequence[str] = (), **parameters: Any) -> None:
        """choices: for a string, the entries of a drop-down; for a number, the bounds of a slider. more: parameters
        that are collapsed."""
        import ipywidgets

        unknown = sorted(set(choices) - set(parameters))
        if unknown:
            raise MkttsError(f"controls: choices for {unknown}, which are not parameters of the panel")
        self._widgets = {name: _widget(name, value, choices.get(name)) for name, value in parameters.items()}
        self.start_button = ipywidgets.Button(description="Start", icon="play")
        self.stop_button = ipywidgets.Button(description="Stop", icon="stop", disabled=True)
        self.message = ipywidgets.HTML()
        lines = [widget for name, widget in self._widgets.items() if name not in more]
        if folded := [widget for name, widget in self._widgets.items() if name in more]:
            lines.append(ipywidgets.Accordion([ipywidgets.VBox(folded)], titles=["more"], selected_index=None))
        line = ipywidgets.HBox([self.start_button, self.stop_button, self.message])
        self.panel = ipywidgets.VBox([*lines, line])
        self._start: Callable[[], Awaitable[Any]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._running: asyncio.Task[Any] | None = None
        self._drawings: dict[str, tuple[Callable[[], Any], list[str]]] = {}

    @property
    def values(self) -> dict[str, Any]:
        """Current values by parameter name."""
        return {name: widget.value for name, widget in self._widgets.items()}

    def show(self, start: Callable[[], Awaitable[Any]], *below: Any) -> None:
        """Displays the panel and, under it, the widgets `below`. Start runs `start()` on the kernel's event loop.

        Call it from a cell, whose event loop Start then uses for the lifetime of the kernel. (Since ipykernel 7 a
        button's callback may run on another thread, that of the front end's subshell.) Start is disabled during a run.
        Stop, or an interrupt of the kernel, cancels the run."""
        import ipywidgets
        from IPython.display import display

        self._start, self._loop = start, asyncio.get_running_loop()
        self.start_button.on_click(lambda _: asyncio.run_coroutine_threadsafe(self._pressed(), self._loop))
        self.stop_button.on_click(lambda _: self._loop.call_soon_threadsafe(self._cancel))
        display(ipywidgets.VBox([self.panel, *below]))

    def say(self, words: str) -> None:
        """Shows `words`, such as the progress of a run, next to the buttons."""
        self.message.value = html.escape(words)

    def draws(self, draw: Callable[[], Any]) -> None:
        """Shows the output of `draw()` in this cell, and updates it after every run that Start began. Running the cell
        again replaces its earlier drawing."""
        self._drawings[draw.__name__] = (draw, [])
        self._draw(*self._drawings[draw.__name__])

    @staticmethod
    def _draw(draw: Callable[[], Any], ids: list[str]) -> None:
        from IPython.display import display, update_display
        from IPython.utils.capture import capture_output

        with capture_output(stdout=False, stderr=False) as captured:
            if (shown := draw()) is not None:
                display(shown)
        for index, output in enumerate(captured.outputs):
            if index < len(ids):
                update_display(output.data, display_id=ids[index], metadata=output.metadata, raw=True)
            else:
                ids.append(uuid.uuid4().hex)
                display(output.data, display_id=ids[-1], metadata=output.metadata, raw=True)

    async def run(self) -> None:
        """Does the same as Start when awaited by a cell, but raises errors instead of showing them in the panel."""
        if self._start is None:
            raise MkttsError("expected show(start) before run()")
        self.start_button.disabled, self.stop_button.disabled, self.message.value = True, False, ""
        self._running = asyncio.current_task()
        try:
            await self._start()
        finally:
            self._running, self.message.value = None, ""
            self.start_button.disabled, self.stop_button.disabled = False, True

    async def _pressed(self) -> None:
        """Runs until the end or an interrupt of the kernel. ipykernel ignores interrupts while no cell runs, and
        replaces signal handlers around every message, so ours is installed repeatedly."""
        task, before = asyncio.create_task(self.run()), signal.getsignal(signal.SIGINT)
        in_main_thread = threading.current_thread() is threading.main_thread()

        def interrupt(*_: Any) -> None:
            self._loop.call_soon_threadsafe(self._cancel)

        try:
            while not task.done():
                if in_main_thread and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                    signal.signal(signal.SIGINT, interrupt)
                await asyncio.wait([task], timeout=INTERRUPT_STEP_S)
            await task
            for drawing in list(self._drawings.values()):
                self._draw(*drawing)
        except asyncio.CancelledError:
            self.message.value = "stopped"
        except Exception as error:  # a button's task is not awaited, so the panel shows its error
            self.message.value = html.escape(f"{type(error).__name__}: {error}")
        finally:
            if in_main_thread and signal.getsignal(signal.SIGINT) is interrupt:
                signal.signal(signal.SIGINT, before)

    def _cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()


def _widget(name: str, value: Any, choices: Choices | None) -> Any:
    import ipywidgets as w

    label = LABELS.get(name, name.replace("_", " ").capitalize())
    given = {"value": value, "description": label, "layout": w.Layout(width="46em")}
    given["style"] = {"description_width": "11em"}
    if choices is not None and isinstance(value, (int, float)):
        low, high = choices
        if not low <= value <= high:
            raise MkttsError(f"{name}={value!r} is not between {low} and {high}")
        given |= {"min": low, "max": high, "continuous_update": False}
        return w.IntSlider(**given) if isinstance(value, int) else w.FloatSlider(**given, step=0.05)
    if choices is not None:
        if value not in choices:
            raise MkttsError(f"{name}={value!r} is not among its choices {list(choices)}")
        return w.Dropdown(**given, options=list(choices))
    line = w.Textarea if isinstance(value, str) and len(value) > LINE_CHARS else w.Text
    kind = {bool: w.Checkbox, int: w.IntText, float: w.FloatText, str: line}.get(type(value))
    if kind is None:
        raise MkttsError(f"{name}={value!r}: expected bool, int, float or str, found {type(value).__name__}")
    return kind(**given)
