"""`python -m mktts bench --url`: a server that the test writes by hand, so that what its listeners meet is known."""

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
from mktts.measure.bench.load import book
from mktts.measure.bench.load.attendance import Attendance, Mark
from mktts.measure.bench.load.fleet import merged
from mktts.measure.bench.load.listener import Listener
from mktts.measure.bench.load.remote import RemoteServer, endpoint
from mktts.measure.bench.load.served import figures
from mktts.measure.bench.load.visits import Visit
from mktts.spec import SAMPLE_RATE_HZ

SILENCE = np.zeros(SAMPLE_RATE_HZ // 10, np.float32)
TONE = np.full(SAMPLE_RATE_HZ // 10, 0.1, np.float32)
SOUND = to_pcm16(np.concatenate((SILENCE, TONE)))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm;rate=24000\r\nTransfer-Encoding: chunked\r\n\r\n"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nRetry-After: 1\r\n\r\n{}"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextmanager
def serving(answer: Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]) -> Iterator[str]:
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


async def heard(url: str, **body: object) -> Listener:
    listener = Listener(0.0)
    clock = iter(range(1, 1_000))
    async for chunk in RemoteServer(endpoint(url), body).stream("Hello."):
        listener.hear(float(next(clock)), chunk.pcm, chunk.frames)
    return listener


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


async def test_pieces_of_any_length_are_one_speech_and_its_onset_is_found():
    asked = []

    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        asked.append(json.loads(body))
        writer.write(HEAD)
        for start in range(0, len(SOUND), 333):  # samples and windows are cut
            writer.write(chunked(SOUND[start : start + 333]))
            await writer.drain()
        writer.write(chunked(b""))

    with serving(answer) as url:
        pcm, frames = [], 0
        async for chunk in RemoteServer(endpoint(url), {"voice": "a"}).stream("Hello."):
            pcm.append(chunk.pcm)
            frames += chunk.frames
    assert np.array_equal(np.concatenate(pcm), from_pcm16(SOUND))
    assert sum(map(len, pcm)) == len(SOUND) // 2 and frames == 2 and asked == [{"voice": "a", "input": "Hello."}]


def test_the_onset_is_found_however_the_sound_is_cut():
    pcm = np.concatenate((SILENCE, TONE))
    for size in (7, 239, 240, 241, 1_000, len(pcm)):
        listener = Listener(0.0)
        for start in range(0, len(pcm), size):
            listener.hear(5.0, pcm[start : start + size], 0)
        assert listener.audible_s == pytest.approx(5.1, abs=1e-6), size
        assert listener.dry_s == pytest.approx(5.2) and not listener.gaps


@pytest.mark.parametrize(
    ("sent", "error", "said"),
    [
        (BUSY, BusyError, "429"),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 4\r\n\r\nwhy?", EngineError, "400: why?"),
        (HEAD + chunked(SOUND[:960]), EngineError, "broke off"),
        (HEAD + chunked(b""), EngineError, "no sound"),
        (b"SSH-2.0\r\n", EngineError, "no HTTP"),
        (HEAD.replace(b"24000", b"16000") + chunked(SOUND), EngineError, "16000 Hz"),
        (HEAD.replace(b"audio/pcm", b"application/json") + chunked(b"{}"), EngineError, "json"),
    ],
)
async def test_what_is_no_speech_has_its_name(sent, error, said):
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(sent)

    with serving(answer) as url:
        with pytest.raises(error, match=said):
            await heard(url)


def test_a_run_over_sockets_prints_a_table_and_counts_the_refused(capsys):
    came = iter(range(10_000))

    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(BUSY if next(came) % 2 else HEAD + chunked(SOUND) + chunked(b""))

    with serving(answer) as url:
        words = ["--listeners", "200", "--seconds", "1", "--warm-seconds", "0.4", "--processes", "1"]
        assert main(["bench", "--url", url, *words, "--keys", '{"stream": true}']) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    (point,) = document["points"]
    assert point["held"] is False and document["figures"] == {}
    assert point["arrivals"] > 0 and 0.2 * point["arrivals"] <= point["refused"] <= 0.8 * point["arrivals"]
    assert not point["errors"] and not point["unanswered"] and point["underruns"] == 0
    assert point["ttfb_p50_ms"] > 0 and {"ttfb_p95_ms", "ttfb_p99_ms", "audible_p50_ms"} <= set(point)
    assert any("not held" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--url", "ftp://a"], "--url takes"),
        (["--url", "http://127.0.0.1:9", "--load"], "name one"),
    ],
)
def test_what_cannot_be_measured_is_one_line(words, said, capsys):
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def point(listeners: int, **other: object) -> dict[str, object]:
    whole = {"held": True, "underruns": 0, "refused": 0, "unanswered": 0, "errors": 0, "arrivals": 100}
    spreads = {
        "ttfb_p99_ms": 50.0,
        "audible_p95_ms": 80.0,
        "open_mean": 1.0,
        "playing_mean": listeners + 0.5,
        "listeners": listeners,
    }
    return {**whole, **spreads, "duration_s": 60.0, **other}


