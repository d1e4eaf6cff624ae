"""A run's folder as it can be read where the repository is browsed: sound as links, no page of a dead process."""

from __future__ import annotations

import html
import re
import shutil
from pathlib import Path
from typing import Any

from mktts.common import write_whole
from mktts.errors import BatchError
from mktts.notebook.nb import as_mp3

PICTURES = ("03_streaming/chunk_timeline.png",)  # files that the README shows; the notebooks hold their own figures
PAGE = '<a href="../agent_page.png">the page, as it looks while it runs</a>'
CONTROLS = "(controls, in a notebook that runs)"
_WIDGET = "application/vnd.jupyter.widget-view+json"
_AUDIO = re.compile(r'<audio controls title="([^"]+)" src="data:[^"]*"></audio>')
_IFRAME = re.compile(r"<iframe\b.*?</iframe>", re.DOTALL)


def publish(run: Path, target: Path) -> Path:
    """Replaces the folder `target` by what is worth keeping of the run's folder `run`: JSON files, PICTURES, and the
    executed notebook, in which every audio element has become a link to its sound file, as MP3 beside it.

    Returns `target`. Raises BatchError where there is no finished run, MkttsError where a sound cannot be read.
    """
    executed = run / "executed.ipynb"
    if not executed.is_file():
        raise BatchError(f"{run}: expected the folder of a run, found no executed.ipynb in it")
    import nbformat

    notebook = nbformat.read(executed, as_version=4)
    sounds = _link(notebook)
    for name in ("widgets", "papermill"):  # the state of controls that nothing answers any more; the machine's paths
        notebook.metadata.pop(name, None)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sorted(run.iterdir()):
        if path.suffix == ".json" or f"{run.name}/{path.name}" in PICTURES:
            shutil.copyfile(path, target / path.name)
    for name in sounds:
        write_whole(target / Path(name).with_suffix(".mp3"), as_mp3(run / name))
    write_whole(target / executed.name, nbformat.writes(notebook).encode())
    return target


def _link(notebook: Any) -> list[str]:
    """Puts links in place of the audio elements; the names of their files, each once."""
    names: dict[str, None] = {}

    def linked(found: re.Match[str]) -> str:
        name = html.unescape(found[1])
        names[name] = None
        link = html.escape(Path(name).with_suffix(".mp3").name)
        return f'<a href="{link}">{link}</a>'

    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if _WIDGET in output.get("data", {}):
                output["data"] = {"text/plain": CONTROLS}
            shown = output.get("data", {}).get("text/html")
            if shown is not None:
                output["data"]["text/html"] = _IFRAME.sub(PAGE, _AUDIO.sub(linked, shown))
    return list(names)
