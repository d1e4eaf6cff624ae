"""The megakernel's tables and figures: computed from documents whose answers are known, drawn, and labelled."""

from __future__ import annotations

import numpy as np
import pytest

from mktts.errors import MetricsError, OptionsError
from mktts.measure import inspection, machine
from mktts.notebook import evidence, kernel_plots, parity_tables
from mktts.notebook.evidence import Limit
from mktts.speech.options import Chunk, Timings

FIGURES = {
    "talker_step_ms": 0.4, "predictor_ms": 1.0, "frame_ms": 1.5, "codec_1_ms": 1.1, "codec_8_ms": 1.6, "ttfc_ms": 4.0,
    "frame_1p7b_ms": 2.0, "text_tok_s": 2000.0, "rtf": 0.02, "chunk_8_serial_ms": 13.2, "chunk_8_overlapped_ms": 12.0,
    "graph_frame_ms": 12.0, "faster_frame_ms": 19.0, "upstream_frame_ms": 140.0, "faster_ttfc_ms": 70.0,
}  # fmt: skip
BENCH = {
    "device": "Some GPU",
    "date": "2026-01-02T03:04:05+00:00",
    "revision": "0123456789abcdef+changes",
    "settings": {
        "checkpoint": "random:0.6b", "large": "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice", "text_model": "random:0.6b",
        "random_weights": True,
    },
    "figures": {name: {"median": value} for name, value in FIGURES.items()},
    "missing": {"upstream_rtf": "stopped after 180 s"},
}  # fmt: skip
FORCED = {
    "frames": {"16": 10, "200": 5},
    "pooled": {"logits of code 0": {"kernel": 0.02, "bf16": 0.02, "ratio": 1.0}, "hidden": {"ratio": 1.05}},
    "total_variation": {"code 0": {"kernel": {"mean": 0.01, "max": 0.1}, "bf16": {"mean": 0.02, "max": 0.1}}},
}
PARITY = {
    "kernel": "megakernel",
    "passed": True,
    "checkpoints": {
        "random:0.6b": {
            "passed": True,
            "errors": {},
            "forced": FORCED,
            "divergence": {"frames": 7, "diverged": True, "frame": 6, "codebook": 3, "explained": True},
            "exact": {"frames": 500, "asked": 500, "equal": True},
        },
        "random:tiny": {"passed": False, "errors": {"forced": "RuntimeError: out of memory"}},
    },
    "text": {
        "source": "random:0.6b",
        "passed": True,
        "ordinary": {"errors": {"logits": {"ratio": 0.9}}},
        "margin": {"equal": 12, "tokens": 12},
    },
}
LADDER = {"steps": [{"what": w, "ms": ms, "frames_a_launch": n} for w, ms, n in (("a", 2.0, 4), ("b", 1.5, 8))]}


def chunk(frames, ready_ms, *stages):
    return Chunk(np.zeros(10, np.float32), 0.0, frames, Timings(ready_ms, *stages))


# ---- documents


def test_provenance_names_machine_day_revision_and_random_weights_whichever_way_a_document_keeps_them():
    line = "measured on Some GPU, 2026-01-02, at revision 01234567+changes, random weights"
    assert evidence.provenance(BENCH) == line
    nested = {"environment": {"gpu": "G", "date_utc": "2026-05-06T00", "git_revision": "f" * 40}}
    assert evidence.provenance(nested) == "measured on G, 2026-05-06, at revision ffffffff"
    assert evidence.provenance(None) == ""


def test_every_committed_document_says_where_it_comes_from():
    rows = evidence.committed()
    assert {"bench.json", "ladder.json"} <= {row["document"] for row in rows}
    for row in rows:
        assert "measured on NVIDIA H200, 20" in row["provenance"] and "at revision" in row["provenance"], row
        assert row["shown in"], f"{row['document']}: nothing shows it"


def test_a_document_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path):
    assert evidence.stored("parity", tmp_path) is None
    with pytest.raises(MetricsError, match=r"parity\.json.*python -m mktts parity .* --output"):
        evidence.reference("parity", tmp_path)
    (tmp_path / "bench.json").write_text("{torn")
    with pytest.raises(MetricsError, match="could not read"):
        evidence.reference("bench", tmp_path)


def test_the_commands_write_where_the_documents_are_looked_for():
    folder = evidence.FOLDER
    for name, command in evidence.COMMANDS.items():
        assert command.split()[-1] == "/".join([*folder.parts[-3:], f"{name}.json"])


def test_the_ladder_is_the_logs_table():
    log = (evidence.FOLDER.parents[2] / "LOG.md").read_text()
    steps = evidence.reference("ladder")["steps"]
    logged = [step for step in steps if f"| {step['what']} | {step['ms']:.2f} |" in log]
    assert len(logged) >= 7
    assert [step["ms"] for step in steps] == sorted((step["ms"] for step in steps), reverse=True)


def test_measuring_here_keeps_the_document_beside_the_run(tmp_path, monkeypatch):
    from mktts.measure.bench import command

    monkeypatch.setattr(command, "measure", lambda settings, names, output: {"sections": names, "path": output})
    found = evidence.bench_here("frames,codec", tmp_path)
    assert found == {"sections": ["frames", "codec"], "path": tmp_path / "bench.json"}


