"""The paths of older and smaller cards, as PTX on the card at hand: their blocks and shared memory, the same codes.

With $MKTTS_CARDS=outputs/reference/h100/architectures.json every case that ran is put into that record."""

import os
from functools import cache
from pathlib import Path

import pytest
import torch
from other_cards import CARDS_OF_1P7B, CASES, FRAMES, MODELS, Model, case_of, record_case

from mktts.kernel.grid import choose_shape

pytestmark = pytest.mark.gpu
model_of = cache(Model.make)  # the fp32 run is the slowest part


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "card"),
    [
        pytest.param(name, card, id=f"{name}-{card}")
        for name in MODELS
        for card in CASES
        if name != "1.7b" or card in CARDS_OF_1P7B
    ],
)
def test_another_cards_code_and_grid_give_the_oracles_codes(name, card):
    model, chosen = model_of(name), CASES[card]
    blocks = choose_shape(model.config, chosen.multiprocessors).blocks
    if blocks > torch.cuda.get_device_properties().multi_processor_count:
        pytest.skip(f"needs {blocks} multiprocessors")
    if path := os.environ.get("MKTTS_CARDS"):
        record_case(Path(path), name, card, {"equal": False, "error": "it failed, or did not end"})
    found = case_of(model, chosen)
    if path:
        record_case(Path(path), name, card, found)
    assert found["equal"] and found["frames"] == FRAMES, found
    assert found["error_ratio"] <= 1.25, found
    assert found["blocks"] <= chosen.multiprocessors and found["shared_bytes"] <= chosen.shared_bytes
