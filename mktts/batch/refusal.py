"""What a stream that is not admitted is told: what was expected, what came, and what to do."""

from __future__ import annotations

from mktts.batch.admission import Reason, Request
from mktts.batch.pages import Pages

_OBSTACLES: dict[Reason, str] = {
    "slots": "every slot is taken",
    "pages": "the memory for keys and values is taken",
    "listeners": "frames for one more listener would come too late for all",
    "first_pcm": "too many prompts wait",
    "line": "too many streams wait for a place",
    "waited": "no place came free in time",
}


def refusal(reason: Reason, request: Request, pages: Pages, open_streams: int) -> str:
    """The message of the CapacityError or BusyError that ends a stream which was refused for `reason`."""
    if reason == "too_long":
        return (
            f"a stream of {request.max_rows} positions (prompt and frames) was asked for, one may have "
            f"{pages.rows_per_slot}: shorten the text or lower max_frames"
        )
    return (
        f"refused with {open_streams} streams open: {_OBSTACLES[reason]}; try again when some have ended, or on "
        "another machine"
    )
