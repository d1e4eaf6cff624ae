"""`python -m mktts speak-all`: speaks a table of sentences into a folder of audio files, each of which appears once it
is whole. The same command again speaks those that are missing."""

from __future__ import annotations

import argparse
import codecs
import hashlib
import json
import os
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mktts.audio import encoded
from mktts.batch import BatchSettings
from mktts.checkpoint.arguments import add_model_arguments, add_voice_arguments, loading
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import checked_int, write_whole
from mktts.engine.many import SayRequest, SayResult
from mktts.engine.options import StreamOptions
from mktts.errors import MkttsError, PromptError, SentencesError, VoiceError
from mktts.model.sampling import MAX_SEED
from mktts.model.voice import Voice
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth.say import CAPTIONS, captions

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.synth import Synthesizer

NEEDED = ("id", "text")
COLUMNS = (*NEEDED, "voice", "speaker", "language", "instruct", "seed", "max_frames")
KINDS = ("jsonl", "tsv", "txt")
_NUMBERS = {"seed": (0, MAX_SEED), "max_frames": (1, None)}
_MAX_ID_BYTES = 200  # file systems allow 255 in a name; it gets an ending, and more while the file is written
OUTPUTS = ("wav", "flac", "opus", "mp3")
RETRIES = 3
_UNREAD = StreamOptions(buffer_frames=1 << 40)  # nobody reads before the end; the text and the guard limit the frames
_WRITERS = min(8, os.cpu_count() or 1)  # encoders release the interpreter, and writers wait for the disk
_QUEUED = 4 * _WRITERS  # utterances that wait to be written; with more, the synthesis waits for the disk
EXAMPLES = f"""examples:
  python -m mktts speak-all sentences.txt -o spoken
  python -m mktts speak-all sentences.jsonl -o spoken --format flac --seed 1 --captions srt
  python -m mktts speak-all sentences.tsv -o spoken --checkpoint path/to/checkpoint --speaker vivian

Each line of .txt is a text, each line of .jsonl an object; the first line of .tsv names the columns. Needed are
{" and ".join(NEEDED)}; there may be {", ".join(COLUMNS[len(NEEDED) :])}. The options give what
a line leaves out. The audio of a line goes to DIR under its id. The same command again speaks the lines whose files are
not there, whatever made the others. Lines that could not be spoken are named on standard error and have no file. One
line of JSON comes last. Exit status 1: not every line has its file."""


# ---- the table


@dataclass(frozen=True)
class Sentence:
    """A line of the table. line: its number, from 1. voice: a voice file, as the table names it. None: not given."""

    line: int
    id: str
    text: str
    voice: str | None = None
    speaker: str | None = None
    language: str | None = None
    instruct: str | None = None
    seed: int | None = None
    max_frames: int | None = None


