"""Compares the voice with its teacher: `python -m mktts train evaluate`.

Both speak the held-out sentences of everyday speech, the teacher's as audio shards, and are measured as 16-bit audio.
`figures`: name -> value, n, 95 % interval (percentile bootstrap over sentences), and the requirement."""

import argparse
import hashlib
import importlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from mktts.audio import first_audible_sample, from_pcm16, read_audio, to_pcm16, write_audio
from mktts.checkpoint import open_checkpoint
from mktts.common import read_json, write_json
from mktts.measure.environment import environment
from mktts.measure.recogniser import Recogniser, to_16_khz
from mktts.spec import SAMPLE_RATE_HZ
from mktts.training.data.audio import clips_in
from mktts.training.data.kokoro import package
from mktts.training.judge import signal

WHISPER = "whisper-base"  # folder of a faster-whisper model, in the working folder
AT_MOST, AT_LEAST = "at most", "at least"
MUST: Mapping[str, tuple[str, float]] = {
    "distillmos_best": (AT_LEAST, 3.6),
    "distillmos_all": (AT_LEAST, 3.4),
    "distillmos_difference": (AT_LEAST, -0.7),
    "wer_ratio": (AT_MOST, 1.5),
    "wer_whisper_base": (AT_MOST, 0.05),
    "comb_worst_band": (AT_MOST, 0.08),
    "pitch_band_ratio": (AT_LEAST, 0.8),
    "high_band_db": (AT_LEAST, -6.0),
    "similarity": (AT_LEAST, 0.8),
    "ends_missed": (AT_MOST, 0),
    "durations_inside": (AT_LEAST, 0.95),
    "click_dbfs": (AT_MOST, -70.0),
    "loudness_spread_lu": (AT_MOST, 1.0),
    "rtf_one_core": (AT_MOST, 0.35),
    "ttfc_ms": (AT_MOST, 35.0),
    "listeners_cpu": (AT_LEAST, 14),
    "weights_mb": (AT_MOST, 48.0),
}
VOICES = ("student", "teacher")
BETWEEN = (0.8, 1.25)  # acceptable durations relative to the teacher's
_DRAWS = 2_000
_SPEED_STREAMS = 24

Record = dict[str, Any]


class Spoken(NamedTuple):
    """A sentence by both, float32 (n,) at 24 kHz, rounded to 16 bits."""

    text: str
    speaker: str
    student: np.ndarray
    teacher: np.ndarray
    ended: bool  # whether the student ended by itself

    def row(self) -> Record:
        seconds = {who: round(len(getattr(self, who)) / SAMPLE_RATE_HZ, 3) for who in VOICES}
        return {"text": self.text, "speaker": self.speaker, "audio_s": seconds, "ended": self.ended}


def both(utterances: list[Spoken], measure: Callable[[np.ndarray], Any]) -> tuple[np.ndarray, np.ndarray]:
    """Applies `measure` to every sentence: the student's values, and the teacher's."""
    return tuple(np.array([measure(getattr(u, who)) for u in utterances]) for who in VOICES)


def put(record: Record, name: str, value: float, n: int, interval: tuple[float, float] = (np.nan, np.nan)) -> None:
    """Adds a figure to a record, together with its requirement."""
    number, low, high = (float(v) if np.isfinite(v) else None for v in (value, *interval))
    row: Record = {"value": number, "n": n, "low": low, "high": high}
    if name in MUST:
        bound, limit = MUST[name]
        met = value <= limit if bound == AT_MOST else value >= limit
        row |= {"must": [bound, limit], "met": bool(met)}
    record.setdefault("figures", {})[name] = row


def put_rows(record: Record, name: str, rows: np.ndarray, figure: Callable[[np.ndarray], float] = np.nanmean) -> None:
    """Adds a figure of rows (n, ...), one for each sentence, to a record, with its interval; by default the mean."""
    drawn = np.random.default_rng(0).integers(len(rows), size=(_DRAWS, len(rows)))
    interval = np.nanpercentile([figure(rows[at]) for at in drawn], (2.5, 97.5))
    put(record, name, figure(rows), len(rows), tuple(interval))


