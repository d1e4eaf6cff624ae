"""Notebook helpers: run folders, clips, tables, widgets; parameters as arguments of an utterance; player; figures."""

import asyncio
import base64
import io
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

from mktts.audio import read_audio
from mktts.checkpoint import DEFAULT_CHECKPOINT, open_checkpoint
from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import MkttsError, OptionsError
from mktts.measure import metrics
from mktts.notebook import nb, player, plots, speaking
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

SETTINGS = {"INSTRUCT": "", "VOICE": "", "MAX_FRAMES": 80, "GREEDY": False, "SCHEDULE": "1,2", "LANGUAGE": "auto"}


@pytest.fixture
def shown():
    """What the code under test displays: `outputs`."""
    InteractiveShell.instance()
    with capture_output() as captured:
        yield captured
    InteractiveShell.clear_instance()


def test_a_run_by_hand_goes_to_the_repositorys_outputs_and_leaves_recorded_runs_alone(tmp_path, monkeypatch, shown):
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    for inside in (".", "notebooks", "notebooks/deep"):
        monkeypatch.chdir(tmp_path / inside)
        first = nb.run_dir("", "05_metrics")  # nothing recorded yet: the cell was run again
        assert first == tmp_path / "outputs" / "runs" / "05_metrics-manual" and first.is_dir()
    metrics.record(first, rtf=0.25)
    assert nb.run_dir("", "05_metrics").name == "05_metrics-manual-2"
    assert json.loads((first / "metrics.json").read_text()) == {"rtf": 0.25}
    assert shown.outputs[-1].data["text/plain"].endswith("outputs/runs/05_metrics-manual-2")
    monkeypatch.chdir(tmp_path / "notebooks")
    assert nb.run_dir("../outputs/runs/x", "04_streaming") == tmp_path / "outputs" / "runs" / "x"
    (tmp_path / "pyproject.toml").unlink()
    assert (nb.repository() / "mktts" / "notebook" / "nb.py").is_file(), "outside a checkout: where the package lies"


