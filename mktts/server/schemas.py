"""Schemas of requests, responses and WebSocket messages. `mktts.server.service` checks what depends on the checkpoint
and on the limits, such as names and maxima."""

import contextlib
from typing import Annotated, Any, Literal

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, create_model, model_validator

from mktts.audio.encoding import MAX_SPEED, MIN_SPEED, StreamFormat
from mktts.engine.options import FinishReason, Markup, WordTime
from mktts.model.sampling import MAX_SEED, Sampling
from mktts.spec import MODEL_TYPES, SAMPLE_RATE_HZ

Route = Literal["tts_stream", "openai_speech", "tts_ws"]
Transcript = Annotated[str | None, StringConstraints(strip_whitespace=True)]
EndReason = Literal[FinishReason, "error"]
DEFAULT = "default"  # the voice of requests that name none
_RATES_HZ = (8_000, 12_000, 16_000, 22_050, SAMPLE_RATE_HZ, 32_000, 44_100, 48_000)
# Our keys by the names that upstream and other servers of this model use; `do_sample` is the opposite of `greedy`.
_OTHER_NAMES = {
    **{f"subtalker_{name}": f"predictor_{name}" for name in ("temperature", "top_k", "top_p")},
    "speaker": "voice", "instruct": "instructions", "do_sample": "greedy", "subtalker_dosample": "predictor_greedy",
}  # fmt: skip
_VALUE: TypeAdapter[Any] = TypeAdapter(bool | int | float | dict[str, str] | None, config=ConfigDict(strict=True))
_TASKS = tuple(kind.upstream_name for kind in MODEL_TYPES.values())


class StrictModel(BaseModel):
    """A model that refuses unknown keys and values of another type. A string under a field is its description."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _sampling_field(name: str, value: Any) -> tuple[Any, Any]:
    """Pydantic's field for one key of `Sampling.flat`, with bounds by its type; `Sampling` checks the rest."""
    bounds = {bool: {}, int: {"ge": 0, "le": 10_000}, float: {"ge": 0, "le": 10}}[type(value)]
    of = "of the code predictor" if name.startswith("predictor_") else "of the talker"
    if name == "repetition_penalty":  # a value near 0 makes scores infinite
        bounds, of = {"ge": 0.1, "le": 10}, "of codes that were drawn before; 1: off"
    return type(value) | None, Field(None, description=f"{of}; default: the checkpoint's value", **bounds)


_SAMPLING: dict[str, Any] = {name: _sampling_field(name, value) for name, value in Sampling().flat().items()}
SamplingParams: Any = create_model("SamplingParams", __base__=StrictModel, **_SAMPLING)


class VoiceParams(SamplingParams):
    """Voice, delivery and sampling of a request; every key is optional."""

    language: str = Field("auto", description="auto, or a language of the checkpoint: english, en or en-US")
    speaker: str | None = Field(None, description="a speaker of GET /health; default: the server's first")
    instruct: str | None = Field(None, min_length=1, description="how to speak; voice_design: the voice to make")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="makes draws repeatable; default: random, see X-Seed")
    max_frames: int | None = Field(None, ge=1, description="limit on frames of audio; default: the server's limit")
    trim_lead: bool = Field(False, description="trim the silence before the first audible 10 ms to 40 ms")
    markup: Markup = Field("speak", description="strip: remove Markdown, HTML and TeX before speaking")
    word_timestamps: bool = Field(False, description="return the time of each word, estimated from the audio")
    pronunciations: dict[str, str] | None = Field(None, max_length=1_000)
    """what to say for a word: {"nginx": "engine X"}; matches whole words only"""


class SpeechRequest(VoiceParams):
    """Body of POST /tts/stream."""

    text: str = Field(min_length=1, description="what to say")


def _nullable(schema: dict[str, Any]) -> None:
    """Marks every optional key of the JSON schema as nullable."""
    for name, one in schema["properties"].items():
        if name not in schema["required"] and "anyOf" not in one:
            schema["properties"][name] = {"anyOf": [one, {"type": "null"}]}


