"""What can be changed while a pipeline runs, in Pipecat's form, and its languages in the model's words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from loguru import logger
from pipecat.services.settings import TTSSettings
from pipecat.transcriptions.language import Language
from pipecat.utils.types import NOT_GIVEN, NotGiven, assert_given

from mktts.model.sampling import Sampling
from mktts.pipecat.source import Style
from mktts.spec import LANGUAGE_CODES

AUTO = "auto"  # the model infers the language from the text


@dataclass
class MkttsTTSSettings(TTSSettings):
    """Settings for MkttsTTSService. A change is heard from the next utterance on.

    Parameters:
        voice: A speaker's name (CustomVoice), or the path of a saved voice (Base). None takes the first speaker.
        language: A ``Language``, one of the model's names ("english"), or "auto".
        instruct: How to speak, in words, for checkpoints that take instructions.
        sampling: How codes are drawn; None takes the checkpoint's own settings.
        seed: Makes the same text the same audio; None draws a new one for every utterance.
    """

    instruct: str | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    sampling: Sampling | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)
    seed: int | None | NotGiven = field(default_factory=lambda: NOT_GIVEN)

    _aliases: ClassVar[dict[str, str]] = {"speaker": "voice"}

    @property
    def style(self) -> Style:
        """These settings, complete, as one utterance's style."""
        return Style(
            voice=assert_given(self.voice),
            language=str(assert_given(self.language) or AUTO),
            instruct=assert_given(self.instruct),
            sampling=assert_given(self.sampling),
            seed=assert_given(self.seed),
        )


def language_name(language: Language) -> str:
    """The model's name of a language, regional variants included; "auto" for one that the model was not trained on."""
    name = LANGUAGE_CODES.get(str(language).split("-")[0].lower())
    if name is None:
        logger.warning(f"Qwen3-TTS has no language {language}: the model infers one from the text")
    return name or AUTO
