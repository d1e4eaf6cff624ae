"""Errors of the API: OpenAI's error object with an HTTP status, and the id of the request that it belongs to."""

import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from fastapi.responses import Response

from mktts import errors
from mktts.server.schemas import ErrorDetail

REQUEST_ID_HEADER = "X-Request-Id"
RETRY_AFTER_S = 1  # a stream ends every few seconds; a client that asks once a second loses little
current_id: ContextVar[str | None] = ContextVar("mktts_request_id", default=None)
_OPENAI_KEYS = {"text": "input", "instruct": "instructions", "speaker": "voice"}  # its names of our keys
_BY_ERROR = {
    errors.TextError: ("bad_text", "text"),
    errors.PromptError: ("bad_prompt", None),
    errors.OptionsError: ("bad_option", None),
    errors.SamplingError: ("bad_sampling", None),
    errors.VoiceError: ("bad_voice", "speaker"),
    errors.CapacityError: ("text_too_long", "text"),
}


@dataclass(eq=False)
class ApiError(errors.MkttsError):
    """status: of HTTP. code: for programs. param: the wrong key. streams_max: see ErrorDetail."""

    status: int
    code: str
    message: str
    param: str | None = None
    streams_max: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def retry_after_s(self) -> int | None:
        """When the same request may succeed; None where it will not."""
        return RETRY_AFTER_S if self.status in (429, 503) else None

    def in_openai_terms(self) -> "ApiError":
        """The error of a route of OpenAI's shape: status 400, and the caller's names of our keys."""
        name, message = _OPENAI_KEYS.get(self.param or "", self.param), self.message
        if self.param and message.startswith(self.param):
            message = f"{name}{message.removeprefix(self.param)}"
        return replace(self, status=400 if self.status == 422 else self.status, message=message, param=name)

    def detail(self, id: str | None = None) -> ErrorDetail:
        """id: of the stream that it ended; None takes that of the request."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        kind = kind if self.status < 500 else "server_error"
        said = {"message": self.message, "param": self.param, "code": self.code, "streams_max": self.streams_max}
        return ErrorDetail(type=kind, request_id=id or current_id.get(), **said)

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        detail = self.detail()
        more = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        more |= {} if detail.request_id is None else {REQUEST_ID_HEADER: detail.request_id}
        # ASCII: a message may quote a name that has half a surrogate pair in it
        body = json.dumps({"error": detail.shown()})
        return Response(body, self.status, {**more, **(headers or {})}, media_type="application/json")


def from_error(error: BaseException) -> ApiError:
    """The caller's mistakes with their message; anything else as a failure whose message stays in the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, errors.BusyError):
        return ApiError(429, "busy", str(error), streams_max=error.capacity)
    for kind, (code, param) in _BY_ERROR.items():
        if isinstance(error, kind):
            return ApiError(422, code, str(error), param)
    return ApiError(500, "engine_error", "the generation failed: the server's log says why, under the stream's id")


def from_validation(errors: list[Any], tagged: bool = False) -> ApiError:
    """The first of pydantic's errors, without the input. tagged: the message's type stands before each key."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query")]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":  # its place is one in the text, not a key
        reason = first.get("ctx", {}).get("error", message)
        where = f" at character {path[0]}" if path else ""
        return ApiError(422, "invalid_json", f"expected JSON, could not read it{where}: {reason}")
    key = ".".join(path[1:] if tagged else path)
    return ApiError(422, "invalid_value", f"{key or 'the body'}: {message}", key or None)
