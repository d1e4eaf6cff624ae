"""`python -m mktts say`: text to a file, a pipe or the loudspeaker, and captions, as SubRip (.srt) or WebVTT (.vtt)."""

from __future__ import annotations

import argparse
import html
import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from mktts.audio import format_of, to_pcm16, write_audio
from mktts.audio.encoding import MAX_SPEED, MIN_SPEED, Tempo, import_av
from mktts.checkpoint.arguments import PIPE, add_model_arguments, add_voice_arguments, loading, text_of
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.common import require_writable, write_whole
from mktts.engine.metrics import summarise
from mktts.engine.options import Markup, StreamOptions, WordTime
from mktts.errors import BackendUnavailable, MkttsError, OptionsError, TextError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.synth.cloning import recorded_voice
from mktts.text.split import Cut, boundary
from mktts.text.words import is_wide

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.model.voice import Voice


CAPTIONS = ("srt", "vtt")
_LINE_CHARS, _CUE_CHARS = 42, 80
_GAP_S = 0.7  # a longer pause between two words begins a new cue


def captions(words: Iterable[WordTime], kind: str, speed: float = 1.0) -> str:
    """A file of captions, each a sentence, or as much of one as fits. kind: of CAPTIONS. speed: of the sound."""
    cues = []
    for number, cue in enumerate(_cues(words), 1):
        start, stop = (_clock(time_s / speed, kind) for time_s in (cue[0].start_s, cue[-1].end_s))
        text = "\n".join(textwrap.wrap(_text(cue), _LINE_CHARS))
        head = f"{number}\n" if kind == "srt" else ""
        cues.append(f"{head}{start} --> {stop}\n{text if kind == 'srt' else html.escape(text, quote=False)}\n")
    return "\n".join(["WEBVTT\n", *cues] if kind == "vtt" else cues)


def _cues(words: Iterable[WordTime]) -> Iterator[list[WordTime]]:
    cue: list[WordTime] = []
    for word in words:
        if cue and (
            boundary(cue[-1].word, " ", word.word[0]) == Cut.SENTENCE
            or word.start_s - cue[-1].end_s > _GAP_S
            or len(_text([*cue, word])) > _CUE_CHARS
        ):
            yield cue
            cue = []
        cue.append(word)
    if cue:
        yield cue


def _text(words: Iterable[WordTime]) -> str:
    text = ""
    for word in words:
        text += word.word if is_wide(text) and is_wide(word.word) else f" {word.word}"
    return text.strip()


def _clock(time_s: float, kind: str) -> str:
    """A time as "00:01:02,345"; WebVTT has a full stop for the comma."""
    seconds, ms = divmod(round(1_000 * time_s), 1_000)
    mark = "," if kind == "srt" else "."
    return f"{seconds // 3_600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{mark}{ms:03}"


class Loudspeaker(AbstractContextManager["Loudspeaker"]):
    """Plays PCM as it is made. Leaving its block waits until all has been heard; an error or Ctrl-C ends it at once.
    Raises BackendUnavailable where the package, its library or a sound device is missing."""

    def __init__(self) -> None:
        try:
            import sounddevice
        except ImportError:
            raise BackendUnavailable(
                "playing needs the package sounddevice: pip install sounddevice; or write a file"
            ) from None
        except OSError as error:  # the package is there, its library is not
            raise BackendUnavailable(
                f"playing needs the library PortAudio ({error}): install it (Debian: apt install libportaudio2), or "
                "write a file"
            ) from None
        try:
            self._stream: Any = sounddevice.OutputStream(SAMPLE_RATE_HZ, channels=1, dtype="float32")
        except (sounddevice.PortAudioError, ValueError) as error:
            raise BackendUnavailable(
                f"expected a sound device that plays {SAMPLE_RATE_HZ} Hz, found none ({error}): write a file instead"
            ) from None

    def play(self, pcm: np.ndarray) -> None:
        """Plays `pcm` (S,) float32; returns once what is left of it fits into the device's buffer."""
        if not self._stream.active:
            self._stream.start()  # not earlier: it would run dry before the first sound
        self._stream.write(pcm[:, None])

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not None:
                self._stream.abort()
            elif self._stream.active:
                self._stream.stop()  # waits for what was handed over
        finally:
            self._stream.close()