def test_a_clip_is_written_whole_shown_without_normalisation_and_a_long_one_in_part_with_its_label(tmp_path, shown):
    pcm = np.full(SAMPLE_RATE_HZ // 10, 0.25, np.float32)
    path = nb.clip(pcm, "Streamed, as it came", tmp_path, random_weights=False)
    assert path == tmp_path / "streamed_as_it_came.wav"
    samples, rate_hz = read_audio(path)
    assert rate_hz == SAMPLE_RATE_HZ and np.abs(samples - 0.25).max() < 1e-4
    assert "random" not in shown.outputs[0].data["text/plain"]
    data = base64.b64decode(re.search(r"base64,([^\"]+)", shown.outputs[0].data["text/html"])[1])
    assert np.frombuffer(data[-2:], "<i2")[0] == pytest.approx(0.25 * 32767, abs=1)
    pcm = np.zeros(int(3 * nb.EMBED_LIMIT_S * SAMPLE_RATE_HZ), np.float32)
    path = nb.clip(pcm, "long", tmp_path, random_weights=True)
    assert len(read_audio(path)[0]) == len(pcm)
    data = shown.outputs[1].data
    assert "embedded" in data["text/plain"] and RANDOM_WEIGHTS in data["text/html"]
    assert len(data["text/html"]) < 1.4 * 2 * nb.EMBED_LIMIT_S * SAMPLE_RATE_HZ


def test_unusable_pcm_is_refused_before_anything_is_written(tmp_path):
    for pcm in (np.zeros(0, np.float32), np.zeros(3), np.zeros((2, 2), np.float32), np.array([1.5], np.float32)):
        with pytest.raises(MkttsError, match="clip 'x'"):
            nb.clip(pcm, "x", tmp_path, random_weights=False)
    assert not list(tmp_path.iterdir())


def test_a_recording_is_embedded_whole_with_both_channels(tmp_path, shown):
    soundfile = pytest.importorskip("soundfile")
    user = np.sin(np.arange(15 * SAMPLE_RATE_HZ) / 10).astype(np.float32)  # longer than a clip's embedded part
    soundfile.write(tmp_path / "talk.wav", np.column_stack([user, np.zeros_like(user)]), SAMPLE_RATE_HZ)
    nb.recording(tmp_path / "talk.wav", "the talk", random_weights=False)
    sound = base64.b64decode(re.search(r"audio/mpeg;base64,([^\"]+)", shown.outputs[0].data["text/html"])[1])
    samples, rate_hz = soundfile.read(io.BytesIO(sound))
    assert rate_hz == SAMPLE_RATE_HZ and samples.shape[1] == 2 and len(samples) >= len(user)
    left, right = samples.std(axis=0)
    assert left == pytest.approx(user.std(), rel=0.05) and right < 0.01
    (tmp_path / "torn.wav").write_bytes(b"RIFF")
    with pytest.raises(MkttsError, match="torn.wav: expected a sound file"):
        nb.recording(tmp_path / "torn.wav", "x", random_weights=False)


def test_a_table_has_every_key_as_a_column_escapes_its_cells_and_folds_what_is_long(shown):
    nb.table([{"a": 1, "b": "<b>"}, {"a": 12345, "c": 0.25}], caption="two rows")
    nb.table([{"a": 1, "b": 2}, {"a": 4, "b": 3}], omit=["b"])
    nb.table([{"n": n + 0.23456} for n in range(9)])
    assert [one.data["text/plain"].splitlines() for one in shown.outputs] == [
        ["two rows", "a | b | c", "1 | <b> | ", "12,345 |  | 0.25"],
        ["a", "1", "4"],
        ["n", "0.235", *(f"{n}.23" for n in range(1, 9))],
    ]
    escaped, _, long = (one.data["text/html"] for one in shown.outputs)
    assert "&lt;b&gt;" in escaped and "<b>" not in escaped and re.search(r"7\.23.*1 more.*8\.23", long)


def test_controls_start_with_the_parameters_values_and_follow_the_widgets():
    first = {"TEXT": "Hi", "SPEAKER": "ryan", "SEED": 3, "FLAG": True, "SPEED": 1.5, "TEMPERATURE": 0.3}
    panel = nb.Controls({"SPEAKER": ["", "ryan"], "TEMPERATURE": (0.05, 2.0)}, **first)
    assert panel.values == first
    panel._widgets["TEXT"].value, panel._widgets["TEMPERATURE"].value = "Ho", 7.0
    assert panel.values == first | {"TEXT": "Ho", "TEMPERATURE": 2.0}  # a slider stays within its range


def test_controls_refuse_a_value_outside_its_choices_and_choices_without_parameter():
    for choices, value, named in (
        ({"SPEAKER": ["ryan"]}, "nobody", "SPEAKER='nobody'"),
        ({"SPEAKER": (0.05, 2.0)}, 3.0, "SPEAKER=3.0 is not between"),
        ({}, (1, 2), "found tuple"),
        ({"VOICE": ["a"]}, "nobody", "VOICE"),
    ):
        with pytest.raises(MkttsError, match=named):
            nb.Controls(choices, SPEAKER=value)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_start_runs_on_the_cells_loop_even_from_another_thread_and_draws_anew_what_a_cell_drew(shown):
    panel, events, loop = nb.Controls({}, TEXT="Hi"), [], asyncio.get_running_loop()

    async def start():
        events.append((panel.values["TEXT"], asyncio.get_running_loop() is loop, panel.start_button.disabled))

    panel.show(start)
    await panel.run()
    panel.draws(lambda: nb.table([{"runs": len(events)}]))
    for runs in (2, 3):
        await asyncio.to_thread(panel.start_button.click)
        await until(lambda runs=runs: len(events) == runs and not panel.start_button.disabled)
    assert events == [("Hi", True, True)] * 3
    drawn = shown.outputs[-3:]
    assert [one.data["text/plain"] for one in drawn] == ["runs\n1", "runs\n2", "runs\n3"]
    assert [one.update for one in drawn] == [False, True, True] and drawn[0].transient == drawn[2].transient


async def test_a_cell_runs_what_start_runs_and_gets_its_error_which_else_is_shown_in_the_panel(shown):
    panel = nb.Controls({}, TEXT="Hi")
    with pytest.raises(MkttsError, match="show"):
        await panel.run()

    async def start():
        assert panel.start_button.disabled
        raise MkttsError("no such <speaker>")

    panel.show(start)
    with pytest.raises(MkttsError, match="no such <speaker>"):
        await panel.run()
    assert panel.message.value == "" and not panel.start_button.disabled
    panel.start_button.click()
    await asyncio.sleep(0.05)
    assert panel.message.value == "MkttsError: no such &lt;speaker&gt;"


@pytest.mark.parametrize("how", ["interrupt", "stop"])
async def test_an_interrupt_of_the_kernel_and_stop_end_a_run_that_a_button_began(how, shown):
    panel, begun, ended = nb.Controls({}, TEXT="Hi"), asyncio.Event(), []

    async def start():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as ipykernel has it while no cell runs
    try:
        panel.show(start)
        for _ in range(2):
            begun.clear()
            panel.start_button.click()
            await asyncio.wait_for(begun.wait(), 30)
            await asyncio.sleep(0.05)
            assert panel.start_button.disabled and not panel.stop_button.disabled
            signal.raise_signal(signal.SIGINT) if how == "interrupt" else panel.stop_button.click()
            await until(lambda: panel.message.value == "stopped" and not panel.start_button.disabled)
            assert panel.stop_button.disabled and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == [True] * 2


# ---- speaking


@pytest.fixture(scope="module")
def small():
    return open_checkpoint(DEFAULT_CHECKPOINT)


def test_parameters_become_arguments_and_unknown_ones_are_refused(tiny):
    values = {"TEXT": "Hi", "LANGUAGE": "auto", "SPEAKER": "", "INSTRUCT": "", "VOICE": "", "SEED": 1, "MAX_FRAMES": 9}
    arguments = speaking.stream_arguments(tiny, **values, SCHEDULE="1,2")
    assert arguments.pop("options").schedule == (1, 2)
    expected = {name.lower(): value or None for name, value in values.items()}
    assert arguments == expected | {"speaker": next(iter(tiny.config.speakers))}
    with pytest.raises(MkttsError, match="SPEED"):
        speaking.stream_arguments(tiny, SPEED=2)


def test_sampling_parameters_hold_for_all_codes_of_a_frame(small):
    changed = speaking.stream_arguments(small, TEMPERATURE=1.25, TOP_K=0)["sampling"]
    for choice in (changed.talker, changed.predictor):
        assert (choice.temperature, choice.top_k, choice.do_sample) == (1.25, 0, True)
    assert speaking.stream_arguments(small, TEMPERATURE=0.0, GREEDY=True)["sampling"] == small.sampling().greedy()
    with pytest.raises(MkttsError, match="temperature.*-1"):
        speaking.stream_arguments(small, TEMPERATURE=-1.0)


def test_a_panel_shows_the_checkpoints_own_values(small):
    open_, own = {"SPEAKER": "", "TEMPERATURE": 0.0, "TOP_K": -1}, small.sampling().talker
    shown = speaking.panel(small, **SETTINGS, **open_).values
    expected = {"SPEAKER": next(iter(small.config.speakers)), "TEMPERATURE": own.temperature, "TOP_K": own.top_k}
    assert shown == {**SETTINGS, **expected}
    chosen = {**SETTINGS, "SPEAKER": "michael", "TEMPERATURE": 0.7, "TOP_K": 5}
    assert speaking.panel(small, **chosen).values == chosen
    for same in (shown, {"TEMPERATURE": 0.0, "TOP_K": -1, "GREEDY": False}):
        assert speaking.stream_arguments(small, **same)["sampling"] == small.sampling()
    assert "sampling" not in speaking.stream_arguments(small, TEXT="Hi")


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        (DEFAULT_CHECKPOINT, ["Text", "Speaker", "Temperature"]),
        ("random:tiny:base", ["Text", "Language", "Saved voice's file", "Temperature"]),
    ],
)
def test_a_panel_folds_away_what_the_checkpoint_does_not_take(source, seen):
    panel = speaking.panel(open_checkpoint(source), TEXT="Hi", SPEAKER="", **SETTINGS, TEMPERATURE=0.7, TOP_K=-1)
    *lines, folded, _ = panel.panel.children
    assert sorted(line.description for line in lines) == sorted(seen) and folded.titles == ("more",)


