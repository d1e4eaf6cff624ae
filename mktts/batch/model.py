"""What opens utterances that are made together with others."""

from __future__ import annotations

from dataclasses import dataclass

from mktts.batch.lanes import Lanes
from mktts.batch.utterance import LaneUtterance
from mktts.model.prompt import Prompt, Request, SpokenRows, is_of_voice
from mktts.model.voice import Voice
from mktts.speech.options import Plan
from mktts.speech.script import Script
from mktts.speech.speaking import Speaker


@dataclass(kw_only=True)
class LaneModel(Speaker):
    """The model behind `lanes`, whose utterances the executor enters into its slots.

    spoken: rows of texts that prompts are made of; None: they are computed.
    """

    lanes: Lanes
    spoken: SpokenRows | None = None

    @property
    def name(self) -> str:
        return self.lanes.name

    def forget(self, voice: Voice) -> None:
        """As `Speaker.forget`; the prefixes' pages and the codec's states too."""
        super().forget(voice)
        for key in self.lanes.pages.known(lambda key: is_of_voice(key, voice)):
            self.lanes.pages.forget(key)
        if voice.codes is not None:
            self.lanes.forget(voice.codes)

    def _utterance(self, script: Script, plan: Plan, voice: Voice | None) -> LaneUtterance:
        return LaneUtterance(script, plan, self.positions, voice, self.lanes.settings.chunks)

    def _prompt(self, request: Request) -> Prompt:
        return super()._prompt(request) if self.spoken is None else self.prompts.of_checked(request, self.spoken)
