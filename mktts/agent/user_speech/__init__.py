"""A user's side of a conversation without a user: short recordings, WAV, mono, 16 bit, 16 kHz.

They are the output of the synthesizer flite 2.2 (Carnegie Mellon University, BSD-like licence, any use permitted) in
its voice `rms` (`flite -voice rms -t TEXT -o FILE`), cut at the first and the last sample above 1 % of full scale and
scaled to a peak of 0.6: the end of a file is the end of speech."""

from pathlib import Path

import numpy as np
import soundfile

from mktts.errors import AgentError

USER_RATE_HZ = 16_000  # of the recordings, and of everything a user says to the agent
FOLDER = Path(__file__).parent
TEXTS = tuple(sorted(path.stem.replace("_", " ") for path in FOLDER.glob("*.wav")))


def load(text: str) -> np.ndarray:
    """The samples (S,) int16 of `text`, from its first sound to its last. Raises AgentError for a text that is not
    among `TEXTS`."""
    if text not in TEXTS:
        raise AgentError(f"expected one of the recorded texts {', '.join(map(repr, TEXTS))}, got {text!r}")
    return soundfile.read(FOLDER / f"{text.replace(' ', '_')}.wav", dtype="int16")[0]
