"""The shapes of requests, answers and WebSocket messages. What depends on the loaded checkpoint and the limits (names,
maxima) is checked by `mktts.server.service`."""

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
DEFAULT = "default"  # the name of the voice that speaks where none is named
_RATES_HZ = (8_000, 12_000, 16_000, 22_050, SAMPLE_RATE_HZ, 32_000, 44_100, 48_000)
# Names of upstream and of other servers of this model for keys of ours; a true `do_sample` is a false `greedy`.
_OTHER_NAMES = {
    **{f"subtalker_{name}": f"predictor_{name}" for name in ("temperature", "top_k", "top_p")},
    "speaker": "voice", "instruct": "instructions", "do_sample": "greedy", "subtalker_dosample": "predictor_greedy",
}  # fmt: skip
_VALUE: TypeAdapter[Any] = TypeAdapter(bool | int | float | dict[str, str] | None, config=ConfigDict(strict=True))
_TASKS = tuple(kind.upstream_name for kind in MODEL_TYPES.values())


class StrictModel(BaseModel):
    """Refuses unknown keys and values of another type. A text under a field is its description."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


def _sampling_field(name: str, value: Any) -> tuple[Any, Any]:
    """Pydantic's field for one of `Sampling.flat`, with bounds by its type; `Sampling` checks the rest."""
    bounds = {bool: {}, int: {"ge": 0, "le": 10_000}, float: {"ge": 0, "le": 10}}[type(value)]
    of = "of the code predictor" if name.startswith("predictor_") else "of the talker"
    if name == "repetition_penalty":  # one next to 0 makes scores infinite
        bounds, of = {"ge": 0.1, "le": 10}, "of codes that were drawn before, 1 = off"
    return type(value) | None, Field(None, description=f"{of}; left out: the checkpoint's", **bounds)


_SAMPLING: dict[str, Any] = {name: _sampling_field(name, value) for name, value in Sampling().flat().items()}
SamplingParams: Any = create_model("SamplingParams", __base__=StrictModel, **_SAMPLING)


class VoiceParams(SamplingParams):
    """The voice and its manner; every key may be left out."""

    language: str = Field("auto", description="auto, or a language of the checkpoint: english, en or en-US")
    speaker: str | None = Field(None, description="a speaker of GET /health; left out: the server's first")
    instruct: str | None = Field(None, min_length=1, description="how to say it; what the voice is like (voice_design)")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="repeats a draw; left out: X-Seed has the one drawn")
    max_frames: int | None = Field(None, ge=1, description="of audio; left out: the server's limit")
    trim_lead: bool = Field(False, description="leave out the silence before the first audible 10 ms, but 40 ms")
    markup: Markup = Field("speak", description="strip: Markdown, HTML and TeX are taken out")
    word_timestamps: bool = Field(False, description="say when each word is said, by an estimate from the sound")
    pronunciations: dict[str, str] | None = Field(None, max_length=1_000)
    """what is said, by the word: {"nginx": "engine X"}; whole words only"""


class SpeechRequest(VoiceParams):
    """Body of POST /tts/stream."""

    text: str = Field(min_length=1, description="what to say")


def _nullable(schema: dict[str, Any]) -> None:
    """Says that every key that may be left out may be null."""
    for name, one in schema["properties"].items():
        if name not in schema["required"] and "anyOf" not in one:
            schema["properties"][name] = {"anyOf": [one, {"type": "null"}]}


