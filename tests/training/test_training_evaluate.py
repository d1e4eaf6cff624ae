"""The measures of the voice against known truth, and the whole record with teachers and students that are made up."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from absent import needs

from mktts.checkpoint.random.weights import random_tensors
from mktts.checkpoint.tensors import expected_tensors
from mktts.cli import main
from mktts.errors import AudioError, CheckpointError, MetricsError
from mktts.spec import SAMPLE_RATE_HZ, SAMPLES_PER_FRAME
from mktts.training.codec import fit as codec_fit
from mktts.training.codec import sizes as codec_sizes
from mktts.training.codec.analysis import features
from mktts.training.codec.model import Codec, write_codec
from mktts.training.data.codec_data import vowels
from mktts.training.judge import grammar, natural, quality, sections, written
from mktts.training.judge.mcd import distortion_db, warp
from mktts.training.judge.speakers import Centroids, embedding, median_f0_hz
from mktts.training.judge.utterances import Judge, Setup, Spoken, Task, cached, codec_of, measure
from mktts.training.talker import sizes
from mktts.training.talker.checkpoint import prepare, write_checkpoint

PITCH_HZ = {"slt": 210.0, "rms": 100.0, "awb": 140.0}
FORMANTS = {"slt": ((800, 130), (1500, 170)), "rms": ((500, 130), (900, 170)), "awb": ((300, 130), (2200, 170))}


def vowel(f0_hz: float, seconds: float = 0.6, formants=((700, 130), (1200, 170))) -> np.ndarray:
    t = np.arange(int(SAMPLE_RATE_HZ * seconds)) / SAMPLE_RATE_HZ
    out = sum(
        sum(1 / (1 + ((k * f0_hz - hz) / width) ** 2) for hz, width in formants) * np.sin(2 * np.pi * k * f0_hz * t)
        for k in range(1, int(6000 / f0_hz))
    )
    return (0.3 * out / np.abs(out).max()).astype(np.float32)


@pytest.mark.parametrize("f0_hz", [90, 150, 220, 310])
def test_pitch_of_a_vowel(f0_hz):
    assert abs(median_f0_hz(vowel(f0_hz)) / f0_hz - 1) < 0.02


def test_the_cheapest_path_is_that_of_every_path_tried():
    def best(cost, i, j):
        here = cost[i, j]
        before = [best(cost, u, v) for u, v in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if u >= 0 and v >= 0]
        total, steps = min(before) if before else (0.0, 0)
        return total + here, steps + 1

    for shape in ((1, 1), (1, 5), (5, 1), (4, 6), (6, 4)):
        cost = np.random.default_rng(shape).random(shape)
        assert warp(cost) == pytest.approx(best(cost, shape[0] - 1, shape[1] - 1))


def test_distortion_is_nothing_for_the_same_audio_and_more_for_another_pitch():
    same = vowel(120)
    assert distortion_db(same, same) < 1e-3
    assert distortion_db(same, vowel(180)) > 0.5
    assert distortion_db(same, np.zeros(10, np.float32)) > 5  # shorter than a window


@pytest.mark.parametrize("ripples", [1, 3, 8])
def test_distortion_is_the_root_mean_square_of_a_known_difference_of_spectra(ripples):
    pulses = np.zeros(SAMPLE_RATE_HZ, np.float32)
    pulses[::240] = 0.9
    mel = 2595 * np.log10(1 + np.fft.rfftfreq(len(pulses), 1 / SAMPLE_RATE_HZ) / 700)
    gain_db = 6 * np.cos(ripples * np.pi * mel / (2595 * np.log10(1 + 8000 / 700)))
    other = np.fft.irfft(np.fft.rfft(pulses) * 10 ** (gain_db / 20))
    assert distortion_db(pulses, other) == pytest.approx(6 / np.sqrt(2), rel=0.06)


def test_a_longer_silence_in_front_is_aligned_away():
    sound, other = vowel(120), vowel(240)
    late = np.concatenate([sound[:4800], sound])
    assert distortion_db(sound, late) < distortion_db(sound, other)


def utterance(text: str, speaker: str, pitch: float = 1.0, stretch: float = 1.0) -> np.ndarray:
    seconds = stretch * (0.3 + len(text) / 200)
    return vowel(PITCH_HZ[speaker] * pitch, seconds, FORMANTS[speaker])


class Ears:
    """Hears as many wrong words as it was told for the loudest sample, none where it was told nothing."""

    def __init__(self, wrong: dict[float, int]) -> None:
        self.wrong = wrong

    def hear(self, pcm: np.ndarray) -> str:
        return " ".join(["wrong"] * self.wrong.get(round(float(np.abs(pcm).max(initial=0)), 2), 0))

    def sound(self, word: str) -> str:
        return word


def figures(student, count: int = 12) -> dict:
    judge = Judge(student, utterance, dict.fromkeys(("closed", "free"), Ears({0.3: 6, 0.15: 9})))
    speakers = tuple(PITCH_HZ)
    texts = [f"{word} is it" for word in "abcdefghijkl"][:count]
    tasks = [Task(text, speakers[i % 3], i, judged=True) for i, text in enumerate(texts)]
    clips = {s: [judge.run(Task(t, s, 0, centroid=True)).embedding for t in ("ab", "abcdefgh")] for s in speakers}
    return quality.all_figures([judge.run(task) for task in tasks], Centroids.of(clips))


def test_the_teacher_as_its_own_student():
    found = figures(lambda text, speaker, seed, greedy: Spoken(utterance(text, speaker), "eos"))
    for mode in ("closed", "free"):
        assert found["word_errors"][mode]["ratio"] == 1 and found["word_errors"][mode]["interval_95"] == (1, 1)
        assert found["word_errors"][mode]["teacher"] == 2  # six words heard for three said
    assert found["distortion"]["whole"]["max"] < 1e-3
    assert found["duration_ratio"]["inside"] == 1 == found["duration_ratio"]["percentiles"]["50"]
    assert found["speakers"]["student_accuracy"] == 1
    for speaker, f0 in found["speakers"]["median_f0_hz"].items():
        assert f0["teacher"] == f0["student"] == pytest.approx(PITCH_HZ[speaker], rel=0.02)
    assert all(line["met"] for line in quality.lines(found).values())


def test_a_student_that_fails_every_line():
    def student(text, speaker, seed, greedy):
        late = np.zeros(6_000, np.float32)  # 250 ms
        pcm = utterance(text, "rms", stretch=1.6) / 2
        return Spoken(np.concatenate([late, pcm]), "runaway" if seed % 2 else "eos")

    found = figures(student)
    assert found["word_errors"]["closed"]["ratio"] == 1.5  # nine words heard where the teacher gives six
    assert found["duration_ratio"]["inside"] == 0 and found["duration_ratio"]["min"] > 1.6
    assert found["end"]["missed"] == 6 and found["end"]["finish"] == {"eos": 6, "runaway": 6}
    assert found["end"]["which"][0] == {"text": "b is it", "speaker": "rms", "seed": 1}
    assert found["lead_ms"]["above_limit"] == 12 and 250 <= found["lead_ms"]["max"] < 252
    assert found["speakers"]["student_accuracy"] == pytest.approx(1 / 3)
    found["speed"] = {"rtf": {"median": 0.6}, "audible_ttfc_ms": {"median": 260.0}, "never_audible": 0}
    failed = quality.lines(found)
    assert len(failed) == 7 and not any(line["met"] for line in failed.values())


def test_a_silent_student_has_no_lead_and_no_number_that_json_lacks():
    found = figures(lambda text, speaker, seed, greedy: Spoken(np.zeros(0, np.float32), "eos"), 3)
    assert found["lead_ms"]["silent"] == 3 and not quality.lines(found)["lead_ms_max"]["met"]
    assert found["speakers"]["median_f0_hz"]["slt"]["student"] is None
    json.dumps(found, allow_nan=False)


def test_nearest_centroid():
    clips = {s: [embedding(utterance(t, s, p)) for t, p in (("a", 1.0), ("b", 1.1))] for s in PITCH_HZ}
    centroids = Centroids.of(clips)
    assert [centroids.nearest(embedding(utterance("abc", s, 0.95))) for s in PITCH_HZ] == list(PITCH_HZ)
    with pytest.raises(MetricsError, match="slt"):
        Centroids.of({"slt": clips["slt"][:1]})


def test_the_plan_judges_apart_from_the_centroids_and_counts_ends_of_the_rest():
    known, unknown = [f"s{i}" for i in range(90)], [("odd one", ["odd"])]
    tasks = grammar.judging_tasks(known, unknown, ("slt", "rms", "awb"), 30, 120, 7, True)
    judged, centroids = ([t for t in tasks if getattr(t, name)] for name in ("judged", "centroid"))
    assert len(judged) == 30 and len(centroids) == 60 and not {t.text for t in judged} & {t.text for t in centroids}
    assert all(t.greedy for t in judged)
    spoken = [t for t in tasks if not t.centroid]
    assert len({(t.text, t.speaker) for t in spoken}) == len({t.seed for t in spoken}) == 120
    assert {sum(t.speaker == s for t in judged) for s in ("slt", "rms", "awb")} == {10}
    with pytest.raises(MetricsError, match="1 to 30"):
        grammar.judging_tasks(known, unknown, ("slt", "rms", "awb"), 31, 0, 0, False)


@pytest.mark.slow
@needs("pocketsphinx")
def test_words_out_of_the_dictionary_are_named():
    known, unknown = grammar.sorted_out(["The dog barks.", "A zzyzxq barks.", "Yes."])
    assert sorted(known) == ["The dog barks.", "Yes."] and unknown == [("A zzyzxq barks.", ["zzyzxq"])]


def test_the_teacher_is_asked_once_with_a_cache(tmp_path):
    asked = []

    def speak(text, speaker):
        asked.append(text)
        return np.array([0.5, -1.0, 1.0], np.float32)

    first, again = (cached(tmp_path, "a", "slt", speak) for _ in range(2))
    assert asked == ["a"] and np.array_equal(first, again) and np.abs(first - [0.5, -1, 1]).max() < 1e-4
    assert np.array_equal(codec_of(None, tmp_path)("a", "slt", first), first)
    with pytest.raises(AudioError, match="npy"):
        codec_of(None, tmp_path)("b", "slt", first)


def test_the_codec_alone_from_its_file(tmp_path):
    vowels_pcm = torch.from_numpy(vowels(6.0, 0) / np.float32(32_768))
    codec, _ = codec_fit.fit(features(vowels_pcm[None])[0], codec_sizes.TINY, 0)
    codec_fit.save(codec, tmp_path / "codec.pt")
    pcm = vowel(120, 0.5)
    copy = codec_of(tmp_path / "codec.pt", None)("a", "slt", pcm)
    padded = torch.zeros(1, 7 * SAMPLES_PER_FRAME)  # 0.5 s are 6.25 frames
    padded[0, : len(pcm)] = torch.from_numpy(pcm)
    assert np.allclose(copy, codec.decode(codec.encode(padded))[0, : len(pcm)].numpy(), atol=1e-6)


STAND_IN = """#!{python}
import io, math, struct, sys, wave
out, hz = io.BytesIO(), {{"slt": 210, "rms": 100, "awb": 140}}[sys.argv[1]]
with wave.open(out, "wb") as f:
    f.setnchannels(1); f.setsampwidth(2); f.setframerate(16000)
    f.writeframes(struct.pack("<6400h", *(int(9000 * math.sin(6.2832 * hz * i / 16000)) for i in range(6400))))
