"""Makes the recordings again: `python -m mktts agent record path/to/flite`."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import wave
from pathlib import Path

import numpy as np

from mktts.agent.user_speech import TEXTS, USER_RATE_HZ, recording
from mktts.audio import from_pcm16, write_audio
from mktts.errors import AgentError

_VOICE = "rms"
_SILENT = 0.01  # of full scale; what flite puts around the words is below it
_PEAK = 0.6

EXAMPLES = """examples:
  python -m mktts agent record path/to/flite

Writes every recording beside the agent's programs; with the same flite they are the same bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("flite", metavar="FLITE", help="the program of flite 2.2")


def main(arguments: argparse.Namespace) -> int:
    """Writes every recording. Raises AgentError where flite fails."""
    with tempfile.TemporaryDirectory() as folder:
        for text in TEXTS:
            raw = Path(folder) / "raw.wav"
            _speak(arguments.flite, text, raw)
            with wave.open(str(raw), "rb") as file:
                form = (file.getframerate(), file.getnchannels(), file.getsampwidth())
                if form != (USER_RATE_HZ, 1, 2):
                    raise AgentError(f"expected 1 channel of 2 bytes at {USER_RATE_HZ} Hz from flite, got {form}")
                pcm = from_pcm16(file.readframes(file.getnframes()))
            loud = np.flatnonzero(np.abs(pcm) > _SILENT)
            pcm = pcm[loud[0] : loud[-1] + 1]  # the end of the file is the end of speech, for latencies
            path = write_audio(recording(text), pcm * (_PEAK / np.abs(pcm).max()), USER_RATE_HZ)
            print(f"{path.name}: {len(pcm) / USER_RATE_HZ:.2f} s, {path.stat().st_size} bytes")
    return 0


def _speak(flite: str, text: str, wav: Path) -> None:
    try:
        subprocess.run([flite, "-voice", _VOICE, "-t", text, "-o", wav], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise AgentError(f"expected flite to speak {text!r} into a file: {error}") from None