# ---- rows


def test_limits_are_bytes_over_bandwidth_of_the_released_sizes():
    rows = {row.stage: row for row in evidence.limits(BENCH, 1000.0)}
    small = inspection.bytes_per_frame(inspection.components_at("0.6b"))
    frame = rows["0.6B frame, launch to codes"]
    assert frame.bytes == small and frame.least_ms == pytest.approx(small / 1e12 * 1e3)
    assert frame.ratio == pytest.approx(1.5 / frame.least_ms)
    assert rows["0.6B talker step"].bytes + rows["0.6B predictor"].bytes == small
    assert rows["1.7B frame, launch to codes"].bytes > small
    assert rows["0.6B text token"].measured_ms == 0.5
    assert rows["codec, 8 frames to PCM"].least_ms == rows["codec, 1 frame to PCM"].least_ms
    assert evidence.frame_limit_ms("0.6b", 1000.0) == pytest.approx(frame.least_ms)


def test_text_bytes_are_those_of_the_released_model_with_its_head_read_once():
    # Qwen3-0.6B in bf16: 28 layers, a final norm, a tied head, and one row of the embedding
    per_layer = 1024 * 2048 * 2 + 1024 * 1024 * 2 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    assert inspection.text_bytes_per_token("0.6b") == 2 * (28 * per_layer + 1024 + 151936 * 1024 + 1024)


def test_limits_leave_out_what_was_not_measured_and_sizes_without_a_limit():
    figures = {name: value for name, value in BENCH["figures"].items() if name != "text_tok_s"}
    settings = {**BENCH["settings"], "large": "random:tiny"}
    stages = {row.stage for row in evidence.limits({**BENCH, "figures": figures, "settings": settings}, 1.0)}
    assert "0.6B predictor" in stages and not {s for s in stages if "text" in s or "1.7B" in s}


def test_the_stages_of_the_first_pcm_add_up_to_it_and_overlapping_hides_the_codec():
    rows = evidence.to_first_pcm(BENCH)
    sums = {label: sum(stages.values()) for label, stages in rows.items()}
    assert sums == pytest.approx(
        {"until the first PCM": 4.0, "one frame": 2.6, "one of 8 frames": 1.65, "one of 8, codec overlapped": 1.5}
    )
    first = rows["until the first PCM"]
    assert first["prefill, request"] == pytest.approx(1.4) and first["launch, read-back"] == pytest.approx(0.1)
    cut = {name: figure for name, figure in BENCH["figures"].items() if name != "ttfc_ms"}
    with pytest.raises(MetricsError, match="ttfc_ms.*its section failed"):
        evidence.to_first_pcm({"figures": cut, "missing": {"ttfc_ms": "its section failed"}})


def test_peers_have_the_programs_that_were_measured_ours_first():
    rows = evidence.peers(BENCH)
    assert [list(row.values()) for row in rows.values()] == [[1.5, 12.0, 19.0, 140.0], [4.0, 70.0], [0.02]]
    assert all(next(iter(row)) == evidence.OURS for row in rows.values())


def test_a_timeline_begins_each_chunk_where_the_one_before_was_ready():
    rows = evidence.timeline([chunk(1, 5.0, 1, 1, 2, 1), chunk(2, 9.0, 0, 1, 2, 1)])
    assert [(row["begin_ms"], row["ready_ms"], row["frames"]) for row in rows] == [(0.0, 5.0, 1), (5.0, 9.0, 2)]
    assert rows[1]["stages"] == {"prefill": 0, "talker": 1, "predictor": 2, "codec": 1}


def test_parity_rows_say_what_passed_what_failed_and_why():
    full, broken, text = parity_tables.parity_rows(PARITY, "")
    assert full["frames forced"] == 15 and full["hidden: ratio"] == 1.05
    assert full["frames equal (wide margins)"] == "500 of 500"
    assert full["first divergence"] == "frame 6, codebook 3: rounding explains it"
    assert full["total variation, code 0"] == "0.0100 (bf16 0.0200)"
    assert broken["passed"] is False and "out of memory" in broken["errors"]
    assert text["tokens equal (wide margins)"] == "12 of 12" and text["logits of text tokens: ratio"] == 0.9
    assert parity_tables.parity_rows(None, "no GPU") == [{"kernel parity": "no GPU"}]
    recorded = parity_tables.parity_metrics(PARITY)
    assert recorded["kernel_error_ratio"] == 1.05 and recorded["kernel_frames_equal"] == 500


def test_a_divergence_that_rounding_does_not_explain_is_loud():
    found = {"frames": 1, "diverged": True, "frame": 0, "codebook": 1, "explained": False}
    document = {**PARITY, "checkpoints": {"x": {"passed": False, "errors": {}, "divergence": found}}, "text": {}}
    (row,) = parity_tables.parity_rows(document, "")
    assert "NOT explained" in row["first divergence"]


