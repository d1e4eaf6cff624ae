"""Metrics worked out by hand, the table of components against published sizes, the words that a recogniser hears."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from absent import needs
from hypothesis import given
from hypothesis import strategies as st

from mktts.agent.user_speech import load
from mktts.checkpoint import Checkpoint
from mktts.engine.metrics import play, summarise
from mktts.errors import MetricsError
from mktts.measure import inspection, metrics
from mktts.measure.environment import head, provided_by, versions
from mktts.measure.recogniser import Aligner, Recogniser, loop_model, word_errors, words
from mktts.spec import AUDIBLE_DBFS, FRAME_MS, SAMPLE_RATE_HZ
from mktts.spec import SAMPLES_PER_FRAME as FRAME

LOUD = 2 * 10 ** (AUDIBLE_DBFS / 20)
QUIET = LOUD / 4


def chunk(ready_ms: float, frames: int = 1, pcm: np.ndarray | None = None, **stages: float) -> SimpleNamespace:
    none = dict.fromkeys(("prefill_ms", "talker_ms", "predictor_ms", "codec_ms"), 0.0)
    timings = SimpleNamespace(ready_ms=ready_ms, **none | stages)
    pcm = np.full(frames * FRAME, LOUD, dtype=np.float32) if pcm is None else pcm
    return SimpleNamespace(pcm=pcm, frames=frames, timings=timings, start_s=0.0)


def at(*levels: tuple[int, float]) -> np.ndarray:
    """PCM of (samples, level) after each other."""
    return np.concatenate([np.full(samples, level, np.float32) for samples, level in levels])


def test_times_are_of_the_first_chunk_the_last_and_of_a_frame_and_no_audio_has_none():
    stages = dict(talker_ms=4.0, predictor_ms=8.0, codec_ms=2.0)
    found = summarise([chunk(30.0, prefill_ms=5.0, **stages), chunk(50.0, frames=3, **stages)])
    assert found.ttfc_ms == 30.0 and found.frames == 4
    assert found.audio_s == pytest.approx(4 * FRAME_MS / 1_000)
    assert found.rtf == pytest.approx(50.0 / (4 * FRAME_MS))
    assert (found.talker_ms_per_frame, found.predictor_ms_per_frame, found.codec_ms_per_frame) == (2.0, 4.0, 1.0)
    assert found.prefill_ms == 5.0
    with pytest.raises(MetricsError, match="at least one chunk"):
        summarise([chunk(1.0, frames=0)])


@pytest.mark.parametrize(
    ("chunks", "audible_ms"),
    [
        ([(10.0, at((FRAME, QUIET))), (20.0, at((FRAME, LOUD)))], 10.0 + FRAME_MS),
        ([(10.0, at((FRAME, QUIET))), (17.0 + FRAME_MS, at((FRAME, LOUD)))], 17.0 + FRAME_MS),  # a stall before
        ([(10.0, at((480, 0.0), (FRAME - 480, -LOUD)))], 10.0 + 1_000 * 480 / SAMPLE_RATE_HZ),
        ([(1.0, at((FRAME, QUIET)))], None),
        ([(10.0, at((FRAME - 120, 0.0))), (20.0, at((600, LOUD), (480, 0.0)))], 10.0 + 1_000 * 1_680 / SAMPLE_RATE_HZ),
    ],
    ids=["lead", "stall", "within", "silence", "ten ms in two chunks"],
)
def test_audible_ttfc_is_when_a_listener_hears_the_first_loud_ten_milliseconds(chunks, audible_ms):
    found = summarise([chunk(ready_ms, pcm=pcm) for ready_ms, pcm in chunks]).audible_ttfc_ms
    assert found == (audible_ms and pytest.approx(audible_ms))


def test_player_that_runs_dry_counts_each_stall_once():
    ready_ms = [0.0, FRAME_MS + 5.0, FRAME_MS + 6.0, 3 * FRAME_MS + 15.0]  # 5 ms late, early, 10 ms late on top
    found = play(ready_ms, [FRAME] * 4)
    assert found.underruns == 2
    assert found.stalled_ms == pytest.approx(15.0)
    assert found.starts_ms == pytest.approx((0.0, FRAME_MS + 5.0, 2 * FRAME_MS + 5.0, 3 * FRAME_MS + 15.0))


@given(st.lists(st.tuples(st.floats(0, 500), st.integers(1, 8)), min_size=1, max_size=20))
def test_prebuffer_is_just_enough_to_never_run_dry(steps):
    ready_ms = np.cumsum([wait for wait, _ in steps]).tolist()
    samples = [frames * FRAME for _, frames in steps]
    found = play(ready_ms, samples)
    audio_before_ms = np.concatenate([[0], np.cumsum(samples)[:-1]]) * 1_000 / SAMPLE_RATE_HZ
    slack_ms = ready_ms[0] + found.prebuffer_ms + audio_before_ms - ready_ms
    assert slack_ms.min() == pytest.approx(0, abs=1e-6)
    assert found.stalled_ms == pytest.approx(found.prebuffer_ms, abs=1e-6)  # waiting first or in between is as long
    assert (found.underruns == 0) == (found.prebuffer_ms == 0)


def test_percentiles_of_known_values_and_of_nothing():
    found = metrics.percentiles(range(101))
    assert found == {"median": 50.0, "p95": 95.0, "p99": 99.0, "min": 0.0, "max": 100.0, "mean": 50.0, "n": 101}
    for values in ([], [1.0, float("nan")], [float("inf")]):
        with pytest.raises(MetricsError):
            metrics.percentiles(values)


@pytest.mark.parametrize("value", [float("nan"), np.inf, None, [1, 2], {"x": 1}, np.zeros(2)])
def test_record_merges_and_refuses_what_is_no_scalar_by_name_and_then_writes_nothing(tmp_path, value):
    metrics.record(tmp_path / "run", a=np.float32(0.5), b=1)
    with pytest.raises(MetricsError, match="'bad_ms'"):
        metrics.record(tmp_path / "run", b=2, bad_ms=value)
    recorded = {"a": 0.5, "b": 1, "c": "text", "d": True}
    assert metrics.record(tmp_path / "run", c="text", d=True) == recorded
    assert json.loads((tmp_path / "run" / "metrics.json").read_text()) == recorded


def test_a_document_names_the_device_the_versions_of_packages_and_the_one_that_provides_a_module(tmp_path, monkeypatch):
    facts = {"gpu": "Card", "cpu": "Cores", "gpu_driver": "1", "torch": "2", "git_revision": "abc", "date_utc": "now"}
    monkeypatch.setattr("mktts.measure.environment.environment", lambda: facts)
    assert [head(device)["device"] for device in ("cuda", "cuda:1", "cpu")] == ["Card", "Card", "Cores"]
    found = versions(("torch", "a-package-that-is-not-there"))
    assert found["torch"] and found["a-package-that-is-not-there"] is None
    folder = tmp_path / "qwen_tts_hf-0.1.1.post1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: qwen-tts-hf\nVersion: 0.1.1.post1\n")
    (folder / "top_level.txt").write_text("qwen_tts_of_a_test\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert provided_by("qwen_tts_of_a_test") == "qwen-tts-hf 0.1.1.post1"
    assert provided_by("a_module_of_nobody") is None


def test_peak_rss_counts_what_a_process_touched_and_not_its_parent():
    code = "from mktts.measure.environment import peak_rss_bytes as peak; import numpy as np; a = peak(); "
    code += "block = np.ones(a + 64 * 2**20, dtype=np.uint8); del block; print(a, peak())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before + 32 * 2**20 <= after <= 3 * before + 64 * 2**20


# ---- components of a checkpoint


@pytest.mark.parametrize(
    ("size", "talker_bytes", "projection_bytes", "width", "published_gb"),
    [
        ("0.6b", 880_932_864 + 2_048 + 6_291_456, 0, 1024, 3.31),
        ("1.7b", 2_818_816_000 + 4_096 + 12_582_912, 4_196_352, 2048, 5.32),
    ],
)
def test_bytes_per_frame_are_the_sum_of_what_a_frame_reads(size, talker_bytes, projection_bytes, width, published_gb):
    rows = inspection.components_at(size)
    predictor_layers, heads, embedding_row = 157_309_440 + 2_048, 62_914_560, 2 * width
    want = talker_bytes + 15 * (predictor_layers + projection_bytes) + heads + 16 * embedding_row
    assert inspection.bytes_per_frame(rows) == want
    assert round(want / 1e9, 2) == published_gb


def test_every_tensor_is_in_exactly_one_component(tiny_base: Checkpoint) -> None:
    rows = inspection.components(tiny_base)
    files = [tiny_base.folder / "model.safetensors", tiny_base.folder / "speech_tokenizer" / "model.safetensors"]
    assert sum(row.tensors for row in rows) == len(tiny_base.files.tensors) + len(tiny_base.codec_files.tensors)
    assert 0 < sum(f.stat().st_size for f in files) - sum(row.bytes for row in rows) < 100_000  # the headers
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) and "speaker_encoder" in names and "small_to_mtp_projection" not in names


def test_the_codec_reads_its_decoder_and_sixteen_rows_and_a_size_has_the_components_of_a_checkpoint(
    tiny: Checkpoint,
) -> None:
    rows = {row.name: row for row in inspection.components(tiny)}
    decoder = sum(t.nbytes for name, t in tiny.codec_tensors().items() if ".vq." not in name)
    row_bytes = tiny.codec_config.codebook_dim // 2 * 4
    assert rows["codec decoder"].bytes_per_frame == decoder
    assert rows["codec codebooks"].bytes_per_frame == 16 * row_bytes
    assert rows["codec encoder"].bytes_per_frame == rows["text_embedding"].bytes_per_frame == 0
    both = (inspection.components_at("tiny"), inspection.components(tiny))
    plain, made = ([row for row in rows if not row.name.startswith(("codec ", "text_emb"))] for rows in both)
    assert plain == made


# ---- a recogniser


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [("a b c", "a b c", 0), ("a b c", "a c", 1), ("a b c", "a x c d", 2), ("a", "", 1), ("", "a b", 2)],
)
def test_word_errors(said, heard, errors):
    assert word_errors(said.split(), heard.split()) == errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Hello, world - it's Twenty-one dogs'!", "hello world it's twenty one dogs"),
        ("Dr. Brown, 1984; 1,250 birds", "doctor brown nineteen eighty four one thousand two hundred fifty birds"),
        (" ... ", ""),
    ],
)
def test_words_are_those_that_the_front_end_reads(text, said):
    assert words(text) == said.split()


def test_the_loop_is_a_distribution():
    shares = [line.split() for line in loop_model(["b", "a", "b"]).splitlines() if line.startswith("-")]
    assert [word for _, word in shares] == ["<s>", "</s>", "a", "b"]
    assert sum(10 ** float(share) for share, _ in shares) == pytest.approx(1, abs=1e-3)


@needs("pocketsphinx")
def test_the_aligner_finds_a_word_where_its_sound_is():
    speech, aligner = load("hello") / np.float32(32768), Aligner()
    (start_s, end_s), *others = aligner.align(speech, ["hello"])
    assert others == [] and 0 <= start_s < end_s <= len(speech) / 24_000 + 0.05
    later = aligner.align(np.concatenate((np.zeros(12_000, np.float32), speech)), ["hello"])
    assert np.subtract(later[0], (start_s, end_s)) == pytest.approx(0.5, abs=0.05)
    assert aligner.align(speech, ["zzyzxq"]) is None and aligner.align(speech, []) is None


@needs("pocketsphinx")
def test_the_recogniser_names_what_it_lacks_and_hears_the_same_again():
    closed = Recogniser(words("Yes, the kettle is two. Zzyzxq"))
    assert closed.knows("kettle") and not closed.knows("zzyzxq")
    assert closed.sound("two") == closed.sound("to") != closed.sound("kettle") and closed.sound("zzyzxq") == "zzyzxq"
    speech, noise = load("hello") / np.float32(32768), np.random.default_rng(0).normal(0, 0.1, 9_000)
    first = closed.hear(speech)
    closed.hear(noise)
    assert closed.hear(speech) == first
    assert set(first.split()) <= {"yes", "the", "kettle", "is", "two"}
    assert closed.hear(np.zeros(0, np.float32)) == ""
