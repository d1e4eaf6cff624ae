"""Body of POST /v1/audio/speech: OpenAI's keys, and those that other servers of this model have taught clients.

vLLM-Omni: task_type, ref_audio, ref_text, x_vector_only_mode, max_new_tokens, non_streaming_mode, sample_rate,
stream, speaker. SGLang-Omni: those, and references. Every key may be null, which is as leaving it out.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, model_validator

from mktts.audio.encoding import MAX_SPEED, MIN_SPEED, StreamFormat
from mktts.model.prompt import Layout
from mktts.model.sampling import MAX_SEED
from mktts.server.problems import Problem
from mktts.server.schemas import Draws, Manner, StrictModel
from mktts.server.voices import DEFAULT
from mktts.spec import MODEL_TYPES, SAMPLE_RATE_HZ

SAMPLE_RATES_HZ = sorted({SAMPLE_RATE_HZ, 8_000, 12_000, 16_000, 22_050, 32_000, 44_100, 48_000})

# Keys of other servers that would change what is heard, or what the answer holds, and that nothing here can honour.
_CANNOT = {
    "ambient_sound", "cfg_value", "duration_seconds", "duration_tokens", "emo_text", "emotion", "exaggeration",
    "extra_params", "ignore_eos", "lang_code", "min_p", "normalization_options", "pitch", "ref_audio_2",
    "return_timestamps", "speaker_embedding", "stage_params", "style", "token_count", "voice_prompt",
    "voice_settings", "volume", "volume_multiplier", "word_timestamps",
}  # fmt: skip
_RENAMED = {
    "instruct": "instructions",
    "subtalker_temperature": "predictor_temperature",
    "subtalker_top_k": "predictor_top_k",
    "subtalker_top_p": "predictor_top_p",
}
_TASKS = tuple(kind.upstream_name for kind in MODEL_TYPES.values())
_TURNED = {"do_sample": "greedy", "subtalker_dosample": "predictor_greedy"}  # true here is false there
_NEUTRAL = {"pitch": 0, "min_p": 0, "volume": 1, "volume_multiplier": 1}  # numbers that ask for nothing
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


def _voice_name(value: Any) -> Any:
    """OpenAI's second way of naming a voice is {"id": name}."""
    if isinstance(value, dict) and list(value) == ["id"] and isinstance(value["id"], str):
        return value["id"]
    return value


def _only_one(value: Any) -> Any:
    """vLLM-Omni takes a list of recordings too."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _none_if_empty(value: Any) -> Any:
    return None if value == "" else value


def _asks_for_nothing(key: str, value: Any) -> bool:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return key in _NEUTRAL and value == _NEUTRAL[key]
    return not value


class Reference(StrictModel):
    """SGLang-Omni's way of sending a recording: under any of four keys."""

    model_config = ConfigDict(extra="ignore")

    audio_path: str | None = None
    ref_audio: str | None = None
    audio: str | None = None
    data: str | None = None
    text: str | None = None

    @property
    def recording(self) -> str | None:
        return self.audio_path or self.ref_audio or self.audio or self.data