def quality(utterances: list[Spoken], record: Record) -> None:
    """Measures DistillMOS and DNSMOS."""
    import torch

    try:
        importlib.import_module("torchaudio")
    except (ImportError, OSError):  # built for another torch; distillmos only needs it to read files
        sys.modules["torchaudio"] = ModuleType("torchaudio")
    model, dnsmos = package("distillmos").ConvTransformerSQAModel().eval(), package("speechmos.dnsmos")

    def distilled(pcm: np.ndarray) -> float:
        with torch.inference_mode():
            return float(model(torch.from_numpy(to_16_khz(pcm))[None]))

    student, teacher = both(utterances, distilled)
    of_speakers = [student[[u.speaker == s for u in utterances]] for s in dict.fromkeys(u.speaker for u in utterances)]
    put_rows(record, "distillmos_best", max(of_speakers, key=np.mean))
    put_rows(record, "distillmos_all", student)
    put_rows(record, "distillmos_teacher", teacher)
    put_rows(record, "distillmos_difference", student - teacher)
    student, teacher = both(utterances, lambda pcm: dnsmos.run(np.clip(to_16_khz(pcm), -1, 1), sr=16_000)["ovrl_mos"])
    put_rows(record, "dnsmos_all", student)
    put_rows(record, "dnsmos_teacher", teacher)


def words(utterances: list[Spoken], record: Record) -> None:
    """Measures word errors with Whisper and its own normaliser, and with pocketsphinx as a second recogniser."""
    jiwer, second = package("jiwer"), Recogniser()
    normal = package("whisper_normalizer.english").EnglishTextNormalizer()
    model = package("faster_whisper").WhisperModel(WHISPER, device="cpu")

    def heard(pcm: np.ndarray) -> str:
        return " ".join(part.text for part in model.transcribe(to_16_khz(pcm), language="en", beam_size=1)[0])

    for name, hear in (("whisper_base", heard), ("pocketsphinx", second.hear)):
        for u, row in zip(utterances, record["utterances"], strict=True):
            said = normal(u.text)
            counted = [jiwer.process_words(said, normal(hear(getattr(u, who))) or "-") for who in VOICES]
            errors = [count.substitutions + count.deletions + count.insertions for count in counted]
            row[f"errors_{name}"] = [*errors, len(said.split())]
        counts = np.array([row[f"errors_{name}"] for row in record["utterances"]], float)
        put_rows(record, f"wer_{name}", counts, lambda drawn: drawn[:, 0].sum() / drawn[:, 2].sum())
        put_rows(record, f"wer_{name}_teacher", counts, lambda drawn: drawn[:, 1].sum() / drawn[:, 2].sum())
        ratio = "wer_ratio" if name == "whisper_base" else f"wer_ratio_{name}"
        put_rows(record, ratio, counts, lambda drawn: drawn[:, 0].sum() / max(drawn[:, 1].sum(), 1))


def sound(utterances: list[Spoken], record: Record) -> None:
    """Measures repetition after 20 ms in every band, repetition at the pitch, energy above 8 kHz, clicks, lead."""
    combs = np.stack(both(utterances, signal.comb), 1)  # (sentences, student and teacher, bands)
    put_rows(record, "comb_worst_band", combs, lambda drawn: np.subtract(*np.nan_to_num(np.nanmean(drawn, 0))).max())
    kept = np.stack(both(utterances, signal.pitch_band), 1)
    put_rows(record, "pitch_band_ratio", kept, lambda drawn: np.divide(*np.nanmean(drawn, 0)))
    put_rows(record, "high_band_db", np.subtract(*both(utterances, signal.high_band_db)))
    first = np.array([abs(float(u.student[0])) for u in utterances])
    put_rows(record, "click_dbfs", 20 * np.log10(np.maximum(first, 1e-6)), np.median)
    lead = [1_000 * (first_audible_sample(u.student) or 0) / SAMPLE_RATE_HZ for u in utterances]
    put_rows(record, "lead_ms", np.array(lead), np.median)


def ends(utterances: list[Spoken], record: Record) -> None:
    """Measures whether utterances end by themselves, and their durations relative to the teacher's."""
    missed = sum(not u.ended for u in utterances)
    put(record, "ends_missed", missed, len(utterances))
    ratio = np.array([len(u.student) / len(u.teacher) for u in utterances])
    record["duration_ratio"] = {"between": list(BETWEEN)}
    put_rows(record, "durations_inside", ((ratio > BETWEEN[0]) & (ratio < BETWEEN[1])).astype(float))


def levels(utterances: list[Spoken], record: Record) -> None:
    """Measures the difference in loudness between the student's speakers, LUFS (ITU-R BS.1770-4)."""
    meter = package("pyloudnorm").Meter(SAMPLE_RATE_HZ)
    said: dict[str, list[np.ndarray]] = {}
    for u in utterances:
        said.setdefault(u.speaker, []).append(u.student)
    lufs = [meter.integrated_loudness(np.concatenate(pcm, dtype=float)) for pcm in said.values()]
    put(record, "loudness_spread_lu", np.ptp(lufs), len(utterances))


