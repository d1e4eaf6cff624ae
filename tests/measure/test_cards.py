"""`cards` without a card: its models, its rows, and what it says where the kernel cannot run."""

from __future__ import annotations

import json

import pytest
import torch

from mktts.kernel.card import Card
from mktts.measure import cards
from mktts.measure.cards import CASES, Model, run
from mktts.model.oracle import TorchBackend


@pytest.fixture(scope="module")
def model():
    return Model.make("small", "cpu")


def test_the_small_voices_shapes_have_margins_wider_than_bf16s_rounding(model):
    assert model.codes.shape == (cards.FRAMES, 16) and len(model.codes[:, 0].unique()) > cards.FRAMES // 2
    found = run(TorchBackend(model.config, model.tensors, "cpu", torch.bfloat16), model.prompt)
    assert torch.equal(found.codes, model.codes) and len(found.steps_ms) == cards.FRAMES
    assert 1e-4 < model.bf16_error < 0.05


def test_rows_in_the_wrong_place_show_in_the_error_where_margins_hide_them(model):
    name = "talker.model.layers.2.self_attn.o_proj.weight"
    rows = model.tensors[name].roll(64, 0)  # as if sums went to other owners
    wrong = TorchBackend(model.config, model.tensors | {name: rows}, "cpu", torch.bfloat16)
    assert torch.equal(run(wrong, model.prompt, cards.FORCED_FRAMES).codes, model.codes[: cards.FORCED_FRAMES])
    assert cards.error_of(cards._observed(wrong, model.prompt), model.exact) > 1.5 * model.bf16_error


def test_every_case_is_a_card_that_a_grid_fits():
    assert {count for _, count in CASES.values()} == {16, 24, 46, 58, 84, 108, 128, 132}
    assert set(cards.CARDS_OF_1P7B) <= set(CASES)
    assert {arch for arch, _ in CASES.values()} == {"compute_80", "compute_86", "compute_89"}
    assert Card.like("compute_86", 84).shared_bytes == 99 * 1024


def test_the_document_has_a_row_a_case_and_the_status_says_whether_all_were_equal(model, monkeypatch, tmp_path, capsys):
    def case_of(model: Model, card: Card) -> dict:
        if card.multiprocessors == 24:
            raise RuntimeError("no such thing")
        same = {"arch": card.arch, "multiprocessors": card.multiprocessors, "blocks": 16, "shared_bytes": 1}
        return {**same, "equal": True, "frames": cards.FRAMES, "error_ratio": 1.0, "frame_ms": 2.0}

    monkeypatch.setattr(cards, "kernel_missing", lambda: None)
    monkeypatch.setattr(cards, "card_of", lambda device: Card.like("sm_90a", 114))
    monkeypatch.setattr(cards, "head", lambda device: {"device": "a card", "revision": "abc"})
    monkeypatch.setattr(Model, "make", lambda name: model)
    monkeypatch.setattr(cards, "case_of", case_of)
    output = tmp_path / "cards.json"
    arguments = cards.argparse.Namespace(models="small", output=output)
    assert cards.main(arguments) == 1
    document = json.loads(output.read_text())
    rows = document["cases"]
    assert [row["multiprocessors"] for row in rows] == [114, 16, 24, 46, 58, 84, 108]  # 128 do not fit this card
    assert [row["equal"] for row in rows] == [True, True, False, True, True, True, True]
    assert {row["revision"] for row in rows} == {"abc"}
    assert "no such thing" in rows[2]["error"] and "no such thing" in capsys.readouterr().out
    monkeypatch.setattr(cards, "CASES", {})
    assert cards.main(arguments) == 0


def test_an_unknown_model_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(cards, "kernel_missing", lambda: None)
    monkeypatch.setattr(cards, "card_of", lambda device: Card.like("sm_90a", 132))
    with pytest.raises(cards.MetricsError, match="small, tiny-projected, 1.7b, got huge"):
        cards.main(cards.argparse.Namespace(models="huge", output=tmp_path / "cards.json"))
