"""The trace's document: medians that are known, and a file that stays small."""

import json

import numpy as np
import pytest
from fakes import FakeBackend
from traces import GHZ, STARVED_US, TOOK_US, document_of, launch_of, launches_of

from mktts.cli import main
from mktts.kernel.grid import choose_shape
from mktts.kernel.trace import frame_points
from mktts.measure import trace
from mktts.measure.trace import BUILDS, document, record

LAYERS = (4, 2)


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
