"""The shapes of requests, answers and WebSocket messages: what a client may rely on.

What depends on the loaded checkpoint and the limits (names, maxima) is checked by `mktts.server.service` and written
into the OpenAPI document by `mktts.server.document`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from mktts.audio.encoding import MAX_SPEED, MIN_SPEED, StreamFormat
from mktts.engine.options import Markup
from mktts.model.prompt import Layout
from mktts.model.sampling import MAX_SEED, Sampling
from mktts.spec import MODEL_TYPES, SAMPLE_RATE_HZ

Route = Literal["tts_stream", "openai_speech", "tts_ws"]
State = Literal["running", "ended"]
EndReason = Literal["eos", "max_frames", "runaway", "cancelled", "error"]
DEFAULT = "default"  # the name of the voice that speaks where none is named
SAMPLE_RATES_HZ = (8_000, 12_000, 16_000, 22_050, SAMPLE_RATE_HZ, 32_000, 44_100, 48_000)
# Names of upstream and of other servers of this model for keys of ours; a true `do_sample` is a false `greedy`.
_OTHER_NAMES = {
    "speaker": "voice",
    "instruct": "instructions",
    "subtalker_temperature": "predictor_temperature",
    "subtalker_top_k": "predictor_top_k",
    "subtalker_top_p": "predictor_top_p",
    "do_sample": "greedy",
    "subtalker_dosample": "predictor_greedy",
}
_MAX_NAME_CHARS = 40
_TASKS = tuple(kind.upstream_name for kind in MODEL_TYPES.values())


class StrictModel(BaseModel):
    """Refuses unknown keys and values of another type: a misspelt setting must not be ignored silently."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _sampling_fields() -> dict[str, Any]:
    """Pydantic's fields for `Sampling.flat`, with bounds by type; `Sampling` checks the rest."""
    bounds: dict[type, dict[str, float]] = {bool: {}, int: {"ge": 0, "le": 10_000}, float: {"ge": 0, "le": 10}}
    found: dict[str, Any] = {}
    for name, value in Sampling().flat().items():
        model = "the code predictor" if name.startswith("predictor_") else "the talker"
        description = f"of {model}; left out: the checkpoint's"
        found[name] = (type(value) | None, Field(None, description=description, **bounds[type(value)]))
    # A penalty next to 0 makes scores infinite.
    description = "of codes that were drawn before, 1 = off; left out: the checkpoint's"
    found["repetition_penalty"] = (float | None, Field(None, ge=0.1, le=10, description=description))
    return found


if TYPE_CHECKING:
    SamplingParams = StrictModel
else:
    SamplingParams = create_model("SamplingParams", __base__=StrictModel, **_sampling_fields())


class VoiceParams(SamplingParams):
    """The voice and its manner; every key may be left out."""

    language: str = Field("auto", description="auto, or a language of the checkpoint: english, en or en-US")
    speaker: str | None = Field(None, description="a speaker of GET /health; left out: the server's first")
    instruct: str | None = Field(None, min_length=1, description="how to say it; what the voice is like (voice_design)")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="repeats a draw; left out: X-Seed has the one drawn")
    max_frames: int | None = Field(None, ge=1, description="of audio; left out: the server's limit")
    trim_lead: bool = Field(False, description="leave out the silence before the first audible 10 ms, but 40 ms")
    markup: Markup = Field("speak", description="strip: Markdown, HTML and TeX are taken out")

    def sampling(self) -> dict[str, Any]:
        """The settings that are given, by their names in `Sampling.flat`."""
        given = self.model_dump(include=set(SamplingParams.model_fields), exclude_none=True)
        if "greedy" in given:
            given.setdefault("predictor_greedy", given["greedy"])
        return given


class SpeechRequest(VoiceParams):
    """Body of POST /tts/stream."""

    text: str = Field(min_length=1, description="what to say")


def _voice_name(value: Any) -> Any:
    """The name in OpenAI's other form of a voice, {"id": name}."""
    if isinstance(value, dict) and list(value) == ["id"] and isinstance(value["id"], str):
        return value["id"]
    return value