EXAMPLES = f"""examples:
  python -m mktts say "Good morning." --play
  python -m mktts say "Good morning." -o morning.wav
  python -m mktts say "Good morning." -o morning.mp3 --checkpoint path/to/checkpoint --speaker vivian
  python -m mktts say "Good morning." -o - | aplay -f S16_LE -r {SAMPLE_RATE_HZ}
  python -m mktts say "Good morning. How are you?" -o morning.wav --srt morning.srt
  cat answer.md | python -m mktts say - -o answer.wav --markup strip
  cat story.txt | python -m mktts say - -o story.wav --checkpoint path/to/checkpoint
  python -m mktts say "In my voice." -o mine.wav --checkpoint path/to/base --ref-audio me.wav --ref-text "What I said."

The end of FILE's name is its format: .wav, .flac, .ogg, .opus, .mp3, .aac; a device or FIFO gets WAV. With `-o -` raw
PCM goes to standard output while it is made: 16 bits, little endian, one channel, {SAMPLE_RATE_HZ} Hz. --play needs the
package sounddevice, .aac and --speed the package av. Ctrl-C or closing the pipe ends the generation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to say; - reads it from standard input")
    where = parser.add_argument_group("where to, one of these or both")
    where.add_argument("-o", "--output", metavar="FILE", help="an audio file, or - for raw PCM on standard output")
    where.add_argument("--play", action="store_true", help="through the loudspeaker, while it is made")
    for kind, name in zip(CAPTIONS, ("SubRip", "WebVTT"), strict=True):
        where.add_argument(f"--{kind}", metavar="FILE", help=f"captions as {name}, their times estimated, beside them")
    who = parser.add_argument_group("voice and manner")
    add_voice_arguments(who)
    who.add_argument("--ref-audio", type=Path, metavar="FILE", help="clone this recording, for a base checkpoint")
    who.add_argument("--ref-text", metavar="TEXT", help="what is said in it")
    how = parser.add_argument_group("generation")
    how.add_argument("--seed", type=int, help="repeats the same draw (default: a new one each time)")
    how.add_argument("--greedy", action="store_true", help="no draw at all")
    how.add_argument("--layout", choices=("whole", "streaming"), help="of the prompt (default: the checkpoint type's)")
    how.add_argument(
        "--markup", choices=get_args(Markup), default="speak", help="strip: takes Markdown, HTML and TeX out first"
    )
    how.add_argument(
        "--speed", type=float, default=1.0, help=f"{MIN_SPEED:g} to {MAX_SPEED:g}, at the same pitch (default: 1)"
    )
    add_model_arguments(parser, lexicon=True)


def main(arguments: argparse.Namespace) -> int:
    """Speaks. Returns 1 if a trained model's stream ended before the text did, otherwise 0."""
    from mktts.checkpoint import open_checkpoint
    from mktts.synth import Synthesizer

    _check(arguments)
    tempo = None if arguments.speed == 1 else Tempo(arguments.speed)
    file = None if arguments.output in (None, PIPE) else Path(arguments.output)
    text = text_of(arguments.text)
    if not text.strip():
        raise TextError("expected a text to say, found nothing but blanks")
    with ExitStack() as until_heard:
        loudspeaker = until_heard.enter_context(Loudspeaker()) if arguments.play else None
        checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
        request = _request(arguments, checkpoint)
        chunks, spoken = [], []

        def put(pcm: np.ndarray) -> None:
            spoken.append(pcm)
            if not len(pcm):  # a filter may hold back what it got
                return
            if arguments.output == PIPE:
                sys.stdout.buffer.write(to_pcm16(pcm))
                sys.stdout.buffer.flush()
            if loudspeaker:
                loudspeaker.play(pcm)

        with (
            Synthesizer.load(checkpoint, **loading(arguments)) as synthesizer,
            synthesizer.stream(text, **request) as stream,
        ):
            for chunk in stream:
                chunks.append(chunk)
                put(chunk.pcm if tempo is None else tempo.feed(chunk.pcm))
            if tempo is not None:
                put(tempo.finish())
            reason, words = stream.finish_reason, stream.words
        metrics = summarise(chunks)
        if file is not None:
            write_audio(file, np.concatenate(spoken))
        for kind, path in _captions(arguments).items():
            write_whole(Path(path), captions(words, kind, arguments.speed).encode())
    took = f"first PCM after {metrics.ttfc_ms:.0f} ms (cold), RTF {metrics.rtf:.2f}"
    how = "" if reason == "eos" else f", ended by {reason}"
    print(f"{metrics.audio_s:.2f} s of audio, {took}{how}", file=sys.stderr)
    if checkpoint.is_random:
        print(RANDOM_WEIGHTS, file=sys.stderr)
    asked_for = reason == "max_frames" and arguments.max_frames is not None
    return 0 if reason == "eos" or asked_for or checkpoint.is_random else 1  # random weights never say end-of-speech


