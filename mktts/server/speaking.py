"""An utterance for a request of OpenAI's shape, whichever route it came by."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from mktts.model.voice import Voice
from mktts.server.answer import Body
from mktts.server.problems import Problem
from mktts.server.references import References
from mktts.server.schemas import Route
from mktts.server.speech_request import OpenAISpeechRequest
from mktts.server.studio import Studio
from mktts.server.utterance import Utterance
from mktts.server.voices import DEFAULT, OPENAI_VOICES
from mktts.spec import MODEL_TYPES, SAMPLE_RATE_HZ

KEYS = {"text": "input", "instruct": "instructions", "speaker": "voice"}  # what callers there call them
_MOST_NAMED = 100  # ignored keys that the log names, each once

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Begun:
    """sound: what makes the answer's bytes. ignored: keys of the request that change nothing here."""

    utterance: Utterance
    sound: Body
    ignored: list[str]


class Speaking:
    """Belongs to the event loop's thread."""

    def __init__(self, studio: Studio, references: References) -> None:
        self._studio = studio
        self._references = references
        self._named: set[str] = set()

    async def begin(self, body: OpenAISpeechRequest, owner: str, route: Route) -> Begun:
        """Starts to speak. owner: whose uploaded voices may be named. Raises Problem."""
        studio, ignored = self._studio, self.check(body)

        async def usage() -> tuple[int, int]:
            return await asyncio.to_thread(studio.count_tokens, body.input), utterance.frames

        sound = Body(
            body.format,
            speed=1.0 if body.speed is None else body.speed,
            sample_rate_hz=body.sample_rate or SAMPLE_RATE_HZ,
            whole=body.whole,
            as_events=body.events,
            usage=usage,
        )
        voice = await self.brought(body, owner)
        manner = body.manner(studio.limits.max_frames)
        utterance = studio.speak(route, body.input, manner, voice=voice, layout=body.layout, keys=KEYS, owner=owner)
        return Begun(utterance, sound, ignored)

    def check(self, body: OpenAISpeechRequest) -> list[str]:
        """The keys that are ignored. Raises Problem for one that cannot be honoured, and for another task."""
        ignored = body.ignored()
        for key in ignored:
            if key not in self._named and len(self._named) < _MOST_NAMED:
                self._named.add(key)
                log.info("requests have the key %s, which changes nothing here: ignored", key)
        task = MODEL_TYPES[self._studio.model.type].upstream_name
        if body.task_type not in (None, task):
            message = f"task_type: this checkpoint is for {task}, got {body.task_type}"
            raise Problem(400, "wrong_task", message, "task_type")
        return ignored

    async def brought(self, body: OpenAISpeechRequest, owner: str) -> Voice | None:
        """The voice of the recording that the request brings or names; None where it does neither. Raises Problem."""
        recording, transcript = body.ref_audio, (body.ref_text or "").strip() or None
        if not recording:
            if transcript is not None:
                raise Problem(400, "bad_reference", "ref_text: there is no ref_audio that says it", "ref_text")
            return None
        if not self._studio.model.clones:
            message = (
                f"ref_audio: a {self._studio.model.type} checkpoint clones no voices; leave it out, or serve a Base one"
            )
            raise Problem(400, "cloning_unavailable", message, "ref_audio")
        if (body.voice or DEFAULT).lower() not in (DEFAULT, *OPENAI_VOICES):
            raise Problem(400, "two_voices", "ref_audio: leave out voice, or this", "ref_audio")
        if (saved := self._studio.saved_voice(recording[:256], owner)) is not None:
            return saved
        if transcript is not None:
            self._studio.check_chars(len(transcript), "ref_text")
        if body.x_vector_only_mode:
            transcript = None
        elif body.x_vector_only_mode is False and transcript is None:
            raise Problem(
                400, "bad_reference", "ref_text: expected what ref_audio says, or x_vector_only_mode", "ref_text"
            )
        self._studio.admit()  # before the work, not after it
        return await self._references.voice(recording, transcript)