def test_the_small_run_of_this_machine_fills_the_same_rows(tiny_margin):
    found = parity_tables.parity_here("torch", 3)
    assert found["passed"] and parity_tables.parity_metrics(found)["kernel_error_ratio"] == 1.0
    (row,) = parity_tables.parity_rows(found, "")
    assert row["frames forced"] == 6 and row["frames equal (wide margins)"].startswith("12 of 12")
    assert parity_tables.parity_here("none", 3) is None
    with pytest.raises(OptionsError, match="KERNEL must be.*'gpu'"):
        parity_tables.parity_here("gpu", 3)


def test_without_cuda_the_megakernel_is_missing_with_its_reason(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: False)
    assert "CUDA" in machine.kernel_missing()
    (row,) = [row for row in machine.resources(tmp_path) if row["what"] == "megakernel"]
    assert row["found"].startswith("none (")


def test_a_gpu_without_a_configuration_is_named(monkeypatch):
    monkeypatch.setattr(machine.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine.torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "7.5" in machine.kernel_missing()


def test_codec_rows_are_those_of_here_and_of_the_committed_document():
    row = {"codec": "small", "weights": "trained", "served_on": "cuda", "frames": 80, "max_error": 1e-6, "snr_db": 88.0}
    rows = parity_tables.codec_rows([row], {"rows": [{**row, "codec": "random:0.6b", "weights": "random"}]}, "none")
    assert [(r["measured"], r["codec"]) for r in rows] == [
        ("here", "small (trained weights)"), ("committed", "random:0.6b (random weights)"),
    ]  # fmt: skip
    assert rows[0]["SNR (dB)"] == 88.0 and rows[0]["max error"] == 1e-6
    assert parity_tables.codec_rows([], None, "not committed yet") == [{"measured": "not committed yet"}]


# ---- figures

LIMITS = [Limit("frame", 10**9, 0.5, 1.0), Limit("codec", 10**8, 0.05, 1.0)]
ROWS = evidence.timeline([chunk(1, 5.0, 1, 1, 2, 0.5), chunk(2, 9.0, 0, 1, 2, 2)])
DRAW = {
    "kernel_roofline": lambda folder: kernel_plots.against_limit(LIMITS, 2000.0, folder, "there"),
    "kernel_first_pcm": lambda folder: kernel_plots.first_pcm(evidence.to_first_pcm(BENCH), folder, "there"),
    "stage_timeline": lambda folder: kernel_plots.stage_timeline(ROWS, folder, "there"),
    "peers": lambda folder: kernel_plots.peers(evidence.peers(BENCH), folder, "there"),
    "ladder": lambda folder: kernel_plots.ladder(LADDER, 0.8, folder, "there"),
}


@pytest.mark.parametrize("name", DRAW)
def test_a_figure_is_labelled_titled_says_where_it_is_from_and_is_saved(name, tmp_path):
    figure = DRAW[name](tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.png"]
    assert figure.axes[0].get_title(loc="left")
    assert "there" in [text.get_text() for text in figure.axes[0].texts]
    for axes in figure.axes:
        assert axes.get_xlabel() and [tick.get_text() for tick in axes.get_yticklabels()]
        assert "(ms)" in axes.get_xlabel() or "factor" in axes.get_xlabel()


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_stage_stands_at_its_limit_and_at_its_time(tmp_path):
    (axes,) = DRAW["kernel_roofline"](tmp_path).axes
    points = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert points["weight bytes / 2,000 GB/s"] == [[0.5, 0], [0.05, 1]]
    assert points["measured"] == [[1.0, 0], [1.0, 1]]
    assert "1 ms = 2 × 0.5 ms" in texts(axes)


def test_what_a_chunk_waited_for_beyond_its_stages_is_other(tmp_path):
    (axes,) = DRAW["stage_timeline"](tmp_path).axes
    others = [group[0] for group in axes.containers if group.get_label() == "other"]
    assert [(bar.get_x(), bar.get_width()) for bar in others] == [(4.5, 0.5), (10.0, 0.0)]  # the second overlaps


def test_a_peer_stands_beside_ours_with_its_factor(tmp_path):
    frame, first, rtf = DRAW["peers"](tmp_path).axes
    assert [axes.get_xscale() for axes in (frame, first, rtf)] == ["log"] * 3
    assert "12   × 8" in texts(frame) and "0.02" in texts(rtf)
    assert first.collections[0].get_offsets().tolist() == [[4.0, 0.0], [70.0, 1.0]]
    assert not frame.patches  # on a log axis the length of a bar says nothing


def test_a_whole_utterance_has_no_factor_over_a_first_frame(tmp_path):
    (axes,) = kernel_plots.peers({"first PCM (ms)": {"ours": 4.0, evidence.WHOLE: 9000.0}}, tmp_path, "there").axes
    assert "9,000" in texts(axes)


def test_the_ladder_goes_down_and_marks_a_step_that_was_measured_otherwise(tmp_path):
    (axes,) = DRAW["ladder"](tmp_path).axes
    assert {"2.00", "1.50"} <= set(texts(axes))
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b (8 frames a launch)"]
