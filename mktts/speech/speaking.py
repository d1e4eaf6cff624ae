"""What opens utterances on a model: checks a request, and makes the script that the utterance follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mktts.model.prompt import FedPrompt, Prompt, PromptBuilder, Request
from mktts.model.voice import Voice
from mktts.speech.options import Plan
from mktts.speech.script import FedScript, Script, WholeScript
from mktts.speech.utterance import Utterance


@dataclass
class Speaker(ABC):
    """Opens utterances; `_utterance` makes one of a script.

    positions: of the talker, prompt and frames of one segment together. fed_prompt: a prompt whose text comes later.
    """

    prompts: PromptBuilder
    positions: int
    fed_prompt: Callable[[PromptBuilder, Request], Any] = FedPrompt

    @abstractmethod
    def _utterance(self, script: Script, plan: Plan, voice: Voice | None) -> Utterance: ...

    def forget(self, voice: Voice) -> None:
        """Lets go of what is kept for prompts with this voice; utterances that are open go on. The worker's thread."""
        self.prompts.forget(voice)

    def _prompt(self, request: Request) -> Prompt:
        return self.prompts.of_checked(request)

    def check(self, request: Request) -> Request:
        """Any thread. Raises PromptError or TextError."""
        return self.prompts.check(request)

    def speak(self, requests: Sequence[Request], plan: Plan, started_s: float) -> Utterance:
        """An utterance of known text: one checked request a segment."""
        return self._utterance(WholeScript(requests, self._prompt, started_s), plan, requests[0].voice)

    def listen(self, request: Request, max_chars: int, plan: Plan) -> tuple[Utterance, FedScript]:
        """An utterance whose text comes later, and the script that it is fed through. `request`: checked, no text."""
        script = FedScript(request, lambda empty: self.fed_prompt(self.prompts, empty), max_chars)
        return self._utterance(script, plan, request.voice), script