def test_texts_are_read_and_what_is_none_is_named_by_its_parameter():
    assert speaking.texts("Yes. | No, thank you.") == ["Yes.", "No, thank you."]
    with pytest.raises(OptionsError, match="TEXTS"):
        speaking.texts("Yes. |")


# ---- the live player without a front end: what it sends to the page, and the page's script


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
    command = ["node", Path(__file__).with_name("player_harness.mjs"), Path(player.__file__).with_name("player.js")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- figures

READY_MS = [50.0, 100.0, 400.0]  # the third chunk is needed at 50 + 2 * 80 = 210 ms and comes 190 ms late
CHUNKS = [
    SimpleNamespace(timings=SimpleNamespace(ready_ms=ms), pcm=np.zeros(frames * SAMPLES_PER_FRAME))
    for ms, frames in zip(READY_MS, (1, 1, 2), strict=True)
]


def test_the_timeline_shows_what_was_generated_what_was_needed_and_the_late_chunk(tmp_path):
    top, bottom = plots.chunk_timeline(CHUNKS, tmp_path).axes
    lines = {line.get_label(): line for line in top.lines}
    np.testing.assert_allclose(lines["generated"].get_xydata(), [[0, 0], [0.05, 0.08], [0.1, 0.16], [0.4, 0.32]])
    needed = lines["needed by real-time playback"]
    np.testing.assert_allclose(needed.get_xdata(), [0.05, 0.13, 0.13, 0.21, 0.4, 0.56])
    np.testing.assert_allclose(needed.get_ydata(), [0, 0.08, 0.08, 0.16, 0.16, 0.32])
    np.testing.assert_allclose(lines["underrun"].get_xydata(), [[0.4, 0.16]])
    assert "underruns: 1" in top.get_title(loc="left") and "after 50 ms" in top.get_title(loc="left")
    unplayed_ms = bottom.containers[0].markerline.get_ydata()
    np.testing.assert_allclose(unplayed_ms, [0, 30, 0], atol=1e-9)  # at 100 ms, 50 of the first 80 ms had been played


def test_stacked_bars_add_up(tmp_path):
    stages = {"tiny": {"talker": 2.0, "predictor": 5.0, "codec": 4.0}}
    (axes,) = plots.bars(stages, "ms", "Stages", tmp_path, "stages", real_time=True).axes
    assert [(bar.get_x(), bar.get_width()) for group in axes.containers for bar in group] == [(0, 2), (2, 5), (7, 4)]
    assert "11" in [text.get_text() for text in axes.texts] and (tmp_path / "stages.png").is_file()


def test_two_numbers_that_lie_close_on_an_axis_are_not_written_over_each_other():
    _, axes = plots.new(2.0)
    axes.set_xscale("log")
    plots.plain_ticks(axes.xaxis, [64, 1_400, 1_600])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["64", "1,400", ""]