def pitch(utterances: list[Spoken], record: Record) -> None:
    """Measures pitch and voicing errors along the best alignment, for information only."""
    package("librosa")
    cents, voicing = np.array([signal.pitch_errors(u.student, u.teacher) for u in utterances]).T
    put_rows(record, "pitch_error_cents", cents)
    put_rows(record, "voicing_error", voicing)


def likeness(utterances: list[Spoken], record: Record) -> None:
    """Measures the cosine similarity of resemblyzer's embeddings of both."""
    encoder = package("resemblyzer").VoiceEncoder("cpu", verbose=False)
    student, teacher = both(utterances, lambda pcm: encoder.embed_utterance(to_16_khz(pcm)))
    put_rows(record, "similarity", (student * teacher).sum(1))


def speed(utterances: list[Spoken], record: Record) -> None:
    """Measures real-time factor and time to first PCM of one stream at a time, on one thread."""
    import torch

    from mktts.engine.metrics import summarise
    from mktts.synth import Synthesizer

    with Synthesizer.load(record["checkpoint"], backend="torch", device="cpu") as synthesizer:
        torch.set_num_threads(1)
        synthesizer.warm_up()
        chosen = (utterances * _SPEED_STREAMS)[:_SPEED_STREAMS]
        found = [summarise(synthesizer.stream(u.text, speaker=u.speaker, seed=i)) for i, u in enumerate(chosen)]
    put_rows(record, "rtf_one_core", np.array([m.rtf for m in found]), np.median)
    put_rows(record, "ttfc_ms", np.array([m.ttfc_ms for m in found]), np.median)
    put(record, "weights_mb", sum(path.stat().st_size for path in _weights(record["checkpoint"])) / 1e6, 1)


def _weights(checkpoint: str) -> list[Path]:
    return sorted(open_checkpoint(checkpoint).folder.rglob("*.safetensors"))


SECTIONS = {
    "sound": sound, "ends": ends, "levels": levels, "pitch": pitch, "quality": quality, "words": words,
    "likeness": likeness, "speed": speed,
}  # fmt: skip


def spoken(checkpoint: str, teacher: Sequence[Path], keep: Path) -> list[Spoken]:
    """Every sentence of the teacher's shards by both; clips of the same weights in `keep` are reused."""
    from mktts.synth import Synthesizer

    found: list[Spoken] = []
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in _weights(checkpoint))).hexdigest()
    with Synthesizer.load(checkpoint, backend="torch", device="cpu") as synthesizer:
        synthesizer.warm_up()
        for text, speaker, pcm in clips_in(*teacher):
            wav, note = (keep / f"{speaker}_{len(found):04}{suffix}" for suffix in (".flac", ".json"))
            known = read_json(note) if note.is_file() else {}
            if (known.get("text"), known.get("weights")) != (text, digest):
                stream = synthesizer.stream(text, speaker=speaker, seed=len(found))
                write_audio(wav, stream.read())
                known = {"text": text, "weights": digest, "ended": stream.finish_reason == "eos"}
                write_json(note, known)
            student = from_pcm16(to_pcm16(read_audio(wav)[0]))
            found.append(Spoken(text, speaker, student, from_pcm16(pcm), known["ended"]))
    return found


EXAMPLES = """examples:
  python -m mktts train evaluate --checkpoint TALKER/voice --teacher NATURAL --keep KEEP --output evaluation.json

NATURAL holds shards of `train teacher` of the list that `train texts --natural` writes. KEEP holds the student's audio:
a run that was cut goes on there. Words are heard by the model of faster-whisper in the folder whisper-base. --only puts
some sections into the record that is there. The last line of standard output is JSON: the figures."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--checkpoint", required=True, help="folder in the Hub's layout, or small")
    parser.add_argument("--teacher", type=Path, required=True, nargs="+", metavar="NATURAL", help="audio shards")
    parser.add_argument("--keep", type=Path, required=True, metavar="FOLDER", help="for the student's audio")
    parser.add_argument("--output", type=Path, required=True, help="JSON, written whole after every section")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--listeners", type=float, help="on two cores, as `mktts bench` found")


def main(arguments: argparse.Namespace) -> int:
    """Runs the measurements. Raises BackendUnavailable for a missing package."""
    utterances = spoken(arguments.checkpoint, arguments.teacher, arguments.keep)
    again = bool(arguments.only) and arguments.output.is_file()
    record: Record = read_json(arguments.output) if again else {"utterances": [u.row() for u in utterances]}
    record["environment"], record["checkpoint"] = environment(), arguments.checkpoint
    for name in tqdm(arguments.only or list(SECTIONS)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # for means of empty sets
            SECTIONS[name](utterances, record)
        if arguments.listeners:
            put(record, "listeners_cpu", arguments.listeners, 1)
        write_json(arguments.output, record)
    print(json.dumps(record["figures"]))
    return 0
