"""The grammar's held-out sentences: word errors free and closed, lengths, ends, silence before speech, who speaks.

Every judged sentence is spoken once, speakers in turn, with the checkpoint's own sampling.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from mktts.common import write_json
from mktts.errors import MetricsError
from mktts.measure.recogniser import Recogniser, vocabulary_of, words
from mktts.training.judge.utterances import Task

CENTROID_CLIPS = 20  # of the teacher, of each speaker
LISTEN_SENTENCES = 3
_ORDER_SEED = 5  # of the sentences: the first ones are a fair part of all


def sorted_out(sentences: Sequence[str]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Sentences all of whose words the recogniser has, mixed; and the others, each with the words it lacks."""
    recogniser = Recogniser(vocabulary_of(sentences))
    missing = {text: [word for word in words(text) if not recogniser.knows(word)] for text in sentences}
    known = [text for text in sentences if not missing[text]]
    random.Random(_ORDER_SEED).shuffle(known)
    return known, [(text, lacking) for text, lacking in missing.items() if lacking]


def judging_tasks(
    known: Sequence[str],
    unknown: Sequence[tuple[str, list[str]]],
    speakers: Sequence[str],
    sentences: int,
    ends: int,
    seed: int,
    greedy: bool,
) -> list[Task]:
    """The judged sentences, the utterances that count ends only (other sentences first, then the same again with other
    speakers), and the teacher's for the centroids, of sentences that are not judged.

    Raises MetricsError where there are too few sentences for it.
    """
    apart = CENTROID_CLIPS * len(speakers)
    if not 0 < sentences <= len(known) - apart:
        raise MetricsError(
            f"expected 1 to {len(known) - apart} sentences ({apart} more are for the centroids), got {sentences}"
        )
    texts = [*known, *(text for text, _ in unknown)]
    tasks = []
    for i in range(max(sentences, ends)):
        again, place = divmod(i, len(texts))
        judged = i < sentences
        speaker = speakers[(place + again) % len(speakers)]
        tasks.append(Task(texts[place], speaker, seed + i, judged=judged, greedy=greedy and judged))
    clips = known[-apart:]
    return tasks + [Task(text, speakers[i % len(speakers)], seed, centroid=True) for i, text in enumerate(clips)]


def listen_tasks(known: Sequence[str], speakers: Sequence[str], seed: int, folder: Path) -> list[Task]:
    """A few of the judged sentences by every speaker, to WAV files."""
    return [
        Task(text, speaker, seed + i, listen=folder / f"{i}_{speaker}")
        for i, text in enumerate(known[:LISTEN_SENTENCES])
        for speaker in speakers
    ]


def write_list(folder: Path, tasks: Sequence[Task]) -> None:
    """index.json: what each pair of WAV files says."""
    rows = [{"name": task.listen.name, "text": task.text, "speaker": task.speaker, "seed": task.seed} for task in tasks]
    write_json(folder / "index.json", rows, sort_keys=False)
