"""Who comes, and a crowd on its event loop, against streams whose chunks are known."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from timed_lanes import TimedLanes

from mktts.batch.simulate import Traffic
from mktts.errors import CapacityError, EngineError, MetricsError, OptionsError
from mktts.measure.bench.load import frames
from mktts.measure.bench.load.crowd import attend
from mktts.measure.bench.load.point import measured
from mktts.measure.bench.load.sections import Numbers, burst_waits_s, overload
from mktts.measure.bench.load.settings import LoadSettings
from mktts.measure.bench.load.texts import SHORT_ROWS, Said, said
from mktts.measure.bench.load.visits import Habits, Visit, visits
from mktts.model.prompt import PromptBuilder, Request
from mktts.spec import SAMPLES_PER_FRAME

SAID = Said("text", 32, lambda index, frames: "a few words", {})
PCM = np.full(SAMPLES_PER_FRAME, 0.1, np.float32)


class Told:
    """A stream of so many chunks at once, then an end: "over", "refused", "broken" or "never"."""

    engine = "told"

    def __init__(self, chunks: int, end: str) -> None:
        self.left, self.end = chunks, end
        self.fed: list[str] = []
        self.cancelled = asyncio.Event()
        self.codes, self.finish_reason = torch.zeros(chunks, 16, dtype=torch.int64), "eos"

    def __aiter__(self) -> Told:
        return self

    async def __anext__(self) -> SimpleNamespace:
        await asyncio.sleep(0)
        if self.left and not self.cancelled.is_set():
            self.left -= 1
            return SimpleNamespace(pcm=PCM, frames=1, timings=SimpleNamespace(ready_ms=0.0))
        if self.end == "refused":
            raise CapacityError("full")
        if self.end == "broken":
            raise EngineError("broken")
        if self.end == "never":
            await self.cancelled.wait()
        raise StopAsyncIteration

    def cancel(self) -> None:
        self.cancelled.set()

    def feed(self, piece: str) -> None:
        self.fed.append(piece)

    def finish(self) -> None:
        self.fed.append("END")


class Script:
    """Opens what it is told, in order; a stream or an exception each."""

    def __init__(self, *told: tuple[int, str] | Exception) -> None:
        self.told, self.opened, self.settings = list(told), [], []

    def stream(self, text: str, **settings: object) -> Told:
        self.settings.append({"text": text, **settings})
        what = self.told[len(self.opened)]
        self.opened.append(what)
        if isinstance(what, Exception):
            raise what
        self.opened[-1] = Told(*what)
        return self.opened[-1]

    def open(self, **settings: object) -> Told:
        return self.stream("", **settings)


def met(script: Script, plan: list[Visit], close_s: float = 0.5):
    return attend(script, SAID, plan, 0.0, 0.3, close_s)


def test_every_way_a_stream_can_go_is_booked_as_what_it_is():
    script = Script((3, "over"), (0, "refused"), (2, "refused"), (1, "broken"), (0, "never"), CapacityError("now"))
    seen = met(script, [Visit(i, 0.02, 40 + i) for i in range(6)])
    whole, refused, late, broken, waits, at_once = seen.listeners
    assert (whole.frames, whole.ended_s is not None, whole.error, whole.engine) == (3, True, None, "told")
    assert refused.refused and at_once.refused and refused.first_s is at_once.first_s is None
    assert not late.refused and late.error == "CapacityError: full"  # it had PCM: a stream died
    assert broken.error == "EngineError: broken"
    assert waits.first_s is waits.ended_s is waits.error is None
    assert [call["max_frames"] for call in script.settings] == [40, 41, 42, 43, 44, 45]
    assert [call["seed"] for call in script.settings] == list(range(6))
    assert seen.begin is not None and seen.end.chunks - seen.begin.chunks == 6 and seen.hung == 0
    point = measured(seen, LoadSettings("x", seconds=0.3))
    assert (point["arrivals"], point["refused"], point["unanswered"], point["errors"]) == (6, 2, 1, 2)
    assert not point["held"] and point["engine"] == "told"


def test_listeners_leave_take_nothing_or_write_their_text():
    script = Script((0, "never"), (0, "never"), (5, "never"), (1, "over"))
    plan = [
        Visit(0, 0.0, 9, kind="leaves", leaves_s=0.05),  # closes the stream
        Visit(1, 0.0, 9, kind="leaves", leaves_s=0.05),  # cancels the task that waits
        Visit(2, 0.0, 9, kind="never reads", leaves_s=0.05),
        Visit(3, 0.0, 9, kind="feeds", keeps=True),
    ]
    seen = met(script, plan)
    assert [one.left for one in seen.listeners] == [True, True, True, False]
    assert all(one.ended_s is not None for one in seen.listeners)
    assert script.opened[0].cancelled.is_set() and not script.opened[1].cancelled.is_set()
    assert script.opened[2].left == 5
    assert script.opened[3].fed == ["a ", "few ", "words ", "END"] and script.settings[3]["layout"] is None
    assert [one.timed for one in seen.listeners] == [True, True, False, False]
    assert [(visit.index, reason) for visit, _, reason in seen.kept] == [(3, "eos")]


def test_work_beside_a_run_ends_with_it_and_the_process_is_as_before():
    before_s, frozen, threads = sys.getswitchinterval(), gc.get_freeze_count() > 0, threading.active_count()
    inside: list[float] = []

    def meanwhile(done: threading.Event) -> None:
        inside.append(sys.getswitchinterval())
        done.wait()

    attend(Script(), SAID, [], 0.0, 0.01, 0.02, meanwhile)
    assert inside[0] < before_s == sys.getswitchinterval()
    assert (gc.get_freeze_count() > 0) == frozen and threading.active_count() == threads


def test_what_fails_beside_a_run_ends_its_streams_and_is_raised():
    script = Script((0, "never"))

    def meanwhile(done: threading.Event) -> None:
        while not script.opened:
            done.wait(0.01)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attend(script, SAID, [Visit(0, 0.0, 9)], 0.0, 50.0, 60.0, meanwhile)
    assert script.opened[0].cancelled.is_set()


def test_arrivals_are_those_of_the_simulation_and_go_on_behind_the_held_time():
    settings = LoadSettings("x", seconds=60.0, warm_s=8.0, tail_s=2.0, seed=3)
    plan = visits(settings, 64, burst=128)
    expected = Traffic(64, burst=128, seed=3).arrivals(8.0, 62.0)
    assert [(visit.at_s, visit.frames) for visit in plan] == expected
    assert sum(visit.burst for visit in plan) == 5 * 128 and len({v.at_s for v in plan if v.burst}) == 5
    assert {visit.kind for visit in plan} == {"reads"} and 68.0 < plan[-1].at_s < 70.0


def test_habits_are_shares_of_the_listeners():
    habits = Habits(leaving=0.2, never_reading=0.05, feeding=0.1, keep_every=100, keep_from_s=8.0)
    plan = visits(LoadSettings("x", seconds=200.0), 200, habits=habits)
    shares = {kind: sum(v.kind == kind for v in plan) / len(plan) for kind in ("leaves", "never reads", "feeds")}
    assert shares == {"leaves": pytest.approx(0.2, abs=0.02), "never reads": pytest.approx(0.05, abs=0.01),
                      "feeds": pytest.approx(0.1, abs=0.015)}  # fmt: skip
    kept = [visit for visit in plan if visit.keeps]
    assert kept and all(visit.kind == "reads" and visit.at_s >= 8.0 for visit in kept)


def test_the_worst_of_each_burst_is_taken_and_one_without_pcm_is_infinite():
    script = Script(*[(1, "over")] * 4, (0, "refused"))
    plan = [
        Visit(0, 0.0, 9),
        *(Visit(i, 0.02, 9, burst=True) for i in (1, 2)),
        *(Visit(i, 0.04, 9, burst=True) for i in (3, 4)),
    ]
    first, second = burst_waits_s(met(script, plan))
    assert 0 < first < 10 and second == float("inf")


@pytest.mark.parametrize(
    "fixture, kind",
    [("tiny", "text"), ("tiny_base", "voice"), ("tiny_design", "instruct"), ("tiny_projected", "instruct")],
)
def test_prompts_have_the_rows_that_are_asked_for(fixture, kind, request):
    checkpoint = request.getfixturevalue(fixture)
    builder = PromptBuilder(checkpoint.config, checkpoint.tensors(), checkpoint.tokenizer())

    def rows_of(speech: Said) -> int:
        text, settings = speech.of(7, 50)
        assert settings["max_frames"] == 50 and settings["seed"] == 7
        fields = {name: settings[name] for name in ("voice", "instruct", "layout") if name in settings}
        return len(builder.build(Request(text, **fields)).embeds)

    short, long = said(checkpoint, None), said(checkpoint, 332)
    assert (short.kind, short.rows, rows_of(short)) == ("text", SHORT_ROWS, SHORT_ROWS)
    assert long.kind == kind and long.rows == rows_of(long) and 332 <= long.rows < 336


def test_trained_weights_get_texts_as_long_as_their_utterances():
    from mktts.checkpoint import open_checkpoint

    speech = said(open_checkpoint("small"), None)
    short, long = (speech.of(0, frames)[0] for frames in (25, 150))
    assert speech.kind == "natural" and len(short) < 60 and 200 < len(long) < 280


def test_a_context_that_the_checkpoint_cannot_have_is_said(tiny):
    with pytest.raises(MetricsError, match="no instruction"):
        said(tiny, 332, "instruct")
    with pytest.raises(MetricsError, match="only Base"):
        said(tiny, 332, "voice")
    with pytest.raises(MetricsError, match="more than"):
        said(tiny, 3)


def test_the_command_of_a_result_gives_its_settings_back():
    settings = LoadSettings("random:0.6b", engine="batch", codec="fast", deterministic=False, context_rows=332)
    assert settings.command("listeners", listeners=512) == (
        "python -m mktts bench --load --section listeners --listeners 512 --checkpoint random:0.6b --engine batch "
        "--codec-precision fast --no-deterministic --context 332"
    )


@pytest.mark.parametrize(
    "wrong", [{"seconds": 0}, {"frames": (1, 5)}, {"codec": "fast"}, {"engine": "single", "max_streams": 3}]
)
def test_settings_that_mean_nothing_are_refused(wrong):
    with pytest.raises(OptionsError):
        LoadSettings("x", **wrong)


def test_overload_wants_a_capacity():
    with pytest.raises(MetricsError, match="--listeners"):
        list(overload(None, Numbers()))


def test_ticks_are_timed_with_every_lane_at_the_same_context(tiny, monkeypatch):
    monkeypatch.setattr(frames, "_SETTLE_S", 0.0)
    settings = LoadSettings("x", device="cpu", deterministic=False)

    def make(checkpoint, codec, ordered, slots, rows):
        return TimedLanes(codec, ordered, slots, rows)

    figures = dict(frames.measure(settings, tiny, make, sizes=(2, 4, 8)))
    assert [figures[f"frame_{count}_ms"]["value"] for count in (2, 4, 8)] == pytest.approx([2, 4, 8])
    assert figures["deterministic_cost_percent_2"]["value"] == pytest.approx(10)
    assert figures["codec_fast_us"]["value"] == figures["codec_full_us"]["value"] == pytest.approx(1_000)
    assert figures["host_us_per_lane_frame"]["value"] > 0 and figures["frame_8_ms"]["n"] == frames.SAMPLES