def read_table(path: Path) -> tuple[list[Sentence], dict[int, str]]:
    """Reads every line that is not blank: the sentences, and for each line that is none, by its number, the reason. A
    line whose id has occurred before is a bad one. In a table with tabs there is no quoting and no escaping (IANA's
    text/tab-separated-values). Raises SentencesError where there is no such file, its name does not end in one of
    KINDS, or no line is a sentence."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise SentencesError(f"{path}: expected a name that ends in .{', .'.join(KINDS)}")
    if not path.is_file():
        raise SentencesError(f"{path}: expected a file of sentences, found no file of that name")
    lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    sentences, bad, columns, seen = [], {}, [], {}
    for number, data in enumerate(lines, 1):
        try:
            line = data.decode("utf-8").rstrip("\r")
            if kind == "tsv" and number == 1:
                names = [name.strip().lower() for name in line.split("\t")]
                if twice := sorted({name for name in names if names.count(name) > 1}):
                    raise SentencesError(f"column {twice[0]!r} stands twice: name each once")
                columns = names
            elif line.strip():
                sentence = _sentence(number, _cells(kind, number, line, columns))
                key = unicodedata.normalize("NFC", sentence.id).casefold()  # some file systems take these for the same
                if (earlier := seen.setdefault(key, number)) != number:
                    raise SentencesError(
                        f"id {sentence.id!r} stands in line {earlier} already, perhaps in other case: give each its own"
                    )
                sentences.append(sentence)
        except UnicodeDecodeError as error:
            bad[number] = f"expected UTF-8, found other bytes at place {error.start}"
        except MkttsError as error:
            bad[number] = str(error)
    if not sentences:
        why = "".join(f"; line {number}: {error}" for number, error in [*bad.items()][:1])
        raise SentencesError(f"{path}: expected sentences with the columns {', '.join(COLUMNS)}, found none{why}")
    return sentences, bad


def _cells(kind: str, number: int, line: str, columns: list[str]) -> dict[str, Any]:
    if kind == "txt":
        return {"id": f"{number:06d}", "text": line}
    if kind == "tsv":
        cells = line.split("\t")
        if len(cells) != len(columns):
            raise SentencesError(f"expected {len(columns)} columns, as the first line has, found {len(cells)}")
        return {name: cell for name, cell in zip(columns, cells, strict=True) if cell.strip()}
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SentencesError(f"expected a JSON object, could not read it: {error}") from None
    if not isinstance(found, dict):
        raise SentencesError(f"expected a JSON object, found {type(found).__name__}")
    return {name: value for name, value in found.items() if value is not None}


def _sentence(number: int, cells: dict[str, Any]) -> Sentence:
    """Raises SentencesError and OptionsError for what is not a sentence."""
    if missing := [name for name in NEEDED if name not in cells]:
        raise SentencesError(f"{' and '.join(missing)} is missing")
    values: dict[str, Any] = {}
    for name in COLUMNS:
        value = cells.get(name)
        if name in _NUMBERS and value is not None:
            value = int(value) if isinstance(value, str) and value.isdecimal() and len(value) < 20 else value
            checked_int(name, value, *_NUMBERS[name])
        elif name == "id" and type(value) is int:
            value = str(value)
        elif not isinstance(value, str | None):
            raise SentencesError(f"{name} must be a string, found {type(value).__name__}")
        values[name] = value
    name = values["id"]  # with an ending it must name a file in the folder, and nothing else
    bad_char = any(char in "/\\" or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in name)
    if not name or name != name.strip() or name[0] in ".-" or bad_char or len(name.encode()) > _MAX_ID_BYTES:
        raise SentencesError(
            "id must be the name of a file: not empty, no dot or hyphen at its start, no blank at its ends, no slash "
            f"or control character, at most {_MAX_ID_BYTES} bytes; found {name[:80]!r}"
        )
    return Sentence(number, **values)


# ---- the files


@dataclass(frozen=True)
class Outcome:
    """The result of one sentence. error: why it has no file. audio_s: of its file. attempts: that were discarded."""

    line: int
    id: str
    error: str | None = None
    audio_s: float = 0.0
    attempts: int = 0


def speak_into_folder(
    synthesizer: Synthesizer,
    sentences: Iterable[Sentence],
    folder: Path,
    kind: str,
    retries: int,
    greedy: bool = False,
    captioned: str | None = None,
) -> Iterator[Outcome]:
    """Speaks sentences, as many together as fit, and writes each as soon as it is over. sentences: with their seeds.
    kind: of the files. retries: with another seed, of what runs away, misses its end or fails inside. captioned: of
    CAPTIONS, a file beside each. Raises OSError where a file cannot be written. Leaving the iterator ends what is open.
    """
    sampling = synthesizer.sampling.greedy() if greedy else None
    options = replace(_UNREAD, word_times=captioned is not None)
    waiting: deque[tuple[Sentence, int]] = deque()
    for sentence in sentences:
        try:
            _voice(sentence.voice)
            waiting.append((sentence, 0))
        except VoiceError as error:
            yield Outcome(sentence.line, sentence.id, str(error))

    def ask() -> SayRequest | None:
        if not waiting:
            return None
        sentence, attempt = waiting.popleft()
        settings = {
            "voice": _voice(sentence.voice),
            "speaker": sentence.speaker,
            "language": sentence.language or "auto",
            "instruct": sentence.instruct,
            "sampling": sampling,
            "max_frames": sentence.max_frames,
            "seed": derived_seed(sentence.seed, attempt) if attempt else sentence.seed,
            "options": options,
        }
        return SayRequest(sentence.text, settings, (sentence, attempt))

    writing: deque[Future[Outcome]] = deque()
    with ThreadPoolExecutor(_WRITERS, "mktts-writer") as pool:
        for said in synthesizer.say_each(ask):
            sentence, attempt = said.asked.name
            fault = _fault(said, sentence)
            bad_input = isinstance(said.error, MkttsError) and said.error.exit_status == 2
            if fault is None:
                path = folder / f"{sentence.id}.{kind}"
                if captioned is not None:
                    write_whole(folder / f"{sentence.id}.{captioned}", captions(said.stream.words, captioned).encode())
                writing.append(pool.submit(_write, path, said.pcm, sentence, attempt))
            elif attempt < retries and not bad_input:
                waiting.appendleft((sentence, attempt + 1))
            else:
                yield Outcome(sentence.line, sentence.id, fault, attempts=attempt)
            while writing and (writing[0].done() or len(writing) >= _QUEUED):
                yield writing.popleft().result()
        while writing:
            yield writing.popleft().result()


def derived_seed(*words: Any) -> int:
    """A seed that depends on `words` alone, not on what was spoken before, or where."""
    return int.from_bytes(hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:4])


def _fault(said: SayResult, sentence: Sentence) -> str | None:
    """Why an utterance that is over is discarded; None for a good one."""
    if said.error is not None:
        kind = "" if isinstance(said.error, MkttsError) else f"{type(said.error).__name__}: "
        return kind + " ".join(str(said.error).split())
    reason = said.stream.finish_reason
    if reason != "eos" and not (reason == "max_frames" and sentence.max_frames):
        return f"it did not come to its end: {reason}"
    return None if len(said.pcm) else "nothing was spoken"


def _write(path: Path, pcm: Any, sentence: Sentence, attempt: int) -> Outcome:
    """Puts the whole file in its place at once. What a killed run left of it is overwritten by the next one."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(encoded(pcm, path.suffix.removeprefix(".")))
    os.replace(part, path)
    return Outcome(sentence.line, sentence.id, audio_s=len(pcm) / SAMPLE_RATE_HZ, attempts=attempt)