def _only_one(value: Any) -> Any:
    """The recording in vLLM-Omni's other form, a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


class OpenAISpeechRequest(SamplingParams):
    """Body of POST /v1/audio/speech: OpenAI's keys, ours, and those of other servers of this model. Every key may be
    null, which is as leaving it out; keys that are not known are ignored."""

    model_config = ConfigDict(extra="allow")

    input: str = Field(min_length=1, description="what to say")
    model: str | None = Field(None, description="any name: the process has one model, which GET /v1/models names")
    voice: Annotated[str | None, BeforeValidator(_voice_name)] = Field(
        None, description="a voice of GET /v1/audio/voices, one of OpenAI's names, or default; left out: default"
    )
    instructions: Annotated[str | None, BeforeValidator(lambda value: value or None)] = Field(
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
    sample_rate: Literal[SAMPLE_RATES_HZ] | None = Field(None, description=f"Hz; left out: {SAMPLE_RATE_HZ}")
    language: str | None = Field(None, description="english, en or en-US; left out: auto")
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    max_frames: int | None = Field(None, ge=1, description="of 80 ms; left out: the server's limit")
    max_new_tokens: int | None = Field(None, ge=1, description="as max_frames; beyond the server's limit: the limit")
    trim_lead: bool | None = Field(None, description="leave out the silence at the start, but 40 ms")
    markup: Markup | None = Field(None, description="strip: Markdown, HTML and TeX are taken out")
    non_streaming_mode: bool | None = Field(
        None,
        description="the prompt's layout: the whole text before the speech, or along with it; not how the answer comes",
    )
    task_type: Literal[_TASKS] | None = Field(None, description="must be what the checkpoint is")
    ref_audio: Annotated[str | None, BeforeValidator(_only_one)] = Field(
        None, description="a recording to clone, base64 or a data: URL, or the name of a voice of this server"
    )
    ref_text: str | None = Field(None, description="what is said in ref_audio; left out: its speaker's sound alone")
    x_vector_only_mode: bool | None = Field(None, description="true: the speaker's sound alone, whatever ref_text says")
    temperature: float | None = Field(None, ge=0, le=10, description="of the talker; 0: greedy")
    top_k: int | None = Field(None, ge=-1, le=10_000, description="of the talker; 0 or -1: off")

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        renamed = {key: value for key, value in given.items() if key not in _OTHER_NAMES}
        for name, ours in _OTHER_NAMES.items():
            value = given.get(name)
            if value is None or renamed.get(ours) is not None:
                continue
            if ours.endswith("greedy"):
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be true or false")
                value = not value
            renamed[ours] = value
        return renamed

    @property
    def layout(self) -> Layout | None:
        return None if self.non_streaming_mode is None else ("whole" if self.non_streaming_mode else "streaming")

    @property
    def ignored(self) -> list[str]:
        """The unknown keys, except odd or long ones."""
        names = self.model_extra or {}
        return sorted(name for name in names if name.isidentifier() and name.isascii() and len(name) <= _MAX_NAME_CHARS)

    def params(self, max_frames: int) -> VoiceParams:
        """The same settings under our own names. max_frames: the server's limit."""
        given = self.model_dump(include=set(SamplingParams.model_fields))
        if self.temperature == 0:
            given |= {"temperature": None, "greedy": True}
        if self.top_k == -1:
            given["top_k"] = 0
        at_most = None if self.max_new_tokens is None else min(self.max_new_tokens, max_frames)
        return VoiceParams(
            **given,
            language=self.language or "auto",
            speaker=None if self.voice in (None, "", DEFAULT) else self.voice,
            instruct=self.instructions,
            seed=self.seed,
            max_frames=self.max_frames or at_most,
            trim_lead=bool(self.trim_lead),
            markup=self.markup or "speak",
        )


