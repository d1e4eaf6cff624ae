"""The half of the service that keeps the conversation's context true: what was heard is in it, the rest is not."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from pipecat.frames.frames import AggregatedTextProgressFrame, ErrorFrame, TTSTextFrame
from pipecat.services.tts_service import TTSService

from mktts.pipecat.failure import SpeechFailedFrame
from mktts.pipecat.utterance import Utterance
from mktts.pipecat.words import Pace, Playout


class HeardWordsTTSService(TTSService):
    """A ``TTSService`` that times words itself, from the audio it has pushed, and takes failures into account."""

    def __init__(self, **kwargs: Any) -> None:
        """Initialize the service.

        Args:
            **kwargs: Additional arguments passed to the parent ``TTSService``.
        """
        super().__init__(push_text_frames=False, **kwargs)  # words are pushed one by one instead
        self._pace = Pace()
        self._playout = Playout()
        self._origins_s: dict[str, float] = {}  # when the first audio of each open context is heard
        self._cut_short: set[str] = set()  # contexts with text that was not spoken

    def _hear(self, utterance: Utterance, duration_s: float, context_id: str) -> None:
        """Notes a piece of audio that is about to be pushed."""
        begin_s = self._playout.push(duration_s, asyncio.get_running_loop().time())
        utterance.heard.add(duration_s, begin_s)
        if self.audio_context_available(context_id):
            self._origins_s.setdefault(context_id, begin_s)

    async def _push_words(self, utterance: Utterance, context_id: str) -> None:
        """Queues the words of `utterance` that may soon be heard; all of them when its audio is complete."""
        heard = utterance.heard
        if heard.begin_s is None:
            due = []
        elif not utterance.over:
            due = utterance.words.due(heard.made_s, asyncio.get_running_loop().time() - heard.begin_s)
        elif utterance.cut_short:
            due = utterance.words.due(heard.made_s, math.inf)
        else:
            due = utterance.words.rest(heard.made_s)
        origin_s = self._origins_s.get(context_id)
        if origin_s is None:  # run without an audio context: nobody asks for words
            return
        for word, offset_s in due:  # Pipecat counts from the first audio of the context
            await self.add_word_timestamps(
                [(word.text, heard.at(offset_s) - origin_s)], context_id, includes_inter_frame_spaces=word.wide
            )

    async def _apply_force_complete(self, context_id: str) -> None:
        """Pipecat takes words that got no time for spoken. Where something failed, they were not."""
        if context_id not in self._cut_short and self.is_usable:
            await super()._apply_force_complete(context_id)
            return
        frames = self._aggregated_frame_sequencer.force_complete(context_id, self._word_timestamp_tracker.last_pts)
        unspoken = (TTSTextFrame, AggregatedTextProgressFrame)
        await self._push_word_frames([frame for frame in frames if not isinstance(frame, unspoken)])

    async def push_error_frame(self, error: ErrorFrame, force_treat_as_permanent: bool = False) -> None:
        """Push an error frame upstream; after a failed utterance, drop the words it left unspoken.

        Args:
            error: The error frame to push.
            force_treat_as_permanent: Whether the service can do no more work.
        """
        if isinstance(error, SpeechFailedFrame):
            # All that was spoken is ahead of this frame: the first sentence with words left is the one that failed.
            if error.context_id in self.get_audio_contexts():
                self._cut_short.add(error.context_id)
                for frame in self._aggregated_frame_sequencer.complete_spoken_slot():
                    await self.push_frame(frame)
            force_treat_as_permanent |= error.permanent
        await super().push_error_frame(error, force_treat_as_permanent)
