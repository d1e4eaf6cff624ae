"""The bench: what it times, and that a section that fails loses nothing but itself. The trace: known medians."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from absent import needs
from commands import run
from fakes import FakeBackend
from readme_figures import speed_table
from traces import GHZ, STARVED_US, TOOK_US, document_of, launch_of, launches_of

from mktts.checkpoint.random import RANDOM_WEIGHTS
from mktts.cli import main
from mktts.errors import BackendUnavailable, MetricsError
from mktts.kernel.grid import choose_shape
from mktts.kernel.trace import frame_points
from mktts.measure import trace
from mktts.measure.bench import command, sections
from mktts.measure.bench.command import SECTIONS, measure, run_section, table
from mktts.measure.bench.sections import SENTENCE, BenchSettings, steady_frame_ms, text_of, timed_frames
from mktts.measure.trace import BUILDS, document, record
from mktts.model.backend import Frame
from mktts.model.prompt import Prompt
from mktts.model.sampling import Sampling
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

FEW = dict(frames=24, context=16, around=2, samples=4, utterances=1, peer_utterances=1, device="cpu")
TINY = BenchSettings(**dict.fromkeys(("checkpoint", "large", "text_model"), "random:tiny"), **FEW)
PROMPT_ROWS = 9
LAYERS = (4, 2)  # of the trace


class Counter(FakeBackend):
    """A frame's talker_ms is the position it ran at; the stream `ends` says end-of-speech at its frame 3."""

    ends = 99

    def step(self, state, row) -> Frame:
        assert row is None or int(row[0]) == state.frames - 1  # the row after frame t - 1
        codes = super().step(state, row).codes
        ended = len(self.states) - 1 == self.ends and state.frames == 3
        return Frame(None if ended else codes, float(PROMPT_ROWS + state.frames - 2), 0.0)


@pytest.mark.parametrize("ends", [0, 1, 99])
@pytest.mark.parametrize(("at_once", "around", "positions"), [(1, 3, range(17, 23)), (4, 6, (17, 18, 19, 21, 22, 23))])
def test_frames_are_timed_around_the_context_and_never_in_the_first_stream(ends, at_once, around, positions):
    rows = torch.arange(100)[:, None].expand(-1, 4)
    prompt, backend = Prompt(rows[:PROMPT_ROWS], rows, rows[0], 100), Counter()
    backend.ends = ends
    settings = BenchSettings(context=20, around=around, samples=10)
    frames = list(timed_frames(backend, prompt, Sampling(), settings, at_once))
    assert [frame.talker_ms for _, frame in frames] == [*positions, *positions[:4]]
    assert all(elapsed_ms >= 0 for elapsed_ms, _ in frames)
    assert len(backend.states) == (4 if ends == 1 else 3)


@pytest.mark.parametrize("tokens", [1, 7, 12, 200])
def test_the_benchs_text_has_exactly_the_tokens_asked_for_or_the_next_more(tiny, tokens):
    encode = tiny.tokenizer().encode
    assert len(encode(text_of(tokens, encode))) == tokens
    assert len(text_of(tokens, str.split).split()) == tokens
    assert len(text_of(tokens, lambda text: 2 * text.split()).split()) == (tokens + 1) // 2


def test_a_frame_with_its_codec_is_the_time_between_two_steady_chunks_over_their_frames():
    chunks = [(1, 10.0), (8, 40.0), (8, 56.0), (8, 88.0), (3, 90.0)]
    assert steady_frame_ms(chunks) == [2.0, 4.0]
    assert steady_frame_ms(chunks[:2]) == steady_frame_ms([]) == []


def test_a_section_that_fails_or_hangs_keeps_its_figures_and_gives_its_last_message(capfd):
    said = """print('a library'); print('{"figures": {"a": 1}}'); print('{"notes": {"n": 2}}', flush=True)\n"""

    def ran(code: str, timeout_s: float):
        return run_section([sys.executable, "-c", said + code, "section", "{}"], timeout_s)

    figures, notes, reason = ran("raise RuntimeError('the card caught fire')", 60)
    assert (figures, notes, reason) == ({"a": 1}, {"n": 2}, "exit status 1: RuntimeError: the card caught fire")
    assert "the card caught fire" in capfd.readouterr().err
    figures, _, reason = ran("import time; time.sleep(600)", 1)
    assert figures == {"a": 1} and "stopped after 1 s" in reason


