"""A transport in memory: a microphone that plays what it is given, and a loudspeaker that keeps what it was given.

Both run in real time, like a sound card: what Pipecat measures and the words it takes for heard depend on the clock.
"""

from __future__ import annotations

import asyncio
import io
import time
import wave
from pathlib import Path

import numpy as np
from pipecat.frames.frames import InputAudioRawFrame, OutputAudioRawFrame, StartFrame
from pipecat.transports.base_input import BaseInputTransport
from pipecat.transports.base_output import BaseOutputTransport
from pipecat.transports.base_transport import BaseTransport, TransportParams

from mktts.agent.user_speech import USER_RATE_HZ
from mktts.audio import from_pcm16, to_pcm16
from mktts.common import write_whole
from mktts.spec import SAMPLE_RATE_HZ

_PIECE_S = 0.02  # what a microphone hands over at a time
_LEAD_S = 0.04  # of audio in the loudspeaker's buffer
_NOISE = 8  # of a quiet room, in steps of 16-bit samples
_SAMPLE_BYTES = 2

TimedPieces = list[tuple[float, np.ndarray, int]]  # time of the first sample in s as `time.time`, int16 samples, Hz


class LoopbackTransport(BaseTransport):
    """The user side of a conversation without a user."""

    def __init__(self) -> None:
        super().__init__()
        params = TransportParams(audio_in_enabled=True, audio_out_enabled=True, audio_out_end_silence_secs=0)
        self.microphone = Microphone(params)
        self.loudspeaker = RecordingOutput(params)

    def input(self) -> Microphone:
        return self.microphone

    def output(self) -> RecordingOutput:
        return self.loudspeaker

    def tracks(self) -> tuple[np.ndarray, np.ndarray]:
        """What the user said and what was played: float32 (S,) each, at 24 kHz, on one clock."""
        sides = [self.microphone.heard, self.loudspeaker.played]
        begin_s = min((pieces[0][0] for pieces in sides if pieces), default=0.0)
        end_s = max((at_s + len(pcm) / rate_hz for pieces in sides for at_s, pcm, rate_hz in pieces), default=0.0)
        tracks = np.zeros((2, round((end_s - begin_s) * SAMPLE_RATE_HZ) + 1), np.float32)
        for track, pieces in zip(tracks, sides, strict=True):
            for at_s, pcm, rate_hz in pieces:
                first = round((at_s - begin_s) * SAMPLE_RATE_HZ)
                pcm = from_pcm16(_at_output_rate(pcm, rate_hz)[: len(track) - first])
                track[first : first + len(pcm)] = pcm
        return tracks[0], tracks[1]

    def write_stereo(self, path: Path | str) -> Path:
        """Writes the tracks, the user's on the left, whole or not at all."""
        both = np.stack([np.frombuffer(to_pcm16(track), "<i2") for track in self.tracks()], 1)
        file = io.BytesIO()
        with wave.open(file, "wb") as out:
            out.setparams((2, _SAMPLE_BYTES, SAMPLE_RATE_HZ, 0, "NONE", ""))
            out.writeframes(both.tobytes())
        return write_whole(path, file.getvalue())


class Microphone(BaseInputTransport):
    """Hands over a quiet room's noise, and what is said into it. heard: all of it."""

    def __init__(self, params: TransportParams) -> None:
        super().__init__(params)
        self.heard: TimedPieces = []
        self._waiting = np.zeros(0, "<i2")
        self._said = asyncio.Event()
        self._capturing: asyncio.Task | None = None

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)
        self._capturing = self.create_task(self._capture())

    async def cleanup(self) -> None:
        await super().cleanup()
        if self._capturing is not None:
            await self.cancel_task(self._capturing)
            self._capturing = None

    async def say(self, pcm: np.ndarray) -> None:
        """Says `pcm` (S,) int16 at 16 kHz; returns when its last sample has been handed over."""
        self._said.clear()
        self._waiting = pcm
        await self._said.wait()

    async def _capture(self) -> None:
        samples = round(_PIECE_S * USER_RATE_HZ)
        noise = np.random.default_rng(0)
        at_s = time.time()
        while True:
            piece = noise.integers(-_NOISE, _NOISE + 1, samples).astype("<i2")
            spoken, self._waiting = self._waiting[:samples], self._waiting[samples:]
            piece[: len(spoken)] += spoken
            await asyncio.sleep(max(0.0, at_s + _PIECE_S - time.time()))  # a piece exists once it has been captured
            self.heard.append((at_s, piece, USER_RATE_HZ))
            await self.push_audio_frame(InputAudioRawFrame(piece.tobytes(), USER_RATE_HZ, 1))
            if len(spoken) and not len(self._waiting):
                self._said.set()
            at_s += _PIECE_S


class RecordingOutput(BaseOutputTransport):
    """Takes audio as fast as it is heard, and keeps it. played: all of it."""

    def __init__(self, params: TransportParams) -> None:
        super().__init__(params)
        self.played: TimedPieces = []
        self._until_s = 0.0

    async def start(self, frame: StartFrame) -> None:
        await super().start(frame)
        await self.set_transport_ready(frame)

    async def write_audio_frame(self, frame: OutputAudioRawFrame) -> bool:
        begin_s = max(self._until_s, time.time())
        self.played.append((begin_s, np.frombuffer(frame.audio, "<i2"), frame.sample_rate))
        self._until_s = begin_s + len(frame.audio) / _SAMPLE_BYTES / frame.sample_rate
        await asyncio.sleep(max(0.0, self._until_s - _LEAD_S - time.time()))
        return True


def _at_output_rate(pcm: np.ndarray, rate_hz: int) -> np.ndarray:
    """Linear: enough for a recording of who spoke when."""
    if rate_hz == SAMPLE_RATE_HZ:
        return pcm
    at = np.arange(len(pcm) * SAMPLE_RATE_HZ // rate_hz) * (rate_hz / SAMPLE_RATE_HZ)
    return np.interp(at, np.arange(len(pcm)), pcm)