sys.stdout.buffer.write(out.getvalue())
"""


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A checkpoint of the voice's layout and speakers, with random weights: what it says is noise."""
    folder = tmp_path_factory.mktemp("untrained")
    config = prepare(folder / "prepared", ["yes no go stop it run a dog"], sizes.TINY)
    tensors = random_tensors(expected_tensors(config), 0, torch.float32)
    tensors["talker.codec_head.weight"].zero_()  # every code as likely as the end, so that it comes within seconds
    torch.manual_seed(0)
    codec = Codec(codec_sizes.TINY)
    for chain in (codec.quantizer.first, codec.quantizer.rest):
        chain.books.normal_()
    write_codec(folder / "codec", codec)
    return write_checkpoint(folder / "voice", folder / "prepared", tensors, folder / "codec")


@pytest.mark.slow  # two processes each load the recogniser and torch
@needs("pocketsphinx")
def test_the_command_with_worker_processes(untrained, tmp_path, monkeypatch, capsys):
    program = tmp_path / "flite"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("FLITE", str(program))
    monkeypatch.setattr(grammar, "CENTROID_CLIPS", 2)
    monkeypatch.setattr(grammar, "LISTEN_SENTENCES", 1)
    monkeypatch.setattr(sections, "held_out", lambda: ["Yes.", "No.", "Go.", "Stop.", "Run.", "It."])
    monkeypatch.setattr(natural, "natural", lambda: ["A dog.", "Stop it."])
    monkeypatch.setattr(written, "items", lambda: written.read_items("Run 2.\trun two"))
    (tmp_path / "codec.json").write_text('{"distortion_db": 3.5}')
    given = f"train evaluate --checkpoint {untrained} --output {tmp_path}/record.json --sentences 2 --eos 3"
    given += f" --speed 2 --workers 2 --speakers slt,rms --teacher-cache {tmp_path}/cache --listen {tmp_path}/wav"
    given += f" --codec-figures {tmp_path}/codec.json --keep {tmp_path}/keep --forms 1"
    given += " --only natural,forms,numbers,grammar,speed"
    assert main(given.split()) == 0
    document = json.loads((tmp_path / "record.json").read_text())
    rows, natural_rows = document.pop("utterances"), document["natural"].pop("rows")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document
    assert [row["seed"] for row in rows] == [0, 1] and document["end"]["utterances"] == 3
    assert len(natural_rows) == 4 and document["natural"]["sentences"] == 2 and document["natural"]["words"] == 8
    assert document["sound"]["teacher"]["lead_ms"]["n"] == 4 and document["written"]["ear"]["n"] == 1
    assert {"rtf", "buzz_20ms", "natural_wer_teacher", "numbers_right", "ends_missed"} <= set(document["figures"])
    assert set(document["measured"]) == {"natural", "forms", "numbers", "grammar", "speed"}
    assert document["speed"]["rtf"]["n"] == 2 and document["speed"]["threads"] == 1
    assert document["environment"]["torch"] == torch.__version__ and document["codec_figures"]["distortion_db"] == 3.5
    pitch = document["speakers"]["median_f0_hz"]
    assert {name: round(f0["teacher"], -1) for name, f0 in pitch.items()} == {"slt": 210, "rms": 100}
    listed = json.loads((tmp_path / "wav" / "index.json").read_text())
    assert {row["name"] for row in listed} == {"0_slt", "0_rms"}
    assert sorted(path.name for path in (tmp_path / "wav").glob("*.wav")) == sorted(
        f"0_{speaker}_{who}.wav" for speaker in ("slt", "rms") for who in ("student", "teacher")
    )


def test_what_fails_in_a_worker_process_is_raised_by_name(tmp_path):
    with pytest.raises(CheckpointError, match="nothing"):
        list(measure(Setup(str(tmp_path / "nothing"), ("yes",)), [Task("Yes.", "slt", 0)], 2))