class VoiceUpload(BaseModel):
    """Form of POST /v1/audio/voices."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="letters, digits, _ . and -, in any case"
    )
    consent: str = Field(
        pattern=r"\S",
        max_length=2_000,
        description="a statement that the speaker agrees, or the id of one; kept with its time",
    )
    audio_sample: UploadFile = Field(description="the recording")
    ref_text: str | None = Field(None, description="what is said in it; left out: the speaker's sound alone")
    speaker_description: str | None = Field(None, max_length=2_000)
    language: str | None = Field(None, description="changes nothing: a voice speaks every language")
    expires_in_s: int | None = Field(None, ge=1, description="until it is deleted; left out: the server's limit")
    type: Literal["audio_sample"] = Field("audio_sample", description="OpenAI's name of this way of making a voice")


class ErrorDetail(StrictModel):
    """OpenAI's error object.

    type: invalid_request_error, rate_limit_error (429) or server_error. code: for programs. param: the wrong key.
    request_id: X-Request-Id of the request, or the id of the stream. streams_max: the capacity in streams, where busy.
    """

    message: str
    type: str
    param: str | None
    code: str
    request_id: str | None = None
    streams_max: int | None = None

    def shown(self) -> dict[str, str | int | None]:
        """As clients of OpenAI's shape get it: streams_max only where there is something to say."""
        return self.model_dump(exclude={"streams_max"} if self.streams_max is None else None)


class ErrorBody(StrictModel):
    error: ErrorDetail


class StreamState(StrictModel):
    """What became of one utterance. frames, audio_s: handed to the connection. first_audio_ms: from the request (or
    the first text, over WebSocket) to the first PCM on the host."""

    id: str
    route: Route
    state: State
    finish_reason: EndReason | None
    seed: int
    frames: int
    audio_s: float
    first_audio_ms: float | None
    error: ErrorDetail | None


class ModelInfo(StrictModel):
    """type: custom_voice, base or voice_design. clones: it speaks with the voice of a recording. random_weights: the
    audio is noise, for timing and parity only."""

    checkpoint: str
    revision: str | None
    type: str
    clones: bool
    size: str
    random_weights: bool


class Health(StrictModel):
    """status: failing after several streams in a row ended by an error; stopping after the signal to stop.
    streams_max: listeners that are admitted at once; capacity: how that is known; streams_open: with or without a
    listener."""

    status: Literal["ok", "failing", "stopping"]
    model: ModelInfo
    backend: str
    device: str
    dtype: str
    sample_rate_hz: int
    speakers: list[str]
    languages: list[str]
    takes_instructions: bool
    streams_open: int
    streams_max: int
    capacity: str


class Ready(StrictModel):
    ready: bool


class ModelCard(StrictModel):
    """OpenAI's. created: when this server started, in seconds since 1970."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "mktts"


class ModelList(StrictModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class UploadedVoice(StrictModel):
    """What is kept of an upload besides the voice. consent: the statement, as it was sent. created_at, expires_at:
    seconds since 1970. mime_type, file_size: of the recording, which is not kept."""

    name: str
    consent: str
    created_at: int
    expires_at: int
    mime_type: str
    file_size: int
    ref_text: str | None = None
    speaker_description: str | None = None


class KeptVoice(StrictModel):
    """An upload that was kept, in OpenAI's shape and, under `voice`, in vLLM-Omni's."""

    object: Literal["audio.voice"] = "audio.voice"
    id: str
    name: str
    created_at: int
    success: Literal[True] = True
    voice: UploadedVoice


class DeletedVoice(StrictModel):
    object: Literal["audio.voice.deleted"] = "audio.voice.deleted"
    id: str
    deleted: Literal[True] = True
    success: Literal[True] = True
    message: str


class VoiceList(StrictModel):
    """voices: of the checkpoint, saved ones, and those that the caller has uploaded. aliases: more names, and the voice
    that each stands for. uploaded_voices: the caller's own. uploads: whether more may be uploaded."""

    voices: list[str]
    aliases: dict[str, str]
    uploaded_voices: list[UploadedVoice]
    uploads: bool


# ---- WebSocket: what a client sends


class Start(VoiceParams):
    """text: all of it, where it is known; no `text` or `finish` follows."""

    type: Literal["start"]
    text: str | None = Field(None, min_length=1)


class Text(StrictModel):
    type: Literal["text"]
    text: str


class Finish(StrictModel):
    type: Literal["finish"]


class Cancel(StrictModel):
    type: Literal["cancel"]


ClientMessage = Annotated[Start | Text | Finish | Cancel, Field(discriminator="type")]