class FakeFaster:
    """What the section uses of faster-qwen3-tts 0.5.4; a frame takes 5 ms by its own clock."""

    loaded: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.model = self.processor = self.tokenizer = self

    @classmethod
    def from_pretrained(cls, folder, **where):
        """Of the model, and of its tokenizer: without the flag that swaps the pre-tokenizer."""
        print("a banner")
        cls.loaded += (folder,)
        return cls()

    def generate_custom_voice_streaming(
        self, *, text, speaker, language, non_streaming_mode, max_new_tokens, chunk_size, temperature, top_k, **given
    ):
        assert set(given) == {"top_p", "do_sample", "repetition_penalty"} and non_streaming_mode == (text == SENTENCE)
        for made in range(0, max_new_tokens, chunk_size):
            steps = min(chunk_size, max_new_tokens - made)
            timing = {"chunk_steps": steps, "total_steps_so_far": made + steps, "decode_ms": 5.0 * steps}
            yield np.zeros(steps * SAMPLES_PER_FRAME, np.float32), SAMPLE_RATE_HZ, timing


@pytest.mark.parametrize("name", ["streams", "codec", "text", "large", "upstream", "faster"])
def test_a_section_gives_what_is_expected_of_it_also_on_a_cpu(name, tiny, capsys, monkeypatch):
    monkeypatch.setattr(sections, "_CODEC_WARM_UP_FRAMES", 8)
    monkeypatch.setitem(sys.modules, "faster_qwen3_tts", SimpleNamespace(FasterQwen3TTS=FakeFaster))
    command.print_section(name, replace(TINY, samples=10, context=20, around=8) if name == "faster" else TINY)
    figures: dict = {}
    for line in capsys.readouterr().out.splitlines():
        figures |= json.loads(line).get("figures", {})  # and nothing but JSON is printed
    marked = {f"{figure.removesuffix('_ms')}_1p7b_ms" for figure in SECTIONS["frames"][1]}
    assert set(figures) >= (marked if name == "large" else {*SECTIONS[name][1]})
    assert all({"p95", "n", "unit"} <= set(figure) and figure["median"] > 0 for figure in figures.values())
    if name == "faster":
        assert figures["faster_frame_ms"]["max"] == 5.0 and figures["faster_ttfc_ms"]["n"] == 1
        assert FakeFaster.loaded == (str(tiny.folder),) * 2


@needs("pocketsphinx")
def test_word_times_are_measured_on_a_trained_voice(tmp_path, monkeypatch):
    texts = "Good evening, and welcome.", "Never say blorptang.", "He forgot his keys again."
    (tmp_path / "sentences.json").write_text(json.dumps(texts))
    monkeypatch.setattr(sections, "files", lambda package: tmp_path)
    starts, ends, notes = sections.words(replace(TINY, checkpoint="small"))
    assert len(starts[1]) == len(ends[1]) == 9  # not of the sentence with a word that the aligner does not know
    assert notes["sentences"] == 2 and "pocketsphinx" in notes["tool"]
    assert sum(starts[1]) < 9 * 0.1
    with pytest.raises(MetricsError, match="trained"):
        list(sections.words(TINY))


def test_a_run_gives_the_document_and_names_what_is_missing(tiny, tmp_path, monkeypatch):
    """tests/test_cli.py runs a section in its process."""
    figure, failed = {"median": 1.0, "p95": 2.0, "n": 3, "unit": "ms"}, ({}, {}, "exit status 1: why")
    ran = {"codec": ({"codec_1_ms": figure}, {"codec_variant": "plain"}, None), "text": failed}
    monkeypatch.setattr(command, "run_section", lambda words: ran[words[-2]])
    path = tmp_path / "bench.json"
    document = measure(TINY, ["codec", "text"], path)
    assert json.loads(path.read_text()) == document
    assert {"device", "driver", "torch", "revision", "date", "settings", "packages"} <= set(document)
    assert document["figures"] == {"codec_1_ms": figure} and document["settings"]["codec_variant"] == "plain"
    missing = {"codec_8_ms": "the section gave no such figure", "text_tok_s": "exit status 1: why"}
    assert document["missing"] == missing
    assert RANDOM_WEIGHTS in table(document) and "text_tok_s" in table(document)
    assert "not measured" in speed_table(document | {"revision": "abc"})[2]  # the README's, of whatever is measured