def test_a_load_counts_only_where_everybody_was_in_time_for_all_of_it():
    for wrong in (
        {"underruns": 1}, {"refused": 1}, {"errors": 1}, {"unanswered": 1}, {"held": False}, {"ttfb_p99_ms": 121.0},
        {"ttfb_p99_ms": None},
    ):  # fmt: skip
        found = figures([point(768), point(1_536, **wrong)], gpu=True)
        assert {name: value["value"] for name, value in found.items()} == {
            "listeners": 768, "ttfb_p99_ms": 50.0, "underruns": 0, "refused": 0,
        }  # fmt: skip
        assert figures([point(768, **wrong)], gpu=True) == {}
    assert figures([point(12, ttfb_p99_ms=300.0)], gpu=False)["listeners"]["value"] == 12
    assert figures([point(12, audible_p95_ms=501.0)], gpu=False) == {}
    few = figures([point(12, playing_mean=10.7)], gpu=False)["listeners"]
    assert (few["value"], few["offered"]) == (10.7, 12)  # their speech was shorter than planned


def test_figures_of_a_server_take_the_place_of_those_before(tmp_path):
    whole = dict.fromkeys(("offered_rps", "ttfc_p50_ms", "ttfc_p95_ms", "ttfc_p99_ms"), 1.0)
    whole |= {"codec": "the server's", "deterministic": False, "engine": "server", "context_rows": 0, "model_size": ""}
    beside = {"revision": "r", "device": "d", "driver": None, "torch": "t", "date": "now", "command": "c"}
    path = tmp_path / "serve_load.json"
    for load in (768, 1_536):
        document = book.merge(path, beside, True, [{**point(load), **whole}], derive=figures)
        assert document["figures"]["listeners"]["value"] == load
    assert set(document["figures"]) == {"listeners", "ttfb_p99_ms", "underruns", "refused"}
    assert [one["listeners"] for one in document["points"]] == [768, 1_536]


def test_what_several_processes_saw_is_one_attendance():
    parts = []
    for number in range(2):
        mark = Mark(10.0 + number, 5, 2, 1.0, 0.5)
        seen = Attendance(begin=mark, end=Mark(70.0, 10, 4, 2.0, 1.0), closed_s=72.0 + number, hung=number)
        seen.visits = [Visit(index, float(index), 25) for index in (number, number + 2)]
        seen.listeners = [Listener(float(index)) for index in (number, number + 2)]
        seen.lag_ms[3] = 1
        parts.append(seen)
    whole = merged(parts)
    assert [visit.index for visit in whole.visits] == [0, 1, 2, 3] == [one.planned_s for one in whole.listeners]
    assert (whole.begin.at_s, whole.end.frames, whole.closed_s, whole.hung) == (10.5, 20, 73.0, 1)
    assert whole.lag_ms[3] == 2 and len(whole.lag_ms) == len(parts[0].lag_ms)
    parts[1].end = None
    assert merged(parts).end is None
