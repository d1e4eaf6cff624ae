"""This machine's loudspeaker, through the package sounddevice (PortAudio)."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np

from mktts.errors import BackendUnavailable
from mktts.spec import SAMPLE_RATE_HZ


class Loudspeaker:
    """Plays PCM as it is made. Leaving its block waits until all of it was heard; an error or Ctrl-C ends it at once.

    Raises BackendUnavailable where the package, its library or a sound device is missing.
    """

    def __init__(self, sample_rate_hz: int = SAMPLE_RATE_HZ) -> None:
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
            self._stream: Any = sounddevice.OutputStream(sample_rate_hz, channels=1, dtype="float32")
        except (sounddevice.PortAudioError, ValueError) as error:
            raise BackendUnavailable(
                f"expected a sound device that plays {sample_rate_hz} Hz, found none ({error}): write a file instead"
            ) from None

    def __enter__(self) -> Loudspeaker:
        return self

    def play(self, pcm: np.ndarray) -> None:
        """Hands over `pcm` (S,) float32; returns once what is left of it fits the device's buffer."""
        if not self._stream.active:
            self._stream.start()  # not earlier: it would run dry before the first sound
        self._stream.write(pcm[:, None])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is not None:
                self._stream.abort()
            elif self._stream.active:
                self._stream.stop()  # waits for what was handed over
        finally:
            self._stream.close()