class OpenAISpeechRequest(VoiceParams):
    """Body of POST /v1/audio/speech: OpenAI's keys, our own, and those of other servers of this model. A null equals an
    omitted key. Keys that are unknown or have no effect are ignored and listed in X-Mktts-Ignored."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_nullable)

    input: str = Field(min_length=1, description="what to say")
    model: str | None = Field(None, description="any name: the server has one model, which GET /v1/models names")
    speaker: str | None = Field(None, alias="voice", description="a name of GET /v1/audio/voices; if omitted, default")
    instruct: str | None = Field(None, alias="instructions", description="how to speak; VoiceDesign: the voice")
    response_format: StreamFormat | None = None
    """default: mp3. opus: in Ogg; aac: ADTS; pcm: 16 bits, little endian; mulaw (or ulaw), alaw: G.711, no header"""
    speed: float | None = Field(None, ge=MIN_SPEED, le=MAX_SPEED, description="2: half the time, at the same pitch")
    stream_format: Literal["audio", "sse"] | None = None
    """sse: server-sent events speech.audio.delta and speech.audio.done; default: audio"""
    stream: bool | None = Field(None, description="false: send all audio at once, with its length; default: stream it")
    sample_rate: Literal[_RATES_HZ] | None = Field(None, description=f"Hz; default: {SAMPLE_RATE_HZ}, for G.711 8000")
    strict: bool | None = Field(None, description="refuse what would be ignored; default: the server's --strict")
    max_new_tokens: int | None = Field(None, ge=1, description="like max_frames, but capped at the server's limit")
    non_streaming_mode: bool | None = None
    """layout of the prompt: whether the whole text precedes the speech; unrelated to how the response is sent"""
    task_type: Literal[_TASKS] | None = Field(None, description="must be the checkpoint's type")
    ref_audio: str | None = Field(None, description="a recording to clone: base64, a data: URL, or a voice's name")
    ref_text: Transcript = Field(None, description="transcript of ref_audio; default: clone only the speaker's timbre")
    x_vector_only_mode: bool | None = Field(None, description="true: clone only the timbre, even with a ref_text")
    temperature: float | None = Field(None, ge=0, le=10, description="of the talker; 0: greedy")
    top_k: int | None = Field(None, ge=-1, le=10_000, description="of the talker; 0 or -1: off")

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, given: Any) -> Any:
        """Drops nulls, and translates names and values of other servers to ours."""
        if not isinstance(given, dict):
            return given
        given = {key: value for key, value in given.items() if value is not None}
        for name in [name for name in _OTHER_NAMES if name in given]:
            value, ours = given.pop(name), _OTHER_NAMES[name]
            if ours.endswith("greedy"):
                if not isinstance(value, bool):
                    raise ValueError(f"{name} must be true or false")
                value = not value
            given.setdefault(ours, value)
        voice, recording = given.get("voice"), given.get("ref_audio")
        if isinstance(voice, dict) and list(voice) == ["id"]:
            given["voice"] = voice["id"]  # OpenAI accepts an object, too
        if isinstance(recording, list) and len(recording) == 1:
            given["ref_audio"] = recording[0]  # the form of vLLM-Omni
        if given.get("response_format") == "ulaw":
            given["response_format"] = "mulaw"
        if given.get("temperature") == 0 and given["temperature"] is not False:
            given |= {"temperature": None, "greedy": True}
        if given.get("top_k") == -1:
            given["top_k"] = 0
        return given


class OpenAISpeechQuery(OpenAISpeechRequest):
    """Query of GET /v1/audio/speech: the keys of the body of POST."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: dict[str, str]) -> dict[str, Any]:
        """Parses numbers, true, false, null and objects as JSON, except for keys whose value is a text."""
        found = dict(given)
        fields = cls.model_fields.items()
        texts = {field.alias or name for name, field in fields if field.annotation in (str, str | None)}
        for key, word in given.items():
            if _OTHER_NAMES.get(key, key) not in texts:
                with contextlib.suppress(ValueError):  # not JSON: left as text
                    found[key] = _VALUE.validate_json(word)
        return found


