"""The sections of the judgement, each against a truth that is made up, and the record that they make."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from absent import needs

from mktts.audio import read_audio
from mktts.checkpoint import open_checkpoint
from mktts.checkpoint.open import SMALL
from mktts.errors import AudioError, MetricsError
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.judge import evaluate, forms, intervals, natural, sound, written
from mktts.training.judge.figures import MUST, figures
from mktts.training.judge.keep import KeptFolder, Spoken, digest_of
from mktts.training.judge.likeness import likeness_of, section
from mktts.training.judge.listener import CODEC, STUDENT, TEACHER, Judged, JudgedSound, Line, LineJudge, Listened
from mktts.training.judge.loudness import integrated_lufs

CLIPS = Path(__file__).parents[2] / "outputs" / "reference" / "voice"


def tone(hz: float, amplitude: float, seconds: float = 3.0) -> np.ndarray:
    t = np.arange(round(seconds * SAMPLE_RATE_HZ)) / SAMPLE_RATE_HZ
    return (amplitude * np.sin(2 * np.pi * hz * t)).astype(np.float32)


@needs("pyloudnorm")
@pytest.mark.parametrize("dbfs", [-40.0, -20.0, -3.0])
def test_the_loudness_of_the_standards_test_tone(dbfs):
    # ITU-R BS.1770-4: a sine of 997 Hz at 0 dBFS in one channel is -3.01 LUFS; EBU Tech 3341 allows a meter 0.1 LU
    assert integrated_lufs(tone(997, 10 ** (dbfs / 20))) == pytest.approx(dbfs - 3.01, abs=0.1)


@needs("pyloudnorm")
def test_pauses_are_gated_and_silence_has_no_loudness():
    speech = tone(997, 0.1)
    paused = np.concatenate([speech, np.zeros(4 * SAMPLE_RATE_HZ, np.float32)])
    assert integrated_lufs(paused) == pytest.approx(integrated_lufs(speech), abs=0.7)  # ungated 3.7 LU less
    assert integrated_lufs(np.zeros(SAMPLE_RATE_HZ, np.float32)) is None and integrated_lufs(speech[:5_000]) is None


@needs("pystoi")
def test_a_copy_is_like_its_original_and_noise_is_not():
    speech, _ = read_audio(CLIPS / "0_slt_teacher.flac")
    speech *= 0.8 / np.abs(speech).max()  # little of it lies at the floor
    noise = (0.1 * np.random.default_rng(0).standard_normal(len(speech))).astype(np.float32)
    same, faint, other = (likeness_of(speech, copy) for copy in (speech, speech * 0.5, noise))
    assert same.stoi == pytest.approx(1) and same.estoi == pytest.approx(1) and same.log_spectral_distance_db == 0
    assert faint.stoi == pytest.approx(1, abs=0.01) and 4 < faint.log_spectral_distance_db < 6.03  # a floor is a floor
    assert other.stoi < 0.4 and other.log_spectral_distance_db > 15
    assert likeness_of(speech[:9_000], speech[:9_000]).stoi is None
    rows = section([same, faint, other])
    assert rows["stoi"]["median"] == pytest.approx(faint.stoi) and rows["log_spectral_distance_db"]["n"] == 3


def test_an_interval_is_as_wide_as_theory_says():
    values = np.random.default_rng(1).normal(5, 2, 400)
    low, high = intervals.of_mean(values)
    assert low < values.mean() < high and high - low == pytest.approx(2 * 1.96 * 2 / 20, rel=0.12)
    errors, words = np.random.default_rng(2).binomial(10, 0.3, 300), np.full(300, 10)
    low, high = intervals.of_rate(errors, words)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(0.3 * 0.7 / 3_000), rel=0.15)
    assert intervals.bootstrap(3, lambda at: None) is None
    with pytest.raises(MetricsError, match="at least one"):
        intervals.of_median(np.zeros(0))


def listened(text: str, speaker: str, teacher: int, student: int, **voices: int) -> Listened:
    heard = {TEACHER: teacher, STUDENT: student, **voices}
    line = Line(text, text, speaker, 0)
    return Listened(line, len(text.split()), {name: Judged(1.0, "eos", errors) for name, errors in heard.items()})


def test_word_errors_of_all_and_of_the_best_speaker():
    made = [
        listened("a b c d e", "x", 1, 4),
        listened("a b c d e", "y", 1, 1),
        listened("f g h i j", "x", 1, 2, codec=1),
        listened("f g h i j", "y", 2, 2),
    ]
    found = natural.word_section(made)
    assert found["ratio"] == 9 / 5 and found["teacher"]["rate"] == 5 / 20 and found["student"]["rate"] == 9 / 20
    assert found["best"] == "y" and found["by_speaker"]["y"]["ratio"] == 1 and found["by_speaker"]["x"]["ratio"] == 3
    assert found["sentences"] == 2 and found["words"] == 20 and CODEC not in found and len(found["rows"]) == 4
    low, high = found["interval_95"]  # two sentences: 5 over 2, 4 over 3
    assert low == pytest.approx(4 / 3) and high == pytest.approx(5 / 2)
    assert found["by_speaker"]["x"]["teacher"]["interval_95"] == (0.2, 0.2)


def test_a_part_of_the_natural_sentences_is_spread_and_each_is_said_by_all():
    all_of_them, seven = natural.sentences(), natural.sentences(7)
    assert list(all_of_them) == list(range(len(all_of_them))) and seven.items() <= all_of_them.items()
    assert len(seven) == 7 and {len(all_of_them) // 7, len(all_of_them) // 7 + 1} >= set(np.diff(list(seven)))
    lines = natural.lines({0: "a", 5: "b"}, ("x", "y"), 3)
    assert [(line.text, line.speaker, line.seed) for line in lines] == [(*"ax", 3), (*"ay", 3), (*"bx", 8), (*"by", 8)]
    with pytest.raises(MetricsError, match="got 100000"):
        natural.sentences(100_000)


def test_the_forms_of_a_text():
    said = "Well, I don't know the big-hearted man!"
    found = {name: form(said) for name, form in forms.FORMS.items()}
    assert found == {
        "as_written": said,
        "lower_case": "well, i don't know the big-hearted man!",
        "all_caps": "WELL, I DON'T KNOW THE BIG-HEARTED MAN!",
        "title_case": "Well, I Don't Know The Big-Hearted Man!",
        "no_final_mark": "Well, I don't know the big-hearted man",
    }
    lines = forms.lines({0: "A b.", 1: "C d."}, ("x", "y"), 0)
    assert len(lines) == 10 and {(line.said, line.speaker, line.seed) for line in lines} == {
        ("A b.", "x", 0),
        ("C d.", "y", 1),
    }
    as_natural = natural.lines({0: "A b."}, ("x",), 0)[0]
    assert replace(lines[0], voices=as_natural.voices, sound=True) == as_natural  # need not be spoken again


def test_the_worst_form():
    errors = {
        "as_written": (1, 1),
        "lower_case": (1, 1),
        "all_caps": (4, 4),
        "title_case": (2, 1),
        "no_final_mark": (0, 0),
    }
    made = [listened("a b c d", "x", 0, count) for form in forms.FORMS for count in errors[form]]
    for i, one in enumerate(made):
        made[i] = replace(one, line=replace(one.line, said=f"a b c {i % 2}"))
    found = forms.section(made)
    assert found["worst"] == "all_caps" and found["forms"]["all_caps"]["ratio"] == 4
    assert found["forms"]["as_written"]["rate"] == 2 / 8 and found["forms"]["title_case"]["ratio"] == 1.5
    assert found["sentences"] == 2 and found["words"] == 8


ITEMS = written.read_items("# a remark\n\nIt costs $12.\tit costs twelve dollars\nThe USA.\tthe u s a | the usa\n")


def test_written_numbers_are_right_by_the_words_of_a_front_end():
    words = {"It costs $12.": "It costs twelve dollars.", "The USA.": "The U S A."}
    assert written.word_section(ITEMS, words.get)["right"] == 2
    plain = written.word_section(ITEMS, None)
    assert plain["right"] == 1 and plain["n"] == 2 and not plain["front_end"]
    assert plain["wrong"] == [
        {"written": "It costs $12.", "words": "It costs $12.", "expected": "it costs twelve dollars"}
    ]


def test_wrong_readings_are_wrong():
    assert written.wrong_readings(ITEMS[0]) == ["it costs one two", "it costs", "it costs twelve"]
    assert written.wrong_readings(ITEMS[1]) == []  # letters and the word sound the same
    assert set(written.choices(ITEMS)) >= {"the u s a", "it costs one two"}


def test_written_numbers_are_right_by_ear_where_a_right_reading_is_chosen():
    def heard(line: Line) -> Listened:
        by = {STUDENT: "it costs one two" if line.speaker == "x" else "the usa", TEACHER: line.said}
        return Listened(line, 1, {name: Judged(1.0, "eos", 0, text) for name, text in by.items()})

    lines = written.lines(ITEMS, ("x", "y"), 0)
    found = written.ear_section(ITEMS, [heard(line) for line in lines])
    assert found["student"] == {"by_speaker": {"x": 0, "y": 1}, "best": 1} and found["teacher"]["best"] == 2


@needs("pocketsphinx")
def test_the_recogniser_chooses_what_was_said():
    from mktts.measure.recogniser import ClosedRecogniser

    rows = json.loads((CLIPS / "index.json").read_text())
    said = [re.sub(r"[^a-z' ]", "", row["text"].lower()) for row in rows]
    choice = ClosedRecogniser(["nothing of the kind", *said, "zzyzxq"])
    for row, text in zip(rows, said, strict=True):
        assert choice.hear(read_audio(CLIPS / f"{row['name']}_teacher.flac")[0]) == text
    with pytest.raises(MetricsError, match="zzyzxq"):
        ClosedRecogniser(["zzyzxq"])


def sounding(speaker: str, said: str, lufs: float | None, buzz: float = 0.8, lead_ms: float | None = 80.0) -> Listened:
    heard = Judged(1.0, "eos", 0, "", JudgedSound(buzz, 0.5, -51.0, None, lead_ms, lufs))
    return Listened(Line(said, said, speaker, 0), 1, {STUDENT: heard})


def test_figures_of_sound():
    made = [sounding("x", "a", -17.0, 0.7), sounding("y", "a", -22.5, 0.8), sounding("x", "b", -16.0, 0.9)]
    made += [sounding("y", "b", -22.5, 1.0, None), sounding("x", "c", -90.0), sounding("y", "c", None)]
    found = sound.section(made)[STUDENT]
    assert found["buzz_20ms"]["median"] == pytest.approx(0.8) and found["buzz_20ms"]["n"] == 6
    assert found["click_dbfs"]["median"] == -51 and found["start_dbfs"]["median"] == -120
    assert found["lead_ms"]["n"] == 5 and found["lead_ms"]["silent"] == 1
    loud = found["loudness"]  # of the two sentences that both say
    assert loud["speakers"] == {"x": -16.5, "y": -22.5} and loud["spread_lu"] == 6 and loud["sentences"] == 2
    assert loud["off_target_lu"] == 6.5 and loud["interval_95"] == pytest.approx((5.5, 6.5))


@needs("pyloudnorm")
def test_a_listener_measures_what_it_hears():
    class Ears:
        def hear(self, pcm: np.ndarray) -> str:
            return "one two" if len(pcm) > 50_000 else "one"

        def sound(self, word: str) -> str:
            return word

    listener = LineJudge(
        lambda text, speaker, seed, greedy: Spoken(tone(997, 0.1, 2.0), "runaway"),
        lambda text, speaker: tone(997, 0.1, 3.0),
        {"free": Ears()},
        lambda text, speaker, pcm: pcm * np.float32(0.5),
    )
    line = Line("1 2", "one two", "x", 0, (STUDENT, TEACHER, CODEC), sound=True)
    found = listener.run(line)
    assert found.words == 2 and [found.voices[name].errors for name in line.voices] == [1, 0, 0]
    assert found.voices[STUDENT].finish == "runaway" and found.voices[STUDENT].audio_s == 2
    assert found.voices[STUDENT].sound.lufs == pytest.approx(-23, abs=0.1)
    assert found.voices[CODEC].sound.lufs == pytest.approx(-29, abs=0.1)
    assert listener.run(replace(line, ears=None, sound=False)).voices[STUDENT] == Judged(2.0, "runaway")


def test_what_is_kept_is_not_done_again(tmp_path):
    asked = []

    def student(text: str, speaker: str, seed: int, greedy: bool) -> Spoken:
        asked.append((text, greedy))
        return Spoken(np.array([0.5, -1.0, 1.0], np.float32), "eos")

    keep = KeptFolder(tmp_path)
    first, again = (keep.student(student, ("v",))("a", "slt", 1, False) for _ in range(2))
    keep.student(student, ("v",))("a", "slt", 1, True)
    keep.student(student, ("other",))("a", "slt", 1, False)
    assert asked == [("a", False), ("a", True), ("a", False)] and first.finish == "eos"
    assert np.array_equal(first.pcm, again.pcm) and np.abs(first.pcm - [0.5, -1, 1]).max() < 1e-4

    heard = []
    for _ in range(2):
        assert keep.heard(first.pcm, "free", lambda pcm: heard.append(1) or "yes") == "yes"
    assert keep.heard(first.pcm, "closed", lambda pcm: "no") == "no" and len(heard) == 1
    for path in (tmp_path / "student").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(AudioError, match="delete it"):
        keep.student(student, ("v",))("a", "slt", 1, False)
    assert KeptFolder(None).teacher() is None and KeptFolder(None).student(student, ()) is student


def test_another_voice_has_another_digest(tmp_path):
    small = open_checkpoint(SMALL)
    copy = tmp_path / "copy"
    shutil.copytree(small.folder, copy)
    assert digest_of(open_checkpoint(copy)) == digest_of(small)
    config = copy / "generation_config.json"
    config.write_text(config.read_text() + "\n")
    assert digest_of(open_checkpoint(copy)) != digest_of(small)


def test_the_figures_of_a_record_and_whether_they_are_met():
    ratio = {"ratio": 1.9, "interval_95": [1.7, 2.1], "sentences": 260}
    rate = {"rate": 0.07, "interval_95": [0.06, 0.08]}
    document = {
        "natural": ratio | {"words": 9, "best": "y", "by_speaker": {"y": ratio}, "student": rate, "teacher": rate},
        "word_errors": {"free": ratio, "closed": ratio},
        "word_errors_codec": {"free": ratio | {"ratio": 1.2}, "closed": ratio},
        "forms": {"forms": {"all_caps": ratio}, "worst": "all_caps", "sentences": 120},
        "written": {"words": {"right": 57, "n": 60}},
        "sound": sound.section([sounding("x", "a", -22.5, 0.15), sounding("y", "a", -23.2, 0.15)]),
    }
    found = figures(document)
    wanted = "natural_wer_ratio natural_wer_ratio_best grammar_wer_ratio_free grammar_wer_ratio_closed"
    wanted += " codec_wer_ratio_free buzz_20ms form_wer_ratio_worst numbers_right click_dbfs loudness_spread_lu"
    assert set(wanted.split()) <= set(found)
    for name in wanted.split():
        assert {"value", "unit", "n", "interval_95", "must", "met"} == set(found[name]), name
    met = {name for name, row in found.items() if row.get("met")}
    assert met == {
        "natural_wer_ratio", "natural_wer_teacher", "codec_wer_ratio_free", "buzz_20ms", "numbers_right",
        "loudness_spread_lu", "loudness_off_target_lu", "lead_ms",
    }  # fmt: skip
    assert set(found) <= set(MUST) | {"natural_wer_student", "buzz_80ms", "start_dbfs"}
    assert figures({}) == {} and found["natural_wer_ratio"]["interval_95"] == [1.7, 2.1]


def given(tmp_path: Path, *words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    return parser.parse_args(["--checkpoint", "small", "--output", str(tmp_path / "o" / "record.json"), *words])


def test_sections_are_measured_piece_by_piece(tmp_path):
    told = []

    def numbers(right: int):
        def measured(given):
            told.append(given)
            if right < 0:
                raise MetricsError("cut off")
            return {"written": {"words": {"right": right, "n": 60}}}

        return measured

    sections = {"numbers": numbers(40), "same": lambda given: {"same_codes": {"equal": 20, "sentences": 20}}}
    first = evaluate.evaluate(given(tmp_path, "--natural", "50"), sections)
    assert first["figures"]["numbers_right"]["value"] == 40 and told[0].natural == 50 and told[0].ends == 500
    assert set(first["measured"]) == {"numbers", "same"} and "numbers_right" in evaluate.table(first)
    again = evaluate.evaluate(given(tmp_path, "--only", "numbers"), sections | {"numbers": numbers(58)})
    assert again["figures"]["numbers_right"]["met"] and again["figures"]["same_codes_as_upstream"]["value"] == 20
    with pytest.raises(MetricsError, match="cut off"):
        evaluate.evaluate(given(tmp_path), {"same": sections["same"], "numbers": numbers(-1)})
    kept = json.loads((tmp_path / "o" / "record.json").read_text())  # what came before the failure
    assert kept["same_codes"]["equal"] == 20 and "written" not in kept
    with pytest.raises(MetricsError, match="got nothing"):
        evaluate.evaluate(given(tmp_path, "--only", "nothing"), sections)
    evaluate.evaluate(
        given(tmp_path, "--quick"), {"numbers": numbers(1), "speed": numbers(-1), "upstream": numbers(-1)}
    )
    assert (told[-1].natural, told[-1].forms, told[-1].sentences, told[-1].ends) == (30, 30, 30, 0)


def test_the_sixty_are_read_by_the_front_end_that_a_checkpoint_names_and_by_no_other(tmp_path):
    folder = tmp_path / "named"
    shutil.copytree(open_checkpoint(SMALL).folder, folder)
    path = folder / "generation_config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name != "text_front_end"}
    rights = []
    for named in ({}, {"text_front_end": "english"}):
        path.write_text(json.dumps(config | named))
        rights.append(written.word_section(written.items(), written.front_end(open_checkpoint(folder))))
    assert [found["n"] for found in rights] == [60, 60] and [found["front_end"] for found in rights] == [False, True]
    assert rights[0]["right"] < 10 and rights[1]["right"] >= 57
