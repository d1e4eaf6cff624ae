"""The definitions in mktts.measure.metrics, on made-up chunks whose answers are worked out by hand."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mktts.engine.metrics import play, summarise
from mktts.errors import MetricsError
from mktts.measure import metrics
from mktts.measure.environment import head, provided_by, versions
from mktts.spec import AUDIBLE_DBFS, FRAME_MS, SAMPLE_RATE_HZ, SAMPLES_PER_FRAME

FRAME = SAMPLES_PER_FRAME
LOUD = 2 * 10 ** (AUDIBLE_DBFS / 20)
QUIET = LOUD / 4


def chunk(ready_ms: float, frames: int = 1, pcm: np.ndarray | None = None, **stages: float) -> SimpleNamespace:
    none = dict.fromkeys(("prefill_ms", "talker_ms", "predictor_ms", "codec_ms"), 0.0)
    timings = SimpleNamespace(ready_ms=ready_ms, **none | stages)
    pcm = np.full(frames * SAMPLES_PER_FRAME, LOUD, dtype=np.float32) if pcm is None else pcm
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


def test_a_documents_head_names_the_device_that_was_measured_on(monkeypatch):
    facts = {"gpu": "Card", "cpu": "Cores", "gpu_driver": "1", "torch": "2", "git_revision": "abc", "date_utc": "now"}
    monkeypatch.setattr("mktts.measure.environment.environment", lambda: facts)
    assert [head(device)["device"] for device in ("cuda", "cuda:1", "cpu")] == ["Card", "Card", "Cores"]


def test_packages_have_their_versions_and_a_module_is_named_by_the_one_that_provides_it(tmp_path, monkeypatch):
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
