"""`python -m mktts say`: text to a file or a pipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mktts.checkpoint.arguments import add_model_arguments, loading
from mktts.errors import MkttsError, TextError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.speech.metrics import summarise

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.model.voice import Voice
    from mktts.speech.options import Chunk

PIPE = "-"
RANDOM_NOTE = "random weights: this is noise, not speech"

EXAMPLES = f"""examples:
  python -m mktts say "Good morning." -o morning.wav
  python -m mktts say "Good morning." -o morning.wav --checkpoint path/to/checkpoint --speaker vivian
  python -m mktts say "Good morning." -o - | aplay -f S16_LE -r {SAMPLE_RATE_HZ}
  cat story.txt | python -m mktts say - -o story.wav --checkpoint path/to/checkpoint
  python -m mktts say "In my voice." -o mine.wav --checkpoint path/to/base --ref-audio me.wav --ref-text "What I said."

With `-o -` raw PCM goes to standard output while it is made: 16 bits, little endian, one channel, {SAMPLE_RATE_HZ} Hz.
Ctrl-C or closing the pipe ends the generation."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to say; - reads it from standard input")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="a WAV file, or - for raw PCM on standard output"
    )
    who = parser.add_argument_group("voice and manner")
    who.add_argument("--speaker", help="of a custom_voice checkpoint (`inspect` lists them; default: its first)")
    who.add_argument("--language", default="auto", help="default: %(default)s")
    who.add_argument("--instruct", help="how to say it, or for voice_design what the voice is like")
    who.add_argument("--voice", type=Path, metavar="FILE", help="a saved voice, for a base checkpoint")
    who.add_argument("--ref-audio", type=Path, metavar="FILE", help="clone this recording, for a base checkpoint")
    who.add_argument("--ref-text", metavar="TEXT", help="what is said in it")
    how = parser.add_argument_group("generation")
    how.add_argument("--seed", type=int, help="repeats the same draw (default: a new one each time)")
    how.add_argument("--greedy", action="store_true", help="no draw at all")
    how.add_argument("--layout", choices=("whole", "streaming"), help="of the prompt (default: the checkpoint type's)")
    how.add_argument("--max-frames", type=int, help="stop after this many frames")
    add_model_arguments(parser)


def main(arguments: argparse.Namespace) -> int:
    """Speaks; 1 where a trained model's stream ended before the text did, else 0."""
    from mktts.checkpoint import open_checkpoint
    from mktts.synth.synthesizer import Synthesizer

    text = sys.stdin.read() if arguments.text == PIPE else arguments.text
    if not text.strip():
        raise TextError("expected a text to say, found nothing but blanks")
    check_output(arguments.output)
    checkpoint = open_checkpoint(arguments.checkpoint, arguments.revision)
    request = {
        "speaker": arguments.speaker or next(iter(checkpoint.config.speakers), None),
        "language": arguments.language,
        "instruct": arguments.instruct,
        "voice": _voice(arguments, checkpoint),
        "layout": arguments.layout,
        "seed": arguments.seed,
        "sampling": checkpoint.sampling().greedy() if arguments.greedy else None,
    }
    if arguments.max_frames is not None:
        request["max_frames"] = arguments.max_frames
    with (
        Synthesizer.load(checkpoint, **loading(arguments)) as synthesizer,
        synthesizer.stream(text, **request) as stream,
    ):
        chunks = list(_piped(stream) if arguments.output == PIPE else stream)
        reason = stream.finish_reason
    if arguments.output != PIPE:
        from mktts.audio import write_wav

        write_wav(Path(arguments.output), np.concatenate([chunk.pcm for chunk in chunks]))
    _report(chunks, reason, checkpoint)
    asked_for = reason == "max_frames" and arguments.max_frames is not None
    return 0 if reason == "eos" or asked_for or checkpoint.is_random else 1  # random weights never say end-of-speech


def _piped(stream: Iterable[Chunk]) -> Iterator[Chunk]:
    from mktts.audio import to_pcm16

    for chunk in stream:
        sys.stdout.buffer.write(to_pcm16(chunk.pcm))
        sys.stdout.buffer.flush()
        yield chunk


def _voice(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Voice | None:
    if arguments.voice and arguments.ref_audio:
        raise MkttsError("expected --voice or --ref-audio, found both: a saved voice already holds its recording")
    if arguments.ref_text and not arguments.ref_audio:
        raise MkttsError("--ref-text is the text of --ref-audio, which is missing")
    if not arguments.voice and not arguments.ref_audio:
        return None
    from mktts.model.voice import Voice
    from mktts.synth.cloning import clone_voice

    if arguments.voice:
        return Voice.load(arguments.voice)
    return clone_voice(checkpoint, arguments.ref_audio, None, arguments.ref_text)


def check_output(output: str) -> None:
    """Says at once, not after the generation, that a file cannot be written there."""
    path = Path(output)
    if output != PIPE and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise MkttsError(f"{output}: expected a file name in a folder that exists")


def _report(chunks: list[Chunk], reason: str | None, checkpoint: Checkpoint) -> None:
    metrics = summarise(chunks)
    line = f"{metrics.audio_s:.2f} s of audio, first PCM after {metrics.ttfc_ms:.0f} ms (cold), RTF {metrics.rtf:.2f}"
    print(line if reason == "eos" else f"{line}, ended by {reason}", file=sys.stderr)
    if checkpoint.is_random:
        print(RANDOM_NOTE, file=sys.stderr)
