"""A server as a source of streams: one that the test writes by hand, so that what its listeners meet is known."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from mktts.audio import from_pcm16, to_pcm16
from mktts.cli import main
from mktts.errors import BusyError, EngineError, MetricsError
from mktts.measure.load.http import HttpSource, endpoint
from mktts.spec import SAMPLE_RATE_HZ

SOUND = to_pcm16(np.repeat(np.float32([0.0, 0.1]), SAMPLE_RATE_HZ // 10))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm;rate=24000\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\nContent-Length: %d\r\n\r\n"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nRetry-After: 1\r\n\r\n{}"
Answer = Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """A server on a socket of this machine that answers every POST so, and every GET with 404. Yields its address."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await answer(writer, await reader.readexactly(int(length.split(b":")[1])))
        await writer.drain()
        writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(handle, "127.0.0.1", 0), loop).result()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def heard(source: HttpSource) -> tuple[np.ndarray, int]:
    """The PCM and the frames of an answer, whose first chunk has neither."""
    chunks = [chunk async for chunk in source.stream("Hello.", max_frames=5)]
    assert not len(chunks[0].pcm) and not chunks[0].frames
    return np.concatenate([chunk.pcm for chunk in chunks]), sum(chunk.frames for chunk in chunks)


@pytest.mark.parametrize(
    ("url", "route"),
    [
        ("http://a:8000", "http://a:8000/v1/audio/speech"),
        ("a:8000/", "http://a:8000/v1/audio/speech"),
        ("https://a.example/tts/v1/", "https://a.example/tts/v1/audio/speech"),
        ("https://a.example/v1/audio/speech", "https://a.example/v1/audio/speech"),
    ],
)
def test_the_route_of_an_address(url, route):
    assert endpoint(url) == route


@pytest.mark.parametrize("url", ["ftp://a", "http://", ""])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(MetricsError, match="--url takes"):
        endpoint(url)


@pytest.mark.parametrize("in_chunks", [True, False])
async def test_pieces_of_any_length_are_one_speech(in_chunks):
    asked = []

    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        asked.append(json.loads(body))
        writer.write(HEAD if in_chunks else SIZED % len(SOUND))
        for start in range(0, len(SOUND), 333):  # samples and windows are cut
            piece = SOUND[start : start + 333]
            writer.write(chunked(piece) if in_chunks else piece)
            await writer.drain()
        writer.write(chunked(b"") if in_chunks else b"")

    with serving(answer) as url:
        pcm, frames = await heard(HttpSource(endpoint(url), "key", {"voice": "a"}, ("max_frames",)))
    assert np.array_equal(pcm, from_pcm16(SOUND)) and frames == 2
    assert asked == [{"voice": "a", "max_frames": 5, "input": "Hello."}]


@pytest.mark.parametrize(
    ("sent", "error", "said"),
    [
        (BUSY, BusyError, "429"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nwhy?", EngineError, "400: why?"),
        (HEAD + chunked(SOUND[:960]), EngineError, "broke off"),
        (SIZED % len(SOUND) + SOUND[:960], EngineError, "broke off"),
        (HEAD + chunked(b""), EngineError, "no sound"),
        (HEAD + b"what?\r\n\r\n", EngineError, "no HTTP"),
        (b"SSH-2.0\r\n", EngineError, "no HTTP"),
        (b"SSH-2.0\r\n\r\n", EngineError, "no HTTP"),
        (HEAD.replace(b"24000", b"16000") + chunked(SOUND), EngineError, "16000 Hz"),
        (HEAD.replace(b"audio/pcm", b"application/json") + chunked(b"{}"), EngineError, "json"),
    ],
)
async def test_what_is_no_speech_has_its_name(sent, error, said):
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(sent)

    with serving(answer) as url:
        with pytest.raises(error, match=said):
            await heard(HttpSource(endpoint(url)))


# ---- the command

QUICK = ["bench", "--load", "--checkpoint", "random:tiny", "--device", "cpu", "--warm-seconds", "0.4"]


def test_a_run_over_sockets_prints_a_table_and_counts_the_refused(capsys):
    came = iter(range(10_000))

    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(HEAD + chunked(SOUND) + chunked(b"") if next(came) % 3 else BUSY)

    with serving(answer) as url:
        words = ["--listeners", "200", "--seconds", "1", "--warm-seconds", "0.4", "--keys", '{"stream": true}']
        assert main(["bench", "--url", url, *words]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    (point,) = document["points"]
    assert point["held"] is False and document["figures"] == {}
    assert point["arrivals"] > 0 and 0.2 * point["arrivals"] <= point["refused"] <= 0.8 * point["arrivals"]
    assert point["in_time"] == point["arrivals"] - point["refused"] and point["underruns"] == 0
    assert not point["errors"] and not point["unanswered"] and 0 < point["ttfb_p50_ms"] <= point["ttfc_p50_ms"]
    assert any("not held" in line and "NOT every listener in time" in line for line in lines)


def test_a_quick_run_in_this_process_gives_a_point_that_says_it_was_not_held(tiny, capsys):
    assert main([*QUICK, "--listeners", "12", "--seconds", "0.5", "--engine", "single"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    (point,) = json.loads(last)["points"]
    assert point["held"] is False and any("not held: cannot be recorded" in line for line in lines)
    assert (point["listeners"], point["engine"], point["codec"], point["context_rows"]) == (12, "single", "full", 32)
    assert point["frames"] > 0 and point["duration_s"] == pytest.approx(0.5, abs=0.5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--url", "http://127.0.0.1:9", "--load"], "name one"),
        ([*QUICK[1:], "--listeners", "2,x"], "whole numbers"),
        ([*QUICK[1:], "--listeners", "0"], "at least 1"),
        ([*QUICK[1:], "--codec-precision", "fast"], "engine='batch'"),
        ([*QUICK[1:], "--peers"], "name one"),
        ([*QUICK[1:], "--seconds", "5", "--into", "load.json"], "at least 60 s"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(words, said, tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not list(tmp_path.iterdir())
