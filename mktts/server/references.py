"""Recordings that requests bring to be cloned: where they may come from, and the voices made of them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
import urllib.error
import urllib.request
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from mktts.audio.untrusted import DecodingLimits, decode_untrusted
from mktts.errors import BackendUnavailable, MkttsError
from mktts.server.api_errors import ApiError
from mktts.server.limits import Limits
from mktts.synth.cloning import clone_voice

if TYPE_CHECKING:
    from mktts.checkpoint import Checkpoint
    from mktts.model.voice import Voice

_FETCH_S = 10.0
_BASE64_TEXT = re.compile(r"[A-Za-z0-9+/_\s-]+={0,2}\s*")
_SHORTEST_BASE64 = 64  # characters; a WAV's header alone has 60


@dataclass(frozen=True)
class ReferenceSources:
    """Where a recording may come from, beside the request itself.

    hosts: of http and https addresses; no redirect is followed. folder: files in it may be named, by file:// or by
    their path in it. A server that would fetch whatever it is told could be sent to addresses that only it can reach.
    """

    hosts: frozenset[str] = frozenset()
    folder: Path | None = None


class References:
    """Makes voices of recordings, one at a time, beside the event loop; keeps the last ones."""

    def __init__(self, checkpoint: Checkpoint, limits: Limits, sources: ReferenceSources | None = None) -> None:
        self._checkpoint = checkpoint
        self._sources = sources or ReferenceSources()
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
        data = await asyncio.to_thread(self._read, recording)
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

    def _read(self, recording: str) -> bytes:
        scheme = recording[:64].partition(":")[0].lower()
        if scheme == "data":
            return _from_base64(recording.partition(",")[2])
        if scheme in ("http", "https"):
            return self._fetched(recording)
        if scheme == "file":
            return self._of_folder(unquote(urlsplit(recording).path))
        if len(recording) >= _SHORTEST_BASE64 and _BASE64_TEXT.fullmatch(recording):
            return _from_base64(recording)
        return self._of_folder(recording)

    def _fetched(self, url: str) -> bytes:
        try:
            host = urlsplit(url).hostname
        except ValueError:
            host = None
        if host is None or host not in self._sources.hosts:
            raise _refused("addresses are fetched only from hosts that the server was started with (--reference-host)")
        try:
            opener = urllib.request.build_opener(_NoRedirect, urllib.request.ProxyHandler({}))
            with opener.open(url, timeout=_FETCH_S) as answer:
                return answer.read(self._decoding.data_bytes + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "code", None) or type(error).__name__
            raise ApiError(400, "bad_reference", f"ref_audio: could not fetch it: {reason}", "ref_audio") from None

    def _of_folder(self, name: str) -> bytes:
        folder = self._sources.folder
        if folder is None:
            raise _refused("expected base64, a data: URL, or the name of a voice; files need --reference-folder")
        try:
            root = folder.resolve()
            path = (root / name).resolve()
            if path.is_relative_to(root) and path.is_file():
                with path.open("rb") as file:
                    return file.read(self._decoding.data_bytes + 1)
        except (OSError, ValueError):  # a name that no file can have
            pass
        raise ApiError(
            400, "bad_reference", "ref_audio: no such file in the server's folder of recordings", "ref_audio"
        )


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any) -> None:
        return None


def _refused(reason: str) -> ApiError:
    return ApiError(400, "reference_not_allowed", f"ref_audio: {reason}", "ref_audio")


def _from_base64(text: str) -> bytes:
    """Of either alphabet, with or without its padding. Raises ApiError."""
    plain = "".join(text.split()).replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError):
        message = "ref_audio: expected base64, found other characters"
        raise ApiError(400, "bad_reference", message, "ref_audio") from None