class VoiceUpload(BaseModel):
    """Form of POST /v1/audio/voices."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="letters, digits and _.-, in any case")
    consent: str = Field(pattern=r"\S", max_length=2_000, description="a statement that the speaker agrees, or its id")
    audio_sample: UploadFile = Field(description="the recording")
    ref_text: Transcript = Field(None, description="its transcript; default: clone only the speaker's timbre")
    speaker_description: str | None = Field(None, max_length=2_000)
    language: str | None = Field(None, description="has no effect: a voice speaks every language")
    expires_in_s: int | None = Field(None, ge=1, description="seconds until it is deleted; default: the server's limit")
    type: Literal["audio_sample"] = Field("audio_sample", description="OpenAI's name for this way to create a voice")


class ErrorDetail(StrictModel):
    """OpenAI's error object.

    type: invalid_request_error, rate_limit_error (429) or server_error. code: identifies the error for programs. param:
    the key at fault. request_id: the request's X-Request-Id or the stream's id. streams_max: the capacity, if busy."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str | None = None
    streams_max: int | None = None

    def shown(self) -> dict[str, str | int | None]:
        """The error as sent to clients: without streams_max if that is None."""
        return self.model_dump(exclude={"streams_max"} if self.streams_max is None else None)


class ErrorBody(StrictModel):
    error: ErrorDetail


class StreamState(StrictModel):
    """The progress or outcome of one stream. frames, audio_s: handed to the connection. first_audio_ms: from the
    request (over WebSocket, from the first text) to the first PCM on the host. words: if word_timestamps was set, with
    times in seconds from the first sample; kept for the most recent streams only."""

    id: str
    route: Route
    state: Literal["running", "ended"] = "running"
    finish_reason: EndReason | None = None
    seed: int
    frames: int = 0
    audio_s: float = 0.0
    first_audio_ms: float | None = None
    error: ErrorDetail | None = None
    words: list[WordTime] | None = None


class ModelInfo(StrictModel):
    """The model that is served. type: custom_voice, base or voice_design. clones: whether it can clone the voice of a
    recording. random_weights: the audio is noise, for measurements only."""

    checkpoint: str
    revision: str | None
    type: str
    clones: bool
    size: str
    random_weights: bool


class Health(StrictModel):
    """The state of the server. status: failing after several consecutive streams ended with an error, stopping after
    the signal to stop. aliases: further names for speakers. uploads: whether callers can upload voices. streams_max:
    listeners admitted at once. capacity: how that was determined. streams_open: with or without a listener."""

    status: Literal["ok", "failing", "stopping"]
    model: ModelInfo
    backend: str
    device: str
    dtype: str
    sample_rate_hz: int
    speakers: list[str]
    aliases: list[str]
    uploads: bool
    languages: list[str]
    takes_instructions: bool
    streams_open: int
    streams_max: int
    capacity: str


class UploadedVoice(StrictModel):
    """The data stored with an uploaded voice. consent: the statement as it was sent. created_at, expires_at: Unix time
    in seconds. mime_type, file_size: of the recording, which is not stored."""

    name: str
    consent: str
    created_at: int
    expires_at: int
    mime_type: str
    file_size: int
    ref_text: str | None = None
    speaker_description: str | None = None


# ---- WebSocket: messages from the client


class Start(VoiceParams):
    """Starts an utterance. text: the whole text, if it is known already; then no `text` or `finish` follows."""

    type: Literal["start"]
    text: str | None = Field(None, min_length=1)


class Text(StrictModel):
    type: Literal["text"]
    text: str


class End(StrictModel):
    """finish: no more text follows; what was sent is spoken. cancel: stop speaking, too."""

    type: Literal["finish", "cancel"]


ClientMessage = Annotated[Start | Text | End, Field(discriminator="type")]