class OpenAISpeechRequest(Draws):
    """Body of POST /v1/audio/speech. Keys that change nothing about the sound are ignored."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)

    input: str = Field(min_length=1, description="what to say")
    model: str | None = Field(None, description="any name: the process has one model, which GET /v1/models names")
    voice: Annotated[str | None, BeforeValidator(_voice_name)] = Field(
        None,
        validation_alias=AliasChoices("voice", "speaker"),
        description="a voice of GET /v1/audio/voices, one of OpenAI's names, or default; left out: default",
    )
    instructions: Annotated[str | None, BeforeValidator(_none_if_empty)] = Field(
        None, description="how to say it; what the voice is like (VoiceDesign)"
    )
    response_format: StreamFormat | None = Field(
        None, description="left out: mp3. opus comes in Ogg, aac as ADTS; pcm: 16 bits, little endian, one channel"
    )
    speed: float | None = Field(
        None, ge=MIN_SPEED, le=MAX_SPEED, description="2 takes half the time, at the same pitch; left out: 1"
    )
    stream_format: Literal["audio", "sse"] | None = Field(
        None, description="sse: server-sent events speech.audio.delta and speech.audio.done; left out: audio"
    )
    stream: bool | None = Field(
        None, description="false: the whole at once, with its length; left out or true: while it is made"
    )
    sample_rate: int | None = Field(
        None, json_schema_extra={"enum": [*SAMPLE_RATES_HZ, None]}, description=f"Hz; left out: {SAMPLE_RATE_HZ}"
    )
    language: str | None = Field(None, description="english, en or en-US; left out: auto")
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    max_frames: int | None = Field(None, ge=1, description="of 80 ms; left out: the server's limit")
    max_new_tokens: int | None = Field(None, ge=1, description="as max_frames; beyond the server's limit: the limit")
    trim_lead: bool | None = Field(None, description="leave out the silence at the start, but 40 ms")
    non_streaming_mode: bool | None = Field(
        None,
        description="the prompt's layout: the whole text before the speech, or beside it; not how the answer comes",
    )
    task_type: Literal[_TASKS] | None = Field(None, description="must be what the checkpoint is")
    ref_audio: Annotated[str | None, BeforeValidator(_only_one)] = Field(
        None, description="a recording to clone, base64 or a data: URL, or the name of a voice of this server"
    )
    ref_text: str | None = Field(None, description="what is said in ref_audio; left out: its speaker's sound alone")
    x_vector_only_mode: bool | None = Field(None, description="true: the speaker's sound alone, whatever ref_text says")
    references: list[Reference] | None = Field(None, max_length=1, description="ref_audio and ref_text in one")
    temperature: float | None = Field(None, ge=0, le=10, description="of the talker; 0: greedy")
    top_k: int | None = Field(None, ge=-1, le=10_000, description="of the talker; 0 or -1: off")

    @model_validator(mode="before")
    @classmethod
    def _other_names(cls, given: Any) -> Any:
        """Names that SGLang-Omni, Nari and upstream have for the same."""
        if not isinstance(given, dict):
            return given
        known = {key: value for key, value in given.items() if key not in _RENAMED and key not in _TURNED}
        for names, changed in ((_RENAMED, lambda value: value), (_TURNED, lambda value: not value)):
            for name, ours in names.items():
                if given.get(name) is not None and known.get(ours) is None:
                    if names is _TURNED and not isinstance(given[name], bool):
                        raise ValueError(f"{name} must be true or false")
                    known[ours] = changed(given[name])
        return known

    @model_validator(mode="after")
    def _taken_apart(self) -> OpenAISpeechRequest:
        if self.sample_rate not in (None, *SAMPLE_RATES_HZ):
            raise ValueError(f"sample_rate must be one of {', '.join(map(str, SAMPLE_RATES_HZ))}")
        if self.references and self.ref_audio is None:
            (reference,) = self.references
            if reference.recording is None:
                raise ValueError("references must hold a recording under audio_path, ref_audio, audio or data")
            self.ref_audio = reference.recording
            self.ref_text = self.ref_text or reference.text
        return self

    @property
    def format(self) -> StreamFormat:
        return self.response_format or "mp3"

    @property
    def events(self) -> bool:
        return self.stream_format == "sse"

    @property
    def whole(self) -> bool:
        """Whether the answer is wanted in one piece. A format of a stream is a wish for a stream."""
        return self.stream is False and self.stream_format is None

    @property
    def layout(self) -> Layout | None:
        return None if self.non_streaming_mode is None else ("whole" if self.non_streaming_mode else "streaming")

    def ignored(self) -> list[str]:
        """The keys that are not known here. Raises Problem for one that would change the sound, as far as is known."""
        extra = self.model_extra or {}
        known = set(type(self).model_fields) | {"speaker"}
        for key, value in extra.items():
            if key in _CANNOT and not _asks_for_nothing(key, value):
                raise Problem(400, "unsupported_key", f"{key}: this server cannot honour it; leave it out", key)
            if key not in _CANNOT and (near := get_close_matches(key, known, 1, 0.85)):
                raise Problem(
                    400, "unknown_key", f"{key[:40]}: there is no such key, did you mean {near[0]}?", key[:40]
                )
        return sorted(key for key in extra if _PLAIN_NAME.fullmatch(key))

    def manner(self, max_frames: int) -> Manner:
        """The same wishes under this server's own names. max_frames: the server's limit."""
        draws = self.model_dump(include=set(Draws.model_fields))
        if draws["temperature"] == 0:
            draws |= {"temperature": None, "greedy": True}
        if draws["top_k"] == -1:
            draws["top_k"] = 0
        at_most = None if self.max_new_tokens is None else min(self.max_new_tokens, max_frames)
        return Manner(
            **draws,
            language=self.language or "auto",
            speaker=None if self.voice in (None, "", DEFAULT) else self.voice,
            instruct=self.instructions,
            seed=self.seed,
            max_frames=self.max_frames or at_most,
            trim_lead=bool(self.trim_lead),
        )
