"""The live player, without a front end: what it sends to the page, and the page's script beside it."""

import asyncio
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mktts.errors import MkttsError
from mktts.notebook import player

JS = Path(player.__file__).with_name("player.js")


@pytest.fixture
def live():
    """A player that keeps what it would have sent to the page."""
    widget = player.LivePlayer()
    sent = []
    widget.send = lambda content, buffers=None: sent.append((content["kind"], b"".join(buffers or [])))
    return widget, sent


class FakeStream:
    """Chunks of these samples, and then silence where it is `endless`."""

    def __init__(self, *chunks: np.ndarray, endless: bool = False) -> None:
        self.chunks = chunks or [np.zeros(4, np.float32)] * 5
        self.endless, self.cancelled = endless, False

    def cancel(self):
        self.cancelled = True

    async def __aiter__(self):
        for pcm in self.chunks:
            if self.cancelled:
                return
            yield SimpleNamespace(pcm=pcm)
        await asyncio.sleep(60 if self.endless else 0)


async def test_every_chunk_is_passed_on_and_sent_as_one_buffer_and_a_stop_cancels_the_stream(live):
    widget, sent = live
    stream = FakeStream(*(np.full(3, value, np.float32) for value in (0.0, 0.25, 0.5)), np.zeros(0, np.float32))
    chunks = [chunk async for chunk in widget.play(stream)]
    assert [float(c.pcm.sum()) for c in chunks] == [0.0, 0.75, 1.5, 0.0]
    assert [kind for kind, _ in sent] == ["begin", *["pcm"] * 3, "end"]
    assert [np.frombuffer(data, "<i2").tolist() for _, data in sent[1:4]] == [[0] * 3, [8192] * 3, [16384] * 3]
    with pytest.raises(MkttsError, match="int16"):
        [chunk async for chunk in widget.play(FakeStream(np.zeros(3, np.int16)))]
    stream, heard = FakeStream(), 0
    async for _ in widget.play(stream):
        heard += 1
        stop = widget.set_trait, "stop_requested", True
        asyncio.get_running_loop().call_soon(*stop)  # as a button's message: seen when the loop yields
    assert stream.cancelled and heard < 5 and sent[-1][0] == "end"


async def test_an_interrupt_or_a_loop_left_early_silences_the_page_and_ends_the_stream(live):
    widget, sent = live
    stream = FakeStream(endless=True)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):  # a timeout cancels the task, as an interrupt does
            async for _ in widget.play(stream):
                pass
    assert widget.stop_requested and stream.cancelled and sent[-1][0] == "end"
    stream = FakeStream()
    playing = widget.play(stream)
    await anext(playing)
    assert not widget.stop_requested
    await playing.aclose()
    assert widget.stop_requested and stream.cancelled and sent[-1][0] == "end"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_script_schedules_chunks_back_to_back_and_counts_underruns():
    command = ["node", str(Path(__file__).with_name("player_harness.mjs")), str(JS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