def _check(arguments: argparse.Namespace) -> None:
    """Refuses at once what could only fail after the model has loaded or spoken."""
    if arguments.output is None and not arguments.play:
        raise MkttsError("nowhere to put the speech: expected -o FILE, -o - (a pipe) or --play")
    if arguments.output not in (None, PIPE):
        if format_of(arguments.output) == "aac":
            import_av()
        require_writable(arguments.output)
    for path in _captions(arguments).values():
        require_writable(path)
    given = (arguments.output, *_captions(arguments).values())
    files = [Path(path).absolute() for path in given if path not in (None, PIPE)]
    if len(set(files)) < len(files):
        raise MkttsError(f"expected a file each for the speech and its captions, found {files[0]} twice")
    if not MIN_SPEED <= arguments.speed <= MAX_SPEED:
        raise OptionsError(f"--speed must be {MIN_SPEED:g} to {MAX_SPEED:g}, got {arguments.speed:g}")
    if arguments.voice and arguments.ref_audio:
        raise MkttsError("expected --voice or --ref-audio, found both: a saved voice already holds its recording")
    if arguments.ref_text is not None and not arguments.ref_audio:
        raise MkttsError("--ref-text is the text of --ref-audio, which is missing")


def _captions(arguments: argparse.Namespace) -> dict[str, str]:
    """The caption files that are wanted, by kind."""
    return {kind: path for kind in CAPTIONS if (path := getattr(arguments, kind)) is not None}


def _request(arguments: argparse.Namespace, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "speaker": arguments.speaker or checkpoint.config.default_speaker,
        "language": arguments.language,
        "instruct": arguments.instruct,
        "voice": _voice(arguments, checkpoint),
        "layout": arguments.layout,
        "options": StreamOptions(markup=arguments.markup, word_times=bool(_captions(arguments))),
        "seed": arguments.seed,
        "sampling": checkpoint.sampling().greedy() if arguments.greedy else None,
        "max_frames": arguments.max_frames,
    }


def _voice(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Voice | None:
    if arguments.ref_audio:
        return recorded_voice(checkpoint, arguments.ref_audio, arguments.ref_text)
    if arguments.voice:
        from mktts.model.voice import Voice

        return Voice.load(arguments.voice)
    if checkpoint.config.type.clones:
        raise MkttsError(
            "a base checkpoint has no speakers: expected --ref-audio RECORDING, best with --ref-text and what is said "
            "in it, or --voice FILE, saved by `mktts voice`"
        )
    return None
