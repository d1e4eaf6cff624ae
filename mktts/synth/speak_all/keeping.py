"""From takes to files: encoded and written beside the synthesis, and noted in the manifest once they are in place."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from mktts.audio import encoded
from mktts.common import write_whole
from mktts.synth.speak_all.manifest import Manifest, Record
from mktts.synth.speak_all.takes import Manner, Take, takes

if TYPE_CHECKING:
    from mktts.synth.speak_all.sentences import BadLine, Sentence
    from mktts.synth.synthesizer import Synthesizer

_WRITERS = min(8, os.cpu_count() or 1)  # encoders leave the interpreter, and the disk is waited for
_QUEUED = 4 * _WRITERS  # takes that wait to be written; with more, the synthesis waits for the disk


def speak_into(
    folder: Path,
    manifest: Manifest,
    kind: str,
    synthesizer: Synthesizer,
    sentences: Iterable[Sentence],
    manner: Manner,
    on_kept: Callable[[Record, int], None] = lambda record, chars: None,
    at_once: int | None = None,
) -> None:
    """Speaks `sentences` and keeps each, as `kind`, one of mktts.audio.FORMATS, under its id.

    In memory are the sentences that are open and a few that wait for the disk. on_kept: called with every record and
    the characters of its text, from several threads. Raises as `takes`, and OSError where a file cannot be written.
    """

    def keep(take: Take) -> None:
        record = _record(take, manner)
        if take.status in ("ok", "unfinished"):
            data = encoded(take.pcm, kind)
            record |= {"file": f"{take.sentence.id}.{kind}", "bytes": len(data)}
            write_whole(folder / record["file"], data, lasting=True)
        manifest.append(record)
        on_kept(record, len(take.sentence.text))

    queued: deque[Future[None]] = deque()
    pool = ThreadPoolExecutor(_WRITERS, "mktts-writer")
    try:
        for take in takes(synthesizer, sentences, manner, at_once):
            queued.append(pool.submit(keep, take))
            while queued and (queued[0].done() or len(queued) >= _QUEUED):
                queued.popleft().result()
        while queued:
            queued.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)  # what has begun is written whole, and noted


def bad_record(bad: BadLine) -> Record:
    """The manifest's line about a line that is no sentence."""
    return {"id": None, "line": bad.line, "status": "bad", "error": bad.error}


def refused(sentence: Sentence, error: Exception) -> Record:
    """And about a sentence that cannot be begun."""
    return {"id": sentence.id, "line": sentence.line, "status": "bad", "error": str(error), "text": sentence.text}


def _record(take: Take, manner: Manner) -> Record:
    record: Record = {"id": take.sentence.id, "line": take.sentence.line, "status": take.status}
    if take.error is None:
        record |= {"duration_s": round(take.duration_s, 6), "finish_reason": take.reason}
        record["digest"] = manner.digest(take.sentence)
    else:
        record["error"] = take.error
    record["seed"] = take.seed
    if take.earlier:
        record["retried"] = [attempt._asdict() for attempt in take.earlier]
    return {**record, "text": take.sentence.text}
