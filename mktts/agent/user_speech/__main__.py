"""Makes the recordings again: `python -m mktts.agent.user_speech path/to/flite`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import wave
from pathlib import Path

import numpy as np

from mktts.agent.user_speech import TEXTS, USER_RATE_HZ, recording
from mktts.audio import write_wav

_VOICE = "rms"
_SILENT = 0.01  # of full scale; what flite puts around the words is below it
_PEAK = 0.6


def main(flite: str) -> None:
    """Raises CalledProcessError where `flite` fails."""
    with tempfile.TemporaryDirectory() as folder:
        for text in TEXTS:
            raw = Path(folder) / "raw.wav"
            subprocess.run([flite, "-voice", _VOICE, "-t", text, "-o", raw], check=True)
            with wave.open(str(raw), "rb") as file:
                assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (USER_RATE_HZ, 1, 2)
                pcm = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 2**15
            loud = np.flatnonzero(np.abs(pcm) > _SILENT)
            pcm = pcm[loud[0] : loud[-1] + 1]  # the end of the file is the end of speech, for latencies
            path = write_wav(recording(text), pcm * (_PEAK / np.abs(pcm).max()), USER_RATE_HZ)
            print(f"{path.name}: {len(pcm) / USER_RATE_HZ:.2f} s, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
