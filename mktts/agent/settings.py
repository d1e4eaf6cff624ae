"""The settings of an agent, and how environment variables choose them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from mktts.arguments import option
from mktts.checkpoint import DEFAULT_CHECKPOINT
from mktts.common import one_of
from mktts.errors import AgentError
from mktts.model.prompt import Layout

SttName = Literal["pocketsphinx", "whisper", "deepgram"]
LlmName = Literal["scripted", "qwen3", "openai"]
TurnEnd = Literal["smart", "timeout"]

_INSTRUCTIONS = (
    "You are a voice agent. Your answers are spoken: one to three short sentences of plain words, no lists, no markup, "
    "numbers written out."
)


@dataclass(frozen=True)
class AgentSettings:
    """The configuration of an agent; options are described by their help. The keys are left out of its repr.

    checkpoint, revision, backend, device, dtype: of the voice, as `open_checkpoint` and `Synthesizer.load` take them.
    voice, language, instruct, seed: as in `MkttsTTSService.Settings`; None uses the checkpoint's default.
    layout: of the prompt; None takes the checkpoint's.
    turn_end: how the end of the user's turn is detected: "smart", by the model that ships with Pipecat, for people; or
        "timeout", by a fixed silence of `turn_end_s`, which is deterministic, for scripts.
    greeting: what the bot says first; "" for nothing.
    Raises AgentError."""

    checkpoint: str = DEFAULT_CHECKPOINT
    revision: str | None = None
    backend: str = "auto"
    device: str = "auto"
    dtype: Any = None
    voice: str | None = option(None, "a speaker's name, or a saved voice's file")
    language: str = option("auto", "language of the speech (default: auto)")
    instruct: str | None = option(None, "how to speak, in words, for checkpoints that take instructions")
    seed: int | None = None
    tokens: bool = option(False, "speak word by word, not sentence by sentence (default: only with --llm qwen3)")
    layout: Layout | None = option(
        "streaming", "where a prompt has the text: along with the speech, to start sooner (default), or before it"
    )
    stt: SttName = option("pocketsphinx", "speech to text (default: the one that the environment has a key for)")
    stt_model: str = option(
        "base", "of --stt whisper: tiny, base, ..., a Hub id, or a folder", metavar="NAME_OR_FOLDER"
    )
    llm: LlmName = option("scripted", "language model (default: the one that the environment has a key for)")
    llm_checkpoint: str = option(
        "Qwen/Qwen3-0.6B", "of --llm qwen3: a folder, a Hub id (Qwen/Qwen3-0.6B), random:SIZE", metavar="NAME"
    )
    deepgram_key: str | None = field(default=None, repr=False)
    openai_key: str | None = field(default=None, repr=False)
    openai_url: str | None = option(None, "default: $OPENAI_BASE_URL", metavar="URL")
    openai_model: str = option("gpt-4.1", "default: $OPENAI_MODEL", metavar="NAME")
    instructions: str = _INSTRUCTIONS
    turn_end: TurnEnd = option("smart", "what ends your turn: Pipecat's model (default), or 0.2 s")
    turn_end_s: float = 0.2
    greeting: str = "Hello, I am listening."

    def __post_init__(self) -> None:
        if self.stt == "deepgram" and not self.deepgram_key:
            raise AgentError('speech to text by Deepgram needs a key: set DEEPGRAM_API_KEY, or take stt "pocketsphinx"')
        if self.llm == "openai" and not (self.openai_key or self.openai_url):
            raise AgentError(
                "OpenAI's model needs a key: set OPENAI_API_KEY, or OPENAI_BASE_URL for another server, or take "
                'llm "scripted"'
            )
        choices = {"stt": SttName, "llm": LlmName, "turn_end": TurnEnd, "layout": Literal[None, Layout]}
        for name, known in choices.items():
            one_of(name, getattr(self, name), get_args(known), AgentError)
        if self.openai_url is not None and urlsplit(self.openai_url).scheme not in ("http", "https"):
            raise AgentError(f"the model's address must begin with http:// or https://, got {self.openai_url!r}")

    def parts(self) -> dict[str, str]:
        """Describes speech to text ("stt"), language model ("llm") and "voice", without secrets."""
        smart = self.turn_end == "smart"
        turn_end = "a model decides when you have finished" if smart else f"{self.turn_end_s:g} s of silence end a turn"
        stt = {
            "pocketsphinx": "pocketsphinx with a grammar",
            "whisper": f"Whisper, {self.stt_model}",
            "deepgram": "Deepgram",
        }[self.stt]
        llm = {
            "scripted": "a script, no model",
            "qwen3": f"Qwen3 text in this process, {self.llm_checkpoint}",
            "openai": f"{self.openai_model} at {self.openai_url or 'OpenAI'}",
        }[self.llm]
        return {
            "stt": f"{stt}; {turn_end}",
            "llm": llm,
            "voice": f"{self.checkpoint}, {'token by token' if self.tokens else 'sentence by sentence'}",
        }

    def describe(self) -> list[str]:
        """`parts`, one line each."""
        return [f"{name}: {words}" for name, words in self.parts().items()]


def from_environment(environment: Mapping[str, str] | None = None, **changes: Any) -> AgentSettings:
    """Makes settings from environment variables; `changes` that are not None override them.

    DEEPGRAM_API_KEY selects the speech to text. OPENAI_API_KEY, or OPENAI_BASE_URL for another compatible server,
    selects the language model, and OPENAI_MODEL names it. MKTTS_CHECKPOINT and MKTTS_VOICE select the voice. Raises
    AgentError for a choice whose key is missing."""
    found = os.environ if environment is None else environment
    known = {
        "deepgram_key": found.get("DEEPGRAM_API_KEY"),
        "openai_key": found.get("OPENAI_API_KEY"),
        "openai_url": found.get("OPENAI_BASE_URL"),
        "openai_model": found.get("OPENAI_MODEL"),
        "checkpoint": found.get("MKTTS_CHECKPOINT"),
        "voice": found.get("MKTTS_VOICE"),
    }
    chosen = {name: value for name, value in known.items() if value}
    chosen |= {name: value for name, value in changes.items() if value is not None}
    chosen.setdefault("stt", "deepgram" if chosen.get("deepgram_key") else "pocketsphinx")
    chosen.setdefault("llm", "openai" if chosen.get("openai_key") or chosen.get("openai_url") else "scripted")
    chosen.setdefault("tokens", chosen["llm"] == "qwen3")  # a local model's words can be spoken as they are generated
    return AgentSettings(**chosen)
