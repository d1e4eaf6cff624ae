"""Everything that can go wrong with a request, as one shape: OpenAI's error object with a status."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.responses import Response

from mktts.errors import (
    BusyError,
    CapacityError,
    MkttsError,
    OptionsError,
    PromptError,
    SamplingError,
    TextError,
    VoiceError,
)
from mktts.server.access.request_id import HEADER, current_id
from mktts.server.schemas import ErrorDetail

RETRY_AFTER_S = 1  # a stream ends every few seconds; a client that asks once a second loses little
_CALLERS = {
    TextError: ("bad_text", "text"),
    PromptError: ("bad_prompt", None),
    OptionsError: ("bad_option", None),
    SamplingError: ("bad_sampling", None),
    VoiceError: ("bad_voice", "speaker"),
    CapacityError: ("text_too_long", "text"),
}


class Problem(MkttsError):
    """status: of HTTP. code: for programs. param: the key that is wrong. retry_after_s: when asking again may help.
    streams_max: see ErrorDetail."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        retry_after_s: int | None = None,
        streams_max: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        self.streams_max = streams_max

    def detail(self, id: str | None = None) -> ErrorDetail:
        """id: of the utterance that it ended; None takes that of the request."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return ErrorDetail(
            message=str(self),
            type=kind if self.status < 500 else "server_error",
            param=self.param,
            code=self.code,
            request_id=id or current_id(),
            streams_max=self.streams_max,
        )

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        detail = self.detail((headers or {}).get(HEADER))
        more = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        more |= {} if detail.request_id is None else {HEADER: detail.request_id}
        # ASCII: a message may quote a name that has half a surrogate pair in it
        body = json.dumps({"error": detail.shown()}, ensure_ascii=True)
        return Response(body, self.status, {**more, **(headers or {})}, media_type="application/json")


def from_error(error: BaseException) -> Problem:
    """The caller's mistakes with their message; anything else as a failure whose message stays in the log."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, BusyError):
        return Problem(429, "busy", str(error), retry_after_s=RETRY_AFTER_S, streams_max=error.carries)
    for kind, (code, param) in _CALLERS.items():
        if isinstance(error, kind):
            return Problem(422, code, str(error), param)
    return Problem(500, "engine_error", "the generation failed: the server's log says why, under the stream's id")


def from_validation(errors: list[Any], tagged: bool = False) -> Problem:
    """The first of pydantic's errors. What was sent is not repeated. tagged: each key stands after its message's type,
    which is no part of its name."""
    first = errors[0]
    path = [str(part) for part in first["loc"] if part != "body"]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "json_invalid":  # its place is one in the text, not a key
        reason = first.get("ctx", {}).get("error", message)
        where = f" at character {path[0]}" if path else ""
        return Problem(422, "invalid_json", f"expected JSON, could not read it{where}: {reason}")
    if tagged:
        path = path[1:]
    what = ".".join(path) or "the body"
    return Problem(422, "invalid_value", f"{what}: {message}", ".".join(path) or None)