def test_the_command_measures_this_checkpoint_or_all_with_peers_and_names_an_absent_one(monkeypatch, capsys):
    asked = []

    def measured(settings, names, output):
        asked.append((settings.checkpoint, settings.samples, list(names)))
        return {"missing": {"a": "why"} if "faster" in names else {}}

    monkeypatch.setattr(command, "measure", measured)
    monkeypatch.setattr(command, "table", lambda document: "table")
    words = [["--device", "cpu"], ["--peers"], ["--only", "text"]]
    assert [run("bench", *more) for more in words] == [0, 1, 0]
    quick, whole = (command.CHECKPOINT, 20), (BenchSettings.checkpoint, BenchSettings.samples)
    assert asked == [(*quick, ["streams", "codec"]), (*whole, list(SECTIONS)[:-1]), (*quick, ["text"])]
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"missing": {}}
    with pytest.raises(MetricsError, match="--only names sections of streams, .*, found ours"):
        run("bench", "--only", "ours")
    monkeypatch.setitem(sys.modules, "faster_qwen3_tts", None)
    with pytest.raises(BackendUnavailable, match="faster_qwen3_tts is needed"):
        list(sections.faster(TINY))


# ---- the trace's document


@pytest.fixture(scope="module")
def found():
    return document(launches_of(LAYERS, 16), LAYERS)


def test_phases_have_their_medians_and_add_up_to_the_frame(found):
    assert found["clock_ghz"] == pytest.approx(GHZ, rel=1e-4)
    for alone, build in enumerate(BUILDS):
        rows = found["phases"][build]
        for row in rows:
            expected = TOOK_US[row["kind"]][alone]
            assert row["us"] == pytest.approx(expected, abs=0.02) and row["us_p10"] <= row["us"] <= row["us_p90"]
            assert row["frame_us"] == pytest.approx(expected * row["count"], rel=0.01, abs=0.05)
            waited = 0.0 if alone else STARVED_US[row["kind"]] * row["count"]
            assert row["weights_us"] == pytest.approx(waited, abs=0.05)
        assert sum(row["count"] for row in rows) == len(frame_points(*LAYERS)) == found["settings"]["marks"]
        assert sum(row["frame_us"] for row in rows) == pytest.approx(found["frame_us"][build], rel=0.01)
        counts = {(row["stack"], row["phase"]): row["count"] for row in rows}
        assert counts["talker", "hop: parts of attention"] == LAYERS[0]
        assert counts["predictor", "hop: activations"] == 15 * LAYERS[1]
        assert counts["predictor", "hop: logits, and the draw"] == 15 and counts["talker", "last norm and head"] == 1


def test_one_frame_is_kept_mark_by_mark_in_a_file_that_stays_small(found):
    assert set(found["frame_us"]) == {"without marks", *BUILDS}
    assert found["frame_us"]["without marks"] == found["frame_us"][BUILDS[0]]
    steps = np.array(found["steps"].split(), float)
    assert len(steps) == found["settings"]["marks"]
    assert steps.sum() == pytest.approx(found["frame_us"][BUILDS[0]], rel=0.01)
    assert len(json.dumps(document_of(), indent=2)) < 40_000  # of the released size


class NoCard(FakeBackend):
    """A backend of one frame's known times: `TracedBackend` as the command uses it."""

    def __init__(self, config, tensors, device):
        super().__init__()
        self.shape = choose_shape(config, 132)
        self.layers = config.talker.num_hidden_layers, config.predictor.num_hidden_layers

    def frames(self, state, rows):
        assert len(list(super().frames(state, rows))) == len(rows)
        return iter(launch_of(self.layers, 1, 0).frames)

    def traced(self, state, rows, still):
        frames = list(self.frames(state, rows))
        return frames, launch_of(self.layers, self.shape.blocks, state.frames, alone=still).marks


def test_recording_takes_turns_and_says_what_was_recorded(tiny, monkeypatch):
    monkeypatch.setattr(trace, "TracedBackend", NoCard)
    found = record(tiny, "cpu", launches=2, context=40)
    config = tiny.config
    assert found["settings"]["blocks"] == 16 and found["settings"]["launches"] == 2
    assert found["settings"]["talker_layers"] == config.talker.num_hidden_layers
    assert found["settings"]["weight_bytes"]["predictor"] > found["settings"]["weight_bytes"]["talker"] > 0
    assert found["settings"]["random_weights"] and {"revision", "date", "device"} <= set(found)
    waits = [sum(row["weights_us"] for row in found["phases"][build]) for build in BUILDS]
    assert waits[0] > 0 == waits[1] and json.loads(json.dumps(found, allow_nan=False)) == found


def test_where_there_is_no_device_nothing_is_recorded(capsys):
    assert main(["lab", "trace", "--checkpoint", "random:tiny"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
