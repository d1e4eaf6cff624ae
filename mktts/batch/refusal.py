"""What a stream that is not admitted is told: what was expected, what came, and what to do."""

from __future__ import annotations

from mktts.batch.admission import Reason, Request
from mktts.batch.pages import Pages
from mktts.common import counted
from mktts.errors import BusyError, CapacityError

_OBSTACLES: dict[Reason, str] = {
    "slots": "every slot is taken",
    "pages": "the memory for keys and values is taken",
    "listeners": "frames for one more listener would come too late for all",
    "first_pcm": "too many prompts wait",
    "most": "as many listen as the settings allow",
    "line": "too many streams wait for a place",
    "waited": "no place came free in time",
    "held": "the streams that are open keep their places and wait for their text or their readers",
}


def too_long(request: Request, pages: Pages) -> CapacityError:
    """Of a stream that could never have its pages."""
    return CapacityError(
        f"a stream of {request.max_rows} positions (prompt and frames) was asked for, one may have "
        f"{pages.rows_per_slot}: shorten the text or lower max_frames"
    )


def refusal(reason: Reason, request: Request, pages: Pages, open_streams: int, carries: int) -> CapacityError:
    """What ends a stream that was refused for `reason`. carries: listeners that would be admitted, about."""
    if reason == "too_long":
        return too_long(request, pages)
    error = BusyError(
        f"refused with {counted(open_streams, 'stream')} open, where about {carries} can be carried at once: "
        f"{_OBSTACLES[reason]}; try again when some have ended, or on another machine"
    )
    error.carries = carries
    return error
