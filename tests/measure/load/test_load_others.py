"""Another implementation under listeners: what a seat asks of it, and what comes of the lines of several."""

from __future__ import annotations

import sys
import time

import pytest

from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.bench.load import others, sections
from mktts.measure.bench.load.seat import Seat, utterances
from mktts.measure.bench.load.settings import LoadSettings
from mktts.measure.bench.peers import Run
from mktts.measure.bench.settings import BenchSettings

# Each line `SECONDS SEED` is answered by two utterances of chunks of 2 and 4 frames: the second chunk is there 100 ms
# after the first where the seed is even, 300 ms after it where it is odd.
PEER = """
import json, sys
print("ready", flush=True)
for line in sys.stdin:
    second = 0.15 + (0.3 if int(line.split()[1]) % 2 else 0.1)
    for begun_s in (10.0, 20.0):
        print(json.dumps({"begun_s": begun_s, "chunks": [[2, 0.15], [4, second]]}), flush=True)
    print("done", flush=True)
"""


def test_listeners_are_as_many_as_processes_and_a_late_chunk_is_an_underrun():
    figures, report = others.run([sys.executable, "-c", PEER], (1, 2), 60.0)
    assert figures["peer_listeners"]["value"] == 1 and figures["peer_listeners"]["held"]
    assert figures["peer_ttfc_p99_ms"]["value"] == pytest.approx(150)
    one, two = report["loads"]
    assert (one["arrivals"], one["underruns"], two["arrivals"], two["underruns"]) == (2, 0, 4, 2)
    assert two["late_max_ms"] == pytest.approx(140)  # two frames are 160 ms


@pytest.mark.parametrize(
    ("program", "error", "words"),
    [
        ("raise ImportError('no such peer')", BackendUnavailable, "no such peer"),
        ("print('ready', flush=True); input(); raise MemoryError('no room')", MetricsError, "no room"),
        ("print('ready', flush=True); input(); print('done', flush=True)", MetricsError, "0 utterances"),
    ],
)
def test_a_program_that_fails_is_named_with_its_last_words(program, error, words):
    with pytest.raises(error, match=words):
        others.run([sys.executable, "-c", program], (1,), 0.1)


@pytest.mark.parametrize("loads", [(), (0,), (2, 64)])
def test_more_processes_than_a_machine_has_room_for_are_refused(loads):
    with pytest.raises(MetricsError, match="1 to 16"):
        others.run([sys.executable, "-c", PEER], loads, 60.0)


def test_a_seat_asks_again_when_the_last_utterance_was_played():
    def speak(frames: int, seed: int) -> Run:
        asked.append((time.monotonic(), frames, seed))
        return Run(chunks=[(1, 1.0), (1, 2.0)], first_pcm_ms=1.0)

    asked: list[tuple[float, int, int]] = []
    said = list(utterances(speak, (2, 3), 0.4, 7))
    assert len(said) == len(asked) >= 2 and asked[1][0] - asked[0][0] >= 0.16
    assert said[0]["chunks"] == [(1, 0.001), (1, 0.002)] and asked[1][2] == 7_001
    whole = next(utterances(lambda frames, seed: Run(0.24, 50.0, 50.0), (3, 3), 0.01, 0))
    assert whole["chunks"] == [(3, 0.05)]


def test_a_seat_is_a_program_of_its_own():
    seat = Seat("random:tiny", None, "cpu", "faster", (2, 3))
    assert seat.words[:3] == [sys.executable, "-m", "mktts.measure.bench.load.seat"]
    assert BenchSettings().checkpoint in Seat(BenchSettings().checkpoint, None, "cuda", "faster", (2, 3)).words[3]


def test_on_a_cpu_the_peer_is_qwen_tts_itself(monkeypatch):
    asked: list[list[str]] = []

    def run(words, loads, seconds, seed):
        asked.append(list(words))
        return others_run([sys.executable, "-c", PEER], loads, seconds, seed)

    others_run = others.run
    monkeypatch.setattr(others, "run", run)
    subject = sections.Subject(LoadSettings(checkpoint="small", device="cpu"))
    (result,) = sections.peers(subject, sections.Numbers(listeners=(1,)))
    assert '"peer": "upstream"' in asked[0][3] and '"device": "cpu"' in asked[0][3]
    assert result.reports["peers"]["peer"] == "qwen-tts" and result.reports["peers"]["chunk_frames"] is None
    assert result.figures["peer_listeners"]["value"] == 1


def test_a_seat_of_qwen_tts_speaks():
    """The program itself, for one short utterance."""
    seat = Seat("random:tiny", None, "cpu", "upstream", (2, 3))
    figures, report = others.run(seat.words, (1,), 0.5)
    assert report["loads"][0]["arrivals"] >= 1 and report["loads"][0]["underruns"] == 0
    assert figures["peer_ttfc_p99_ms"]["value"] > 0 and not figures["peer_listeners"]["held"]
