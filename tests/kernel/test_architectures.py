"""The paths of older and smaller cards, as PTX on the card at hand: their blocks and shared memory, the same codes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from mktts.kernel.grid import choose_shape
from mktts.measure.cards import CARDS_OF_1P7B, CASES, FRAMES, MODELS, Model, case_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
model_of = cache(Model.make)  # the fp32 run is the slowest part


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "card"),
    [
        pytest.param(name, case, id=f"{name}-{card}")
        for name in MODELS
        for card, case in CASES.items()
        if name != "1.7b" or card in CARDS_OF_1P7B
    ],
)
def test_another_cards_code_and_grid_give_the_oracles_codes(name, card):
    model = model_of(name)
    blocks = choose_shape(model.config, card.multiprocessors).blocks
    if blocks > torch.cuda.get_device_properties().multi_processor_count:
        pytest.skip(f"needs {blocks} multiprocessors")
    found = case_of(model, card)
    assert found["equal"] and found["frames"] == FRAMES, found
    assert found["error_ratio"] <= 1.25, found
    assert found["blocks"] <= card.multiprocessors and found["shared_bytes"] <= card.shared_bytes
