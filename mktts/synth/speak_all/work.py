"""Brings a folder up to its table: what is left of it, who speaks that, and the figures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mktts.errors import VoiceError
from mktts.synth.speak_all.folder import MANIFEST
from mktts.synth.speak_all.keeping import bad_record, refused, speak_into
from mktts.synth.speak_all.manifest import Manifest, Record
from mktts.synth.speak_all.progress import Progress, duration
from mktts.synth.speak_all.sentences import BadLine, Sentence, Table
from mktts.synth.speak_all.takes import Manner

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint


@dataclass(frozen=True)
class Job:
    """folder: that the process has to itself. kind: of the files. at_once: see `Synthesizer.say_each`."""

    folder: Path
    kind: str
    manner: Manner
    at_once: int | None = None


Speakers = Callable[[Job, Manifest, Iterable[Sentence], Progress], None]


def bring_up(job: Job, table: Table, speakers: Speakers) -> dict[str, Any]:
    """Has `speakers` speak what is not there yet. Returns the figures: of lines, all that the table has; the others are
    of this run.
    """
    begun_s = time.monotonic()
    before = {"ok": 0, "unfinished": 0}
    manifest = Manifest(job.folder)
    whole = False
    try:
        manifest.absorb()
        count = chars = bad = 0
        for one in _left(job, table, manifest):
            if isinstance(one, Sentence):
                count, chars = count + 1, chars + len(one.text)
            elif isinstance(one, str):
                before[one] += 1
            else:
                manifest.append(one)
                bad += 1
        _say_first(table, count, sum(before.values()))
        progress = Progress(count, chars)
        if count:
            sentences = (one for one in _left(job, table, manifest) if isinstance(one, Sentence))
            speakers(job, manifest, sentences, progress)
        progress.end()
        whole = True
    finally:
        manifest.close(tidy=whole)
    counts = progress.counts
    lines = {**counts, "ok": counts["ok"] + before["ok"], "unfinished": counts["unfinished"] + before["unfinished"]}
    lines["bad"] += bad
    rtfx = progress.audio_s / progress.wall_s if progress.wall_s else 0.0
    _say_last(job, lines, progress, rtfx)
    return {
        "lines": sum(lines.values()),
        **lines,
        "spoken": counts["ok"] + counts["unfinished"],
        "retried": progress.retried,
        "attempts": progress.attempts,
        "audio_s": round(progress.audio_s, 3),
        "wall_s": round(progress.wall_s, 3),
        "with_loading_s": round(time.monotonic() - begun_s, 3),
        "rtfx": round(rtfx, 3),
    }


def speak_here(
    checkpoint: Checkpoint,
    model: dict[str, Any],
    job: Job,
    manifest: Manifest,
    sentences: Iterable[Sentence],
    progress: Progress,
) -> None:
    """By one synthesizer in this process. model: arguments of `Synthesizer.load`."""
    from mktts.synth.synthesizer import Synthesizer

    with Synthesizer.load(checkpoint, **model) as synthesizer:
        progress.begin()
        speak_into(
            job.folder, manifest, job.kind, synthesizer, sentences, job.manner, progress.kept, at_once=job.at_once
        )


def _left(job: Job, table: Table, manifest: Manifest) -> Iterator[Sentence | Record | str]:
    """For each line: the sentence that is to be spoken, the record of a line that cannot be, or the status of one that
    is there already, made from the same words."""
    for one in table:
        if isinstance(one, BadLine):
            yield bad_record(one)
            continue
        try:
            digest = job.manner.digest(one)
        except VoiceError as error:
            yield refused(one, error)
            continue
        kept = manifest.done.get(one.id)
        there = kept is not None and kept.digest == digest and _bytes(job.folder / kept.file) == kept.bytes
        yield kept.status if there else one


def _bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _say_first(table: Table, left: int, there: int) -> None:
    if table.unused:
        unused = ", ".join(repr(name) for name in sorted(table.unused, key=str))
        print(f"{table.path}: nothing here uses {unused[:300]}", file=sys.stderr)
    if there:
        print(f"there already: {there} sentences, left: {left}", file=sys.stderr)


def _say_last(job: Job, lines: dict[str, int], progress: Progress, rtfx: float) -> None:
    words = [f"{lines['ok']} of {sum(lines.values())} lines are ok"]
    words += [f"{lines[name]} {name}" for name in ("unfinished", "failed", "bad") if lines[name]]
    if progress.audio_s:
        took = duration(progress.wall_s)
        words.append(f"{progress.audio_s:.1f} s of audio made in {took}, {rtfx:.1f} s a second")
    print(f"{', '.join(words)}: {job.folder / MANIFEST}", file=sys.stderr)
