"""The user's side of scripted conversations: short recordings, WAV, mono, 16 bit, 16 kHz.

They were made by the synthesizer flite 2.2 (Carnegie Mellon University, BSD-like licence, any use permitted) with its
voice `rms` (`flite -voice rms -t TEXT -o FILE`), trimmed to the first and the last sample above 1 % of full scale and
scaled to a peak of 0.6. The end of a file is thus the end of speech."""

from pathlib import Path

import numpy as np
import soundfile

from mktts.errors import AgentError

USER_RATE_HZ = 16_000  # sample rate of the recordings and of all user audio
FOLDER = Path(__file__).parent
TEXTS = tuple(sorted(path.stem.replace("_", " ") for path in FOLDER.glob("*.wav")))


def load(text: str) -> np.ndarray:
    """The samples (S,) int16 of the recording of `text`. Raises AgentError for a text that is not one of `TEXTS`."""
    if text not in TEXTS:
        raise AgentError(f"expected one of the recorded texts {', '.join(map(repr, TEXTS))}, got {text!r}")
    return soundfile.read(FOLDER / f"{text.replace(' ', '_')}.wav", dtype="int16")[0]