@lru_cache(maxsize=256)
def _voice(path: str | None) -> Voice | None:
    return None if path is None else Voice.load(path)


# ---- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sentences", type=Path, metavar="SENTENCES", help="a file .jsonl, .tsv or .txt")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder that they go to")
    parser.add_argument("--format", choices=OUTPUTS, default="wav", help="of the files (default: %(default)s)")
    parser.add_argument("--captions", choices=CAPTIONS, help="a file of captions beside each, their times estimated")
    line = parser.add_argument_group("for lines that do not say")
    add_voice_arguments(line)
    how = parser.add_argument_group("generation")
    how.add_argument("--seed", type=int, default=0, help="that those of lines follow from (default: %(default)s)")
    how.add_argument("--greedy", action="store_true", help="no draw at all")
    precision = {"choices": ("full", "fast"), "default": BatchSettings.codec}
    how.add_argument("--codec-precision", **precision, help="on a GPU: fp32, or fp16 (default: %(default)s)")
    add_model_arguments(parser, lexicon=True)


def main(arguments: argparse.Namespace) -> int:
    """Speaks what is missing. Returns 0 if every line then has its file, otherwise 1."""
    from tqdm import tqdm

    from mktts.checkpoint import open_checkpoint

    _check(arguments)
    sentences, bad = read_table(arguments.sentences)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    if checkpoint.config.type.clones and not any(one.voice or arguments.voice for one in sentences):
        raise PromptError("a base checkpoint has no speakers: expected a column voice, or --voice FILE")
    folder = arguments.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    done = {path.name for path in folder.iterdir()}
    endings = [arguments.format, *([arguments.captions] if arguments.captions else [])]
    left = [_completed(one, arguments) for one in sentences if not {f"{one.id}.{end}" for end in endings} <= done]
    for number, error in bad.items():
        print(f"line {number}: {error}", file=sys.stderr)
    there = len(sentences) - len(left)
    begun_s, audio_s, spoken, retried = time.monotonic(), 0.0, 0, 0
    with tqdm(total=len(sentences), initial=there, unit="sentence", dynamic_ncols=True) as bar:
        for outcome in _outcomes(arguments, checkpoint, folder, left) if left else ():
            audio_s, retried = audio_s + outcome.audio_s, retried + (outcome.attempts > 0)
            if outcome.error is None:
                spoken += 1
            else:
                bar.write(f"line {outcome.line}, {outcome.id}: {outcome.error}", file=sys.stderr)
            bar.update()
    if checkpoint.is_random:
        print(RANDOM_WEIGHTS, file=sys.stderr)
    wall_s, lines = time.monotonic() - begun_s, len(sentences) + len(bad)
    report = {"lines": lines, "there": there, "spoken": spoken, "failed": lines - there - spoken, "retried": retried}
    print(json.dumps({**report, "audio_s": round(audio_s, 3), "wall_s": round(wall_s, 3)}))
    return 1 if report["failed"] else 0


def _outcomes(
    arguments: argparse.Namespace, checkpoint: Checkpoint, folder: Path, left: list[Sentence]
) -> Iterator[Outcome]:
    """Speaks what is left, many together wherever the backend allows it, since nobody listens."""
    from mktts.synth import Synthesizer

    engine = "batch" if arguments.backend in ("auto", "torch") else "auto"
    model = {**loading(arguments), "engine": engine, "batch": BatchSettings(codec=arguments.codec_precision)}
    retries = 0 if checkpoint.is_random or arguments.greedy else RETRIES  # random weights never end
    with Synthesizer.load(checkpoint, **model) as synthesizer:
        yield from speak_into_folder(
            synthesizer, left, folder, arguments.format, retries, arguments.greedy, arguments.captions
        )


def _check(arguments: argparse.Namespace) -> None:
    """Refuses at once what could only fail after the model has loaded."""
    checked_int("--seed", arguments.seed, 0, MAX_SEED)
    if arguments.max_frames is not None:
        checked_int("--max-frames", arguments.max_frames, 1)
    if arguments.voice:
        _voice(str(arguments.voice.resolve()))  # raises VoiceError
    if arguments.output.exists() and not arguments.output.is_dir():
        raise SentencesError(f"{arguments.output}: expected a folder, found a file")


def _completed(sentence: Sentence, arguments: argparse.Namespace) -> Sentence:
    """The sentence, with the options for what its line leaves out. Names of voice files are relative to the table."""
    voice = arguments.voice if sentence.voice is None else arguments.sentences.parent / sentence.voice
    return replace(
        sentence,
        voice=None if voice is None else str(voice.absolute()),
        speaker=sentence.speaker or arguments.speaker,
        language=sentence.language or arguments.language,
        instruct=sentence.instruct or arguments.instruct,
        max_frames=sentence.max_frames or arguments.max_frames,
        seed=derived_seed(arguments.seed, sentence.id) if sentence.seed is None else sentence.seed,
    )
