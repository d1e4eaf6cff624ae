"""The models and errors by which other cards' code is judged, and the kernel's fingerprint, without a card."""

import shutil

import other_cards as cards
import pytest
import torch
from other_cards import Model, run

from mktts.kernel.build import CSRC, fingerprint
from mktts.model.oracle import TorchBackend


@pytest.fixture(scope="module")
def model():
    return Model.make("small", "cpu")


def test_the_small_voices_shapes_have_margins_wider_than_bf16s_rounding(model):
    assert model.codes.shape == (cards.FRAMES, 16) and len(model.codes[:, 0].unique()) > cards.FRAMES // 2
    codes, steps_ms = run(TorchBackend(model.config, model.tensors, "cpu", torch.bfloat16), model.prompt)
    assert torch.equal(codes, model.codes) and len(steps_ms) == cards.FRAMES
    assert 1e-4 < model.bf16_error < 0.05


def test_rows_in_the_wrong_place_show_in_the_error_where_margins_hide_them(model):
    name = "talker.model.layers.2.self_attn.o_proj.weight"
    rows = model.tensors[name].roll(64, 0)  # as if sums went to other owners
    wrong = TorchBackend(model.config, model.tensors | {name: rows}, "cpu", torch.bfloat16)
    assert torch.equal(run(wrong, model.prompt, cards.FORCED_FRAMES)[0], model.codes[: cards.FORCED_FRAMES])
    assert cards.error_of(cards.observed(wrong, model.prompt), model.exact) > 1.5 * model.bf16_error


def test_a_kernels_fingerprint_leaves_out_comments_alone(tmp_path):
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    before, ring = fingerprint(), csrc / "ring.cuh"
    ring.write_text("// More words.\n" + ring.read_text())
    assert fingerprint(csrc) == before
    ring.write_text(ring.read_text().replace("copies < RING", "copies <= RING"))
    assert fingerprint(csrc) != before
