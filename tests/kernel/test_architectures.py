"""The models and errors by which other cards' code is judged; on a GPU the paths of older and smaller cards, as PTX on
the card at hand: their blocks and shared memory, the same codes.

With $MKTTS_CARDS=outputs/reference/h100/architectures.json every case that ran is put into that record."""

import os
from functools import cache
from pathlib import Path

import other_cards as cards
import pytest
import torch
from other_cards import CASES, FRAMES, Model, case_of, record_case, run

from mktts.kernel.grid import choose_shape
from mktts.measure.parity.kernel import KernelUnderTest
from mktts.model.oracle import TorchBackend

model_of = cache(Model.make)  # the fp32 run is the slowest part


def test_the_small_voices_shapes_have_margins_wider_than_bf16s_rounding_that_hide_rows_in_the_wrong_place():
    """Which show in the error."""
    model = Model.make("small", "cpu")
    assert model.codes.shape == (FRAMES, 16) and len(model.codes[:, 0].unique()) > FRAMES // 2
    codes, steps_ms = run(model.oracles[0], model.prompt)
    assert torch.equal(codes, model.codes) and len(steps_ms) == FRAMES
    assert 1e-4 < cards.errors_of(model, KernelUnderTest(model.oracles[0]).frames(model.first))[1] < 0.05
    name = "talker.model.layers.2.self_attn.o_proj.weight"
    rows = model.tensors[name].roll(64, 0)  # as if sums went to other owners
    wrong = TorchBackend(model.config, model.tensors | {name: rows}, "cpu", torch.bfloat16)
    assert torch.equal(run(wrong, model.prompt, cards.FORCED_FRAMES)[0], model.codes[: cards.FORCED_FRAMES])
    assert cards.error_ratio(model, KernelUnderTest(wrong).frames(model.first)) > 1.5


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("name", "card"),
    [
        pytest.param(name, card, id=f"{name}-{card}")
        for name in cards.MODELS
        for card in CASES
        if name != "1.7b" or card in cards.CARDS_OF_1P7B
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
