"""Parity of the batched frame, with PyTorch's lanes in its place: right ones pass, wrong ones are caught and named."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mktts.batch.plain.lanes import TorchLanes
from mktts.checkpoint import Checkpoint, open_checkpoint
from mktts.cli import main
from mktts.codec.decoder import CodecDecoder
from mktts.measure.parity import batch, batch_codec
from mktts.measure.parity.batch import batch_outcome, batch_parity_of, probe_for
from mktts.measure.parity.budget import Budget
from mktts.measure.parity.crowd import Crowd, CrowdStream, pages_for
from mktts.measure.parity.crowd_errors import (
    GREEDY,
    BatchScope,
    crowd_streams,
    exact_codes,
    exact_crowds,
    exact_streams,
    forced_crowds,
)
from mktts.measure.parity.lanes_probe import LanesProbe
from mktts.model.backend import PromptRows
from mktts.model.oracle import TorchBackend
from mktts.model.sampling import Sampling
from mktts.notebook.parity_tables import parity_rows

SCOPE = BatchScope((2, 5), watched=3, frames=4, exact=5, contexts=(16, 90))
GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def oracles_of(checkpoint: Checkpoint) -> tuple[TorchBackend, TorchBackend]:
    config, tensors = checkpoint.config, checkpoint.tensors()
    return TorchBackend(config, tensors, "cpu", torch.bfloat16), TorchBackend(config, tensors, "cpu", torch.float32)


def forced_of(checkpoint: Checkpoint, change: Callable[[LanesProbe], None] = lambda probe: None) -> dict:
    bf16, fp32 = oracles_of(checkpoint)
    crowds = {size: crowd_streams(fp32, size, SCOPE) for size in SCOPE.lanes}
    streams = [stream for crowd in crowds.values() for stream in crowd]
    probe = probe_for(checkpoint, "torch", "torch", "cpu", SCOPE.lanes, streams)
    change(probe)
    return forced_crowds(probe, bf16, fp32, crowds, SCOPE)


@pytest.mark.parametrize("name", ["tiny", "tiny_projected"])
def test_lanes_in_bf16_are_as_near_to_fp32_as_the_bf16_oracle_at_every_size_and_context(name, request):
    found = forced_of(request.getfixturevalue(name))
    forced, free = found["forced"], found["free"]
    assert forced["passed"] and free["passed"]
    assert forced["frames"] == {"2": 8, "5": 12} and forced["asked"] == 12
    assert set(forced["by_label"]) == {
        f"{part} {label}" for part in ("logits", "hidden") for label in ("at 16", "at 90", "of 2 lanes", "of 5 lanes")
    }
    for value in (*forced["pooled"].values(), *forced["by_head"], *forced["by_layer"], *forced["by_label"].values()):
        assert 0.8 < value["ratio"] < 1.3 and 1e-4 < value["kernel"] < 0.1
    assert free["streams"] == 3 and 0 < free["equal"] <= free["frames"] <= 12
    assert free["frames"] == free["equal"] + len(free["differences"])


def test_what_the_probe_shows_is_what_the_codes_were_chosen_from(tiny):
    _, fp32 = oracles_of(tiny)
    streams = crowd_streams(fp32, 3, SCOPE)
    probe = probe_for(tiny, "torch", "torch", "cpu", (3,), streams)
    frames = []

    def look(made) -> None:
        for lane, stream, frame, codes in made:
            seen = probe.observed(lane, codes, frame == 0)
            assert (seen.hidden is None) == (frame == 0)
            if streams[stream].sampling == GREEDY:
                chosen = [int(logits.argmax()) for logits in seen.logits[1:]]
                assert chosen == codes[1:].tolist()
                frames.append((stream, frame))

    Crowd(probe.lanes, streams, 3).play(look)
    assert sorted(frames) == [(stream, frame) for stream in (0, 2) for frame in range(SCOPE.frames)]


def test_lanes_that_are_off_in_one_head_or_one_layer_are_caught(tiny):
    def head(probe: LanesProbe) -> None:
        probe.lanes._talker._predictor._heads[6].mul_(1.05)

    def layer(probe: LanesProbe) -> None:
        probe.lanes._talker._talker.layers[0].down.mul_(1.05)

    found = forced_of(tiny, head)["forced"]
    assert not found["passed"] and found["pooled"]["logits of codes 1-15"]["ratio"] > 1.1
    assert max(range(16), key=lambda i: found["by_head"][i]["ratio"]) == 7
    found = forced_of(tiny, layer)["forced"]
    assert not found["passed"] and found["pooled"]["hidden"]["ratio"] > 1.1


def test_wide_margins_are_exact_in_every_lane_and_a_wrong_head_is_located(tiny_margin):
    _, fp32 = oracles_of(tiny_margin)
    streams = exact_streams(tiny_margin, fp32, SCOPE)
    assert len({len(stream.prompt) for stream in streams}) > 1
    truths = exact_codes(fp32, streams)
    room = [streams[i % 3] for i in range(5)]
    probe = probe_for(tiny_margin, "torch", "torch", "cpu", SCOPE.lanes, room)
    found = exact_crowds(probe, SCOPE.lanes, streams, truths)
    assert found == {"streams": 7, "frames": 35, "equal": 35, "asked": 5, "passed": True}
    heads = probe.lanes._talker._predictor._heads
    heads[2] = heads[3]  # codebook 3
    found = exact_crowds(probe, SCOPE.lanes, streams, truths)
    assert not found["passed"] and found["equal"] == 0
    assert found["first_difference"] == {"lanes": 2, "stream": 0, "frame": 0, "codebook": 3}


def test_a_stream_that_ends_early_is_no_stream_that_equals(tiny_margin):
    _, fp32 = oracles_of(tiny_margin)
    streams = exact_streams(tiny_margin, fp32, SCOPE)
    truths = exact_codes(fp32, streams)
    probe = probe_for(tiny_margin, "torch", "torch", "cpu", (2,), streams)
    launch, collect, ticks = probe.lanes.launch, probe.lanes.collect, deque()

    def noted(tick, rows):
        ticks.append(tick)
        return launch(tick, rows)

    def ends(launched):
        made = collect(launched)
        made.ended[ticks.popleft().new_lanes :] = True
        return made

    probe.lanes.launch, probe.lanes.collect = noted, ends
    found = exact_crowds(probe, (2,), streams, truths)
    assert not found["passed"] and found["equal"] == 2
    assert found["first_difference"] == {"lanes": 2, "stream": 0, "frame": 1, "codebook": 0}


def test_a_crowd_plays_every_stream_as_the_oracle_does_whatever_its_ticks(tiny):
    _, fp32 = oracles_of(tiny)
    streams = [*crowd_streams(fp32, 6, SCOPE), *crowd_streams(fp32, 3, SCOPE)]  # more than there are lanes
    expected = []
    for stream in streams:
        state = fp32.start(PromptRows(stream.prompt), stream.sampling, stream.seed, SCOPE.frames)
        rows = [None, *stream.text[1:]]
        expected.append(torch.stack([fp32.step(state, row).codes for row in rows]))
    decoder = CodecDecoder(tiny.codec_config, tiny.codec_tensors())
    lanes = TorchLanes(tiny.config, tiny.tensors(), decoder, 4, 200, 1 << 28)
    free = lanes.pages.free
    for seed in (0, 1):
        made = Crowd(lanes, streams, 4, seed).play()
        assert all(torch.equal(found, codes) for found, codes in zip(made, expected, strict=True))
        assert lanes.pages.free == free


def test_pages_are_enough_for_all_streams_and_all_prefixes():
    def stream(rows: int, key: str | None = None, prefix: int = 0) -> CrowdStream:
        return CrowdStream(torch.zeros(rows, 2), torch.zeros(4, 2), Sampling(), 0, key, prefix)

    assert pages_for([stream(60), stream(61)]) == 1 + 1 + 2
    assert pages_for([stream(60)] * 40 + [stream(100, "a", 70), stream(90, "a", 70)]) == 1 + 40 + 2 * 2 + 2
    assert pages_for([stream(100, "a", 70)]) == 16  # of which prefixes may have an eighth


def test_a_budget_that_is_over_compares_less_and_says_so(tiny, tiny_margin):
    found = batch_parity_of("random:tiny", SCOPE, "torch", "cpu", budget=Budget(0))
    assert found["passed"] and not found["errors"]
    assert found["torch"]["forced"]["frames"] == {"2": 4, "5": 4}
    assert found["torch"]["exact"]["frames"] == 7 and found["torch"]["exact"]["asked"] == 5
    assert (found["codec"]["frames"], found["codec"]["asked"]) == (8, 80)
    outcome = batch_outcome(found)
    assert outcome["frames"] == 8 and "reason" not in outcome and outcome["codec_db"]["plain"] > 100
    assert set(outcome["ratio"]) == {f"torch, {name}" for name in found["torch"]["forced"]["pooled"]}


def test_a_part_that_fails_is_named_and_the_others_still_count(tiny, tiny_margin, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(batch, "forced_crowds", broken)
    monkeypatch.setitem(batch_codec.LEAST_SNR_DB, "plain", 200.0)
    found = batch_parity_of("random:tiny", SCOPE, "torch", "cpu")
    assert found["errors"] == {"torch: forced, free": "RuntimeError: out of memory"} and not found["passed"]
    assert found["torch"]["exact"]["passed"] and not found["codec"]["passed"]
    assert batch_outcome(found)["reason"] == "torch: forced, free: RuntimeError: out of memory"
    found["errors"] = {}
    assert "codec" in batch_outcome(found)["reason"]


def test_the_command_writes_the_batch_beside_the_kernel_and_tables_show_it(
    tiny, tiny_margin, tmp_path: Path, capsys, monkeypatch
):
    monkeypatch.setattr("mktts.measure.checkpoint_maker._make", lambda kind, source: None)
    path = tmp_path / "parity.json"
    words = ["parity", "random:tiny", "--parts", "batch", "--kernel", "torch", "--device", "cpu", "--contexts", "9"]
    words += ["--lanes", "3", "--lane-frames", "2", "--exact-lane-frames", "3", "--output", str(path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    document = json.loads(path.read_text())
    assert document["batch_scope"] == {"lanes": [3], "watched": 8, "frames": 2, "exact": 3, "contexts": [9]}
    found = document["checkpoints"]["random:tiny"]
    assert found["sections"]["batch"]["status"] == "passed" and found["passed"]
    assert found["batch"]["torch"]["exact"]["equal"] == 9
    assert "batch, torch, wide margins: 9 of 9 frames fp32's" in out and "batch, codec:" in out
    _, row = parity_rows(document, "")
    assert row["kernel"] == "batch, torch" and row["passed"] and row["frames equal (wide margins)"] == "9 of 9"


@pytest.mark.parametrize(
    "name", [pytest.param("random:tiny", marks=GPU), pytest.param("random:tiny-projected", marks=GPU)]
)
def test_the_batched_frames_errors_are_upstreams_with_and_without_one_order_of_sums(name):
    open_checkpoint(name), open_checkpoint(name + ":margin")
    scope = BatchScope((8, 64), frames=5, exact=12, contexts=(16, 63, 700))
    found = batch_parity_of(name, scope, "megakernel", "cuda")
    assert found["passed"], {k: v for k, v in found.items() if k != "codec"}
    for mode in ("deterministic", "cublas"):
        assert found[mode]["exact"]["equal"] == 12 * 72
        assert min(found[mode]["forced"]["prompts_cut"], found[mode]["forced"]["prefixes_kept"]) > 0
    assert found["codec"]["full"]["snr_db"] > 80 and found["codec"]["fast"]["snr_db"] > 50
