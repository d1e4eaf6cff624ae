"""What a request is answered that the engine did not take."""

from __future__ import annotations

import json

import pytest

from mktts.errors import BusyError, CapacityError
from mktts.server.api_errors import from_error


@pytest.mark.parametrize(
    ("error", "status", "code", "again", "kind"),
    [
        (BusyError("every slot is taken"), 429, "busy", True, "rate_limit_error"),
        (CapacityError("too long"), 422, "text_too_long", False, "invalid_request_error"),
        (ZeroDivisionError("a secret"), 500, "engine_error", False, "server_error"),
    ],
)
def test_no_place_is_not_the_callers_mistake(error, status, code, again, kind):
    response = from_error(error).response()
    detail = json.loads(response.body)["error"]
    assert (response.status_code, detail["code"], detail["type"]) == (status, code, kind)
    assert (detail["message"] == str(error)) == (status < 500) and "secret" not in detail["message"]
    assert ("retry-after" in response.headers) == again
