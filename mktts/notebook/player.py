"""Live PCM in a notebook page: a widget that plays each chunk the moment the kernel has made it. Nothing here needs a
browser. Without a front end (papermill, pytest) the messages go nowhere, at the cost of microseconds, and
`stop_requested` stays false."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from mktts.audio import to_pcm16
from mktts.spec import SAMPLE_RATE_HZ


class LivePlayer(anywidget.AnyWidget):
    """Display it, then `async for chunk in player.play(stream)`.

    Use it from `async` cells only: a button pressed while a synchronous loop runs is not seen before the loop ends.
    `stop_requested` turns true when Stop is pressed (playback stops in the page at once, whatever the kernel does).
    `report` holds what the page said last: kind ("first", "made" once all is there, "played" once all was heard,
    "stopped"), chunks, gaps (how often the page fell silent inside the utterance; an *underrun* is the calculation of
    `mktts.engine.metrics`), first_sound_ms (arrival of the first chunk to the loudspeaker, None behind audio that still
    plays; never part of TTFC), the audio context's state and rate. It is empty without a front end."""

    _esm = Path(__file__).with_name("player.js")
    sample_rate_hz = traitlets.Int(SAMPLE_RATE_HZ).tag(sync=True)
    stop_requested = traitlets.Bool(False).tag(sync=True)
    status = traitlets.Unicode("live PCM").tag(sync=True)

    def __init__(self) -> None:
        super().__init__()
        self.report: dict[str, Any] = {}
        self.on_msg(self._on_report)

    async def play(self, stream: Any) -> AsyncIterator[Any]:
        """Plays a stream of chunks while it is made and passes the chunks on; Stop cancels the stream. So does an
        interrupt of the kernel, or a loop that is left early: the page falls silent, too. Raises AudioError for what is
        no PCM."""
        self.stop_requested, self.report = False, {}
        self.send({"kind": "begin"})
        try:
            async for chunk in stream:
                if data := to_pcm16(chunk.pcm):
                    self.send({"kind": "pcm"}, buffers=[data])
                yield chunk
                await asyncio.sleep(0)  # lets the kernel see the Stop button even where chunks are waiting
                if self.stop_requested:
                    stream.cancel()
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            self.stop_requested = True
            stream.cancel()
            raise
        finally:
            self.send({"kind": "end"})  # the page answers with its counters and plays out what is queued

    def _on_report(self, _widget: Any, message: dict[str, Any], _buffers: list[Any]) -> None:
        self.report = dict(message)
