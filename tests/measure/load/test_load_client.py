"""A listener's arithmetic, the figures of a run, listeners on their event loop, and a server as a source of streams."""

import asyncio
import gc
import json
import math
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from load_document import BESIDE, load_file
from load_document import point as recorded

from mktts.audio import from_pcm16, to_pcm16
from mktts.checkpoint import open_checkpoint
from mktts.cli import main
from mktts.errors import BusyError, CapacityError, EngineError, MetricsError, OptionsError
from mktts.measure.load.client import HttpSource, Listener, LoadRun, Moment, clean, endpoint, hold, measured
from mktts.measure.load.command import carried, merge
from mktts.measure.load.settings import SHORT_ROWS, LoadSettings, LoadTexts, texts_for
from mktts.model.prompt import PromptBuilder, Request
from mktts.spec import FRAME_RATE_HZ, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

FRAME_S = 1 / FRAME_RATE_HZ
FRAME = np.full(SAMPLES_PER_FRAME, 0.1, np.float32)
MINUTE = LoadSettings("x")
SAID = LoadTexts(32, "a few words", {})
SOUND = to_pcm16(np.repeat(np.float32([0.0, 0.1]), SAMPLE_RATE_HZ // 10))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm;rate=24000\r\nTransfer-Encoding: chunked\r\n\r\n"
SIZED = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\nContent-Length: %d\r\n\r\n"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\nRetry-After: 1\r\n\r\n{}"
QUICK = ["bench", "--load", "--checkpoint", "random:tiny", "--device", "cpu", "--warm-seconds", "0.4"]
UNCLEAN = [{"underruns": 1}, {"refused": 1}, {"unanswered": 1}, {"errors": 1}, {"held": False}]
SERVER = {"engine": "server", "codec": "the server's", "context_rows": 0}


def played(planned_s: float, chunks: list[tuple[float, int]], ended_s: float = math.inf, **more: object) -> Listener:
    """Opened when planned; chunks: (when they came, frames)."""
    one = Listener(planned_s, opened_s=planned_s, ended_s=ended_s, **more)
    for at_s, frames in chunks:
        one.receive(at_s, np.tile(FRAME, frames), frames)
    return one


def seen_by(listeners: list[Listener], begin_s: float, end_s: float, closed_s: float) -> LoadRun:
    return LoadRun(listeners, Moment(begin_s, 0, 0.0, 0.0), Moment(end_s, 100, 3.0, 1.0), closed_s)


@pytest.mark.parametrize("size", [7, 239, 240, 241, 1_000, 2 * SAMPLES_PER_FRAME])
def test_the_audible_moment_is_when_it_sounds_however_the_sound_is_cut(size):
    pcm, one = np.concatenate((0 * FRAME, FRAME)), Listener(0.0)
    one.receive(1.0, FRAME[:0], 0)  # a first byte, and no first PCM
    assert (one.byte_s, one.first_s) == (1.0, math.inf) and one.gaps_within(0.0, 9.0, 9.0) == []
    for start in range(0, len(pcm), size):
        one.receive(5.0, pcm[start : start + size], 0)
    assert one.audible_s == pytest.approx(5.0 + FRAME_S, abs=1e-6)
    assert one.player.dry_s == pytest.approx(5.0 + 2 * FRAME_S) and not one.gaps


def test_underruns_are_those_whose_player_ran_dry_in_the_held_time_and_the_one_that_still_waits():
    before = played(0.0, [(1.0, 1), (2.5, 1)])  # dry at 1.08, before the held time; again from 2.58 on
    within = played(0.0, [(2.0, 1), (2.5, 1)])
    waiting = played(0.0, [(2.9, 1)])
    over = played(0.0, [(2.9, 1)], ended_s=2.9)
    gaps = [one.gaps_within(2.0, 3.0, 4.0) for one in (before, within, waiting, over)]
    assert [len(found) for found in gaps] == [1, 2, 1, 0]
    lasted = [(2.0 + FRAME_S, 0.5 - FRAME_S), (2.5 + FRAME_S, 1.5 - FRAME_S)]  # it waited, and went on from there
    assert gaps[1] == [pytest.approx(gap) for gap in lasted]
    assert gaps[2] == [(pytest.approx(2.9 + FRAME_S), pytest.approx(4.0 - 2.9 - FRAME_S))]


def test_first_pcm_counts_from_the_plan_and_an_arrival_without_one_is_infinitely_late():
    listeners = [played(10.0 + i, [(10.02 + i, 1)], ended_s=11.0 + i) for i in range(98)]
    listeners[0].opened_s = 10.015  # called late: the wait is still 20 ms
    refused, waiting = played(50.0, [], 50.1, refused=True), played(51.0, [])
    outside = played(5.0, [(9.0, 1)], ended_s=9.0)
    point = measured(seen_by([outside, *listeners, refused, waiting], 10.0, 110.0, 112.0), MINUTE)
    assert (point["arrivals"], point["in_time"], point["refused"], point["unanswered"]) == (100, 98, 1, 1)
    assert (point["ttfc_p50_ms"], point["ttfc_p95_ms"]) == (pytest.approx(20.0), pytest.approx(20.0))
    assert point["ttfc_p99_ms"] is None
    assert point["held"] and not clean(point)
    assert point["audio_s_per_s"] == pytest.approx(100 * FRAME_S / 100)
    assert point["host_us_per_frame"] == pytest.approx(2e4)  # 3 s of the process less 1 s of the loop, 100 frames
    of_subject = {"listeners", "codec", "deterministic", "context", "context_rows", "checkpoint", "model_size"}
    assert set(recorded()) - set(point) == of_subject | {"backend", "dtype"}


def test_means_of_open_streams_and_of_playing_listeners_are_over_the_held_time():
    half, whole = played(5.0, [(5.0, 1)], ended_s=15.0), played(12.0, [(12.0, 25)], ended_s=17.0)
    listeners = [half, whole, played(19.0, [(19.0, 1)]), played(13.0, [], 14.0, refused=True)]
    point = measured(seen_by(listeners, 10.0, 20.0, 21.0), LoadSettings("x", seconds=10.0))
    assert point["open_mean"] == pytest.approx((5 + 5 + 1) / 10)
    assert point["playing_mean"] == pytest.approx((25 * FRAME_S + FRAME_S) / 10)


def test_a_run_that_was_short_or_cut_or_hangs_is_not_held_and_one_that_failed_is_unclean_or_measured_nothing():
    failed = played(1.0, [(1.1, 1)], 1.2, error="EngineError: x")
    seen = seen_by([failed], 0.0, 60.0, 60.0)
    point = measured(seen, MINUTE)
    assert point["held"] and not clean(point)
    assert point["error_kinds"] == {"EngineError: x": 1} and point["in_time"] == 0
    short = seen_by([failed], 0.0, 59.0, 59.0), replace(MINUTE, seconds=59.0)
    cut = replace(seen, end=Moment(59.9, 0, 0.0, 0.0))
    for run, settings in (short, (cut, MINUTE), (replace(seen, hung=1), MINUTE)):
        assert not measured(run, settings)["held"]
    with pytest.raises(MetricsError, match="before the load had been held"):
        measured(LoadRun([failed], Moment(0.0, 0, 0.0, 0.0)), MINUTE)


class Script:
    """Opens in order: an exception at once, or so many chunks and then an exception, "never" or None."""

    def __init__(self, *told: tuple[int, object] | Exception) -> None:
        self.told, self.settings, self.cancelled = told, [], 0

    def stream(self, text: str, **settings: object) -> AsyncIterator[SimpleNamespace]:
        what = self.told[len(self.settings)]
        self.settings.append({"text": text, **settings})
        if isinstance(what, Exception):
            raise what
        return self._chunks(*what)

    async def _chunks(self, chunks: int, end: object) -> AsyncIterator[SimpleNamespace]:
        for _ in range(chunks):
            await asyncio.sleep(0)
            yield SimpleNamespace(pcm=FRAME, frames=1)
        try:
            if end == "never":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
        if isinstance(end, Exception):
            raise end


def test_every_way_a_stream_can_go_is_noted_as_what_it_is_and_the_process_is_as_before(monkeypatch):
    before_s, frozen = sys.getswitchinterval(), gc.get_freeze_count() > 0
    full = CapacityError("full")
    script = Script((3, None), (0, full), (2, full), (1, EngineError("broken")), (0, "never"), full)
    plan = [(0.3, 40 + i) for i in range(6)]  # in the held time however late the machine is
    monkeypatch.setattr(LoadSettings, "arrivals", lambda self, listeners: plan)
    settings = LoadSettings("x", warm_s=0.01, seconds=0.6, tail_s=0.2)
    seen = hold(script, SAID, settings, len(plan))
    whole, refused, late, broken, waits, at_once = seen.listeners
    assert (whole.frames, whole.ended_s < math.inf, whole.error, whole.engine) == (3, True, None, "server")
    assert refused.refused and at_once.refused and refused.first_s == at_once.first_s == math.inf
    assert not late.refused and late.error == "CapacityError: full"  # it had PCM: a stream died
    assert broken.error == "EngineError: broken"
    assert waits.first_s == waits.ended_s == math.inf and waits.error is None and script.cancelled == 1
    assert [call["max_frames"] for call in script.settings] == [40, 41, 42, 43, 44, 45]
    assert [call["seed"] for call in script.settings] == list(range(6))
    assert seen.begin is not None and seen.end.frames - seen.begin.frames == 6 and seen.hung == 0
    point = measured(seen, settings)
    assert (point["arrivals"], point["refused"], point["unanswered"], point["errors"]) == (6, 2, 1, 2)
    assert not point["held"] and point["engine"] == "server" and point["generator"]["loop_late_max_ms"] >= 0
    assert (sys.getswitchinterval(), gc.get_freeze_count() > 0) == (before_s, frozen)


def test_another_thread_can_stop_a_load(monkeypatch):
    monkeypatch.setattr(LoadSettings, "arrivals", lambda self, listeners: [(0.0, 40)])
    script, stopped = Script((0, "never")), threading.Event()
    threading.Timer(0.3, stopped.set).start()
    with pytest.raises(MetricsError, match="stopped"):
        hold(script, SAID, LoadSettings("x", warm_s=0.01, seconds=50.0, tail_s=0.2), 1, stopped)
    assert script.cancelled == 1


def test_arrivals_make_the_offered_load_and_go_on_behind_the_held_time_and_settings_have_bounds():
    settings = LoadSettings("x", seconds=200.0, seed=3)
    plan = settings.arrivals(64)
    assert plan == sorted(plan) == settings.arrivals(64) != LoadSettings("x", seconds=200.0).arrivals(64)
    held_s = [(at_s, frames) for at_s, frames in plan if 8.0 <= at_s < 208.0]
    assert sum(frames for _, frames in held_s) * FRAME_S / 200.0 == pytest.approx(64, rel=0.1)
    assert sum(at_s < 4.0 for at_s, _ in plan) >= 64 and 208.0 < plan[-1][0] < 210.0
    assert all(25 <= frames <= 150 for _, frames in held_s)
    for wrong in ({"seconds": 0}, {"warm_s": 0}, {"codec": "fast"}):
        with pytest.raises(OptionsError):
            LoadSettings("x", **wrong)


@pytest.mark.parametrize("fixture", ["tiny", "tiny_base"])
def test_prompts_have_the_rows_that_are_asked_for(fixture, request):
    checkpoint = request.getfixturevalue(fixture)
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer())

    def rows_of(texts: LoadTexts) -> int:
        text, settings = texts.of(0, 30)
        fields = {name: value for name, value in settings.items() if name in ("voice", "layout")}
        return len(builder.build(Request(text, **fields)).embeds)

    short, long = texts_for(checkpoint, None), texts_for(checkpoint, 332)
    assert short.rows == rows_of(short) == SHORT_ROWS
    assert long.rows == rows_of(long) and 332 <= long.rows < 336
    with pytest.raises(MetricsError, match="more than"):
        texts_for(checkpoint, 3)


def test_trained_weights_get_texts_as_long_as_their_utterances():
    speech = texts_for(open_checkpoint("small"), None)
    short, long = (speech.of(0, frames)[0] for frames in (25, 150))
    assert speech.text is None and len(short) < 60 and 200 < len(long) < 280


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def serving(answer: Callable[[asyncio.StreamWriter, bytes], Awaitable[None]]) -> AsyncIterator[str]:
    """The address of a server that answers every POST so, and every GET with 404."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET"):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        else:
            length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            await answer(writer, await reader.readexactly(int(length.split(b":")[1])))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def heard(source: HttpSource) -> tuple[np.ndarray, int]:
    """The PCM and the frames of an answer, whose first chunk has neither."""
    chunks = [chunk async for chunk in source.stream("Hello.", max_frames=5)]
    assert not len(chunks[0].pcm) and not chunks[0].frames
    return np.concatenate([chunk.pcm for chunk in chunks]), sum(chunk.frames for chunk in chunks)


def test_the_route_of_an_address_and_what_is_no_address():
    assert endpoint("http://a:8000") == endpoint("a:8000/") == "http://a:8000/v1/audio/speech"
    assert endpoint("https://a.example/tts/v1/") == "https://a.example/tts/v1/audio/speech"
    assert endpoint("https://a.example/v1/audio/speech") == "https://a.example/v1/audio/speech"
    for url in ("ftp://a", "http://", ""):
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

    async with serving(answer) as url:
        pcm, frames = await heard(HttpSource(endpoint(url), {"A": "key"}, {"voice": "a"}, ("max_frames",)))
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
        (HEAD + b"what?\r\n\r\n", EngineError, "not valid HTTP"),
        *((b"SSH-2.0\r\n" + more, EngineError, "not valid HTTP") for more in (b"", b"\r\n")),
        (HEAD.replace(b"24000", b"16000") + chunked(SOUND), EngineError, "16000 Hz"),
        (HEAD.replace(b"audio/pcm", b"application/json") + chunked(b"{}"), EngineError, "json"),
    ],
)
async def test_what_is_no_speech_has_its_name(sent, error, said):
    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(sent)

    async with serving(answer) as url:
        with pytest.raises(error, match=said):
            await heard(HttpSource(endpoint(url)))


async def test_a_run_over_sockets_prints_a_table_and_counts_the_refused(capsys):
    came = iter(range(10_000))

    async def answer(writer: asyncio.StreamWriter, body: bytes) -> None:
        writer.write(HEAD + chunked(SOUND) + chunked(b"") if next(came) % 3 else BUSY)

    async with serving(answer) as url:
        words = ["--listeners", "200", "--seconds", "1", "--warm-seconds", "0.4", "--keys", '{"stream": true}']
        assert await asyncio.to_thread(main, ["bench", "--url", url, *words]) == 0
        assert await asyncio.to_thread(main, ["bench", "--url", url, "--engine", "batch"]) == 2
    told = capsys.readouterr()
    assert "as it was started: leave out what sets engine" in told.err
    *lines, last = told.out.splitlines()
    document = json.loads(last)
    (point,) = document["points"]
    assert point["held"] is False and document["figures"] == {}
    assert point["arrivals"] > 0 and 0.2 * point["arrivals"] <= point["refused"] <= 0.8 * point["arrivals"]
    assert point["in_time"] == point["arrivals"] - point["refused"] and point["underruns"] == 0
    assert not point["errors"] and not point["unanswered"] and 0 < point["ttfb_p50_ms"] <= point["ttfc_p50_ms"]
    assert any("not held" in line and "NOT every listener in time" in line for line in lines)


def test_a_burst_says_how_many_were_accepted_and_how_many_stalled(tiny, capsys):
    assert main([*QUICK, "--listeners", "3", "--seconds", "2", "--engine", "batch", "--burst"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    (point,), figures = document["points"], document["figures"]
    assert (point["listeners"], point["engine"], point["codec"], point["context_rows"]) == (3, "batch", "full", 32)
    assert point["frames"] > 0 and point["held"] is False
    assert figures["burst_3_accepted"] == {"value": 3, "unit": "listeners", "n": 3}
    assert {"burst_3_stalled", "capacity_said"} <= figures.keys()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--url", "http://127.0.0.1:9"], "no server answers"),
        (["--url", "http://127.0.0.1:9", "--load"], "choose one"),
        ([*QUICK[1:], "--listeners", "2,x"], "whole numbers of at least 1"),
        ([*QUICK[1:], "--codec-precision", "fast"], "engine='batch'"),
        ([*QUICK[1:], "--peers"], "choose one"),
        ([*QUICK[1:], "--seconds", "5", "--into", "load.json"], "at least 60 s"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(words, said, tiny, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and not list(tmp_path.iterdir())


# ---- the file of loads: what may stand in it, how it is merged, and what follows from its points


def values(points: list[dict], gpu: bool = True) -> dict[str, float]:
    return {name: figure["value"] for name, figure in carried(points, gpu).items()}


def test_loads_of_several_commands_stand_in_one_file_with_their_origin_and_of_equal_ones_the_latest(tmp_path):
    path = load_file(tmp_path)
    merge(path, {**BESIDE, "revision": "def"}, True, [recorded(2_000, underruns=3), recorded(512, context_rows=332)])
    document = merge(path, {**BESIDE, "revision": "def"}, True, [recorded(512, ttfc_p99_ms=30.0)])
    assert document == json.loads(path.read_text())
    assert [(p["listeners"], p["revision"]) for p in document["points"]] == [
        (512, "def"), (1_024, "abc"), (2_000, "def"), (512, "abc"), (512, "def"),
    ]  # fmt: skip
    assert document["points"][0]["ttfc_p99_ms"] == 30.0
    assert all(set(BESIDE) <= set(p) for p in document["points"])
    assert {name: figure["value"] for name, figure in document["figures"].items()} == {
        "frame_64_ms": 5.1, "listeners": 512, "listeners_full_precision": 512, "ttfc_p99_512_ms": 20.0,
        "ttfc_p99_1024_ms": 20.0,
    }  # fmt: skip
    assert all({"value", "unit", "n", *BESIDE} <= set(figure) for figure in document["figures"].values())


@pytest.mark.parametrize(
    ("wrong", "beside", "said"),
    [({"held": False, "duration_s": 10.0}, {}, "not held"), ({}, {"device": "NVIDIA H100"}, "H200.*H100")],
)
def test_what_may_not_be_recorded_is_refused_and_the_file_stays(tmp_path, wrong, beside, said):
    path = tmp_path / "load.json"
    merge(path, BESIDE, True, [recorded(512)])
    before = path.read_bytes()
    with pytest.raises(MetricsError, match=said):
        merge(path, BESIDE | beside, True, [recorded(600), recorded(700, **wrong)])
    assert path.read_bytes() == before
    path.write_text('{"figures": {}}')
    with pytest.raises(MetricsError, match="expected figures and points"):
        merge(path, BESIDE, True, [recorded(512)])


@pytest.mark.parametrize("wrong", [*UNCLEAN, {"ttfc_p99_ms": 100.1}, {"ttfc_p99_ms": None}])
def test_a_load_counts_only_where_every_listener_was_in_time_for_all_of_it(wrong):
    assert values([recorded(512), recorded(1_024), recorded(1_100, **wrong)])["listeners"] == 1_024
    assert "listeners" not in carried([recorded(1_100, **wrong)], gpu=True)


@pytest.mark.parametrize("wrong", [*UNCLEAN, {"ttfb_p99_ms": 121.0}, {"ttfb_p99_ms": None}])
def test_of_a_server_the_first_byte_decides_and_those_count_that_played(wrong):
    served = recorded(768, **SERVER, playing_mean=768.5, ttfb_p99_ms=50.0, ttfc_p99_ms=110.0)
    found = values([served, {**served, "listeners": 1_536, **wrong}])
    assert (found["listeners"], found["ttfb_p99_ms"]) == (768, 50.0)
    few = carried([{**served, "playing_mean": 700.7}], gpu=True)["listeners"]
    assert (few["value"], few["offered"]) == (700.7, 768)  # their speech was shorter than planned


def test_precisions_and_models_have_a_capacity_each_the_worst_of_contexts_and_on_a_cpu_the_audible_time_decides():
    found = values([recorded(1_000), recorded(900, codec="full"), recorded(600, model_size="1b7", codec="full")])
    assert [value for name, value in found.items() if name.startswith("listeners")] == [1_000, 900, 600]
    on_cpu = [recorded(8, codec="full", ttfc_p99_ms=300.0), recorded(16, codec="full", audible_p95_ms=501.0)]
    assert values(on_cpu, gpu=False) == {"listeners": 8}  # its codec has one precision
    short, long = [recorded(1_024), recorded(1_100)], recorded(900, context_rows=332)
    found = carried([*short, long], gpu=True)["listeners"]
    assert found["value"] == 900 and found["by_context"] == {"32": 1_100.0, "332": 900.0}
    assert "listeners" not in carried([*short, {**long, "underruns": 5}], gpu=True)


def test_first_pcm_at_a_load_is_read_off_the_smallest_point_of_at_least_so_many_open_streams():
    points = [
        recorded(500, ttfc_p99_ms=5.0),  # too few
        recorded(530, ttfc_p99_ms=15.0),
        recorded(560, ttfc_p99_ms=14.0),  # larger than needed
        recorded(540, ttfc_p99_ms=60.0, model_size="1b7"),  # another model
        recorded(520, ttfc_p99_ms=18.0, context_rows=332),
        recorded(800, ttfc_p99_ms=19.0),  # nowhere near
    ]
    found = carried(points, gpu=True)
    assert found["ttfc_p99_512_ms"]["value"] == 18.0
    assert found["ttfc_p99_512_ms"]["by_context"] == {"32": 15.0, "332": 18.0}
    assert "ttfc_p99_1024_ms" not in found
