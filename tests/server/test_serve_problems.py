"""What a request is answered that the engine did not take."""

from __future__ import annotations

import json

import pytest

from mktts.errors import BusyError, CapacityError
from mktts.server.problems import from_error


@pytest.mark.parametrize(
    ("error", "status", "code", "again"),
    [(BusyError("every slot is taken"), 429, "busy", True), (CapacityError("too long"), 422, "text_too_long", False)],
)
def test_no_place_is_not_the_callers_mistake(error, status, code, again):
    response = from_error(error).response()
    detail = json.loads(response.body)["error"]
    assert (response.status_code, detail["code"], detail["message"]) == (status, code, str(error))
    assert ("retry-after" in response.headers) == again