class OpenAISpeechRequest(VoiceParams):
    """Body of POST /v1/audio/speech: OpenAI's keys, ours, and those of other servers of this model. A null is as
    leaving the key out. What is not known, or changes nothing, is ignored: X-Mktts-Ignored names it."""

    model_config = ConfigDict(extra="allow", json_schema_extra=_nullable)

    input: str = Field(min_length=1, description="what to say")
    model: str | None = Field(None, description="any name: the process has one model, which GET /v1/models names")
    speaker: str | None = Field(None, alias="voice", description="a name of GET /v1/audio/voices; left out: default")
    instruct: str | None = Field(None, alias="instructions", description="how to say it; the voice (VoiceDesign)")
    response_format: StreamFormat | None = None
    """left out: mp3. opus: in Ogg; aac: ADTS; pcm: 16 bits, little endian; mulaw (or ulaw), alaw: G.711, no header"""
    speed: float | None = Field(None, ge=MIN_SPEED, le=MAX_SPEED, description="2: half the time, at the same pitch")
    stream_format: Literal["audio", "sse"] | None = None
    """sse: server-sent events speech.audio.delta and speech.audio.done; left out: audio"""
    stream: bool | None = Field(None, description="false: the whole at once, with its length; left out: as it is made")
    sample_rate: Literal[_RATES_HZ] | None = Field(None, description=f"Hz; left out: {SAMPLE_RATE_HZ}, of G.711 8000")
    strict: bool | None = Field(None, description="true: what would be ignored is refused; left out: as the server")
    max_new_tokens: int | None = Field(None, ge=1, description="as max_frames; beyond the server's limit: the limit")
    non_streaming_mode: bool | None = None
    """the prompt's layout: the whole text before the speech, or along with it; not how the answer comes"""
    task_type: Literal[_TASKS] | None = Field(None, description="must be what the checkpoint is")
    ref_audio: str | None = Field(None, description="a recording to clone: base64, a data: URL, or a voice's name")
    ref_text: Transcript = Field(None, description="what is said in ref_audio; left out: its speaker's sound alone")
    x_vector_only_mode: bool | None = Field(None, description="true: the speaker's sound alone, whatever ref_text says")
    temperature: float | None = Field(None, ge=0, le=10, description="of the talker; 0: greedy")
    top_k: int | None = Field(None, ge=-1, le=10_000, description="of the talker; 0 or -1: off")

    @model_validator(mode="before")
    @classmethod
    def _translated(cls, given: Any) -> Any:
        """Without nulls, and other servers' names and values as ours."""
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
            given["voice"] = voice["id"]  # OpenAI's other form
        if isinstance(recording, list) and len(recording) == 1:
            given["ref_audio"] = recording[0]  # vLLM-Omni's
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
        """Numbers, true, false, null and objects as JSON has them, but for keys whose value is a text."""
        found = dict(given)
        fields = cls.model_fields.items()
        texts = {field.alias or name for name, field in fields if field.annotation in (str, str | None)}
        for key, word in given.items():
            if _OTHER_NAMES.get(key, key) not in texts:
                with contextlib.suppress(ValueError):  # any other word
                    found[key] = _VALUE.validate_json(word)
        return found


class VoiceUpload(BaseModel):
    """Form of POST /v1/audio/voices."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="letters, digits and _.-, in any case")
    consent: str = Field(pattern=r"\S", max_length=2_000, description="a statement that the speaker agrees, or its id")
    audio_sample: UploadFile = Field(description="the recording")
    ref_text: Transcript = Field(None, description="what is said in it; left out: the speaker's sound alone")
    speaker_description: str | None = Field(None, max_length=2_000)
    language: str | None = Field(None, description="changes nothing: a voice speaks every language")
    expires_in_s: int | None = Field(None, ge=1, description="until it is deleted; left out: the server's limit")
    type: Literal["audio_sample"] = Field("audio_sample", description="OpenAI's name of this way of making a voice")


class ErrorDetail(StrictModel):
    """OpenAI's error object.

    type: invalid_request_error, rate_limit_error (429) or server_error. code: for programs. param: the wrong key.
    request_id: X-Request-Id of the request, or the id of the stream. streams_max: capacity in streams, where busy."""

    message: str
    type: str
    param: str | None
    code: str
    request_id: str | None = None
    streams_max: int | None = None

    def shown(self) -> dict[str, str | int | None]:
        """The body as clients of OpenAI's shape get it: streams_max only where there is something to say."""
        return self.model_dump(exclude={"streams_max"} if self.streams_max is None else None)


class ErrorBody(StrictModel):
    error: ErrorDetail


class StreamState(StrictModel):
    """What became of one utterance. frames, audio_s: handed to the connection. first_audio_ms: from the request (or
    the first text, over WebSocket) to the first PCM on the host. words: where word_timestamps asked for them, seconds
    from the first sample on; of the last streams only."""

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
    aliases: more names for the speakers; uploads: whether callers may have more voices. streams_max: listeners that are
    admitted at once; capacity: how that is known; streams_open: with or without a listener."""

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


# ---- WebSocket: what a client sends


class Start(VoiceParams):
    """text: all of it, where it is known; no `text` or `finish` follows."""

    type: Literal["start"]
    text: str | None = Field(None, min_length=1)


class Text(StrictModel):
    type: Literal["text"]
    text: str


class End(StrictModel):
    """finish: no more text comes. cancel: nor is any more to be spoken."""

    type: Literal["finish", "cancel"]


ClientMessage = Annotated[Start | Text | End, Field(discriminator="type")]
