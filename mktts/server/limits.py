"""What one server process allows, and how long it waits."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mktts.arguments import option
from mktts.errors import ServerError
from mktts.spec import FRAME_RATE_HZ

DAY_S = 24 * 3_600


@dataclass(frozen=True)
class Limits:
    """Raises ServerError on a value that is not above 0 (max_waiting, wait_s: below 0), or not finite.

    max_streams: a stream whose text has not come, or that no client reads, is none of them.
    max_waiting: streams for which there is no place yet wait, so many, for wait_s; then, and beyond, it is 429.
    max_body_bytes: of a request's body and of one WebSocket message.
    max_duration_s: also what a request that names no limit gets.
    buffer_frames: made ahead of a client that does not read; then its generation waits.
    socket_bytes: the kernel may hold unsent per connection. Small, so that little audio is on the way when a
        listener interrupts, and so that a slow client is noticed.
    body_s: longer for a long body, at 64 KiB a second.
    kept_states: ended streams that GET /tts/stream/{id} still knows.
    max_reference_bytes, max_reference_s: of a recording that a request brings to be cloned; decoding it may take
        reference_decode_s.
    max_voices: that one key may upload.
    kept_voices: made of such recordings, so that the next request with the same one need not make it again."""

    max_streams: int | None = option(None, "listened to at once (default: the measured capacity)", metavar="N")
    min_streams: int = option(1, "that are admitted even where the capacity is smaller", metavar="N")
    max_waiting: int | None = option(None, "that wait for a place (default: as many as are served)", metavar="N")
    wait_s: float | None = option(None, "then it is 429 (default: 0.5, a full GPU 0.05)", name="--wait", metavar="S")
    max_body_bytes: int = 128 * 1024
    max_chars: int = option(5_000, "of one text", metavar="N")
    max_duration_s: float = option(600.0, "of one stream's audio", name="--max-duration", metavar="S")
    buffer_frames: int = 64
    socket_bytes: int = 128 * 1024
    stall_s: float = option(60.0, "until a client that reads nothing is dropped", name="--stall", metavar="S")
    idle_s: float = option(60.0, "until an utterance without text is ended", name="--idle", metavar="S")
    head_s: float = option(10.0, "for a request's head", name="--head", metavar="S")
    body_s: float = option(20.0, "for its body, and more for a long one", name="--body", metavar="S")
    grace_s: float = option(5.0, "for open streams after the signal to stop", name="--grace", metavar="S")
    kept_states: int = 1_024
    max_reference_bytes: int = 10 * 2**20
    max_reference_s: float = 60.0
    reference_decode_s: float = 10.0
    kept_voices: int = 32
    max_voices: int = 100
    voice_days: float = option(30.0, "until an uploaded voice is deleted", metavar="N")

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None:
                continue
            if not value >= 0 if field.name in ("max_waiting", "wait_s") else not value > 0:
                raise ServerError(f"{field.name} must be above 0, got {value!r}")
            if not math.isfinite(value):
                raise ServerError(f"{field.name} must be finite, got {value!r}")
        if self.max_duration_s > DAY_S:
            raise ServerError(f"max_duration_s must be at most {DAY_S} (a day), got {self.max_duration_s:g}")

    @property
    def max_frames(self) -> int:
        return max(1, int(self.max_duration_s * FRAME_RATE_HZ))
