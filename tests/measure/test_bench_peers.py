"""The side-by-side bench: what it times, and that a section that fails loses nothing but itself."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

import pytest
import torch

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.errors import BackendUnavailable, MetricsError
from mktts.measure.bench.frames import steady_frame_ms, timed_frames
from mktts.measure.bench.here import measure_load
from mktts.measure.bench.runner import EXPECTED, measure, run_section, table
from mktts.measure.bench.sections import SECTIONS
from mktts.measure.bench.settings import SENTENCE, BenchSettings, text_of
from mktts.model.backend import Frame
from mktts.model.prompt import Prompt
from mktts.model.sampling import Sampling
from mktts.spec import NUM_CODEBOOKS

SMALL = BenchSettings(
    checkpoint="random:tiny",
    large="random:tiny",
    text_model="random:tiny",
    device="cpu",
    frames=24,
    context=16,
    around=2,
    samples=4,
    utterances=1,
    peer_utterances=1,
)


@dataclass
class Stream:
    rows: int
    max_frames: int
    frames: int = 0


class Counter:
    """A backend whose frame's talker_ms is the position it ran at; stream `ends` says end-of-speech at its frame 3."""

    name = "counter"

    def __init__(self, ends: int) -> None:
        self.ends, self.started = ends, 0

    def start(self, prompt, sampling, seed, max_frames) -> Stream:
        self.started += 1
        return Stream(len(prompt.embeds), max_frames)

    def step(self, state: Stream, text) -> Frame:
        assert (text is None) == (state.frames == 0) and state.frames < state.max_frames
        if text is not None:
            assert int(text[0]) == state.frames - 1  # the row after frame t - 1
        position = state.rows + state.frames - 1
        state.frames += 1
        ended = self.started - 1 == self.ends and state.frames == 3
        return Frame(None if ended else torch.zeros(NUM_CODEBOOKS, dtype=torch.int64), float(position), 0.0)


@pytest.mark.parametrize("ends", [0, 1, 99])
def test_frames_are_timed_at_the_positions_around_the_context_and_never_in_the_first_stream(ends):
    rows = torch.arange(100)[:, None].expand(-1, 4)
    prompt, backend = Prompt(rows[:9], rows, rows[0], 100), Counter(ends)
    settings = BenchSettings(context=20, around=3, samples=10)
    frames = list(timed_frames(backend, prompt, Sampling(), settings))
    assert [frame.talker_ms for _, frame in frames] == [17, 18, 19, 20, 21, 22, 17, 18, 19, 20]
    assert all(elapsed_ms >= 0 for elapsed_ms, _ in frames)
    assert backend.started == (4 if ends == 1 else 3)


@pytest.mark.parametrize("tokens", [1, 7, 12])
def test_the_benchs_text_has_exactly_the_tokens_asked_for(tiny, tokens):
    encode = tiny.tokenizer().encode
    assert len(encode(text_of(tokens, encode))) == tokens
    assert len(text_of(tokens, str.split).split()) == tokens


def test_a_tokenizer_that_never_gives_the_number_is_said():
    with pytest.raises(MetricsError, match="has 12 tokens"):
        text_of(12, lambda text: [0])


def test_a_frame_with_its_codec_is_the_time_between_two_steady_chunks_over_their_frames():
    chunks = [(1, 10.0), (8, 40.0), (8, 56.0), (8, 88.0), (3, 90.0)]
    assert steady_frame_ms(chunks) == [2.0, 4.0]
    assert steady_frame_ms(chunks[:2]) == steady_frame_ms([]) == []


def test_the_sentence_has_fifteen_words():
    assert len(SENTENCE.split()) == 15


def program(code: str) -> list[str]:
    return [sys.executable, "-c", code, "section", "{}"]


def test_a_section_that_fails_keeps_its_figures_and_gives_its_last_message(capfd):
    code = """
print('{"figures": {"a": 1}}'); print('a library says hello'); print('{"notes": {"n": 2}}', flush=True)
raise RuntimeError("the card caught fire")"""
    figures, notes, reason = run_section(program(code), 60)
    assert (figures, notes) == ({"a": 1}, {"n": 2})
    assert "exit status 1" in reason and "the card caught fire" in reason
    assert "the card caught fire" in capfd.readouterr().err


def test_a_section_that_hangs_is_stopped_and_keeps_its_figures():
    code = """import time; print('{"figures": {"a": 1}}', flush=True); time.sleep(600)"""
    figures, _, reason = run_section(program(code), 3)
    assert figures == {"a": 1} and "stopped after 3 s" in reason


def test_every_section_is_known_and_every_figure_expected_once():
    assert list(EXPECTED) == list(SECTIONS)
    names = [name for names in EXPECTED.values() for name in names]
    assert len(names) == len(set(names)) == 22


@pytest.mark.parametrize("name", [name for name in SECTIONS if name not in ("ours", "memory", "faster")])
def test_a_section_gives_what_is_expected_of_it_also_on_a_cpu(name, tiny, capsys, monkeypatch):
    monkeypatch.setattr("mktts.measure.checkpoint_maker._make", lambda kind, source: None)
    SECTIONS[name](SMALL)
    figures: dict = {}
    for line in capsys.readouterr().out.splitlines():
        figures |= json.loads(line).get("figures", {})
    assert set(figures) >= set(EXPECTED[name])
    assert all(figure["median"] > 0 for figure in figures.values() if figure["unit"] != "count")


def test_a_process_that_cannot_load_is_reported_by_its_last_message(tiny):
    with pytest.raises(BackendUnavailable) as caught:
        measure_load(tiny, "megakernel", "cpu", None)
    message = str(caught.value)
    assert message.startswith("loading in a fresh process failed: ") and "[" not in message and "CUDA" in message


def test_a_small_run_gives_the_document_and_names_what_is_missing(monkeypatch):
    monkeypatch.setitem(EXPECTED, "ours", (*EXPECTED["ours"], "never_ms"))
    stored: list[str] = []
    document = measure(SMALL, ["ours"], 120, lambda document: stored.append(json.dumps(document)))
    assert set(document["figures"]) >= set(EXPECTED["ours"]) - {"never_ms"}
    assert document["missing"] == {"never_ms": "the section gave no such figure"}
    assert json.loads(stored[-1]) == document
    assert {"device", "driver", "torch", "revision", "date", "settings", "packages"} <= set(document)
    for figure in document["figures"].values():
        assert {"median", "p95", "n", "unit"} <= set(figure)
    figures = {name: document["figures"][name]["median"] for name in ("frame_ms", "talker_step_ms", "predictor_ms")}
    assert document["figures"]["frame_with_codec_ms"]["n"] == 1  # chunks of 1, 1, 2, 4, 8, 8
    assert document["settings"]["sentence"] == SENTENCE and document["settings"]["sentence_tokens"] > 12
    assert figures["frame_ms"] > max(figures["talker_step_ms"], figures["predictor_ms"])
    assert RANDOM_WEIGHTS in table(document)
