"""Recordings that requests bring to be cloned, and the voices made of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections import OrderedDict
from typing import TYPE_CHECKING

from mktts.audio.untrusted import DecodingLimits, decode_untrusted
from mktts.errors import BackendUnavailable, MkttsError
from mktts.server.api_errors import ApiError
from mktts.server.limits import Limits
from mktts.synth.cloning import clone_voice

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.model.voice import Voice

_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/_\s-]+={0,2}\s*")
_SHORTEST_BASE64 = 64  # characters; a WAV's header alone has 60


class References:
    """Makes voices of recordings, one at a time, beside the event loop; keeps the last ones."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits) -> None:
        self._checkpoint = checkpoint
        self._kept_voices = limits.kept_voices
        self._decoding = DecodingLimits(limits.max_reference_bytes, limits.max_reference_s, limits.reference_decode_s)
        self._voices: OrderedDict[str, Voice] = OrderedDict()
        self._lock = asyncio.Lock()

    async def make(self, data: bytes, transcript: str | None, key: str) -> Voice:
        """The voice of a recording's bytes, which is not kept here. key: what the caller calls it. Raises ApiError."""
        async with self._lock:
            return await asyncio.to_thread(self._made, data, transcript, key)

    async def voice(self, recording: str, transcript: str | None) -> Voice:
        """The voice of `recording`, in-context where `transcript` is given. Raises ApiError."""
        data = await asyncio.to_thread(_read, recording)
        key = hashlib.sha256(data + repr(transcript).encode()).hexdigest()
        async with self._lock:
            if key not in self._voices:
                self._voices[key] = await asyncio.to_thread(self._made, data, transcript)
            self._voices.move_to_end(key)
            while len(self._voices) > self._kept_voices:
                self._voices.popitem(last=False)
            return self._voices[key]

    def _made(self, data: bytes, transcript: str | None, key: str = "ref_audio") -> Voice:
        try:
            pcm, rate_hz = decode_untrusted(data, self._decoding)
            return clone_voice(self._checkpoint, pcm, rate_hz, transcript)
        except BackendUnavailable as error:
            raise ApiError(400, "cloning_unavailable", f"this server cannot clone a voice: {error}", key) from None
        except MkttsError as error:
            raise ApiError(400, "bad_reference", f"{key}: {error}", key) from None


def _read(recording: str) -> bytes:
    """The bytes of a recording as a request brings it. A server that read what it is told could be sent to files and
    addresses that only it can reach. Raises ApiError."""
    if recording[:64].partition(":")[0].lower() == "data":
        return _from_base64(recording.partition(",")[2])
    if len(recording) >= _SHORTEST_BASE64 and _BASE64_TEXT.fullmatch(recording):
        return _from_base64(recording)
    message = "ref_audio: expected the recording in base64 or a data: URL, or the name of a voice; nothing else is read"
    raise ApiError(400, "reference_not_allowed", message, "ref_audio")


def _from_base64(text: str) -> bytes:
    """Of either alphabet, with or without its padding. Raises ApiError."""
    plain = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        message = "ref_audio: expected base64, found other characters"
        raise ApiError(400, "bad_reference", message, "ref_audio") from None
