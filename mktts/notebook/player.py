"""Live audio in a notebook: a widget that plays each chunk as soon as the kernel has generated it. It also works
without a front end (papermill, pytest): messages are then dropped, at the cost of microseconds, and `stop_requested`
stays false."""

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

    Use it in `async` cells only: a synchronous loop handles the Stop button only after it has ended.
    stop_requested: whether Stop was pressed; playback stops in the page at once, even if the kernel is busy.
    report: the page's latest message, empty without a front end: kind ("first", "made" once all chunks have arrived,
    "played" once all were played, "stopped"), chunks, gaps (silences within the utterance as heard, whereas
    `mktts.engine.metrics` calculates *underruns*), first_sound_ms (from the first chunk's arrival to the loudspeaker,
    not part of TTFC; None if earlier audio still played), and the audio context's state and rate."""

    _esm = Path(__file__).with_name("player.js")
    sample_rate_hz = traitlets.Int(SAMPLE_RATE_HZ).tag(sync=True)
    stop_requested = traitlets.Bool(False).tag(sync=True)
    status = traitlets.Unicode("live PCM").tag(sync=True)

    def __init__(self) -> None:
        super().__init__()
        self.report: dict[str, Any] = {}
        self.on_msg(self._on_report)

    async def play(self, stream: Any) -> AsyncIterator[Any]:
        """Plays the chunks of a stream as they are generated, and yields them. Stop, an interrupt of the kernel, and
        leaving the loop early cancel the stream and silence the page. Raises AudioError for invalid PCM."""
        self.stop_requested, self.report = False, {}
        self.send({"kind": "begin"})
        try:
            async for chunk in stream:
                if data := to_pcm16(chunk.pcm):
                    self.send({"kind": "pcm"}, buffers=[data])
                yield chunk
                await asyncio.sleep(0)  # lets the kernel handle the Stop button even if more chunks are ready
                if self.stop_requested:
                    stream.cancel()
        except (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            self.stop_requested = True
            stream.cancel()
            raise
        finally:
            self.send({"kind": "end"})  # the page answers with its counters and plays the queued audio

    def _on_report(self, _widget: Any, message: dict[str, Any], _buffers: list[Any]) -> None:
        self.report = dict(message)
