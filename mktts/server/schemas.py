"""The shapes of requests, answers and WebSocket messages: what a client may rely on.

What depends on the loaded checkpoint and the limits (names, maxima) is checked by `mktts.server.studio` and written
into the OpenAPI document by `mktts.server.document`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from mktts.model.sampling import MAX_SEED

Route = Literal["tts_stream", "openai_speech", "tts_ws", "omni_ws", "nari_ws"]
State = Literal["running", "ended"]
EndReason = Literal["eos", "max_frames", "runaway", "cancelled", "error"]


class StrictModel(BaseModel):
    """Unknown keys and values of a neighbouring type are refused: a misspelt setting must not be dropped silently."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Draws(StrictModel):
    """How codes are drawn; every key may be left out. The names are those of `Sampling.flat`."""

    greedy: bool | None = Field(
        None, description="no draw: temperature, top_k and top_p have no effect; left out: as the checkpoint"
    )
    temperature: float | None = Field(None, gt=0, le=10, description="of the talker; left out: the checkpoint's")
    top_k: int | None = Field(None, ge=0, le=10_000, description="of the talker, 0 = off; left out: the checkpoint's")
    top_p: float | None = Field(None, gt=0, le=1, description="of the talker; left out: the checkpoint's")
    repetition_penalty: float | None = Field(None, ge=0.1, le=10, description="1 = off; left out: the checkpoint's")
    predictor_greedy: bool | None = Field(None, description="as greedy, of the code predictor; left out: as greedy")
    predictor_temperature: float | None = Field(None, gt=0, le=10, description="left out: the checkpoint's")
    predictor_top_k: int | None = Field(None, ge=0, le=10_000, description="0 = off; left out: the checkpoint's")
    predictor_top_p: float | None = Field(None, gt=0, le=1, description="left out: the checkpoint's")


class Manner(Draws):
    """Who speaks and how; every key may be left out."""

    language: str = Field("auto", description="auto, or a language of the checkpoint: english, en or en-US")
    speaker: str | None = Field(None, description="a speaker of GET /health; left out: the server's first")
    instruct: str | None = Field(None, min_length=1, description="how to say it; what the voice is like (voice_design)")
    seed: int | None = Field(None, ge=0, le=MAX_SEED, description="repeats a draw; left out: X-Seed has the one drawn")
    max_frames: int | None = Field(None, ge=1, description="of audio; left out: the server's limit")
    trim_lead: bool = Field(False, description="leave out the silence before the first audible 10 ms, but 40 ms")


class SpeechRequest(Manner):
    """Body of POST /tts/stream."""

    text: str = Field(min_length=1, description="what to say")


class ErrorDetail(StrictModel):
    """OpenAI's error object. type: invalid_request_error, rate_limit_error (of a 429) or server_error. code: for
    programs. param: the wrong key. request_id: of the request (X-Request-Id), or of the utterance. streams_max: where
    every place is taken, about how many streams are carried at once."""

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
    streams_max: that are listened to in real time at once, about; streams_open: whether anybody listens or not."""

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
    """consent: the statement, as it was sent. created_at, expires_at: seconds since 1970. mime_type, file_size: of the
    recording, which is not kept."""

    name: str
    consent: str
    created_at: int
    expires_at: int
    mime_type: str
    file_size: int
    ref_text: str | None
    speaker_description: str | None


class KeptVoice(StrictModel):
    """An upload that was kept, in OpenAI's shape and, under `voice`, in vLLM-Omni's."""

    object: Literal["audio.voice"] = "audio.voice"
    id: str
    name: str
    created_at: int
    success: Literal[True] = True
    voice: UploadedVoice


class Deleted(StrictModel):
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


class Start(Manner):
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


# ---- WebSocket: what the server sends, besides binary PCM


class Started(StrictModel):
    type: Literal["started"] = "started"
    id: str
    seed: int
    sample_rate_hz: int
    sample_format: Literal["s16le"] = "s16le"
    channels: Literal[1] = 1
    random_weights: bool


class ChunkTimings(StrictModel):
    """Milliseconds, as mktts.speech.options.Timings."""

    ready_ms: float
    prefill_ms: float
    talker_ms: float
    predictor_ms: float
    codec_ms: float


class ChunkNote(StrictModel):
    """Comes before the binary message it is about."""

    type: Literal["chunk"] = "chunk"
    id: str
    start_s: float
    duration_s: float
    frames: int
    timings: ChunkTimings


class Finished(StreamState):
    type: Literal["finished"] = "finished"


class Refused(ErrorBody):
    """A `start` that was refused, or (before the connection is closed) a message that makes no sense."""

    type: Literal["error"] = "error"
    retry_after_s: int | None = None
